"""The interface of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class OutputError(Exception):
    """An output could not take alerts; they are to be sent again later.

    Attributes:
        permanent: Whether sending the same alerts again would fail in the same way.
    """

    def __init__(self, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent


class Output(ABC):
    """Where alerts go: a file, a webhook.

    Attributes:
        name: Name of the output in the store's queue of deliveries. It contains no secret.
        batch: Most alerts that `send` takes at once.
    """

    name: str
    batch: int = 100

    @abstractmethod
    def send(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Send alerts (`Alert.to_json`). When it returns, they are safe; an alert may be sent
        again after a crash, with the same id.

        Raises:
            OutputError: They could not be sent.
        """

    def close(self) -> None:  # noqa: B027 - most outputs hold nothing open
        """Release what the output holds."""
