"""Count the cost of a module by running it on the meta device, where tensors have a shape and no
data.

Two things are replaced for the run. Attention over a pattern becomes one operation with the cost of
the pairs that the pattern allows, whatever backend would run it. A submodule that has a formula
becomes one operation with the cost of that formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.backends.call import AttentionCall, as_function
from regard.backends.choose import softmax_backends
from regard.backends.protocol import Backend
from regard.backends.sdpa import MAX_PADDED_WIDTH
from regard.block import Layer
from regard.errors import Unsupported
from regard.ffn import ExpertBank, FeedForward
from regard.measure.count import FlopCounter, record_saved_activations
from regard.measure.module_cost import CallShape, Formula, ModuleCost, find_formula
from regard.measure.pairs import count_pairs
from regard.mixer import Attention, Mixer, MultiHead, SharedQKAttention
from regard.models.embeddings import (
    PatchEmbedding,
    TokenEmbedding,
    VectorEmbedding,
    VideoEmbedding,
)
from regard.models.heads import ModelHead
from regard.norm import Norm
from regard.pattern import Causal, Full
from regard.position.rotary import RotaryEmbedding
from regard.prior import Prior
from regard.residual import Residual
from regard.state import State, leaves

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def count_on_meta(module: nn.Module, shape: CallShape) -> ModuleCost:
    """Run a module forward and backward on meta tensors, in float32, and count.

    Args:
        module: A mixer, attention, layer, feed-forward layer, norm, residual, embedding, head or
            linear layer.
        shape: Sizes of the call. Residuals and heads are called with tokens of width `shape.e`.
    """
    empty = _copy_to_meta(module)
    for part in empty.modules():
        by_formula = find_formula(part)
        if part is not empty and by_formula is not None:
            _replace_by_formula(part, by_formula)
    try:
        with _attention_by_pairs(), torch.enable_grad():
            with record_saved_activations(empty) as saved, FlopCounter() as forward:
                outputs = [y for y in _call(empty, shape) if y.requires_grad]
            with FlopCounter() as backward:
                torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
            flops = round(forward.total), round(backward.total), round(backward.recomputed)
            return _with_state(empty, shape, ModuleCost(*flops, saved=saved.bytes // 4))
    except Exception as error:
        kind = type(module).__name__
        remedy = f"{kind} has no cost formula: register one with regard.measure.module_cost.formula"
        raise Unsupported(f"{remedy}. It cannot be counted on the meta device: {error}") from error


def _copy_to_meta(module: AnyModule) -> AnyModule:
    """A copy in float32 on the meta device.

    Scalar integer buffers stay real: they count calls, to seed generators, and modules read them.
    """
    known: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 0 and not tensor.is_floating_point():
            known[id(tensor)] = torch.zeros_like(tensor, device="cpu")
            continue
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_like(tensor, device="meta", dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        known[id(tensor)] = empty
    return deepcopy(module, known)


def _call(module: nn.Module, shape: CallShape) -> Sequence[Tensor]:
    """Call a module on meta tensors of the given sizes."""
    b, n, m = shape.b, shape.n, shape.m
    empty = partial(torch.empty, device="meta", requires_grad=True)
    if isinstance(module, Attention):
        return [module(*_heads(module, shape), causal=shape.causal)[0]]
    if isinstance(module, Mixer):
        context = [] if m == n else [empty(b, m, module.dim)]
        return [module(empty(b, n, module.dim), *context)]
    if isinstance(module, Layer):
        context = [empty(b, m, module.dim)] if module.can.cross else []
        return [module(empty(b, n, module.dim), *context)]
    if isinstance(module, Residual):
        x, y = empty(b, n, shape.e), empty(b, n, shape.e)
        return [module.prepare(x), module.add(x, y)]
    if isinstance(module, TokenEmbedding):
        return [module(torch.empty(b, n, dtype=torch.long, device="meta"))[0]]
    if isinstance(module, VectorEmbedding):
        return [module(torch.empty(b, n, module.project.in_features, device="meta"))[0]]
    if isinstance(module, PatchEmbedding | VideoEmbedding):
        return [module(torch.empty(b, *module.shape, device="meta"))[0]]
    if isinstance(module, nn.Linear):
        return [module(empty(b, n, module.in_features))]
    if isinstance(module, FeedForward | ExpertBank | Norm):
        return [module(empty(b, n, module.dim))]
    if isinstance(module, ModelHead):
        return [module(empty(b, n, shape.e))]
    raise TypeError("its inputs are unknown")


def _heads(module: Attention, shape: CallShape) -> tuple[Tensor, Tensor, Tensor]:
    """q (b h n e), k (b h m e) and v (b h m f) for an attention."""
    empty = partial(torch.empty, device="meta", requires_grad=True)
    q = empty(shape.b, shape.h, shape.n, shape.e)
    kv_heads = shape.kv_heads or shape.h
    if isinstance(module, SharedQKAttention):
        return q, q, empty(shape.b, kv_heads, shape.m, shape.f)
    return q, empty(shape.b, kv_heads, shape.m, shape.e), empty(shape.b, kv_heads, shape.m, shape.f)


def head_shape(module: MultiHead, shape: CallShape) -> CallShape:
    """The sizes of the attention call inside a `MultiHead`."""
    x, context = (
        torch.empty(shape.b, size, module.dim, device="meta") for size in (shape.n, shape.m)
    )
    with torch.no_grad():
        q, _, v = _copy_to_meta(module).project(x, None if shape.m == shape.n else context)
    (b, h, n, e), (kv_heads, m, f) = q.shape, v.shape[1:]
    return CallShape(b, n, m, h, e, f, kv_heads, module.causal)


class _FreeAttention(Attention):
    """An attention that costs nothing."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
        b, h, n = q.shape[:3]
        return _stand_in(
            ModuleCost(), q.new_empty(b, n, h, v.shape[3]).transpose(1, 2), q, k, v
        ), ()

    def initial_state(self) -> State:
        return ()


