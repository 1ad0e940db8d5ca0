"""Classification of WAV files in folders, whose names are the classes."""

from __future__ import annotations

import math
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_int
from regard.models.config import VectorInput
from regard.tasks.base import LABELS, SPLITS, Example, ModelNeeds, with_prediction
from regard.tasks.baselines import Baseline, linear_classifier
from regard.tasks.file_classification import FileClassification
from regard.tasks.processors import Prediction, Processor, predict_classes
from regard.tasks.rendering import RenderedSound
from regard.tasks.row_splits import UnusableRow

SUFFIXES = (".wav", ".wave")
WINDOW, HOP = 0.025, 0.010  # seconds of a frame, and from one to the next
MAX_LENGTH = 1024  # frames, if the length is taken from the data
LINEAR_SOUNDS = 5000  # training sounds of the linear baseline
FLOOR = 1e-6  # added to the energies, which are 0 in digital silence
LINEAR = "linear on mean and deviation of the frames"
FILE = "file"  # a target that the loss does not read: the number of the file, to play it


class Sound(NamedTuple):
    """A wave (n) between -1 and 1, and its sampling rate in Hz."""

    wave: np.ndarray
    rate: int


def read_wav(path: str | Path) -> Sound:
    """A WAV file of 8, 16, 24 or 32 bits; the mean of its channels. `UnusableRow` if it is none."""
    try:
        with wave.open(str(path), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise UnusableRow(
            f"it is no WAV file of PCM samples ({str(error) or 'it ends early'})."
        ) from None
    if width not in (1, 2, 3, 4) or not rate:
        raise UnusableRow(f"it has {8 * width} bits per sample at {rate} Hz.")
    content = content[: len(content) // (width * channels) * width * channels]
    if width == 1:  # unsigned
        samples = np.frombuffer(content, np.uint8).astype(np.float64) - 128
    elif width == 3:
        parts = np.frombuffer(content, np.uint8).reshape(-1, 3)
        padded = np.concatenate((np.zeros((len(parts), 1), np.uint8), parts), 1)
        samples = padded.copy().view("<i4")[:, 0] / 256.0
    else:
        samples = np.frombuffer(content, f"<i{width}").astype(np.float64)
    if not len(samples):
        raise UnusableRow("it has no samples.")
    return Sound(samples.reshape(-1, channels).mean(1) / 2 ** (8 * width - 1), rate)


def resample(sound: Sound, rate: int) -> np.ndarray:
    """The wave at another rate: its spectrum, cut or padded with zeros."""
    count = max(1, round(len(sound.wave) * rate / sound.rate))
    if count == len(sound.wave):
        return sound.wave
    spectrum = np.fft.rfft(sound.wave)[: count // 2 + 1]
    return np.fft.irfft(spectrum, count) * (count / len(sound.wave))


def mel_filters(mels: int, bins: int, rate: int) -> Tensor:
    """Triangular filters (mels, bins), evenly spaced on the mel scale 2595 log10(1 + f / 700)."""
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, highest, mels + 2) / 2595) - 1)
    frequencies = np.linspace(0, rate / 2, bins)
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (frequencies - left) / (centre - left)
    falling = (right - frequencies) / (right - centre)
    return torch.as_tensor(np.maximum(0, np.minimum(rising, falling)), dtype=torch.float32)


