"""Small transformers models of many families with random weights, and inputs for them."""

from __future__ import annotations

import torch

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 60,
}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SMALL, **ENDS, "num_key_value_heads": 2, "max_position_embeddings": 64}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 60,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
    **ENDS,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 60,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
SIDE = {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "projection_dim": 16}


def randomize_weights(model, dtype: torch.dtype = torch.float64, size: float = 0.3):
    """Random weights, so that biases, gains and attention maps matter."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(size * torch.randn(p.shape) if p.dim() > 1 else p + 0.1 * torch.randn(p.shape))
    return model.to(dtype).eval()


def ids(b: int = 3, n: int = 12, seed: int = 0) -> torch.Tensor:
    """Token ids (b, n) without special tokens."""
    return torch.randint(3, 60, (b, n), generator=torch.Generator().manual_seed(seed))


def padding(side: str, b: int = 3, n: int = 12) -> torch.Tensor:
    """Padding mask (b, n) with n, nine and five tokens."""
    real = torch.arange(n) < torch.tensor([n, 9, 5])[:b, None]
    return (real if side == "right" else real.flip(1)).long()


def pixels(size: int = 16) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


ENCODERS = {
    "bert": ("BertModel", "BertConfig", {**SMALL, **CALM, "max_position_embeddings": 64}),
    "roberta": ("RobertaModel", "RobertaConfig", {**SMALL, **CALM, "max_position_embeddings": 80}),
    "electra": (
        "ElectraModel",
        "ElectraConfig",
        {**SMALL, **CALM, "embedding_size": 16, "max_position_embeddings": 64},
    ),
    "esm": (
        "EsmModel",
        "EsmConfig",
        {
            **SMALL,
            **CALM,
            "max_position_embeddings": 64,
            "pad_token_id": 1,
            "mask_token_id": 2,
            "token_dropout": False,
        },
    ),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {
            **SMALL,
            **ENDS,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 6,
            "global_attn_every_n_layers": 2,
            "max_position_embeddings": 64,
        },
    ),
}
DECODERS = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 60,
            "n_positions": 64,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            **ENDS,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "gemma2": (  # capped scores and windows
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 5,
            "attn_logit_softcapping": 0.5,
            "query_pre_attn_scalar": 3,
            "initializer_range": 0.2,
        },
    ),
    "gpt_oss": (  # learned sinks and windows
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 5,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "initializer_range": 0.2,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "vocab_size": 60,
            "dropout": 0.0,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 64,
            **ENDS,
        },
    ),
    "neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**SMALL, **ENDS, "max_position_embeddings": 64, "hidden_dropout": 0.0},
    ),
}
PAIRS = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**SEQ2SEQ, "max_position_embeddings": 64},
    ),
    "switch": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            **T5,
            "num_experts": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
        },
    ),
}


def clip_inputs(side: str) -> dict[str, torch.Tensor]:
    return {"input_ids": ids(2), "attention_mask": padding(side, 2), "pixel_values": pixels()}


def whisper_inputs() -> dict[str, torch.Tensor]:
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(2))
    return {"input_features": features, "decoder_input_ids": ids(2, 6)}


OTHERS = {
    "vit": (
        "ViTModel",
        "ViTConfig",
        {
            **{k: v for k, v in SMALL.items() if k != "vocab_size"},
            "image_size": 16,
            "patch_size": 4,
        },
        lambda side: {"pixel_values": pixels()},
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**SIDE, "vocab_size": 60, "max_position_embeddings": 64, **ENDS},
            "vision_config": {**SIDE, "image_size": 16, "patch_size": 8},
            "projection_dim": 16,
        },
        clip_inputs,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 24,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        lambda side: whisper_inputs(),
    ),
}


def inputs(family: str, side: str) -> dict[str, torch.Tensor]:
    """Inputs of a model of the family, padded on a side."""
    if family in OTHERS:
        return OTHERS[family][3](side)
    given = {"input_ids": ids(), "attention_mask": padding(side)}
    return {**given, "decoder_input_ids": ids(3, 7, seed=5)} if family in PAIRS else given


ALL = {**ENCODERS, **DECODERS, **PAIRS, **{name: entry[:3] for name, entry in OTHERS.items()}}


def build(family: str, implementation: str = "eager", **changes: object):
    """A model with seeded weights."""
    import transformers

    kind, config, arguments = ALL[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**arguments, **changes})
    model = getattr(transformers, kind)._from_config(made, attn_implementation=implementation)
    return model.eval()
