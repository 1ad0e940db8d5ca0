"""Videos of moving digits or shapes: how does the object move, and what is the next frame?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.config import (
    SegmentationHeadConfig,
    SequenceClassificationHeadConfig,
    VideoInput,
)
from regard.models.losses import mse_loss
from regard.tasks.base import (
    LABELS,
    Batch,
    Example,
    ModelNeeds,
    Task,
    check_index,
    example_rng,
    with_prediction,
)
from regard.tasks.baselines import CONSTANT, Baseline, constant, linear_classifier
from regard.tasks.dataset_files import BUILT_IN
from regard.tasks.example_source import SIZES
from regard.tasks.generated_images import contact_sheet
from regard.tasks.metrics import Accuracy, MacroF1, MeanMetric
from regard.tasks.processors import Prediction
from regard.tasks.rendering import RenderedImage
from regard.tasks.scenes import SceneSource, crop_and_resize

WHITE = 255
HALF = 127.5  # of the gray levels: 0..255 -> -1..1
MOMENTS, LAST_FRAME = "moments of brightness", "last frame"
MOMENT_VIDEOS = 600  # training videos of that baseline
MOTIONS: dict[str, tuple[float, float, float, float]] = {  # right, down, growth, turn per frame
    "still": (0, 0, 0, 0),
    "right": (1, 0, 0, 0),
    "left": (-1, 0, 0, 0),
    "down": (0, 1, 0, 0),
    "up": (0, -1, 0, 0),
    "grow": (0, 0, 1, 0),
    "shrink": (0, 0, -1, 0),
    "turn left": (0, 0, 0, -1),
    "turn right": (0, 0, 0, 1),
}
ROUND = ("disc", "ring")  # shapes that look the same when they turn
OBJECT_SIZE = (0.3, 0.45)  # of the moving object, as a share of the side
GROWTH, TURN = 0.08, 0.25  # per frame: share of the size, radians


class Video(NamedTuple):
    """Frames (t, side, side) of uint8, and the number of the motion in `MOTIONS`."""

    frames: np.ndarray
    motion: int


class PSNR(MeanMetric):
    """Peak signal-to-noise ratio of predicted pixels, the mean over frames, in decibels."""

    name, unit, format = "psnr", "dB", ".2f"

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`: pixels from -1 to 1."""
        target = batch.targets[LABELS].to(output.device)
        error = (output.float().clamp(-1, 1) - target).square().flatten(1).mean(1) / 4
        decibels = -10 * error.clamp(min=1e-10).log10().double().cpu()
        return torch.stack((decibels, torch.ones_like(decibels)), -1)


