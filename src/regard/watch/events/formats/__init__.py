"""The formats of events. Each is one file; the first that matches is the one of `--format auto`."""

from __future__ import annotations

from regard.watch.events.formats import cloudtrail, json_lines
from regard.watch.events.formats.format import Format

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT for module in (cloudtrail, json_lines)
}