def without_attention(module: MultiHead) -> MultiHead:
    """The projections of a `MultiHead`, around an attention that costs nothing."""
    projections = copy(module)
    projections._modules = {**module._modules, "inner": _FreeAttention()}
    return projections


def _with_state(module: nn.Module, shape: CallShape, cost: ModuleCost) -> ModuleCost:
    """The cost with the size of the state after streaming n tokens."""

    def size(n: int) -> int:
        if not n:
            return 0
        with torch.no_grad():
            if isinstance(module, Attention):
                heads = _heads(module, shape.with_length(n))
                state = module(*heads, causal=True, state=module.initial_state())[1]
            else:
                assert isinstance(module, Mixer | Layer)
                x = torch.empty(shape.b, n, module.dim, device="meta")
                context = {}
                if isinstance(module, Layer) and module.can.cross:
                    context["context"] = torch.empty(shape.b, shape.m, module.dim, device="meta")
                state = module.stream(x, **context)[1]
        return sum(leaf.numel() for leaf in leaves(state) if isinstance(leaf, Tensor))

    if isinstance(module, Attention):
        streams = shape.causal and module.can.stream
    else:
        streams = isinstance(module, Mixer | Layer) and module.causal and module.can.stream
    return cost.with_state(shape.n, size) if streams else cost


# ------------------------------------------------------------ replaced operations
class _StandIn(torch.autograd.Function):
    """An operation of known cost.

    It reports its FLOPs, saves the tensors it is given, and has no data.
    """

    @staticmethod
    def forward(
        ctx: Any, cost: ModuleCost, out: Tensor, saved: Sequence[Tensor], *inputs: Tensor
    ) -> Tensor:
        FlopCounter.report(cost.forward)
        ctx.cost, ctx.inputs = cost, [(x.shape, x.dtype) for x in inputs]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        FlopCounter.report(ctx.cost.backward, ctx.cost.recomputed)
        gradients = [grad.new_empty(shape, dtype=dtype) for shape, dtype in ctx.inputs]
        return None, None, None, *gradients


def _stand_in(
    cost: ModuleCost, out: Tensor, *inputs: Tensor, saved: Sequence[Tensor] | None = None
) -> Tensor:
    saved = [out.new_empty(cost.saved)] if saved is None else saved
    result: Tensor = _StandIn.apply(cost, out, saved, *inputs)  # type: ignore[no-untyped-call]
    return result


def _replace_by_formula(part: nn.Module, by_formula: Formula) -> None:
    """Let a module return a tensor of the right shape, at the cost of its formula."""
    original = copy(part)

    def cost_of(shape: CallShape) -> ModuleCost:
        with FlopCounter.pause():  # the formula may count parts of the module
            return by_formula(original, shape)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, state: Any = None, **_: Any
    ) -> tuple[Tensor, Any]:
        (b, h, n, e), (kv_heads, m, f) = q.shape, v.shape[1:]
        cost = cost_of(CallShape(b, n, m, h, e, f, kv_heads, causal))
        out = _stand_in(cost, q.new_empty(b, h, n, f), q, k, v)
        return out, None if state is None else q.new_empty(cost.state)

    def mix(
        x: Tensor, context: Tensor | None, mask: Tensor | None, state: Any
    ) -> tuple[Tensor, Any]:
        m = (x if context is None else context).shape[1]
        cost = cost_of(CallShape(x.shape[0], x.shape[1], m))
        return _stand_in(cost, torch.empty_like(x), x), None if state is None else x.new_empty(
            cost.state
        )

    def feed_forward(x: Tensor, mask: Tensor | None = None) -> Tensor:
        cost = cost_of(CallShape(x.shape[0], x.shape[1], x.shape[1]))
        return _stand_in(cost, torch.empty_like(x), x)

    def prior(q_pos: Tensor, k_pos: Tensor, q: Tensor, k: Tensor) -> Tensor:
        (b, h, n, e), m = q.shape, k.shape[2]
        cost = cost_of(CallShape(b, n, m, h, e, e))
        return _stand_in(cost, q.new_empty(b, h, n, m), q, k)

    def rotary(q: Tensor, k: Tensor, q_start: int = 0, k_start: int = 0) -> tuple[Tensor, Tensor]:
        cost = cost_of(CallShape(q.shape[0], q.shape[2], k.shape[2]))
        free = ModuleCost()
        return _stand_in(cost, torch.empty_like(q), q), _stand_in(free, torch.empty_like(k), k)

    replacements: dict[type, tuple[str, Callable[..., Any]]] = {
        Attention: ("forward", attend),
        Mixer: ("mix", mix),
        FeedForward: ("forward", feed_forward),
        Prior: ("forward", prior),
        RotaryEmbedding: ("forward", rotary),
    }
    for kind, (method, replacement) in replacements.items():
        if isinstance(part, kind):
            setattr(part, method, replacement)


