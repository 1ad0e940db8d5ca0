"""Patterns: masks of every leaf, invalid arguments, and attributes of expressions."""

import copy
import pickle
from dataclasses import fields, replace

import pytest
import torch

from regard.pattern import (
    Axial,
    Band,
    Blocks,
    Blocks2D,
    BlockTable,
    Causal,
    Chunks,
    Full,
    Global,
    GlobalMask,
    GlobalMaskKeys,
    GlobalMaskQueries,
    KeyPhase,
    Keys,
    Near2D,
    Neighbourhood,
    Nothing,
    PerHead,
    PerSegment,
    Queries,
    RandomBlocks,
    Restarted,
    Segments,
    StridedKeyBand,
    block_order,
)
from regard.pattern.algebra import MAX_SIZE


def picture(pattern, n, m=None):
    """One string of 0 and 1 a query."""
    return ["".join("01"[seen] for seen in row) for row in pattern.dense(n, m).int().tolist()]


# ---------------------------------------------------------------------------------------- pictures
PICTURES = [
    (Full(), "111 111 111"),
    (Nothing(), "000 000 000"),
    (Causal(), "10000 11000 11100 11110 11111"),
    (Band(), "111 111 111"),
    (Band(1, 2), "11100 11110 01111 00111 00011"),
    (Band(0, 0), "100 010 001"),
    (Band(None, 1), "1100 1110 1111 1111"),
    (Band(1, 0, 2), "100000 010000 101000 010100 001010 000101"),
    (Band(2, 1, 2), "101000 010100 101010 010101 101010 010101"),
    (Band(1, 1, 9), "100 010 001"),
    (Band(None, None, 3), "100100 010010 001001 100100 010010 001001"),
    (Queries(1, 3), "0000 1111 1111 0000"),
    (Queries(2, 2), "0000 0000 0000 0000"),
    (Keys(1, 3), "0110 0110 0110 0110"),
    (Global(2), "1111 1111 1100 1100"),
    (Chunks(2), "11000 11000 00110 00110 00001"),
    (Chunks(2, 1), "110000 110000 111100 111100 001111 001111"),
    (Chunks(2, 0, 1), "111100 111100 001111 001111 000011 000011"),
    (Chunks(9), "111 111 111"),
    (KeyPhase(3, 2), "001001 001001 001001 001001 001001 001001"),
    (KeyPhase(3, 0), "1111 1111 1111 1111"),
    (KeyPhase(4, 2) & Causal(), "000000 000000 001000 001100 001100 001100"),
    # an image of two rows by three columns: the cell itself and its four neighbours with corners
    (Near2D(3, 1, 1), "110110 111111 011011 110110 111111 011011"),
    (Near2D(3, 0, 1), "110000 111000 011000 000110 000111 000011"),
    (Near2D(3, 1, 0), "100100 010010 001001 100100 010010 001001"),
    (Near2D(9, 5, 1), "110 111 011"),
    (Axial(3), "111100 111010 111001 100111 010111 001111"),
    # two rows by four columns, in query blocks of one row by two columns
    (Blocks2D(4, 1, 2), "11000000 11000000 00110000 00110000 00001100 00001100 00000011 00000011"),
    (
        Blocks2D(4, 1, 2, up=1),
        "11000000 11000000 00110000 00110000 11001100 11001100 00110011 00110011",
    ),
    (
        Blocks2D(4, 1, 2, left=1),
        "11000000 11000000 01110000 01110000 00001100 00001100 00000111 00000111",
    ),
    (
        Blocks2D(4, 1, 2, right=1),
        "11100000 11100000 00110000 00110000 00001110 00001110 00000011 00000011",
    ),
    (
        Blocks2D(4, 1, 2, down=1),
        "11001100 11001100 00110011 00110011 00001100 00001100 00000011 00000011",
    ),
    (Blocks2D(4, 2, 2), "11001100 11001100 00110011 00110011 11001100 11001100 00110011 00110011"),
    # the first blocks are cut short
    (Blocks2D(4, 1, 2, cut_cols=1), "1000 0110 0110 0001"),
    (Blocks2D(2, 2, 2, cut_rows=1), "110000 110000 001111 001111 001111 001111"),
    # two rows by three columns, block by block: cells 0 1 3 4, then 2 5
    (Blocks2D(3, 2, 2, by_block=True), "111100 111100 111100 111100 000011 000011"),
    (Blocks2D(3, 2, 2, left=1, by_block=True), "111100 111100 111100 111100 010111 010111"),
    # blocks of one dimension
    (Blocks(2, 1), "11000 11000 01110 01110 00011"),
    (Blocks(2, 0, 1), "11100 11100 00111 00111 00001"),
    (Blocks(9), "111 111 111"),
    # windows that stay inside
    (Neighbourhood(1, 5, 1, 3), "11100 11100 01110 00111 00111"),
    (Neighbourhood(1, 5, 1, 2), "11000 11000 01100 00110 00011"),
    (Neighbourhood(1, 3, 1, 9), "111 111 111"),
    (Neighbourhood(1, 5, 1, 3, causal=True), "10000 11000 11100 01110 00111"),
    (Neighbourhood(2, 3, 1, 2), "110000 110000 011000 000110 000110 000011"),
    (Neighbourhood(3, 2, 2, 1), "101000 010100 101000 010100 001010 000101"),
    (Neighbourhood(2, 2, 2, 2, causal=True), "1000 1100 1010 1111"),
    (BlockTable(2, ((1,), (), (0, 2))), "001100 001100 000000 000000 110011 110011"),
    # packed sequences; the last position is past the end
    (Segments((2, 1, 2)), "110000 110000 001000 000110 000110 000000"),
    (PerSegment(Keys(0, 1), (2, 3)), "10000 10000 00100 00100 00100"),
    (PerSegment(Chunks(2) & Causal(), (3, 2)), "10000 11000 00100 00010 00011"),
    # operators
    (Band(1, 1) | Keys(0, 1), "1100 1110 1111 1011"),
    (Band(1, 1) & ~Band(0, 0), "0100 1010 0101 0010"),
    (~Causal(), "0111 0011 0001 0000"),
]


