"""Texts as tensors of numbers, to travel with the examples and inputs that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def codes_of_texts(texts: Sequence[str]) -> Tensor:
    """Texts as numbers (m): the code points plus 1, with a 0 after each text."""
    codes = [code for text in texts for code in (*(ord(c) + 1 for c in text), 0)]
    return torch.tensor(codes, dtype=torch.int64)


def texts_of_codes(codes: Tensor) -> list[str]:
    """The texts of `codes_of_texts`; negative numbers are padding."""
    texts: list[list[str]] = [[]]
    for code in codes.tolist():
        if code == 0:
            texts.append([])
        elif code > 0:
            texts[-1].append(chr(code - 1))
    return ["".join(text) for text in texts[:-1]]
