"""Longer inputs: repeat learned position embeddings (Beltagy et al. 2020, arXiv 2004.05150)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from regard.errors import Unsupported, check_int
from regard.hf.model_inputs import max_length, position_tables
from regard.hf.modules import Replacement

POSITION_BUFFERS = ("position_ids", "token_type_ids")  # as long as the table


def extend_positions(model: nn.Module, length: int) -> nn.Module:
    """Extend the learned position embeddings of a model to `length` by repeating them, in place.

    Nearby tokens keep their relative position embeddings except where one copy ends and the next
    begins, which further training corrects, e.g. ``recover(model, texts, objective="masked")``.
    Extend before you swap, since some mixers are built for a length. `restore` does not undo it.
    Returns the model.
    """
    check_int(1, length=length)
    tables, current = position_tables(model), max_length(model)
    if not tables or current is None:
        raise Unsupported(
            f"{type(model).__name__} has no learned position embeddings of a known kind."
        )
    if length <= current:
        raise ValueError(f"The model already has {current} positions, length={length} is not more.")
    if any(isinstance(module, Replacement) for module in model.modules()):
        raise ValueError("Extend positions before swapping: some mixers are built for a length.")
    config: Any = model.config
    config.max_position_embeddings = length + tables[0].num_embeddings - current
    for module in list(model.modules()):
        for name, table in list(module.named_children()):
            if isinstance(table, nn.Embedding) and any(table is known for known in tables):
                first = table.num_embeddings - current  # RoBERTa has rows before its first position
                setattr(module, name, repeat_rows(table, length, first))
                lengthen_buffers(module, table.num_embeddings, length + first)
    return model


def repeat_rows(table: nn.Embedding, length: int, first: int) -> nn.Embedding:
    """An embedding with `length` rows: those from `first` on, repeated. The rows before stay."""
    weight = table.weight.detach()
    rows = torch.cat((weight[:first], weight[first:][torch.arange(length) % (len(weight) - first)]))
    longer = nn.Embedding(
        len(rows), rows.shape[1], padding_idx=table.padding_idx, device="meta"
    ).to_empty(device=rows.device)
    longer.weight = nn.Parameter(rows, requires_grad=table.weight.requires_grad)
    return longer


def lengthen_buffers(module: nn.Module, old: int, new: int) -> None:
    """Lengthen buffers that were as long as the table."""
    for name in POSITION_BUFFERS:
        buffer = getattr(module, name, None)
        if isinstance(buffer, torch.Tensor) and buffer.shape[-1] == old:
            values = (
                torch.arange(new)
                if name == "position_ids"
                else torch.zeros(new, dtype=buffer.dtype)
            )
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, values.to(buffer).expand(1, -1), persistent=persistent)
