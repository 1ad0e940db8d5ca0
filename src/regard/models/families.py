"""Models of the literature, as configurations: any mixer, any size."""

from __future__ import annotations

from regard.models.config import Config, Head, Language, Masked, Part, Patches, Tokens, listed, part

Mixing = str | Part | list[str | Part]
WITH_BIAS = part("vanilla", bias=True)


def bert(
    layers: int = 12, dim: int = 768, heads: int = 12, *, vocab: int = 30522, length: int = 512, mixer: Mixing = WITH_BIAS,
    head: Head | None = Masked(), dropout: float = 0.1,
) -> Config:  # fmt: skip
    """BERT: an encoder with norms behind its sub-layers, learned positions and two types of tokens, which fills in masked
    tokens (Devlin et al. 2019, arXiv 1810.04805)."""
    return Config(
        kind="encoder", input=Tokens(vocab=vocab, types=2, norm=True), head=head, dim=dim, heads=heads, layers=layers,
        length=length, mixer=listed(mixer), norm=part("layer", eps=1e-12), residual=part("post"), dropout=dropout,
    )  # fmt: skip


def gpt(
    layers: int = 12, dim: int = 768, heads: int = 12, *, vocab: int = 50257, length: int = 1024, mixer: Mixing = WITH_BIAS,
    head: Head | None = Language(), dropout: float = 0.1,
) -> Config:  # fmt: skip
    """GPT-2 and GPT-3: a decoder with norms before its sub-layers, learned positions and tied embeddings
    (Radford et al. 2019; Brown et al. 2020, arXiv 2005.14165).  GPT-3's layers take turns:
    `mixer=[part("vanilla", bias=True), part("sparse_strided")]`."""
    return Config(
        kind="decoder", input=Tokens(vocab=vocab), head=head, dim=dim, heads=heads, layers=layers, length=length,
        mixer=listed(mixer), ffn=[part("mlp", activation="gelu_tanh")], norm=part("layer", eps=1e-5), dropout=dropout,
    )  # fmt: skip


def vit(
    layers: int = 12, dim: int = 768, heads: int = 12, *, image: int = 224, patch: int = 16, mixer: Mixing = WITH_BIAS,
    head: Head | None = None, dropout: float = 0.0,
) -> Config:  # fmt: skip
    """ViT: an encoder over the patches of a square image, with a class token and norms before its sub-layers
    (Dosovitskiy et al. 2021, arXiv 2010.11929)."""
    return Config(
        kind="encoder", input=Patches(height=image, width=image, patch=patch), head=head, dim=dim, heads=heads, layers=layers,
        mixer=listed(mixer), norm=part("layer", eps=1e-12), dropout=dropout,
    )  # fmt: skip


def transformer(
    layers: int = 6, dim: int = 512, heads: int = 8, *, vocab: int = 37000, length: int | None = None,
    mixer: Mixing = part("vanilla"), dropout: float = 0.1,
) -> Config:  # fmt: skip
    """The Transformer: encoder and decoder with norms behind their sub-layers, sinusoids, and one table of embeddings for
    source, target and logits (Vaswani et al. 2017, arXiv 1706.03762).

    length   for mixers that are built for one
    """
    return Config(
        kind="seq2seq", input=Tokens(vocab=vocab, scale=True), head=Language(), dim=dim, heads=heads, layers=layers,
        length=length, mixer=listed(mixer), ffn=[part("mlp", activation="relu")], residual=part("post"),
        position=part("sinusoid"), dropout=dropout,
    )  # fmt: skip