@pytest.mark.parametrize(
    ("pattern", "rows"), PICTURES, ids=lambda x: repr(x) if not isinstance(x, str) else ""
)
def test_pictures(pattern, rows):
    """Fails if a leaf draws another picture than the one on paper."""
    rows = rows.split()
    assert picture(pattern, len(rows), len(rows[0])) == rows
    assert pattern.dense(len(rows), len(rows[0])).dtype == torch.bool


def test_more_keys_than_queries():
    """Fails if positions of queries and keys do not both start at 0."""
    assert picture(Causal(), 2, 4) == ["1000", "1100"]
    assert picture(Causal(), 3, 1) == ["1", "1", "1"]
    assert picture(Global(1), 3, 2) == ["11", "10", "10"]


def test_heads_come_first():
    """Fails if the head axis is lost, or stands elsewhere."""
    pattern = PerHead((Causal(), Band(0, 0)))
    assert pattern.dense(2, 3).tolist() == [[[1, 0, 0], [1, 1, 0]], [[1, 0, 0], [0, 1, 0]]]
    assert pattern.keys_per_query(3).tolist() == [[1, 2, 3], [1, 1, 1]]
    assert pattern.density(3) == pytest.approx(9 / 18)
    some, every = pattern.block(*(torch.tensor([x]) for x in (0, 3, 0, 3)))
    assert some.tolist() == [[True], [True]] and every.tolist() == [[False], [False]]


