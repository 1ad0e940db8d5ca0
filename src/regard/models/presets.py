"""Models of the literature, as configurations: any mixer, any size."""

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

Mixing = str | ModuleSpec | list[str | ModuleSpec]
WITH_BIAS = module_spec("vanilla", bias=True)


def bert(
    layers: int = 12,
    dim: int = 768,
    heads: int = 12,
    *,
    vocab_size: int = 30522,
    length: int = 512,
    mixer: Mixing = WITH_BIAS,
    head: HeadConfig | None = MaskedLMHeadConfig(),
    dropout: float = 0.1,
) -> ModelConfig:
    """BERT: an encoder with norms behind its sub-layers, learned positions and two types of tokens, which fills in masked
    tokens (Devlin et al. 2019, arXiv 1810.04805)."""
    return ModelConfig(
        kind="encoder",
        input=TokenInput(vocab_size=vocab_size, types=2, norm=True),
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
    mixer: Mixing = WITH_BIAS,
    head: HeadConfig | None = LMHeadConfig(),
    dropout: float = 0.1,
) -> ModelConfig:
    """GPT-2 and GPT-3: a decoder with norms before its sub-layers, learned positions and tied embeddings
    (Radford et al. 2019; Brown et al. 2020, arXiv 2005.14165).  GPT-3's layers take turns:
    `mixer=[part("vanilla", bias=True), part("sparse_strided")]`."""
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
    image: int = 224,
    patch: int = 16,
    mixer: Mixing = WITH_BIAS,
    head: HeadConfig | None = None,
    dropout: float = 0.0,
) -> ModelConfig:
    """ViT: an encoder over the patches of a square image, with a class token and norms before its sub-layers
    (Dosovitskiy et al. 2021, arXiv 2010.11929)."""
    return ModelConfig(
        kind="encoder",
        input=PatchInput(height=image, width=image, patch=patch),
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
    mixer: Mixing = module_spec("vanilla"),
    dropout: float = 0.1,
) -> ModelConfig:
    """The Transformer: encoder and decoder with norms behind their sub-layers, sinusoids, and one table of embeddings for
    source, target and logits (Vaswani et al. 2017, arXiv 1706.03762).

    length   for mixers that are built for one
    """
    return ModelConfig(
        kind="seq2seq",
        input=TokenInput(vocab_size=vocab_size, scale=True),
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
