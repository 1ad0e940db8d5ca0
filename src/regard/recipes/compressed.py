"""Low rank and compressed: fewer keys and values than tokens."""

from __future__ import annotations

from regard.attentions import Compressed, SoftmaxAttention
from regard.memory import Projected
from regard.mixer import Mixer, MultiHead
from regard.registry import recipe


@recipe(
    "Wang et al. 2020", arxiv="2006.04768", row="F1", formula="softmax(Q (E K)ᵀ / √e) F V", small={"length": 32, "rank": 5},
)  # fmt: skip
def linformer(dim: int, heads: int, *, length: int, rank: int = 256, share: str = "heads", causal: bool = False) -> Mixer:
    """Keys and values projected along the sequence, from `length` to `rank` of them.

    share   "none": projections for each head; "heads": for all heads alike; "kv": one for keys and values too
    """
    return MultiHead(dim, heads, Compressed(Projected(length, rank, heads, share=share), SoftmaxAttention()), causal=causal)
