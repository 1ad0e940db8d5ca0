"""Attention to a shorter memory."""

from __future__ import annotations

from torch import Tensor

from regard.memory import Memory
from regard.mixer import Attention, State


class Compressed(Attention):
    """inner(q, memory(k, v)): any attention, over keys and values that were made fewer."""

    turnless = "its keys are mixtures of many positions, and no place is left to tell"

    def __init__(self, memory: Memory, inner: Attention) -> None:
        super().__init__()
        self.memory, self.inner = memory, inner
        self.can, self.length = memory.can & inner.can, memory.length

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None, state: State = None
    ) -> tuple[Tensor, State]:
        """See `Attention.attend`."""
        k, v, mask = self.memory(k, v, mask)
        return self.inner.attend(q, k, v, causal=causal, mask=mask, state=state)
