"""Compressive memory: recent states, compressed states, and a loss for the compression only."""

from functools import partial

import pytest
import torch

import regard
from oracles import stacks
from regard import SoftmaxAttention
from regard.block import Block
from regard.ffn import MLP
from regard.mixer import MultiHead
from regard.position import Rope
from regard.prior import ALiBi
from regard.residual import PostNorm, PreNorm
from regard.stack import (
    AttentionReconstructionLoss,
    AutoEncodingLoss,
    CompressiveMemory,
    Conv1dCompression,
    MaxPoolCompression,
    MeanPoolCompression,
    MostUsedCompression,
    SegmentStack,
)
from regard.state import detach

DIM, HEADS, N = 8, 2, 27
KINDS = [MeanPoolCompression, MaxPoolCompression, Conv1dCompression, MostUsedCompression]


def stack(*, segment=4, residual=PreNorm, prior=None, count=2, **memory):
    torch.manual_seed(0)
    layers = [
        Block(
            MultiHead(DIM, HEADS, SoftmaxAttention(prior=prior), causal=True),
            MLP(DIM),
            residual=residual,
        )
        for _ in range(count)
    ]
    memory = {"memory_length": 6, "compressed_length": 3, "compression_rate": 2} | memory
    return SegmentStack(
        layers, segment_length=segment, memory=partial(CompressiveMemory, **memory)
    ).double()


# --------------------------------------------------------------------------------------- the oracle
def compressed(kind, memory, run, keep):
    """One compressed state of a group, and whether it is real."""
    real = [t for t, k in zip(run, keep, strict=True) if k]
    if kind is Conv1dCompression:
        conv = memory.compression.conv
        blank = [t if k else t * 0 for t, k in zip(run, keep, strict=True)]
        return conv.bias + sum(conv.weight[:, :, i] @ t for i, t in enumerate(blank)), bool(real)
    if not real:
        return run[0] * 0, False
    return (
        sum(real) / len(real) if kind is MeanPoolCompression else torch.stack(real).max(0).values
    ), True


