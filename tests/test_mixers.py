"""The parts that compose: what they promise together, and that together they compute what each
says.
"""

import pytest
import torch
from torch import nn

import regard
from regard import (
    Can,
    CompressedAttention,
    LinearAttention,
    Mixer,
    MultiHead,
    PrototypeAttention,
    RoutedAttention,
    SoftmaxAttention,
    Unsupported,
)
from regard.backends.token_groups import TokenGroups
from regard.compression import KVCompression, LengthProjection
from regard.feature import FeatureMap
from regard.mixers import Synthesizer
from regard.pattern import Band, Causal, Full, GlobalMask, RandomBlocks
from regard.prior import ALiBi
from regard.query_prototypes import QueryPrototypes
from regard.registry import get_recipe
from regard.route import Route
from regard.testing import check_mixer


# ---------------------------------------------------------------------------------------------- Can
def test_can_says_why_not():
    """Fails if a refusal loses its reason."""
    can = Can(cross="no map of the other", mask="no holes")
    assert not can.cross and not can.mask and can.causal and can.stream and can.length and can.maps
    assert can.reason("cross") == "no map of the other" and can.reason("stream") is None
    assert not Can().global_attention_mask and Can("global_attention_mask").global_attention_mask
    for reason in (None, True, ""):
        with pytest.raises(ValueError, match="must be the reason"):
            Can(cross=reason)


def test_both_can_what_both_can():
    """Fails if `&` forgets a refusal, or the reason that stands first."""
    a, b = Can(cross="a's reason", stream="a cannot"), Can(cross="b's reason", length="b cannot")
    both = a & b
    assert not (both.cross or both.stream or both.length) and both.mask and both.causal
    assert (
        both.reason("cross") == "a's reason"
        and both.reason("length") == "b cannot"
        and both.reason("stream") == "a cannot"
    )
    assert a & b == b & a and a & a == a and hash(a & b) == hash(b & a)
    assert a.length and b.stream  # neither was changed


def test_marks_need_both():
    """Fails if one part that knows no marks makes the other forget that."""
    assert (Can("global_attention_mask") & Can("global_attention_mask")).global_attention_mask
    assert (
        not (Can("global_attention_mask") & Can()).global_attention_mask
        and not (Can() & Can("global_attention_mask")).global_attention_mask
    )


def test_capabilities_that_are_declared():
    """Fails if a capability of `DECLARED` is there without a word, or its own reason is lost."""
    assert Can("gqa", "rotary").gqa and not Can("gqa").rotary and not Can().dropout
    with pytest.raises(ValueError, match="'cross' cannot be declared"):
        Can("cross")
    specific = Can(rotary="a reason of its own")
    for both in (Can() & specific, specific & Can(), Can().without(rotary="a reason of its own")):
        assert both.reason("rotary") == "a reason of its own"
    assert Can("gqa").without(cross="x").gqa and not Can("gqa").without(gqa="x").gqa
    assert Can(cross="first").without(cross="second").reason("cross") == "first"


def test_can_equality_and_repr():
    """Fails if it cannot be compared, or shows something else than what it can."""
    assert Can(cross="x") == Can(cross="y") != Can() and Can() != "Can()"
    known = "causal, mask, attn_mask, stream, length, maps, export, onnx, heads"
    assert repr(Can(cross="x")) == f"Can({known})"


def test_no_such_promise():
    """Fails if a misspelt refusal refuses nothing, silently."""
    with pytest.raises(ValueError, match="casual"):
        Can(casual="a typing error")


def test_softmax_promises_follow_from_the_parts():
    """Fails if a pattern that compares positions crosses, or one that was drawn for some length
    takes any.
    """
    assert SoftmaxAttention().can.cross and not SoftmaxAttention().can.global_attention_mask
    assert (
        not SoftmaxAttention(Band(1, 1)).can.cross
        and not SoftmaxAttention(prior=ALiBi(2)).can.cross
    )
    drawn = SoftmaxAttention(RandomBlocks(4, 1, 5))
    assert not drawn.can.length and drawn.length == 20 and "20" in drawn.can.reason("length")
    assert SoftmaxAttention(Full() & GlobalMask()).can.global_attention_mask


