"""Reads events from files and other sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from regard.watch.event import Event
from regard.watch.events.dead_letters import DeadLetters
from regard.watch.events.formats.format import Format
from regard.watch.events.parser import EventParser
from regard.watch.settings import WatchSettings
from regard.watch.sources import open_source
from regard.watch.sources.source import Source

BATCH = 1_000


def read_events(
    source: str | Path | Source,
    settings: WatchSettings,
    *,
    dead_letters: DeadLetters | None = None,
    on_format: Callable[[Format], None] | None = None,
) -> Iterator[Event]:
    """The events of a source, one by one, until it ends.

    Events are acknowledged when the iterator is asked for one that was read later.

    Args:
        source: An open source, or what `open_source` takes: the path of a file, which may be
            compressed, or of a folder, "-" for standard input, or the URL of a broker.
        settings: Format, fields and limits.
        dead_letters: Where to put what cannot be parsed; see `DeadLetters`.
        on_format: Called when `format="auto"` has found the format.
    """
    opened = source if isinstance(source, Source) else open_source(source, settings=settings)
    parser = EventParser(settings, dead_letters, on_format)
    try:
        while not opened.exhausted:
            records = opened.read(BATCH, timeout=1.0)
            yield from parser.parse(records)
            parser.dead_letters.flush()
            opened.acknowledge(record.id for record in records)
    finally:
        if opened is not source:
            opened.close()
