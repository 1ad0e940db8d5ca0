"""URLs of brokers: redis://host/stream?group=regard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from urllib.parse import parse_qsl, unquote, urlsplit

from regard.errors import did_you_mean
from regard.watch.sources.source import SourceError


@dataclass(frozen=True)
class BrokerURL:
    """The parts of a broker's URL.

    Attributes:
        server: The URL without path and options.
        host: Host and port, without user and password.
        path: Parts of the path.
        options: Options, with defaults.
        extra: Options with a dot in their name, which are passed to the client.
    """

    server: str
    host: str
    path: list[str]
    options: dict[str, str]
    extra: dict[str, str]


def parse_broker_url(url: str, defaults: Mapping[str, str], example: str) -> BrokerURL:
    """The parts of a broker's URL.

    Args:
        url: The URL.
        defaults: The options that there are, and their defaults.
        example: A URL that is right, for errors.
    """
    parts = urlsplit(url)
    path = [unquote(part) for part in parts.path.split("/") if part]
    if not parts.netloc or not path:
        raise SourceError(f"{without_password(url)} names no host or no stream; write {example}")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    extra = {name: value for name, value in given.items() if "." in name}
    options = {name: value for name, value in given.items() if "." not in name}
    for name in options:
        if name not in defaults:
            raise SourceError(
                f"{without_password(url)} has an unknown option {name!r}; "
                f"{did_you_mean(name, defaults)}"
            )
    host = parts.netloc.rpartition("@")[2]
    server = f"{parts.scheme}://{parts.netloc}"
    return BrokerURL(server, host, path, {**defaults, **options}, extra)


def without_password(url: str) -> str:
    """A URL without user and password, for messages."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def parse_seconds(options: Mapping[str, str], name: str) -> float:
    """An option that is a number of seconds."""
    try:
        seconds = float(options[name])
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e7:
        raise SourceError(f"{name} must be a number of seconds above 0, not {options[name]!r}")
    return seconds


def starts_at_beginning(options: Mapping[str, str]) -> bool:
    """Whether the option `start` is "beginning" and not "new"."""
    if options["start"] not in ("beginning", "new"):
        raise SourceError(f"start must be 'beginning' or 'new', not {options['start']!r}")
    return options["start"] == "beginning"


class BackOff:
    """Waits longer after each failure in a row, up to five seconds."""

    def __init__(self) -> None:
        self.failures = 0

    def reset(self) -> None:
        """The last call succeeded."""
        self.failures = 0

    def wait(self, deadline: float) -> None:
        """Wait after a failure, but not longer than until a time of `monotonic`."""
        seconds = min(5.0, 0.05 * 2**self.failures)
        self.failures = min(self.failures + 1, 10)
        sleep(max(0.0, min(seconds, deadline - monotonic())))
