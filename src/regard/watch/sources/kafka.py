"""Kafka: a consumer group shares the partitions of a topic."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic, time
from typing import Any

from regard.watch.sources.broker_url import parse_broker_url, starts_at_beginning, without_password
from regard.watch.sources.pending import PendingRecords
from regard.watch.sources.source import Record, Source, SourceError

EXAMPLE = "kafka://host:9092/requests?group=regard"
CONNECT_SECONDS = 10.0
PROBE_SECONDS = 0.5


class KafkaSource(Source):
    """Messages of a Kafka topic, read in a consumer group.

    The offset of a partition is committed up to the first message that is not acknowledged. After a
    rebalance, what was not committed goes to the consumer that got the partition. librdkafka
    connects again by itself.

    Args:
        url: `kafka://host:9092,host2:9092/topic`. Options:
            `group`: consumer group; "regard".
            `start`: where a group without offsets starts: "beginning" or "new".
            Options with a dot are settings of librdkafka, such as `security.protocol=SSL` or
            `sasl.username=anna`.
        replay: Read again what came in the last so many seconds.
    """

    def __init__(self, url: str, *, replay: float | None = None) -> None:
        try:
            import confluent_kafka
        except ImportError:
            raise SourceError(
                "Reading from Kafka requires the package confluent-kafka: "
                "pip install 'regard[watch]'"
            ) from None
        self.kafka = confluent_kafka
        codes = confluent_kafka.KafkaError
        self.lasting_errors = (
            *(codes.TOPIC_AUTHORIZATION_FAILED, codes.GROUP_AUTHORIZATION_FAILED),
            *(codes.UNKNOWN_TOPIC_OR_PART, codes._AUTHENTICATION),
        )
        parsed = parse_broker_url(url, {"group": "regard", "start": "beginning"}, EXAMPLE)
        if len(parsed.path) > 1:
            raise SourceError(f"{without_password(url)} names several topics; write {EXAMPLE}")
        from_beginning = starts_at_beginning(parsed.options)
        (self.topic,) = parsed.path
        self.name = f"kafka:{self.topic}"
        self.pending: PendingRecords[int, int] = PendingRecords()
        self.replay_from = None if replay is None else int((time() - replay) * 1_000)
        self.committed: dict[int, int] = {}  # offset by partition
        self.down = False
        settings = {
            "bootstrap.servers": parsed.host,
            "group.id": parsed.options["group"],
            "auto.offset.reset": "earliest" if from_beginning else "latest",
            "enable.auto.commit": False,
            "log_level": 0,
            "error_cb": self._note_error,
            **parsed.extra,
        }
        try:
            self.consumer = confluent_kafka.Consumer(settings)
            error = self.consumer.list_topics(self.topic, CONNECT_SECONDS).topics[self.topic].error
        except confluent_kafka.KafkaException as failure:
            error = failure.args[0]
        if error is not None:
            raise SourceError(f"Cannot read {without_password(url)}: {error.str()}")
        self.consumer.subscribe([self.topic], on_assign=self._assign, on_revoke=self._revoke)

    def read(self, max_events: int, timeout: float) -> list[Record]:
        """The next records of the partitions that this consumer has."""
        deadline = monotonic() + timeout
        records: list[Record] = []
        while not records:
            wait = max(0.0, deadline - monotonic())
            for message in self.consumer.consume(max_events, wait):
                error = message.error()
                if error is None:
                    records.append(self._record(message))
                elif error.fatal() or error.code() in self.lasting_errors:
                    raise SourceError(f"Cannot read {self.name}: {error.str()}")
            if wait == 0:
                break
        return records

    def acknowledge(self, ids: Iterable[str]) -> None:
        """Commit the offsets up to which all messages are acknowledged."""
        moved = [
            self.kafka.TopicPartition(self.topic, partition, offset)
            for partition, offset in self.pending.acknowledge(ids).items()
            if offset > self.committed.get(partition, 0)
        ]
        if not moved:
            return
        try:
            self.consumer.commit(offsets=moved, asynchronous=False)
        except self.kafka.KafkaException:
            return  # a later commit includes it; else the messages are delivered again
        for partition in moved:
            self.committed[partition.partition] = partition.offset

    def close(self) -> None:
        """Leave the group."""
        self.consumer.close()

    def lag(self) -> int | None:
        """Messages of the assigned partitions that were not read, as far as the client knows."""
        lag = 0
        try:
            for partition in self.consumer.position(self.consumer.assignment()):
                _, end = self.consumer.get_watermark_offsets(partition, cached=True)
                read = partition.offset
                if read < 0:  # nothing was read yet
                    read = self.committed.get(partition.partition, 0)
                lag += max(0, end - read)
        except self.kafka.KafkaException:
            return None
        return lag

    @property
    def problem(self) -> str:
        """That no broker answers."""
        if self.down:
            try:
                self.consumer.list_topics(self.topic, PROBE_SECONDS)
                self.down = False
            except self.kafka.KafkaException:
                return f"{self.name} does not answer."
        return ""

    def _note_error(self, error: Any) -> None:
        """Called by the client for errors that are of no message."""
        self.down = self.down or error.code() == self.kafka.KafkaError._ALL_BROKERS_DOWN

    def _assign(self, consumer: Any, partitions: list[Any]) -> None:
        """Take over partitions; where asked for, from an earlier time."""
        try:
            for partition in consumer.committed(partitions, CONNECT_SECONDS):
                self.committed[partition.partition] = max(0, partition.offset)
            if self.replay_from is not None:
                times = [
                    self.kafka.TopicPartition(self.topic, partition.partition, self.replay_from)
                    for partition in partitions
                ]
                starts = {
                    found.partition: found.offset
                    for found in consumer.offsets_for_times(times, CONNECT_SECONDS)
                }
                for partition in partitions:
                    start, committed = starts[partition.partition], self.committed
                    if 0 <= start < committed.get(partition.partition, 0):
                        partition.offset = start
        except self.kafka.KafkaException:
            return  # the group's offsets, which librdkafka reads itself
        consumer.assign(partitions)

    def _revoke(self, consumer: Any, partitions: list[Any]) -> None:
        """Give partitions up: who gets them reads what is not committed."""
        for partition in partitions:
            self.pending.drop(partition.partition)
            self.committed.pop(partition.partition, None)

    def _record(self, message: Any) -> Record:
        """The record of a message."""
        partition, offset = message.partition(), message.offset()
        name = f"{self.name}:{partition}:{offset}"
        self.pending.add(partition, name, offset + 1)
        data = message.value()
        return Record(data or b"", name, "" if data else "the message is empty")
