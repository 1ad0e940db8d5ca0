"""When a generated text ends, and how much of an unfinished one may be shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from regard.errors import check_int

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # what decoders make of a character whose bytes are not all there yet

Decode = Callable[[list[int]], str]


class StoppingCriteria:
    """Where to stop, apart from the largest number of tokens.

    tokens    any of these ends the text; it is the last of the tokens that are returned, and no part of the text
    strings   any of these ends the text, wherever it begins and ends within tokens: the text is cut before it, and the
              tokens are all up to the one that completed it
    decode    new tokens -> text.  More tokens must only lengthen the text, but for replacement characters at its end

    Only what is new is looked at: a stop in the prompt stops nothing.
    """

    def __init__(
        self,
        tokens: Iterable[int] = (),
        *,
        strings: Iterable[str] = (),
        decode: Decode | None = None,
    ) -> None:
        if isinstance(strings, str):
            raise TypeError(f"strings must be several, not one: give [{strings!r}]")
        self.tokens, self.strings, self.decode = frozenset(tokens), tuple(strings), decode
        for token in self.tokens:
            check_int(0, token=token)
        if not all(isinstance(one, str) and one for one in self.strings):
            raise ValueError(
                f"every stop string must be a text of at least one character, not {self.strings!r}"
            )
        if self.strings and decode is None:
            raise ValueError("stop strings need decode, which makes text of tokens")

    def why(self, new: list[int]) -> str | None:
        """Why a text with these tokens is at its end, "token" or "string"; None: it is not."""
        if new[-1] in self.tokens:
            return "token"
        if (
            self.strings
            and self.decode is not None
            and _first(self.decode(new), self.strings) is not None
        ):
            return "string"
        return None

    def text(self, new: list[int]) -> str | None:
        """The text of these tokens, cut before the stop; None where there is no decoder."""
        if self.decode is None:
            return None
        text = self.decode(new[:-1] if new[-1] in self.tokens else new)
        return text[: _first(text, self.strings)]

    def sure(self, new: list[int]) -> str:
        """What of the text can no longer change: no half characters, and nothing that a stop string may begin with."""
        text = (self.text(new) or "").rstrip(UNKNOWN)
        begun = (n for one in self.strings for n in range(1, len(one)) if text.endswith(one[:n]))
        return text[: len(text) - max(begun, default=0)]


def _first(text: str, strings: tuple[str, ...]) -> int | None:
    """Where the first of the strings begins; None: there is none."""
    return min((place for place in map(text.find, strings) if place >= 0), default=None)
