"""Stream states of models as JSON values: nested lists, and base64 of safetensors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors, save as serialize
from torch import Tensor

from regard.errors import Unsupported
from regard.models import Model
from regard.models.model import Decoder
from regard.state import State, leaves

MAX_BYTES = 1 << 16  # of the state of one entity
CHUNKS = (1, 1, 62, 64, 128)  # of a stream after which the size of a state is known
FIRST_SIZE = 2  # chunk from which the size must stay the same


class StreamStateCodec:
    """Converts the stream states of a model to JSON values and back.

    The classes of the states are found by streaming a few tokens, so no class is named by what is
    read. `reason` says why the states cannot be stored, None if they can: a mixer that does not
    stream, or whose state grows with the history.

    Args:
        model: A decoder of features (b, k, n).
        width: Number of features k of a token.
    """

    def __init__(self, model: Model, width: int) -> None:
        self.classes: dict[str, type] = {}
        self.reason = self._probe(model, width)

    @torch.no_grad()
    def _probe(self, model: Model, width: int) -> str | None:
        assert isinstance(model, Decoder)
        assert model.config is not None
        if model.config.length is not None:
            return f"it was built for {model.config.length} events"
        stack = model.backbone.stack
        if not stack.can.stream:
            return f"it does not stream: {stack.can.reason('stream')}"
        state, sizes = None, []
        try:
            for length in CHUNKS:
                _, state = model.stream(torch.ones(1, width, length, dtype=torch.int64), state)
                sizes.append(sum(_leaf_bytes(leaf) for leaf in leaves(state)))
                for each in _named_tuples(state):
                    self.classes[type(each).__name__] = type(each)
        except Unsupported as error:
            return str(error)
        if len(set(sizes[FIRST_SIZE:])) > 1:
            return "its state grows with the number of events"
        if sizes[-1] > MAX_BYTES:
            return f"its state has {sizes[-1]:,} bytes, more than {MAX_BYTES:,}"
        return None

    def encode(self, state: State) -> dict[str, Any]:
        """The state of one entity as JSON values."""
        tensors: dict[str, Tensor] = {}
        structure = self._describe(state, tensors)
        content = serialize({name: each.contiguous() for name, each in tensors.items()})
        return {"structure": structure, "tensors": base64.b64encode(content).decode()}

    def decode(self, content: dict[str, Any]) -> State:
        """The inverse of `encode`."""
        try:
            tensors = parse_tensors(base64.b64decode(content["tensors"]))
            return self._build(content["structure"], tensors)
        except (KeyError, IndexError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"not the state of an entity of this model: {error!r}") from None

    def _describe(self, state: State, tensors: dict[str, Tensor]) -> Any:
        """The structure of a state: a number or None as it is, else [name, parts]."""
        if isinstance(state, Tensor | np.ndarray):
            is_tensor, name = isinstance(state, Tensor), str(len(tensors))
            tensors[name] = state if isinstance(state, Tensor) else torch.from_numpy(state)
            return ["tensor" if is_tensor else "array", name]
        if isinstance(state, dict):
            parts = [[key, self._describe(part, tensors)] for key, part in state.items()]
            return ["dict", parts]
        if isinstance(state, tuple | list):
            return [type(state).__name__, [self._describe(part, tensors) for part in state]]
        if state is None or isinstance(state, int | float):
            return state
        if isinstance(state, np.generic):
            return state.item()
        raise TypeError(f"a state of {type(state).__name__} cannot be stored")

    def _build(self, structure: Any, tensors: dict[str, Tensor]) -> State:
        if not isinstance(structure, list):
            return structure
        name, parts = structure
        if name in ("tensor", "array"):
            return tensors[parts] if name == "tensor" else tensors[parts].numpy()
        if name == "dict":
            return {key: self._build(part, tensors) for key, part in parts}
        built = [self._build(part, tensors) for part in parts]
        if name in ("tuple", "list"):
            return tuple(built) if name == "tuple" else built
        return self.classes[name](*built)


def _leaf_bytes(leaf: Any) -> int:
    """Bytes of a leaf by itself: a tensor may be a view of a larger one."""
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    return leaf.nbytes if isinstance(leaf, np.ndarray) else 0


def _named_tuples(state: State) -> Iterator[Any]:
    if isinstance(state, tuple) and type(state) is not tuple:
        yield state
    if isinstance(state, tuple | list | dict):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _named_tuples(part)
