"""Variants that reproduce published checkpoints.

`regard.hf` uses them for converted models. `create` finds them by name, `list_recipes` leaves them
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from regard.attentions import LSHAttention, SoftmaxAttention
from regard.errors import check_choice, check_int
from regard.mixer import Attention, Mixer, MultiHead
from regard.mixers.xcit import CrossCovarianceAttention, LocalPatchInteraction, XCiTComponent
from regard.pattern import BlockTable, Chunks, Global, Keys, PerHead, Queries
from regard.prior import RepeatedKeys
from regard.registry import recipe
from regard.route import AngularHash


@recipe(
    "Zaheer et al. 2020",
    arxiv="2007.14062",
    family="sparse",
    formula="softmax over window ∪ first and last block ∪ random blocks",
    example_kwargs={"length": 48, "block": 4, "first_block_repeats": 2},
    listed=False,
)
def bigbird_hf(
    dim: int,
    heads: int,
    *,
    length: int,
    block: int = 64,
    first_block_repeats: int = 0,
    random_blocks: Sequence[Sequence[Sequence[int]]] | None = None,
    causal: bool = False,
) -> Mixer:
    """BigBird as in Hugging Face transformers: the first and the last block are global.

    Args:
        length: Maximum length, rounded up to whole blocks. The last block of it is global.
        block: Block size.
        first_block_repeats: How many more times the first block counts for non-global queries. In
            evaluation, transformers draws no random blocks and attends to the first block once more
            for each of them.
        random_blocks: Random blocks drawn elsewhere: for each head and query block, key block
            numbers.
    """
    check_int(1, length=length, block=block)
    check_int(0, first_block_repeats=first_block_repeats)
    end = ceil(length / block) * block
    last_block = Queries(end - block, end) | Keys(end - block, end)
    pattern = Chunks(block, back=1, ahead=1) | Global(block) | last_block
    if random_blocks is not None:
        if len(random_blocks) != heads:
            raise ValueError(f"random_blocks must have {heads} heads, not {len(random_blocks)}")
        tables = [BlockTable(block, tuple(map(tuple, head))) for head in random_blocks]
        pattern = pattern | PerHead(tuple(tables))
    prior = None
    if first_block_repeats:
        prior = RepeatedKeys(block, first_block_repeats + 1, end - block)
    return MultiHead(dim, heads, SoftmaxAttention(pattern, prior), bias=True, causal=causal)


@recipe(
    "Kitaev et al. 2020",
    arxiv="2001.04451",
    family="routed",
    formula="reformer with unscaled scores and keys counted once per round",
    example_kwargs={"buckets": 4, "chunk": 3, "rounds": 2},
    listed=False,
)
def reformer_hf(
    heads: int,
    head_dim: int,
    *,
    buckets: int = 64,
    chunk: int = 64,
    rounds: int = 4,
    causal: bool = False,
) -> Attention:
    """Reformer as in Hugging Face transformers.

    Scores are not divided by √e, a key that is met in several rounds counts several times, and
    without a causal mask tokens of other buckets in the same chunk are visible.
    """
    hashing = AngularHash(heads, head_dim, buckets=buckets, rounds=rounds)
    return LSHAttention(hashing, chunk=chunk, same_bucket=causal, once=False, scale=1.0)


@recipe(
    "El-Nouby et al. 2021",
    arxiv="2106.09681",
    family="attention-free",
    formula="V softmax(K̂ᵀ Q̂ / τ), or 3 × 3 neighbours",
    example_kwargs={"width": 5, "component": "covariance"},
    listed=False,
)
def xcit_component(
    dim: int, heads: int, *, width: int, component: str, norm: str = "batch", causal: bool = False
) -> Mixer:
    """One of the two components of an XCiT layer, without the layer norm before it.

    Args:
        width: Columns of the grid.
        component: "covariance" or "patches".
        norm: Norm between the convolutions of "patches", see `xcit`.
    """
    check_choice("component", component, ("covariance", "patches"))
    if component == "covariance":
        return XCiTComponent(dim, CrossCovarianceAttention(dim, heads), causal=causal)
    return XCiTComponent(dim, LocalPatchInteraction(dim, width, norm=norm), causal=causal)
