"""The backends of softmax attention, and what `auto` would choose."""

from __future__ import annotations

import torch

from regard.backends.call import AttentionCall, make_call
from regard.backends.cpp import CppBackend
from regard.backends.flex import FlexBackend
from regard.backends.protocol import BackendChoice, Dispatcher
from regard.backends.reference import ReferenceBackend
from regard.backends.sdpa import SDPABackend
from regard.backends.sparse import SparseBackend
from regard.errors import check_int
from regard.pattern import Pattern

softmax_backends: Dispatcher[AttentionCall] = Dispatcher(
    "softmax", SDPABackend(), (CppBackend(), SparseBackend(), FlexBackend(), ReferenceBackend())
)


def explain(
    pattern: Pattern, n: int, *, heads: int = 8, width: int = 64, grad: bool = False
) -> BackendChoice:
    """The backend that `auto` chooses for self-attention in float32 on the CPU, without running it.

    Args:
        pattern: The pattern.
        n: Number of tokens.
        heads: Number of heads, times the batch size.
        width: Width of a head.
        grad: Whether a backward pass follows.
    """
    check_int(1, n=n, heads=heads, width=width)
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        x = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=grad)
        x = x.expand(1, heads, n, width)  # has the shape, but takes no memory
        return softmax_backends.choose(make_call(x, x, x, pattern=pattern))
