"""Layouts of long sequences: small, cached, regular, and with few wasted scores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.layout import LRUCache, build_layout
from regard.pattern import (
    Axial,
    Band,
    Blocks2D,
    Causal,
    Chunks,
    Full,
    Global,
    KeyPhase,
    Keys,
    Nothing,
    PerHead,
    Queries,
    RandomBlocks,
)
from strategies import coverage

LONG = 65_536


def named(n):
    """The patterns of the literature, at the sizes of their papers, for n tokens."""
    return {
        "window": Band(128, 128),
        "bigbird": Chunks(64, 1, 1) | Global(128) | RandomBlocks(64, 3, n // 64),
        "dilated": Band(64, 64, 4),
        "strided": (Band(128, 0) | Band(None, 0, 128)) & Causal(),
        "fixed": (Chunks(128) | KeyPhase(128, 120)) & Causal(),
        "axial": Axial(256),
        "blocks2d": Blocks2D(256, 8, 8, 8, 8, 8, 8),
        "global": Global(128),
        "random": RandomBlocks(64, 3, n // 64),
    }


NAMES = tuple(named(64))
BANDED = (
    "window",
    "bigbird",
    "dilated",
    "blocks2d",
    "global",
    "random",
)  # as many keys a query at any length


# ------------------------------------------------------------------------------------------ cached
def test_equal_patterns_share_a_layout():
    """Fails if patterns that were built apart, but are equal, are laid out twice."""
    one = build_layout(Band(5, 5) | Global(3) | RandomBlocks(8, 1, 40), 300, 310, q_start=3)
    two = build_layout(Band(5, 5) | Global(3) | RandomBlocks(8, 1, 40), 300, 310, q_start=3)
    assert one is two


def test_cache_key():
    """Fails if a length, an offset, a tile or the pass is left out of the cache's key."""
    base = {"n": 200, "m": 200, "q_start": 0, "k_start": 0, "size": 32, "backward": False}
    other = {"n": 199, "m": 201, "q_start": 7, "k_start": 9, "size": 64, "backward": True}
    first = build_layout(Band(5, 5), **base)
    for name, value in other.items():
        assert build_layout(Band(5, 5), **{**base, name: value}) is not first, name
    assert (
        build_layout(Band(5, 6), **base) is not first and build_layout(Band(5, 5), **base) is first
    )


def test_lru_eviction():
    """Fails if the cache grows beyond its limit, or forgets what was asked for last."""
    cache = LRUCache(100)
    for key in "abc":
        cache.add(key, key.upper(), 30)
    assert cache.get("a") == "A" and cache.used == 90
    cache.add("d", "D", 30)  # b has been idle the longest
    assert cache.get("b") is None and [cache.get(key) for key in "acd"] == ["A", "C", "D"]
    cache.add("e", "E", 90)
    assert [cache.get(key) for key in "acde"] == [None, None, None, "E"] and cache.used == 90


def test_value_larger_than_cache():
    """Fails if what does not fit is refused, or stays once the next comes."""
    cache = LRUCache(100)
    cache.add("huge", 1, 1000)
    assert cache.get("huge") == 1
    cache.add("small", 2, 10)
    assert cache.get("huge") is None and cache.get("small") == 2 and cache.used == 10


def test_replaced_value_counts_once():
    """Fails if the bytes of a value that was replaced are never given back."""
    cache = LRUCache(100)
    cache.add("a", 1, 60)
    cache.add("a", 2, 50)
    cache.add("b", 3, 50)
    assert cache.used == 100 and cache.get("a") == 2 and cache.get("b") == 3


def test_layouts_are_small():
    """Fails if a layout keeps a table of all its tiles: 65,536 tokens have a million."""
    for name, pattern in named(LONG).items():
        assert build_layout(pattern, LONG, LONG).nbytes() < 4 << 20, name


# -------------------------------------------------------------------------------------------- long
MEASURE = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
torch.set_num_threads(1)
from test_layout import LONG, named
from regard.layout import build_layout
from regard.pattern import Band, KeyPhase

def megabytes(name):
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

