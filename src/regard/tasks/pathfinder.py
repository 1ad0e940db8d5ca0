"""Pathfinder: are the two dots on the same dashed path?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regard.errors import check_int
from regard.tasks.base import Example
from regard.tasks.example_source import GeneratedExamples, SourceTask
from regard.tasks.pathfinder_paths import PathGeometry, PathScene, draw_scene
from regard.tasks.pixels import VOCAB_SIZE, image_to_tokens, quantize, render_pixels
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered


class PathfinderPreset(NamedTuple):
    """The geometry and the number of distractors for an image size."""

    geometry: PathGeometry
    distractors: int


# As in Long Range Arena (lra_benchmarks/data/pathfinder.py), whose margin is half a gap; 16 is for
# quick experiments.
PRESETS = {
    16: PathfinderPreset(PathGeometry(2, 2, 5, radius=1.0, thickness=0.5, straightness=1.0), 1),
    32: PathfinderPreset(PathGeometry(2, 2, 7, radius=1.5, thickness=0.5, straightness=1.0), 5),
    64: PathfinderPreset(PathGeometry(5, 2, 12, radius=2.5, thickness=1.0, straightness=1.8), 5),
    128: PathfinderPreset(PathGeometry(5, 4, 20, radius=3.0, thickness=1.5, straightness=1.8), 8),
    256: PathfinderPreset(PathGeometry(5, 6, 27, radius=5.0, thickness=2.0, straightness=1.8), 7),
}


class Pathfinder(SourceTask):
    """An image with two long dashed paths, shorter distractors and two dots: class 1 if the dots
    are the two ends of one path, class 0 if they are ends of both (Linsley et al. 2018, arXiv
    1805.08315; Long Range Arena, Tay et al. 2020, arXiv 2011.04006). Paths never cross, and dashes
    of different paths are further apart than successive dashes.

    Args:
        side: Side length of the image; 128 is Path-X. The dashes are those of the largest preset
            that is not larger.
        contour: Number of dashes of a long path. Published variants have 6, 9 and 14; Long Range
            Arena uses 14.
        distractors: Maximum number of paths of a third of the length. None: as in Long Range Arena.
        seed: Seed of the examples.
        examples: Size of the training split. None: endless.
    """

    def __init__(
        self,
        side: int = 32,
        *,
        contour: int = 9,
        distractors: int | None = None,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(min(PRESETS), side=side)
        check_int(2, contour=contour)
        source = GeneratedExamples(self.draw, seed=seed, examples=examples)
        super().__init__(source, vocab_size=VOCAB_SIZE, classes=2, length=side * side)
        self.geometry, default = PRESETS[max(size for size in PRESETS if size <= side)]
        self.side, self.contour = side, contour
        self.distractors = default if distractors is None else distractors
        check_int(0, distractors=self.distractors)
        area = 2 * contour * self.geometry.gap * (self.geometry.dash + self.geometry.gap)
        if area > side**2:
            raise ValueError(
                f"Two paths of {contour} dashes take up {area:.0f} pixels, but the image has "
                f"{side} × {side} = {side**2}."
            )

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Generate the pixels (side²) and the class."""
        scene = self.draw_scene(rng)
        return image_to_tokens(quantize(paint_scene(scene, self.side, self.geometry))), scene.label

    def draw_scene(self, rng: np.random.Generator) -> PathScene:
        """Generate the paths and dots of an image."""
        distractors = [max(1, self.contour // 3)] * self.distractors
        return draw_scene(rng, self.side, self.geometry, (self.contour, self.contour, *distractors))

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The image in block characters, and whether the dots are connected."""
        answer = "one path" if int(example.targets["labels"]) else "two paths"
        return render_pixels(example, f"the dots are on {answer}", prediction)


def paint_scene(scene: PathScene, side: int, geometry: PathGeometry) -> np.ndarray:
    """Brightness 0..1 (side, side) of the dashes and dots, with soft edges one pixel wide."""
    image = np.zeros(side * side)
    dots = np.concatenate((scene.dots, scene.dots), 1)
    _paint(image, side, np.concatenate(scene.paths), geometry.thickness / 2)
    _paint(image, side, dots, geometry.radius)
    return image.reshape(side, side)


def _paint(image: np.ndarray, side: int, segments: np.ndarray, radius: float) -> None:
    """Paint segments (k, 4), y0 x0 y1 x1, with round ends into an image."""
    first, last = segments[:, :2], segments[:, 2:]
    reach = int(np.ceil(np.abs(last - first).max() / 2 + radius + 1))
    offsets = np.arange(-reach, reach + 1)
    window = np.stack(np.meshgrid(offsets, offsets, indexing="ij"), -1).reshape(-1, 2)
    pixels = np.rint((first + last) / 2 - 0.5).astype(int)[:, None] + window  # (k, window, 2)
    direction, to_pixel = (last - first)[:, None], pixels + 0.5 - first[:, None]
    squared_length = np.maximum((direction**2).sum(-1), 1e-9)
    along = np.clip((to_pixel * direction).sum(-1) / squared_length, 0, 1)
    distance = np.sqrt(((to_pixel - along[..., None] * direction) ** 2).sum(-1))
    inside = ((pixels >= 0) & (pixels < side)).all(-1)
    brightness = np.clip(radius + 0.5 - distance, 0, 1)
    np.maximum.at(image, (pixels[..., 0] * side + pixels[..., 1])[inside], brightness[inside])
