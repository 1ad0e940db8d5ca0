"""Mixture of experts: each token uses a few of many feed-forward layers."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.device import widest_dtype
from regard.errors import Unsupported, check_int, check_positive
from regard.ffn.activations import Activation
from regard.ffn.base import FeedForward
from regard.ffn.dense import MLP
from regard.ffn.dispatch import dispatch_tokens
from regard.ffn.expert_bank import ExpertBank, ShardedExpertBank
from regard.ffn.router import Router
from regard.numerics import zero_padding_tokens


class MixtureOfExperts(FeedForward):
    """y = Σ_{i in top k} g_i E_i(x), p = softmax(router(x))
    (Shazeer et al. 2017, arXiv 1701.06538).

    top_k = 1 is Switch (Fedus et al. 2021, arXiv 2101.03961), with g = p. For larger k,
    g_i = p_i / Σ_{top k} p (GShard, Lepikhin et al. 2020, arXiv 2006.16668).

    Records the auxiliary losses "balance_loss" and "router_z_loss", and the statistics "load" (E),
    the tokens of each expert, and "dropped", the number of choices over capacity.

    Args:
        bank: Experts.
        router: Scores the experts for each token.
        top_k: Experts per token.
        capacity: In training, an expert serves ⌊capacity · k · n / experts⌋ tokens of an example
            with n real tokens, at least one. Choices over capacity give zero. None: no limit.
        eval_capacity: The same in evaluation, where a limit makes a token depend on earlier ones,
            and a stream on its chunks.
        balance_loss_weight: Weight α of α · E Σ_i f_i P_i, where f_i is the fraction of tokens
            whose first choice is i, and P_i the mean of p_i, over all real tokens of the batch.
        z_loss_weight: Weight of the mean of (log Σ exp scores)² (ST-MoE, Zoph et al. 2022,
            arXiv 2202.08906).
    """

    def __init__(
        self,
        bank: ExpertBank,
        router: Router,
        *,
        top_k: int = 1,
        capacity: float | None = 1.25,
        eval_capacity: float | None = None,
        balance_loss_weight: float = 1e-2,
        z_loss_weight: float = 1e-3,
    ) -> None:
        super().__init__(bank.dim)
        check_int(1, top_k=top_k)
        if (bank.dim, bank.num_experts) != (router.dim, router.num_experts):
            raise ValueError(
                f"the router has {router.num_experts} experts of dim {router.dim}, "
                f"but the bank has {bank.num_experts} of dim {bank.dim}"
            )
        if top_k > bank.num_experts:
            raise ValueError(f"top_k must be at most num_experts ({bank.num_experts}), not {top_k}")
        for name, value in (("capacity", capacity), ("eval_capacity", eval_capacity)):
            if value is not None:
                check_positive(name, value)
        for name, value in (
            ("balance_loss_weight", balance_loss_weight),
            ("z_loss_weight", z_loss_weight),
        ):
            if value != 0:
                check_positive(name, value)
        self.bank: nn.Module = bank
        self.router, self.num_experts, self.top_k = router, bank.num_experts, top_k
        self.capacity, self.eval_capacity = capacity, eval_capacity
        self.balance_loss_weight, self.z_loss_weight = balance_loss_weight, z_loss_weight

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`. Padding is not routed, and its output is zero."""
        x = zero_padding_tokens(x, mask)
        scores = self.router(x)
        probabilities = scores.softmax(-1)
        gates, choices = probabilities.topk(self.top_k, -1)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        assignment = dispatch_tokens(
            choices, self.num_experts, mask=mask, capacity=self._example_capacity(x, mask)
        )
        self._record_aux(scores, probabilities, choices, assignment.load, mask)
        y = self.bank(assignment.dispatch(x.flatten(0, 1)))
        return assignment.combine(y, gates.flatten(0, 1)).view_as(x)

    def shard(self, group: dist.ProcessGroup | None = None) -> MixtureOfExperts:
        """Keep only this process's share of the experts, see `ShardedExpertBank`; return the layer.

        This replaces parameters: call it before building an optimiser.
        """
        if not isinstance(self.bank, ExpertBank):
            raise Unsupported("the experts are already sharded")
        self.bank = ShardedExpertBank(self.bank, group)
        return self

    def _example_capacity(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Tokens of each example that an expert serves, (b)."""
        factor = self.capacity if self.training else self.eval_capacity
        if factor is None:
            return None
        n = torch.full((x.shape[0],), x.shape[1], device=x.device) if mask is None else mask.sum(1)
        # Divide last, so that integers stay exact.
        n = n.to(widest_dtype(x.device))
        return (n * (factor * self.top_k) / self.num_experts).floor().clamp(min=1)

    def _record_aux(
        self,
        scores: Tensor,
        probabilities: Tensor,
        choices: Tensor,
        load: Tensor,
        mask: Tensor | None,
    ) -> None:
        real = torch.ones_like(choices[..., 0], dtype=torch.bool) if mask is None else mask

        def mean(x: Tensor) -> Tensor:
            """Mean of x (b, n, c) over real tokens, (c); zero if there are none."""
            return (x * real[..., None]).sum((0, 1)) / real.sum().clamp(min=1)

        def balance_loss() -> Tensor:
            first = F.one_hot(choices[..., 0], self.num_experts).to(probabilities.dtype)
            overlap = (mean(first) * mean(probabilities)).sum()
            return self.balance_loss_weight * self.num_experts * overlap

        def z_loss() -> Tensor:
            return self.z_loss_weight * mean(scores.logsumexp(-1, keepdim=True).square())[0]

        if self.balance_loss_weight:
            record_aux("balance_loss", balance_loss, is_loss=True)
        if self.z_loss_weight:
            record_aux("router_z_loss", z_loss, is_loss=True)
        record_aux("load", lambda: load)
        record_aux("dropped", lambda: real.sum() * self.top_k - load.sum())

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"top_k={self.top_k}, capacity={self.capacity}, eval_capacity={self.eval_capacity}"


def switch_experts(
    dim: int,
    num_experts: int,
    hidden: int | None = None,
    *,
    activation: str | Activation = "relu",
    bias: bool = False,
    capacity: float | None = 1.25,
    jitter: float = 1e-2,
    seed: int = 0,
) -> MixtureOfExperts:
    """Switch: one expert per token, router with jitter (Fedus et al. 2021, arXiv 2101.03961)."""
    bank = ExpertBank(partial(MLP, dim, hidden, activation=activation, bias=bias), num_experts)
    return MixtureOfExperts(
        bank, Router(dim, num_experts, jitter=jitter, seed=seed), capacity=capacity
    )


def top_k_experts(
    dim: int,
    num_experts: int,
    hidden: int | None = None,
    *,
    top_k: int = 2,
    activation: str | Activation = "relu",
    capacity: float | None = 2.0,
    noisy: bool = False,
    seed: int = 0,
) -> MixtureOfExperts:
    """The k best experts per token: two as in GShard; with `noisy` scores as in Shazeer 2017."""
    bank = ExpertBank(partial(MLP, dim, hidden, activation=activation, bias=False), num_experts)
    router = Router(dim, num_experts, noisy=noisy, seed=seed)
    return MixtureOfExperts(bank, router, top_k=top_k, capacity=capacity)
