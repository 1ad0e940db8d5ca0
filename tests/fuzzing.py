"""How much the fuzz tests draw: a small seeded sample by default, more in the slow tier.

`make fuzz` sets REGARD_FUZZ=1 and runs the files named `test_fuzz_*.py`, `test_combinations.py`
and `test_compile.py`.
"""

import os

SLOW = os.environ.get("REGARD_FUZZ") == "1"


def examples(default: int, slow: int) -> int:
    """Return how many examples a fuzz test draws: `slow` if REGARD_FUZZ=1 is set."""
    return slow if SLOW else default
