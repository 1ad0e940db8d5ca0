"""Switch Transformers: T5 with a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.hf.families import t5
from regard.hf.families.base import CheckpointFamily, Json, require
from regard.hf.weights import WeightMap, WeightRule, rule
from regard.models.config import HeadConfig, ModelConfig, module_spec


def convert_config(config: Json, head: HeadConfig | None) -> ModelConfig:
    """Convert the config.json of a Switch Transformer.

    Every `sparse_step`-th layer has experts.
    """
    require(config, router_bias=False, is_gated_act=False)
    step, decoder_step = config["encoder_sparse_step"], config["decoder_sparse_step"]
    if step != decoder_step or step < 1:
        raise Unsupported(
            f"encoder_sparse_step={step} and decoder_sparse_step={decoder_step} are not supported: "
            "they must be equal."
        )
    dense = t5.convert_config(
        {**config, "feed_forward_proj": config.get("dense_act_fn", "relu")}, head
    )
    ffn = dense.ffn[0]
    assert ffn is not None
    arguments = {name: value for name, value in ffn.arguments.items() if name != "bias"}
    jitter = config.get("router_jitter_noise", 0.01)
    sparse = module_spec("switch", num_experts=config["num_experts"], jitter=jitter, **arguments)
    return dense.replace(ffn=[sparse if step == 1 or i == 1 else ffn for i in range(step)])


def weight_map(config: Json) -> WeightMap:
    """Weights of T5, and of the experts, which are stacked here."""
    tied = bool(config.get("tie_word_embeddings", True))
    base = t5.t5_weight_map(config["d_kv"], config["d_model"], scale_output=tied)
    rules = list(base.rules)
    for side, ffn in t5.FFN_LAYERS.items():
        source, target = f"{side}.block.{{i}}.{ffn}.mlp", f"{side}.stack.layers.{{i}}.ffn"
        for name, own_name in (("wi", "up"), ("wo", "down")):
            experts = tuple(
                f"{source}.experts.expert_{j}.{name}.weight" for j in range(config["num_experts"])
            )
            rules.append(rule(f"{source}.{name}.weight", f"{target}.{own_name}.weight"))
            rules.append(WeightRule(experts, (f"{target}.bank.expert.{own_name}.weight",), _stack))
        rules.append(rule(f"{source}.router.classifier.weight", f"{target}.router.weight"))
        rules.append(rule("", f"{target}.router.num_draws", _zero_counter))
    return WeightMap(tuple(rules), ignored=base.ignored)


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def _zero_counter() -> Tensor:
    """The router counts how often it has drawn noise."""
    return torch.zeros((), dtype=torch.long)


CHECKPOINTS = {"switch_transformers": CheckpointFamily(convert_config, weight_map)}
