"""Pictures: which part fills which cell, how it looks in the terminal and as PNG."""

import io
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import regard
from regard import (
    Band,
    Causal,
    Chunks,
    Full,
    Global,
    GlobalMask,
    Keys,
    PerHead,
    Queries,
    RandomBlocks,
)
from regard.registry import get_recipe
from regard.show import (
    draw,
    draw_family,
    example_pictures,
    mixer_pictures,
    pattern_picture,
    pattern_pictures,
    save_family,
    save_png,
)
from regard.show.build import build_example, fill_length_arguments, pattern_of
from regard.show.description import count_keys
from regard.show.pattern_parts import split_pattern
from regard.show.style import assign_styles
from regard.show.terminal import render_colour, render_plain


def text(pattern, n, cells=None):
    p = pattern_picture(pattern, n, cells or n)
    return render_plain(p, assign_styles([p])).plain.splitlines()


def words(pattern, n=16):
    return [part.label for part in split_pattern(pattern, n)]


def printed(**options) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, highlight=False, **options), out


def test_a_window_and_a_global_token_exactly():
    assert text(Band(1, 1) | Global(1), 4) == [
        "####====",
        "######··",
        "||######",
        "||··####",
    ]


def test_causal_cuts_every_part():
    assert text((Band(1, 1) | Keys(0, 1)) & Causal(), 4) == [
        "##······",
        "####····",
        "||####··",
        "||··####",
    ]


def test_of_two_parts_the_first_is_drawn():
    assert text(Keys(0, 1) | Queries(0, 1), 2) == ["||==", "||··"]
    assert text(Queries(0, 1) | Keys(0, 1), 2) == ["====", "||··"]


def test_many_tokens_share_a_cell_and_the_fuller_part_wins():
    p = pattern_picture(Band(0, 0) | Keys(0, 3), 8, 2)
    assert p.cells == 2
    torch.testing.assert_close(
        p.shade, torch.tensor([[0.75, 0.0], [0.75, 0.25]], dtype=torch.float64)
    )
    assert p.part.tolist() == [[1, -1], [1, 0]]


def test_a_last_cell_that_is_not_full_counts_only_its_tokens():
    p = pattern_picture(Full() & Causal(), 5, 2)  # cells of three and of two tokens
    torch.testing.assert_close(p.shade, torch.tensor([[6 / 9, 0], [1, 3 / 4]], dtype=torch.float64))


@pytest.mark.parametrize(
    "pattern", [Band(300, 300), Chunks(500), Band(step=40), RandomBlocks(64, 3, 64)]
)
def test_sampled_cells_come_near_the_true_share(pattern):
    n = 64 * 64
    p = pattern_picture(pattern, n, 16)
    true = pattern.dense(n).double().unflatten(0, (16, -1)).unflatten(2, (16, -1)).mean((1, 3))
    assert (p.shade - true).abs().max() < 0.05
    assert (p.shade > 0).eq(true > 0).all()


def test_a_thin_line_is_seen_from_afar():
    p = pattern_picture(Keys(777, 778), 65_536, 8)
    assert (p.shade[:, 0] > 0).all() and (p.shade[:, 1:] == 0).all()


def test_words():
    assert words(Chunks(4, 1, 1) | Global(4) | RandomBlocks(4, 1, 4)) == [
        "window",
        "global queries",
        "global keys",
        "random blocks",
    ]
    assert words(regard.Axial(4)) == ["own row", "own column"]
    assert words(Chunks(4)) == ["own block"]
    assert words(Band(step=3)) == ["every 3rd token"] and words(Band(step=112)) == [
        "every 112th token"
    ]
    assert words(Causal()) == ["the past"] and words(Full()) == ["everything"]
    assert words(~Band(1, 1)) == ["all but window"]
    assert words(Queries(0, 1) | Queries(5, 6)) == ["global queries"], "one name, one part"


def test_marked_tokens_stand_at_a_quarter_and_at_two_thirds():
    p = pattern_picture(Band(0, 0) | GlobalMask(), 12, 12)
    marked = p.part.ge(0).all(1).nonzero()[:, 0]
    assert marked.tolist() == [3, 8]
    assert p.part.ge(0).all(0).nonzero()[:, 0].tolist() == [3, 8]


def test_parts_together_are_the_pattern():
    for name in regard.list_recipes(family="sparse"):
        pattern = pattern_of(build_example(get_recipe(name), 24))
        if pattern is None:
            assert name in ("star", "bp_transformer", "axial_passes")
            continue
        for one in pattern.parts if pattern.heads else (pattern,):
            p = pattern_picture(one, 24, 24)
            global_attention_mask = one.needs_global_mask
            want = one.resolve_global_mask(False, False).dense(24)
            assert (
                (p.part.ge(0) | ~want).all()
                if global_attention_mask
                else torch.equal(p.part >= 0, want)
            ), name


def test_heads_that_are_alike_share_a_picture():
    drawn = pattern_pictures(PerHead((Band(1, 1), Full(), Band(1, 1))), 8, 8)
    assert [p.title for p in drawn] == ["heads 1, 3", "head 2"]
    assert drawn[1].part.ge(0).all() and not drawn[0].part.ge(0).all()


def test_colours_put_two_rows_in_a_line():
    p = pattern_picture(Queries(0, 1), 3, 3)
    painted = render_colour(p, assign_styles([p]))
    assert painted.plain == "▀▀▀\n▀▀▀"
    first, last = str(painted.spans[0].style), str(painted.spans[3].style)
    assert first == "#d64933 on #2b2b33" and last == "#2b2b33"


