"""Vega, Vega-Lite and vega-embed as one script, written into the page so that it works offline."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version

from regard.disk_cache import read_or_create

MISSING = (
    "Plots need the extra `plot`: pip install 'regard[plot]', then write this page again with "
    "`regard report`."
)
NEEDED = ("altair", "vl_convert")


def plots_available() -> bool:
    """Whether the packages that plots need are installed."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def vega_javascript() -> str:
    """Return the script. Bundling takes seconds, so it is stored in Regard's cache."""

    def bundle() -> str:
        altair, convert = (importlib.import_module(name) for name in NEEDED)
        vega_lite = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
        script = str(convert.javascript_bundle(vl_version=vega_lite))
        return script.replace("</script", r"<\/script")

    return read_or_create(f"vega-{version('altair')}-{version('vl-convert-python')}.js", bundle)
