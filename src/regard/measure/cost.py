"""What a model costs at a length: parameters, FLOPs, activations and state, by layer and in all.

    found = cost(regard.create("bigbird", dim=512, heads=8, length=4096), 4096)
    print(found.forward, found.saved, found.parameters)

Nothing is run: a module that was built under `torch.device("meta")` costs no memory, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from regard.block import Layer
from regard.errors import check_int
from regard.measure import formulas
from regard.measure.work import CallShape, ModuleCost, module_cost
from regard.mixer import Mixer
from regard.models.embeddings import TokenEmbedding, VectorEmbedding
from regard.position import PositionEmbedding

LONGEST, MOST = 1 << 25, 1 << 40  # tokens, examples: numbers beyond are no sizes
__all__ = ["Cost", "cost", "formulas"]


@dataclass(frozen=True)
class Cost:
    """What one call of a module costs; see `regard.measure.work.ModuleCost` for what is counted.

    active              parameters that a token uses: all, but for experts that it does not ask
    forward, backward   FLOPs
    again               of `backward`: what is computed a second time
    saved               bytes of activations that autograd keeps
    state               bytes that a stream keeps after all tokens, `per_token` bytes more for each token
    """

    name: str
    kind: str
    parameters: int
    active: int
    forward: int
    backward: int
    again: int
    saved: int
    state: int
    per_token: float
    parts: tuple[Cost, ...] = ()

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Cost]]:
        """Itself and all parts, with how deep they stand."""
        yield depth, self
        for part in self.parts:
            yield from part.walk(depth + 1)

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        numbers = {key: value for key, value in vars(self).items() if key != "parts"}
        return numbers | {"parts": [part.as_json() for part in self.parts]}


def cost(
    module: nn.Module, length: int, *, batch: int = 1, width: int = 4, context: int | None = None
) -> Cost:
    """Of one forward and backward pass over (batch length) tokens.

    width     bytes of a number
    context   tokens of another sequence that is looked at; None: the tokens look at themselves
    """
    check_int(
        1,
        length=length,
        batch=batch,
        width=width,
        **({} if context is None else {"context": context}),
    )
    for name, size, most in (
        ("length", length, LONGEST),
        ("context", context or 0, LONGEST),
        ("batch", batch, MOST),
    ):
        if size > most:
            raise ValueError(f"{name} must be at most {most:,}, not {size:,}")
    check_length(module, max(length, context or 0))
    call = CallShape(batch, length, length if context is None else context)
    whole = module_cost(module, call)
    half = (
        module_cost(module, call.of(length // 2, context)) if whole.state and length > 1 else whole
    )
    return _named("model", whole, half, width, length - length // 2)


def check_length(module: nn.Module, length: int) -> None:
    """No part may have been built for fewer tokens."""
    for part in module.modules():
        most = _longest(part)
        if most is not None and length > most:
            raise ValueError(
                f"{type(part).__name__} was built for at most {most:,} tokens, and the length is {length:,}"
            )


def _longest(part: nn.Module) -> int | None:
    """How many tokens a part was built for; None: any number."""
    if isinstance(part, TokenEmbedding | VectorEmbedding):
        return part.position.length if isinstance(part.position, PositionEmbedding) else None
    return part.length if isinstance(part, Mixer | Layer) else None


def _named(name: str, whole: ModuleCost, half: ModuleCost, width: int, tokens: int) -> Cost:
    if not whole.state:  # parts of what does not stream keep nothing either
        whole = replace(
            whole, parts={part: found.holding(0) for part, found in whole.parts.items()}
        )
    parts = tuple(
        _named(part, found, half.parts.get(part, ModuleCost()), width, tokens)
        for part, found in whole.parts.items()
    )
    per_token = max(0.0, (whole.state - half.state) * width / tokens) if whole.state else 0.0
    return Cost(
        name,
        whole.kind,
        whole.parameters,
        whole.active,
        whole.forward,
        whole.backward,
        whole.again,
        whole.saved * width,
        whole.state * width,
        per_token,
        parts,
    )
