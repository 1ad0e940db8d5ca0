"""Masked language modeling: find the tokens that are hidden in a text (BERT)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.models.config import MaskedLMHeadConfig, TokenInput
from regard.models.losses import IGNORE_INDEX
from regard.models.masking import mask_tokens
from regard.tasks.base import LABELS, Batch, Example, ModelNeeds, example_rng, with_prediction
from regard.tasks.baselines import Baseline, NGramModel, spread_blocks
from regard.tasks.language_modeling import LanguageModeling
from regard.tasks.metrics import Accuracy, Bits
from regard.tasks.processors import Prediction, TextProcessor
from regard.tasks.rendering import Rendered, RenderedParts, RenderedText
from regard.tasks.tokenizers import tokenizer_from_dict

MASK = "[MASK]"
NEIGHBOURS = "neighbouring tokens"
GUESSES = 5  # of a prediction


class MaskedTextProcessor(TextProcessor):
    """Texts in which "[MASK]" stands for a hidden token."""

    @property
    def mask_token(self) -> int:
        """The token of "[MASK]", after those of the tokenizer."""
        return self.tokenizer.vocab_size

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: a text with at least one "[MASK]"."""
        if not isinstance(raw, str):
            raise TypeError(f"Expected a text, not {type(raw).__name__}.")
        if MASK not in raw:
            raise ValueError(f"The text has no {MASK}, so nothing is hidden: {raw!r:.60}")
        tokens = self._tokens(raw)
        if self.mask_token not in tokens[: self.length]:
            raise ValueError(f"The first {MASK} comes after {self.length} tokens.")
        return {"x": torch.tensor(tokens[: self.length])}

    def _tokens(self, text: str) -> list[int]:
        """All tokens of a text."""
        tokens: list[int] = []
        for number, part in enumerate(text.split(MASK)):
            tokens += [self.mask_token] if number else []
            tokens += self.tokenizer.encode(part).tolist()
        return tokens

    def truncates(self, raw: Any, /) -> bool:
        """See `Processor`."""
        return len(self._tokens(raw)) > self.length

    def encode_for_embedding(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: a text, with or without "[MASK]"."""
        has_mask = isinstance(raw, str) and MASK in raw
        return self.encode(raw) if has_mask else super().encode(raw)

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the text with the hidden tokens filled in, and for each of them the most
        probable tokens with their probabilities."""
        x, mask = inputs["x"], inputs.get("mask")
        assert x is not None
        excluded = [*self.tokenizer.special_tokens(), self.mask_token]
        logits = output.detach().double().cpu()
        logits[..., excluded] = -math.inf
        predictions = []
        for number, tokens in enumerate(x.tolist()):
            count = len(tokens) if mask is None else int(mask[number].sum())
            tokens, masks = tokens[:count], []
            for place in [i for i, token in enumerate(tokens) if token == self.mask_token]:
                p = logits[number, place].softmax(-1)
                best = p.topk(min(GUESSES, len(p) - len(excluded)))
                chosen = best.indices.tolist()
                tokens[place] = chosen[0]
                guesses: dict[str, float] = {}
                for token, probability in zip(chosen, best.values.tolist(), strict=True):
                    # parts of characters have the same text: the most probable counts
                    guesses.setdefault(self.tokenizer.decode([token]), probability)
                masks.append(guesses)
            predictions.append({"text": self.tokenizer.decode(tokens), "masks": masks})
        return predictions

    def render(self, prediction: Prediction) -> Rendered:
        """See `Processor`: the text, and a line with the guesses for each mask."""
        lines = [RenderedText(prediction["text"])]
        for number, guesses in enumerate(prediction["masks"], 1):
            shares = ", ".join(f"{text!r} {share:.3f}" for text, share in guesses.items())
            lines.append(RenderedText(f"  mask {number}: {shares}"))
        return RenderedParts(lines)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> MaskedTextProcessor:
        """The processor that `to_dict` described."""
        try:
            return cls(tokenizer_from_dict(content["tokenizer"]), content["length"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of masked texts: {error!r}") from None


class MaskedLanguageModeling(LanguageModeling):
    """Predict hidden tokens of a text from those on both sides (Devlin et al. 2019, arXiv
    1810.04805).

    Of the tokens 15 % are selected, at least one. Of these, 80 % become a mask, 10 % a random
    token, and 10 % stay. What is masked in an example follows from its number: the masks of valid
    and test are always the same. A training example is a new window with a mask of its own, so a
    text that is read again is masked anew (Liu et al. 2019, arXiv 1907.11692). The metric is bits
    per selected token.

    Args: as of the task `lm`.
    """

    causal = False

    processor: MaskedTextProcessor

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        tokenizer: str = "char",
        length: int = 256,
        vocab_size: int | None = None,
        text: str | None = None,
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        super().__init__(
            data,
            tokenizer=tokenizer,
            length=length,
            vocab_size=vocab_size,
            text=text,
            encoding=encoding,
            seed=seed,
        )
        self.vocab_size += 1  # the mask
        self.processor = MaskedTextProcessor(self.tokenizer, length)
        self.metrics = (Bits("masked_token"), Accuracy())
        self.best = None

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder with the masked-LM head; the mask is one more token."""
        tokens = TokenInput(vocab_size=self.vocab_size)
        return ModelNeeds(
            kind="encoder", input=tokens, head=MaskedLMHeadConfig(), length=self.length
        )

    def example(self, split: str, index: int) -> Example:
        """See `Task`."""
        tokens = super().example(split, index).inputs["x"]
        rng = example_rng(self.seed, split, index)
        inputs, labels = mask_tokens(
            tokens[None],
            self.vocab_size,
            mask_token_id=self.processor.mask_token,
            seed=int(rng.integers(1 << 62)),
        )
        inputs = torch.where(inputs == 0, tokens, inputs)  # padding is no random token
        if (labels == IGNORE_INDEX).all():
            place = int(rng.integers(len(tokens)))
            inputs[0, place], labels[0, place] = self.processor.mask_token, tokens[place]
        return Example({"x": inputs[0]}, {LABELS: labels[0]})

    def training_batch(self, batch: Batch) -> Batch:
        """See `Task`: the head is computed at the selected tokens only."""
        labels = batch.targets[LABELS]
        selected = labels != IGNORE_INDEX
        inputs = {**batch.inputs, "output_mask": selected}
        return Batch(inputs, {**batch.targets, LABELS: labels[selected][None]})

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: the frequencies of tokens, also after and before the neighbouring ones."""
        constant = {n: each for n, each in super().baselines().items() if n == "constant"}
        return {**constant, NEIGHBOURS: self._neighbour_score}

    def _neighbour_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of `Bits` of the tokens between two tokens, interpolated like n-grams."""
        stream = (spread_blocks(self.streams["train"]).astype(int) + self.offset).tolist()
        model = NGramModel([], self.vocab_size, order=2)
        for left, token, right in zip(stream, stream[1:], stream[2:], strict=False):
            model.add((right, left), token)
        statistics = []
        for index in test:
            example = self.example("test", index)
            tokens, labels = example.inputs["x"].tolist(), example.targets[LABELS].tolist()
            bits, count = 0.0, 0
            for i, label in enumerate(labels):
                if label != IGNORE_INDEX:
                    context = [*tokens[i + 1 : i + 2], *tokens[max(0, i - 1) : i]]
                    bits -= math.log2(model.probability(context, label))
                    count += 1
            statistics.append((bits, float(count)))
        return torch.tensor(statistics, dtype=torch.float64)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> MaskedTextProcessor:
        """See `Task`."""
        return MaskedTextProcessor.from_dict(content)

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The masked text, and the hidden tokens in order."""
        tokens, labels = example.inputs["x"].tolist(), example.targets[LABELS].tolist()
        pieces, part, hidden = [], list[int](), []
        for token, label in zip(tokens, labels, strict=True):
            if token == self.processor.mask_token:
                pieces += [self.tokenizer.decode(part), MASK]
                part = []
            else:
                part.append(token)
            if label != IGNORE_INDEX:
                hidden.append(self.tokenizer.decode([label]))
        text = "".join([*pieces, self.tokenizer.decode(part)])
        shown = None if prediction is None else {"text": prediction["text"]}
        return with_prediction(f"{text} → {', '.join(map(repr, hidden))}", shown)
