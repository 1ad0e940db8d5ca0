"""Processors: raw inputs -> the inputs of a model, and outputs of the model -> predictions.

A processor is saved with a trained model, which then needs neither its task nor its data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_int
from regard.tasks.rendering import Rendered
from regard.tasks.tokenizers import EMPTY, Tokenizer, tokenizer_from_dict

if TYPE_CHECKING:
    from regard.models import Model

Prediction = dict[str, Any]  # JSON values by name


class Processor(ABC):
    """Base class of processors.

    Attributes:
        columns: Columns of a row that `encode` needs, if it takes rows; empty: it takes one value.
        suffixes: File types of the paths that `encode` takes (".png"); empty: it takes no paths.
            Without columns and suffixes, it takes texts.
    """

    columns: Sequence[str] = ()
    suffixes: Sequence[str] = ()

    @abstractmethod
    def encode(self, raw: Any) -> dict[str, Tensor]:
        """The inputs of one example, as in `Example.inputs`.

        Args:
            raw: A text, a path of an image or of a sound, or a row (column name -> value).
        """

    def encode_for_embedding(self, raw: Any) -> dict[str, Tensor]:
        """The inputs of one example for `TrainedRun.embed`. By default those of `encode`."""
        return self.encode(raw)

    def truncates(self, raw: Any, /) -> bool:
        """Whether `encode` leaves out the end of a raw input, which it takes."""
        return False

    @abstractmethod
    def decode(self, output: Any, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """The predictions of a batch from the output of the model."""

    def predict(self, model: Model, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """The predictions of a batch. By default those of the output of the model."""
        return self.decode(model(**inputs), inputs)

    def render(self, prediction: Prediction) -> Rendered | None:
        """How a person sees a prediction; None: as a line with its values."""
        return None

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """JSON for `Task.load_processor`."""


class TextProcessor(Processor):
    """Texts for a classifier or a language model.

    Args:
        tokenizer: Converts text to tokens.
        length: Maximum number of tokens; longer texts are truncated.
        labels: Names of the classes; empty for language models.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, labels: Sequence[str] = ()) -> None:
        check_int(1, length=length)
        self.tokenizer, self.length, self.labels = tokenizer, length, tuple(labels)

    def encode_text(self, text: str) -> np.ndarray:
        """The first tokens (n) of a text, at least one."""
        return self.truncate(text)[0]

    def truncate(self, text: str) -> tuple[np.ndarray, bool]:
        """The first tokens (n) of a text, at least one, and whether there are more."""
        tokens = self.tokenizer.encode(text)
        if not len(tokens):
            tokens = np.array([EMPTY], dtype=np.int64)
        return tokens[: self.length], len(tokens) > self.length

    def truncation_notes(self, truncated: int, count: int) -> list[str]:
        """A sentence for the user about texts that are truncated, if there are any."""
        if not truncated:
            return []
        return [
            f"{truncated:,} of {count:,} texts have more than {self.length:,} tokens "
            f"({self.tokenizer.name}) and are truncated."
        ]

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: the tokens of a text."""
        if not isinstance(raw, str):
            raise TypeError(f"Expected a text, not {type(raw).__name__}.")
        return {"x": torch.as_tensor(self.encode_text(raw).astype(np.int64))}

    def truncates(self, raw: Any, /) -> bool:
        """See `Processor`."""
        return self.truncate(raw)[1]

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the most probable label, its probability and those of all labels; for a
        language model the most probable next token."""
        if not self.labels:
            mask = inputs.get("mask")
            ends = torch.full(output.shape[:1], output.shape[1]) if mask is None else mask.sum(-1)
            chosen = output[torch.arange(len(output)), ends.to(output.device) - 1].argmax(-1)
            return [{"next": self.tokenizer.decode([token])} for token in chosen.tolist()]
        return predict_classes(output, self.labels)

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        tokenizer = self.tokenizer.to_dict()
        return {"tokenizer": tokenizer, "length": self.length, "labels": list(self.labels)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TextProcessor:
        """The processor that `to_dict` described."""
        try:
            tokenizer = tokenizer_from_dict(content["tokenizer"])
            return cls(tokenizer, content["length"], list(map(str, content["labels"])))
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved text processor: {error!r}") from None


def predict_classes(output: Tensor, labels: Sequence[str]) -> list[Prediction]:
    """The most probable label of logits (b, c), its probability and those of all labels."""
    predictions = []
    for row in output.detach().cpu().double().softmax(-1).tolist():
        best = max(range(len(row)), key=row.__getitem__)
        probabilities = dict(zip(labels, row, strict=True))
        predictions.append(
            {"label": labels[best], "probability": row[best], "probabilities": probabilities}
        )
    return predictions
