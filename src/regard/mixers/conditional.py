"""Attention with a prior for each task."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Can, Mixer, MultiHead, State, identity_values, merge_heads
from regard.prior import ConditionalPrior


class TaskAttention(Mixer):
    """softmax(q kᵀ / √e + M(z)) v with z the learned vector of a task (Pilault et al. 2021, arXiv 2009.09139).

    `mixer.of(task)` is the same mixer, with the same parameters, for that task: a number, or one for each example, (b).
    Called as it is, it serves task 0.
    """

    def __init__(
        self, dim: int, heads: int, *, length: int, blocks: int, tasks: int, causal: bool = False
    ) -> None:
        check_int(1, length=length, blocks=blocks, tasks=tasks)
        if blocks > length:
            raise ValueError(f"blocks must be at most length, {length}, not {blocks}")
        can = Can(
            length=f"its blocks were built for {length} positions",
            cross="its blocks pair the positions of one sequence",
        )
        super().__init__(dim, can=can, causal=causal, length=length)
        self.heads = MultiHead(dim, heads, SoftmaxAttention(), causal=causal)
        self.vectors = nn.Embedding(tasks, dim)
        self.prior = ConditionalPrior(length, blocks, dim)
        self.task = torch.tensor(0)

    def of(self, task: int | Tensor) -> TaskAttention:
        """For this task, or for these, one for each example."""
        tasks = self.vectors.num_embeddings
        whole = isinstance(task, int) and not isinstance(task, bool)
        found = task if isinstance(task, Tensor) else torch.tensor(task if whole else -1)
        if (
            found.dtype != torch.long
            or found.dim() > 1
            or found.numel() == 0
            or found.min() < 0
            or found.max() >= tasks
        ):
            raise ValueError(
                f"task must be a number from 0 to {tasks - 1}, or a tensor of one for each example, not {task!r}"
            )
        other = copy(self)
        other.task = found
        return other

    def initial_state(self) -> State:
        """An empty cache of keys and values."""
        return self.heads.initial_state()

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        if self.task.dim() and len(self.task) != x.shape[0]:
            raise ValueError(f"there are {x.shape[0]} examples, and the tasks of {len(self.task)}")
        y, state = self._attention()(
            *self.heads.project(x, None), causal=self.causal, mask=mask, state=state
        )
        return self.heads.out(merge_heads(y)), state

    def weights(self, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """The map of the task."""
        q, k, v = self.heads.project(x, None)
        return self._attention()(q, k, identity_values(k, v), causal=self.causal, mask=mask)[0]

    def _attention(self) -> SoftmaxAttention:
        weight = self.vectors.weight
        return SoftmaxAttention(
            prior=self.prior.for_task(weight[self.task.to(weight.device).reshape(-1)])
        )
