"""From records to events: limits, format, fields, leaves, and dead letters for what is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time
from typing import Any

from regard.errors import did_you_mean
from regard.watch.event import Event, Signal
from regard.watch.events.dead_letters import DeadLetters
from regard.watch.events.duplicates import count_keys, find_duplicate_keys
from regard.watch.events.fields import FieldExpression
from regard.watch.events.formats import FORMATS
from regard.watch.events.formats.format import Content, Format
from regard.watch.events.json_text import BadText, SeveralTexts, parse_json
from regard.watch.events.leaves import Flattener, count_parsed_keys
from regard.watch.events.times import parse_time
from regard.watch.settings import WatchSettings
from regard.watch.sources.framing import DOCUMENT_START, Part
from regard.watch.sources.json_splitter import split_json
from regard.watch.sources.source import Record

SAMPLE = 100  # records that tell the format
MAX_DUPLICATES = 16  # signals of duplicate keys of one event


class UnknownFormat(ValueError):
    """Events of no known format, or a name that is none."""


class EventParser:
    """Makes events of records. What is no event becomes a dead letter; nothing is dropped.

    Args:
        settings: Format, fields and limits.
        dead_letters: Where to put what cannot be parsed.
        on_format: Called when `format="auto"` has found the format.
    """

    def __init__(
        self,
        settings: WatchSettings,
        dead_letters: DeadLetters | None = None,
        on_format: Callable[[Format], None] | None = None,
    ) -> None:
        self.settings = settings
        self.dead_letters = DeadLetters() if dead_letters is None else dead_letters
        self.on_format = on_format
        self.flattener = Flattener(
            settings.max_depth, settings.max_leaves, settings.max_string, settings.ignore
        )
        self.tenant = FieldExpression(settings.tenant) if settings.tenant else None
        self.format: Format | None = None
        if settings.format != "auto":
            self._set_format(find_format(settings.format))

    def parse(self, records: Sequence[Record]) -> list[Event]:
        """The events of records, in their order. The first call finds the format."""
        if self.format is None:
            samples = [each for each in records if each.data.strip() and not each.problem]
            if samples:
                self._set_format(self._detect(samples[:SAMPLE]))
        events: list[Event] = []
        for record in records:
            if record.problem:
                self.dead_letters.add(record.id, record.problem, record.data)
            elif self.format is None:
                continue  # a blank line
            elif self.read_line is None:
                self._parse_json(record.data, record.id, events)
            else:
                self._parse_line(record.data, record.id, events)
        return events

    def _set_format(self, chosen: Format) -> None:
        self.format = chosen
        self.read_line, self.unpack = chosen.read_line, chosen.unpack
        self.entity = FieldExpression(self.settings.entity or chosen.entity)
        self.endpoint = FieldExpression(self.settings.endpoint or chosen.endpoint)
        self.time = FieldExpression(self.settings.time or chosen.time)

    def _detect(self, records: Sequence[Record]) -> Format:
        """The first format that most of the records match."""
        samples = []
        for record in records:
            parts = [Part(record.data)]
            if DOCUMENT_START.match(record.data):
                parts = split_json(record.data, self.settings.max_bytes)[:SAMPLE]
            samples += [part.data for part in parts if part.data.strip()]
        chosen = detect_format(samples, records[0].id)
        if self.on_format is not None:
            self.on_format(chosen)
        return chosen

    def _parse_json(self, data: bytes, source: str, events: list[Event]) -> None:
        """Add the events of JSON: one object, or several in arrays or one after the other."""
        if DOCUMENT_START.match(data):
            self._parse_several(data, source, events)
        elif len(data) > self.settings.max_bytes:
            reason = f"longer than {self.settings.max_bytes:,} bytes"
            self.dead_letters.add(source, reason, data)
        elif data.strip():
            try:
                content, text, signals = parse_json(data)
            except SeveralTexts:
                self._parse_several(data, source, events)
            except BadText as error:
                self.dead_letters.add(source, str(error), data)
            else:
                self._add_json(content, text, signals, source, events)

    def _parse_several(self, data: bytes, source: str, events: list[Event]) -> None:
        """Add the events of JSON texts, each with its number in its source."""
        for index, part in enumerate(split_json(data, self.settings.max_bytes)):
            name, problem = f"{source}#{index}", part.problem
            if not problem:
                try:
                    content, text, signals = parse_json(part.data)
                except BadText as error:
                    problem = str(error)
                else:
                    self._add_json(content, text, signals, name, events)
            if problem:
                self.dead_letters.add(name, problem, part.data)

    def _add_json(
        self, content: Any, text: bytes, signals: list[Signal], source: str, events: list[Event]
    ) -> None:
        """Add the event of a JSON value, or the events that its format makes of it."""
        if not isinstance(content, dict):
            self.dead_letters.add(source, "not a JSON object", text)
            return
        has_json = b'"{' in text or b'"[' in text
        has_long = len(text) > self.settings.max_string
        if self.unpack is None:
            event, keys = self._event(content, has_json, has_long, source, signals)
            unpacked = [event]
        else:
            keys = count_parsed_keys(content)
            contents = self.unpack(content)
            names = [f"{source}#{index}" for index in range(len(contents))]
            unpacked = [
                self._event(one, has_json, has_long, name, signals)[0]
                for one, name in zip(contents, names if len(names) > 1 else [source], strict=True)
            ]
        if count_keys(text) != keys:
            duplicates = tuple(self._duplicate_keys(text))
            for event in unpacked:
                event.signals += duplicates
        events += unpacked

    def _parse_line(self, data: bytes, source: str, events: list[Event]) -> None:
        """Add the event of a line of text."""
        if len(data) > self.settings.max_bytes:
            reason = f"longer than {self.settings.max_bytes:,} bytes"
            self.dead_letters.add(source, reason, data)
            return
        signals: list[Signal] = []
        try:
            line = data.decode()
        except UnicodeDecodeError:
            line = data.decode(errors="replace")
            signals.append(Signal("invalid_utf8", ""))
        line = line.strip()
        assert self.format is not None
        assert self.read_line is not None
        content = self.read_line(line) if line else None
        if content is not None:
            has_long = len(data) > self.settings.max_string
            events.append(self._event(content, b'"{' in data, has_long, source, signals)[0])
        elif line:
            self.dead_letters.add(source, f"not a line of the format {self.format.name}", data)

    def _event(
        self, content: Content, has_json: bool, has_long: bool, source: str, signals: list[Signal]
    ) -> tuple[Event, int]:
        """The event of an object, and the number of keys in it; see `Flattener.flatten`."""
        leaves, keys = self.flattener.flatten(content, has_json, has_long)
        found = [*signals, *leaves.signals]
        seconds = parse_time(self.time(content))
        if seconds is None:
            seconds = time()
            found.append(Signal("time_missing", ""))
        event = Event(
            time=seconds,
            entity=self.entity.name(content),
            endpoint=self.endpoint.endpoint(content),
            paths=leaves.paths,
            values=leaves.values,
            source=source,
            tenant="" if self.tenant is None else self.tenant.name(content),
            signals=tuple(found),
        )
        return event, keys

    def _duplicate_keys(self, text: bytes) -> list[Signal]:
        """Signals for the keys that occur twice in a JSON text."""
        found = find_duplicate_keys(text)[:MAX_DUPLICATES]
        return [Signal("duplicate_key", self.flattener.path(keys)) for keys in found]


def find_format(name: str) -> Format:
    """The format of a name."""
    if name not in FORMATS:
        raise UnknownFormat(
            f"There is no format {name!r}; {did_you_mean(name, ['auto', *FORMATS])}"
        )
    return FORMATS[name]


def detect_format(samples: Sequence[bytes], source: str) -> Format:
    """The first format that more than half of the samples match; samples are lines or objects."""
    readings: list[tuple[Any, str]] = []
    for data in samples:
        line = data.decode(errors="replace").strip()
        try:
            readings.append((parse_json(data)[0], line))
        except BadText:
            readings.append((None, line))
    for known in FORMATS.values():
        matched = sum(
            known.matches(content if known.read_line is None else line)
            for content, line in readings
        )
        if matched > len(samples) / 2:
            return known
    shown = samples[0][:80].decode(errors="replace") if samples else ""
    raise UnknownFormat(
        f"Cannot tell the format of {source}, which starts with {shown!r}. "
        f"Choose one with --format: {', '.join(FORMATS)}."
    )