def test_refusals_raise_when_built():
    """Fails if what cannot be causal is built so."""
    for attention in (
        CompressedAttention(LengthProjection(10, 2, 2), SoftmaxAttention()),
        PrototypeAttention(Pooled(2), SoftmaxAttention()),
    ):
        with pytest.raises(Unsupported, match="causal=True: "):
            MultiHead(8, 2, attention, causal=True)


def test_composed_promises():
    """Fails if a composition promises more than its parts."""
    can = CompressedAttention(LengthProjection(10, 2, 2), SoftmaxAttention(Band(1, 1))).can
    assert not (can.causal or can.stream or can.length or can.cross) and can.mask and can.maps
    can = PrototypeAttention(Pooled(2), SoftmaxAttention(GlobalMask())).can
    assert not (can.causal or can.stream or can.global_attention_mask) and can.mask and can.length
    assert not RoutedAttention(SortedChunks(4)).can.stream


# ----------------------------------------------------------------------------------------- routed
class SortedChunks(Route):
    """Sorts queries and keys by their first number and lets each chunk of the sorted queries see
    one of the keys.
    """

    can = Can(
        stream="it sorts all tokens", causal="it sorts all tokens", mask="the toy sorts padding too"
    )

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, q, k, mask):
        return [TokenGroups(self.chunks(q), self.chunks(k))]

    def chunks(self, x):
        at = x[..., 0].argsort(-1)
        at = nn.functional.pad(at, (0, -at.shape[-1] % self.size), value=-1)
        return at.unflatten(-1, (-1, self.size))


