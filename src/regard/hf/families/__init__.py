"""Model families: how attention is called, where weights are, how checkpoints convert.

A file for each family. For attention names, models that use transformers' attention interface
(Llama, ModernBERT and some 300 others) need none; their few irregularities are in `interface`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regard.hf.families import (
    bert,
    bigbird,
    distilbert,
    fnet,
    gpt2,
    llama,
    longformer,
    mlp_mixer,
    nystromformer,
    reformer,
    roberta,
    switch_transformers,
    t5,
    torch_nn,
    vit,
    xcit,
)
from regard.hf.families.base import (
    AttentionAdapter,
    AttentionWeights,
    CheckpointFamily,
    Tensors,
    linear_weights,
)
from regard.hf.families.interface import (
    CAUSAL_MODULES,
    CROSS_ATTENTION_NAMES,
    INTERFACE_ATTENTION,
    OWN_ATTENTION,
)
from regard.hf.weights import WeightMap
from regard.models.config import HeadConfig, ModelConfig

__all__ = [
    "ADAPTERS",
    "AttentionAdapter",
    "AttentionWeights",
    "CAUSAL_MODULES",
    "CHECKPOINTS",
    "CROSS_ATTENTION_NAMES",
    "INTERFACE_ATTENTION",
    "OWN_ATTENTION",
    "TIMM",
    "find_adapter",
    "linear_weights",
]

# By `model_type` of config.json.
CHECKPOINTS: dict[str, CheckpointFamily] = {
    **bert.CHECKPOINTS,
    **roberta.CHECKPOINTS,
    **longformer.CHECKPOINTS,
    **bigbird.CHECKPOINTS,
    **fnet.CHECKPOINTS,
    **nystromformer.CHECKPOINTS,
    **gpt2.CHECKPOINTS,
    **vit.CHECKPOINTS,
    **t5.CHECKPOINTS,
    **switch_transformers.CHECKPOINTS,
    **reformer.CHECKPOINTS,
}

# By the first part of a timm `architecture`.
TIMM: dict[str, Callable[[Tensors, HeadConfig | None, int], tuple[ModelConfig, WeightMap]]] = {
    "mixer": mlp_mixer.convert,
    "xcit": xcit.convert,
}

# By class name, so that nothing is imported. Add your own: ADAPTERS["MyAttention"] =
# AttentionAdapter(...)
ADAPTERS: dict[str, AttentionAdapter] = {
    **bert.ADAPTERS,
    **distilbert.ADAPTERS,
    **vit.ADAPTERS,
    **gpt2.ADAPTERS,
    **llama.ADAPTERS,
    **t5.ADAPTERS,
    **longformer.ADAPTERS,
    **bigbird.ADAPTERS,
    **torch_nn.ADAPTERS,
}
_BUILT_IN = frozenset(ADAPTERS)
_PACKAGES = (
    "transformers",
    "torch",
)  # built-in adapters apply to classes of these; others may have the same name


def find_adapter(module: nn.Module) -> AttentionAdapter | None:
    """The adapter of a module's class, or of one that it inherits from."""
    for cls in type(module).__mro__:
        name = cls.__name__
        if name in ADAPTERS and (
            name not in _BUILT_IN or cls.__module__.partition(".")[0] in _PACKAGES
        ):
            return ADAPTERS[name]
    return None
