"""NATS JetStream: a durable consumer keeps what is not acknowledged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from regard.watch.sources.broker_url import (
    BackOff,
    parse_broker_url,
    parse_seconds,
    starts_at_beginning,
    without_password,
)
from regard.watch.sources.source import Record, Source, SourceError

EXAMPLE = "nats://host:4222/requests?durable=regard"
BATCH = 1_000  # messages of one request
CALL_SECONDS = 10.0  # longest wait for an answer of the server
MAX_ACK_PENDING = 100_000  # messages that may be unacknowledged


class NatsSource(Source):
    """Messages of a JetStream stream, read through a durable pull consumer.

    Several processes with the same `durable` share the messages. What a process has not
    acknowledged after `ack_wait` seconds is delivered again, to any of them. If the server is away,
    `read` returns nothing and the client connects again.

    The client's event loop runs in a thread of its own, so that pings are answered while events are
    scored.

    Args:
        url: `nats://user:password@host:4222/subject`. Options:
            `stream`: name of the stream; by default the one that stores the subject.
            `durable`: name of the consumer, which is made if it is not there; "regard".
            `start`: where a new consumer starts: "beginning" or "new".
            `ack_wait`: seconds until unacknowledged messages are delivered again; 60.
        replay: Read again what was stored in the last so many seconds.
    """

    def __init__(self, url: str, *, replay: float | None = None) -> None:
        try:
            import nats
        except ImportError:
            raise SourceError(
                "Reading from NATS requires the package nats-py: pip install 'regard[watch]'"
            ) from None
        self.nats = nats
        defaults = {"stream": "", "durable": "regard", "start": "beginning", "ack_wait": "60"}
        parsed = parse_broker_url(url, defaults, EXAMPLE)
        if len(parsed.path) > 1:
            raise SourceError(f"{without_password(url)} names several subjects; write {EXAMPLE}")
        (self.subject,) = parsed.path
        self.options = parsed.options
        self.ack_wait = parse_seconds(parsed.options, "ack_wait")
        self.from_beginning = starts_at_beginning(parsed.options)
        self.name = f"nats:{self.subject}"
        self.shown = without_password(url)
        self.back_off = BackOff()
        self.messages: dict[str, Any] = {}  # that were not acknowledged
        self.subscription: Any = None
        self.replayed: Any = None
        self.replay_end = 0

        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="nats")
        self.thread.start()
        try:
            self.client = self._call(
                nats.connect(
                    parsed.server,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0.5,
                    connect_timeout=5,
                    error_cb=ignore_error,  # `read` meets them too
                )
            )
            self.client.options["max_reconnect_attempts"] = -1  # now that the server was there
            self.stream = self.client.jetstream()
            self._call(self._subscribe(replay))
        except (nats.errors.Error, OSError, TimeoutError) as error:
            self.close()
            raise SourceError(f"Cannot read {self.shown}: {describe(error)}") from None
        except SourceError:
            self.close()
            raise

    def read(self, max_events: int, timeout: float) -> list[Record]:
        """The next records: replayed, delivered again, or new."""
        deadline = monotonic() + timeout
        while True:
            wait = max(0.05, min(deadline - monotonic(), CALL_SECONDS / 2))
            try:
                if self.subscription is None:
                    self._call(self._subscribe(None))
                messages = self._call(self._fetch(min(max_events, BATCH), wait))
                self.back_off.reset()
            except TimeoutError:
                messages = []
            except (self.nats.errors.Error, OSError) as error:
                messages = []
                if isinstance(error, self.nats.js.errors.NotFoundError):
                    self.subscription = None  # the server has lost its consumers
                self.back_off.wait(deadline)
            records = [record for message in messages if (record := self._record(message))]
            if records or monotonic() >= deadline:
                return records

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Acknowledge messages. What does not arrive is delivered again."""
        messages = [self.messages.pop(name) for name in ids if name in self.messages]
        if not messages:
            return
        try:
            self._call(self._acknowledge(messages))
        except (self.nats.errors.Error, OSError, TimeoutError):
            return

    def close(self) -> None:
        """Close the connection."""
        client = getattr(self, "client", None)
        try:
            if client is not None:
                self._call(client.close())
        except (self.nats.errors.Error, OSError, TimeoutError):
            pass
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CALL_SECONDS)
        self.loop.close()

    def lag(self) -> int | None:
        """Messages that were stored and not delivered."""
        try:
            return int(self._call(self.subscription.consumer_info()).num_pending)
        except (self.nats.errors.Error, OSError, TimeoutError, AttributeError):
            return None

    @property
    def problem(self) -> str:
        """That the server does not answer."""
        return "" if self.client.is_connected else f"{self.name} does not answer."

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine in the event loop of the client."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(CALL_SECONDS)
        except TimeoutError:
            future.cancel()
            raise

    async def _subscribe(self, replay: float | None) -> None:
        """Make or find the consumer, and a consumer of older messages to replay."""
        api = self.nats.js.api
        stream = self.options["stream"]
        if not stream:
            stream = await self.stream.find_stream_name_by_subject(self.subject)
        policies = api.DeliverPolicy
        config = api.ConsumerConfig(
            deliver_policy=policies.ALL if self.from_beginning else policies.NEW,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait,
            max_ack_pending=MAX_ACK_PENDING,
        )
        self.subscription = await self.stream.pull_subscribe(
            self.subject, durable=self.options["durable"], stream=stream, config=config
        )
        info = await self.subscription.consumer_info()
        subjects = info.config.filter_subjects or [info.config.filter_subject]
        if subjects != [self.subject]:
            raise SourceError(
                f"The consumer {self.options['durable']!r} of {stream} reads "
                f"{', '.join(map(repr, subjects))}, not {self.subject!r}: choose another durable"
            )
        if replay is None:
            return
        self.replay_end = info.delivered.stream_seq
        start = datetime.now(UTC) - timedelta(seconds=replay)
        self.replayed = await self.stream.pull_subscribe(
            self.subject,
            stream=stream,
            config=api.ConsumerConfig(
                deliver_policy=api.DeliverPolicy.BY_START_TIME,
                opt_start_time=start.isoformat().replace("+00:00", "Z"),
                ack_policy=api.AckPolicy.NONE,
            ),
        )

    async def _fetch(self, limit: int, timeout: float) -> list[Any]:
        """The next messages; first those to replay, which the consumer was given before."""
        if self.replayed is not None:
            try:
                messages = await self.replayed.fetch(limit, timeout=min(timeout, 1.0))
            except TimeoutError:
                messages = []
            old = [m for m in messages if m.metadata.sequence.stream <= self.replay_end]
            if len(old) < len(messages) or not messages:
                await self.replayed.unsubscribe()
                self.replayed = None
            if old:
                return old
        return list(await self.subscription.fetch(limit, timeout=timeout))

    async def _acknowledge(self, messages: list[Any]) -> None:
        for message in messages:
            await message.ack()
        await self.client.flush()

    def _record(self, message: Any) -> Record | None:
        """The record of a message; None if it was delivered again before it was acknowledged."""
        meta = message.metadata
        name = f"nats:{meta.stream}:{meta.sequence.stream}"
        if meta.consumer == self.options["durable"]:
            known = name in self.messages
            self.messages[name] = message
            if known:
                return None
        return Record(message.data, name)


async def ignore_error(error: Exception) -> None:
    """Called by the client for errors of its connection."""


def describe(error: BaseException) -> str:
    """An error in words: some of the client's have none."""
    return str(error) or type(error).__name__