class SoundProcessor(Processor):
    """Sounds for a classifier, as log-mel frames: every 10 ms, of 25 ms.

    Args:
        rate: Sampling rate in Hz to which sounds are resampled.
        mels: Number of mel bands.
        length: Maximum number of frames; longer sounds are cut at the end.
        labels: Names of the classes.
        mean, std: Of each band (mels), over the frames of the training split.
    """

    suffixes = SUFFIXES

    def __init__(
        self,
        rate: int,
        mels: int,
        length: int,
        labels: Sequence[str] = (),
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        check_int(1000, rate=rate)
        check_int(1, mels=mels, length=length)
        self.rate, self.mels, self.length, self.labels = rate, mels, length, tuple(labels)
        self.mean, self.std = (np.asarray(each, dtype=np.float32) for each in (mean, std))
        self.window, self.hop = round(WINDOW * rate), round(HOP * rate)
        self.n_fft = 1 << (self.window - 1).bit_length()
        self.filters = mel_filters(mels, self.n_fft // 2 + 1, rate)
        if not (self.filters.sum(1) > 0).all():
            raise ValueError(
                f"mels={mels} are too many bands for rate={rate}: some would be empty. Use fewer."
            )

    def frames(self, sound: Sound) -> np.ndarray:
        """The log-mel frames (n, mels) of a sound."""
        samples = torch.as_tensor(resample(sound, self.rate), dtype=torch.float32)
        samples = samples[: self.length * self.hop]
        spectrum = torch.stft(
            samples,
            self.n_fft,
            self.hop,
            self.window,
            window=torch.hann_window(self.window),
            center=True,
            pad_mode="constant",
            return_complex=True,
        )
        energies = self.filters @ spectrum.abs() ** 2
        return (energies + FLOOR).log().T[: self.length].numpy()

    def standardize(self, frames: np.ndarray) -> Tensor:
        """Frames (n, mels) with mean 0 and deviation 1 of each band."""
        return torch.as_tensor((frames - self.mean) / self.std)

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: the path of a WAV file."""
        if not isinstance(raw, str | Path):
            raise TypeError(f"Expected the path of a WAV file, not {type(raw).__name__}.")
        try:
            return {"x": self.standardize(self.frames(read_wav(raw)))}
        except UnusableRow as error:
            raise ValueError(f"{raw}: {error}") from None

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the most probable label, and the probabilities of all."""
        return predict_classes(output, self.labels)

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        return {
            "rate": self.rate,
            "mels": self.mels,
            "length": self.length,
            "labels": list(self.labels),
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SoundProcessor:
        """The processor that `to_dict` described."""
        try:
            return cls(
                content["rate"],
                content["mels"],
                content["length"],
                list(map(str, content["labels"])),
                content["mean"],
                content["std"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of sounds: {error!r}") from None


class SoundFolder(FileClassification):
    """Classify sounds from their log-mel frames: WAV files (PCM of 8 to 32 bits) in one sub-folder
    for each class, optionally in folders named train, valid and test.

    Args:
        data: The folder.
        rate: Sampling rate in Hz to which sounds are resampled.
        mels: Number of mel bands of a frame.
        length: Maximum number of frames, of 10 ms each; longer sounds are cut at the end. None:
            those of the longest training sound, at most 1,024.
        missing: What to do with files that cannot be read: "drop" or "error".
        seed: Seed of the splits.
    """

    processor: SoundProcessor

    def __init__(
        self,
        data: str | Path,
        *,
        rate: int = 16_000,
        mels: int = 40,
        length: int | None = None,
        missing: str = "drop",
        seed: int = 0,
    ) -> None:
        reader = SoundProcessor(rate, mels, MAX_LENGTH if length is None else length)

        def load(path: Path) -> np.ndarray:
            return reader.frames(read_wav(path))

        super().__init__(data, suffixes=SUFFIXES, load=load, missing=missing, seed=seed)
        train = self.values["train"]
        longest = int(np.diff(self.files["train"].ends).max())
        mean, std = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
        self.processor = SoundProcessor(
            rate,
            mels,
            length or longest,
            self.labels,
            mean.tolist(),
            np.maximum(std, 1e-3).tolist(),
        )

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder of frames."""
        source = VectorInput(width=self.processor.mels)
        return ModelNeeds(
            kind="encoder", input=source, head=self.head, length=self.processor.length
        )

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        start = sum(self.size(each) for each in SPLITS[: SPLITS.index(split)])
        targets = {
            LABELS: torch.tensor(int(self.files[split].classes[index])),
            FILE: torch.tensor(start + index),
        }
        return Example({"x": self.processor.standardize(self.value(split, index))}, targets)

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), LINEAR: self._linear_score}

    def _linear_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of logistic regression on the mean and the deviation of each band."""

        def features(split: str, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
            frames = [self.value(split, index) for index in indices]
            values = np.stack([np.concatenate((each.mean(0), each.std(0))) for each in frames])
            return values, self.files[split].classes[indices]

        train = self.sample("train", LINEAR_SOUNDS).tolist()
        return linear_classifier(features("train", train), features("test", list(test)))

    def render(self, example: Example, prediction: Prediction | None = None) -> RenderedSound:
        """The sound, and its class."""
        paths = [path for split in SPLITS for path in self.files[split].paths]
        sound = read_wav(paths[int(example.targets[FILE])])
        label = self.labels[int(example.targets[LABELS])]
        return RenderedSound(sound.wave, sound.rate, with_prediction(label, prediction).text)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> SoundProcessor:
        """See `Task`."""
        return SoundProcessor.from_dict(content)
