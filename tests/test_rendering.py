"""How examples and predictions look in a terminal."""

import math

import numpy as np
import pytest
import torch

from regard.tasks import create_task
from regard.tasks.base import with_prediction
from regard.tasks.rendering import (
    MAX_COLUMNS,
    RenderedCurve,
    RenderedImage,
    RenderedParts,
    RenderedSound,
    RenderedTable,
    RenderedText,
)


def test_text_with_spans():
    """Fails if a span is marked at another place, or text around it is lost."""
    text = "Ada met Grace in Paris."
    assert RenderedText(text).to_text() == text
    spans = [(17, 22, "place"), (0, 3, "name"), (8, 13, "name")]
    assert RenderedText(text, spans).to_text() == "[Ada](name) met [Grace](name) in [Paris](place)."
    assert RenderedText("ab", [(0, 1, "x"), (1, 2, "y")]).to_text() == "[a](x)[b](y)"


def test_overlapping_spans():
    """Fails if a character is shown twice: of overlapping spans the first is marked."""
    spans = [(4, 9, "second"), (0, 6, "first"), (0, 6, "again"), (10, 12, "third")]
    assert RenderedText("abcdefghijklm", spans).to_text() == "[abcdef](first)ghij[kl](third)m"


def test_table():
    """Fails if columns are not aligned, or rows have blanks at the end."""
    table = RenderedTable(("name", "value"), [("a", 1), ("long name", 2.5), ("b", None)])
    lines = table.to_text().split("\n")
    assert lines == ["name       value", "a          1", "long name  2.5", "b          None"]
    assert RenderedTable(("only", "names"), []).to_text() == "only  names"


def test_image():
    """Fails if shades are not those of the pixels, colours are not averaged, or a caption is
    lost."""
    pixels = np.array([[0, 60, 110], [160, 255, 0]], np.uint8)
    assert RenderedImage(pixels, "why").to_text() == "  ░░▒▒\n▓▓██\nwhy"
    colour = np.stack((pixels, pixels, pixels), -1)
    assert RenderedImage(colour).to_text() == "  ░░▒▒\n▓▓██"
    assert RenderedImage(np.array([[[255, 0, 0]]], np.uint8)).to_text() == "░░"


@pytest.mark.parametrize("width", [1, 47, 48, 49, 640, 5000])
def test_wide_images_fit_the_terminal(width):
    """Fails if a line is longer than the terminal, or rows and columns are scaled differently."""
    height = max(1, width // 2)
    lines = RenderedImage(np.full((height, width), 255, np.uint8)).to_text().split("\n")
    assert max(map(len, lines)) <= MAX_COLUMNS and set("".join(lines)) == {"█"}
    assert abs(len(lines) - len(lines[0]) / 4) <= 1  # a pixel is two characters wide
    assert len(lines[0]) >= min(2 * width, MAX_COLUMNS / 2)


def test_images_without_pixels():
    """Fails if an empty image is an error."""
    assert RenderedImage(np.zeros((0, 0), np.uint8), "empty").to_text() == "empty"


def test_curve():
    """Fails if the bars do not rise with the values, or the range is not said."""
    curve = RenderedCurve({"load": [0, 1, 2, 7], "flat": [3.0, 3.0]}, "hours")
    assert curve.to_text() == "load ▁▂▃█ 0 to 7\nflat ▁▁ 3 to 3\nhours"
    long = RenderedCurve({"x": np.arange(10_000)}).to_text()
    assert len(long.split()[1]) <= MAX_COLUMNS


def test_curves_with_gaps_or_without_values():
    """Fails if an empty series is an error, or a missing value is."""
    assert RenderedCurve({"none": []}).to_text() == "none  0 to 0"
    assert RenderedCurve({}).to_text() == ""
    assert RenderedCurve({"gap": [1.0, math.nan, 2.0]}).to_text() == "gap ▁ █ 1 to 2"
    assert RenderedCurve({"gap": [math.nan] * 2}).to_text() == "gap    0 to 0"


def test_sound():
    """Fails if loudness is not the largest amplitude over time, or the length is wrong."""
    rate = 1000
    wave = np.concatenate((np.zeros(rate), np.sin(np.arange(rate)))).astype(np.float32)
    shown = RenderedSound(wave, rate, "a tone").to_text()
    name, caption = shown.split("\n")
    assert name.startswith("2.00 s at 1000 Hz ▁") and name.endswith("0 to 1") and "█" in name
    bars = name.split(" ")[-4]
    assert len(bars) == MAX_COLUMNS and set(bars[:47]) == {"▁"} and caption == "a tone"
    assert RenderedSound(np.zeros(0), rate).to_text() == "0.00 s at 1000 Hz ▁ 0 to 0"
    assert RenderedSound(np.array([0.5]), rate).to_text() == "0.00 s at 1000 Hz ▁ 0.5 to 0.5"


def test_parts():
    """Fails if a part is lost, or out of order."""
    parts = RenderedParts([RenderedText("one"), RenderedTable(("a",), [(1,)])])
    assert parts.to_text() == "one\na\n1" and RenderedParts().to_text() == ""


def test_predictions_are_shown_below():
    """Fails if a prediction is lost, or all probabilities are listed."""
    assert with_prediction("text", None).to_text() == "text"
    prediction = {"label": "a", "probability": 0.98765, "probabilities": {"a": 0.98765}}
    shown = with_prediction("text", prediction).to_text()
    assert shown == "text\npredicted: label a, probability 0.988"
    for name in ("parity", "listops", "image", "pathfinder", "retrieval", "text", "classify", "lm"):
        task = create_task(name)
        example = task.example("test", 0)
        plain, predicted = (task.render(example, each).to_text() for each in (None, {"label": "q"}))
        assert predicted == f"{plain}\npredicted: label q"


def test_pixels_are_those_of_the_example():
    """Fails if the image of a task is not that of its tokens."""
    task = create_task("image")
    example = task.example("test", 3)
    pixels = torch.from_numpy(task.render(example).pixels.astype(np.int64))
    assert torch.equal(pixels.flatten() + 1, example.inputs["x"])