class VideoTask(Task):
    """Videos of one moving object among still ones, made on the spot.

    Args:
        predict: "motion": classify the motion of the object: still, four directions, growing,
            shrinking, turning left or right. "frame": predict the next frame.
        data: "built-in": shapes; "mnist": digits; see `regard.tasks.scenes`.
        frames: Number of frames that the model sees.
        side: Rows and columns of a frame.
        patch: Side of a tubelet in pixels; it must divide `side`.
        tubelet: Frames of a tubelet; it must divide `frames`.
        noise: Standard deviation of the noise of each frame, where white is 1.
        still: Largest number of still objects.
        seed: Seed of the videos.
        examples: Size of the training split. None: endless.
    """

    def __init__(
        self,
        predict: str = "motion",
        *,
        data: str = BUILT_IN,
        frames: int = 8,
        side: int = 32,
        patch: int = 8,
        tubelet: int = 1,
        noise: float = 0.1,
        still: int = 1,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_choice("predict", predict, ("motion", "frame"))
        check_int(2, frames=frames)
        check_int(16, side=side)
        check_int(0, still=still, seed=seed)
        self.task, self.data, self.frames, self.side = predict, data, frames, side
        self.source = VideoInput(
            frames=frames, height=side, width=side, patch_size=patch, tubelet=tubelet
        )
        self.objects = SceneSource(
            data, side=side, objects=(1, max(still, 1)), scale=(0.2, 0.3), noise=0.0
        )
        self.noise, self.still, self.seed = noise, still, seed
        self.sizes = SIZES if examples is None else SIZES | {"train": examples}
        self.labels = tuple(MOTIONS)
        self.metrics = (Accuracy(), MacroF1(len(MOTIONS)))
        if predict == "frame":
            self.metrics = (PSNR(),)

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder of tubelets."""
        head: SequenceClassificationHeadConfig | SegmentationHeadConfig
        head = SequenceClassificationHeadConfig(num_classes=len(MOTIONS), pooling="mean")
        if self.task == "frame":  # the pixels of the patches of the last time
            rows = self.side // self.source.patch_size
            head = SegmentationHeadConfig(
                num_classes=1, rows=rows, columns=rows, patch_size=self.source.patch_size
            )
        return ModelNeeds(kind="encoder", input=self.source, head=head, length=self.source.length)

    def size(self, split: str) -> int:
        """See `Task`."""
        return self.sizes[split]

    def video(self, split: str, index: int) -> Video:
        """A video with one frame more than the model sees."""
        check_index(split, index, self.size(split))
        rng = example_rng(self.seed, split, index)
        motion = int(rng.integers(len(MOTIONS)))
        background = np.zeros((self.side, self.side))
        for _ in range(int(rng.integers(self.still + 1))):
            brightness, _ = self.objects.draw_object(rng, split)
            sprite = crop_and_resize(brightness, round(0.25 * self.side))
            top, left = (int(rng.integers(self.side - n + 1)) for n in sprite.shape)
            place = np.s_[top : top + sprite.shape[0], left : left + sprite.shape[1]]
            background[place] = np.maximum(background[place], sprite)
        brightness, label = self.objects.draw_object(rng, split)
        while self.objects.labels[label] in ROUND:
            brightness, label = self.objects.draw_object(rng, split)
        frames = move_object(brightness, list(MOTIONS.values())[motion], self.frames + 1, self, rng)
        frames = np.maximum(frames, background)
        frames = frames + self.noise * rng.standard_normal(frames.shape)
        return Video(np.rint(WHITE * frames.clip(0, 1)).astype(np.uint8), motion)

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        video = self.video(split, index)
        frames = torch.as_tensor(video.frames).float()[:, None] / HALF - 1  # a gray channel
        target = torch.tensor(video.motion) if self.task == "motion" else frames[-1]
        return Example({"x": frames[:-1]}, {LABELS: target})

    def loss(self, output: Any, batch: Batch, *, label_smoothing: float = 0.0) -> Tensor:
        """See `Task`: the cross-entropy, or the mean squared error of the pixels."""
        if self.task == "motion":
            return super().loss(output, batch, label_smoothing=label_smoothing)
        if label_smoothing:
            raise ValueError("label_smoothing applies to classes, and this task predicts pixels.")
        return mse_loss(output.float(), batch.targets[LABELS])

    def predict(self, model: Any, batch: Batch) -> list[Prediction]:
        """See `Task`: the motion, or the gray levels of the next frame."""
        output = model(**batch.inputs).detach().cpu()
        if self.task == "motion":
            return [{"motion": self.labels[each]} for each in output.argmax(-1).tolist()]
        levels = ((output.clamp(-1, 1) + 1) * HALF).round().to(torch.uint8)
        return [{"frame": each.tolist()} for each in levels[:, 0]]

    def baselines(self) -> Mapping[str, Baseline]:
        """See `Task`."""
        if self.task == "motion":
            moments = partial(_moments_score, self)
            return {CONSTANT: partial(constant, self), MOMENTS: moments}
        return {LAST_FRAME: partial(_last_frame_score, self)}

    def render(self, example: Example, prediction: Prediction | None = None) -> RenderedImage:
        """The frames side by side; of the next frame also the prediction."""
        frames = ((example.inputs["x"][:, 0] + 1) * HALF).round().to(torch.uint8).numpy()
        if self.task == "motion":
            caption = with_prediction(self.labels[int(example.targets[LABELS])], prediction).text
            return RenderedImage(contact_sheet(frames, len(frames)), caption)
        target = ((example.targets[LABELS] + 1) * HALF).round().to(torch.uint8).numpy()
        shown, caption = [*frames, target[0]], "the last is the next frame"
        if prediction is not None:
            shown.append(np.array(prediction["frame"], np.uint8))
            caption = "the last two are the next frame and its prediction"
        return RenderedImage(contact_sheet(np.stack(shown), len(shown)), caption)


def move_object(
    brightness: np.ndarray,
    motion: tuple[float, float, float, float],
    count: int,
    task: VideoTask,
    rng: np.random.Generator,
) -> np.ndarray:
    """Frames (count, side, side) of an object that moves, grows or turns evenly.

    It stays inside the image: the place and the speed are drawn so that it need not bounce.
    """
    right, down, growth, turn = motion
    side = task.side
    size = side * rng.uniform(*OBJECT_SIZE)
    if growth > 0:
        size *= (1 + GROWTH) ** (1 - count)  # so that it is not too large at the end
    steps = np.arange(count)
    sizes = size * (1 + GROWTH * growth) ** steps
    margin = float(sizes.max()) / 2
    room = max(side - 2 * margin, 1.0)
    speed = rng.uniform(0.6, 1.0) * room / count
    centres = []
    for velocity in (right * speed, down * speed):
        travel = velocity * (count - 1)
        low, high = margin + max(-travel, 0), side - margin - max(travel, 0)
        centres.append(rng.uniform(low, max(high, low)) + velocity * steps)
    angles = TURN * turn * steps + rng.uniform(-0.3, 0.3)
    sprite = torch.as_tensor(np.ascontiguousarray(crop_and_resize(brightness, 32)))
    height, width = sprite.shape
    longest = max(height, width)
    padded = F.pad(sprite, _centre_padding(width, longest) + _centre_padding(height, longest))
    axis = (torch.arange(side) + 0.5).double()
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    grids = []
    for cx, cy, extent, angle in zip(*centres, sizes, angles, strict=True):
        dx, dy = (x - cx) * 2 / extent, (y - cy) * 2 / extent
        cos, sin = math.cos(angle), math.sin(angle)
        grids.append(torch.stack((cos * dx + sin * dy, cos * dy - sin * dx), -1))
    images = padded.double().expand(count, 1, -1, -1)
    frames = F.grid_sample(images, torch.stack(grids), align_corners=False)[:, 0]
    return np.asarray(frames.numpy())


def _centre_padding(length: int, wanted: int) -> tuple[int, int]:
    before = (wanted - length) // 2
    return before, wanted - length - before


# ---------------------------------------------------------------------------------------- baselines
def _moments_score(task: VideoTask, test: Sequence[int]) -> Tensor:
    """Statistics of `Accuracy` of logistic regression on the mass, centre and spread of the
    brightness of each frame, and how they change from the first frame."""

    def features(split: str, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        videos = [task.video(split, index) for index in indices]
        frames = np.stack([video.frames[:-1] for video in videos]) / WHITE
        weight = np.maximum(frames - 3 * task.noise, 0) + 1e-6
        axis = np.arange(task.side)
        mass = weight.sum((2, 3))
        y, x = weight.sum(3) @ axis / mass, weight.sum(2) @ axis / mass
        yy = (weight.sum(3) @ axis**2) / mass - y**2
        xx = (weight.sum(2) @ axis**2) / mass - x**2
        xy = np.einsum("btij,i,j->bt", weight, axis, axis) / mass - x * y
        values = np.stack((mass, y, x, yy, xx, xy), -1)
        values = np.concatenate((values[:, :1], values[:, 1:] - values[:, :1]), 1)
        return values.reshape(len(videos), -1), np.array([video.motion for video in videos])

    train = task.sample("train", MOMENT_VIDEOS).tolist()
    return linear_classifier(features("train", train), features("test", list(test)))


def _last_frame_score(task: VideoTask, test: Sequence[int]) -> Tensor:
    """Statistics of `PSNR` of the last frame as the next one."""
    parts = []
    for index in test:
        batch = task.batch("test", [index])
        x = batch.inputs["x"]
        assert x is not None
        parts.append(task.metric.update(x[:, -1], batch, []))
    return task.metric.merge(parts)
