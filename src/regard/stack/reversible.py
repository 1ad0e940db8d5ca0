"""Reversible layers: what stood before a layer is computed from what stands after it, so that nothing need be kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.auxiliary import AuxEntry, collect_aux, is_collecting, record_aux
from regard.block import Layer, LayerInputs
from regard.mixer import State
from regard.stack.replay import ReplayRecorder, ReplayState, replay
from regard.stack.sequential import combine_capabilities


class ReversibleStack(Layer):
    """y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁), and back: x₂ = y₂ − g(y₁), x₁ = y₁ − f(x₂) (Gomez et al. 2017, arXiv 1707.04585;
    Reformer, Kitaev et al. 2020, arXiv 2001.04451).

    halves  f, g, f', g', ...: layers without residuals of their own, as `build_sublayers` makes them of a mixer and an ffn.  Each is
            one half step, (a, b) -> (b, a + f(b)), so there may be three for a layer of a decoder, as in Trax

    beside  True: at the end both streams stand side by side, twice as wide, as in Hugging Face and in the language model of
            Trax; False: the result is their mean, so that the width stays

    Reformer gives both streams the input, as here.

    In training the forward pass keeps the last a and b only.  The backward pass goes from the last half step to the first:
    it computes f(b) again, with the same random numbers and buffers, subtracts it to get a, and takes the gradient.  So
    activations take the same memory at any depth, for one more forward pass.  What is subtracted was rounded when it was
    added: gradients are exact up to that.  There are no second derivatives.  Costs and facts are told once, by the forward
    pass.  A stream, and a call that needs no gradients, runs plainly.
    """

    def __init__(self, halves: Sequence[Layer], *, beside: bool = False) -> None:
        can, causal, length = combine_capabilities(halves)
        super().__init__(halves[0].dim, can=can, causal=causal, length=length)
        self.beside, self.wide = beside, self.dim * (2 if beside else 1)
        self.halves: Sequence[Layer] = nn.ModuleList(halves)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """The states of all halves before the first chunk."""
        return tuple(half.initial_state() for half in self.halves)

    def run(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        if state is None and torch.is_grad_enabled() and self._learns(x, given):
            a, b = self._reversibly(x, given)
        else:
            a, b, state = self._plainly(x, given, state)
        return torch.cat((a, b), -1) if self.beside else (a + b) / 2, state

    def _plainly(self, x: Tensor, given: LayerInputs, state: State) -> tuple[Tensor, Tensor, State]:
        a, b, after = x, x, []
        for i, half in enumerate(self.halves):
            y, mine = half.run(b, given, None if state is None else state[i])
            a, b = b, a + y
            after.append(mine)
        return a, b, None if state is None else tuple(after)

    def _reversibly(self, x: Tensor, given: LayerInputs) -> tuple[Tensor, Tensor]:
        record = _Record(self.halves, given, x)
        a, b, *costs = _Steps.apply(record, x, x, given.context, *record.parameters)  # type: ignore[no-untyped-call]
        values = iter(costs)
        for note in record.notes:
            value = next(values) if note.is_loss else note.value
            record_aux(note.name, lambda value=value: value, is_loss=note.is_loss)  # type: ignore[misc]
        return a, b

    def _learns(self, x: Tensor, given: LayerInputs) -> bool:
        inputs = (x,) if given.context is None else (x, given.context)
        return any(t.requires_grad for t in (*inputs, *self.parameters()))


class _Record:
    """What one call of the stack must remember beside its tensors."""

    def __init__(self, halves: Sequence[Layer], given: LayerInputs, x: Tensor) -> None:
        self.halves, self.given, self.listens = (
            halves,
            given._replace(context=None),
            is_collecting(),
        )
        learning = [[p for p in half.parameters() if p.requires_grad] for half in halves]
        self.parameters = list({id(p): p for each in learning for p in each}.values())
        number = {id(p): i for i, p in enumerate(self.parameters)}
        self.numbers = [
            [number[id(p)] for p in each] for each in learning
        ]  # which of them each half has
        self.before: list[ReplayState] = []
        self.notes: list[AuxEntry] = []
        self.told: list[int] = []  # how many costs each half told
        self.device, self.casts = x.device.type, torch.is_autocast_enabled(x.device.type)
        self.dtype = torch.get_autocast_dtype(x.device.type) if self.casts else None

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Autocast as it was; without its cache, lest it serve the second pass weights of the first, which have no graph."""
        with (
            torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)
            if self.casts
            else nullcontext()
        ):
            yield

    def first(self, i: int, b: Tensor, context: Tensor | None) -> Tensor:
        """The i-th half, for the first time."""
        half = self.halves[i]
        witness = ReplayRecorder(half, b)
        with self.precision(), collect_aux() if self.listens else nullcontext() as notes:
            y, _ = half.run(b, self.given._replace(context=context), None)
        self.before.append(witness.result())
        entries = [] if notes is None else notes.entries
        self.notes += entries
        self.told.append(sum(note.is_loss for note in entries))
        return y

    def second(self, i: int, b: Tensor, context: Tensor | None) -> list[Tensor]:
        """The i-th half again, with a graph: its output, and the costs that were listened to."""
        half = self.halves[i]
        with (
            torch.enable_grad(),
            replay(half, self.before[i]),
            self.precision(),
            collect_aux() as notes,
        ):  # told already
            y, _ = half.run(b, self.given._replace(context=context), None)
        costs = [note.value for note in notes.entries if note.is_loss]
        return [y, *costs[: self.told[i]]]


