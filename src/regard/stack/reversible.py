"""Reversible layers: inputs are recomputed from outputs in the backward pass instead of stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.auxiliary import AuxEntry, collect_aux, is_collecting, record_aux
from regard.block import Layer, LayerInputs, run_layer
from regard.mixer import State
from regard.stack.replay import ReplayRecorder, ReplayState, replay
from regard.stack.sequential import combine_capabilities


class ReversibleStack(Layer):
    """y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁), with the inverse x₂ = y₂ − g(y₁), x₁ = y₁ − f(x₂)
    (Gomez et al. 2017, arXiv 1707.04585; Reformer, Kitaev et al. 2020, arXiv 2001.04451).

    Both streams start with the input, as in Reformer.

    In training the forward pass stores only the last pair of streams. The backward pass goes from
    the last sub-layer to the first: it recomputes f, with the same random numbers and buffers,
    subtracts it, and takes the gradient. Activation memory is independent of depth, at the cost of
    one more forward pass. Gradients are exact up to the rounding of additions; there are no second
    derivatives. Auxiliary outputs are recorded once, by the forward pass. Streaming and calls
    without gradients run normally.

    Args:
        sublayers: f, g, f', g', ...: layers without residuals, as `build_sublayers` returns them.
            Each is one step (a, b) -> (b, a + f(b)), so a decoder layer may have three, as in Trax.
        concat: Concatenate both streams at the end, doubling the width, as in Hugging Face and the
            language model of Trax. False: return their mean.
    """

    def __init__(self, sublayers: Sequence[Layer], *, concat: bool = False) -> None:
        can, causal, length = combine_capabilities(sublayers)
        super().__init__(sublayers[0].dim, can=can, causal=causal, length=length)
        self.concat, self.out_dim = concat, self.dim * (2 if concat else 1)
        self.sublayers: Sequence[Layer] = nn.ModuleList(sublayers)  # type: ignore[assignment]

    def initial_state(self) -> State:
        """States of all sub-layers before the first chunk."""
        return tuple(sublayer.initial_state() for sublayer in self.sublayers)

    def run(self, x: Tensor, inputs: LayerInputs, state: State) -> tuple[Tensor, State]:
        """See `Layer`."""
        sources = (x,) if inputs.context is None else (x, inputs.context)
        needs_grad = any(t.requires_grad for t in (*sources, *self.parameters()))
        if state is None and torch.is_grad_enabled() and needs_grad:
            a, b = self._run_reversible(x, inputs)
        else:
            a, b, state = self._run_plain(x, inputs, state)
        return torch.cat((a, b), -1) if self.concat else (a + b) / 2, state

    def _run_plain(
        self, x: Tensor, inputs: LayerInputs, state: State
    ) -> tuple[Tensor, Tensor, State]:
        a, b, states = x, x, []
        for i, sublayer in enumerate(self.sublayers):
            sublayer_state = None if state is None else state[i]
            y, sublayer_state = run_layer(sublayer, b, inputs, sublayer_state)
            a, b = b, a + y
            states.append(sublayer_state)
        return a, b, None if state is None else tuple(states)

    def _run_reversible(self, x: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        call = _ReversibleCall(self.sublayers, inputs, x)
        a, b, *losses = _ReversibleFunction.apply(call, x, x, inputs.context, *call.parameters)  # type: ignore[no-untyped-call]
        remaining = iter(losses)
        for entry in call.aux:
            value = next(remaining) if entry.is_loss else entry.value
            record_aux(entry.name, lambda value=value: value, is_loss=entry.is_loss)  # type: ignore[misc]
        return a, b


class _ReversibleCall:
    """Everything but tensors that a call needs to remember for its backward pass."""

    def __init__(self, sublayers: Sequence[Layer], inputs: LayerInputs, x: Tensor) -> None:
        self.sublayers, self.inputs = sublayers, inputs._replace(context=None)
        trained = [[p for p in sublayer.parameters() if p.requires_grad] for sublayer in sublayers]
        self.parameters = list({id(p): p for each in trained for p in each}.values())
        index = {id(p): i for i, p in enumerate(self.parameters)}
        self.parameter_indices = [[index[id(p)] for p in each] for each in trained]
        self.before: list[ReplayState] = []
        self.collects_aux = is_collecting()
        self.aux: list[AuxEntry] = []
        self.loss_counts: list[int] = []  # auxiliary losses of each sub-layer
        device = x.device.type
        self.device, self.uses_autocast = device, torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if self.uses_autocast else None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Autocast as in the call, without its cache: weights cached before have no graph."""
        if not self.uses_autocast:
            yield
            return
        with torch.autocast(self.device, dtype=self.dtype, cache_enabled=False):
            yield

    def run(self, i: int, b: Tensor, context: Tensor | None) -> Tensor:
        """Run sub-layer i and record what is needed to run it again."""
        sublayer = self.sublayers[i]
        recorder = ReplayRecorder(sublayer, b)
        with self.autocast(), collect_aux() if self.collects_aux else nullcontext() as aux:
            y, _ = sublayer.run(b, self.inputs._replace(context=context), None)
        self.before.append(recorder.changes())
        entries = [] if aux is None else aux.entries
        self.aux += entries
        self.loss_counts.append(sum(entry.is_loss for entry in entries))
        return y

    def run_again(self, i: int, b: Tensor, context: Tensor | None) -> list[Tensor]:
        """Run sub-layer i again with a graph; return its output and the losses collected before."""
        sublayer = self.sublayers[i]
        with (
            torch.enable_grad(),
            replay(sublayer, self.before[i]),
            self.autocast(),
            collect_aux() as aux,  # so that nothing is recorded twice
        ):
            y, _ = sublayer.run(b, self.inputs._replace(context=context), None)
        losses = [entry.value for entry in aux.entries if entry.is_loss]
        return [y, *losses[: self.loss_counts[i]]]


