"""Many feed-forward layers of one shape, run at once: here, or each process its share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from regard.errors import Unsupported, check_int
from regard.ffn.base import FeedForward

MOST = 1 << 16  # experts are made one by one: a file may not ask for more than anybody has trained


class ExpertBank(nn.Module):
    """Expert e maps buffer e: (E C d) -> (E C d).  Their weights are stacked: `expert.up.weight` is (E hidden d).

    make    makes an expert: any feed-forward layer that maps each token by itself, has parameters and keeps nothing else
    count   E
    """

    def __init__(self, make: Callable[[], FeedForward], count: int) -> None:
        super().__init__()
        check_int(1, count=count)
        if count > MOST:
            raise ValueError(f"there may be at most {MOST:,} experts, not {count:,}")
        experts = [make() for _ in range(count)]
        self.expert, self.count, self.dim = experts[0], count, experts[0].dim
        if any(True for _ in self.expert.buffers()):
            raise Unsupported(
                f"{type(self.expert).__name__} cannot be an expert: it keeps buffers, which would not be stacked"
            )
        for name, _ in list(self.expert.named_parameters()):
            _put(
                self.expert,
                name,
                torch.stack([expert.get_parameter(name).detach() for expert in experts]),
            )

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""

        def one(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
            return functional_call(self.expert, weights, (tokens[None],))[0]

        return vmap(one, randomness="different")(dict(self.expert.named_parameters()), x)

    def keep(self, first: int, last: int) -> None:
        """Forget all experts but first..last-1."""
        for name, p in list(self.expert.named_parameters()):
            _put(self.expert, name, p.detach()[first:last].clone())
        self.count = last - first


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Make `parse_literal` the parameter of that dotted name."""
    *path, last = name.split(".")
    setattr(module.get_submodule(".".join(path)), last, nn.Parameter(value))


class ShardedExpertBank(nn.Module):
    """A `ExpertBank` whose experts live on several processes, E / world on each: (E C d) -> (E C d), on every process its own C.

    Each process sends buffer e to where expert e lives, and gets the results back: two all-to-all exchanges forward, two
    backward (GShard: Lepikhin et al. 2020, arXiv 2006.16668).  All processes must take part in each call, also one without
    any token.

    bank    all experts, the same on every process; only those that belong here are kept
    group   the processes, all of them unless given
    """

    def __init__(self, bank: ExpertBank, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.count, self.dim, self.group, self.world = (
            bank.count,
            bank.dim,
            group,
            dist.get_world_size(group),
        )
        if self.count % self.world:
            raise ValueError(
                f"{self.count} experts do not spread evenly over {self.world} processes"
            )
        each, me = self.count // self.world, dist.get_rank(group)
        bank.keep(each * me, each * (me + 1))
        self.bank = bank

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        size = torch.tensor(x.shape[1], device=x.device)
        dist.all_reduce(size, dist.ReduceOp.MAX, self.group)
        sent = F.pad(x, (0, 0, 0, int(size) - x.shape[1])).unflatten(0, (self.world, -1))
        mine = exchange(sent, self.group).transpose(0, 1)  # (E/world world C d)
        done = self.bank(mine.flatten(1, 2)).view_as(mine).transpose(0, 1)
        return exchange(done, self.group).flatten(0, 1)[:, : x.shape[1]]


def exchange(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """x (world ...): row r goes to process r, and what process r sent here stands in row r; with gradients."""
    return _Exchange.apply(x, group)  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        got = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(got, x.contiguous(), group=group)
        return got

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchange(grad, ctx.group), None  # what was sent there comes back from there
