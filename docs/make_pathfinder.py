"""Plot docs/images/pathfinder.png: images of the task by contour length and class."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from regard.tasks import create_task
from regard.tasks.pixels import tokens_to_image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTOURS, EACH = (6, 9, 14), 3
PATH = Path(__file__).parent / "images" / "pathfinder.png"


def main() -> None:
    figure, axes = plt.subplots(len(CONTOURS), 2 * EACH, figsize=(12, 6.4), layout="constrained")
    for row, contour in zip(axes, CONTOURS, strict=True):
        task = create_task("pathfinder", contour=contour)
        examples = [task.example("train", index) for index in range(40)]
        for label in (0, 1):
            shown = [each for each in examples if int(each.targets["labels"]) == label][:EACH]
            for axis, example in zip(row[label * EACH :], shown, strict=False):
                pixels = tokens_to_image(example.inputs["x"].numpy())
                axis.imshow(pixels, cmap="gray", vmin=0, vmax=255)
                axis.set_title(f"contour={contour}, class {label}", fontsize=9)
                axis.set_axis_off()
    figure.savefig(PATH, dpi=80)


if __name__ == "__main__":
    main()
