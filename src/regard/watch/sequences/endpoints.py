"""Endpoints as integers, and the last endpoints of an entity as one integer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.watch.event import Event

OTHER, START = 0, 1  # an endpoint that is not in the vocabulary; the start of a session
FIRST_ENDPOINT = 2
MOST_SYMBOLS = 4_096
PAUSE = 1_800.0  # seconds without an event after which an entity starts a new session
NO_CONTEXT = 0  # of an event without an entity: what precedes it is unrelated


class EndpointVocabulary:
    """Numbers the endpoints of each tenant. Its size has room for as many again.

    Attributes:
        size: Number of symbols; a power of two from 64 to `MOST_SYMBOLS`. Endpoints beyond it, the
            rarest at the time of `fit`, are `OTHER`.
    """

    def __init__(self) -> None:
        self.size = 64
        self.ids: dict[tuple[str, str], int] = {}
        self.names: list[tuple[str, str]] = []

    def fit(self, events: Iterable[Event]) -> None:
        """Number the endpoints of events, the most frequent first."""
        counts = Counter((event.tenant, event.endpoint) for event in events)
        while self.size < min(2 * len(counts) + FIRST_ENDPOINT, MOST_SYMBOLS):
            self.size *= 2
        for key, _ in counts.most_common():
            self.add(*key)

    def add(self, tenant: str, endpoint: str) -> int:
        """The number of an endpoint, which is new if there is room."""
        symbol = self.ids.get((tenant, endpoint), OTHER)
        if symbol == OTHER and FIRST_ENDPOINT + len(self.names) < self.size:
            symbol = self.ids[tenant, endpoint] = FIRST_ENDPOINT + len(self.names)
            self.names.append((tenant, endpoint))
        return symbol

    def name(self, symbol: int) -> str:
        """The endpoint of a number."""
        if symbol < FIRST_ENDPOINT:
            return "(start)" if symbol == START else "(other)"
        return self.names[symbol - FIRST_ENDPOINT][1]

    def tenant(self, symbol: int) -> str | None:
        """The tenant of a number; None if it is not that of an endpoint."""
        return self.names[symbol - FIRST_ENDPOINT][0] if symbol >= FIRST_ENDPOINT else None

    def longest_context(self, order: int) -> int:
        """`order`, or the longest context that fits in 62 bits with the symbol after it."""
        return min(order, 62 // (self.size.bit_length() - 1) - 1)

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "names": [list(name) for name in self.names]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> EndpointVocabulary:
        vocabulary = cls()
        vocabulary.size = content["size"]
        for tenant, endpoint in content["names"]:
            vocabulary.add(tenant, endpoint)
        return vocabulary


class Steps(NamedTuple):
    """Events as numbers.

    Attributes:
        symbols: (n) Endpoint of each event.
        contexts: (n) The last endpoints of its entity, as digits, the newest last. The start of a
            session is a digit too.
        gaps: (n) Seconds since the event before it; NaN for the first of an entity.
        counted: (n) Whether the context is known; False after a restart.
    """

    symbols: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int64]
    gaps: npt.NDArray[np.float64]
    counted: npt.NDArray[np.bool_]


class ContextMemory:
    """The last endpoints of entities, for learning. Scoring has them in the entity's state.

    Args:
        vocabulary: Numbers of endpoints; new ones are added.
        order: Endpoints remembered; at least one.
        most: Most entities remembered: the latest.
    """

    def __init__(self, vocabulary: EndpointVocabulary, order: int, *, most: int = 100_000) -> None:
        self.vocabulary, self.most = vocabulary, most
        self.modulus = vocabulary.size ** max(order, 1)
        self.started: float | None = None
        self._last: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()

    def encode(self, events: Iterable[Event], *, from_start: bool = False) -> Steps:
        """Steps of events in order of time.

        Args:
            events: Events.
            from_start: Whether an entity that was not seen before is new. Otherwise it is new if it
                could not have paused since this memory began.
        """
        symbols, contexts, gaps, counted = [], [], [], []
        for event in events:
            if self.started is None:
                self.started = event.time
            symbol = self.vocabulary.add(event.tenant, event.endpoint)
            context, gap, known = START, float("nan"), True
            if not event.entity:
                context = NO_CONTEXT
            else:
                key = (event.tenant, event.entity)
                last = self._last.pop(key, None)
                if last is None:
                    known = from_start or event.time > self.started + PAUSE
                else:
                    gap = event.time - last[1]
                    context = advance_pause(last[0], gap, self.vocabulary.size) % self.modulus
                after = (context * self.vocabulary.size + symbol) % self.modulus
                self._last[key] = after, event.time
                if len(self._last) > self.most:
                    self._last.popitem(last=False)
            symbols.append(symbol)
            contexts.append(context)
            gaps.append(gap)
            counted.append(known)
        return Steps(
            np.array(symbols, dtype=np.int64),
            np.array(contexts, dtype=np.int64),
            np.array(gaps, dtype=np.float64),
            np.array(counted, dtype=bool),
        )


def advance_pause(context: int, gap: float, size: int) -> int:
    """The context after a pause, which starts a new session."""
    return context * size + START if gap > PAUSE else context
