"""Vega, Vega-Lite and vega-embed as one piece of JavaScript, to be put into the page: it has to open without a network."""

from __future__ import annotations

import importlib
import importlib.util
import os
from importlib.metadata import version
from pathlib import Path

MISSING = "Plots need the extra `plot`: pip install 'regard[plot]', then `regard report` writes this page again with them."
NEEDED = ("altair", "vl_convert")


def available() -> bool:
    """Whether plots can be drawn here."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def javascript() -> str:
    """The bundle that vl-convert makes: it takes seconds, so it is kept in the cache of Regard."""
    path = _cache_file()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return _kept(path, _made())


def _made() -> str:
    altair, convert = (importlib.import_module(name) for name in NEEDED)
    wanted = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    return str(convert.javascript_bundle(vl_version=wanted)).replace("</script", r"<\/script")


def _cache_file() -> Path:
    root = os.environ.get("REGARD_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "regard")
    return Path(root) / f"vega-{version('altair')}-{version('vl-convert-python')}.js"


def _kept(path: Path, text: str) -> str:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)  # at once: another process never reads half of it
    except OSError:  # a read-only home is no reason to stop: it is made again next time
        pass
    return text
