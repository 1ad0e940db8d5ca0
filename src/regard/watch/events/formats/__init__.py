"""The formats of events. Each is one file; the first that matches is the one of `--format auto`."""

from __future__ import annotations

from regard.watch.events.formats import (
    access_log,
    cloudtrail,
    ecs,
    envoy,
    har,
    json_lines,
    ocsf,
    otlp,
    zeek,
)
from regard.watch.events.formats.format import Format

MODULES = (cloudtrail, har, otlp, ocsf, zeek, ecs, envoy, access_log, json_lines)
FORMATS: dict[str, Format] = {module.FORMAT.name: module.FORMAT for module in MODULES}
