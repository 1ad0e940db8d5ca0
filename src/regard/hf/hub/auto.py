"""Our models known to the Auto classes: importing this registers them, and `from_pretrained` of those finds them."""

from __future__ import annotations

import transformers

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(
        f"regard.hub.auto needs transformers 5, not {transformers.__version__}: pip install -U 'regard[hf]'"
    )

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from regard.hf.hub.cache import StreamCache
from regard.hf.hub.config import RegardConfig
from regard.hf.hub.mixin import HubModel
from regard.hf.hub.modeling import (
    RegardForMaskedLM,
    RegardForSequenceClassification,
    RegardForTokenClassification,
    RegardModel,
    wrap_model,
)
from regard.hf.hub.speaking import RegardForCausalLM, RegardForConditionalGeneration

__all__ = [
    "HubModel",
    "RegardConfig",
    "RegardForCausalLM",
    "RegardForConditionalGeneration",
    "RegardForMaskedLM",
    "RegardForSequenceClassification",
    "RegardForTokenClassification",
    "RegardModel",
    "StreamCache",
    "wrap_model",
]


def _register() -> None:
    """Tell the Auto classes."""
    AutoConfig.register("regard", RegardConfig, exist_ok=True)
    for auto, kind in (
        (AutoModel, RegardModel),
        (AutoModelForCausalLM, RegardForCausalLM),
        (AutoModelForMaskedLM, RegardForMaskedLM),
        (AutoModelForSeq2SeqLM, RegardForConditionalGeneration),
        (AutoModelForSequenceClassification, RegardForSequenceClassification),
        (AutoModelForTokenClassification, RegardForTokenClassification),
    ):
        auto.register(RegardConfig, kind, exist_ok=True)


_register()