def test_allowed_takes_any_positions():
    """Fails if positions must be in order, start at 0 or have two axes."""
    assert Band(1, 0).allows(torch.tensor([70, 3, 9]), torch.tensor([69, 4, 9])).tolist() == [
        True,
        False,
        True,
    ]
    assert Full().allows(torch.tensor(5), torch.arange(3)).tolist() == [True] * 3
    q, k = torch.zeros(2, 1, 3, dtype=torch.long), torch.zeros(4, 1, dtype=torch.long)
    assert (Queries(0, 1) & Keys(0, 1)).allows(q, k).shape == (2, 4, 3)


def test_lengths_of_zero_and_one():
    """Fails if the shortest sequences need care by the caller."""
    assert Band(1, 1).dense(0).shape == (0, 0) and Band(1, 1).dense(1).tolist() == [[True]]
    assert Band(1, 1).keys_per_query(0).tolist() == [] and Band(1, 1).keys_per_query(
        2, 0
    ).tolist() == [0, 0]
    assert Band(1, 1).keys_per_query(1).tolist() == [1]
    assert Band(1, 1).density(0) == 0.0 == Band(1, 1).density(2, 0)


def test_density_counts_pairs():
    """Fails if the share is taken of something else than all pairs."""
    assert Causal().density(4) == pytest.approx(10 / 16) and Keys(0, 1).density(
        3, 5
    ) == pytest.approx(1 / 5)
    assert Full().density(100) == 1.0 and Nothing().density(100) == 0.0
    assert Band(128, 128).keys_per_query(4096)[[0, 2000, 4095]].tolist() == [129, 257, 129]


