"""Mixers for `test_parallel_sequence.py`: the same for one process and for several."""

from functools import partial

import torch

import regard
from regard import (
    Band,
    Block,
    Chunks,
    Global,
    LinearAttention,
    MultiHead,
    PerHead,
    RandomBlocks,
    SoftmaxAttention,
)
from regard.feature import PositiveFeatures
from regard.ffn import MLP
from regard.position.embedding import LearnedEmbedding
from regard.position.rotary import Rope
from regard.prior import ALiBi, Gaussian
from regard.stack import SequentialStack

DIM, HEADS = 8, 2
BIG = Chunks(8, back=1, ahead=1) | Global(8) | RandomBlocks(8, 2, 30)


def pattern(expression, *, prior=None, backend="auto", **more):
    inner = SoftmaxAttention(expression, None if prior is None else prior(HEADS), backend=backend)
    return MultiHead(DIM, HEADS, inner, **more)


def recipe(name, **more):
    return regard.create(name, dim=DIM, heads=HEADS, **more)


def embedded(**more):
    return regard.with_position(pattern(Band(6, 3), **more), LearnedEmbedding(DIM, 40))


def performer(redraw, **more):
    return MultiHead(
        DIM, HEADS, LinearAttention(PositiveFeatures(DIM // HEADS, 8, redraw=redraw)), **more
    )


BUILD = {
    "window": partial(pattern, Band(5, 5)),
    "window-sparse": partial(pattern, Band(9, 9), backend="sparse"),
    "dense": partial(pattern, regard.Full()),
    "big": partial(pattern, BIG),
    "big-sparse": partial(pattern, BIG, backend="sparse"),
    "dilated": partial(pattern, Band(3, 3, 4)),
    "heads": partial(pattern, PerHead((Band(2, 2), Band(3, 3, 4) | Global(1)))),
    "shared-keys": partial(pattern, BIG, kv_heads=1),
    "rope": partial(pattern, Band(7, 7) | Global(2), rotary=Rope()),
    "alibi": partial(pattern, Global(3) | Chunks(4), prior=ALiBi),
    "gaussian-sparse": partial(
        pattern, Band(8, 8), prior=partial(Gaussian, sigma=3.0), backend="sparse"
    ),
    "embedded": embedded,
    "span": partial(recipe, "adaptive_span", longest=20, ramp=4),
    "talking": partial(recipe, "talking_heads"),
    "linear": partial(recipe, "linear"),
    "cosine": partial(recipe, "cosformer", length=40),
    "performer": partial(performer, None),
    "redrawn": partial(performer, 1),
    "fourier": partial(recipe, "rfa", features=6),
}
ONE_WAY = {
    "efficient": (partial(recipe, "efficient"), False),
    "retnet": (partial(recipe, "retnet"), True),
}
ONE_WAY |= {
    "gated": (partial(recipe, "gated_linear"), True),
    "delta": (partial(recipe, "delta_rule"), True),
}
FORMS = {
    f"{name}-causal" if causal else name: (build, causal)
    for name, build in BUILD.items()
    for causal in (False, True)
}
FORMS |= ONE_WAY


def built(name):
    build, causal = FORMS[name]
    torch.manual_seed(0)
    return build(causal=causal).double()


def stack(causal, wrap=lambda mixer: mixer):
    torch.manual_seed(0)
    kinds = ("rope", "linear", "retnet" if causal else "big")
    mixers = [
        FORMS[f"{kind}-causal" if causal and kind != "retnet" else kind][0](causal=causal)
        for kind in kinds
    ]
    return SequentialStack([Block(wrap(mixer), MLP(DIM)) for mixer in mixers]).double()


def tokens(n, seed=1):
    """x (b n d), and a weight for each output."""
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, DIM, dtype=torch.float64, generator=make) for _ in range(2)]


def padding(n):
    """One example without padding; one with a hole, and padding that covers more than the last
    slice."""
    mask = torch.arange(n) < torch.tensor([[n], [n // 2]])
    mask[1, n // 4] = False
    return mask


def outcome(module, x, weight, mask=None):
    """The output, and the gradients of the tokens and of the parameters."""
    x = x.clone().requires_grad_()
    y = module(x, mask=mask)
    (y * weight).sum().backward()
    return {"y": y.detach(), "x": x.grad, "parameters": [p.grad for p in module.parameters()]}
