"""Records what the attention heads of a model compute in one call, without changing its outputs.

A model is called once. Whenever a head attends, its queries, keys and values are kept, and with
them the function that was called. So the same function, be it eager attention, PyTorch's fused
kernel or an attention of Regard, can later be given other values: identity columns give columns of
its map, since attention is linear in its values. Nothing of size n x n is made here.

Three kinds of calls are recorded, each as an `AttentionRecord`:

- an `Attention` of Regard,
- the heads of a `Recurrence`,
- the attention function that transformers calls in a layer, whatever its name.

They are grouped by layer: a mixer of Regard, or an attention layer of transformers.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from regard.attentions.kv_cache import CallPositions, KVCacheAttention
from regard.mixer import Attention, Mixer, evaluation_mode
from regard.mixers.recurrence import RecurrentHeads
from regard.models.model import outer_mixers
from regard.pattern import Causal, Full

MAX_PAIRS = 1 << 20  # queries x keys of a pattern that is looked at pair by pair
MASKS = ("mask", "attn_mask", "global_attention_mask", "query_mask")


@dataclass
class AttentionRecord(ABC):
    """One call of attention heads.

    Attributes:
        q: Queries (b, h, n, e).
        k: Keys (b, g, m, e), where g divides h.
        v: Values (b, g, m, f).
        output: Outputs (b, h, n, f).
        causal: Whether query i only sees keys <= i.
        mask: Padding mask of the keys (b, m), True = keep, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    causal: bool
    mask: Tensor | None

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.output.shape[1]

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.output.shape[2]

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.v.shape[2]

    def values(self) -> Tensor:
        """The values of each head, (b, h, m, f)."""
        return self.v.repeat_interleave(self.heads // self.v.shape[1], 1)

    def visible(self) -> Tensor | None:
        """Which keys each query may see, broadcast to (b, h, n, m); None if only `causal` and
        `mask` restrict them."""
        return None

    @abstractmethod
    def attend(self, values: Tensor, rows: slice, example: int) -> Tensor:
        """The same heads over other values.

        Args:
            values: (1, m, c) for all heads, (g, m, c) as in `v`, or, if the keys are of a Regard
                attention, (h, m, c).
            rows: Queries, all or consecutive.
            example: Number of the example in the batch.

        Returns:
            Outputs (h, rows, c).
        """


@dataclass
class RegardAttentionRecord(AttentionRecord):
    """A call of an `Attention` of Regard."""

    attention: Attention
    arguments: dict[str, Any]

    def visible(self) -> Tensor | None:
        """See `AttentionRecord`: the pairs of the pattern, in a short sequence."""
        if not isinstance(self.attention, KVCacheAttention):
            return None
        pattern = self.attention.causal_pattern if self.causal else self.attention.pattern
        if self.queries * self.keys > MAX_PAIRS or pattern in (Full(), Causal()):
            return None
        positions = torch.arange(max(self.queries, self.keys), device=self.q.device)
        q, k = positions[: self.queries, None], positions[None, : self.keys]
        return pattern.resolve_global_mask(False, False).allows(q, k)

    def attend(self, values: Tensor, rows: slice, example: int) -> Tensor:
        """See `AttentionRecord`. Attention with a KV cache computes only the rows; others compute
        all."""
        one = slice(example, example + 1)
        q, k = self.q[one], self.k[one]
        groups = k.shape[1] if len(values) == 1 else len(values)
        if groups != k.shape[1]:
            k = k.repeat_interleave(groups // k.shape[1], 1)
        v = values.expand(groups, -1, -1)[None].to(q.dtype)
        arguments = {
            name: value[one] if isinstance(value, Tensor) and value.shape[0] > 1 else value
            for name, value in self.arguments.items()
        }
        start, stop, _ = rows.indices(self.queries)
        attention, with_global = self.attention, arguments.get("global_attention_mask") is not None
        with evaluation_mode(attention):
            if not isinstance(attention, KVCacheAttention) or with_global or stop <= start:
                return attention(q, k, v, **arguments)[0][0][:, rows]
            causal = arguments.pop("causal", False)
            if (pair_mask := arguments.get("attn_mask")) is not None:
                arguments["attn_mask"] = pair_mask[..., rows, :]
            pattern = attention.causal_pattern if causal else attention.pattern
            return attention.attend(
                q[:, :, rows], k, v, CallPositions(pattern, start), **arguments
            )[0]


@dataclass
class RecurrenceRecord(AttentionRecord):
    """A whole sequence through the heads of a `Recurrence`."""

    module: RecurrentHeads
    inputs: Any

    def attend(self, values: Tensor, rows: slice, example: int) -> Tensor:
        """See `AttentionRecord`. All queries are computed."""
        inputs = type(self.inputs)(
            *(None if each is None else each[example : example + 1] for each in self.inputs)
        )
        v = values.expand(self.heads, -1, -1)[None].to(self.v.dtype)
        return self.module(inputs, v, None)[0][0][:, rows]


@dataclass
class TransformersRecord(AttentionRecord):
    """A call of the attention function of a layer of transformers."""

    function: Callable[..., tuple[Tensor, Tensor | None]]
    module: nn.Module
    attention_mask: Tensor | None
    arguments: dict[str, Any]

    def visible(self) -> Tensor | None:
        """See `AttentionRecord`."""
        mask = self.attention_mask
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            return None
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2

    def attend(self, values: Tensor, rows: slice, example: int) -> Tensor:
        """See `AttentionRecord`. Eager and fused attention compute only the rows; attention of
        Regard, whose mask tells positions, computes all."""
        one = slice(example, example + 1)
        q, k, mask = self.q[one], self.k[one], self.attention_mask
        v = values.expand(k.shape[1], -1, -1)[None].to(q.dtype)
        arguments = dict(self.arguments)
        if isinstance(mask, Tensor):
            mask = mask[one] if mask.shape[0] > 1 else mask
        n, m = self.queries, self.keys
        start, stop, _ = rows.indices(n)
        partial = (start, stop) != (0, n) and self.function.__module__.startswith("transformers.")
        if partial:
            if mask is None and self.causal:
                positions = torch.arange(m, device=q.device)
                mask = (positions <= positions[:n, None] + (m - n))[None, None]
                if "eager" in self.function.__name__:  # which adds its mask to the scores
                    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            q = q[:, :, rows]
            mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
            bias = arguments.get("position_bias")
            if bias is not None and bias.shape[-2] == n:
                arguments["position_bias"] = bias[..., rows, :]
        out, _ = self.function(self.module, q, k, v, mask, **arguments)
        out = out.transpose(1, 2)[0]
        return out if partial else out[:, rows]


@dataclass
class LayerRecord:
    """One layer: its attention calls in order, and the call of the module around them.

    Attributes:
        path: Path of the module in the model; "" for the model itself.
        context: Second argument of a mixer, or None.
        others: Positional arguments behind x of a module that is no mixer.
        arguments: Keyword arguments of the call, without x and context.
        output: Output of the module (b, n, d), where it was recorded.
    """

    path: str
    module: nn.Module
    x: Tensor | None = None
    context: Tensor | None = None
    others: tuple[Any, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    output: Tensor | None = None
    calls: list[AttentionRecord] = field(default_factory=list)


class Edit:
    """What is changed while a model runs; see `regard.inspection.interventions`. By default
    nothing: a record is only read."""

    def heads(self, layer: int, record: AttentionRecord) -> Tensor | None:
        """New outputs (b, h, n, f) of the heads of a layer, or None to keep them."""
        return None

    def output(self, layer: int, output: Tensor) -> Tensor | None:
        """A new output of the whole layer, or None to keep it."""
        return None


class Recorder:
    """Hooks that fill `layers` while the model runs.

    Args:
        layers: Modules to record as layers beside mixers and attention layers: (path, module).
        keep: Layers whose tensors are kept. None: all.
        edit: Changes to make.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: Sequence[tuple[str, nn.Module]] = (),
        keep: Sequence[int] | None = None,
        edit: Edit | None = None,
    ) -> None:
        self.layers: list[LayerRecord] = []  # of the last call of the model
        self.model = model
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.mixers = {id(mixer) for mixer in outer_mixers(model)} | {
            id(module) for _, module in layers
        }
        self.keep = None if keep is None else set(keep)
        self.edit = Edit() if edit is None else edit
        self.open: list[LayerRecord] = []  # mixers that are running, the innermost last
        self.depth = 0  # attentions that are running, one inside the other

    @contextmanager
    def install(self) -> Iterator[None]:
        """Inside, calls are recorded."""
        with ExitStack() as hooks:
            hooks.callback(register_module_forward_pre_hook(self._enter).remove)
            hooks.callback(register_module_forward_hook(self._leave, with_kwargs=True).remove)
            if "transformers.modeling_utils" in sys.modules:
                hooks.enter_context(recorded_interface(self))
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        if module is self.model:
            self.layers = []
        if id(module) in self.mixers:
            self._start_layer(module)
        elif isinstance(module, Attention):
            self.depth += 1

    def _start_layer(self, module: nn.Module) -> None:
        self.open.append(LayerRecord(self.paths.get(id(module), ""), module))
        self.layers.append(self.open[-1])

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if id(module) in self.mixers:
            return self._finish_layer(args, kwargs, output)
        record: AttentionRecord
        if isinstance(module, RecurrentHeads) and args[2] is None:
            found, v, _ = args
            record = RecurrenceRecord(found.q, found.k, v, output[0], True, None, module, found)
        elif isinstance(module, Attention):
            self.depth -= 1
            if self.depth or kwargs.get("state") is not None:
                return None
            arguments = {name: value for name, value in kwargs.items() if name != "state"}
            q, k, v = args[:3]
            record = RegardAttentionRecord(
                q,
                k,
                v,
                output[0],
                arguments.get("causal", False),
                arguments.get("mask"),
                module,
                arguments,
            )
        else:
            return None
        changed = self.add(record, module)
        return None if changed is None else (changed, *output[1:])

    def _finish_layer(self, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        layer = self.open.pop()
        number = next(i for i, each in enumerate(self.layers) if each is layer)
        first = output[0] if isinstance(output, tuple) else output
        given = dict(kwargs)
        x = args[0] if args else given.pop("x" if "x" in given else next(iter(given), ""), None)
        if isinstance(layer.module, Mixer):
            context = args[1] if len(args) > 1 else given.pop("context", None)
            layer.context = context  # of all layers: it tells cross-attention from self-attention
        if self._keeps(number):
            layer.x, layer.arguments = x, given
            layer.others = () if isinstance(layer.module, Mixer) else args[1:]
            layer.output = first if isinstance(first, Tensor) else None
        changed = self.edit.output(number, first)
        if changed is None:
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _keeps(self, number: int) -> bool:
        return self.keep is None or number in self.keep

    def add(self, record: AttentionRecord, module: nn.Module) -> Tensor | None:
        """Add a record to the running layer, or to a new one; return what replaces its output."""
        if not self.open:  # a stack that calls the parts of a mixer, or a layer of transformers
            self.layers.append(LayerRecord(self.paths.get(id(module), "attention"), module))
        layer = self.open[-1] if self.open else self.layers[-1]
        number = next(i for i, each in enumerate(self.layers) if each is layer)
        if self._keeps(number):
            layer.calls.append(record)
        return self.edit.heads(number, record)


@contextmanager
def recorded_interface(recorder: Recorder) -> Iterator[None]:
    """Record the attention functions of transformers. Each layer asks `get_interface` for the one
    of its configuration; inside, it gets that function with a record of its call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def get_interface(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = type(ALL_ATTENTION_FUNCTIONS).get_interface(
            ALL_ATTENTION_FUNCTIONS, name, default
        )

        def call(
            module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **kwargs: Any
        ) -> tuple[Tensor, Tensor | None]:
            if "attention_mask" in kwargs:
                mask = kwargs.pop("attention_mask")
            out, weights = function(module, q, k, v, mask, **kwargs)
            if id(module) not in recorder.paths:
                return out, weights
            causal = kwargs.get("is_causal")
            causal = bool(getattr(module, "is_causal", False) if causal is None else causal)
            record = TransformersRecord(
                q, k, v, out.transpose(1, 2), causal, None, function, module, mask, kwargs
            )
            changed = recorder.add(record, module)
            # from the recorded output, so that gradients pass through it
            chosen = record.output if changed is None else changed
            return chosen.transpose(1, 2).contiguous(), weights

        return call

    ALL_ATTENTION_FUNCTIONS.__dict__["get_interface"] = get_interface  # of this object only
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS.__dict__["get_interface"]


def record_call(
    model: nn.Module,
    call: Callable[[], Any],
    *,
    layers: Sequence[tuple[str, nn.Module]] = (),
    keep: Sequence[int] | None = None,
    edit: Edit | None = None,
) -> tuple[list[LayerRecord], Any]:
    """Call a model in evaluation mode; return its layers and what the call returned.

    Args:
        call: Calls the model, perhaps several times; the layers are those of the last call.
        layers: See `Recorder`.
        keep: See `Recorder`.
        edit: See `Recorder`.
    """
    recorder = Recorder(model, layers=layers, keep=keep, edit=edit)
    with evaluation_mode(model), recorder.install():
        output = call()
    return recorder.layers, output
