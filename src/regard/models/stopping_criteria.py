"""Stopping criteria of generated text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from regard.errors import check_int

# Decoders return this for a character whose bytes are incomplete.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[list[int]], str]


class StoppingCriteria:
    """When to stop, besides the maximum number of tokens. Only new tokens count, not the prompt.

    Args:
        tokens: Stop tokens. The stop token is the last token of the output, and not part of the
            text.
        strings: Stop strings. They may start and end anywhere within tokens: the text is cut before
            the string, and the tokens include the one that completed it.
        decode: New tokens -> text. More tokens must only extend the text, except for replacement
            characters at its end.
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        *,
        strings: Iterable[str] = (),
        decode: Decode | None = None,
    ) -> None:
        if isinstance(strings, str):
            raise TypeError(f"strings must be a list of strings: give [{strings!r}]")
        self.tokens, self.strings, self.decode = frozenset(tokens), tuple(strings), decode
        for token in self.tokens:
            check_int(0, token=token)
        if not all(isinstance(string, str) and string for string in self.strings):
            raise ValueError(f"stop strings must be non-empty strings, not {self.strings!r}")
        if self.strings and decode is None:
            raise ValueError("stop strings need decode, which maps tokens to text")

    def finish_reason(self, new: list[int]) -> str | None:
        """Why the sequence ends here: "stop_token" or "stop_string"; None: it does not."""
        if new[-1] in self.tokens:
            return "stop_token"
        if self.strings and self.decode is not None and self._find(self.decode(new)) is not None:
            return "stop_string"
        return None

    def text(self, new: list[int]) -> str | None:
        """Text of these tokens, cut before the stop; None without `decode`."""
        if self.decode is None:
            return None
        text = self.decode(new[:-1] if new[-1] in self.tokens else new)
        return text[: self._find(text)]

    def final_text(self, new: list[int]) -> str:
        """Prefix of the text that can no longer change: without an incomplete character or the
        start of a stop string."""
        text = (self.text(new) or "").rstrip(REPLACEMENT)
        partial = (
            n for string in self.strings for n in range(1, len(string)) if text.endswith(string[:n])
        )
        return text[: len(text) - max(partial, default=0)]

    def _find(self, text: str) -> int | None:
        """Start of the first stop string; None if there is none."""
        starts = (start for start in map(text.find, self.strings) if start >= 0)
        return min(starts, default=None)