class Windows(Route):
    """Overlapping windows of token numbers, so that most queries stand in two groups; allows each
    pair only once.
    """

    can = Can(stream="a toy", cross="a toy")

    def forward(self, q, k, mask):
        n = q.shape[2]
        even = torch.arange(-(-n // 4) * 4).view(-1, 4)
        odd = even + 2
        tidy = [torch.where(at < n, at, -1) for at in (even, odd)]
        again = (tidy[1][:, :, None] // 4) == (tidy[1][:, None, :] // 4)
        return [TokenGroups(tidy[0], tidy[0]), TokenGroups(tidy[1], tidy[1], ~again)]


def naive_softmax(q, k, v, seen, scale=None):
    """Attention of one head, by loops: q (n e), k (m e), v (m f), seen(i) -> key numbers."""
    scale = q.shape[1] ** -0.5 if scale is None else scale
    rows = []
    for i in range(len(q)):
        js = seen(i)
        weights = torch.stack([(q[i] @ k[j] * scale).exp() for j in js]) if js else q.new_zeros(0)
        rows.append(
            sum((w * v[j] for w, j in zip(weights, js, strict=True)), v.new_zeros(v.shape[1]))
            / (weights.sum() if js else 1)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("n", [1, 4, 10])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_routed_by_content(n, scale, rand):
    """Fails if a token attends outside its group, or to the padding of the last one."""
    q, k, v = (x.requires_grad_() for x in (rand(2, 3, n, 4), rand(2, 3, n, 4), rand(2, 3, n, 5)))
    got, state = RoutedAttention(SortedChunks(4), scale=scale)(q, k, v)
    want = torch.zeros_like(v)
    for b in range(2):
        for h in range(3):
            of_q, of_k = (x[b, h, :, 0].argsort().tolist() for x in (q, k))
            chunk = {i: place // 4 for place, i in enumerate(of_q)}
            mine = naive_softmax(
                q[b, h],
                k[b, h],
                v[b, h],
                lambda i, c=chunk, o=of_k: o[4 * c[i] : 4 * c[i] + 4],
                scale,
            )
            want = want.index_put((torch.tensor(b), torch.tensor(h)), mine)
    assert state is None
    torch.testing.assert_close(got, want)
    weight = rand(*got.shape)
    for a, b in zip(
        *(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (got, want)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_query_in_several_groups(causal, masked, rand):
    """Fails if groups are merged otherwise than by their sums of exponentials."""
    n = 13
    q, k, v = rand(1, 2, n, 4), rand(1, 2, n, 4), rand(1, 2, n, 4)
    mask = torch.arange(n)[None] % 3 != 1 if masked else None
    got, _ = RoutedAttention(Windows())(q, k, v, causal=causal, mask=mask)

    def seen(i):
        both = [
            j
            for j in range(n)
            if j // 4 == i // 4 or (i >= 2 and j >= 2 and (j - 2) // 4 == (i - 2) // 4)
        ]
        return [j for j in both if (not causal or j <= i) and (not masked or j % 3 != 1)]

    for h in range(2):
        torch.testing.assert_close(got[0, h], naive_softmax(q[0, h], k[0, h], v[0, h], seen))


def test_routed_keeps_its_promises():
    """Fails if the composition breaks what the toy promises."""
    result = check_mixer(lambda causal: MultiHead(8, 2, RoutedAttention(Windows()), causal=causal))
    assert (
        result["causality"] == result["padding"] == result["maps"] == "supported"
        and result["stream"] == "unsupported"
    )


def test_the_leak_of_sorted_chunks_is_found():
    """Fails if sort and chunk, declared causal, passes: its borders depend on later tokens."""

    class Lying(SortedChunks):
        can = Can(stream="it sorts all tokens", mask="a toy")

    with pytest.raises(AssertionError, match="when replaced"):
        check_mixer(lambda causal: MultiHead(8, 2, RoutedAttention(Lying(4)), causal=causal))


# ------------------------------------------------------------------------------------- prototypes
class Pooled(QueryPrototypes):
    """The mean of every `size` queries that are real asks for all of them."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, q, mask):
        n = q.shape[2]
        real = torch.ones(q.shape[0], n, dtype=q.dtype) if mask is None else mask.to(q.dtype)
        weight = nn.functional.pad(real, (0, -n % self.size)).unflatten(1, (-1, self.size))[
            :, None, ..., None
        ]
        tiles = nn.functional.pad(q, (0, 0, 0, -n % self.size)).unflatten(2, (-1, self.size))
        means = (tiles * weight).sum(3) / weight.sum(3).clamp(min=1)
        return means, lambda y: y.repeat_interleave(self.size, 2)[:, :, :n]


@pytest.mark.parametrize("n", [1, 6, 11])
@pytest.mark.parametrize("masked", [False, True])
def test_prototypes(n, masked, rand):
    """Fails if a query does not get the answer of its prototype."""
    q, k, v = rand(2, 2, n, 4), rand(2, 2, n, 4), rand(2, 2, n, 3)
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, n // 2 :] = not masked
    got, _ = PrototypeAttention(Pooled(3), SoftmaxAttention())(
        q, k, v, **({"mask": mask, "query_mask": mask} if masked else {})
    )
    for b in range(2):
        real = [j for j in range(n) if mask[b, j]]
        for h in range(2):
            for i in range(n):
                group = [j for j in range(i - i % 3, min(i - i % 3 + 3, n)) if mask[b, j]]
                mean = sum((q[b, h, j] for j in group), q.new_zeros(4)) / max(len(group), 1)
                want = naive_softmax(mean[None], k[b, h], v[b, h], lambda i, real=real: real)[0]
                torch.testing.assert_close(got[b, h, i], want)


def test_prototypes_keep_their_promises():
    """Fails if the composition breaks what the toy promises."""
    result = check_mixer(
        lambda causal: MultiHead(
            8, 2, PrototypeAttention(Pooled(3), SoftmaxAttention()), causal=causal
        )
    )
    assert (
        result["padding"] == result["maps"] == result["cross"] == "supported"
        and result["causal"] == "unsupported"
    )


# ------------------------------------------------------------------------------------- compressed
@pytest.mark.parametrize(
    ("share", "matrices", "shape"),
    [("none", 2, (4, 5, 20)), ("heads", 2, (1, 5, 20)), ("kv", 1, (1, 5, 20))],
)
def test_compressed_sharing(share, matrices, shape):
    """Fails if sharing does not save the parameters that it should, or shares in name only."""
    mixer = regard.create("linformer", dim=8, heads=4, length=20, rank=5, share=share)
    own = {id(p): p for p in mixer.inner.compression.parameters()}
    assert len(own) == matrices and all(p.shape == shape for p in own.values())
    assert (mixer.inner.compression.e is mixer.inner.compression.f) == (share == "kv")


def test_compressed_with_the_identity_is_dense(rand):
    """Fails if a projection that changes nothing changes something."""
    context = LengthProjection(12, 12, 2).double()
    with torch.no_grad():
        context.e.copy_(torch.eye(12))
        context.f.copy_(torch.eye(12))
    q, k, v = rand(2, 2, 12, 4), rand(2, 2, 12, 4), rand(2, 2, 12, 4)
    torch.testing.assert_close(
        CompressedAttention(context, SoftmaxAttention())(q, k, v)[0], regard.attend(q, k, v)
    )
    linear = LinearAttention()
    torch.testing.assert_close(CompressedAttention(context, linear)(q, k, v)[0], linear(q, k, v)[0])


def test_a_memory_may_pass_a_mask_on(rand):
    """Fails if the mask that a memory returns is lost."""

    class Halves(KVCompression):
        can = Can(causal="a toy", stream="a toy")

        def forward(self, k, v, mask):
            mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if mask is None else mask
            return k[:, :, ::2], v[:, :, ::2], mask[:, ::2]

    q, k, v = rand(2, 2, 10, 4), rand(2, 2, 10, 4), rand(2, 2, 10, 4)
    mask = torch.arange(10).expand(2, 10) < 5
    got = CompressedAttention(Halves(), SoftmaxAttention())(q, k, v, mask=mask)[0]
    even = torch.arange(10).expand(2, 10) % 2 == 0
    torch.testing.assert_close(got, regard.attend(q, k, v, mask=mask & even))


# ------------------------------------------------------------------------------------------ heads
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "attention",
    [SoftmaxAttention, lambda: SoftmaxAttention(Band(3, 3)), LinearAttention],
    ids=["full", "band", "linear"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_shared_heads_are_repeated_heads(kv_heads, attention, causal, rand):
    """Fails if heads that share keys differ from heads with equal keys."""
    torch.manual_seed(0)
    few = MultiHead(8, 4, attention(), kv_heads=kv_heads, causal=causal).double()
    many = MultiHead(8, 4, attention(), causal=causal).double()
    assert few.k.weight.shape == (2 * kv_heads, 8)
    with torch.no_grad():
        for name in ("q", "out"):
            getattr(many, name).weight.copy_(getattr(few, name).weight)
        for name in ("k", "v"):
            weight = (
                getattr(few, name)
                .weight.unflatten(0, (kv_heads, 2))
                .repeat_interleave(4 // kv_heads, 0)
                .flatten(0, 1)
            )
            getattr(many, name).weight.copy_(weight)
    x = rand(2, 15, 8)
    torch.testing.assert_close(few(x), many(x))
    torch.testing.assert_close(few.attention_map(x), many.attention_map(x))
    if causal:
        y, state = few.stream(x[:, :6])
        torch.testing.assert_close(torch.cat((y, few.stream(x[:, 6:], state)[0]), 1), many(x))


def test_shared_heads_keep_their_promises():
    """Fails if sharing heads breaks streaming, maps or padding."""
    check_mixer(
        lambda causal: MultiHead(
            8, 4, SoftmaxAttention(Band(4, 4)), kv_heads=2, bias=True, causal=causal
        )
    )


def test_prior_inside_a_mixer(executor):
    """Fails if a prior breaks streaming, maps or padding."""
    result = check_mixer(
        lambda causal: MultiHead(8, 2, SoftmaxAttention(Band(6, 6), ALiBi(2)), causal=causal)
    )
    assert result["stream"] == result["maps"] == "supported" and result["cross"] == "unsupported"


def test_another_feature():
    """Fails if linear attention works for one feature only."""

    class Squares(FeatureMap):
        def forward(self, x, at, query):
            return torch.cat((x**2, torch.ones_like(x[..., :1])), -1), None

    result = check_mixer(
        lambda causal: MultiHead(8, 2, LinearAttention(Squares(), chunk=5), causal=causal)
    )
    assert result["stream"] == result["cross"] == "supported"


# ------------------------------------------------------------------------------- mixed precision
@pytest.mark.parametrize("name", regard.list_recipes())
def test_recipes_under_autocast(name):
    """Fails if a recipe mixes dtypes under autocast, or has no gradients there."""
    torch.manual_seed(0)
    mixer = regard.registry.get_recipe(name).example()
    x = torch.randn(1, 24, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        mixer(x).float().square().sum().backward()
        got = mixer.eval()(x)
    torch.testing.assert_close(got.float(), mixer(x), rtol=0.1, atol=0.1)
    assert x.grad.isfinite().all() and x.grad.abs().max() > 0


# --------------------------------------------------------------------------- attention as a layer
def plain_heads(name):
    """Whether it has heads and a map, with one matrix for all values, and values for each head."""
    mixer = regard.registry.get_recipe(name).example()
    heads = (
        mixer.can.maps
        and isinstance(mixer, MultiHead | Synthesizer)
        and isinstance(mixer.v, nn.Linear | nn.Identity)
    )
    return heads and not (isinstance(mixer, MultiHead) and mixer.kv_heads < mixer.heads)


@pytest.mark.parametrize("name", [n for n in regard.list_recipes() if plain_heads(n)])
def test_attention_is_a_dense_layer_whose_weights_depend_on_the_input(name, rand):
    """Fails if an attention, its map held fixed, is not the linear layer over tokens that the map
    says.
    """
    torch.manual_seed(0)
    mixer = regard.registry.get_recipe(name).example().double().eval()
    x = rand(1, 12, 8)
    weights = mixer.attention_map(x)[0]  # (h n m)
    heads, width = mixer.heads, 8 // mixer.heads
    layer = nn.Linear(12 * 8, 12 * 8, bias=False).double()  # tokens and widths in one vector
    v, out = (
        (p.weight if isinstance(p, nn.Linear) else torch.eye(8, dtype=x.dtype))
        for p in (mixer.v, mixer.out)
    )
    with torch.no_grad():
        parts = (
            out[:, h * width : (h + 1) * width] @ v[h * width : (h + 1) * width]
            for h in range(heads)
        )
        layer.weight.copy_(
            sum(torch.kron(weights[h].contiguous(), part) for h, part in enumerate(parts))
        )
    torch.testing.assert_close(layer(x.flatten()).view(1, 12, 8), mixer(x))
    free = (
        "linformer",
        "linear",
        "sinkhorn",
        "rfa",
        "nystrom",
        "hard_gaussian",
    )  # may weigh less than 0, or sum to another
    if name not in free:
        assert weights.min() >= 0 and torch.all(
            (weights.sum(-1) - 1).abs().min(weights.sum(-1)) < 1e-9
        )


def test_maps_are_softmax_rows(rand):
    """Fails if a map is not what it should be, for cross-attention and padding too."""
    torch.manual_seed(0)
    mixer = regard.create("vanilla", dim=8, heads=2).double()
    x, context, mask = rand(2, 5, 8), rand(2, 9, 8), torch.arange(9).expand(2, 9) < 6
    a = mixer.attention_map(x, context, mask=mask)
    assert a.shape == (2, 2, 5, 9) and not a[..., 6:].any()
    torch.testing.assert_close(a.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
    with pytest.raises(Unsupported, match="map"):
        regard.create("fnet", dim=8).attention_map(x)


def test_longformer_map_with_marks(rand):
    """Fails if the map of a marked token is that of the window."""
    torch.manual_seed(0)
    mixer = regard.create("longformer", dim=8, heads=2, window=1).double()
    global_attention_mask = torch.zeros(1, 12, dtype=torch.bool)
    global_attention_mask[0, 5] = True
    a = mixer.attention_map(rand(1, 12, 8), global_attention_mask=global_attention_mask)[0]
    assert a[:, 5].all() and a[:, :, 5].all()
    assert (a[:, 0] != 0).sum() == 2 * 3  # itself, its neighbour and the marked one
    assert torch.all(
        mixer.attention_map(rand(1, 12, 8), global_attention_mask=~global_attention_mask)[0] > 0
    )


# ---------------------------------------------------------------------------------- the interface
def test_a_mixer_is_abstract():
    """Fails if a mixer without a mechanism can be built."""
    with pytest.raises(TypeError, match="mix"):
        Mixer(8, can=Can())


def test_names_in_messages():
    """Fails if a refusal does not say who refuses, and why."""
    with pytest.raises(
        Unsupported,
        match=r"fnet does not support a padding mask: the Fourier transform runs over the whole",
    ):
        regard.create("fnet", dim=8)(torch.zeros(1, 3, 8), mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(Unsupported, match="built with causal=False"):
        regard.create("vanilla", dim=8, heads=2).stream(torch.zeros(1, 3, 8))


def test_print_shows_the_pattern():
    """Fails if printing a model does not say what its attention does."""
    text = repr(regard.create("bigbird", dim=8, heads=2, length=64, block=8))
    assert "Chunks(8, 1, 1)" in text and "RandomBlocks(8, 3, 8)" in text and "heads=2" in text


def test_causal_pattern_twice_is_causal_once():
    """Fails if a causal mixer over a causal pattern is laid out twice."""
    assert SoftmaxAttention(Causal()).causal_pattern == Causal()


def test_weights_do_not_depend_on_the_global_generator():
    """Fails if building draws a random pattern from the global generator."""
    torch.manual_seed(1)
    one = regard.create("bigbird", dim=8, heads=2, length=64, block=4)
    torch.manual_seed(2)
    other = regard.create("bigbird", dim=8, heads=2, length=64, block=4)
    assert one.inner.pattern == other.inner.pattern
    third = regard.create("bigbird", dim=8, heads=2, length=64, block=4, seed=7)
    assert third.inner.pattern != one.inner.pattern
    assert not torch.equal(third.inner.pattern.dense(64), one.inner.pattern.dense(64))
    state = torch.get_rng_state()
    other(torch.zeros(1, 20, 8))
    assert torch.equal(torch.get_rng_state(), state)


def test_causal_longformer_says_why_it_takes_no_marks(rand):
    """Fails if the reason is that of another part."""
    mixer = regard.create("longformer", dim=8, heads=2, causal=True).double()
    with pytest.raises(regard.Unsupported, match="window only"):
        mixer(rand(1, 5, 8), global_attention_mask=torch.zeros(1, 5, dtype=torch.bool))


def test_causal_is_yes_or_no():
    """Fails if causal="no" builds a causal mixer."""
    with pytest.raises(TypeError, match="causal must be True or False, not 'no'"):
        regard.create("vanilla", dim=8, heads=2, causal="no")


def test_poisoned_values_do_not_leak_from_linear_attention(rand):
    """Fails if a left-out value is multiplied by zero, which NaN survives."""
    q, k, v = rand(3, 1, 2, 9, 4)
    mask = torch.arange(9)[None] < 6
    v[:, :, 6:] = torch.nan
    assert regard.LinearAttention()(q, k, v, mask=mask)[0].isfinite().all()


@pytest.mark.parametrize("name", regard.list_recipes(can=["maps"]))
def test_a_map_changes_nothing(name):
    """Fails if an attention map in training mode redraws features, draws noise, moves averages,
    records auxiliary outputs or leaves training mode.
    """
    recipe = get_recipe(name)
    kwargs = dict(recipe.example_kwargs)
    if "redraw" in recipe.options:
        kwargs["redraw"] = 1
    for causal in recipe.causal_options():
        mixer = recipe.build(8, recipe.default_heads(2), **kwargs, causal=causal).train()
        x = torch.randn(2, 23, mixer.dim, generator=torch.Generator().manual_seed(0))
        before = {key: value.clone() for key, value in mixer.state_dict().items()}
        random_numbers = torch.get_rng_state()
        with regard.collect_aux() as aux:
            weights = mixer.attention_map(x)
        assert not aux.entries
        assert torch.equal(torch.get_rng_state(), random_numbers)
        after = mixer.state_dict()
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert all(part.training for part in mixer.modules())
        assert torch.equal(mixer.eval().attention_map(x), weights)
