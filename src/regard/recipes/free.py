"""Without attention: no queries, or no keys, or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from regard.errors import check_choice, check_int, check_single_head, did_you_mean
from regard.mixer import Mixer, check_heads
from regard.mixers import (
    AFT,
    AveragePool,
    DynamicConv,
    FourierMixer,
    GatedMLP,
    Synthesizer,
    TokenMLP,
    XCiT,
)
from regard.mixers.aft import KernelBias, PositionBias
from regard.mixers.synthesizer import (
    DenseLogits,
    DotProductLogits,
    FactorisedDenseLogits,
    FactorisedRandomLogits,
    RandomLogits,
    SynthesizerLogits,
)
from regard.mixers.xcit import CrossCovarianceAttention, LocalPatchInteraction, XCiTComponent
from regard.registry import recipe


# ---------------------------------------------------------------------------------------------- synthesizers
@recipe(
    "Tay et al. 2020",
    arxiv="2005.00743",
    family="attention-free",
    formula="softmax(W₂ relu(W₁ x + b₁) + b₂) V",
    example_kwargs={"length": 32},
)
def synthesizer_dense(dim: int, heads: int, *, length: int, causal: bool = False) -> Mixer:
    """Each token says by itself how much it wants of each of `length` positions, and asks no other."""
    return _synthesizer(dim, heads, length, ("dense",), causal)


@recipe(
    "Tay et al. 2020",
    arxiv="2005.00743",
    family="attention-free",
    formula="softmax(R) V",
    example_kwargs={"length": 32},
)
def synthesizer_random(
    dim: int, heads: int, *, length: int, learned: bool = True, seed: int = 0, causal: bool = False
) -> Mixer:
    """A table of logits, drawn by `seed`, that no token has a say in.

    learned   False: the table stays as it was drawn
    """
    return _synthesizer(dim, heads, length, ("random",), causal, learned=learned, seed=seed)


@recipe(
    "Tay et al. 2020",
    arxiv="2005.00743",
    family="attention-free",
    formula="softmax(tile(A x) repeat(B x)) V, or softmax(R₁ R₂ᵀ) V",
    example_kwargs={"length": 32},
)
def synthesizer_factorised(
    dim: int,
    heads: int,
    *,
    length: int,
    kind: str = "dense",
    factors: tuple[int, int] | None = None,
    rank: int | None = None,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """The same with fewer parameters: a row of logits is a product of two short rows, or the table one of two thin tables.

    kind      "dense" or "random"
    factors   dense: the lengths of the two rows, whose product is at least `length`; near its root unless given
    rank      random: columns of the two tables, 8 unless given
    """
    check_choice("kind", kind, ("dense", "random"))
    if kind == "random" and factors is not None:
        raise ValueError("factors are for kind='dense'; kind='random' has a rank")
    if kind == "dense" and rank is not None:
        raise ValueError("rank is for kind='random'; kind='dense' has factors")
    return _synthesizer(
        dim, heads, length, (f"factorised_{kind}",), causal, factors=factors, rank=rank, seed=seed
    )


@recipe(
    "Tay et al. 2020",
    arxiv="2005.00743",
    family="attention-free",
    formula="softmax(Σ_p α_p S_p) V,  α = softmax(a)",
    example_kwargs={"length": 32},
)
def synthesizer_mixture(
    dim: int,
    heads: int,
    *,
    length: int,
    parts: Sequence[str] = ("dense", "vanilla"),
    rank: int | None = None,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Logits of several kinds, in shares that are learned.

    parts   any of "dense", "random", "factorised_dense", "factorised_random", "vanilla"
    rank    of the part "factorised_random", 8 unless given
    """
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise ValueError(f"parts must be a sequence of names, not {parts!r}")
    if rank is not None and "factorised_random" not in parts:
        raise ValueError(f"rank is for the part 'factorised_random', which is not among {parts!r}")
    return _synthesizer(dim, heads, length, parts, causal, rank=rank, seed=seed)


