"""Token mixing without attention: no queries, or no keys, or neither."""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import check_choice, check_int, did_you_mean
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
from regard.registry import recipe


@recipe(
    "Tay et al. 2020",
    arxiv="2005.00743",
    family="attention-free",
    formula="softmax(W₂ relu(W₁ x + b₁) + b₂) V",
    example_kwargs={"length": 32},
)
def synthesizer_dense(dim: int, heads: int, *, length: int, causal: bool = False) -> Mixer:
    """Dense Synthesizer: each token predicts its attention weights over `length` positions by
    itself.

    Args:
        length: Maximum length.
    """
    _check_synthesizer(dim, heads, length)
    return Synthesizer(dim, heads, [DenseLogits(dim, heads, length)], causal=causal)


@recipe(
    "Tay et al. 2020",
    arxiv="2005.00743",
    family="attention-free",
    formula="softmax(R) V",
    example_kwargs={"length": 32},
)
def synthesizer_random(
    dim: int,
    heads: int,
    *,
    length: int,
    learned: bool = True,
    seed: int = 0,
    causal: bool = False,
) -> Mixer:
    """Random Synthesizer: a table of attention logits that does not depend on the tokens.

    Args:
        length: Maximum length.
        learned: If False, the table stays as it was drawn.
        seed: Seed of the table.
    """
    _check_synthesizer(dim, heads, length, seed=seed)
    logits = RandomLogits(heads, length, learned=learned, seed=seed)
    return Synthesizer(dim, heads, [logits], causal=causal)


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
    """Factorised Synthesizer: the dense or random logits as a product of two small factors.

    Args:
        length: Maximum length.
        kind: "dense" or "random".
        factors: kind="dense": lengths of the two factors, whose product is at least `length`.
            Default: near its root.
        rank: kind="random": rank of the table. Default: 8.
        seed: kind="random": seed of the table.
    """
    check_choice("kind", kind, ("dense", "random"))
    _check_synthesizer(dim, heads, length, rank=rank, seed=seed)
    logits: SynthesizerLogits
    if kind == "dense":
        if rank is not None:
            raise ValueError("rank is for kind='random'; kind='dense' has factors")
        logits = FactorisedDenseLogits(dim, heads, length, factors)
    else:
        if factors is not None:
            raise ValueError("factors are for kind='dense'; kind='random' has a rank")
        logits = FactorisedRandomLogits(heads, length, rank or 8, seed=seed)
    return Synthesizer(dim, heads, [logits], causal=causal)


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
    """Mixture of Synthesizers: a learned weighted sum of several kinds of logits.

    Args:
        length: Maximum length.
        parts: Any of "dense", "random", "factorised_dense", "factorised_random" and "vanilla"
            (dot products).
        rank: Rank of the part "factorised_random". Default: 8.
        seed: Seed of the random parts.
    """
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not parts:
        raise ValueError(f"parts must be a list of names, not {parts!r}")
    if rank is not None and "factorised_random" not in parts:
        raise ValueError(f"rank is for the part 'factorised_random', which is not in {parts!r}")
    _check_synthesizer(dim, heads, length, rank=rank, seed=seed)

    def build(part: str, seed: int) -> SynthesizerLogits:
        match part:
            case "dense":
                return DenseLogits(dim, heads, length)
            case "random":
                return RandomLogits(heads, length, seed=seed)
            case "factorised_dense":
                return FactorisedDenseLogits(dim, heads, length)
            case "factorised_random":
                return FactorisedRandomLogits(heads, length, rank or 8, seed=seed)
            case _:
                return DotProductLogits(dim, heads)

    kinds = ("dense", "random", "factorised_dense", "factorised_random", "vanilla")
    for part in parts:
        if part not in kinds:
            raise ValueError(f"no part {part!r}: {did_you_mean(str(part), kinds)}")
    # every part has a seed of its own, so that two random parts differ
    logits = [build(part, seed + i) for i, part in enumerate(parts)]
    return Synthesizer(dim, heads, logits, causal=causal)


def _check_synthesizer(
    dim: int, heads: int, length: int, *, rank: int | None = None, seed: int = 0
) -> None:
    check_heads(dim, heads)
    check_int(1, length=length, rank=8 if rank is None else rank)
    check_int(0, seed=seed)


@recipe(
    "Lee-Thorp et al. 2021",
    arxiv="2105.03824",
    family="attention-free",
    formula="Re F_n F_d x",
)
def fnet(dim: int, *, causal: bool = False) -> Mixer:
    """FNet: the real part of a Fourier transform over tokens and channels."""
    return FourierMixer(dim, causal=causal)


