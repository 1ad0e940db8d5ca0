"""What a module does in one call, by formula: nothing is run, so that any size costs nothing.

    @formula(MyMixer)
    def _my_mixer(module: MyMixer, call: Call) -> Work:
        return work(module.up, call) + product(call.b, call.n, module.dim, module.rank)

A formula is found by the class of the module, or of one of its bases.  A mixer, layer, feed-forward layer or norm that has none
is counted instead, by a run on meta tensors, which have a shape and no numbers; what cannot run so raises, for nothing costs
a silent zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from regard.block import Layer
from regard.errors import Unsupported
from regard.ffn import FeedForward, MixtureOfExperts, ProductKeyMemory
from regard.measure.count import count
from regard.mixer import Mixer
from regard.norm import Norm


@dataclass(frozen=True)
class CallShape:
    """The sizes of one call.

    b, n, m   examples, queries, keys; a module that works token by token has b n tokens
    h, e, f   heads, width of their queries and keys, width of their values: for what stands inside `MultiHead`
    groups    heads of keys and values that are kept by a stream
    causal    no token depends on later ones
    """

    b: int
    n: int
    m: int
    h: int = 1
    e: int = 1
    f: int = 1
    groups: int = 1
    causal: bool = False

    @property
    def rows(self) -> int:
        """How many tokens there are in all."""
        return self.b * self.n

    @property
    def bh(self) -> int:
        """Examples times heads."""
        return self.b * self.h

    def of(self, n: int, m: int | None = None) -> CallShape:
        """The same for other numbers of queries and keys."""
        return replace(self, n=n, m=n if m is None else m)


@dataclass(frozen=True)
class ModuleCost:
    """What a call costs.

    forward, backward   FLOPs of products and transforms; a multiply-add is two
    again               of `backward`: what is computed a second time, so that it need not be kept
    saved               numbers that autograd keeps for the backward pass
    state               numbers that a stream keeps after n tokens
    parameters          numbers that are learned, those of all parts too
    active              those of them that a token uses: all, but for experts and memories
    parts               where it comes from, by name
    """

    forward: int = 0
    backward: int = 0
    again: int = 0
    saved: int = 0
    state: int = 0
    parameters: int = 0
    active: int = 0
    kind: str = ""
    parts: Mapping[str, ModuleCost] = field(default_factory=dict)

    def __add__(self, other: ModuleCost) -> ModuleCost:
        sums = {name: getattr(self, name) + getattr(other, name) for name in NUMBERS}
        return ModuleCost(**sums, parts={**self.parts, **other.parts})

    def __mul__(self, times: int) -> ModuleCost:
        return ModuleCost(**{name: times * getattr(self, name) for name in NUMBERS})

    __rmul__ = __mul__

    def keeping(self, saved: int) -> ModuleCost:
        """The same, but so many numbers are kept for the backward pass."""
        return replace(self, saved=saved)

    def holding(self, state: int) -> ModuleCost:
        """The same, and a stream keeps so many numbers."""
        return replace(self, state=state)


NUMBERS = ("forward", "backward", "again", "saved", "state")

Formula = Callable[[Any, CallShape], ModuleCost]
_formulas: dict[type, Formula] = {}


def formula(*kinds: type) -> Callable[[Formula], Formula]:
    """Register the decorated function, (module, call) -> Work, for these classes and for those that derive from them."""

    def register(function: Formula) -> Formula:
        for kind in kinds:
            _formulas[kind] = function
        return function

    return register


def module_cost(module: nn.Module, call: CallShape) -> ModuleCost:
    """What a module does in a call of these sizes."""
    found = next((_formulas[kind] for kind in type(module).__mro__ if kind in _formulas), None)
    result = run_on_meta(module, call) if found is None else found(module, call)
    if isinstance(module, Mixer | Layer) and not (module.causal and module.can.stream):
        result = result.holding(0)  # it does not stream
    parameters = sum(p.numel() for p in module.parameters())
    return replace(
        result, parameters=parameters, active=parameters - _idle(module), kind=type(module).__name__
    )


def _idle(module: nn.Module) -> int:
    """Parameters that a token does not use: those of experts that it does not ask, and slots that it does not read."""
    total = 0
    for part in module.modules():
        if isinstance(part, MixtureOfExperts):
            total += (
                sum(p.numel() for p in part.bank.parameters())
                * (part.count - part.top)
                // part.count
            )
        elif isinstance(part, ProductKeyMemory):
            total += part.values.numel() - min(len(part.values), part.heads * part.top) * part.dim
    return total


def run_on_meta(module: nn.Module, call: CallShape) -> ModuleCost:
    """What is counted in a run on meta tensors, in single precision."""
    name = type(module).__name__
    hint = (
        f"there is no formula for the cost of {name}: register one with regard.measure.work.formula"
    )
    if not isinstance(module, Mixer | Layer | FeedForward | Norm):
        raise Unsupported(hint)
    try:
        x, seen = (
            torch.empty(call.b, size, module.dim, device="meta") for size in (call.n, call.m)
        )
        looks = isinstance(module, Layer) and module.can.cross
        found = count(
            deepcopy(module).to("meta", torch.float32), x, **({"context": seen} if looks else {})
        )
    except Exception as error:  # whatever it is, the remedy is a formula
        raise Unsupported(
            f"{hint}; it cannot be counted on meta tensors either: {error}"
        ) from error
    return ModuleCost(round(found.forward), round(found.backward), saved=found.saved // 4)


def together(**parts: ModuleCost) -> ModuleCost:
    """The sum of parts, which are remembered by name."""
    total = sum(parts.values(), ModuleCost())
    return replace(
        total,
        parts={name: part for name, part in parts.items() if part != ModuleCost(kind=part.kind)},
    )


# ---------------------------------------------------------------------------------------------- what formulas are made of
def product(b: int, n: int, inner: int, m: int, *, saved: int | None = None) -> ModuleCost:
    """b matrix products (n inner) (inner m), both sides with gradients: forward one product, backward two.

    Autograd keeps both sides unless `save_load` says otherwise.
    """
    flops = 2 * b * n * inner * m
    return ModuleCost(flops, 2 * flops, saved=b * inner * (n + m) if saved is None else saved)


def one_sided(b: int, n: int, inner: int, m: int, *, saved: int = 0) -> ModuleCost:
    """The same with one side that is fixed, so that the backward pass has one product."""
    flops = 2 * b * n * inner * m
    return ModuleCost(flops, flops, saved=saved)


def blind(flops: int) -> ModuleCost:
    """Work that has no gradients: routing, hashing, drawing."""
    return ModuleCost(flops)


def kept(saved: int) -> ModuleCost:
    """Numbers that are kept, beside the sides of products."""
    return ModuleCost(saved=saved)
