"""Experts of one shape with stacked weights, on one process or sharded over several."""

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

MAX_EXPERTS = 1 << 16  # experts are built one by one: limits what a configuration file can ask for


class ExpertBank(nn.Module):
    """Expert e maps buffer e: (E, C, d) -> (E, C, d). Weights are stacked: `expert.up.weight` is
    (E, hidden, d).

    Args:
        build_expert: Builds an expert: a feed-forward layer without buffers that maps each token
            independently.
        num_experts: Number of experts E.
    """

    def __init__(self, build_expert: Callable[[], FeedForward], num_experts: int) -> None:
        super().__init__()
        check_int(1, num_experts=num_experts)
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts must be at most {MAX_EXPERTS:,}, not {num_experts:,}")
        experts = [build_expert() for _ in range(num_experts)]
        self.expert, self.num_experts, self.dim = experts[0], num_experts, experts[0].dim
        if any(True for _ in self.expert.buffers()):
            raise Unsupported(
                f"{type(self.expert).__name__} cannot be an expert: its buffers cannot be stacked"
            )
        for name, _ in list(self.expert.named_parameters()):
            weights = [expert.get_parameter(name).detach() for expert in experts]
            _set_parameter(self.expert, name, torch.stack(weights))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""

        def run_expert(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
            return functional_call(self.expert, weights, (tokens[None],))[0]

        weights: dict[str, Tensor] = dict(self.expert.named_parameters())
        return vmap(run_expert, randomness="different")(weights, x)

    def keep_experts(self, start: int, end: int) -> None:
        """Drop all experts but start..end-1."""
        for name, p in list(self.expert.named_parameters()):
            _set_parameter(self.expert, name, p.detach()[start:end].clone())
        self.num_experts = end - start


def _set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Set the parameter of that dotted name."""
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, nn.Parameter(value))


class ShardedExpertBank(nn.Module):
    """`ExpertBank` sharded over processes, E / world on each: (E, C, d) -> (E, C, d), where C may
    differ between processes.

    Each process sends buffer e to the process of expert e and receives the results: two all-to-all
    exchanges forward, two backward (GShard: Lepikhin et al. 2020, arXiv 2006.16668). All processes
    must take part in each call, even without tokens.

    Args:
        bank: All experts, the same on every process; each keeps its share.
        group: Process group, default all processes.
    """

    def __init__(self, bank: ExpertBank, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.num_experts, self.dim = bank.num_experts, bank.dim
        self.group, self.world = group, dist.get_world_size(group)
        if self.num_experts % self.world:
            raise ValueError(
                f"{self.num_experts} experts cannot be sharded evenly over {self.world} processes"
            )
        share, rank = self.num_experts // self.world, dist.get_rank(group)
        bank.keep_experts(share * rank, share * (rank + 1))
        self.bank = bank

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        slots = x.shape[1]
        largest = torch.tensor(slots, device=x.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        x = F.pad(x, (0, 0, 0, int(largest) - slots)).unflatten(0, (self.world, -1))
        received = all_to_all(x, self.group).transpose(0, 1)  # (E / world, world, C, d)
        y = self.bank(received.flatten(1, 2)).view_as(received).transpose(0, 1)
        return all_to_all(y, self.group).flatten(0, 1)[:, :slots]


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Send row r of x (world, ...) to process r and receive its row; differentiable."""
    return _ExpertExchange.apply(x, group)  # type: ignore[no-untyped-call]


class _ExpertExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        received = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.group), None  # the exchange is its own transpose