# --------------------------------------------------------------------------------- what is refused
REFUSED = [
    (lambda: Band(-1), "Band: left"),
    (lambda: Band(0, -2), "Band: right"),
    (lambda: Band(1, 1, 0), "Band: step"),
    (lambda: Band(1, 1, None), "Band: step"),
    (lambda: Band(1.5), "Band: left"),
    (lambda: Band(True), "Band: left"),
    (lambda: Keys(-1, 2), "Keys: lo"),
    (lambda: Keys(3, 2), "Keys: hi"),
    (lambda: Keys(None, 2), "Keys: lo"),
    (lambda: Queries("0", 2), "Queries: lo"),
    (lambda: Queries(0, 2.0), "Queries: hi"),
    (lambda: Global(-1), "Queries: hi"),
    (lambda: Chunks(0), "Chunks: size"),
    (lambda: Chunks(4, -1), "Chunks: back"),
    (lambda: Chunks(4, 0, -1), "Chunks: ahead"),
    (lambda: KeyPhase(0, 0), "KeyPhase: period"),
    (lambda: KeyPhase(4, -1), "KeyPhase: start"),
    (lambda: KeyPhase(4, 4), "KeyPhase: start must be below period=4, not 4"),
    (lambda: RandomBlocks(0, 1, 4), "RandomBlocks: size"),
    (lambda: RandomBlocks(4, -1, 4), "RandomBlocks: count"),
    (lambda: RandomBlocks(4, 1, 0), "RandomBlocks: blocks"),
    (lambda: RandomBlocks(4, 1, 4, -1), "RandomBlocks: seed"),
    (lambda: RandomBlocks(4, 1, 4, 0, 1), "RandomBlocks: causal"),
    (lambda: Blocks2D(0, 1, 1), "Blocks2D: width"),
    (lambda: Blocks2D(4, 0, 1), "Blocks2D: rows"),
    (lambda: Blocks2D(4, 1, 0), "Blocks2D: cols"),
    (lambda: Blocks2D(4, 1, 1, -1), "Blocks2D: up"),
    (lambda: Blocks2D(4, 1, 1, 0, -1), "Blocks2D: left"),
    (lambda: Blocks2D(4, 1, 1, 0, 0, -1), "Blocks2D: right"),
    (lambda: Blocks2D(4, 1, 1, 0, 0, 0, -1), "Blocks2D: down"),
    (lambda: Near2D(4, -1, 0), "Blocks2D: up"),
    (lambda: Blocks2D(4, 2, 2, cut_rows=2), "cut_rows and cut_cols"),
    (lambda: Blocks2D(4, 2, 2, cut_cols=-1), "Blocks2D: cut_cols"),
    (lambda: Blocks2D(4, 2, 2, by_block=1), "by_block must be True or False"),
    (lambda: Blocks2D(4, 2, 2, cut_rows=1, by_block=True), "does not support cut_rows"),
    (lambda: block_order(5, 4, (2, 2)), "height must be a multiple"),
    (lambda: block_order(4, 0, (2, 2)), "width"),
    (lambda: Blocks(0), "Blocks: size"),
    (lambda: Blocks(2, -1), "Blocks: before"),
    (lambda: Blocks(2, 0, -1), "Blocks: after"),
    (lambda: Neighbourhood(0, 3, 1, 1), "Neighbourhood: rows"),
    (lambda: Neighbourhood(1, 3, 0, 1), "Neighbourhood: kernel_rows"),
    (lambda: Neighbourhood(1, 3, 1, None), "Neighbourhood: kernel_cols"),
    (lambda: Neighbourhood(1, 3, 1, 1, 1), "causal must be True or False"),
    (lambda: Neighbourhood(10**10, 10**10, 1, 1), "too large"),
    (lambda: BlockTable(0, ((0,),)), "BlockTable: size"),
    (lambda: BlockTable(2, ()), "BlockTable: table"),
    (lambda: BlockTable(2, 3), "BlockTable: table"),
    (lambda: BlockTable(2, (0, 1)), "BlockTable: table"),
    (lambda: BlockTable(2, ((1,),)), "integers from 0 to 0, not 1"),
    (lambda: BlockTable(2, ((True,), ())), "integers from 0 to 1, not True"),
    (lambda: Axial(0), "Chunks: size"),
    (lambda: Segments(()), "Segments: lengths must list"),
    (lambda: Segments(3), "Segments: lengths must list"),
    (lambda: Segments((2, 0)), "Segments: each of lengths must be an integer >= 1, not 0"),
    (lambda: Segments((2, 1.0)), "Segments: each of lengths must be an integer >= 1, not 1.0"),
    (lambda: Restarted(Band(1, 1) | Keys(0, 1), (2,)), "use PerSegment"),
    (
        lambda: PerSegment(RandomBlocks(2, 1, 3), (4, 7)),
        "supports 6 positions, but a segment has 7",
    ),
    (lambda: Segments.from_ids(torch.tensor([0, 2, 1])), r"sorted, but ids\[2\] = 1 follows 2"),
    (lambda: Segments.from_ids(torch.tensor([0.0, 1.0])), "tensor of integers of shape"),
    (
        lambda: Segments.from_ids(torch.zeros(1, 3, dtype=torch.int64)),
        "tensor of integers of shape",
    ),
    (lambda: Segments.from_ids([0, 0, 1]), "tensor of integers of shape"),
    (lambda: Segments.from_cu_seqlens(torch.tensor([0.0, 3.0])), "int32 or int64 tensor"),
    (lambda: Segments.from_cu_seqlens([0, 3]), "int32 or int64 tensor"),
    (lambda: Segments.from_cu_seqlens(torch.tensor([[0, 3]])), "int32 or int64 tensor"),
    (lambda: Segments.from_cu_seqlens(torch.tensor([1, 3])), "must begin with 0"),
    (lambda: Segments.from_cu_seqlens(torch.tensor([0])), "2 entries or more"),
    (lambda: Segments.from_cu_seqlens(torch.tensor([0, 3, 2])), "2 follows 3"),
    (lambda: Segments.from_cu_seqlens(torch.tensor([0, 3]), 4), "end with the number of tokens, 4"),
    (lambda: PerHead(()), "PerHead takes one pattern per head"),
    (lambda: PerHead((Full(), 3)), "PerHead takes one pattern per head"),
    (lambda: PerHead((PerHead((Full(),)),)), "PerHead takes one pattern per head"),
    (
        lambda: PerHead((Full(),)) | PerHead((Full(), Full())),
        "cannot combine patterns for 1 and for 2 heads",
    ),
]


