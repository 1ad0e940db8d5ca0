"""Which layers use the attention interface, and which are causal or cross-attention.

transformers has no flag for this on the layer, but conventions:

- `PreTrainedModel._can_set_attn_implementation` says whether a model's file uses the attention
  interface at all.
- Layers that use it have an attribute `is_causal`, which transformers' own attention functions
  read.
- Cross-attention layers have `is_cross_attention`, or a name such as "encoder_attn".

Exceptions are declared in `regard.hf.families`. `tests/test_hf_introspection.py` compares
conventions and declarations with the source of all models of the installed transformers, and fails
when they part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from regard.hf import families

ROLE = "_regard_role"  # stored on the layer, so that copies of a model keep it
CROSS, CAUSAL, BIDIRECTIONAL = "cross", "causal", "bidirectional"


def submodels(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The model and the models inside it."""
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def attention_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers that call the attention interface, with their paths."""
    return [(path, module) for path, module in model.named_modules() if uses_interface(module)]


def uses_interface(module: nn.Module) -> bool:
    """Whether a module calls the attention interface, by convention or declaration."""
    name = type(module).__name__
    if isinstance(module, PreTrainedModel) or name in families.OWN_ATTENTION:
        return False
    return hasattr(module, "is_causal") or name in families.INTERFACE_ATTENTION


def layer_without_interface(model: PreTrainedModel) -> nn.Module | None:
    """The module that keeps a model from using the attention interface, or None."""
    if not model._can_set_attn_implementation() or not attention_layers(model):
        return model
    return next(
        (module for module in model.modules() if type(module).__name__ in families.OWN_ATTENTION),
        None,
    )


def annotate_roles(model: nn.Module) -> None:
    """Store on each attention layer whether it is causal, bidirectional or cross-attention."""
    for path, module in attention_layers(model):
        pieces = path.split(".")
        parents = [
            type(model.get_submodule(".".join(pieces[:i]))).__name__ for i in range(len(pieces))
        ]
        names = (pieces[-1], *parents[-2:], type(module).__name__)
        is_cross = getattr(module, "is_cross_attention", None) is True or is_cross_by_flags(module)
        if is_cross or any(
            word in name.lower() for name in names for word in families.CROSS_ATTENTION_NAMES
        ):
            role = CROSS
        elif getattr(module, "is_causal", False) or not set(parents).isdisjoint(
            families.CAUSAL_MODULES
        ):
            role = CAUSAL
        else:
            role = BIDIRECTIONAL
        setattr(module, ROLE, role)


def is_cross_by_flags(module: nn.Module) -> bool:
    """In BART and its relatives, cross-attention is decoder attention that is not causal."""
    return (
        getattr(module, "is_decoder", False) is True and getattr(module, "is_causal", None) is False
    )


def is_cross(module: nn.Module) -> bool:
    """Whether a layer is cross-attention."""
    role = getattr(module, ROLE, None)
    return is_cross_by_flags(module) if role is None else role == CROSS


def is_causal(module: nn.Module) -> bool:
    """Whether a layer declares itself causal."""
    return getattr(module, ROLE, None) != CROSS and bool(getattr(module, "is_causal", False))


def max_positions(module: nn.Module) -> int | None:
    """The maximum sequence length in the configuration of a layer."""
    return getattr(getattr(module, "config", None), "max_position_embeddings", None)


def has_sliding_window(module: nn.Module) -> bool:
    """Whether a layer has a sliding window, by its own attribute or by the configuration."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    window = None
    if layer_types is None or "sliding_attention" in layer_types:
        window = getattr(config, "sliding_window", None)
    return bool(getattr(module, "sliding_window", window))


def has_chunks(module: nn.Module) -> bool:
    """Whether layers of this configuration attend within chunks, as in Llama 4."""
    return "chunked_attention" in (
        getattr(getattr(module, "config", None), "layer_types", None) or ()
    )
