"""From bytes to events: formats, limits, leaves, fields and dead letters."""

from importlib.util import find_spec

if find_spec("orjson") is None:
    raise ImportError("Reading events needs the package orjson: pip install 'regard[watch]'")

from regard.watch.events.dead_letters import DeadLetters
from regard.watch.events.fields import FieldExpression
from regard.watch.events.formats import FORMATS
from regard.watch.events.parser import EventParser, UnknownFormat
from regard.watch.events.reader import read_events

__all__ = [
    "FORMATS",
    "DeadLetters",
    "EventParser",
    "FieldExpression",
    "UnknownFormat",
    "read_events",
]
