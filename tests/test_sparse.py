"""What the generic tests of family C cannot see: borders, orders, reach, cache sizes, and marks on
padding.
"""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save

import regard
from regard import Blocks2D, Neighbourhood, block_order
from regard.mixers.bp_spans import visible_nodes
from regard.registry import get_recipe
from regard.show.cache_size import cache_size
from regard.testing import check_mixer, influence

N = 400


def made(name, *, heads=2, **arguments):
    torch.manual_seed(0)
    return regard.create(name, dim=8, heads=heads, **arguments).double()


def streamed(mixer, x, size):
    """The output in chunks, and every state on the way."""
    state, parts, states = None, [], []
    for chunk in x.split(size, 1):
        y, state = mixer.stream(chunk, state)
        parts.append(y)
        states.append(state)
    return torch.cat(parts, 1), states


# ------------------------------------------------------------------ options keep the promises too
OPTIONS = [
    ("axial_passes", {"width": 5}),
    ("axial", {"width": 5, "form": "row"}),
    ("image_local_2d", {"width": 6, "block": (2, 4), "memory": (1, 2), "order": "block"}),
    ("neighbourhood", {"length": 30, "width": 5, "size": (3, 2)}),
    ("swin", {"width": 5, "window": (2, 3), "position_bias": False}),
    ("star", {"cycles": 3, "shared": True}),
    ("star", {"cycles": 1}),
    ("etc", {"globals": 3, "radius": 2, "clip": 1, "segment": 4}),
    ("etc", {"globals": 2, "radius": 1, "shared": True}),
    ("bp_transformer", {"near": 5, "clip": 1}),
    ("longformer", {"window": (1, 3), "dilation": (2, 1), "bias": True}),
]


@pytest.mark.parametrize(
    ("name", "arguments"), OPTIONS, ids=lambda x: x if isinstance(x, str) else repr(x)[:50]
)
def test_options_keep_the_promises(name, arguments, executor):
    """Fails if a form that is not the recipe's example breaks a promise: leaks the future, say, or
    counts padding.
    """
    promised = get_recipe(name).can()
    result = check_mixer(
        lambda causal: regard.create(name, dim=8, heads=2, causal=causal, **arguments)
    )
    assert (result["causal"] == "supported") == promised.causal and (
        result["stream"] == "supported"
    ) == promised.stream
    assert result["padding"] == "supported"


# ---------------------------------------------------------------------------------- neighbourhood
@pytest.mark.parametrize(
    ("length", "size", "width"), [(40, 7, None), (40, 6, None), (40, (3, 4), 8), (48, (5, 1), 8)]
)
def test_every_query_sees_as_many(length, size, width):
    """Fails if a window is cut at the border in place of being shifted inward."""
    pattern = made("neighbourhood", length=length, size=size, width=width).inner.pattern
    count = size if isinstance(size, int) else size[0] * size[1]
    assert pattern.keys_per_query(length).tolist() == [count] * length
    assert pattern.allows(torch.arange(length), torch.arange(length)).all()


def test_a_window_larger_than_the_grid_sees_all(rand):
    """Fails if a short sequence cannot be looked at."""
    assert Neighbourhood(2, 3, 9, 9).dense(6).all()
    mixer, dense = made("neighbourhood", length=5, size=9), made("vanilla")
    x = rand(2, 5, 8)
    torch.testing.assert_close(mixer(x), dense(x))


def test_a_window_far_from_the_border_is_a_band():
    """Fails if the window does not stand on the query."""
    wide, band = Neighbourhood(1, 50, 1, 7).dense(50), regard.Band(3, 3).dense(50)
    assert torch.equal(wide[3:47], band[3:47])


# ----------------------------------------------------------------- orders and windows of an image
def test_block_order_walks_the_blocks():
    """Fails if an image is put into another order than the one that the pattern means."""
    assert block_order(4, 5, (2, 3)).tolist() == [
        0,
        1,
        2,
        5,
        6,
        7,
        3,
        4,
        8,
        9,
        10,
        11,
        12,
        15,
        16,
        17,
        13,
        14,
        18,
        19,
    ]
    order = block_order(6, 7, (3, 2))
    assert sorted(order.tolist()) == list(range(42))