@pytest.mark.parametrize(
    ("build", "message"), REFUSED, ids=[f"{m}-{i}" for i, (_, m) in enumerate(REFUSED)]
)
def test_invalid_arguments(build, message):
    """Fails if a senseless argument is taken, or the message does not say which one it was."""
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "other", [3, None, "Causal()", torch.ones(2, 2, dtype=torch.bool)], ids=type
)
def test_patterns_combine_with_patterns_only(other):
    """Fails if a number, a name or a mask slips into an expression."""
    for join in (lambda p: p | other, lambda p: p & other):
        with pytest.raises(TypeError, match="a pattern combines with a pattern"):
            join(Band(1, 1))
        with pytest.raises(TypeError, match="a pattern combines with a pattern"):
            join(PerHead((Band(1, 1),)))


def test_patterns_are_immutable():
    """Fails if a pattern, which is a key of caches, can be altered."""
    with pytest.raises(AttributeError):
        Band(1, 1).left = 2
    with pytest.raises(AttributeError):
        (Band(1, 1) | Keys(0, 1)).parts = ()


# ------------------------------------------------------------------------------------------ values
SOME = [
    Band(1, 2, 3) | Global(2),
    PerHead([Causal(), ~Chunks(4)]),
    RandomBlocks(4, 2, 8, seed=3, causal=True) & Causal(),
    PerSegment(Chunks(4) | Causal(), (7, 20, 3)),
]


@pytest.mark.parametrize("pattern", SOME, ids=repr)
def test_copies_are_equal(pattern):
    """Fails if a pattern does not survive a copy or a trip to another process."""
    for again in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert (
            again == pattern
            and hash(again) == hash(pattern)
            and torch.equal(again.dense(30), pattern.dense(30))
        )


def test_different_patterns_are_not_equal():
    """Fails if patterns of another kind, or of other numbers, count as the same."""
    patterns = [
        Keys(0, 2),
        Queries(0, 2),
        Chunks(2),
        Chunks(2, 1),
        Band(0, 2),
        Band(2, 0),
        Causal(),
        Full(),
        Nothing(),
        Keys(0, 2) | Chunks(2),
        Keys(0, 2) & Chunks(2),
        PerHead((Keys(0, 2), Chunks(2))),
        RandomBlocks(2, 1, 4),
        RandomBlocks(2, 1, 4, 1),
        RandomBlocks(2, 1, 4, causal=True),
        ~Chunks(2),
        GlobalMask(),
        GlobalMaskKeys(),
        GlobalMaskQueries(),
        Segments((2, 1)),
        Segments((1, 2)),
        Restarted(Chunks(2), (2, 1)),
        Restarted(Chunks(2), (1, 2)),
    ]
    assert len(set(patterns)) == len(patterns)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (Band(None, 0), "Causal()"),
        (Band(2, 2) | Global(1), "Band(2, 2) | Queries(0, 1) | Keys(0, 1)"),
        (~(Band(2) | Chunks(4, 0, 1)) & Full(), "~(Band(2) | Chunks(4, 0, 1))"),
        ((Keys(0, 1) | Causal()) & KeyPhase(4, 3), "(Keys(0, 1) | Causal()) & KeyPhase(4, 3)"),
        (Nothing(), "~Full()"),
        (PerHead([Causal()]), "PerHead((Causal(),))"),
        (PerSegment(Band(2, 0), [3, 4]), "Band(2, 0) & Segments((3, 4))"),
        (
            PerSegment(Chunks(2) | Causal(), (3, 4)),
            "(Restarted(Chunks(2), (3, 4)) | Causal()) & Segments((3, 4))",
        ),
        (RandomBlocks(64, 3, 16), "RandomBlocks(64, 3, 16)"),
        (RandomBlocks(64, 3, 16, causal=True), "RandomBlocks(64, 3, 16, 0, True)"),
    ],
)
def test_repr(pattern, text):
    """Fails if the printed form becomes longer than what one would type."""
    assert repr(pattern) == text