@recipe(
    "Tolstikhin et al. 2021",
    arxiv="2105.01601",
    family="attention-free",
    formula="W₂ gelu(W₁ x) over tokens",
    example_kwargs={"length": 32},
)
def mlp_mixer(dim: int, *, length: int, hidden: int | None = None, causal: bool = False) -> Mixer:
    """MLP-Mixer's token mixing: a two-layer MLP over positions, the same for each channel.

    Args:
        length: Maximum length.
        hidden: Hidden width. Default: length / 2.
    """
    check_int(1, length=length)
    hidden = max(1, length // 2) if hidden is None else hidden
    return TokenMLP(dim, length, hidden, causal=causal)


@recipe(
    "Liu et al. 2021",
    arxiv="2105.08050",
    family="attention-free",
    formula="V (z₁ ⊙ (W norm(z₂) + b)),  z = gelu(U x)",
    example_kwargs={"length": 32},
)
def gmlp(dim: int, *, length: int, hidden: int | None = None, causal: bool = False) -> Mixer:
    """gMLP: half of the channels, mixed over positions, gate the other half.

    Args:
        length: Maximum length.
        hidden: Hidden width, of which half is the gate. Default: 6 · dim.
    """
    check_int(1, dim=dim)
    return GatedMLP(dim, length, 6 * dim if hidden is None else hidden, causal=causal)


@recipe(
    "Liu et al. 2021",
    arxiv="2105.08050",
    family="attention-free",
    formula="V (z₁ ⊙ (W norm(z₂) + b + attention(x))),  z = gelu(U x)",
    example_kwargs={"length": 32, "attention": 4},
)
def amlp(
    dim: int,
    *,
    length: int,
    hidden: int | None = None,
    attention: int = 64,
    causal: bool = False,
) -> Mixer:
    """aMLP: gMLP with a small single-head attention added inside the gate.

    Args:
        length: Maximum length.
        hidden: Hidden width, of which half is the gate. Default: 6 · dim.
        attention: Width of the attention.
    """
    check_int(1, dim=dim, attention=attention)
    hidden = 6 * dim if hidden is None else hidden
    return GatedMLP(dim, length, hidden, attention=attention, causal=causal)


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
    """Attention Free Transformer: keys weigh values channel by channel, and queries gate the
    result.

    Only AFT-conv has heads.

    Args:
        length: Maximum length, for the position biases w of AFT-full. None: no biases (AFT-simple).
        rank: Rank of the table of biases. Default: 128.
        window: AFT-local: w_ij is zero if |i − j| >= window, so w covers ±(window − 1) tokens.
        kernel: AFT-conv: w_ij depends on i − j only, a kernel of this size for each head. Requires
            length=None.
    """
    if kernel is not None:
        if (length, rank, window) != (None, None, None):
            raise ValueError("kernel (AFT-conv) requires length=None and no rank or window")
        check_heads(dim, heads)
        return AFT(dim, KernelBias(heads, kernel, causal=causal), causal=causal)
    if length is not None:
        bias = PositionBias(length, 128 if rank is None else rank, window)
        return AFT(dim, bias, causal=causal)
    if rank is not None or window is not None:
        raise ValueError("rank and window are for AFT-full and AFT-local: pass a length")
    return AFT(dim, causal=causal)


@recipe(
    "Yu et al. 2022",
    arxiv="2111.11418",
    family="attention-free",
    formula="mean of the neighbours − x",
)
def average_pool(
    dim: int,
    *,
    window: int = 3,
    width: int | None = None,
    causal: bool = False,
) -> Mixer:
    """PoolFormer's token mixing: average pooling minus the token itself.

    Args:
        window: Size of the window in tokens (not on each side), or rows and columns on a grid; odd,
            except for a causal sequence.
        width: Columns of the grid. Default: a sequence.
    """
    return AveragePool(dim, window, width=width, causal=causal)


@recipe(
    "El-Nouby et al. 2021",
    arxiv="2106.09681",
    family="attention-free",
    formula="V softmax(K̂ᵀ Q̂ / τ), then 3 × 3 neighbours",
    example_kwargs={"width": 5},
)
def xcit(
    dim: int, heads: int, *, width: int, norm: str = "instance", causal: bool = False
) -> Mixer:
    """XCiT: cross-covariance attention between channels, then convolutions over the neighbours on a
    grid.

    Args:
        width: Columns of the grid.
        norm: Norm between the two convolutions. "batch": batch norm, as in the paper. "instance":
            over the tokens of each example, so that examples do not influence each other in
            training.
    """
    return XCiT(dim, heads, width, norm=norm, causal=causal)


@recipe(
    "Wu et al. 2019",
    arxiv="1901.10430",
    family="attention-free",
    formula="Σ_j softmax_j(W z_i) z_{i+j},  z = GLU(W x)",
    example_kwargs={"kernel": 5},
)
def dynamic_conv(dim: int, heads: int, *, kernel: int = 7, causal: bool = False) -> Mixer:
    """Dynamic convolution: each token predicts the kernel that is applied to its neighbours, one
    per head.

    Args:
        kernel: Kernel size.
    """
    return DynamicConv(dim, heads, kernel, causal=causal)
