"""Printing of text that we did not write: labels, file names, columns, predictions.

Such text may look like rich's markup, or contain control characters that move the cursor, change
the title of the terminal or reverse the direction of writing. Every console of Regard is a
`PlainConsole`: it knows no markup, and shows control characters as escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# Control characters except tab and newline, line separators, marks that change the direction of
# writing, and halves of surrogate pairs, which cannot be encoded.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_controls(text: str) -> str:
    r"""The text with control characters as in Python's source: "\x1b", "\u202e"."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def escape_controls_in_json(text: str) -> str:
    r"""JSON of the same value with all control characters as "\u009b"."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class PlainConsole(Console):
    """A console that prints strings as they are, except for control characters.

    Styles are given by `rich.text.Text` and by the columns and rows of tables.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string, or a cell of a table, as `Text`."""
        return super().render_str(escape_controls(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """The pieces that are printed: all text comes through here."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(escape_controls(text), style)
