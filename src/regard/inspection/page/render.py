"""Write a view into the template: data, style, scripts and libraries, all in one file."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from pathlib import Path
from string import Template

import regard
from regard.console import escape_controls
from regard.inspection.data import FORMAT, ViewData
from regard.report.markup import escape_text, tag

# D3 7 from npm, https://d3js.org: each module adds its functions to one object, `d3`
LIBRARIES = (
    "array",
    "axis",
    "color",
    "dispatch",
    "drag",
    "ease",
    "format",
    "interpolate",
    "path",
    "scale",
    "selection",
    "shape",
    "time",
    "time-format",
    "timer",
    "transition",
    "zoom",
)
SCRIPTS = (  # parts of one function, in this order
    "elements",
    "tiles",
    "view",
    "state",
    "colours",
    "heat_map",
    "heads",
    "tokens",
    "picture",
    "tables",
    "charts",
    "compare",
    "server",
    "main",
)
MAX_TITLE = 200  # characters in the title of the window


def write_page(view: ViewData, path: Path) -> int:
    """Write the page and return its size in bytes."""
    content = render_page(view).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: delete it, or write to its target.")
    path.write_bytes(content)
    return len(content)


def render_page(view: ViewData) -> str:
    """Return the page of a view as HTML."""
    check_view(view)
    data = script_json(view)
    style = resource("style.css")
    modules = (resource(f"vendor/d3-{name}.min.js") for name in LIBRARIES)
    libraries = "\n".join((f"/*\n{resource('vendor/LICENSE')}*/", *modules))
    parts = "\n".join(resource(f"scripts/{name}.js") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{parts}}})();\n'
    size = sum(map(len, (data, style, libraries, script)))
    return Template(resource("page.html")).substitute(
        title=escape_text(escape_controls(view["title"][:MAX_TITLE])),
        policy=escape_text(content_security_policy(style, (libraries, script), view["server"])),
        style=style,
        data=data,
        libraries=libraries,
        script=script,
        version=escape_text(regard.__version__),
        megabytes=f"{size / 1e6:.1f}",
    )


def notebook_html(view: ViewData, *, height: int = 720) -> str:
    """Return the page in a frame, for the output of a notebook cell."""
    return tag(
        "iframe",
        srcdoc=render_page(view),
        sandbox="allow-scripts",
        width="100%",
        height=height,
        style="border: 0",
        title="Attention maps",
    )


def check_view(view: ViewData) -> None:
    """Raise ValueError if a view has another format, or would load a picture from elsewhere."""
    if view["format"] != FORMAT:
        raise ValueError(f"The view has format {view['format']}; this page reads {FORMAT}.")
    if not view["models"]:
        raise ValueError("The view has no model to show.")
    images = [sequence["image"] for sequence in view["sequences"] if "image" in sequence]
    for model in view["models"]:
        images += [figure["image"] for figure in model.get("figures", [])]
    for image in images:
        if not image.startswith("data:image/"):
            raise ValueError(f"Images must be data URIs (data:image/...), not {image[:40]!r}.")


def script_json(view: ViewData) -> str:
    """Return JSON that can stand in a script element: ASCII, without the characters of tags."""
    text = json.dumps(view, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def content_security_policy(style: str, scripts: tuple[str, ...], server: bool) -> str:
    """Return a policy under which these scripts run and no others, and nothing is loaded."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(digest, scripts))}",
            f"style-src {digest(style)}",
            "img-src data:",
            "connect-src 'self'" if server else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def resource(name: str) -> str:
    """Return the text of a file of the page."""
    return (files("regard.inspection.page") / name).read_text(encoding="utf-8")
