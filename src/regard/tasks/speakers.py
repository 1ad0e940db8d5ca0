"""Tag every word of a text with its speaker, where the text is pieced together from speeches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from regard.errors import check_int
from regard.tasks.base import LABELS, SPLITS, Example
from regard.tasks.baselines import Baseline
from regard.tasks.example_source import GeneratedExamples, SourceTask
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered, RenderedParts, RenderedText
from regard.tasks.speeches import load_speeches
from regard.tasks.tokenizers import WordTokenizer

HELD_OUT = {"valid": 3, "test": 6}  # a speech of each speaker, by year; the others are for training
NAIVE_BAYES = "naive Bayes"
WINDOWS = (10, 15, 20, 25, 30, 40, 50)  # words on either side; the best on valid is used
SMOOTHING = 0.3  # added to the count of each word
VALID_EXAMPLES = 32  # by which the window is chosen


class Corpus(NamedTuple):
    """The tokens of each split by speaker."""

    tokenizer: WordTokenizer
    speakers: tuple[str, ...]
    tokens: dict[str, list[np.ndarray]]


@lru_cache(1)
def load_corpus() -> Corpus:
    """The speeches that come with the package as tokens; words of the training split are known."""
    texts: dict[str, dict[str, list[str]]] = {split: {} for split in SPLITS}
    seen: dict[str, int] = {}
    split_of = {number: split for split, number in HELD_OUT.items()}
    for speech in load_speeches():
        number = seen.get(speech.speaker, 0)
        seen[speech.speaker] = number + 1
        split = split_of.get(number, "train")
        texts[split].setdefault(speech.speaker, []).append(speech.text)
    tokenizer = WordTokenizer.train(text for own in texts["train"].values() for text in own)
    tokens = {
        split: [tokenizer.encode(" ".join(texts[split][speaker])) for speaker in seen]
        for split in SPLITS
    }
    return Corpus(tokenizer, tuple(seen), tokens)


class SpeakerTagging(SourceTask):
    """Predict for each word which of six presidents said it.

    A text is a sequence of passages from State of the Union addresses (`regard.tasks.speeches`);
    neighbours have different speakers. The passages of the validation and the test split are from
    speeches that training does not see. Words are lower-cased, punctuation marks are words.

    Args:
        length: Number of words of a text.
        shortest, longest: Number of words of a passage, drawn evenly.
        seed: Seed of the passages.
        examples: Size of the training split. None: endless.
    """

    output = "token"

    def __init__(
        self,
        length: int = 768,
        *,
        shortest: int = 32,
        longest: int = 160,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(1, length=length, shortest=shortest)
        check_int(shortest, longest=longest)
        self.corpus = load_corpus()
        self.shortest, self.longest = shortest, longest
        available = min(len(own) for split in SPLITS for own in self.corpus.tokens[split])
        if longest > available:
            raise ValueError(
                f"longest={longest} is more than the {available} words of the shortest speech."
            )
        draws = {split: _PassageDrawer(self.corpus.tokens[split], self) for split in SPLITS}
        super().__init__(
            GeneratedExamples(
                {split: drawer.draw for split, drawer in draws.items()},
                seed=seed,
                examples=examples,
            ),
            vocab_size=self.corpus.tokenizer.vocab_size,
            classes=len(self.corpus.speakers),
            length=length,
        )

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), NAIVE_BAYES: self._naive_bayes_score}

    def _naive_bayes_score(self, test: Sequence[int]) -> torch.Tensor:
        """Statistics of `Accuracy` of naive Bayes on the words around each word."""
        counts = np.stack(
            [np.bincount(own, minlength=self.vocab_size) for own in self.corpus.tokens["train"]]
        )
        log_p = np.log(counts + SMOOTHING)
        log_p -= np.log((counts + SMOOTHING).sum(1, keepdims=True))

        def score(split: str, indices: Sequence[int], window: int) -> torch.Tensor:
            """Correct words and all words of each example."""
            statistics = []
            for index in indices:
                example = self.example(split, index)
                words, target = example.inputs["x"].numpy(), example.targets[LABELS].numpy()
                sums = np.pad(log_p[:, words].cumsum(1), ((0, 0), (1, 0)))
                position = np.arange(len(words))
                first = np.maximum(0, position - window)
                last = np.minimum(len(words), position + window + 1)
                chosen = (sums[:, last] - sums[:, first]).argmax(0)
                statistics.append((float((chosen == target).sum()), float(len(target))))
            return torch.tensor(statistics, dtype=torch.float64)

        valid = self.sample("valid", VALID_EXAMPLES).tolist()
        best = max(WINDOWS, key=lambda window: float(score("valid", valid, window)[:, 0].sum()))
        return score("test", test, best)

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The text with the speaker of each passage, and of each predicted passage."""
        tokens = example.inputs["x"].tolist()
        truth = self._render_passages(tokens, example.targets[LABELS].tolist())
        if prediction is None:
            return truth
        predicted = self._render_passages(tokens, prediction["labels"])
        return RenderedParts((truth, RenderedText("predicted:"), predicted))

    def _render_passages(self, tokens: Sequence[int], labels: Sequence[int]) -> RenderedText:
        """A text with a span for each sequence of words with the same label."""
        text, spans, start = "", [], 0
        for end in range(1, len(tokens) + 1):
            if end < len(tokens) and labels[end] == labels[start]:
                continue
            passage = self.corpus.tokenizer.decode(tokens[start:end])
            at = len(text) + bool(text)
            text = f"{text} {passage}" if text else passage
            spans.append((at, len(text), self.corpus.speakers[labels[start]]))
            start = end
        return RenderedText(text, spans)


class _PassageDrawer:
    """Draws texts from the speeches of one split."""

    def __init__(self, speeches: list[np.ndarray], task: SpeakerTagging) -> None:
        self.speeches, self.task = speeches, task

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Generate tokens (n) and speakers (n)."""
        words, labels, missing, speaker = [], [], self.task.length, -1
        while missing:
            others = [k for k in range(len(self.speeches)) if k != speaker]
            speaker = others[int(rng.integers(len(others)))]
            speech = self.speeches[speaker]
            size = int(rng.integers(self.task.shortest, self.task.longest + 1))
            start = int(rng.integers(len(speech) - size + 1))
            passage = speech[start : start + min(size, missing)]
            words.append(passage)
            labels.append(np.full(len(passage), speaker))
            missing -= len(passage)
        return np.concatenate(words), np.concatenate(labels)