# --------------------------------------------------------------------- what they say of themselves
def test_compares_positions():
    """Fails if a pattern that compares positions passes for one that does not, or the other way."""
    for pattern in (
        Full(),
        Nothing(),
        Keys(0, 2),
        Queries(1, 2),
        Global(2),
        KeyPhase(4, 2),
        PerHead((Full(), Keys(0, 1))),
    ):
        assert not pattern.compares_positions
    for pattern in (
        Causal(),
        Chunks(4),
        Near2D(4, 1, 1),
        RandomBlocks(2, 1, 4),
        Keys(0, 1) | ~Band(1),
        PerHead((Full(), Axial(4))),
    ):
        assert pattern.compares_positions


def test_length():
    """Fails if the number of positions that random blocks cover is lost, or is not the smallest."""
    assert (Band(1, 1) | Global(4)).length is None
    assert RandomBlocks(4, 1, 8).length == 32 and (~RandomBlocks(4, 1, 8) & Causal()).length == 32
    assert (RandomBlocks(4, 1, 8) | RandomBlocks(2, 1, 9)).length == 18
    assert PerHead((Full(), RandomBlocks(4, 1, 8))).length == 32


def test_heads():
    """Fails if an expression does not know for how many heads it is."""
    two = PerHead((Causal(), Full()))
    assert Full().heads is None is (Causal() | Keys(0, 1)).heads
    assert (
        two.heads
        == (two & Causal()).heads
        == (Band(1, 1) | two).heads
        == (~two).heads
        == (two | two).heads
        == 2
    )


def test_operators_act_on_each_head():
    """Fails if heads are mixed, or the wrong ones are paired."""
    a, b = PerHead((Causal(), Chunks(2))), PerHead((Keys(0, 1), Nothing()))
    assert a | b == PerHead((Causal() | Keys(0, 1), Chunks(2)))
    assert a & b == PerHead((Causal() & Keys(0, 1), Nothing()))
    assert Band(1, 1) & a == PerHead((Band(1, 1) & Causal(), Band(1, 1) & Chunks(2)))
    assert ~a == PerHead((~Causal(), ~Chunks(2))) and ~~a == a


def test_leaves_from_left_to_right():
    """Fails if a leaf is skipped or an operator passes for one."""
    pattern = PerHead(((Band(1) | Keys(0, 1)) & ~Chunks(2), Full()))
    assert list(pattern.leaves()) == [Band(1), Keys(0, 1), Chunks(2), Full()]


# ------------------------------------------------------------------------------------------- marks
def test_needs_global_mask():
    """Fails if a pattern hides that it waits for marks."""
    for pattern in (
        GlobalMask(),
        GlobalMaskKeys(),
        Band(1) & ~GlobalMaskQueries(),
        PerHead((Full(), Band(1) | GlobalMaskKeys())),
    ):
        assert pattern.needs_global_mask
    assert not Band(1, 1).needs_global_mask and not (GlobalMask() | Full()).needs_global_mask


@pytest.mark.parametrize(
    "pattern",
    [
        GlobalMask(),
        Band(1) | GlobalMaskKeys(),
        ~GlobalMaskQueries(),
        PerHead((Full(), GlobalMask())),
    ],
    ids=repr,
)
def test_global_mask_is_required_for_exact_answers(pattern):
    """Fails if a mask is made up for tokens whose marks nobody has given."""
    for ask in (
        lambda: pattern.dense(3),
        lambda: pattern.keys_per_query(3),
        lambda: pattern.allows(*torch.zeros(2, 1).long()),
    ):
        with pytest.raises(ValueError, match="depends on the input: pass `global_attention_mask`"):
            ask()


def test_blocks_of_global_mask_are_partial():
    """Fails if a block is called empty or full before the marks are known."""
    at = torch.zeros(1, dtype=torch.long)
    for pattern in (GlobalMask(), ~GlobalMask(), GlobalMaskKeys() & Causal()):
        some, every = pattern.block(at, at + 3, at, at + 3)
        assert some.tolist() == [True] and every.tolist() == [False]