def test_order_of_the_tokens_does_not_matter_where_it_is_not_causal(rand):
    """Fails if the same image in block order sees other pixels."""
    arguments = {"width": 7, "block": (2, 3), "memory": (1, 2)}
    raster, block = (
        made("image_local_2d", order=order, **arguments) for order in ("raster", "block")
    )
    x, order = rand(2, 42, 8), block_order(6, 7, (2, 3))
    torch.testing.assert_close(block(x[:, order])[:, order.argsort()], raster(x))


def test_block_order_is_the_order_of_generation():
    """Fails if a causal pixel sees what the paper has not generated yet, or does not see what it
    has.
    """
    height, width, (rows, cols), (up, aside) = 6, 7, (2, 3), (2, 3)
    order = block_order(height, width, (rows, cols)).tolist()
    mixer = made(
        "image_local_2d",
        width=width,
        block=(rows, cols),
        memory=(up, aside),
        order="block",
        causal=True,
    )
    seen = mixer.inner.causal_pattern.dense(height * width)
    when = {cell: time for time, cell in enumerate(order)}
    for i, cell in enumerate(order):
        top, left = cell // width // rows * rows, cell % width // cols * cols
        context = [
            y * width + x
            for y in range(max(0, top - up), top + rows)
            for x in range(left - aside, left + cols + aside)
            if 0 <= x < width
        ]
        want = sorted(when[other] for other in context if when[other] <= i)
        assert seen[i].nonzero()[:, 0].tolist() == want
    later = [(a, b) for a in range(42) for b in range(42) if order[b] > order[a] and seen[a, b]]
    assert later, "in raster order these keys would be in the future"


