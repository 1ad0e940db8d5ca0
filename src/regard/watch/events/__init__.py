"""From bytes to events: formats, limits, leaves, fields and dead letters."""

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
