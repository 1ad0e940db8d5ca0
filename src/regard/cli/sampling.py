"""The command `regard sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from regard.cli.device_options import DeviceOption, check_device
from regard.cli.output import echo, print_json, user_errors
from regard.cli.plugins import PluginOption
from regard.tasks.generated_images import ImageGenerator, save_images
from regard.train.inference import load_run

MAX_COUNT = 4096


def sample(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run that makes images.")],
    out: Annotated[
        Path,
        typer.Option(help="A .png file with all images, or a .gif file of how they came about."),
    ] = Path("samples.png"),
    count: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Number of images.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the images.")] = 0,
    device: DeviceOption = "auto",
    plugin: PluginOption = [],  # noqa: B006
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Draw images from a model, as a sheet or as an animation.

    Example: regard sample runs/digits --count 25 --out digits.gif
    """

    with user_errors():
        run = load_run(
            folder,
            device=check_device(device, "float32"),
            plugins=plugin,
            on_warning=lambda warning: echo(f"warning: {warning}", err=True),
        )
        if not isinstance(run.processor, ImageGenerator):
            raise ValueError(
                f"A run of the task {run.spec.task.name!r} makes no images. Tasks that do: draw."
            )
        generator = torch.Generator().manual_seed(seed)
        generated = run.processor.generate_images(run.model, count, generator)
        save_images(out, generated)
    height, width = generated.frames.shape[2:4]
    if json:
        print_json({"file": str(out), "images": count, "height": height, "width": width})
    else:
        echo(f"saved {count} images of {height} × {width} pixels to {out}")