def test_parts_of_one_picture_never_look_alike():
    pattern = (
        Band(1, 1)
        | Band(0, 0, 1) & Keys(0, 9)
        | Band(1, 1, 5)
        | Chunks(4)
        | Chunks(8, 1) & Keys(0, 12)
        | Global(1)
    )
    p = pattern_picture(pattern, 16, 16)
    look = assign_styles([p])
    assert len(look) > 3
    assert (
        len({s.mark for s in look.values()}) == len({s.colour for s in look.values()}) == len(look)
    )


def test_draw_without_colour_and_with():
    console, out = printed()
    draw(Band(1, 1) | Global(1), 6, console)
    shown = out.getvalue()
    assert "####====" in shown and "## window" in shown and "▀" not in shown
    console, out = printed(force_terminal=True, color_system="truecolor")
    draw(Band(1, 1) | Global(1), 6, console)
    assert "▀" in out.getvalue() and "\x1b[38;2;46;110;216" in out.getvalue()
    console, out = printed(force_terminal=True, color_system="truecolor", no_color=True)
    draw(Band(1, 1) | Global(1), 6, console)
    assert "####====" in out.getvalue()


def test_draw_family_draws_them_all():
    console, out = printed()
    draw_family("sparse", console)
    shown = out.getvalue()
    for name in regard.list_recipes(family="sparse"):
        assert f"\n{name}  " in f"\n{shown}"
    with pytest.raises(ValueError, match="family"):
        draw_family("Z", console)


@pytest.mark.parametrize(
    ("name", "word"),
    [("linear", "attention map"), ("linformer", "attention map"), ("fnet", "Jacobian")],
)
def test_without_a_pattern_the_map_is_drawn_and_said(name, word):
    (p,) = mixer_pictures(build_example(get_recipe(name), 20), 20)
    assert word in p.parts[0].label and p.cells == 20 and p.shade.max() == 1
    (causal,) = mixer_pictures(build_example(get_recipe("linear"), 20, causal=True), 20)
    assert (causal.part.triu(1).diagonal(1) == -1).all() and (causal.part.diagonal() == 0).all()


def test_pattern_of():
    assert pattern_of(regard.create("local", dim=8, heads=2, window=3)) == Band(3, 3)
    assert (
        pattern_of(regard.create("local", dim=8, heads=2, window=3, causal=True))
        == Band(3, 3) & Causal()
    )
    assert pattern_of(regard.create("linformer", dim=8, heads=2, length=9, rank=3)) is None
    longformer = pattern_of(regard.create("longformer", dim=8, heads=2, window=3))
    assert longformer is not None and longformer.needs_global_mask


def test_fitted_arguments():
    assert fill_length_arguments(get_recipe("axial"), 90, {}) == {
        "width": 9
    } and fill_length_arguments(get_recipe("axial"), 91, {}) == {"width": 10}
    assert fill_length_arguments(get_recipe("axial"), 90, {"width": 4}) == {"width": 4}
    assert fill_length_arguments(get_recipe("linformer"), 12, {}) == {"length": 12}
    assert fill_length_arguments(get_recipe("local"), 12, {}) == {}


def test_keys_counted_and_sampled():
    found = count_keys(Band(2, 0), 10)
    assert (
        found.exact
        and found.most == 3
        and found.mean == pytest.approx(2.7)
        and found.density == pytest.approx(0.27)
    )
    mixed = count_keys(PerHead((Full(), Full(), Band(0, 0))), 10)
    assert mixed.mean == pytest.approx(7) and mixed.most == 10
    far = count_keys(Band(step=64), 40_000)
    assert not far.exact and far.mean == pytest.approx(625, rel=0.01)


def _image(path: Path):
    pixels = pytest.importorskip("matplotlib.image").imread(path)
    assert pixels.ndim == 3 and min(pixels.shape[:2]) > 300
    return torch.as_tensor(pixels[..., :3].copy()).mul(255).round().int()


def _has(pixels, colour) -> bool:
    return bool((pixels == torch.tensor(colour, dtype=torch.int)).all(-1).sum() > 500)


def test_png_has_the_colours_of_its_parts(tmp_path):
    path = tmp_path / "bigbird.png"
    drawn = example_pictures(get_recipe("bigbird"), 48, lambda count: 48)
    save_png(path, get_recipe("bigbird"), drawn)
    pixels = _image(path)
    for style in assign_styles(drawn).values():
        assert _has(pixels, style.colour)
    assert _has(pixels, (238, 240, 244)) and not _has(pixels, (1, 2, 3))


def test_png_of_heads_and_of_a_family(tmp_path):
    save_png(
        tmp_path / "heads.png",
        get_recipe("per_head"),
        example_pictures(get_recipe("per_head"), 48, lambda count: 24),
    )
    heads = _image(tmp_path / "heads.png")
    assert heads.shape[1] > 1.3 * heads.shape[0], "side by side"
    save_family(tmp_path / "family.png", "sparse")
    family = _image(tmp_path / "family.png")
    assert len(family.flatten(0, 1).unique(dim=0)) > 20


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install regard\[plot\]"):
        save_png(tmp_path / "x.png", get_recipe("local"), pattern_pictures(Band(1, 1), 8, 8))
