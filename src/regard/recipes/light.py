"""Around attention, and lighter for it."""

from __future__ import annotations

from regard.attentions import SoftmaxAttention
from regard.errors import check_int
from regard.mixer import Mixer, MultiHead
from regard.mixers import Branches, DynamicConv
from regard.registry import recipe


@recipe(
    "Wu et al. 2020",
    arxiv="2004.11886",
    family="hybrid",
    formula="[attention(x₁) ; convolution(x₂)],  x = [x₁ ; x₂]",
    example_kwargs={"kernel": 5},
)
def lite(
    dim: int,
    heads: int,
    *,
    kernel: int = 7,
    near: int | None = None,
    dynamic: bool = False,
    causal: bool = False,
) -> Mixer:
    """Lite Transformer: half of the channels attend to all tokens, the other half are convolved with their neighbours.

    heads     of each branch
    near      channels that are convolved, half of `dim` unless given
    dynamic   whether the token makes the kernel, or it is learned
    """
    check_int(2, dim=dim)
    near = dim // 2 if near is None else near
    check_int(1, near=near)
    if near >= dim:
        raise ValueError(
            f"near must be less than dim, which is {dim}, or nothing attends; it is {near}"
        )
    far = MultiHead(dim - near, heads, SoftmaxAttention(), causal=causal)
    return Branches([far, DynamicConv(near, heads, kernel, dynamic=dynamic, causal=causal)])