class _Steps(torch.autograd.Function):
    """All half steps as one operation, which keeps its last two tensors."""

    @staticmethod
    def forward(
        ctx: Any, record: _Record, a: Tensor, b: Tensor, context: Tensor | None, *parameters: Tensor
    ) -> Any:
        """a, b (b n d) -> a, b (b n d), and the costs that the halves told."""
        for i in range(len(record.halves)):
            a, b = b, a + record.first(i, b, context)
        ctx.record = record
        ctx.save_for_backward(
            a, b, context, *parameters
        )  # parameters: so that a change of theirs is noticed
        return a, b, *(note.value.clone() for note in record.notes if note.is_loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, da: Tensor, db: Tensor, *costs: Tensor) -> Any:
        """From the last half step to the first."""
        a, b, context, *parameters = ctx.saved_tensors
        record: _Record = ctx.record
        sums = _Sums(context if ctx.needs_input_grad[3] else None, parameters)
        for i in reversed(range(len(record.halves))):
            own = costs[len(costs) - record.told[i] :]
            costs = costs[: len(costs) - record.told[i]]
            y, slope = _pull(record, i, a, context, (db, *own), sums)
            a, b = b - y, a
            da, db = db, da if slope is None else da + slope
        return None, da, db, *sums.all()


class _Sums:
    """The gradients of what all halves share."""

    def __init__(self, context: Tensor | None, parameters: Sequence[Tensor]) -> None:
        self.context, self.of_context = (
            context,
            None if context is None else torch.zeros_like(context),
        )
        self.of_parameters: list[Tensor | None] = [None for _ in parameters]

    def add(
        self, of_context: Tensor | None, numbers: Sequence[int], gradients: Sequence[Tensor | None]
    ) -> None:
        """What one half has to add; `numbers` say which parameters it has."""
        if self.of_context is not None and of_context is not None:
            self.of_context = self.of_context + of_context
        for number, gradient in zip(numbers, gradients, strict=True):
            if gradient is not None:
                known = self.of_parameters[number]
                self.of_parameters[number] = gradient if known is None else known + gradient

    def all(self) -> list[Tensor | None]:
        """In the order of the inputs."""
        return [self.of_context, *self.of_parameters]


def _pull(
    record: _Record,
    i: int,
    b: Tensor,
    context: Tensor | None,
    slopes: Sequence[Tensor],
    sums: _Sums,
) -> tuple[Tensor, Tensor | None]:
    """The i-th half again: f(b), and the gradient of b through it; those of context and parameters go to `sums`."""
    b = b.detach().requires_grad_()
    seen = context if sums.context is None or context is None else context.detach().requires_grad_()
    parameters = [record.parameters[number] for number in record.numbers[i]]
    inputs = [b, *([] if seen is None or sums.context is None else [seen]), *parameters]
    y, *costs = record.second(i, b, seen)
    found = _gradients([y, *costs], slopes, inputs)
    slope = found.pop(0)
    sums.add(None if sums.context is None else found.pop(0), record.numbers[i], found)
    return y.detach(), slope


def _gradients(
    outputs: Sequence[Tensor], slopes: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """What flows from the outputs to each input; None: nothing does."""
    pairs = [
        (out, slope.to(out.dtype))
        for out, slope in zip(outputs, slopes, strict=True)
        if out.requires_grad
    ]
    if not pairs:
        return [None for _ in inputs]
    outs, ins = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outs, inputs, ins, allow_unused=True))
