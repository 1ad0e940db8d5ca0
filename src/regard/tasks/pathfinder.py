"""Pathfinder: are the two dots on the same dashed path?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from regard.errors import check_int
from regard.tasks.base import Example
from regard.tasks.example_source import GeneratedExamples, SourceTask
from regard.tasks.pathfinder_paths import PathGeometry, PathScene, draw_scene
from regard.tasks.pixels import GREYS, as_grey, as_image, as_pixels, in_blocks


class PathfinderPreset(NamedTuple):
    """What fits an image of a size: the geometry, and how many distractors."""

    geometry: PathGeometry
    distractors: int


# As Long Range Arena has them (lra_benchmarks/data/pathfinder.py), where a gap is twice the margin; 16 is for quick looks.
PRESETS = {
    16: PathfinderPreset(
        PathGeometry(dash=2, gap=2, apart=5, radius=1.0, thick=0.5, straight=1.0), 1
    ),
    32: PathfinderPreset(
        PathGeometry(dash=2, gap=2, apart=7, radius=1.5, thick=0.5, straight=1.0), 5
    ),
    64: PathfinderPreset(
        PathGeometry(dash=5, gap=2, apart=12, radius=2.5, thick=1.0, straight=1.8), 5
    ),
    128: PathfinderPreset(
        PathGeometry(dash=5, gap=4, apart=20, radius=3.0, thick=1.5, straight=1.8), 8
    ),
    256: PathfinderPreset(
        PathGeometry(dash=5, gap=6, apart=27, radius=5.0, thick=2.0, straight=1.8), 7
    ),
}


class Pathfinder(SourceTask):
    """An image with two long dashed paths, shorter ones that distract, and two dots: class 1 if the dots are the two ends of
    one path, class 0 if they are ends of both (Linsley et al. 2018, arXiv 1805.08315; as in Long Range Arena, Tay et al. 2020,
    arXiv 2011.04006).  Paths never cross, and dashes of different paths are further apart than those that follow each other.

    side         of the image; the sequence has side² tokens of 256 greys.  128 is Path-X.  Other sizes than those of SETTINGS
                 have the dashes of the next smaller one.
    contour      dashes of a long path: 6, 9 and 14 are the published variants, of which Long Range Arena takes 14
    distractors  at most so many, each a third as long, as far as there is room; None: as Long Range Arena
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
        super().__init__(
            GeneratedExamples(self.draw, seed=seed, examples=examples),
            vocab_size=1 + GREYS,
            classes=2,
            length=side * side,
        )
        self.geometry, usual = PRESETS[max(known for known in PRESETS if known <= side)]
        self.side, self.contour, self.distractors = (
            side,
            contour,
            usual if distractors is None else distractors,
        )
        check_int(0, distractors=self.distractors)
        taken = 2 * contour * self.geometry.gap * (self.geometry.dash + self.geometry.gap)
        if taken > side**2:
            raise ValueError(
                f"two paths of {contour} dashes take up {taken:.0f} pixels, and {side} × {side} are {side**2}"
            )

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, int]:
        """Pixels (side²), and the class."""
        scene = self.scene(random)
        return as_pixels(as_grey(paint_scene(scene, self.side, self.geometry))), scene.label

    def scene(self, random: np.random.Generator) -> PathScene:
        """The paths and dots of an image."""
        short = max(1, self.contour // 3)
        lengths = (self.contour, self.contour, *[short] * self.distractors)
        return draw_scene(random, self.side, self.geometry, lengths)

    def show(self, example: Example) -> str:
        """The image in block characters, and whether the dots are connected."""
        said = "the dots are on one path" if int(example.target) else "the dots are on two paths"
        return f"{in_blocks(as_image(example.tokens.numpy()))}\n{said}"


# ---------------------------------------------------------------------------------------------- painting
def paint_scene(scene: PathScene, side: int, geometry: PathGeometry) -> np.ndarray:
    """Brightness 0..1 of each pixel: the greatest of all dashes and dots, with soft edges a pixel wide."""
    image = np.zeros(side * side)
    _paint(image, side, np.concatenate(scene.paths), geometry.thick / 2)
    _paint(image, side, np.concatenate((scene.dots, scene.dots), 1), geometry.radius)
    return image.reshape(side, side)


def _paint(image: np.ndarray, side: int, segments: np.ndarray, radius: float) -> None:
    """Put segments (k 4), y0 x0 y1 x1, with round ends into an image; each touches only the pixels of its own window."""
    first, last = segments[:, :2], segments[:, 2:]
    reach = int(np.ceil(np.abs(last - first).max() / 2 + radius + 1))
    cells = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2, indexing="ij"), -1).reshape(
        -1, 2
    )
    at = np.rint((first + last) / 2 - 0.5).astype(int)[:, None] + cells  # (k cells 2)
    along, across = (last - first)[:, None], at + 0.5 - first[:, None]
    share = np.clip((across * along).sum(-1) / np.maximum((along**2).sum(-1), 1e-9), 0, 1)
    distance = np.sqrt(((across - share[..., None] * along) ** 2).sum(-1))
    inside = ((at >= 0) & (at < side)).all(-1)
    bright = np.clip(radius + 0.5 - distance, 0, 1)
    np.maximum.at(image, (at[..., 0] * side + at[..., 1])[inside], bright[inside])
