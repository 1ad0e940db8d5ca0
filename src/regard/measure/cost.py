"""What a model costs at a sequence length: parameters, FLOPs, activations and streaming state.

    model_cost = cost(regard.create("bigbird", dim=512, heads=8, length=4096), 4096)
    print(model_cost.forward_flops, model_cost.activation_bytes, model_cost.parameters)

Nothing is computed, and a module built under `torch.device("meta")` takes no memory, whatever its
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from regard.block import Layer
from regard.errors import check_int
from regard.measure import formulas as formulas  # registers them
from regard.measure.module_cost import CallShape, ModuleCost, module_cost
from regard.mixer import Mixer
from regard.models.embeddings import TokenEmbedding, VectorEmbedding
from regard.position import PositionEmbedding

MAX_LENGTH, MAX_BATCH = 1 << 25, 1 << 40


@dataclass(frozen=True)
class Cost:
    """Cost of one forward and backward pass.

    See `regard.measure.module_cost.ModuleCost` for what is counted.

    Args:
        name: Name of the part, "model" for the whole.
        kind: Class name of the module.
        parameters: Number of parameters.
        active_parameters: Parameters that one token uses; fewer than all with a mixture of experts.
        forward_flops: FLOPs of the forward pass.
        backward_flops: FLOPs of the backward pass.
        recomputed_flops: The share of `backward_flops` that repeats forward work.
        activation_bytes: Bytes that autograd saves for the backward pass.
        state_bytes: Size of the streaming state after all tokens; 0 if the module does not stream.
        state_bytes_per_token: Bytes that each token adds to the state.
        parts: Costs of the parts.
    """

    name: str
    kind: str
    parameters: int
    active_parameters: int
    forward_flops: int
    backward_flops: int
    recomputed_flops: int
    activation_bytes: int
    state_bytes: int
    state_bytes_per_token: float
    parts: tuple[Cost, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All values as JSON types."""
        return {**vars(self), "parts": [part.as_json() for part in self.parts]}


def cost(
    module: nn.Module, length: int, *, batch: int = 1, itemsize: int = 4, context: int | None = None
) -> Cost:
    """Cost of one forward and backward pass over (batch, length) tokens.

    Args:
        module: A model, stack, block, mixer or feed-forward layer.
        length: Sequence length.
        batch: Batch size.
        itemsize: Bytes of one number: 4 for float32, 2 for bfloat16.
        context: Length of the sequence that cross-attention reads. Default: `length`.
    """
    context = length if context is None else context
    check_int(1, length=length, batch=batch, itemsize=itemsize, context=context)
    limits = {"length": MAX_LENGTH, "context": MAX_LENGTH, "batch": MAX_BATCH}
    for name, size in (("length", length), ("context", context), ("batch", batch)):
        if size > limits[name]:
            raise ValueError(f"{name} must be at most {limits[name]:,}, not {size:,}")
    for part in module.modules():
        most = part.length if isinstance(part, Mixer | Layer) else None
        if isinstance(part, TokenEmbedding | VectorEmbedding):
            most = part.position.length if isinstance(part.position, PositionEmbedding) else None
        if most is not None and max(length, context) > most:
            raise ValueError(
                f"{type(part).__name__} was built for at most {most:,} tokens, "
                f"but the length is {max(length, context):,}"
            )
    return _in_bytes("model", module_cost(module, CallShape(batch, length, context)), itemsize)


def _in_bytes(name: str, count: ModuleCost, itemsize: int) -> Cost:
    parts = count.parts
    if not count.state:  # the parts of a module that does not stream have no state either
        parts = {key: part.without_state() for key, part in parts.items()}
    return Cost(
        name=name,
        kind=count.kind,
        parameters=count.parameters,
        active_parameters=count.active,
        forward_flops=count.forward,
        backward_flops=count.backward,
        recomputed_flops=count.recomputed,
        activation_bytes=count.saved * itemsize,
        state_bytes=count.state * itemsize,
        state_bytes_per_token=count.state_growth * itemsize,
        parts=tuple(_in_bytes(key, part, itemsize) for key, part in parts.items()),
    )
