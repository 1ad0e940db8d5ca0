"""One model, called once on one input, with the maps of all its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.hf.modules import Replacement
from regard.inspection.answers import find_output
from regard.inspection.data import SequenceData
from regard.inspection.influence import Influence
from regard.inspection.maps import LayerMap, layer_map
from regard.inspection.operators import DenseHeads
from regard.inspection.pictures import data_uri
from regard.inspection.recording import Edit, LayerRecord, record_call
from regard.inspection.rows import input_rows, output_from_rows
from regard.inspection.subject import Subject
from regard.mixer import Mixer, evaluation_mode
from regard.models.model import DualEncoder, EncoderDecoder, outer_mixers

Role = Literal["self", "encoder", "decoder", "cross"]
MAX_LABELLED = 4096  # tokens of a sequence whose texts are part of a page
MAX_LENGTH = 1 << 16  # tokens; dense attention takes minutes beyond
MAX_TOKEN_HEADS = 1 << 21  # tokens x heads whose queries, keys and values are kept
SEQUENCE_NAMES = {
    "x": "input",
    "input_ids": "input",
    "decoder_input_ids": "target",
    "pixel_values": "input",
}


@dataclass
class PlacedMap:
    """A map with its place in the model and in the input.

    Attributes:
        map: The map.
        layer: Number of the layer among those with its role.
        role: What attends to what: "self", or in a model with a source and a target "encoder",
            "decoder" or "cross".
        queries: Id of the sequence of the rows.
        keys: Id of the sequence of the columns.
        number: Number of the layer in the order of the calls.
    """

    map: LayerMap
    layer: int
    role: Role
    queries: str
    keys: str
    number: int

    @property
    def causal(self) -> bool:
        """Whether query i only sees keys <= i."""
        record = self.map.record
        if self.map.attention is not None:
            return self.map.attention.causal and self.role != "cross"
        return isinstance(record.module, Mixer) and record.module.causal

    @property
    def mixer(self) -> str:
        """Name of the mechanism."""
        module = self.map.record.module
        if isinstance(module, Replacement):
            return str(module.spec.get("name", ""))
        if isinstance(module, Mixer):
            return module.name
        config: Any = getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        return type(module).__name__ if name is None else f"{type(module).__name__} ({name})"


class InspectedModel:
    """A model that was called once on one input.

    Args:
        subject: The model and the input.
        layers: Numbers of the layers to keep, in the order of their calls. None: all.

    Attributes:
        output: What the model returned.
        maps: A map of each layer, or the reason why there is none.
        sequences: The sequences that maps are over, by id.
    """

    def __init__(self, subject: Subject, layers: Sequence[int] | None = None) -> None:
        self.subject, self.kept = subject, layers
        check_size(subject, layers)
        self.blocks = generic_blocks(subject.model)
        with torch.no_grad():
            self.records, self.output = self.record()
        if layers is not None and (
            missing := [i for i in layers if not 0 <= i < len(self.records)]
        ):
            raise ValueError(
                f"There is no layer {missing[0]}: the model has {len(self.records)} layers that "
                "attend, counted from 0."
            )
        self.sequences: dict[str, SequenceData] = {}
        self.maps = self._place_maps() or [self._whole_model()]

    def record(
        self, edit: Edit | None = None, subject: Subject | None = None
    ) -> tuple[list[LayerRecord], Any]:
        """Call the model again, on this input or another, perhaps with changes."""
        subject = self.subject if subject is None else subject
        return record_call(
            subject.model, subject.call, layers=self.blocks, keep=self.kept, edit=edit
        )

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.subject.model.parameters())

    # ------------------------------------------------------------------------------- placing
    def _place_maps(self) -> list[PlacedMap]:
        placed: list[PlacedMap] = []
        model = self.subject.model
        in_encoder = (
            set(map(id, model.encoder.modules()))  # type: ignore[union-attr]
            if isinstance(model, EncoderDecoder)
            else set()
        )
        counts: dict[Role, int] = {}
        for number, record in enumerate(self.records):
            kept = self.kept is None or number in self.kept
            if kept and not record.calls and not is_vectors(record.x):
                continue  # a list of modules that are not layers of tokens
            role = self._role(record, in_encoder)
            layer = counts.get(role, 0)
            counts[role] = layer + 1
            if not kept:
                continue
            for example in range(2 if isinstance(model, DualEncoder) else 1):
                found = layer_map(record, example)
                queries, keys = self._sequences_of(found, role, example)
                placed.append(PlacedMap(found, layer, role, queries, keys, number))
        return placed

    def _whole_model(self) -> PlacedMap:
        """A model without layers that can be seen: the alignment of a recurrent decoder, or the
        influence of each input token on each output of the whole model."""
        subject, model = self.subject, self.subject.model
        record = LayerRecord("", model)
        if isinstance(model, EncoderDecoder):
            with torch.no_grad():
                weights = model.attention_maps(**subject.inputs.kwargs).cross
            if weights and weights[0] is not None:
                reason = "the alignment that the decoder computes itself"
                found = LayerMap(record, DenseHeads(weights[0][0]), "implied", reason=reason)
                queries, keys = self._sequences_of(found, "cross", 0)
                return PlacedMap(found, 0, "cross", queries, keys, -1)
        rows = input_rows(subject)
        function: Callable[[Tensor], Tensor] = partial(output_from_rows, subject)
        if rows is None and [t.dim() for t in subject.inputs.tensors] == [3]:
            rows = subject.inputs.main_tensor
            function = partial(_first_output, model)
        if rows is None or not rows.is_floating_point():
            raise ValueError(
                f"{type(model).__name__} has no attention and no layers that can be seen."
            )
        with torch.no_grad():
            outputs = function(rows).shape[1]
        reason = "it has no attention that can be seen: the influence through the whole model"
        found = LayerMap(
            record,
            Influence(function, rows, queries=outputs, batched=False),
            "influence",
            reason=reason,
        )
        queries, keys = self._sequences_of(found, "self", 0)
        return PlacedMap(found, 0, "self", queries, keys, -1)

    def _role(self, record: LayerRecord, in_encoder: set[int]) -> Role:
        if not self.subject.is_seq2seq:
            return "self"
        if isinstance(self.subject.model, EncoderDecoder):
            if id(record.module) in in_encoder:
                return "encoder"
            return "decoder" if record.context is None else "cross"
        from regard.hf import introspection

        if introspection.is_cross(record.module) or "EncDecAttention" in record.path:
            return "cross"
        return "decoder" if "decoder" in record.path else "encoder"

    def _sequences_of(self, found: LayerMap, role: Role, example: int) -> tuple[str, str]:
        operator = found.operator
        if operator is not None:
            n, m = operator.queries, operator.keys
        else:
            shape = None if found.record.output is None else found.record.output.shape
            n = m = 1 if shape is None else shape[1]
        names = {
            "self": ("input", "input"),
            "encoder": ("source", "source"),
            "decoder": ("target", "target"),
            "cross": ("target", "source"),
        }[role]
        if isinstance(self.subject.model, DualEncoder):
            names = ("first", "second")[example], ("first", "second")[example]
        return self._sequence(names[0], n), self._sequence(names[1], m)

    def _sequence(self, name: str, count: int) -> str:
        """The id of a sequence of `count` tokens with this name, or of one of that length: pooled
        tokens, or packed ones."""
        if name not in self.sequences and self._length(name) in (None, count):
            self.sequences[name] = self._describe(name, count)
        if name in self.sequences and self.sequences[name]["count"] == count:
            return name
        other = f"{name}, {count} tokens"
        if other not in self.sequences:
            self.sequences[other] = {"id": other, "kind": "vectors", "count": count, "tokens": []}
        return other

    def _length(self, name: str) -> int | None:
        """Number of tokens of a sequence, where it is known before the call."""
        ids = self.ids_of(name)
        if ids is not None:
            return len(ids)
        vectors = self.subject.arguments.get("x")
        is_vectors = isinstance(vectors, Tensor) and vectors.dim() == 3
        return vectors.shape[1] if is_vectors and name == "input" else None  # type: ignore[union-attr]

    def _describe(self, name: str, count: int) -> SequenceData:
        subject = self.subject
        grid, image = subject.grid, subject.image
        if grid is not None and image is not None and count >= grid[0] * grid[1]:
            first = count - grid[0] * grid[1]
            patches = [f"{i // grid[1]}, {i % grid[1]}" for i in range(grid[0] * grid[1])]
            extra = ["[CLS]", *(f"[{i}]" for i in range(1, first))][:first]
            return {
                "id": name,
                "kind": "image",
                "count": count,
                "tokens": extra + patches,
                "image": data_uri(image),
                "grid": grid,
                "first_patch": first,
            }
        tokens = self.token_texts(name)
        if len(tokens) != count or count > MAX_LABELLED:
            tokens = []
        kind: Literal["text", "vectors"] = (
            "text" if tokens or self.ids_of(name) is not None else ("vectors")
        )
        return {"id": name, "kind": kind, "count": count, "tokens": tokens}

    def _input_name(self, sequence: str) -> str | None:
        """Name of the model's input that holds the tokens of a sequence."""
        names = {
            "input": ("x", "input_ids"),
            "source": ("source", "input_ids"),
            "target": ("target", "decoder_input_ids"),
            "first": ("x",),
            "second": ("x",),
        }
        return next((n for n in names.get(sequence, ()) if n in self.subject.ids), None)

    def ids_of(self, sequence: str) -> Tensor | None:
        """Token ids (n) of a sequence, or None."""
        name = self._input_name(sequence)
        if name is None:
            return None
        ids = self.subject.ids[name][0]
        return ids if ids.dim() == 1 else ids[int(sequence == "second")]

    def token_texts(self, sequence: str) -> list[str]:
        """Texts of the tokens of a sequence; empty without any."""
        name = self._input_name(sequence)
        texts = self.subject.tokens.get(name or "", [])
        if sequence in ("first", "second"):
            half = len(texts) // 2
            return texts[:half] if sequence == "first" else texts[half:]
        return texts


