"""Experts: many feed-forward layers, of which each token asks a few."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from regard.auxiliary import record_aux
from regard.errors import Unsupported, check_int, check_positive
from regard.ffn.activations import Activation
from regard.ffn.base import FeedForward
from regard.ffn.dense import MLP
from regard.ffn.dispatch import ExpertDispatch, dispatch_tokens
from regard.ffn.expert_bank import ExpertBank, ShardedExpertBank
from regard.ffn.router import Router
from regard.numerics import zero_padding_tokens


class MixtureOfExperts(FeedForward):
    """y = Σ_{i in top k} g_i E_i(x), p = softmax(router(x)) (Shazeer et al. 2017, arXiv 1701.06538).

    k = 1 is Switch (Fedus et al. 2021, arXiv 2101.03961), with g = p.  With more, g_i = p_i / Σ_{top k} p (GShard, Lepikhin
    et al. 2020, arXiv 2006.16668), which is the softmax over the k best scores.

    bank           the experts, see `ExpertBank`
    router         tells which expert a token asks
    top            k
    capacity       while training an expert serves ⌊capacity · k · n / experts⌋ tokens of an example with n real ones, and at
                   least one.  Later tokens find no room: what they asked for is zero, and the residual carries them.  None:
                   there is no limit
    eval_capacity  the same in evaluation, where it makes a token depend on those before it, and a stream on its chunks
    balance        weight α of the cost α · E Σ_i f_i P_i, told as "balance": f_i is the share of the tokens whose first
                   choice is i, P_i the mean of p_i, over all real tokens of the batch
    z              weight of the cost mean (log Σ exp scores)² (ST-MoE, Zoph et al. 2022, arXiv 2202.08906), told as "router_z"

    Told as facts: "load" (E), the tokens that each expert serves, and "dropped", the choices that found no room.
    """

    def __init__(
        self,
        bank: ExpertBank,
        router: Router,
        *,
        top: int = 1,
        capacity: float | None = 1.25,
        eval_capacity: float | None = None,
        balance: float = 1e-2,
        z: float = 1e-3,
    ) -> None:
        super().__init__(bank.dim)
        check_int(1, top=top)
        if (bank.dim, bank.count) != (router.dim, router.count):
            raise ValueError(
                f"the router is for {router.count} experts of width {router.dim}, and there are {bank.count} of {bank.dim}"
            )
        if top > bank.count:
            raise ValueError(f"top must be at most the number of experts, {bank.count}, not {top}")
        for name, value in (
            ("capacity", capacity),
            ("eval_capacity", eval_capacity),
            ("balance", balance),
            ("z", z),
        ):
            if value is not None and (value != 0 or name.endswith("capacity")):
                check_positive(name, value)
        self.bank: nn.Module = bank
        self.router, self.count, self.top, self.balance, self.z = (
            router,
            bank.count,
            top,
            balance,
            z,
        )
        self.capacity, self.eval_capacity = capacity, eval_capacity

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `FeedForward`.  Padding asks nobody, takes no room, and gives zero."""
        x = zero_padding_tokens(x, mask)
        scores = self.router(x)
        shares = scores.softmax(-1)
        gates, chosen = shares.topk(self.top, -1)
        work = dispatch_tokens(chosen, self.count, real=mask, room=self._room(x, mask))
        self._tell(scores, shares, chosen, work, mask)
        gates = gates if self.top == 1 else gates / gates.sum(-1, keepdim=True)
        return work.take(self.bank(work.give(x.flatten(0, 1))), gates.flatten(0, 1)).view_as(x)

    def spread(self, group: dist.ProcessGroup | None = None) -> MixtureOfExperts:
        """Keep only this process's share of the experts; see `ShardedExpertBank`.  Returns the layer itself.

        Its parameters are new ones: so do it before an optimiser is given them.
        """
        if not isinstance(self.bank, ExpertBank):
            raise Unsupported("the experts are spread already")
        self.bank = ShardedExpertBank(self.bank, group)
        return self

    def _room(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """How many tokens of each example an expert serves, (b)."""
        factor = self.capacity if self.training else self.eval_capacity
        if factor is None:
            return None
        n = torch.full((x.shape[0],), x.shape[1], device=x.device) if mask is None else mask.sum(1)
        return (
            (n.double() * (factor * self.top) / self.count).floor().clamp(min=1)
        )  # divided last, so that whole stays whole

    def _tell(
        self,
        scores: Tensor,
        shares: Tensor,
        chosen: Tensor,
        work: ExpertDispatch,
        mask: Tensor | None,
    ) -> None:
        real = torch.ones_like(chosen[..., 0], dtype=torch.bool) if mask is None else mask

        def balance() -> Tensor:
            first = F.one_hot(chosen[..., 0], self.count).to(shares.dtype)
            return self.balance * self.count * (_mean(first, real) * _mean(shares, real)).sum()

        if self.balance:
            record_aux("balance", balance, is_loss=True)
        if self.z:
            record_aux(
                "router_z",
                lambda: self.z * _mean(scores.logsumexp(-1, keepdim=True).square(), real)[0],
                is_loss=True,
            )
        record_aux("load", lambda: work.load)
        record_aux("dropped", lambda: real.sum() * self.top - work.load.sum())

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"top={self.top}, capacity={self.capacity}, eval_capacity={self.eval_capacity}"


def _mean(x: Tensor, real: Tensor) -> Tensor:
    """The mean of x (b n c) over the real tokens, (c); zero where there are none."""
    return (x * real[..., None]).sum((0, 1)) / real.sum().clamp(min=1)


def switch_experts(
    dim: int,
    experts: int,
    hidden: int | None = None,
    *,
    activation: str | Activation = "relu",
    bias: bool = False,
    capacity: float | None = 1.25,
    jitter: float = 1e-2,
    seed: int = 0,
) -> MixtureOfExperts:
    """Switch (Fedus et al. 2021, arXiv 2101.03961): one expert for each token, and a jitter on what the router reads."""
    bank = ExpertBank(partial(MLP, dim, hidden, activation=activation, bias=bias), experts)
    return MixtureOfExperts(bank, Router(dim, experts, jitter=jitter, seed=seed), capacity=capacity)


def top_k_experts(
    dim: int,
    experts: int,
    hidden: int | None = None,
    *,
    top: int = 2,
    activation: str | Activation = "relu",
    capacity: float | None = 2.0,
    noisy: bool = False,
    seed: int = 0,
) -> MixtureOfExperts:
    """The k best experts for each token: two as in GShard, or with `noisy` scores as Shazeer et al. 2017 had them."""
    bank = ExpertBank(partial(MLP, dim, hidden, activation=activation, bias=False), experts)
    return MixtureOfExperts(
        bank, Router(dim, experts, noisy=noisy, seed=seed), top=top, capacity=capacity
    )
