"""Alignments of words: how much each source word moved each target word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from regard.tasks.rendering import RenderedMatrix
from regard.tasks.tokenizers import Tokenizer


class WordSpan(NamedTuple):
    """A word, and its tokens start .. end - 1."""

    text: str
    start: int
    end: int


class WordAlignment(NamedTuple):
    """Words of the source (m) and of the target (n), and the share (n, m) of each source word in
    each target word."""

    source: list[str]
    target: list[str]
    weights: list[list[float]]

    def render(self) -> RenderedMatrix:
        """The picture: a row for each target word, a column for each source word."""
        return RenderedMatrix(self.target, self.source, np.array(self.weights), "attention")


def word_spans(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[WordSpan]:
    """The words that tokens spell: a word begins at white space, and at a token of punctuation."""
    starts: list[int] = []
    after_mark = False
    for place, token in enumerate(tokens):
        piece = tokenizer.decode([token])
        # a part of a character is decoded as U+FFFD, which is no mark
        is_mark = bool(piece.strip()) and not any(
            letter.isalnum() or letter == "\ufffd" for letter in piece
        )
        if not starts or piece[:1].isspace() or is_mark or after_mark:
            starts.append(place)
        after_mark = is_mark
    spans = [
        WordSpan(tokenizer.decode(tokens[start:end]).strip(), start, end)
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
    ]
    return [span for span in spans if span.text]


def merge_pieces(
    weights: np.ndarray, source: Sequence[WordSpan], target: Sequence[WordSpan]
) -> WordAlignment:
    """Weights (n, m) of tokens -> of words: the sum over the tokens of a source word, and the mean
    over those of a target word."""
    merged = [
        [
            float(weights[row.start : row.end, column.start : column.end].sum(1).mean())
            for column in source
        ]
        for row in target
    ]
    return WordAlignment([each.text for each in source], [each.text for each in target], merged)
