"""Inputs for measuring and training a model: texts, tensors, or dicts of model inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.models.model import Model
from regard.tasks.tokenizers import replace_surrogates

BATCH_SIZE = 8
BATCH_TOKENS = 2048  # with padding; logits over a large vocabulary take 200 kB a token
MAX_TOKENS = 1 << 22  # of a sample
FLOATS_PER_TOKEN = 64  # where a sample is of floats
POSITION_TABLES = ("position_embeddings", "wpe")


class ModelInputs(NamedTuple):
    """Arguments of one call of a model, and its padding mask (b, n) or None."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Tensor | None

    def call(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]

    @property
    def main_tensor(self) -> Tensor:
        """The first tensor."""
        return self.tensors[0]

    def to(self, device: torch.device) -> ModelInputs:
        """The inputs on a device."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return ModelInputs(
            tuple(map(move, self.args)),
            {name: move(v) for name, v in self.kwargs.items()},
            move(self.mask),
        )


def make_batches(model: nn.Module, sample: Any, tokenizer: Any = None) -> list[ModelInputs]:
    """Batches for the model from a sample of texts, tensors or dicts.

    Raises if it is empty, not finite or too long.
    """
    batches = list(_iterate_batches(model, sample, tokenizer))
    if not batches:
        raise ValueError("The sample is empty: give at least one text or tensor.")
    limit, device = (
        max_length(model),
        next((p.device for p in model.parameters()), torch.device("cpu")),
    )
    total = 0
    for batch in batches:
        for tensor in batch.tensors:
            if not tensor.numel():
                raise ValueError(f"The sample has an empty tensor {tuple(tensor.shape)}.")
            if tensor.is_floating_point():
                if not bool(torch.isfinite(tensor).all()):
                    raise ValueError("The sample contains NaN or infinity.")
            elif limit is not None and tensor.dim() == 2 and tensor.shape[1] > limit:
                raise ValueError(
                    f"The sample has sequences of {tensor.shape[1]:,} tokens; the model supports "
                    f"{limit:,}."
                )
        main = batch.main_tensor
        total += main.numel() // (FLOATS_PER_TOKEN if main.is_floating_point() else 1)
    if total > MAX_TOKENS:
        raise ValueError(
            f"The sample has about {total:,} tokens; the maximum is {MAX_TOKENS:,}. A few hundred "
            "texts suffice."
        )
    return [batch.to(device) for batch in batches]


def _iterate_batches(model: nn.Module, sample: Any, tokenizer: Any) -> Iterator[ModelInputs]:
    expected = "A sample is texts, tensors, or dicts of model inputs"
    if isinstance(sample, str | Tensor | Mapping):
        sample = [sample]
    if not isinstance(sample, Sequence):
        raise TypeError(f"{expected}, not {type(sample).__name__}.")
    texts = [item for item in sample if isinstance(item, str)]
    if texts and len(texts) < len(sample):
        raise TypeError(f"{expected}, not a mixture.")
    if texts:
        if isinstance(model, Model) and tokenizer is not None:
            raise Unsupported("Regard models take tensors: encode the texts first.")
        rows = encode_texts(texts, tokenizer, max_length(model))
        batch: list[Tensor] = []
        for row in rows:
            longest = max(map(len, [*batch, row]))
            if len(batch) == BATCH_SIZE or (batch and (len(batch) + 1) * longest > BATCH_TOKENS):
                yield build_inputs(model, *pad_rows(batch, tokenizer.pad_token_id or 0))
                batch = []
            batch.append(row)
        yield build_inputs(model, *pad_rows(batch, tokenizer.pad_token_id or 0))
        return
    for item in sample:
        if isinstance(item, Mapping):
            mask = item.get("attention_mask")
            yield ModelInputs(
                (), dict(item), None if mask is None or mask.dim() != 2 else mask.bool()
            )
        elif isinstance(item, Tensor):
            yield build_inputs(model, item, None)
        else:
            raise TypeError(f"{expected}, not a list of {type(item).__name__}.")


def encode_texts(
    texts: Sequence[str], tokenizer: Any, length: int | None, *, split: bool = False
) -> list[Tensor]:
    """Token ids (n) of texts, truncated to `length`, or with `split` cut into several rows."""
    if tokenizer is None:
        raise ValueError(
            "Texts need a tokenizer: give tokenizer=AutoTokenizer.from_pretrained(...), or tensors."
        )
    texts = [replace_surrogates(text) for text in texts if text.strip()]
    if not texts:
        raise ValueError("All texts are empty.")
    overflow = (
        {"return_overflowing_tokens": True}
        if split and tokenizer.is_fast and length is not None
        else {}
    )
    rows = tokenizer(texts, truncation=length is not None, max_length=length, **overflow)[
        "input_ids"
    ]
    return [torch.tensor(row) for row in rows]


def pad_rows(rows: list[Tensor], pad_token_id: int) -> tuple[Tensor, Tensor | None]:
    """Token ids (n) each -> padded tokens (b, n) and their mask, None if nothing was padded."""
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    ones = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    mask = nn.utils.rnn.pad_sequence(ones, batch_first=True)
    return tokens, None if bool(mask.all()) else mask


def build_inputs(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> ModelInputs:
    """Tokens (b, n), or another tensor, and a padding mask (b, n) as the arguments of a model."""
    if hasattr(model, "main_input_name"):
        kwargs: dict[str, Any] = {str(model.main_input_name): tokens}
        if mask is not None:
            kwargs["attention_mask"] = mask.long()
        if getattr(model.config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = tokens  # no target is needed to compare outputs
        return ModelInputs((), kwargs, mask)
    if isinstance(model, Model):
        return ModelInputs((tokens,), {} if mask is None else {"mask": mask}, mask)
    if isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return ModelInputs((tokens,), {} if mask is None else {"src_key_padding_mask": ~mask}, mask)
    if mask is not None and not bool(mask.all()):
        raise Unsupported(
            f"How {type(model).__name__} takes a padding mask is not known: give dicts of its "
            "inputs."
        )
    return ModelInputs((tokens,), {}, None)


def max_length(model: nn.Module) -> int | None:
    """The maximum sequence length of a model, or None if it has none.

    RoBERTa's positions start after the padding index.
    """
    config: Any = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return getattr(config, "length", None)
    if any(table.padding_idx is not None for table in position_tables(model)):
        positions -= (config.pad_token_id or 0) + 1
    return int(positions)


def position_tables(model: nn.Module) -> list[nn.Embedding]:
    """Learned position embeddings."""
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in POSITION_TABLES
    ]
