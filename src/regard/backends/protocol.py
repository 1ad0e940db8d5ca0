"""The backend protocol, and the loop that chooses among backends.

A backend is one way to compute a call. It answers three questions about it: whether it supports the
call, how long it expects to take, and how to run it. A `Dispatcher` asks all backends of one
operation. Running a call, explaining a choice and remembering it are uses of the same loop,
`Dispatcher.choose`.

Other packages add backends through the entry-point group "regard.backends". An entry point names a
`Backend` class or an instance. `regard.testing.check_backend` checks one.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch

from regard.errors import Unsupported, did_you_mean

ENTRY_POINT_GROUP = "regard.backends"
OPERATIONS = ("softmax", "linear")
MAX_REMEMBERED = 4096  # choices


class Call(Protocol):
    """What a `Dispatcher` has to know about a call."""

    def signature(self) -> Hashable | None:
        """Everything that a choice depends on, or None if the choice must not be remembered."""

    def num_tokens(self) -> int:
        """The number of queries or of keys, whichever is smaller."""

    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""


AnyCall = TypeVar("AnyCall", bound=Call)


class Backend(ABC, Generic[AnyCall]):
    """One way to compute a call: a `regard.backends.AttentionCall` or a
    `regard.backends.LinearCall`.

    Choices are remembered, so `refuses` and `cost` may depend on shapes, dtypes, devices, the
    pattern, the scale, integer positions and on which other arguments are given, but not on the
    numbers in tensors, nor on strides: a backend accepts any.

    Attributes:
        name: The name for `backend=`.
        operation: "softmax" for `AttentionCall`, "linear" for `LinearCall`.
        min_tokens: With fewer queries or keys than this, in inference and in training, `auto` does
            not consider the backend: preparing the call would take longer than the call.
        traceable: Whether prepared functions consist of PyTorch operations only, so that
            transforms, tensor subclasses and dispatch modes see every step.
    """

    name: ClassVar[str]
    operation: ClassVar[str] = "softmax"
    min_tokens: ClassVar[tuple[int, int]] = (0, 0)
    traceable: ClassVar[bool] = False

    @abstractmethod
    def refuses(self, call: AnyCall) -> str | None:
        """The reason why this backend does not support the call, or None."""

    @abstractmethod
    def cost(self, call: AnyCall) -> float | None:
        """Estimated seconds for a call that is not refused, with the backward pass if one may
        follow. None: `auto` does not consider the backend.
        """

    @abstractmethod
    def prepare(self, call: AnyCall) -> Callable[..., Any]:
        """A function of the tensors of a call that is not refused: (q, k, v) -> output for
        softmax attention, (q, k, v, state) -> (output, normalizer, state) for linear attention.

        It may be called again with other tensors of the same shapes, if `call.signature()` is not
        None. Everything else that it needs it takes from `call`.
        """


class Candidate(NamedTuple):
    """What one backend answered.

    Attributes:
        backend: Its name.
        seconds: The estimated time, or None if it is no candidate or was not asked.
        reason: Why it is no candidate; empty if it is one.
    """

    backend: str
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a call, the reason, and what every backend answered. `print` shows a table."""

    backend: str
    reason: str
    candidates: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.reason}"]
        for name, seconds, reason in self.candidates:
            answer = reason if seconds is None else f"{seconds * 1e3:,.3g} ms"
            lines.append(f"  {name:<10} {answer or 'not asked: it is the only candidate'}")
        return "\n".join(lines)

    def seconds(self, backend: str | None = None) -> float | None:
        """The estimated time of a backend, by default of the chosen one."""
        name = self.backend if backend is None else backend
        return next((c.seconds for c in self.candidates if c.backend == name), None)