def _synthesizer(
    dim: int,
    heads: int,
    length: int,
    parts: Sequence[str],
    causal: bool,
    *,
    learned: bool = True,
    factors: tuple[int, int] | None = None,
    rank: int | None = None,
    seed: int = 0,
) -> Mixer:
    check_heads(dim, heads)
    rank = 8 if rank is None else rank
    check_int(1, length=length, rank=rank)
    check_int(0, seed=seed)
    known: dict[
        str, Callable[[int], SynthesizerLogits]
    ] = {  # the i-th part draws by seed + i, lest two of a kind be equal
        "dense": lambda i: DenseLogits(dim, heads, length),
        "random": lambda i: RandomLogits(heads, length, learned=learned, seed=seed + i),
        "factorised_dense": lambda i: FactorisedDenseLogits(dim, heads, length, factors),
        "factorised_random": lambda i: FactorisedRandomLogits(heads, length, rank, seed=seed + i),
        "vanilla": lambda i: DotProductLogits(dim, heads),
    }
    for part in parts:
        if part not in known:
            raise ValueError(f"no part {part!r}: {did_you_mean(str(part), known)}")
    return Synthesizer(dim, heads, [known[part](i) for i, part in enumerate(parts)], causal=causal)


# ---------------------------------------------------------------------------------------------- no heads at all
@recipe(
    "Lee-Thorp et al. 2021", arxiv="2105.03824", family="attention-free", formula="Re F_n F_d x"
)
def fnet(dim: int, heads: int = 1, *, causal: bool = False) -> Mixer:
    """FNet: the real part of the Fourier transform over tokens and width.  There are no heads: `heads` must be 1."""
    check_single_head("fnet", heads)
    return FourierMixer(dim, causal=causal)


