"""Parse argument values written as text, on the command line or in a mixer name."""

from __future__ import annotations

import ast
from typing import Any

JSON_LITERALS = {"true": True, "false": False, "null": None}


def parse_literal(text: str) -> Any:
    """The value of a Python literal or a JSON constant; any other text stays a string."""
    if text.lower() in JSON_LITERALS:
        return JSON_LITERALS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
