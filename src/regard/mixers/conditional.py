"""Attention with a prior for each task."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.attentions import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Can, Mixer, MultiHead, State, identity_values, merge_heads
from regard.prior import ConditionalPrior

Model = TypeVar("Model", bound=nn.Module)


def for_task(model: Model, task: int | Tensor) -> Model:
    """A copy of a model for one task of its `conditional_prior` layers, with the same parameters.

    Gradients of the copy reach the model, so each step of training may be for another task.

    Args:
        model: A model, stack or block with `TaskAttention` in it.
        task: Number of the task, or a tensor (b) with one for each example of the batch.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = deepcopy(model, shared)
    mixers = [m for m in other.modules() if isinstance(m, TaskAttention)]
    if not mixers:
        raise ValueError("the model has no layer with a task: build it with 'conditional_prior'")
    for mixer in mixers:
        mixer.task = mixer.for_task(task).task
    return other


class TaskAttention(Mixer):
    """softmax(q kᵀ / √e + M(z)) v with a learned vector z for each task (Pilault et al. 2021,
    arXiv 2009.09139).

    `mixer.for_task(task)` is a copy for that task which shares the parameters, and
    `regard.mixers.for_task(model, task)` is one of a whole model. The mixer itself is for task 0.

    Args:
        dim: Model width.
        heads: Number of heads.
        length: Maximum length.
        blocks: Blocks on the diagonal of the bias M.
        tasks: Number of tasks.
        causal: Attend to earlier tokens only.
    """

    def __init__(
        self, dim: int, heads: int, *, length: int, blocks: int, tasks: int, causal: bool = False
    ) -> None:
        check_int(1, length=length, blocks=blocks, tasks=tasks)
        if blocks > length:
            raise ValueError(f"blocks must be at most length={length}, not {blocks}")
        can = Can(
            length=f"its blocks were built for {length} positions",
            cross="its bias relates the positions of one sequence",
        )
        super().__init__(dim, can=can, causal=causal, length=length)
        self.heads = MultiHead(dim, heads, SoftmaxAttention(), causal=causal)
        self.vectors = nn.Embedding(tasks, dim)
        self.prior = ConditionalPrior(length, blocks, dim)
        self.task = torch.tensor(0, device="cpu")  # also under torch.device("meta"): not a buffer

    def for_task(self, task: int | Tensor) -> TaskAttention:
        """The mixer for a task: a number, or a tensor (b) with one for each example."""
        last = self.vectors.num_embeddings - 1
        is_int = isinstance(task, int) and not isinstance(task, bool)
        tasks = task if isinstance(task, Tensor) else torch.tensor(task if is_int else -1)
        valid = tasks.dtype == torch.long and tasks.dim() <= 1 and tasks.numel() > 0
        if not valid or tasks.min() < 0 or tasks.max() > last:
            raise ValueError(
                f"task must be a number from 0 to {last}, or a tensor (b) of them, not {task!r}"
            )
        other = copy(self)
        other.task = tasks
        return other

    def initial_state(self) -> State:
        """Empty KV cache."""
        return self.heads.initial_state()

    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        state: State,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """(b n d) -> (b n d)."""
        if self.task.dim() and len(self.task) != x.shape[0]:
            raise ValueError(
                f"The batch has {x.shape[0]} examples but for_task got {len(self.task)} tasks."
            )
        y, state = self._attention()(
            *self.heads.project(x, None),
            causal=self.causal,
            mask=mask,
            state=state,
            attn_mask=attn_mask,
        )
        return self.heads.out(merge_heads(y)), state

    def weights(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention map for the task."""
        q, k, v = self.heads.project(x, None)
        return self._attention()(
            q, k, identity_values(k, v), causal=self.causal, mask=mask, attn_mask=attn_mask
        )[0]

    def _attention(self) -> SoftmaxAttention:
        weight = self.vectors.weight
        return SoftmaxAttention(
            prior=self.prior.for_task(weight[self.task.to(weight.device).reshape(-1)])
        )
