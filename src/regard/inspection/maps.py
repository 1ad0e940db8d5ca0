"""From a recorded layer to its map, and what kind of map it is.

- exact: the output of the heads is the map times their values. The error is measured.
- implied: the output passes several maps, or more than maps; their product shows the way.
- influence: there are no such maps; the norm of the derivative of output i by input j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.attentions.persistent import PersistentMemoryAttention
from regard.inspection.influence import Influence
from regard.inspection.operators import DenseHeads, HeadOperator, ProductHeads, RecordedHeads
from regard.inspection.reconstruction import reconstruct
from regard.inspection.recording import (
    MASKS,
    AttentionRecord,
    LayerRecord,
    RegardAttentionRecord,
)
from regard.mixer import Mixer, evaluation_mode
from regard.mixers import ISAB, SAB, Branches, Luna, Perceiver, Poolingformer

Kind = Literal["exact", "implied", "influence", "none"]
MAX_STORED = 4096  # tokens of maps that exist only whole
CHECKED_ROWS = 8  # queries on which a long map is checked

# Mixers without maps that are made of attentions, and what lies between those.
IMPLIED: dict[type[Mixer], str] = {
    Luna: "the product of two maps: tokens to packed sequence, packed sequence to tokens",
    ISAB: "the product of two maps, by the inducing points; norms and feed-forward layers between "
    "them are left out",
    SAB: "the map inside the block; its norm and feed-forward layer come after",
    Perceiver: "the product of the maps to, among and from the latents; their feed-forward layers "
    "and residuals are left out",
    Poolingformer: "(1 + map of the pooled window) x map of the window; the projection between "
    "them is left out",
}


@dataclass
class LayerMap:
    """The map of the heads of one layer.

    Attributes:
        operator: The map, or None for a reason.
        kind: What the map is.
        error: Of an exact map: largest |map x values - output| over the largest |output|.
        reason: Why it is not exact, or how it was found; "" if there is nothing to say.
        record: The layer.
        example: Number of the example in the batch.
    """

    record: LayerRecord
    operator: HeadOperator | Influence | None
    kind: Kind
    error: float | None = None
    reason: str = ""
    example: int = 0

    @property
    def attention(self) -> AttentionRecord | None:
        """The attention call whose heads are those of the map, if it is one call."""
        operator = self.operator
        return operator.record if isinstance(operator, RecordedHeads) else None

    def not_finite(self) -> list[str]:
        """What contains NaN or infinity. A kernel may give zero for a query without a number."""
        parts: dict[str, Tensor | None] = {"the output": self.record.output}
        if self.attention is not None:
            call = self.attention
            parts |= {"queries": call.q, "keys": call.k, "values": call.v}
            parts["outputs of heads"] = call.output
        return [
            name
            for name, tensor in parts.items()
            if tensor is not None and not bool(tensor.isfinite().all())
        ]


def layer_map(record: LayerRecord, example: int = 0) -> LayerMap:
    """The map of a recorded layer for one example of its batch."""
    module, calls = record.module, record.calls
    if not isinstance(module, Mixer):
        if len(calls) == 1:
            return _recorded_map(record, calls[0], example)
        if record.output is not None:
            return _influence(record, example, "the layer has no attention that can be read")
        return LayerMap(record, None, "none", reason=f"{len(calls)} calls in one layer")
    if record.x is None:  # a stack calls its parts
        if len(calls) == 1:
            return _recorded_map(record, calls[0], example)
        return LayerMap(record, None, "none", reason="its stack computes the layer in parts")
    n = record.x.shape[1]
    m = n if record.context is None else record.context.shape[1]
    if module.can.maps:
        whole = [call for call in calls if (call.queries, call.keys) == (n, m)]
        in_branches = any(isinstance(part, Branches) for part in module.modules())
        if len(calls) == 1 and whole and not in_branches and not _is_permuted(record):
            return _recorded_map(record, whole[0], example)
        if max(n, m) <= MAX_STORED:
            return _stored_map(record, example)
        reason = f"its map exists only whole, which is too large for {max(n, m):,} tokens"
        return _influence(record, example, reason)
    mixer_type = next((each for each in IMPLIED if isinstance(module, each)), None)
    if mixer_type is not None and calls:
        steps = [RecordedHeads(call, example) for call in reversed(calls)]
        product = ProductHeads(steps, residual=mixer_type is Poolingformer)
        if (product.queries, product.keys) == (n, m):
            return LayerMap(record, product, "implied", reason=IMPLIED[mixer_type], example=example)
    call = calls[0] if len(calls) == 1 else None
    if isinstance(call, RegardAttentionRecord) and isinstance(
        call.attention, PersistentMemoryAttention
    ):
        heads = RecordedHeads(call, example, width=call.v.shape[-1])
        reason = "the rest of each row is on learned keys, which are no tokens"
        return LayerMap(record, heads, "implied", reason=reason, example=example)
    return _influence(record, example, str(module.can.reason("maps")))


def _is_permuted(record: LayerRecord) -> bool:
    """Whether a recurrence has moved masked tokens to the end."""
    mask = record.arguments.get("mask")
    return mask is not None and not isinstance(record.calls[0], RegardAttentionRecord)


def _recorded_map(record: LayerRecord, call: AttentionRecord, example: int) -> LayerMap:
    heads = RecordedHeads(call, example)
    return LayerMap(record, heads, "exact", recorded_error(heads), example=example)


def recorded_error(heads: RecordedHeads) -> float:
    """Largest |map x values - output| over the largest |output|, for all queries or, in a long map,
    for some in its middle."""
    n, m = heads.queries, heads.keys
    rows = slice(0, n) if max(n, m) <= 1024 else slice(n // 2, n // 2 + CHECKED_ROWS)
    output = heads.record.output[heads.example].detach().cpu()
    values = heads.record.values()[heads.example].detach().cpu().to(heads.dtype)
    weights = heads.rows(rows) if rows.stop < n else heads.dense()
    found = weights @ values
    return relative_error(found, output[:, rows])


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest |found - wanted| over the largest |wanted|."""
    largest = wanted.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float((found - wanted).abs().max() / largest)