def _first_output(model: nn.Module, x: Tensor) -> Tensor:
    """What a model returns for x, or the first of several outputs."""
    with evaluation_mode(model):
        output: Tensor = find_output(model(x))[0]
    return output


def is_vectors(x: object) -> bool:
    """Whether x are tokens (b, n, d)."""
    return isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()


def generic_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers of a model without mixers of Regard and without the attention interface: the modules
    of its longest list. Their influence is what can be seen."""
    if outer_mixers(model):
        return []
    if hasattr(model, "main_input_name"):
        from regard.hf import introspection

        introspection.annotate_roles(model)
        if introspection.attention_layers(model):
            return []
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    path, longest = max(lists, key=lambda item: len(item[1]), default=("", nn.ModuleList()))
    return [(f"{path}.{i}", module) for i, module in enumerate(longest)]


def count_heads(model: nn.Module) -> int:
    """Number of heads of all layers, as far as it is known before a call."""
    mixers = outer_mixers(model)
    if mixers:
        heads = [getattr(mixer, "heads", 1) for mixer in mixers]
        return sum(each if isinstance(each, int) else 1 for each in heads)
    config: Any = getattr(model, "config", None)
    layers = getattr(config, "num_hidden_layers", None) or 1
    return int(layers) * int(getattr(config, "num_attention_heads", None) or 1)


def check_size(subject: Subject, layers: Sequence[int] | None) -> None:
    """Refuse an input that is too long, or whose queries, keys and values of all heads would not
    fit into memory."""
    tokens = max(
        (value.shape[-1] for value in subject.ids.values()),
        default=max(
            (v.shape[1] for v in subject.inputs.tensors if v.dim() == 3 and v.is_floating_point()),
            default=0,
        ),
    )
    heads, share = count_heads(subject.model), 1.0
    mixers = len(outer_mixers(subject.model)) or int(
        getattr(getattr(subject.model, "config", None), "num_hidden_layers", None) or 1
    )
    if layers is not None:
        share = len(layers) / max(1, mixers)
    if tokens <= MAX_LENGTH and tokens * heads * share <= MAX_TOKEN_HEADS:
        return
    gigabytes = tokens * heads * share * 64 * 4 * 4 / 1e9
    fits = max(1, min(MAX_LENGTH, int(MAX_TOKEN_HEADS / max(1.0, heads * share))))
    fewer = "some layers (layers=[0], --layers 0), or for " if tokens <= MAX_LENGTH else ""
    raise ValueError(
        f"{tokens:,} tokens x {heads * share:,.0f} heads are too many: their queries, keys and "
        f"values alone are about {gigabytes:.1f} GB, and each head has {tokens**2:.1e} weights. "
        f"Ask for {fewer}at most {fits:,} tokens."
    )