class Dispatcher(Generic[AnyCall]):
    """The backends of one operation.

    Args:
        operation: "softmax" or "linear".
        default: Supports every call, and is chosen if no other backend is a candidate.
        others: The other backends, in any order.
    """

    def __init__(
        self, operation: str, default: Backend[AnyCall], others: Sequence[Backend[AnyCall]]
    ) -> None:
        self.operation, self.default = operation, default
        self._backends = {backend.name: backend for backend in (*others, default)}
        self._choices: dict[Hashable, BackendChoice] = {}
        self._override: Backend[AnyCall] | None = None
        self._override_names = False
        self._loaded_entry_points = False
        self.version = 0  # increases when choices that were made before are no longer valid

    def names(self) -> list[str]:
        """The names of all backends."""
        self._load_entry_points()
        return list(self._backends)

    def get(self, name: str) -> Backend[AnyCall]:
        """A backend by name."""
        self._load_entry_points()
        if name not in self._backends:
            known = [*self._backends, "auto"]
            raise ValueError(f"no backend {name!r}: {did_you_mean(str(name), known)}")
        return self._backends[name]

    def check_name(self, name: str) -> None:
        """Raise ValueError if `name` is neither a backend nor "auto"."""
        if name != "auto":
            self.get(name)

    def register(self, backend: Backend[AnyCall]) -> None:
        """Add a backend, or replace the one of that name from the same module."""
        known = self._backends.get(backend.name)
        if known is not None and type(known).__module__ != type(backend).__module__:
            raise ValueError(
                f"Backend {backend.name!r} is already registered by {type(known).__module__}."
            )
        self._backends[backend.name] = backend
        self._forget()

    def unregister(self, name: str) -> None:
        """Remove a backend."""
        if self.get(name) is self.default:
            raise ValueError(f"Backend {name!r} is the default and cannot be removed.")
        del self._backends[name]
        self._forget()

    def choose(self, call: AnyCall) -> BackendChoice:
        """The backend for a call: of those that support it, the one with the lowest cost."""
        if self._override is not None and self._override.refuses(call) is None:
            return BackendChoice(self._override.name, "set by override")
        self._load_entry_points()
        signature = call.signature()
        found = None if signature is None else self._choices.get(signature)
        if found is None:
            found = self._compare(call)
            if signature is not None:
                if len(self._choices) >= MAX_REMEMBERED:
                    self._choices.clear()
                self._choices[signature] = found
        return found

    def prepare(
        self, call: AnyCall, name: str = "auto"
    ) -> tuple[Backend[AnyCall], Callable[..., Any]]:
        """The chosen backend, or the one of this name, and its function for the call."""
        override = self._override
        overridden = override is not None and (name == "auto" or self._override_names)
        if override is not None and overridden and override.refuses(call) is None:
            return override, override.prepare(call)
        if name == "auto" and torch.compiler.is_compiling():
            backend = self.default  # its operations become part of the graph
        elif name == "auto":
            backend = self._backends[self.choose(call).backend]
        else:
            backend = self.get(name)
            refusal = backend.refuses(call)
            if refusal is not None:
                raise Unsupported(f"backend {name!r}: {refusal}")
        return backend, backend.prepare(call)

    @contextmanager
    def override(self, backend: Backend[AnyCall], *, named: bool = False) -> Iterator[None]:
        """Inside, `auto` runs every call that `backend` supports on it, whatever the cost. With
        `named`, so do calls that name another backend.
        """
        before = self._override, self._override_names
        self._override, self._override_names = backend, named
        self.version += 1
        try:
            yield
        finally:
            self._override, self._override_names = before
            self.version += 1

    def _compare(self, call: AnyCall) -> BackendChoice:
        """Ask every backend; the default is asked for its cost only if there is another candidate,
        because costs have to be measured first.
        """
        tokens, grad = call.num_tokens(), call.needs_grad()
        candidates = []
        for backend in self._backends.values():
            if backend is self.default:
                continue
            seconds, reason = None, backend.refuses(call) or ""
            if not reason and tokens < backend.min_tokens[grad]:
                reason = f"few queries or keys, fewer than {backend.min_tokens[grad]}"
            if not reason:
                seconds = backend.cost(call)
                reason = "" if seconds is not None else "used only by name for this call"
            candidates.append(Candidate(backend.name, seconds, reason))
        default = self.default.name
        if all(c.seconds is None for c in candidates):
            reason = "; ".join(f"{c.backend}: {c.reason}" for c in candidates)
            return BackendChoice(default, reason, (Candidate(default, None), *candidates))
        candidates.insert(0, Candidate(default, self.default.cost(call)))
        timed = sorted((c.seconds, c.backend) for c in candidates if c.seconds is not None)
        reason = ", ".join(f"{seconds * 1e3:.3g} ms {name}" for seconds, name in timed)
        return BackendChoice(timed[0][1], f"estimated {reason}", tuple(candidates))

    def _forget(self) -> None:
        self._choices.clear()
        self.version += 1

    def _load_entry_points(self) -> None:
        if self._loaded_entry_points:
            return
        self._loaded_entry_points = True
        for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                loaded = entry.load()
                backend = loaded() if isinstance(loaded, type) else loaded
                check_is_backend(backend)
                if backend.operation == self.operation:
                    self.register(backend)
            except Exception as error:  # a broken package must not stop every call
                warnings.warn(
                    f"Could not load backend {entry.name!r} from {entry.value!r}: {error}",
                    stacklevel=2,
                )


def check_is_backend(backend: object) -> None:
    """Raise TypeError unless this is a `Backend` with a name and a known operation."""
    if not isinstance(backend, Backend):
        raise TypeError(f"a backend must be an instance of regard.Backend, not {backend!r}")
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or not name or name == "auto":
        raise TypeError(f"the name of a backend must be a string other than 'auto', not {name!r}")
    if backend.operation not in OPERATIONS:
        raise TypeError(
            f"backend {name!r} has operation {backend.operation!r}: choose from "
            f"{', '.join(OPERATIONS)}"
        )
