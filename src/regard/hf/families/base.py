"""What a file of a model family declares, and helpers that several families use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.errors import Unsupported, did_you_mean
from regard.hf.weights import WeightMap
from regard.models.config import HeadConfig, ModelConfig
from regard.position.rotary import RotaryEmbedding
from regard.prior import Prior

Json = Mapping[str, Any]

# Paths in a Regard model, for weight maps.
EMBED = "backbone.embed"
LAYER = "backbone.stack.layers.{i}"
MIXER_NORM, FFN_NORM = f"{LAYER}.mixer_residual.norm", f"{LAYER}.ffn_residual.norm"

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


class CheckpointFamily(NamedTuple):
    """How published checkpoints of a family become Regard models.

    Args:
        convert_config: Contents of config.json and a head -> configuration of the Regard model.
        weight_map: Contents of config.json -> names and transforms of the weights.
    """

    convert_config: Callable[[Json, HeadConfig | None], ModelConfig]
    weight_map: Callable[[Json], WeightMap]


def require(config: Json, **values: object) -> None:
    """Raise `Unsupported` if a setting of a config.json differs from the only supported value."""
    for name, value in values.items():
        if config.get(name, value) != value:
            raise Unsupported(f"{name}={config[name]!r} is not supported, only {name}={value!r}.")


def require_full_width_heads(heads: int, head_dim: int, dim: int) -> None:
    """Raise `Unsupported` unless all heads together are as wide as the model."""
    if heads * head_dim != dim:
        raise Unsupported(
            f"{heads} heads of width {head_dim} are not supported in a model of width {dim}."
        )


def convert_activation(name: str) -> str:
    """The Regard name of an activation of transformers."""
    if name not in ACTIVATIONS:
        raise Unsupported(
            f"Activation {name!r} is not supported: {did_you_mean(name, ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


# --------------------------------------------------------------------- attention that swap replaces
class LinearWeights(NamedTuple):
    """Weight (out, in) and bias (out) or None of a projection."""

    weight: Tensor
    bias: Tensor | None

    def to_linear(self) -> nn.Linear:
        """A linear layer with copies of them."""
        rows, columns = self.weight.shape
        linear = nn.Linear(columns, rows, bias=self.bias is not None, device="meta").to_empty(
            device=self.weight.device
        )
        linear.weight = nn.Parameter(self.weight.detach().clone())
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone())
        return linear


class AttentionWeights(NamedTuple):
    """Weights and settings of an attention layer.

    Args:
        dim: Model width.
        q, k, v: Projections to the heads.
        out: Output projection. None: it is outside the module and stays there.
        causal: Whether the layer is causal. None: the module does not say.
        length: Maximum sequence length of the model. None: any.
        scale: Factor of the scores. None: 1/√e.
        kv_heads: Key and value heads. None: as many as query heads.
        global_qkv: Separate projections of tokens with global attention.
        prior: Bias added to the scores.
        rotary: Rotary embedding of queries and keys.
        pads: Whether inputs of the model may be padded.
    """

    dim: int
    heads: int
    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    out: LinearWeights | None = None
    causal: bool | None = False
    length: int | None = None
    scale: float | None = None
    kv_heads: int | None = None
    global_qkv: tuple[LinearWeights, LinearWeights, LinearWeights] | None = None
    prior: Prior | None = None
    rotary: RotaryEmbedding | None = None
    pads: bool = True


class AttentionAdapter(NamedTuple):
    """How `swap` replaces an attention class.

    Args:
        weights: The module, and the first such module of the model -> its weights and settings.
        forward: As the `forward` of the class, with the `SwappedAttention` in place of self.
        applies: Whether a module of the class is self-attention.
        kept_modules: Sub-modules of the old module that stay in use.
        kept_methods: Methods of the old module that the model calls.
    """

    weights: Callable[[Any, Any], AttentionWeights]
    forward: Callable[..., Any]
    applies: Callable[[Any], bool] = lambda module: True
    kept_modules: tuple[str, ...] = ()
    kept_methods: tuple[str, ...] = ()


def linear_weights(*layers: nn.Module) -> list[LinearWeights]:
    """Weights and biases of linear layers."""
    return [LinearWeights(layer.weight, getattr(layer, "bias", None)) for layer in layers]  # type: ignore[arg-type]


def read_attention(module: Any, projections: str, heads: int, **settings: Any) -> AttentionWeights:
    """Weights of an attention layer with linear projections.

    Args:
        projections: Attribute names of the query, key, value and, if it is inside, output layers.
        settings: Other fields of `AttentionWeights`. The length is that of the model by default.
    """
    q, k, v, *out = linear_weights(*(getattr(module, name) for name in projections.split()))
    length = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    settings = {"length": length, "out": out[0] if out else None, **settings}
    return AttentionWeights(q.weight.shape[1], heads, q, k, v, **settings)


def self_attention_cache(cache: Any) -> Any:
    """The part of a cache of transformers that belongs to self-attention."""
    return getattr(cache, "self_attention_cache", cache)


# ------------------------------------------------------------------------------------------ timm
Tensors = Mapping[str, Tensor]


def count_blocks(tensors: Tensors, stem: str) -> int:
    """The number of numbered blocks of that name."""
    return 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith(f"{stem}."))