@pytest.mark.parametrize("query", [False, True])
@pytest.mark.parametrize("key", [False, True])
def test_resolve_global_mask(query, key):
    """Fails if knowing the marks leaves another pattern than the rule says."""
    assert GlobalMask().resolve_global_mask(query, key) == (Full() if query or key else Nothing())
    assert (Band(1, 1) | GlobalMaskQueries()).resolve_global_mask(query, key) == (
        Full() if query else Band(1, 1)
    )
    assert (Band(1, 1) & ~GlobalMaskKeys()).resolve_global_mask(query, key) == (
        Nothing() if key else Band(1, 1)
    )
    heads = PerHead((GlobalMaskKeys() & Causal(), Band(1)))
    assert heads.resolve_global_mask(query, key) == PerHead(
        (Causal() if key else Nothing(), Band(1))
    )
    assert not heads.resolve_global_mask(query, key).needs_global_mask
    plain = Band(1, 1) | Keys(0, 1)
    assert plain.resolve_global_mask(query, key) is plain


# ----------------------------------------------------------------------------------- random blocks
def table(pattern):
    """Which blocks were drawn, (blocks blocks)."""
    at = torch.arange(pattern.blocks) * pattern.size
    return pattern.allows(at[:, None], at)


def test_seed():
    """Fails if the same seed draws other blocks, or other seeds the same."""
    first = RandomBlocks(4, 3, 20, seed=7).dense(80)
    RandomBlocks(4, 3, 20, seed=8).dense(80)
    assert torch.equal(first, RandomBlocks(4, 3, 20, seed=7).dense(80))
    assert not torch.equal(first, RandomBlocks(4, 3, 20, seed=8).dense(80))


@pytest.mark.parametrize(("count", "blocks"), [(0, 5), (1, 1), (3, 20), (5, 5), (9, 5)])
def test_blocks_per_row(count, blocks):
    """Fails if a row of blocks has more or fewer draws than `count`, or draws one twice; there may
    be too few to draw."""
    assert table(RandomBlocks(4, count, blocks)).sum(1).tolist() == [min(count, blocks)] * blocks


@pytest.mark.parametrize("seed", range(5))
def test_causal_random_blocks(seed):
    """Fails if a causal model loses draws to the future: block i has i + 1 to choose from, itself
    among them."""
    drawn = table(RandomBlocks(4, 3, 20, seed=seed, causal=True))
    assert drawn.sum(1).tolist() == [1, 2, *[3] * 18] and not drawn.triu(1).any()


def test_random_blocks_are_uniform():
    """Fails if some blocks are hardly ever drawn: 40 rows of 10 among 40, over 20 seeds, is 200
    times each."""
    times = sum(table(RandomBlocks(1, 10, 40, seed=seed)).sum(0) for seed in range(20))
    assert times.sum() == 8000 and times.min() > 130 and times.max() < 270


def test_blocks_fill_their_size():
    """Fails if tokens of one block are treated differently, or tokens beyond the last block see
    anything."""
    pattern = RandomBlocks(3, 2, 4, seed=1)
    whole = table(pattern).repeat_interleave(3, 0).repeat_interleave(3, 1)
    assert torch.equal(pattern.dense(12), whole)
    assert torch.equal(pattern.dense(15, 20)[:12, :12], whole)
    assert not pattern.dense(15)[12:].any() and not pattern.dense(15)[:, 12:].any()


