"""The rows that a model has for its input tokens, before positions are added: to change them, or to
differentiate by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.inspection.answers import find_output
from regard.inspection.subject import Subject
from regard.models.embeddings import PatchEmbedding, TokenEmbedding, VectorEmbedding
from regard.models.model import EncoderDecoder, SingleStackModel


def embedding_of(subject: Subject) -> nn.Module | None:
    """The module whose output has a row for each input token, before positions are added."""
    model: Any = subject.model
    if hasattr(model, "main_input_name"):
        reader = model.get_encoder() if subject.is_seq2seq else model
        found: nn.Module | None = reader.get_input_embeddings()
        return found
    if isinstance(model, EncoderDecoder):
        embed = getattr(getattr(model, "encoder", None), "embed", None)
    else:
        embed = model.backbone.embed if isinstance(model, SingleStackModel) else None
    if isinstance(embed, TokenEmbedding):
        return embed.tokens
    if isinstance(embed, PatchEmbedding | VectorEmbedding):
        return embed.project
    return None


@contextmanager
def changed_rows(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, `change` maps the rows (b, n, d) of the first call of an embedding to others. Feature
    maps of a convolution (b, d, height, width) are rows of patches."""
    calls = 0

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        if calls > 1:  # an embedding that encoder and decoder share
            return None
        if output.dim() != 4:
            return change(output)
        rows = change(output.flatten(2).mT)
        return rows.mT.unflatten(2, output.shape[2:])

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def input_rows(subject: Subject) -> Tensor | None:
    """The rows (1, n, d) of the input tokens, or None for models whose embedding is not known."""
    embedding, found = embedding_of(subject), list[Tensor]()
    if embedding is None:
        return None

    def keep(rows: Tensor) -> Tensor:
        found.append(rows)
        return rows

    with changed_rows(embedding, keep):
        subject.call()
    return found[0] if found else None


def output_from_rows(subject: Subject, rows: Tensor) -> Tensor:
    """What a model returns, (b, n, k), if its input tokens had these rows (b, n, d)."""
    embedding = embedding_of(subject)
    assert embedding is not None
    with changed_rows(embedding, lambda _: rows):
        values, _ = find_output(subject.repeat(len(rows)).call())
    output: Tensor = values
    return output if output.dim() == 3 else output.flatten(1)[:, None]
