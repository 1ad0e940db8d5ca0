"""What a model answers: classes, next tokens, or a vector; and how far two answers are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.inspection.subject import Subject
from regard.models.model import Decoder

OUTPUTS = ("logits", "start_logits", "last_hidden_state")  # of models of transformers


@dataclass
class Answer:
    """The output of a model for a batch.

    Attributes:
        values: Logits (b, p, k) at p places, or one vector (b, 1, d).
        is_logits: Which of the two.
        places: The places whose prediction is shown and explained: the last token of a causal
            model, masked tokens of a masked language model, else all.
        name: Class or token number -> its text.
        kind: What is predicted: "class", "next token", "token" or "vector".
        real: Which places are tokens (p), not padding. None: all.
    """

    values: Tensor
    is_logits: bool
    places: list[int]
    name: Callable[[int], str]
    kind: str
    real: Tensor | None = None

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most likely classes or tokens at the first place, with their probabilities."""
        if not self.is_logits or self.values.shape[-1] < 2:
            return []
        shares = self.values[0, self.places[0]].float().softmax(-1)
        best = shares.topk(min(count, len(shares)))
        return [
            (self.name(i), float(p))
            for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def describe(self) -> str:
        """The prediction in words."""
        top = self.top(1)
        if top:
            return f"{self.kind} {top[0][0]!r} with {top[0][1]:.1%}"
        if self.is_logits:
            return f"{float(self.values[0, self.places[0], 0]):.4g}"
        return f"a vector of {self.values.shape[-1]:,} numbers"

    def changes(self, other: Answer) -> Tensor:
        """How far each example (b) of another answer is from the first of this one: the
        Kullback-Leibler divergence in bits, a mean over places; of vectors 1 - cosine; of single
        numbers the absolute difference."""
        first, others = self.values[:1].double(), other.values.double()
        if self.is_logits and first.shape[-1] == 1:
            return (others - first).abs().mean((1, 2))
        if not self.is_logits:
            return 1 - torch.cosine_similarity(first, others, -1).mean(1)
        p, q = first.log_softmax(-1), others.log_softmax(-1)
        bits = (p.exp() * (p - q)).sum(-1) / math.log(2)
        return (bits if self.real is None else bits[:, self.real]).mean(1)

    @property
    def unit(self) -> str:
        """The unit of `changes`."""
        if not self.is_logits:
            return "1 - cosine"
        return "bits" if self.values.shape[-1] > 1 else "difference"

    def score(self, other: Answer) -> Tensor:
        """How strongly each example (b) of another answer still predicts what this one does: the
        logits of its most likely classes, summed over its places; of vectors the share of this
        one's direction."""
        first = self.values[0].detach()
        if not self.is_logits:
            direction = first / first.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            return (other.values * direction).sum((1, 2))
        chosen = first[self.places].argmax(-1)
        return other.values[:, self.places, chosen].sum(1)


def read_answer(subject: Subject, output: Any) -> Answer:
    """The answer in what a model returned."""
    values, is_logits = find_output(output)
    if not isinstance(values, Tensor):
        raise ValueError(f"{type(subject.model).__name__} returns nothing that can be compared.")
    config: Any = getattr(subject.model, "config", None)
    head = getattr(config, "head", None)
    if not isinstance(output, dict) and not hasattr(output, "keys"):
        is_logits = head is not None and getattr(head, "kind", "") != "pooling"
    if values.dim() == 1:
        values = values[:, None]
    classes = list(subject.classes)

    def class_name(number: int) -> str:
        return classes[number] if number < len(classes) else str(number)

    if is_logits and values.dim() == 2:
        return Answer(values[:, None], True, [0], class_name, "class")
    if not is_logits or values.dim() != 3:
        pooled = values.flatten(1, -2).mean(1) if values.dim() > 2 else values
        return Answer(pooled[:, None], False, [0], str, "vector")
    n, size = values.shape[1:]
    is_vocabulary = size == _vocabulary(subject)
    name = (subject.decode or str) if is_vocabulary else class_name
    real = real_places(subject, n)
    causal = isinstance(subject.model, Decoder) or subject.is_seq2seq or _is_causal(subject)
    if causal:
        last = n - 1 if real is None else int(real.nonzero()[-1])
        kind = "next token" if is_vocabulary else "class"
        return Answer(values, True, [last], name, kind, real)
    places = masked_places(subject, n) or list(range(n) if real is None else real.nonzero()[:, 0])
    return Answer(values, True, [int(i) for i in places], name, "token", real)


def real_places(subject: Subject, n: int) -> Tensor | None:
    """Which of n outputs are of tokens, if some are of padding."""
    names = ("target_mask",) if subject.is_seq2seq else ("mask", "attention_mask")
    for name in names:
        mask = subject.arguments.get(name)
        if isinstance(mask, Tensor) and mask.shape[1:] == (n,) and not bool(mask[0].all()):
            return mask[0].bool()
    return None


def find_output(output: Any) -> tuple[Any, bool]:
    """The tensor of an output that is compared, and whether it is called logits."""
    if isinstance(output, Tensor):
        return output, False
    for name in OUTPUTS:
        value = output.get(name) if hasattr(output, "get") else None
        if value is not None:
            return value, "logits" in name
    if isinstance(output, Sequence) and output:
        return output[0], False
    return None, False


def _vocabulary(subject: Subject) -> int | None:
    config: Any = getattr(subject.model, "config", None)
    size = getattr(config, "vocab_size", None)
    if size is None:
        target = getattr(config, "target", None) or getattr(config, "input", None)
        size = getattr(target, "vocab_size", None)
    return size


def _is_causal(subject: Subject) -> bool:
    return "CausalLM" in type(subject.model).__name__ or "LMHead" in type(subject.model).__name__


def masked_places(subject: Subject, n: int) -> list[int]:
    """The places of [MASK] in the input."""
    texts = next(iter(subject.tokens.values()), [])
    return [i for i, text in enumerate(texts[:n]) if text in ("[MASK]", "<mask>")]
