"""Vectors that stand beside the tokens: one softmax, whatever the pattern and the prior."""

import pytest
import torch

import regard
from regard import (
    ALiBi,
    Band,
    Chunks,
    Full,
    Global,
    KeyPhase,
    MultiHead,
    PerHead,
    SoftmaxAttention,
    Unsupported,
)
from regard.attentions import PersistentMemoryAttention
from regard.attentions.persistent import shift_pattern
from regard.position import Rope, TUPEBias

PATTERNS = [
    Full(),
    Band(2, 2),
    Band(3, 1, 2),
    Global(2) | Band(1, 1),
    Chunks(4, back=1),
    ~Band(2, 2),
    KeyPhase(3, 2),
    PerHead((Band(1, 1), Global(1))),
    regard.RandomBlocks(2, 1, blocks=16),
]


def naive(layer, q, k, v, *, causal=False, mask=None):
    """All scores at once: over tokens, where the dense mask allows them, and over the vectors,
    everywhere."""
    n, m, e = q.shape[2], k.shape[2], q.shape[3]
    scores = q @ k.transpose(-1, -2) / e**0.5
    if layer.inner.prior is not None:
        scores = scores + layer.inner.prior(torch.arange(n)[:, None], torch.arange(m)[None], q, k)
    keep = layer.pattern.dense(n, m).clone()
    keep = (keep.tril() if causal else keep).expand(scores.shape)
    keep = keep if mask is None else keep & mask[:, None, None]
    more = q @ (layer.keys * e**0.5).transpose(-1, -2) / e**0.5
    weights = torch.cat((scores.masked_fill(~keep, -torch.inf), more), -1).softmax(-1)
    return weights[..., :m] @ v + weights[..., m:] @ (layer.values * layer.count**0.5)


def made(pattern=Full(), prior=None, count=3):
    torch.manual_seed(0)
    return PersistentMemoryAttention(SoftmaxAttention(pattern, prior), 2, 4, count).double()


def grads(f, leaves, weight):
    y = f()
    return [y, *torch.autograd.grad((y * weight).sum(), leaves)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_any_pattern(pattern, causal, executor, rand):
    """Fails if a pattern hides a vector, stands at another place because of them, or a gradient
    is another."""
    layer, (q, k, v) = made(pattern), (rand(2, 2, 21, 4).requires_grad_() for _ in range(3))
    leaves, weight = [q, k, v, layer.keys, layer.values], rand(2, 2, 21, 4)
    got = grads(lambda: layer(q, k, v, causal=causal)[0], leaves, weight)
    want = grads(lambda: naive(layer, q, k, v, causal=causal), leaves, weight)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)
    assert executor is None or set(executor) in ({"sparse"}, {"cpp"})


@pytest.mark.parametrize("pattern", [Full(), Band(4, 4)], ids=repr)
def test_with_a_prior_and_padding(pattern, executor, rand):
    """Fails if the prior is added to a vector, or the mask is off by their number; one example
    is nothing but padding."""
    layer, (q, k, v) = made(pattern, ALiBi(2)), (rand(3, 2, 17, 4) for _ in range(3))
    mask = torch.stack((torch.arange(17) < 12, torch.arange(17) % 3 != 1, torch.arange(17) < 0))
    torch.testing.assert_close(layer(q, k, v, mask=mask)[0], naive(layer, q, k, v, mask=mask))


@pytest.mark.parametrize("pattern", [*PATTERNS[:7], Band(2, 0) | Global(1)], ids=repr)
def test_a_stream_that_forgets(pattern, rand):
    """Fails if a long stream, whose cache lets go of keys, gives anything else than the whole."""
    layer, (q, k, v) = made(pattern, ALiBi(2)), (rand(1, 2, 200, 4) for _ in range(3))
    state, parts = layer.initial_state(), []
    for at in torch.arange(200).split((1, 70, 1, 1, 60, 67)):
        y, state = layer(q[:, :, at], k[:, :, at], v[:, :, at], causal=True, state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 2), naive(layer, q, k, v, causal=True))
    if pattern == Band(2, 2):
        assert len(state.positions) < 100


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("count", [1, 5, 64])
def test_blocks_of_a_later_pattern_are_sound(pattern, count):
    """Fails if the pattern behind the vectors answers for a block otherwise than pair by pair."""
    moved, n = shift_pattern(pattern, count), 24
    q, k = torch.arange(count, count + n), torch.arange(count + n)
    seen = moved.allows(q[:, None], k[None])
    assert seen[..., :count].all() and torch.equal(seen[..., count:], pattern.dense(n))
    for size in (3, 8):
        rows, cols = q[: n - n % size].view(-1, size), k[: len(k) - len(k) % size].view(-1, size)
        some, every = moved.block(rows[:, :1], rows[:, -1:], cols[None, :, 0], cols[None, :, -1])
        tiles = (
            seen[..., : rows.numel(), : cols.numel()]
            .unflatten(-1, (-1, size))
            .unflatten(-3, (-1, size))
        )
        assert (some | ~tiles.any(-1).any(-2)).all() and (~every | tiles.all(-1).all(-2)).all()


def test_it_takes_the_place_of_a_feed_forward_layer():
    """Fails if the default does not have the parameters of a feed-forward layer without biases."""
    plain, more = (regard.create(name, dim=16, heads=4) for name in ("vanilla", "all_attention"))
    from regard.ffn import MLP

    def count(module):
        return sum(p.numel() for p in module.parameters())

    assert count(more) - count(plain) == count(MLP(16, bias=False))


def test_a_prior_of_two_terms_scales_all_scores(rand):
    """Fails if the scale that TUPE asks for is lost behind the vectors, or the length that it
    knows."""
    layer, (q, k, v) = made(prior=TUPEBias(2, 8, 6)), (rand(1, 2, 6, 4) for _ in range(3))
    torch.testing.assert_close(layer(q, k, v)[0], naive(layer, q / 2**0.5, k, v))
    _, state = layer(q, k, v, causal=True, state=layer.initial_state())
    with pytest.raises(
        ValueError, match=r"the prior supports 9 positions, but the sequence has 10"
    ):
        layer(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True, state=state)


def test_what_it_refuses():
    """Fails if a map is shown that would not be one, or sizes that do not fit are taken."""
    with pytest.raises(Unsupported, match="learned keys have no position"):
        MultiHead(8, 2, made(), rotary=Rope())
    mixer = regard.create("all_attention", dim=8, heads=2, count=3)
    with pytest.raises(Unsupported, match="learned values"):
        mixer.attention_map(torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="count must be an integer >= 1"):
        regard.create("all_attention", dim=8, heads=2, count=0)
    with pytest.raises(ValueError, match="window must be"):
        regard.create("all_attention", dim=8, heads=2, window=-1)
    with pytest.raises(ValueError, match="built for 2 heads, not 3"):
        PersistentMemoryAttention(SoftmaxAttention(prior=ALiBi(2)), 3, 4, 5)
    marked = PersistentMemoryAttention(
        SoftmaxAttention(Band(1, 1) | regard.GlobalMaskKeys()), 2, 4, 3
    )
    with pytest.raises(Unsupported, match="global_attention_mask"):
        MultiHead(8, 2, marked)(
            torch.zeros(1, 3, 8), global_attention_mask=torch.ones(1, 3, dtype=torch.bool)
        )
