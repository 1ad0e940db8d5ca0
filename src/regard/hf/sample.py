"""What a user gives to measure or to train on: texts, tensors, or what the model takes by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.models.model import Model

BATCH = 8  # texts at a time
MOST = (
    1 << 22
)  # tokens of a sample: more are not measured in reasonable time, and nobody needs so many
WIDE = 64  # numbers that count as one token, where a sample is of floats


class ModelInputs(NamedTuple):
    """One call of the model: what goes in by place and by name, and which tokens are real, (b n) or None."""

    given: tuple[Any, ...]
    named: dict[str, Any]
    mask: Tensor | None

    def call(self, model: nn.Module) -> Any:
        """What the model makes of it."""
        return model(*self.given, **self.named)

    @property
    def tokens(self) -> Tensor:
        """The main tensor."""
        return next(t for t in (*self.given, *self.named.values()) if isinstance(t, Tensor))


def make_batches(
    model: nn.Module, given: Any, tokenizer: Any = None, *, length: int | None = None
) -> list[ModelInputs]:
    """Batches for the model; what is empty, no number, or too long is said."""
    found = list(_batches(model, given, tokenizer, length))
    if not found:
        raise ValueError("the sample is empty: give at least one text or tensor")
    limit, device = (
        length or max_length(model),
        next((p.device for p in model.parameters()), torch.device("cpu")),
    )
    total = 0
    for one in found:
        for tensor in (*one.given, *one.named.values()):
            if isinstance(tensor, Tensor):
                check_tensor(tensor, limit)
        total += one.tokens.numel() // (WIDE if one.tokens.is_floating_point() else 1)
    if total > MOST:
        raise ValueError(
            f"the sample has some {total:,} tokens, and {MOST:,} are the most: some hundred texts are enough"
        )
    return [moved(one, device) for one in found]


def _batches(
    model: nn.Module, given: Any, tokenizer: Any, length: int | None
) -> Iterator[ModelInputs]:
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Tensor | Mapping):
        given = [given]
    if not isinstance(given, Sequence):
        raise TypeError(
            f"a sample is texts, tensors, or dicts of what the model takes, not {type(given).__name__}"
        )
    texts = [one for one in given if isinstance(one, str)]
    if texts and len(texts) < len(given):
        raise TypeError("a sample is all texts or all tensors, and this one is mixed")
    if texts:
        yield from encoded(model, texts, tokenizer, length)
        return
    for one in given:
        if isinstance(one, Mapping):
            yield ModelInputs((), dict(one), real(one.get("attention_mask")))
        elif isinstance(one, Tensor):
            yield model_inputs(model, one, None)
        else:
            raise TypeError(
                f"a sample is texts, tensors, or dicts of what the model takes, not a list of {type(one).__name__}"
            )


def encoded(
    model: nn.Module, texts: Sequence[str], tokenizer: Any, length: int | None
) -> Iterator[ModelInputs]:
    """Texts as the tokenizer makes them, padded in batches, cut where the model ends."""
    if tokenizer is None:
        raise ValueError(
            "texts need a tokenizer: give tokenizer=AutoTokenizer.from_pretrained(...), or tensors"
        )
    if isinstance(model, Model):
        raise Unsupported("models of Regard take tensors: encode the texts first")
    real_texts = [text for text in texts if text.strip()]
    if not real_texts:
        raise ValueError("the sample is empty: every text is blank")
    longest = length or max_length(model)
    for first in range(0, len(real_texts), BATCH):
        rows = tokenizer(
            real_texts[first : first + BATCH], truncation=longest is not None, max_length=longest
        )["input_ids"]
        yield model_inputs(
            model, *padded([torch.tensor(row) for row in rows], tokenizer.pad_token_id or 0)
        )


def padded(rows: list[Tensor], fill: int) -> tuple[Tensor, Tensor | None]:
    """Tokens (n) each -> tokens (b n), filled up at the end, and their mask, None where nothing was filled up."""
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
    mask = nn.utils.rnn.pad_sequence(
        [torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True
    )
    return tokens, None if bool(mask.all()) else mask


def model_inputs(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> ModelInputs:
    """tokens (b n), or a tensor of another kind, and mask (b n), as the model takes them."""
    if hasattr(model, "main_input_name"):
        named: dict[str, Any] = {str(model.main_input_name): tokens}
        if mask is not None:
            named["attention_mask"] = mask.long()
        if getattr(model.config, "is_encoder_decoder", False):
            named["decoder_input_ids"] = (
                tokens  # what is compared needs no target: the decoder reads the same text
            )
        return ModelInputs((), named, mask)
    if isinstance(model, Model):
        return ModelInputs((tokens,), {} if mask is None else {"mask": mask}, mask)
    if isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return ModelInputs((tokens,), {} if mask is None else {"src_key_padding_mask": ~mask}, mask)
    if mask is not None and not bool(mask.all()):
        raise Unsupported(
            f"how {type(model).__name__} takes a mask is not known: give dicts of what it takes"
        )
    return ModelInputs((tokens,), {}, None)


def max_length(model: nn.Module) -> int | None:
    """The longest sequence that the model has positions for; RoBERTa's begin after the number of padding."""
    config = getattr(model, "config", None)
    most = getattr(config, "max_position_embeddings", None)
    if most is None:
        return getattr(config, "length", None)
    if any(getattr(m, "padding_idx", None) is not None for m in tables_of(model)):
        most -= (config.pad_token_id or 0) + 1  # type: ignore[union-attr]
    return int(most)


def tables_of(model: nn.Module) -> list[nn.Embedding]:
    """Learned positions."""
    return [
        m
        for path, m in model.named_modules()
        if isinstance(m, nn.Embedding) and path.rpartition(".")[2] in POSITIONS
    ]


POSITIONS = ("position_embeddings", "wpe")


def real(mask: Any) -> Tensor | None:
    """A mask of theirs, (b n)."""
    return None if mask is None or mask.dim() != 2 else mask.bool()


def check_tensor(tensor: Tensor, limit: int | None) -> None:
    """It must hold something, all of it numbers, and tokens must not be more than the model has positions for."""
    if not tensor.numel():
        raise ValueError(f"the sample has an empty tensor {tuple(tensor.shape)}")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise ValueError("the sample holds NaN or infinity")
    if (
        limit is not None
        and tensor.dim() == 2
        and not tensor.is_floating_point()
        and tensor.shape[1] > limit
    ):
        raise ValueError(
            f"the sample has {tensor.shape[1]:,} tokens in a row, and the model is for {limit:,} at most"
        )


def moved(one: ModelInputs, device: torch.device) -> ModelInputs:
    """The same on the device of the model."""

    def put(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    return ModelInputs(
        tuple(map(put, one.given)), {k: put(v) for k, v in one.named.items()}, put(one.mask)
    )