@recipe(
    "Tolstikhin et al. 2021",
    arxiv="2105.01601",
    family="attention-free",
    formula="W₂ gelu(W₁ x) over tokens",
    example_kwargs={"length": 32},
)
def mlp_mixer(
    dim: int, heads: int = 1, *, length: int, hidden: int | None = None, causal: bool = False
) -> Mixer:
    """MLP-Mixer's token mixing: two layers over positions, the same for each channel.  There are no heads: it must be 1.

    hidden   the width between the two layers, half of `length` unless given
    """
    check_single_head("mlp_mixer", heads)
    check_int(1, length=length)
    return TokenMLP(dim, length, max(1, length // 2) if hidden is None else hidden, causal=causal)


@recipe(
    "Liu et al. 2021",
    arxiv="2105.08050",
    family="attention-free",
    formula="V (z₁ ⊙ (W norm(z₂) + b)),  z = gelu(U x)",
    example_kwargs={"length": 32},
)
def gmlp(
    dim: int, heads: int = 1, *, length: int, hidden: int | None = None, causal: bool = False
) -> Mixer:
    """gMLP: half of the channels, mixed over positions, gate the other half.  There are no heads: `heads` must be 1.

    hidden   the width that is split in two, 6 · dim unless given
    """
    check_single_head("gmlp", heads)
    return GatedMLP(dim, length, _six_times(dim, hidden), causal=causal)


@recipe(
    "Liu et al. 2021",
    arxiv="2105.08050",
    family="attention-free",
    formula="V (z₁ ⊙ (W norm(z₂) + b + attention(x))),  z = gelu(U x)",
    example_kwargs={"length": 32, "attention": 4},
)
def amlp(
    dim: int,
    heads: int = 1,
    *,
    length: int,
    hidden: int | None = None,
    attention: int = 64,
    causal: bool = False,
) -> Mixer:
    """aMLP: gMLP with a tiny attention of one head, added inside the gate.  `heads` must be 1.

    attention   the width of the tiny attention
    hidden      the width that is split in two, 6 · dim unless given
    """
    check_single_head("amlp", heads)
    check_int(1, attention=attention)
    return GatedMLP(dim, length, _six_times(dim, hidden), attention=attention, causal=causal)


@recipe(
    "Zhai et al. 2021",
    arxiv="2105.14103",
    family="attention-free",
    formula="σ(q_i) ⊙ Σ_j exp(k_j + w_ij) v_j / Σ_j exp(k_j + w_ij)",
    example_kwargs={"length": 32, "rank": 4},
)
def aft(
    dim: int,
    heads: int = 1,
    *,
    length: int | None,
    rank: int | None = None,
    window: int | None = None,
    kernel: int | None = None,
    causal: bool = False,
) -> Mixer:
    """AFT: keys weigh values channel by channel, queries gate.  Each channel is a head of its own: but for AFT-conv, `heads`
    must be 1.

    length   AFT-full: biases w for so many positions; None: AFT-simple, which has none
    rank     of AFT-full: w is the product of two tables of so many columns, 128 unless given
    window   AFT-local: w is zero where |i − j| >= window
    kernel   AFT-conv: w depends on i − j alone, a kernel of so many tokens for each of the `heads`; needs no length
    """
    if kernel is not None:
        if (length, rank, window) != (None, None, None):
            raise ValueError(
                "with a kernel (AFT-conv) there is no table: length must be None, rank and window left out"
            )
        check_heads(dim, heads)
        return AFT(dim, KernelBias(heads, kernel, causal=causal), causal=causal)
    check_single_head("aft", heads)
    if length is not None:
        return AFT(dim, PositionBias(length, 128 if rank is None else rank, window), causal=causal)
    if rank is not None or window is not None:
        raise ValueError(
            "rank and window are for the biases of AFT-full and AFT-local; without a length there are none"
        )
    return AFT(dim, causal=causal)


@recipe(
    "Yu et al. 2022",
    arxiv="2111.11418",
    family="attention-free",
    formula="mean of the neighbours − x",
)
def average_pool(
    dim: int, heads: int = 1, *, window: int = 3, width: int | None = None, causal: bool = False
) -> Mixer:
    """PoolFormer's mixing: the mean over a window, less the token itself.  There are no heads: `heads` must be 1.

    window   tokens in a line, or cells to each side of a square on a grid; odd, but for a causal line
    width    columns of the grid; None: a line
    """
    check_single_head("average_pool", heads)
    return AveragePool(dim, window, width=width, causal=causal)


# ---------------------------------------------------------------------------------------------- with heads
@recipe(
    "El-Nouby et al. 2021",
    arxiv="2106.09681",
    family="attention-free",
    formula="V softmax(K̂ᵀ Q̂ / τ), then 3 × 3 neighbours",
    example_kwargs={"width": 5},
)
def xcit(
    dim: int,
    heads: int,
    *,
    width: int,
    norm: str = "example",
    only: str | None = None,
    causal: bool = False,
) -> Mixer:
    """XCiT: channels attend to channels over all tokens, then each token to its neighbours on a grid of `width` columns.

    norm   between the two convolutions: "batch", as in the paper, in training mixes examples; "example" does not
    only   "covariance" or "patches": one of the two alone, and without the norm before it, for blocks that bring their own
    """
    if only is None:
        return XCiT(dim, heads, width, norm=norm, causal=causal)
    check_choice("only", only, ("covariance", "patches"))
    part = (
        CrossCovarianceAttention(dim, heads)
        if only == "covariance"
        else LocalPatchInteraction(dim, width, norm=norm)
    )
    return XCiTComponent(dim, part, causal=causal)


@recipe(
    "Wu et al. 2019",
    arxiv="1901.10430",
    family="attention-free",
    formula="Σ_j softmax_j(W z_i) z_{i+j},  z = GLU(W x)",
    example_kwargs={"kernel": 5},
)
def dynamic_conv(dim: int, heads: int, *, kernel: int = 7, causal: bool = False) -> Mixer:
    """Dynamic convolution: each token makes the kernel with which it looks at its neighbours, one for each head."""
    return DynamicConv(dim, heads, kernel, causal=causal)


def _six_times(dim: int, hidden: int | None) -> int:
    check_int(1, dim=dim)
    return 6 * dim if hidden is None else hidden
