"""The figure of `regard predict --alignment`: which source word moved which target word."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import numpy as np

from regard.errors import did_you_mean
from regard.models import EncoderDecoder
from regard.tasks.alignment import WordAlignment
from regard.tasks.translation import TextToTextProcessor
from regard.train.inference import TrainedRun

FIGURE_TYPES = (".png", ".svg", ".pdf", ".html")
MAX_ALIGNED = 12  # texts in one figure
INCHES_PER_WORD = 0.32


def check_alignment(run: TrainedRun, path: Path) -> None:
    """Raise an error if the model has no alignment, or there is no way to write the file."""
    if not isinstance(run.processor, TextToTextProcessor):
        raise ValueError(
            f"--alignment is for tasks that write a text for a text, such as translate, not "
            f"{run.spec.task.name!r}."
        )
    if path.suffix.lower() not in FIGURE_TYPES:
        raise ValueError(f"Cannot draw to {path}: {did_you_mean(path.suffix, FIGURE_TYPES)}")
    if not path.parent.is_dir():
        raise ValueError(f"Cannot draw to {path}: there is no folder {path.parent}.")
    if path.suffix.lower() != ".html" and find_spec("matplotlib") is None:
        raise ImportError("--alignment needs the package matplotlib: pip install 'regard[plot]'")
    run.processor.align(cast(EncoderDecoder, run.model), "a", "a")  # refuses a model without a map


def draw_alignments(run: TrainedRun, pairs: Sequence[tuple[str, str]], path: Path) -> None:
    """Draw the alignments of sources and what the model wrote: one below the other, the first of
    them; texts that are empty have none."""
    processor, model = cast(TextToTextProcessor, run.processor), cast(EncoderDecoder, run.model)
    shown = [pair for pair in pairs if all(text.strip() for text in pair)][:MAX_ALIGNED]
    if not shown:
        raise ValueError("There is nothing to align: all texts or their predictions are empty.")
    alignments = [processor.align(model, *pair) for pair in shown]
    if path.suffix.lower() == ".html":
        write_html(alignments, path)
    else:
        plot_alignments(alignments, path)


def write_html(alignments: Sequence[WordAlignment], path: Path) -> None:
    """Write a page with a shaded table for each alignment."""
    from regard.report.markup import join, tag
    from regard.report.renderings import render_html

    title = tag("title", "Alignment")
    body = tag("body", *(render_html(each.render()) for each in alignments))
    head = tag("head", tag("meta", charset="utf-8"), title)
    path.write_text(f"<!doctype html>\n{join(head, body)}\n", encoding="utf-8")


def plot_alignments(alignments: Sequence[WordAlignment], path: Path) -> None:
    """Write a figure with a grey picture for each alignment, as in Bahdanau et al. 2015."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = INCHES_PER_WORD * max(len(each.source) for each in alignments) + 2
    heights = [INCHES_PER_WORD * len(each.target) + 1.5 for each in alignments]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(alignments), height_ratios=heights, squeeze=False)[:, 0]
    for axis, each in zip(axes, alignments, strict=True):
        axis.imshow(np.array(each.weights), cmap="gray", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(each.source)), each.source, rotation=90, parse_math=False)
        axis.set_yticks(range(len(each.target)), each.target, parse_math=False)
        axis.xaxis.tick_top()
    figure.savefig(path, dpi=150)