def test_global_generator_is_not_used():
    """Fails if building or asking a pattern draws from torch's own generator, or depends on it."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = RandomBlocks(5, 3, 31, seed=11).dense(155)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    two = copy.deepcopy(RandomBlocks(5, 3, 31, seed=11)).dense(155)
    assert torch.equal(one, two)


# ------------------------------------------------------------------------------ packed sequences
def test_segments_from_what_users_have():
    """Fails if offsets or ids give other segments, or if an empty sequence becomes one."""
    assert Segments.from_cu_seqlens(torch.tensor([0, 3, 3, 5])) == Segments((3, 2))
    assert Segments.from_cu_seqlens(torch.tensor([0, 3, 5], dtype=torch.int32), 5).length == 5
    assert Segments.from_ids(torch.tensor([-1, -1, 3, 3, 3, 7])) == Segments((2, 3, 1))


@pytest.mark.parametrize(
    "pattern",
    [
        Causal(),
        Band(2, 1, 3),
        Band(1, 1) | Global(2),
        RandomBlocks(4, 1, 5, seed=2) | Keys(1, 3),
        ~Chunks(3, 1) & Near2D(4, 1, 1),
        PerHead((Axial(3), Neighbourhood(3, 5, 3, 3))),
    ],
    ids=repr,
)
def test_per_segment_is_the_pattern_of_each_segment(pattern):
    """Fails if a pattern does not restart in each segment, or reaches into another."""
    lengths = (5, 1, 13, 9)
    seen = PerSegment(pattern, lengths).dense(30)
    expected = torch.zeros_like(seen)
    for length, end in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True):
        expected[..., end - length : end, end - length : end] = pattern.dense(length)
    assert torch.equal(seen, expected)


LEAVES = {
    "Band": lambda x: [Band(x, 0), Band(0, x), Band(step=x)],
    "StridedKeyBand": lambda x: [
        StridedKeyBand(x),
        StridedKeyBand(1, x),
        StridedKeyBand(1, 0, x),
        StridedKeyBand(1, 0, 0, x),
    ],
    "Global": lambda x: [Global(x), Queries(x, x), Keys(0, x)],
    "Chunks": lambda x: [Chunks(x), Chunks(1, x), Chunks(1, 0, x), Axial(x)],
    "Blocks": lambda x: [Blocks(x), Blocks(1, x), Blocks(1, 0, x)],
    "KeyPhase": lambda x: [KeyPhase(x, 0), KeyPhase(x, x - 1)],
    "Blocks2D": lambda x: [
        *(Blocks2D(*(x if i == j else 1 for j in range(7)), cut_rows=0) for i in range(7)),
        Blocks2D(x, x, x, by_block=True),
        Blocks2D(4, x, x, cut_rows=x - 1, cut_cols=x - 1),
    ],
    "tables": lambda x: [RandomBlocks(x, 1, 4), RandomBlocks(2, x, 4), BlockTable(x, ((0,),))],
}


@pytest.mark.parametrize("name", LEAVES)
def test_numbers_that_overflow(name):
    """Fails if a number of a leaf wraps around in the arithmetic of positions, silently."""
    for large in (2**63 - 1, 2**63, 2**64 + 5, 10**30):
        with pytest.raises(ValueError, match=r"must be at most \d+, not \d+"):
            LEAVES[name](large)
    # the largest number that is accepted means the same as one that is merely larger than n
    for huge, plain in zip(LEAVES[name](MAX_SIZE), LEAVES[name](1000), strict=True):
        assert torch.equal(huge.dense(70), plain.dense(70)), huge
        assert torch.equal(huge.keys_per_query(70), plain.keys_per_query(70)), huge


def test_every_integer_of_a_leaf_is_bounded():
    """Fails if a new leaf, or a new number of one, is accepted without a bound."""
    for leaf in (
        *(leaf for build in LEAVES.values() for pattern in build(2) for leaf in pattern.leaves()),
        Neighbourhood(2, 2, 1, 1),
    ):
        for field in fields(leaf):
            if isinstance(getattr(leaf, field.name), bool | tuple):
                continue
            with pytest.raises(ValueError, match=f"{field.name} must be at most"):
                replace(leaf, **{field.name: 2**63})
    with pytest.raises(ValueError, match="the sum of lengths must be at most"):
        Segments((2**62, 2**62))
