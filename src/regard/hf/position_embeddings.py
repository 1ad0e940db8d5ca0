"""More positions than a model was trained with: the learned ones, over and over (Beltagy et al. 2020, arXiv 2004.05150)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from regard.errors import Unsupported, check_int
from regard.hf.modules import Replacement
from regard.hf.sample import max_length, tables_of

COUNTED = ("position_ids", "token_type_ids")  # buffers as long as the table


def extend_positions(model: nn.Module, length: int) -> nn.Module:
    """Give the model learned positions for `length` tokens, copies of those that it has, one after the other.

    What was learned of near tokens holds within each copy; what happens at the seams is learned by going on, as with
    `recover(model, texts, objective="masked")`.  Extend first, then swap: a mixer that is built for a length has to know it.
    Returns the model.  Not undone by `restore`.
    """
    check_int(1, length=length)
    tables, most = tables_of(model), max_length(model)
    if not tables or most is None:
        raise Unsupported(
            f"{type(model).__name__} has no learned positions of a kind that is known"
        )
    if length <= most:
        raise ValueError(
            f"the model has positions for {most} tokens already, and {length} are no more"
        )
    if any(isinstance(m, Replacement) for m in model.modules()):
        raise ValueError("extend the positions first, then swap: a mixer may be built for a length")
    for module in list(model.modules()):
        for name, table in list(module.named_children()):
            if isinstance(table, nn.Embedding) and any(table is each for each in tables):
                first = skipped(table, most)
                setattr(module, name, longer(table, length, first))
                lengthen(module, table.num_embeddings, length + first)
    config: Any = model.config
    config.max_position_embeddings = length + skipped(
        tables[0], most
    )  # GPT-2's n_positions is another name of it
    return model


def skipped(table: nn.Embedding, most: int) -> int:
    """Rows before the first position: RoBERTa counts from behind the number of padding."""
    return table.num_embeddings - most


def longer(table: Any, length: int, first: int) -> nn.Embedding:
    """The same rows again and again, behind the `first`, which stay."""
    own = table.weight.detach()[first:]
    rows = torch.cat((table.weight.detach()[:first], own[torch.arange(length) % len(own)]))
    made = nn.Embedding(
        len(rows), rows.shape[1], padding_idx=table.padding_idx, device="meta"
    ).to_empty(device=rows.device)
    made.weight = nn.Parameter(rows, requires_grad=table.weight.requires_grad)
    return made


def lengthen(module: nn.Module, old: int, new: int) -> None:
    """Buffers that were as long as the table."""
    for name in COUNTED:
        buffer = getattr(module, name, None)
        if isinstance(buffer, torch.Tensor) and buffer.shape[-1] == old:
            more = (
                torch.arange(new)
                if name == "position_ids"
                else torch.zeros(new, dtype=buffer.dtype)
            )
            module.register_buffer(
                name,
                more.to(buffer).expand(1, -1),
                persistent=name not in module._non_persistent_buffers_set,
            )
