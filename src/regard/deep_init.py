"""What deep stacks want before the first step: Admin's profile, DeepNorm's start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard.block import Block
from regard.errors import Unsupported, check_positive
from regard.mixer import Mixer
from regard.residual import Admin

ASKING, TELLING = ("q", "k"), ("v", "out")  # what mixers call their projections


def admin_init(model: nn.Module, *batch: Tensor, **named: Tensor) -> list[float]:
    """Set ω of all `Admin` residuals by a look at real data (Liu et al. 2020, arXiv 2004.08249); returns them, in order.

    Runs model(*batch, **named) once, in evaluation and without gradients.  With x_{i−1} what sub-layer f_i reads,

        ω_1 = 1,    ω_{i+1} = √(Var[ω_i x_{i−1}] + Var[f_i(x_{i−1})])

    over all numbers of real tokens.  Where x is normalised, Var[ω_i x_{i−1}] = ω_i², so ω² adds up what the branches before
    it had to say.  An encoder and a decoder are profiled one by one: each begins with one.
    """
    joins = [part for part in model.modules() if isinstance(part, Admin)]
    if not joins:
        raise Unsupported("there is no Admin residual inside, so there is nothing to profile")
    taking = _Profile()
    with evaluation_mode(model), torch.no_grad(), taking.watching(joins):
        model(*batch, **named)
        missed = len(joins) - len(taking.found)
        if missed:
            raise ValueError(
                f"{missed} of {len(joins)} Admin residuals were not reached by this batch"
            )
    return list(taking.found.values())


class _Profile:
    """What was measured so far, in the order of the pass."""

    def __init__(self) -> None:
        self.next, self.found = 1.0, dict[Admin, float]()

    @contextmanager
    def watching(self, joins: list[Admin]) -> Iterator[None]:
        """Inside, they show what they join; where that fails, ω is as before."""
        before = [join.omega.clone() for join in joins]
        try:
            for join in joins:
                join.watch = self.visit
            yield
        except Exception:
            for join, omega in zip(joins, before, strict=True):
                join.omega.copy_(omega)
            raise
        finally:
            for join in joins:
                join.watch = None

    def visit(self, join: Admin, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        """Set ω before it is used, as the authors' code does: what comes later sees the stream as it will be."""
        if join in self.found:
            raise Unsupported(
                "an Admin residual runs twice in a pass, and one ω cannot fit two depths"
            )
        join.omega.fill_(self.next)
        self.found[join] = self.next
        scaled, y = ((t if mask is None else t[mask]).double() for t in (join.omega * x, y))
        self.next = (scaled.var(correction=0) + y.var(correction=0)).sqrt().item()
        if not 0 < self.next < float("inf"):
            raise ValueError(
                f"the tokens of this batch deviate by {self.next}: profile needs some that are real and differ"
            )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation; then each part is again in the mode it was in."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@torch.no_grad()
def deepnorm_init(model: nn.Module, beta: float) -> None:
    """Draw weights as DeepNorm wants them (Wang et al. 2022, arXiv 2203.00555): Xavier's normal distribution,

        W ~ N(0, gain² · 2 / (rows + columns)),

    with gain β in feed-forward layers and in projections to values and outputs, and 1 in those to queries and keys; their
    biases are zero.  Draws from torch's generator.  In a mixer, those are the linear layers called q, k, v and out; its
    other parts stay as they are, and a mixer without v or out is refused.
    """
    check_positive("beta", beta)
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    if not blocks:
        raise Unsupported("there is no Block inside, so there are no weights to draw")
    mixers = [
        mixer for block in blocks for mixer in (block.mixer, block.cross) if mixer is not None
    ]
    maps = [(mixer, _projections(mixer)) for mixer in mixers]
    for mixer, (_, telling) in maps:
        if not telling:
            raise Unsupported(
                f"{mixer.name} has no projection to values or outputs that β could make smaller"
            )
    for _, (asking, telling) in maps:
        _draw(asking, 1.0)
        _draw(telling, beta)
    for block in blocks:
        if block.ffn is not None:
            _draw(block.ffn.modules(), beta)


def _projections(mixer: Mixer) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """The linear layers that make queries and keys, and those that make values and outputs."""
    linear = [
        (name.rpartition(".")[2], part)
        for name, part in mixer.named_modules()
        if isinstance(part, nn.Linear)
    ]
    asking, telling = (
        [part for name, part in linear if name in names] for names in (ASKING, TELLING)
    )
    return asking, telling


def _draw(parts: Iterable[nn.Module], gain: float) -> None:
    """Matrices anew, also where several lie in one parameter; the biases of linear layers to zero."""
    for part in parts:
        for weight in part.parameters(recurse=False):
            if weight.dim() > 1:
                weight.normal_(0, gain * (2 / sum(weight.shape[-2:])) ** 0.5)
            elif isinstance(part, nn.Linear):
                weight.zero_()
