"""Where records come from: files, folders that grow, standard input, Redis, NATS and Kafka."""

from __future__ import annotations

from pathlib import Path

from regard.watch.settings import WatchSettings
from regard.watch.sources.source import Record, Source, SourceError

__all__ = ["Record", "Source", "SourceError", "open_source"]


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
            standard input; "redis://host/stream?group=...", "nats://host/subject" or
            "kafka://host/topic".
        settings: Limits.
        follow: Whether to wait for more at the end of files.
        state: Folder for how far files were read, so that the next start goes on there. Brokers
            keep this themselves.
        replay: Read again what came in the last so many seconds.
    """
    from regard.watch.sources.files import FileSource

    return FileSource(Path(url), settings.max_bytes)
