"""Real data sets, which stand beside the repository and are no part of it."""

import os
from pathlib import Path

import pytest

ROOT = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))


def real(*names):
    """The folder of the data sets; the test is skipped where one of them is absent."""
    missing = [name for name in names if not (ROOT / name).is_dir()]
    if missing:
        pytest.skip(
            f"there is no {ROOT / missing[0]}: set REGARD_DATA to the folder of the data sets"
        )
    return ROOT
