"""Communication between processes, with gradients, counting the bytes that are sent."""

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
    """Bytes exchanged with other processes.

    Attributes:
        sent: Bytes sent.
        received: Bytes received.
        largest: Largest number of bytes received at once.
    """

    sent: int = 0
    received: int = 0
    largest: int = 0


_counters: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the bytes of tokens, keys, states and gradients that this process exchanges.

    The header of each call, 56 bytes to each process, is not counted.
    """
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


def add_traffic(sent: int, received: int) -> None:
    """Add to all active counters."""
    for traffic in _counters:
        traffic.sent += sent
        traffic.received += received
        traffic.largest = max(traffic.largest, received)


class ShardedCall(NamedTuple):
    """What all processes know about a call.

    Attributes:
        ends: Start of each slice, and the end of the last: (world_size + 1).
        masked: Whether any process has a mask.
    """

    group: OptionalProcessGroup
    rank: int
    world_size: int
    ends: tuple[int, ...]
    masked: bool

    @property
    def start(self) -> int:
        """Position of the first token of this process."""
        return self.ends[self.rank]

    @property
    def length(self) -> int:
        """Length of the whole sequence."""
        return self.ends[-1]


class CallHeader(NamedTuple):
    """What each process sends before a call; inconsistent headers raise in all processes."""

    failed: int = 1  # the inputs were refused, and this process will not take part
    batch_size: int = 0
    tokens: int = 0
    masked: int = 0
    needs_grad: int = 0
    dtype: int = 0
    mixer_hash: int = 0


EQUAL_FIELDS = {
    "batch_size": "the batch size",
    "dtype": "the dtype of the tokens",
    "mixer_hash": "the mixer, which was built differently",
}


def exchange_headers(
    header: CallHeader, device: torch.device, group: OptionalProcessGroup
) -> ShardedCall:
    """Exchange the headers of all processes; raises in all of them if they are inconsistent."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    own = torch.tensor(header, device=device)
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own, group)
    # the only synchronization of a call: the sizes decide what is sent
    headers = [CallHeader(*row) for row in torch.stack(gathered).tolist()]
    failed = [r for r, each in enumerate(headers) if each.failed]
    if failed:
        raise RuntimeError(
            f"Ranks {failed} of {world_size} processes refused their inputs; see their errors. "
            "Nothing was computed."
        )
    for name, description in EQUAL_FIELDS.items():
        values = [getattr(each, name) for each in headers]
        if len(set(values)) > 1:
            raise ValueError(f"The processes differ in {description}: {values}, by rank.")
    with_graph = [r for r, each in enumerate(headers) if each.needs_grad]
    if 0 < len(with_graph) < world_size:
        raise ValueError(
            f"A backward pass needs all {world_size} processes, but only ranks {with_graph} "
            "record gradients."
        )
    ends = tuple(accumulate((each.tokens for each in headers), initial=0))
    return ShardedCall(group, rank, world_size, ends, any(each.masked for each in headers))


def exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: OptionalProcessGroup
) -> Tensor:
    """All-to-all with gradients: sends sent[r] numbers of x to rank r, returns received[r] from it.

    All processes must take part in the forward and in the backward pass, even with nothing to send.
    """
    return _ExchangeRows.apply(x, tuple(sent), tuple(received), group)  # type: ignore[no-untyped-call]


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: OptionalProcessGroup,
    ) -> Tensor:
        ctx.reverse = received, sent, group
        y = torch.empty(sum(received), dtype=x.dtype, device=x.device)
        dist.all_to_all_single(y, x.contiguous(), list(received), list(sent), group)
        add_traffic(x.nbytes, y.nbytes)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grad, *ctx.reverse), None, None, None


@dataclass(frozen=True)
class Message:
    """A pending transfer: rows sent to one process, and rows received from another."""

    sent: Tensor  # must stay alive until it has arrived
    received: Tensor
    requests: Sequence[Any]

    def wait(self) -> Tensor:
        """Wait for the received rows."""
        for request in self.requests:
            request.wait()
        return self.received


def post_message(
    sent: Tensor, target: int, received: Tensor, source: int, call: ShardedCall, tag: int
) -> Message:
    """Start sending to rank `target` and receiving from `source`; empty tensors are skipped."""
    sent = sent.contiguous()
    ranks = (
        range(call.world_size) if call.group is None else dist.get_process_group_ranks(call.group)
    )
    transfers = [(dist.isend, sent, target), (dist.irecv, received, source)]
    operations = [
        dist.P2POp(transfer, x, ranks[other], call.group, tag)
        for transfer, x, other in transfers
        if x.numel()
    ]
    add_traffic(sent.nbytes, received.nbytes)
    return Message(sent, received, dist.batch_isend_irecv(operations) if operations else [])


def depend_on(y: Tensor, *received: Tensor) -> Tensor:
    """Return y, and make the backward pass compute gradients of `received` even if y ignores them.

    The processes that sent them wait for their gradients.
    """
    return _DependOn.apply(y, *received)  # type: ignore[no-untyped-call]


class _DependOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *received: Tensor) -> Tensor:
        ctx.count = len(received)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None] * ctx.count


def gather_all(x: Tensor, call: ShardedCall) -> Tensor:
    """The tensors of all processes, of the same shape: (world_size, ...)."""
    others = [rank for rank in range(call.world_size) if rank != call.rank]
    received = _send_to(x, others, others, call)
    return torch.cat((received[: call.rank], x[None], received[call.rank :]))


def gather_previous(x: Tensor, call: ShardedCall) -> Tensor:
    """The tensors of the processes before this one, of the same shape: (rank, ...)."""
    return _send_to(x, range(call.rank + 1, call.world_size), range(call.rank), call)


def _send_to(
    x: Tensor, targets: Sequence[int], sources: Sequence[int], call: ShardedCall
) -> Tensor:
    sent, received = (
        [x.numel() if rank in side else 0 for rank in range(call.world_size)]
        for side in (targets, sources)
    )
    rows = exchange(x.flatten().repeat(len(targets)), sent, received, call.group)
    return rows.unflatten(0, (len(sources), *x.shape))