def _stored_map(record: LayerRecord, example: int) -> LayerMap:
    """A map that a mixer computes itself, checked by the values that the mixer multiplies by it."""
    assert isinstance(record.module, Mixer)
    assert record.x is not None
    one = slice(example, example + 1)
    x = record.x[one].detach()
    context = None if record.context is None else record.context[one].detach()
    masks = {
        name: record.arguments[name][one]
        for name in MASKS
        if record.arguments.get(name) is not None
    }
    with torch.no_grad():
        weights = record.module.attention_map(x, context, **masks)
        with evaluation_mode(record.module):
            found = reconstruct(record.module, weights, x, context, masks.get("mask"))
    error = None
    if found is not None and record.output is not None:
        error = relative_error(found[0].cpu(), record.output[example].detach().cpu())
    return LayerMap(record, DenseHeads(weights[0]), "exact", error, example=example)


def _influence(record: LayerRecord, example: int, reason: str) -> LayerMap:
    """The influence of each token on each output of the layer."""
    assert record.x is not None
    one = slice(example, example + 1)
    module, is_mixer = record.module, isinstance(record.module, Mixer)
    arguments = {
        name: value[one] if isinstance(value, Tensor) and is_mixer else value
        for name, value in record.arguments.items()
    }
    source = record.x if record.context is None else record.context
    queries = record.x[one].detach()

    def function(tokens: Tensor) -> Tensor:
        # one example becomes several, each differentiated in its own direction
        repeated = {
            name: value.expand(len(tokens), *value.shape[1:])
            if isinstance(value, Tensor) and is_mixer
            else value
            for name, value in arguments.items()
        }
        args = (
            (tokens, *record.others)
            if record.context is None
            else (queries.expand(len(tokens), -1, -1), tokens)
        )
        with evaluation_mode(module):
            output = module(*args, **repeated)
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first

    operator = Influence(function, source[one], queries=record.x.shape[1], batched=is_mixer)
    return LayerMap(record, operator, "influence", reason=reason, example=example)
