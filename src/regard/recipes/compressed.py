"""Low rank and compressed: fewer keys and values than tokens."""

from __future__ import annotations

from regard.attentions import Compressed, SoftmaxAttention
from regard.errors import check_whole
from regard.memory import Projected
from regard.mixer import Mixer, MultiHead
from regard.registry import recipe


@recipe(
    "Wang et al. 2020", arxiv="2006.04768", row="F1", formula="softmax(Q (E K)ᵀ / √e) F V", small={"length": 32, "rank": 5},
)  # fmt: skip
def linformer(
    dim: int, heads: int, *, length: int, rank: int | None = None, share: str = "heads", causal: bool = False
) -> Mixer:
    """Keys and values projected along the sequence, from `length` to `rank` of them.

    rank    256 unless given, or `length` where that is less
    share   "none": projections for each head; "heads": for all heads alike; "kv": one for keys and values too
    """
    check_whole(1, length=length)
    rank = min(256, length) if rank is None else rank
    return MultiHead(dim, heads, Compressed(Projected(length, rank, heads, share=share), SoftmaxAttention()), causal=causal)
