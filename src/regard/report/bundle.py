"""Vega, Vega-Lite and vega-embed as one piece of JavaScript, to be put into the page: it has to open without a network."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version

from regard.disk_cache import read_or_create

MISSING = "Plots need the extra `plot_text`: pip install 'regard[plot]', then `regard report` writes this page again with them."
NEEDED = ("altair", "vl_convert")


def plots_available() -> bool:
    """Whether plots can be drawn here."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def vega_javascript() -> str:
    """The bundle that vl-convert makes: it takes seconds, so it is kept in the cache of Regard."""
    return read_or_create(f"vega-{version('altair')}-{version('vl-convert-python')}.js", _made)


def _made() -> str:
    altair, convert = (importlib.import_module(name) for name in NEEDED)
    wanted = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    return str(convert.javascript_bundle(vl_version=wanted)).replace("</script", r"<\/script")