@pytest.mark.parametrize(
    ("height", "width", "window"), [(8, 12, (4, 4)), (6, 9, (2, 3)), (10, 10, (5, 5))]
)
def test_shifted_windows_are_the_cyclic_shift_with_its_mask(height, width, window):
    """Fails if a window wraps around the border, or stands elsewhere than in the paper."""
    rows, cols = window
    shift = rows // 2, cols // 2
    where = torch.zeros(
        height, width, dtype=torch.long
    )  # the paper's regions, numbered in the rolled image
    for number, (ys, xs) in enumerate(
        (y, x)
        for y in (slice(0, -rows), slice(-rows, -shift[0]), slice(-shift[0], None))
        for x in (slice(0, -cols), slice(-cols, -shift[1]), slice(-shift[1], None))
    ):
        where[ys, xs] = number
    at = torch.arange(height * width)
    tile = (at // width // rows * (width // cols) + at % width // cols) * 9 + where.flatten()
    rolled = at.view(height, width).roll((-shift[0], -shift[1]), (0, 1)).flatten()
    label = torch.empty_like(tile)
    label[rolled] = tile
    pattern = made("swin", width=width, window=window, layer=1).inner.pattern
    assert torch.equal(pattern.dense(height * width), label[:, None] == label)


def test_swin_takes_turns():
    """Fails if even layers are shifted, or the bias is not one number for each offset."""
    even, odd = (made("swin", width=8, window=4, layer=layer) for layer in (2, 3))
    assert even.inner.pattern == Blocks2D(8, 4, 4) and odd.inner.pattern == Blocks2D(
        8, 4, 4, cut_rows=2, cut_cols=2
    )
    assert even.inner.prior.table.shape == (2, 7, 7)
    assert made("swin", width=8, window=4, position_bias=False).inner.prior is None


# ------------------------------------------------------------------------------------------ axial
def test_every_earlier_cell_is_reached(rand):
    """Fails if the causal form in two passes is blind to some of the past: to what is above and to
    the right, say.
    """
    mixer, x = made("axial_passes", width=5, causal=True), rand(1, 23, 8)
    reach = influence(mixer, x) > 0
    assert torch.equal(reach, torch.ones(23, 23, dtype=torch.bool).tril())


def test_two_passes_reach_everything(rand):
    """Fails if a cell is not reached by its row and then its column."""
    assert (influence(made("axial_passes", width=5), rand(1, 20, 8)) > 0).all()


@pytest.mark.parametrize("size", [1, 3, 17, 64])
def test_two_passes_stream(size, rand):
    """Fails if a chunk that ends within a row loses it, or passes it on too early."""
    mixer, x = made("axial_passes", width=7, causal=True), rand(2, 100, 8)
    with torch.no_grad():
        torch.testing.assert_close(streamed(mixer, x, size)[0], mixer(x))


def test_a_row_that_never_ends_takes_no_memory(rand):
    """Fails if a width beyond every sequence is allocated."""
    mixer = made("axial_passes", width=10**12, causal=True)
    assert mixer(rand(1, 9, 8)).isfinite().all()


# ------------------------------------------------------------------------------------------- star
def test_the_ring_closes_over_the_tokens_that_are_there(rand):
    """Fails if padding is a neighbour, or a hole breaks the ring."""
    mixer, x = made("star", cycles=1), rand(1, 9, 8)
    real = torch.tensor([[1, 1, 0, 1, 1, 0, 1, 0, 0]], dtype=torch.bool)
    torch.testing.assert_close(mixer(x, mask=real)[real], mixer(x[real][None])[0])


def test_rounds_share_their_parameters_or_do_not():
    """Fails if `shared` is ignored, or if the last relay, which nobody reads, has parameters."""
    count = {}
    for shared in (False, True):
        mixer = made("star", cycles=3, shared=shared)
        count[shared] = len(mixer.satellites), len(mixer.relays)
    assert count == {False: (3, 2), True: (1, 1)}
    assert (
        len(made("star", cycles=1).relays) == 0 == len(made("star", cycles=1, shared=True).relays)
    )


def test_the_relay_is_told(rand):
    """Fails if a classifier cannot have the relay, which the paper adds to its tokens."""
    with regard.collect_aux() as notes:
        made("star")(rand(3, 5, 8))
    assert notes.all("relay")[0].shape == (3, 8)


# ---------------------------------------------------------------------------------------------- etc
def test_labels_are_clipped_and_know_the_kinds():
    """Fails if a label is another than the paper's."""
    labels = made("etc", globals=2, radius=3, clip=1, segment=3).all.inner.prior
    at = torch.arange(6)
    want = [
        [1, 2, 3, 3, 3, 4],
        [0, 1, 4, 4, 4, 3],
        [3, 4, 1, 2, 2, 2],
        [3, 4, 0, 1, 2, 2],
        [3, 4, 0, 0, 1, 2],
        [4, 3, 0, 0, 0, 1],
    ]
    assert labels.label(at[:, None], at).tolist() == want
    assert labels.vectors.shape == (2, 5, 4)


def test_kinds_have_projections_of_their_own(rand):
    """Fails if pieces share what they should not, or the other way round."""
    apart, shared = (made("etc", globals=2, radius=1, shared=s) for s in (False, True))
    labels = 2 * 2 * (2 * 12 + 2) * 4
    assert sum(p.numel() for p in apart.parameters()) == (2 + 4 + 4 + 2) * 64 + labels
    assert sum(p.numel() for p in shared.parameters()) == 4 * 64 + labels
    x = rand(1, 6, 8)
    torch.testing.assert_close(apart.long.k(x)[:, 2:], apart.long.k.rest(x)[:, 2:])
    torch.testing.assert_close(apart.long.k(x)[:, :2], apart.long.k.first(x)[:, :2])


def test_shared_projections_are_saved_once(rand):
    """Fails if a file would hold a shared matrix twice, which safetensors refuses, or a copy would
    lose the sharing.
    """
    mixer, x = made("etc", globals=2, radius=1, shared=True), rand(1, 6, 8)
    again = made("etc", globals=2, radius=1, shared=True)
    again.load_state_dict(load(save(mixer.state_dict())))
    torch.testing.assert_close(again(x), mixer(x))
    twin = deepcopy(mixer)
    with torch.no_grad():
        twin.long.q.weight.zero_()
    assert not torch.equal(twin(x)[:, :2], mixer(x)[:, :2])


def test_the_map_is_what_is_done_to_the_values(rand):
    """Fails if the two attentions of ETC are put together in another way in the map."""
    mixer, x = made("etc", globals=2, radius=1, shared=True), rand(1, 9, 8)
    v = mixer.long.v(x).unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(
        mixer.long.out((mixer.attention_map(x) @ v).transpose(1, 2).flatten(2)), mixer(x)
    )


def test_long_inputs_are_not_dense():
    """Fails if long tokens compute scores with all others."""
    pattern = made("etc").long.inner.pattern
    assert regard.explain(pattern, 8192).backend in ("sparse", "cpp")


# --------------------------------------------------------------------------------- BP-Transformer
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("near", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 2, 7, 64, 100])
def test_spans_cover_each_token_once(n, near, causal):
    """Fails if a token is left out, or counted in two spans."""
    mixer = made("bp_transformer", near=near, causal=causal)
    levels = mixer._levels(torch.zeros(1, n, 8, dtype=torch.float64), None, 0, ())
    sizes = [level.nodes.shape[1] for level in levels]
    spans = [
        range(i << level, min((i + 1) << level, n))
        for level, size in enumerate(sizes)
        for i in range(size)
    ]
    at, labels = visible_nodes(
        0, n, near, 10, causal, tuple(sum(sizes[:i]) for i in range(len(sizes)))
    )
    for i, row in enumerate(at.tolist()):
        covered = sorted(token for node in row if node >= 0 for token in spans[node])
        assert covered == list(range(i + 1 if causal else n))
    assert at.shape[1] == len(labels) <= 1 + near * (1 if causal else 2) * (n.bit_length() + 1)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_the_tree_keeps_a_few_spans_of_each_level(size, rand):
    """Fails if the state grows with the length, or forgets a span too early."""
    mixer, x = made("bp_transformer", near=3, causal=True), rand(2, N, 8)
    with torch.no_grad():
        y, states = streamed(mixer, x, size)
        torch.testing.assert_close(y, mixer(x))
    assert all(level.nodes.shape[1] <= 10 for _, levels in states for level in levels)
    assert len(states[-1][1]) == N.bit_length()


