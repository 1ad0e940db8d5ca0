"""Where records come from: files, folders that grow, standard input, Redis, NATS and Kafka."""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

from regard.errors import did_you_mean
from regard.watch.settings import WatchSettings
from regard.watch.sources.source import Record, Source, SourceError

__all__ = ["Record", "Source", "SourceError", "open_source"]

BROKERS = ("redis", "rediss", "nats", "kafka")


def open_source(
    url: str | Path,
    *,
    settings: WatchSettings,
    follow: bool = False,
    state: Path | None = None,
    replay: float | None = None,
) -> Source:
    """Open a source.

    Args:
        url: The path of a file, plain or compressed by gzip or xz, or of a folder; "-" for
            standard input; or the URL of a broker:
            "redis://host:6379/0/stream?group=regard&consumer=a",
            "nats://host:4222/subject?stream=requests&durable=regard",
            "kafka://host:9092/topic?group=regard".
        settings: Limits.
        follow: Whether to wait for more at the end of files. Brokers are always followed.
        state: Folder for how far files were read, so that the next start goes on there. Brokers
            keep this themselves.
        replay: Read again what came in the last so many seconds.
    """
    scheme = urlsplit(str(url)).scheme if "://" in str(url) else ""
    if scheme in ("redis", "rediss"):
        from regard.watch.sources.redis_streams import RedisSource

        return RedisSource(str(url), replay=replay)
    if scheme == "nats":
        from regard.watch.sources.nats_jetstream import NatsSource

        return NatsSource(str(url), replay=replay)
    if scheme == "kafka":
        from regard.watch.sources.kafka import KafkaSource

        return KafkaSource(str(url), replay=replay)
    if scheme:
        raise SourceError(
            f"Cannot read {url}: there is no source {scheme!r}; {did_you_mean(scheme, BROKERS)}"
        )
    if str(url) == "-":
        from regard.watch.sources.pipe import PipeSource

        return PipeSource(sys.stdin.fileno(), "stdin", settings.max_bytes)
    from regard.watch.sources.files import FilesSource

    return FilesSource(Path(url), settings.max_bytes, follow=follow, state=state, replay=replay)