patterns = named(LONG)
build_layout(Band(3, 3) | Band(3, 3, 2) | KeyPhase(9, 8), 500, 500)  # what is loaded once
for name, pattern in patterns.items():
    for backward in (False, True):
        open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
        before, start = megabytes("VmRSS"), time.process_time()
        assert build_layout(pattern, LONG, LONG, backward=backward).scores()
        print(name, backward, megabytes("VmHWM") - before, time.process_time() - start)
"""
AT_ONCE_FREED = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}  # so that a peak is what was in use


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)
def test_65536_tokens_need_little_memory_and_time():
    """Fails if a layout builds something of size n x m: one bit for each pair is 512 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | AT_ONCE_FREED,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(NAMES)
    for name, backward, megabytes, seconds in rows:
        assert 1 < float(megabytes) < 100, (name, backward)
        assert float(seconds) < 15, (
            name,
            backward,
        )  # of the processor: catches a loop over pairs, and little else


@pytest.mark.parametrize("name", BANDED)
def test_scores_per_query_do_not_grow(name):
    """Fails if a pattern with a fixed number of keys a query costs more for each query in a longer
    sequence."""
    short, long = (build_layout(named(n)[name], n, n).scores() / n for n in (8192, LONG))
    assert long <= 1.3 * short


def keys_of(name, n):
    """How many keys each query sees; written out where counting takes long, because most tiles are
    partial."""
    i = torch.arange(n)
    if name == "strided":  # itself and 128 before, then each 128th from 256 back
        return i.clamp(max=128) + 1 + (i // 128 - 1).clamp(min=0)
    if name == "fixed":  # its own chunk so far, and 8 of each chunk before
        return i % 128 + 1 + i // 128 * 8
    if name == "axial":  # its row, and the other cells of its column
        return torch.full((n,), 256 + n // 256 - 1)
    return named(n)[name].keys_per_query(n)


@pytest.mark.parametrize("n", [8192, LONG])
@pytest.mark.parametrize("name", NAMES)
def test_few_wasted_scores(name, n):
    """Fails if tiles cover much more than what is seen, or less, in either pass."""
    seen = keys_of(name, n).sum().item()
    for backward in (False, True):
        assert seen <= build_layout(named(n)[name], n, n, backward=backward).scores() <= 2.5 * seen


@pytest.mark.parametrize("name", NAMES)
def test_counts_at_full_length(name):
    """Fails if the count of seen pairs, on which the test above rests, is wrong: some rows are
    counted one by one."""
    rows = torch.tensor([0, 1, 127, 128, 1000, 32_768, 40_001, LONG - 129, LONG - 1])
    seen = named(LONG)[name].allows(rows[:, None], torch.arange(LONG)).sum(1)
    assert torch.equal(keys_of(name, LONG)[rows], seen)
    assert torch.equal(keys_of(name, 2048), named(2048)[name].keys_per_query(2048))


# ----------------------------------------------------------------------------------------- regular
def only(work):
    (part,) = work.parts
    return part


def masks(work):
    """How many calls need a mask."""
    runs = sum(run.mask is not None for part in work.parts for run in part.runs)
    return runs + sum(group.mask_ids is not None for part in work.parts for group in part.groups)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("pattern", [Band(128, 128), Band(256, 0), Band(100, 30)], ids=repr)
def test_a_band_is_one_run_and_its_edges(pattern, backward):
    """Fails if the middle of a band falls apart: it is one call on overlapping views."""
    part = only(build_layout(pattern, 8192, 8192, backward=backward))
    assert not part.groups and part.q_order is None and part.k_order is None
    assert (
        1 < len(part.runs) <= 3 + (pattern.left + pattern.right) // part.size
    )  # about one for each row of tiles at an end
    first, *edges = part.runs
    assert first.count * first.s > 0.9 * 8192 and first.is_first
    assert all(run.count * run.s < 0.1 * 8192 for run in edges)


@pytest.mark.parametrize(
    "pattern", [Keys(0, 128), Queries(0, 128), Full(), Keys(0, 256) | Queries(128, 256)], ids=repr
)
def test_whole_rows_and_columns_are_few_calls_without_masks(pattern):
    """Fails if global tokens are gathered, or masked."""
    part = only(build_layout(pattern, 4096, 4096))
    assert (
        not part.groups and len(part.runs) <= 16 and masks(build_layout(pattern, 4096, 4096)) == 0
    )


@pytest.mark.parametrize(
    "pattern",
    [
        Chunks(128),
        Chunks(64, 1, 1),
        Chunks(128, 1),
        Global(128),
        Blocks2D(64, 8, 8, 8, 8, 8, 8),
        Chunks(64, 1, 1) | Global(128),
    ],
    ids=repr,
)
def test_aligned_patterns_need_no_mask(pattern):
    """Fails if tiles that are full carry a mask, or more is computed than is seen."""
    work = build_layout(pattern, 4096, 4096, size=64)
    assert masks(work) == 0 and work.scores() == pattern.keys_per_query(4096).sum()


def test_random_blocks_are_masked_only_to_fill_rows_up():
    """Fails if drawn blocks, which are full, are masked; rows that share a call may be filled up
    with empty tiles."""
    pattern = RandomBlocks(64, 3, 64)
    part = only(build_layout(pattern, 4096, 4096, size=64))
    assert all(run.mask is None for run in part.runs)
    assert len(part.masks) == 2  # nothing and all: no partial tile
    assert part.scores() <= 1.2 * pattern.keys_per_query(4096).sum()


def test_dilated_band_is_reordered():
    """Fails if a dilated window is computed as a wide one, of which most is thrown away."""
    part = only(build_layout(Band(64, 64, 4), 8192, 8192))
    assert part.q_order is not None and part.k_order is not None
    assert (part.q_order % 4).diff().min() >= 0  # all of phase 0, then of phase 1, ...
    assert sorted(part.q_order.tolist()) == list(range(8192))
    assert part.scores() < 0.5 * build_layout(Band(256, 256), 8192, 8192).scores()


def test_summary_keys_are_gathered_once():
    """Fails if all keys are read for the few that are seen."""
    part = only(build_layout(KeyPhase(128, 120), 4096, 4096))
    assert part.q_order is None and part.m == 256 == len(part.k_order)
    assert part.scores() == 4096 * 256


def test_empty_patterns():
    """Fails if an empty pattern, or an empty sequence, is computed at all."""
    assert (
        build_layout(Nothing(), 1000, 1000).scores()
        == 0
        == build_layout(Nothing(), 1000, 1000).calls()
    )
    for n, m in ((0, 5), (5, 0), (0, 0)):
        for pattern in (Full(), Band(1, 1, 2), KeyPhase(4, 3), Blocks2D(32, 2, 2)):
            assert build_layout(pattern, n, m).scores() == 0
    assert build_layout(Full(), 1, 1).scores() == 1


def test_backward_costs_more():
    """Fails if the cost of a layout, by which backends are chosen, does not rise with its work."""
    small, large = build_layout(Band(16, 16), 4096, 4096), build_layout(Band(512, 512), 4096, 4096)
    assert small.cost() < large.cost() < build_layout(Full(), 4096, 4096).cost()
    assert small.cost(backward=True) > small.cost() > small.work() > 0


def test_per_head_patterns_are_rejected():
    """Fails if a pattern with several heads is taken for one."""
    with pytest.raises(ValueError, match="a layout is for one head"):
        build_layout(PerHead((Causal(), Full())), 8, 8)


def test_many_alternatives_are_not_multiplied_out():
    """Fails if an expression with 4 to the power of 12 alternatives is taken apart: it would never
    end."""
    pattern = Full()
    for i in range(12):
        pattern = pattern & (Band(3 * i, 5, 2) | Keys(i, i + 9) | Chunks(4 + i) | Queries(i, 2 * i))
    assert build_layout(pattern, 100, 100).scores() >= pattern.keys_per_query(100).sum()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "pattern", [Band(128, 128), Band(100, 0), Band(64, 64) | Global(5), Chunks(64, 1, 1)], ids=repr
)
@pytest.mark.usefixtures("two_threads")
def test_on_several_threads_calls_are_tall(pattern, backward):
    """Fails if most queries of a window are in calls that the kernel takes 32 at a time, or a pair
    is lost in joining them."""
    work = build_layout(pattern, 1500, 1500, backward=backward)
    tall = sum(
        run.count * run.s
        for part in work.parts
        for run in part.runs
        if run.is_first and run.s >= 192
    )
    assert tall > 0.8 * 1500
    assert torch.equal(coverage(work, 1500, 1500), pattern.dense(1500, 1500).long())