class _ReversibleFunction(torch.autograd.Function):
    """All steps as one operation, which stores its last two tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _ReversibleCall,
        a: Tensor,
        b: Tensor,
        context: Tensor | None,
        *parameters: Tensor,
    ) -> Any:
        """a, b (b, n, d) -> a, b (b, n, d), and the auxiliary losses of the sub-layers."""
        for i in range(len(call.sublayers)):
            a, b = b, a + call.run(i, b, context)
        ctx.call = call
        # Saving the parameters detects in-place changes before the backward pass.
        ctx.save_for_backward(a, b, context, *parameters)
        return a, b, *(entry.value.clone() for entry in call.aux if entry.is_loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a_grad: Tensor, b_grad: Tensor, *loss_grads: Tensor) -> Any:
        """From the last sub-layer to the first."""
        a, b, context, *_ = ctx.saved_tensors
        call: _ReversibleCall = ctx.call
        needs_context = ctx.needs_input_grad[3]
        context_grad = torch.zeros_like(context) if needs_context else None
        parameter_grads: list[Tensor | None] = [None] * len(call.parameters)
        for i in reversed(range(len(call.sublayers))):
            split, indices = len(loss_grads) - call.loss_counts[i], call.parameter_indices[i]
            output_grads, loss_grads = (b_grad, *loss_grads[split:]), loss_grads[:split]

            # The second stream before step i is the first one after it.
            source = a.detach().requires_grad_()
            seen = context.detach().requires_grad_() if needs_context else context
            tensors = [source, *([seen] if needs_context else [])]
            tensors += [call.parameters[j] for j in indices]
            outputs = call.run_again(i, source, seen)
            source_grad, *grads = _gradients(outputs, output_grads, tensors)
            if needs_context:
                context_grad = _add(context_grad, grads.pop(0))
            for j, grad in zip(indices, grads, strict=True):
                parameter_grads[j] = _add(parameter_grads[j], grad)

            a, b = b - outputs[0].detach(), a
            a_grad, b_grad = b_grad, a_grad if source_grad is None else a_grad + source_grad
        return None, a_grad, b_grad, context_grad, *parameter_grads


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Sum of two gradients, None being zero."""
    return b if a is None else a if b is None else a + b


def _gradients(
    outputs: Sequence[Tensor], output_grads: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients of each input; None if no output depends on it."""
    pairs = [
        (output, grad.to(output.dtype))
        for output, grad in zip(outputs, output_grads, strict=True)
        if output.requires_grad
    ]
    if not pairs:
        return [None for _ in inputs]
    outputs, output_grads = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, inputs, output_grads, allow_unused=True))
