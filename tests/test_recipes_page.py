"""docs/recipes.md and its pictures are generated and up to date."""

import importlib.util
import struct
import zlib
from pathlib import Path

import pytest

import regard
from regard.registry import get_recipe
from regard.show.build import build_example, pattern_of

ROOT = Path(__file__).parents[1]
OUTDATED = "out of date: run `python docs/make_recipes.py` and commit the difference"


@pytest.fixture(scope="module")
def make_recipes():
    path = ROOT / "docs" / "make_recipes.py"
    spec = importlib.util.spec_from_file_location("make_recipes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def png_lines(data):
    """The palette colours of a PNG, pixel by pixel."""
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks[data[at + 4 : at + 8]] = data[at + 8 : at + 8 + size]
        at += size + 12
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    palette, pixels = chunks[b"PLTE"], zlib.decompress(chunks[b"IDAT"])
    lines = [pixels[i * (width + 1) + 1 : (i + 1) * (width + 1)] for i in range(height)]
    return [[tuple(palette[3 * x : 3 * x + 3]) for x in line] for line in lines]


def test_page_is_up_to_date(make_recipes):
    """Fails if the table differs from the registry: papers, formulas, capabilities, cost, measured
    lengths.
    """
    assert make_recipes.PAGE.read_text(encoding="utf-8") == make_recipes.page(), OUTDATED


def test_there_is_one_picture_per_recipe(make_recipes):
    """Fails if a picture is missing, too large for the page, or belongs to no recipe."""
    files = list(make_recipes.PICTURES.iterdir())
    assert {file.name for file in files} == {f"{name}.png" for name in regard.list_recipes()}
    assert all(file.stat().st_size < 20_000 for file in files)


@pytest.mark.parametrize("name", regard.list_recipes())
def test_pictures_of_patterns_are_up_to_date(make_recipes, name):
    """Fails if a pattern changes and its picture does not.

    Attention maps are random, and may differ by rounding.
    """
    recipe = get_recipe(name)
    file = make_recipes.PICTURES / f"{name}.png"
    lines = png_lines(file.read_bytes())
    side = make_recipes.CELLS * make_recipes.PIXELS
    assert len(lines) == side and all(len(line) == side for line in lines)
    if pattern_of(build_example(recipe, make_recipes.CELLS)) is not None:
        drawn = make_recipes.png(make_recipes.pixels(make_recipes.picture(recipe)))
        assert lines == png_lines(drawn), OUTDATED