@contextmanager
def _attention_by_pairs() -> Iterator[None]:
    """Inside, attention on the meta device counts pairs. Other devices are not affected."""
    with softmax_backends.override(PairCountingBackend(), named=True):
        yield


class PairCountingBackend(Backend[AttentionCall]):
    """Attention on the meta device with the cost of the pairs that the pattern allows."""

    name = "pair-counting"

    def refuses(self, call: AttentionCall) -> str | None:
        """The reason why this backend does not support the call, or None."""
        return None if call.q.is_meta else "it counts on the meta device only"

    def cost(self, call: AttentionCall) -> float | None:
        """None: it is used by override only."""
        return None

    def prepare(self, call: AttentionCall) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """An output without data, and the recorded cost."""
        return as_function(call, _attend_on_meta)


def _attend_on_meta(call: AttentionCall) -> Tensor:
    """Fused softmax attention over the visible pairs: 2 (e + f) FLOPs a pair, and the scores again
    going backward.

    It saves q, k, v, the output and a normalizer for each query.
    """
    (b, h, n, e), (m, f) = call.q.shape, call.v.shape[2:]
    pairs = _count_call_pairs(call) if torch.is_grad_enabled() else 0
    scores, values = 2 * b * pairs * e, 2 * b * pairs * f
    cost = ModuleCost(scores + values, 3 * scores + 2 * values, scores)
    empty = call.q.new_empty
    out, saved, inputs = empty(b, h, n, f), [call.q, call.k, call.v], [call.q, call.k, call.v]
    if e != f and max(e, f) <= MAX_PADDED_WIDTH:  # all are padded to one width
        saved = [empty(b, h, size, max(e, f)) for size in (n, m, m)]
    elif call.prior is None and call.pattern in (Full(), Causal()):
        out = empty(b, n, h, f).transpose(
            1, 2
        )  # as the fused kernel writes it: merging heads is a view
    saved += [out, empty(b, h, n)]
    if call.sinks is not None:
        inputs.append(call.sinks)
    if call.prior is not None:
        q_pos, k_pos = (x.to("meta") for x in call.position_grid())
        is_dense = 8 * pairs > h * n * m  # else only the visible pairs are computed
        hide = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with nullcontext() if is_dense else hide:
            addend = call.prior(q_pos, k_pos, call.q, call.k)
        if is_dense and addend.requires_grad:  # not fused: PyTorch saves all weights
            saved = [call.q, call.k, call.v, empty(b, h, n, m)]
            cost = ModuleCost(scores + values, 2 * (scores + values))
        elif is_dense:
            addend = torch.where(call.dense_mask(), addend, -torch.inf)
            saved.append(addend)
        elif not call.prior.relative:
            saved.append(empty(6 * b * pairs))
        inputs.append(addend)
    return _stand_in(cost, out, *inputs, saved=saved)


def _count_call_pairs(call: AttentionCall) -> int:
    """Visible pairs of a call, over all heads."""
    (_, h, n, _), m, q0, k0 = call.q.shape, call.k.shape[2], call.q_start, call.k_positions
    pattern = call.pattern.resolve_global_mask(False, False)
    if pattern == Full():
        return h * n * m
    if isinstance(k0, Tensor):
        visible = pattern.allows(torch.arange(q0, q0 + n)[:, None], k0.cpu()[None, :])
        heads = visible.shape[0] if visible.dim() == 3 else 1
        return int(visible.expand(heads, n, m).sum()) * (h // heads)
    ends = ((q0 + n, k0 + m, 1), (q0, k0 + m, -1), (q0 + n, k0, -1), (q0, k0, 1))
    return sum(sign * count_pairs(pattern, q, k, h) for q, k, sign in ends)
