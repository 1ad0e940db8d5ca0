"""Configurations of well-known models, for any mixer and size."""

from __future__ import annotations

from regard.models.config import (
    HeadConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    ModuleSpec,
    PatchInput,
    TokenInput,
    as_list,
    module_spec,
)

MixerSpecs = str | ModuleSpec | list[str | ModuleSpec]
VANILLA_WITH_BIAS = module_spec("vanilla", bias=True)


def bert(
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    *,
    vocab_size: int = 30522,
    length: int = 512,
    mixer: MixerSpecs = VANILLA_WITH_BIAS,
    head: HeadConfig | None = MaskedLMHeadConfig(),
    dropout: float = 0.1,
) -> ModelConfig:
    """BERT: a post-norm encoder with learned positions and two token types, trained to fill in
    masked tokens (Devlin et al. 2019, arXiv 1810.04805)."""
    return ModelConfig(
        kind="encoder",
        input=TokenInput(vocab_size=vocab_size, type_vocab_size=2, norm=True),
        head=head,
        dim=dim,
        heads=heads,
        layers=layers,
        length=length,
        mixer=as_list(mixer),
        norm=module_spec("layer", eps=1e-12),
        residual=module_spec("post"),
        dropout=dropout,
    )


def gpt(
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    *,
    vocab_size: int = 50257,
    length: int = 1024,
    mixer: MixerSpecs = VANILLA_WITH_BIAS,
    head: HeadConfig | None = LMHeadConfig(),
    dropout: float = 0.1,
) -> ModelConfig:
    """GPT-2 and GPT-3: a pre-norm decoder with learned positions and tied embeddings
    (Radford et al. 2019; Brown et al. 2020, arXiv 2005.14165).

    GPT-3 alternates dense and sparse layers:
    `mixer=[module_spec("vanilla", bias=True), module_spec("sparse_strided")]`.
    """
    return ModelConfig(
        kind="decoder",
        input=TokenInput(vocab_size=vocab_size),
        head=head,
        dim=dim,
        heads=heads,
        layers=layers,
        length=length,
        mixer=as_list(mixer),
        ffn=[module_spec("mlp", activation="gelu_tanh")],
        norm=module_spec("layer", eps=1e-5),
        dropout=dropout,
    )


def vit(
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    *,
    image_size: int = 224,
    patch_size: int = 16,
    mixer: MixerSpecs = VANILLA_WITH_BIAS,
    head: HeadConfig | None = None,
    dropout: float = 0.0,
) -> ModelConfig:
    """ViT: a pre-norm encoder over the patches of a square image, with a class token
    (Dosovitskiy et al. 2021, arXiv 2010.11929)."""
    return ModelConfig(
        kind="encoder",
        input=PatchInput(height=image_size, width=image_size, patch_size=patch_size),
        head=head,
        dim=dim,
        heads=heads,
        layers=layers,
        mixer=as_list(mixer),
        norm=module_spec("layer", eps=1e-12),
        dropout=dropout,
    )


def transformer(
    layers: int = 6,
    dim: int = 512,
    heads: int = 8,
    *,
    vocab_size: int = 37000,
    length: int | None = None,
    mixer: MixerSpecs = module_spec("vanilla"),
    dropout: float = 0.1,
) -> ModelConfig:
    """The Transformer: post-norm encoder and decoder with sinusoidal positions and one embedding
    table for source, target and logits (Vaswani et al. 2017, arXiv 1706.03762).

    Args:
        length: Maximum length, for mixers that need one.
    """
    return ModelConfig(
        kind="seq2seq",
        input=TokenInput(vocab_size=vocab_size, scale_embeddings=True),
        head=LMHeadConfig(),
        dim=dim,
        heads=heads,
        layers=layers,
        length=length,
        mixer=as_list(mixer),
        ffn=[module_spec("mlp", activation="relu")],
        residual=module_spec("post"),
        position=module_spec("sinusoid"),
        dropout=dropout,
    )