def most_used(layer, now, real, old, keep, rate, pre):
    """The states to which the real tokens of `now` attend most, by content, in order."""
    if not any(keep):
        return [(t, False) for t in old[: len(old) // rate]]
    e, mixer = DIM // HEADS, layer.mixer
    used = [torch.tensor(-1.0) if not k else torch.tensor(0.0) for k in keep]
    places = [i for i, k in enumerate(keep) if k]
    for x, k in zip(now, real, strict=True):
        for h in range(HEADS if k else 0):
            q, *keys = [
                stacks.normed(t, layer.mixer_residual) if pre else t
                for t in (x, *(old[i] for i in places))
            ]
            part = slice(h * e, h * e + e)
            scores = torch.stack(
                [(mixer.q.weight[part] @ q) @ (mixer.k.weight[part] @ key) / e**0.5 for key in keys]
            )
            for i, w in zip(places, scores.softmax(0), strict=True):
                used[i] = used[i] + w
    best = sorted(sorted(range(len(old)), key=lambda i: -used[i])[: len(old) // rate])
    return [(old[i], keep[i]) for i in best]


def lost(layer, now, real, old, keep, new, pre):
    """Σ over the real tokens of (attn(old) − attn(new))², and the number of terms."""
    before = (lambda t: stacks.normed(t, layer.mixer_residual)) if pre else (lambda t: t)
    olds = [before(t) for t, k in zip(old, keep, strict=True) if k]
    news = [before(t) for t, k in new if k]
    gaps = []
    for x, k in zip(now, real, strict=True):
        if k:
            a, b = (
                stacks.read(layer.mixer, before(x), seen, [0] * len(seen), [0, 0])
                for seen in (olds, news)
            )
            gaps.append((a - b).square().sum())
    return sum(gaps), len(gaps) * DIM


def naive(stack, x, mask, kind, slopes, pre):
    """Outputs, and the attention reconstruction loss of each segment of each layer."""
    memory = stack.memories[0]
    rate, results, losses = memory.compression.rate, [], {}
    for row, keep in zip(x, mask, strict=True):
        held, done = [([], []) for _ in stack.layers], []  # pairs of a state and whether it is real
        for start in range(0, len(row), stack.segment_length):
            now, real = (
                list(row[start : start + stack.segment_length]),
                keep[start : start + stack.segment_length].tolist(),
            )
            for i, layer in enumerate(stack.layers):
                old, recent = held[i]
                past = [*old, *recent]
                after = stacks.block(
                    layer, [t for t, _ in past], now, [k for _, k in past] + real, slopes, pre
                )
                recent = recent + [(t.detach(), k) for t, k in zip(now, real, strict=True)]
                leaving = max(0, len(recent) - memory.memory_length) // rate * rate
                if leaving and len(now) == stack.segment_length:
                    going, going_real = (
                        [t for t, _ in recent[:leaving]],
                        [k for _, k in recent[:leaving]],
                    )
                    held_now = [t.detach() for t in now]
                    if kind is MostUsedCompression:
                        new = most_used(layer, held_now, real, going, going_real, rate, pre)
                    else:
                        runs = range(0, leaving, rate)
                        new = [
                            compressed(
                                kind,
                                stack.memories[i],
                                going[r : r + rate],
                                going_real[r : r + rate],
                            )
                            for r in runs
                        ]
                    losses.setdefault((start, i), []).append(
                        lost(layer, held_now, real, going, going_real, new, pre)
                    )
                    old, recent = (
                        (old + [(t.detach(), k) for t, k in new])[-memory.compressed_length :],
                        recent[leaving:],
                    )
                held[i], now = (old, recent), after
            done += now
        results.append(torch.stack(done))
    each = [sum(a for a, _ in rows) / max(1, sum(c for _, c in rows)) for rows in losses.values()]
    return torch.stack(results), torch.stack([torch.as_tensor(t, dtype=x.dtype) for t in each])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_loops(kind, residual, masked, rand):
    """Outputs, losses and gradients equal those of loops."""
    prior = ALiBi(HEADS)
    layers = stack(prior=prior, residual=residual, compression=kind)
    x, weight, mask = rand(2, N, DIM), rand(2, N, DIM), torch.ones(2, N, dtype=torch.bool)
    if masked:
        mask[0, 3:6], mask[1, 0], mask[1, 20:] = False, False, False
    t = x.clone().requires_grad_()
    with regard.collect_aux() as aux:
        y = layers(t, mask=mask) * mask[..., None]
    recorded = torch.stack(aux.all("attention_reconstruction_loss"))
    other = x.clone().requires_grad_()
    z, losses = naive(layers, other, mask, kind, prior.slopes.double(), residual is PreNorm)
    z = z * mask[..., None]
    torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(recorded, losses, rtol=1e-9, atol=1e-10)
    main = [p for name, p in layers.named_parameters() if "compress" not in name]
    for got, want in zip(
        torch.autograd.grad((y * weight).sum(), [t, *main]),
        torch.autograd.grad((z * weight).sum(), [other, *main]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    if kind is Conv1dCompression:
        conv = [p for name, p in layers.named_parameters() if "compress" in name]
        for got, want in zip(
            torch.autograd.grad(aux.loss(), conv),
            torch.autograd.grad(losses.sum(), conv, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


# ---------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("loss", [AttentionReconstructionLoss, AutoEncodingLoss])
def test_loss_trains_only_the_compression(loss, rand):
    """The loss does not train the transformer, nor the task the compression."""
    layers = stack(loss=loss)
    x = rand(2, N, DIM).requires_grad_()
    with regard.collect_aux() as aux:
        y = layers(x)
    names, parameters = zip(*layers.named_parameters(), strict=True)
    by_loss = torch.autograd.grad(
        aux.loss(), [*parameters, x], allow_unused=True, retain_graph=True
    )
    by_task = torch.autograd.grad(y.sum(), [*parameters, x], allow_unused=True)
    for name, a, b in zip([*names, "x"], by_loss, by_task, strict=True):
        assert (a is not None and a.abs().max() > 0) == name.startswith("memories"), name
        assert (b is None) == name.startswith("memories"), name


def test_no_gradient_between_segments(rand):
    """Earlier segments influence later ones (replacement) but get no gradient (Jacobian)."""
    layers, x = stack(), rand(1, 24, DIM)
    jacobian = torch.autograd.functional.jacobian(layers, x)[0, :, :, 0].abs().sum((1, 3))
    assert ((jacobian > 0) == torch.block_diag(*[torch.ones(4, 4).tril()] * 6).bool()).all()
    other = x.clone()
    other[:, 1] = rand(DIM)
    one = stack(count=1)
    changed = (one(other) != one(x)).any(-1)[0]
    assert (
        changed.tolist() == [False] + [True] * 15 + [False] * 8
    )  # after 16 tokens its run is the fourth from the end


def test_task_trains_compression_without_loss(rand):
    """With `loss=None`, the task trains the compression, but not the stored states."""
    layers, x = stack(loss=None), rand(1, N, DIM).requires_grad_()
    with regard.collect_aux() as aux:
        y = layers(x)
    assert not aux.entries
    conv = layers.memories[1].compression.conv.weight
    by_conv, by_x = torch.autograd.grad(y[:, 24:].sum(), [conv, x])
    assert by_conv.any() and not by_x[:, :24].any()
    _, state = layers.stream(x[:, :24])
    assert (
        state.layers[0].compressed.x.requires_grad
        and not detach(state).layers[0].compressed.x.requires_grad
    )


def test_pooling_adds_no_loss(rand):
    """Pooling has no parameters: its loss is recorded, but not part of `aux.loss()`."""
    with regard.collect_aux() as aux:
        stack(compression=MeanPoolCompression)(rand(1, N, DIM))
    assert (
        aux.names() == ["attention_reconstruction_loss"]
        and not aux.loss().any()
        and aux.entries[0].value > 0
    )


def test_loss_can_be_minimised(rand):
    """Gradient descent lowers the loss."""
    layers, x = (
        stack(segment=8, memory_length=8, compression_rate=4, compressed_length=4),
        rand(2, 32, DIM),
    )
    optimizer = torch.optim.Adam(layers.parameters(), 2e-2)
    costs = []
    for _ in range(20):
        with regard.collect_aux() as aux:
            layers(x)
        optimizer.zero_grad()
        aux.loss().backward()
        optimizer.step()
        costs.append(aux.loss().item())
    assert costs[-1] < 0.7 * costs[0]


def test_loss_ignores_positions(rand):
    """The loss compares by content, as in the paper: rotary embeddings do not change it."""
    layers, x = stack(count=1), rand(1, N, DIM)
    recorded = []
    for rotary in (None, Rope()):
        layers.layers[0].mixer.rotary = rotary
        with regard.collect_aux() as aux:
            y = layers(x)
        recorded.append((aux.loss(), y))
    torch.testing.assert_close(recorded[0][0], recorded[1][0])
    assert not torch.allclose(recorded[0][1], recorded[1][1])


def test_auto_encoding_matches_loops(rand):
    """The auto-encoding loss equals that of loops."""
    loss, old, new = AutoEncodingLoss(DIM, 3).double(), rand(2, 6, DIM), rand(2, 2, DIM)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = False
    weight, bias = loss.decode.weight, loss.decode.bias
    total = 0
    for a in range(2):
        for t in range(6):
            if mask[a, t]:
                total = (
                    total
                    + (old[a, t] - bias - weight[:, :, t % 3].T @ new[a, t // 3]).square().sum()
                )
    held = regard.stack.memory_attention.HiddenStates
    torch.testing.assert_close(loss(None, held(old, mask), held(new)), total / (mask.sum() * DIM))


# ----------------------------------------------------------------------------------------- the rest
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1, 7, 1, 14, 4), (4, 4, 4, 4, 4, 4, 3)])
def test_stream_matches_whole(sizes, kind, rand):
    """Outputs and losses do not depend on the chunks."""
    layers, x, state, parts = stack(compression=kind, prior=ALiBi(HEADS)), rand(2, N, DIM), None, []
    with regard.collect_aux() as whole:
        want = layers(x)
    with regard.collect_aux() as aux:
        for chunk in x.split(sizes, 1):
            y, state = layers.stream(chunk, state)
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    torch.testing.assert_close(aux.loss(), whole.loss())
    assert state.position == N


def test_state_is_bounded(rand):
    """The state does not exceed the configured lengths."""
    layers, state = stack(segment=5, memory_length=6, compression_rate=4, compressed_length=3), None
    for chunk in rand(1, 100, DIM).split(5, 1):
        _, state = layers.stream(chunk, state)
        for pair in state.layers:
            assert pair.recent.length < 6 + 4 and (
                pair.compressed is None or pair.compressed.length <= 3
            )
    assert pair.recent.length >= 6 and pair.compressed.length == 3


def test_range(rand):
    """A layer sees exactly memory + rate · compressed tokens before its segment."""
    layers, x = (
        stack(
            count=1,
            segment=4,
            memory_length=4,
            compressed_length=2,
            compression_rate=2,
            compression=MeanPoolCompression,
        ),
        rand(1, 24, DIM),
    )
    for position in range(24):
        other = x.clone()
        other[:, position] = rand(DIM)
        changed = (layers(other) != layers(x)).any(-1)[0, 20:]
        assert bool(changed.any()) == (position >= 20 - 4 - 2 * 2), position


def test_nan_in_padding(rand):
    """Masked tokens, even NaN, reach neither a real token nor a loss."""
    for kind in KINDS:
        layers, x, mask = (
            stack(compression=kind),
            rand(2, N, DIM),
            torch.ones(2, N, dtype=torch.bool),
        )
        mask[0, 2:7] = False
        poisoned = x.masked_fill(~mask[..., None], torch.nan)
        with regard.collect_aux() as clean:
            want = layers(x, mask=mask)
        with regard.collect_aux() as aux:
            got = layers(poisoned, mask=mask)
        torch.testing.assert_close(got[mask], want[mask])
        torch.testing.assert_close(aux.loss(), clean.loss())
        torch.testing.assert_close(
            aux.all("attention_reconstruction_loss"), clean.all("attention_reconstruction_loss")
        )


def test_hybrid_with_linear_layers(rand):
    """Layers that keep their own state can be part of the stack."""
    torch.manual_seed(0)
    layers = [
        Block(regard.create(name, dim=DIM, heads=HEADS, causal=True), MLP(DIM))
        for name in ("linear", "vanilla")
    ]
    hybrid = SegmentStack(
        layers,
        segment_length=4,
        memory=partial(CompressiveMemory, memory_length=4, compressed_length=2, compression_rate=2),
    ).double()
    assert hybrid(rand(1, N, DIM)).isfinite().all() and not hybrid.can.mask


def test_bad_input():
    """Invalid arguments raise an error."""
    with pytest.raises(
        ValueError, match=r"memory_length must be at least compression_rate \(4\), not 3"
    ):
        CompressiveMemory(DIM, memory_length=3, compressed_length=2, compression_rate=4)
    for name in ("memory_length", "compressed_length", "compression_rate"):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, not 0"):
            CompressiveMemory(
                DIM,
                **({"memory_length": 4, "compressed_length": 2, "compression_rate": 2} | {name: 0}),
            )
    with pytest.raises(ValueError, match="loss_weight must be a finite number above 0"):
        CompressiveMemory(
            DIM, memory_length=4, compressed_length=2, compression_rate=2, loss_weight=0
        )
    mixer = regard.create("vanilla", dim=DIM, heads=HEADS)
    with pytest.raises(regard.Unsupported, match="needs causal layers"):
        SegmentStack(
            [Block(mixer)],
            segment_length=4,
            memory=partial(
                CompressiveMemory, memory_length=4, compressed_length=2, compression_rate=2
            ),
        )
    assert "memory_length=6, compressed_length=3, compression_rate=2" in repr(stack())