# ----------------------------------------------------------------------------------------- caches
CACHES = {  # recipe, arguments, and how many keys the last of 400 tokens, or a later one, can see
    "local": ({"window": 16}, 16),
    "sparse_strided": ({"stride": 16, "split": "layers"}, 16),
    "sinks": ({"sinks": 3, "window": 16}, 19),
    "image_local_1d": ({"block": 20, "memory": 10}, 29),
    "neighbourhood": ({"length": N, "size": 9}, 8),
    "image_local_2d": ({"width": 20, "block": (2, 5), "memory": (2, 5), "order": "block"}, 79),
    "swin": ({"width": 20, "window": 4}, 79),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches_are_bounded_as_the_pattern_allows(name, rand):
    """Fails if a stream keeps what no later token can see, or what is shown is not what is kept."""
    arguments, needed = CACHES[name]
    mixer, x = made(name, causal=True, **arguments), rand(1, N, 8)
    with torch.no_grad():
        y, states = streamed(mixer, x, 1)
        torch.testing.assert_close(y, mixer(x))
    assert max(len(state.positions) for state in states) <= max(2 * needed, needed + 64) + 1
    shown = cache_size(get_recipe(name), {"dim": 8, "heads": 2, **arguments}, N, mixer.can)
    assert shown.keys == (needed, needed) and shown.held == needed


def test_heads_that_keep_all_are_shown():
    """Fails if the strided heads of Sparse Transformer are said to forget."""
    shown = cache_size(
        get_recipe("sparse_strided"), {"dim": 8, "heads": 2, "stride": 16}, N, made("local").can
    )
    assert shown.keys == (16, 399) and shown.held == 399 and "16 to 399 keys" in str(shown)


def test_states_are_shown():
    """Fails if a state of fixed size is not told from one that grows, or from none."""
    words = {}
    for name in ("linear", "bp_transformer", "fnet"):
        recipe = get_recipe(name)
        heads = 1 if name == "fnet" else 2
        words[name] = str(cache_size(recipe, {"dim": 8, "heads": heads}, 1024, recipe.can()))
    assert words["linear"].startswith("state of constant size: about 9 vectors")
    assert words["bp_transformer"].startswith("state that may grow: about")
    assert words["fnet"].startswith("cannot stream: the Fourier transform")


# ------------------------------------------------------------------------------------- longformer
def test_marks_on_padding_have_no_effect(executor, rand):
    """Fails if a left-out token can be global."""
    mixer, x = made("longformer", window=2), rand(2, 30, 8)
    mask, global_attention_mask = (
        torch.arange(30).expand(2, -1) < 24,
        torch.zeros(2, 30, dtype=torch.bool),
    )
    global_attention_mask[0, 3] = True
    wrong = global_attention_mask.clone()
    wrong[:, 27] = True
    torch.testing.assert_close(
        mixer(x, mask=mask, global_attention_mask=wrong),
        mixer(x, mask=mask, global_attention_mask=global_attention_mask),
    )
    torch.testing.assert_close(
        mixer.attention_map(x, mask=mask, global_attention_mask=wrong),
        mixer.attention_map(x, mask=mask, global_attention_mask=global_attention_mask),
    )


def test_no_marks_at_all_are_fine(executor, rand):
    """Fails if marks that mark nothing are another thing than none."""
    mixer, x = made("longformer", window=2), rand(2, 30, 8)
    torch.testing.assert_close(
        mixer(x, global_attention_mask=torch.zeros(2, 30, dtype=torch.bool)), mixer(x)
    )


def test_windows_and_steps_are_for_each_head():
    """Fails if one head's window or dilation is given to another."""
    mixer = made("longformer", window=(1, 4), dilation=(3, 1), causal=True)
    assert mixer.local.inner.pattern == regard.PerHead((regard.Band(1, 1, 3), regard.Band(4, 4)))
    assert made("longformer", window=(3, 3)).local.inner.pattern.parts[0] == regard.Band(3, 3)


# ------------------------------------------------------------------------------------------ sinks
def test_sinks_stay_in_sight():
    """Fails if the window moves away from the first tokens, or the sinks see the future."""
    pattern = made("sinks", sinks=2, window=3, causal=True).inner.causal_pattern
    assert pattern.dense(9)[8].tolist() == [True, True, False, False, False, True, True, True, True]
    assert not pattern.dense(9).triu(1).any()


def test_half_precision_counts_far(rand):
    """Fails if the mean of a span is taken by a count that 16 bits cannot hold."""
    mixer = made("bp_transformer", near=1)
    x = F.pad(rand(1, 600, 8), (0, 0, 0, 1))
    mask = torch.arange(601)[None] != 300
    want, got = mixer(x, mask=mask), mixer.bfloat16()(x.bfloat16(), mask=mask)
    assert (got.double() - want)[mask].abs().mean() < 0.05 * want.abs().mean()


def test_the_masks_of_etc_cut_its_pieces():
    """Fails if a mask does not cut its piece, or cuts another."""
    n, g = 14, 3
    x = torch.randn(1, n, 8, dtype=torch.float64)
    for piece, rows, columns in (
        ("g2g", slice(0, g), slice(0, g)),
        ("g2l", slice(0, g), slice(g, n)),
        ("l2g", slice(g, n), slice(0, g)),
        ("l2l", slice(g, n), slice(g, n)),
    ):
        torch.manual_seed(0)
        seen = [
            regard.create("etc", dim=8, heads=2, globals=g, radius=3, clip=2, masks=masks)
            .double()
            .attention_map(x)[0, 0]
            > 0
            for masks in (None, {piece: regard.Band(1, 1)})
        ]
        want = seen[0].clone()
        want[rows, columns] &= regard.Band(1, 1).dense(n)[rows, columns]
        assert torch.equal(seen[1], want)
    with pytest.raises(ValueError, match="no piece 'g2x'"):
        regard.create("etc", dim=8, heads=2, masks={"g2x": regard.Band(1, 1)})
    with pytest.raises(ValueError, match="must be a Pattern"):
        regard.create("etc", dim=8, heads=2, masks={"g2l": 3})
