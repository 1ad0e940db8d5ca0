"""What goes from process to process: one exchange, which counts its bytes, and whose gradients go back the same way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

OptionalProcessGroup = dist.ProcessGroup | None  # None: all processes


@dataclass(eq=False)
class Traffic:
    """Bytes that this process sent to others and got from them; its own share, which stays here, is not among them.

    largest   the most that came at once
    """

    sent: int = 0
    got: int = 0
    largest: int = 0


_open: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes that are exchanged inside: tokens, keys, states, and their gradients.

    Beside them each call tells the others its sizes, 56 bytes to each.
    """
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open.remove(traffic)


def count(sent: int, got: int) -> None:
    """Add to whoever counts."""
    for traffic in _open:
        traffic.sent += sent
        traffic.got += got
        traffic.largest = max(traffic.largest, got)


class ShardedCall(NamedTuple):
    """What all processes know of a call once they have met.

    ends   where the slice of each process begins, and where the last ends: (world + 1)
    """

    group: OptionalProcessGroup
    rank: int
    world: int
    ends: tuple[int, ...]
    masked: bool  # whether any of them leaves tokens out
    training: bool  # whether a backward pass may follow

    @property
    def at(self) -> int:
        """The position of the first token here."""
        return self.ends[self.rank]

    @property
    def length(self) -> int:
        """Of the whole sequence."""
        return self.ends[-1]


class CallHeader(NamedTuple):
    """What a process tells the others before a call; they compare it, and all raise where it does not fit together."""

    failed: int = 1  # whether it was given something that it refused, and will not come
    examples: int = 0
    tokens: int = 0
    masked: int = 0
    graph: int = 0
    kind: int = 0
    build: int = 0


ALIKE = {
    "examples": "the number of examples",
    "kind": "the type of the tokens",
    "build": "the mixer: it was built otherwise",
}


def exchange_headers(
    brought: CallHeader, device: torch.device, group: OptionalProcessGroup
) -> ShardedCall:
    """All processes tell what they bring; what does not fit together raises in all of them."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.tensor(brought, device=device)
    found = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(found, mine, group)
    told = [
        CallHeader(*row) for row in torch.stack(found).tolist()
    ]  # the one wait of a call: sizes decide what is sent
    failed = [rank for rank, each in enumerate(told) if each.failed]
    if failed:
        raise RuntimeError(
            f"of {world} processes {failed} refused what they were given, and say why: nothing was computed"
        )
    for name, words in ALIKE.items():
        values = [getattr(each, name) for each in told]
        if len(set(values)) > 1:
            raise ValueError(f"the processes disagree in {words}: {values}, by rank")
    if len({each.graph for each in told}) > 1:
        graphs = [rank for rank, each in enumerate(told) if each.graph]
        raise ValueError(
            f"a backward pass needs all processes, and only {graphs} of {world} keep a graph for one"
        )
    ends = tuple(accumulate((each.tokens for each in told), initial=0))
    return ShardedCall(
        group, rank, world, ends, any(each.masked for each in told), bool(told[0].graph)
    )


def exchange(
    x: Tensor, sent: Sequence[int], got: Sequence[int], group: OptionalProcessGroup
) -> Tensor:
    """x: so many numbers for each process, in the order of their ranks -> what came from each of them; with gradients.

    All processes must take part, also those that have nothing to send or to get; and so they must in the backward pass.
    """
    return _Exchange.apply(x, tuple(sent), tuple(got), group)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sent: tuple[int, ...],
        got: tuple[int, ...],
        group: OptionalProcessGroup,
    ) -> Tensor:
        ctx.back = got, sent, group
        found = torch.empty(sum(got), dtype=x.dtype, device=x.device)
        dist.all_to_all_single(found, x.contiguous(), list(got), list(sent), group)
        count(x.nbytes, found.nbytes)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, *ctx.back), None, None, None


@dataclass(frozen=True)
class Message:
    """What is under way: rows that go to one process, and others that come from one."""

    sent: Tensor  # kept until it has arrived
    got: Tensor
    works: Sequence[Any]

    def wait(self) -> Tensor:
        """What came."""
        for work in self.works:
            work.wait()
        return self.got


def post(
    sent: Tensor, to: int, got: Tensor, whence: int, meeting: ShardedCall, tag: int
) -> Message:
    """Send to one process and get from one, both by their rank in the group; nothing travels where there is nothing."""
    sent = sent.contiguous()
    ways = [(dist.isend, sent, to), (dist.irecv, got, whence)]
    name = (
        range(meeting.world)
        if meeting.group is None
        else dist.get_process_group_ranks(meeting.group)
    )
    asked = [
        dist.P2POp(way, x, name[other], meeting.group, tag) for way, x, other in ways if x.numel()
    ]
    count(sent.nbytes, got.nbytes)
    return Message(sent, got, dist.batch_isend_irecv(asked) if asked else [])


def reaching(y: Tensor, *received: Tensor) -> Tensor:
    """y, as it is; but going back, what was received gets a gradient, if of zeros, even where y does not depend on it: the
    processes that it came from wait for one."""
    return _Reaching.apply(y, *received)  # type: ignore[no-untyped-call]


class _Reaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *received: Tensor) -> Tensor:
        ctx.count = len(received)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.count


def gather(x: Tensor, meeting: ShardedCall) -> list[Tensor]:
    """The tensors of all processes, of one shape, by rank."""
    others = [r for r in range(meeting.world) if r != meeting.rank]
    got = _passed(x, others, others, meeting).unbind()
    return [*got[: meeting.rank], x, *got[meeting.rank :]]


def before(x: Tensor, meeting: ShardedCall) -> Tensor:
    """The tensors of the processes before this one, of one shape: (rank ...)."""
    return _passed(x, range(meeting.rank + 1, meeting.world), range(meeting.rank), meeting)


def _passed(x: Tensor, to: Sequence[int], whence: Sequence[int], meeting: ShardedCall) -> Tensor:
    sent, got = (
        [x.numel() if r in side else 0 for r in range(meeting.world)] for side in (to, whence)
    )
    return exchange(x.flatten().repeat(len(to)), sent, got, meeting.group).unflatten(
        0, (len(whence), *x.shape)
    )
