"""Cost formulas, for modules that are sums of parts, or that a run on the meta device cannot count.

In place of a count:

- `LSHAttention`, `RoutedAttention`: the groups depend on the data, and the fused kernel saves less
  than the code that runs on the meta device.
- `MixtureOfExperts`, `UniversalStack`, `EarlyExitStack`: how much is computed depends on the data.
- `TransformerXLBias`: it reads the largest distance from the positions.
- `AdditiveAttention`, `SoftVisualAttention`, `FeedbackStack`: loops that are too long to trace.
- `LinearAttention`, `Recurrence`, `SegmentStack`, `BPTransformer`: long sequences are extrapolated
  from two short ones.
- `ReversibleStack`: its backward pass does not run on the meta device.
- `RotaryEmbedding`: elementwise work, which is not counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil, exp, log2, sqrt

from torch import nn

from regard.attentions import AdditiveAttention, LinearAttention, LSHAttention, RoutedAttention
from regard.attentions.additive import MAX_ELEMENTS
from regard.block import Block, Layer
from regard.ffn import MixtureOfExperts, ShardedExpertBank
from regard.measure.meta import count_on_meta, head_shape, without_attention
from regard.measure.module_cost import (
    CallShape,
    ModuleCost,
    formula,
    matmul_cost,
    module_cost,
    sum_layers,
    sum_parts,
)
from regard.mixer import MultiHead
from regard.mixers.bp_transformer import BPTransformer
from regard.mixers.recurrence import Recurrence
from regard.mixers.show_attend import SoftVisualAttention
from regard.models.heads import LMHead, MaskedLMHead, ModelHead, PredictionHead
from regard.models.model import Backbone, Decoder, Encoder, Seq2Seq
from regard.position import TransformerXLBias
from regard.position.rotary import RotaryEmbedding
from regard.route import KMeans
from regard.stack import (
    CompressiveMemory,
    EarlyExitStack,
    FeedbackStack,
    HiddenStateMemory,
    PerLayerContextStack,
    ReversibleStack,
    SegmentStack,
    SequentialStack,
    SharedStack,
    UniversalStack,
)
from regard.stack.memory_attention import find_memory_attention


# ------------------------------------------------------------ models and blocks
@formula(Encoder, Decoder, is_breakdown=True)
def _model(module: Encoder | Decoder, shape: CallShape) -> ModuleCost:
    return sum_parts(
        **module_cost(module.backbone, shape).parts,
        **_head(module.head, shape, module.backbone.stack.out_dim),
    )


@formula(Seq2Seq, is_breakdown=True)
def _seq2seq(module: Seq2Seq, shape: CallShape) -> ModuleCost:
    """m source tokens and n target tokens.

    The streaming state includes the encoder output (b m d).
    """
    source = module_cost(module.encoder, shape.with_length(shape.m))
    target = module_cost(module.decoder, shape)
    parts = {f"encoder {name}": part.without_state() for name, part in source.parts.items()}
    parts |= {f"decoder {name}": part for name, part in target.parts.items()}
    total = sum_parts(**parts, **_head(module.head, shape, module.decoder.stack.dim))
    context = shape.b * shape.m * module.decoder.stack.dim
    return replace(total, state=total.state + context if total.state else 0)


@formula(Backbone, is_breakdown=True)
def _backbone(module: Backbone, shape: CallShape) -> ModuleCost:
    """Embedding, layers and final norm. If one layer cannot stream, no layer has a state."""
    stack = module_cost(module.stack, shape)
    layers = dict(stack.parts) or {"stack": stack}
    if not stack.state:
        layers = {name: part.without_state() for name, part in layers.items()}
    norm = {} if module.norm is None else {"norm": module_cost(module.norm, shape)}
    return sum_parts(embedding=module_cost(module.embed, shape), **layers, **norm)


def _head(head: ModelHead | None, shape: CallShape, dim: int) -> dict[str, ModuleCost]:
    """The head, and the loss, which saves log-probabilities and an int64 target for each token."""
    if head is None:
        return {}
    inner = head.lm_head if isinstance(head, MaskedLMHead) else head
    outputs = 0
    if isinstance(inner, LMHead):
        outputs = shape.tokens * inner.proj.out_features
    elif isinstance(inner, PredictionHead):
        outputs = (shape.b if inner.pools else shape.tokens) * inner.out.out_features
    loss = ModuleCost(saved=outputs + 2 * shape.tokens)
    return {"head": module_cost(head, replace(shape, e=dim)), "loss": loss}


@formula(Block, is_breakdown=True)
def _block(module: Block, shape: CallShape) -> ModuleCost:
    """Mixer, cross-attention over m tokens, and feed-forward layer, each with its residual."""
    own = replace(shape.with_length(shape.n), e=module.dim)
    names = ("mixer", "ffn", "mixer_residual", "cross_residual", "ffn_residual")
    parts = {name: getattr(module, name) for name in names}
    costs = {name: module_cost(part, own) for name, part in parts.items() if part is not None}
    if module.cross is not None:
        costs["cross"] = module_cost(module.cross, shape)
    return sum_parts(**costs)


@formula(MultiHead, is_breakdown=True)
def _multi_head(module: MultiHead, shape: CallShape) -> ModuleCost:
    """The projections (with rotary embedding), and the attention."""
    attend = module_cost(module.inner, head_shape(module, shape))
    if isinstance(
        module.inner, LinearAttention
    ):  # whose kernel does not copy heads, as products do
        project = count_on_meta(without_attention(module), shape).without_state()
        return sum_parts(project=project, attend=attend)
    whole = count_on_meta(module, shape)
    if isinstance(module.q, nn.Identity):  # queries, keys and values are the tokens themselves
        return whole
    return sum_parts(project=whole + -1 * attend, attend=attend)


# ------------------------------------------------------------ stacks
@formula(SequentialStack, PerLayerContextStack, is_breakdown=True)
def _sequential(module: SequentialStack | PerLayerContextStack, shape: CallShape) -> ModuleCost:
    return sum_layers(module.layers, shape)


@formula(SharedStack, is_breakdown=True)
def _shared_stack(module: SharedStack, shape: CallShape) -> ModuleCost:
    return sum_layers((module.layers[i] for i in module.order), shape)


@formula(UniversalStack)
def _universal(module: UniversalStack, shape: CallShape) -> ModuleCost:
    """All steps are counted. With halting, tokens may need fewer."""
    step = module_cost(module.layer, shape)
    if module.halting is not None:
        weighted_sum = matmul_cost(1, shape.tokens * module.dim, 1, 1)
        step = step + module_cost(module.halting.proj, shape) + weighted_sum
    return step * module.steps


@formula(EarlyExitStack)
def _early_exit(module: EarlyExitStack, shape: CallShape) -> ModuleCost:
    """All layers and all heads are counted, as in training.

    In evaluation, tokens may leave earlier.
    """
    read = replace(shape if module.per_token else shape.with_length(1), e=module.dim)
    heads = {
        f"exit {at}": module_cost(head, read)
        for at, head in zip(module.exits, module.heads, strict=True)
    }
    return sum_parts(**sum_layers(module.layers, shape).parts, **heads)


@formula(ReversibleStack)
def _reversible(module: ReversibleStack, shape: CallShape) -> ModuleCost:
    """Only the two output streams are saved. The backward pass runs each half again."""
    parts = {
        name: replace(
            half,
            backward=half.backward + half.forward,
            recomputed=half.recomputed + half.forward,
            saved=0,
        )
        for name, half in sum_layers(module.sublayers, shape).parts.items()
    }
    return sum_parts(**parts) + ModuleCost(saved=2 * shape.tokens * module.dim)


@formula(FeedbackStack)
def _feedback(module: FeedbackStack, shape: CallShape) -> ModuleCost:
    """Token by token: each attends to at most `span` memories before it, and not to itself."""
    own = replace(shape.with_length(shape.n), e=module.dim)
    reach = shape.n if module.span is None else module.span
    full = min(shape.n - 1, reach)
    pairs = full * (full + 1) // 2 + max(0, shape.n - 1 - full) * reach
    parts = {}
    for i, layer in enumerate(module.layers):
        look = find_memory_attention(layer)
        assert look is not None
        heads = head_shape(look.mixer, own)
        scores = matmul_cost(heads.bh * pairs, 1, heads.e, 1, saved=0)
        values = matmul_cost(heads.bh * pairs, 1, 1, heads.f, saved=0)
        rest = [look.mixer.q, look.mixer.out, layer.mixer_residual, layer.ffn, layer.ffn_residual]
        cost = sum((module_cost(part, own) for part in rest if part is not None), scores + values)
        if layer.cross is not None and layer.cross_residual is not None:
            cost += module_cost(layer.cross, shape) + module_cost(layer.cross_residual, own)
        if i == 0 or not module.share_kv:  # memories are projected by every layer, or once for all
            unused = ModuleCost(module_cost(look.mixer.q, own).forward)  # queries of memories
            cost += module_cost(look.mixer.k, own) + module_cost(look.mixer.v, own) + unused
            numbers = shape.b * (heads.kv_heads or heads.h) * (heads.e + heads.f)
            cost = cost.with_state(shape.n, partial(_cache_size, numbers, reach))
        parts[f"layer {i}"] = cost
    memory = matmul_cost(1, shape.tokens * module.dim, len(module.weights), 1)
    return sum_parts(**parts, memory=memory)


def _cache_size(numbers: int, reach: int, n: int) -> int:
    """Size of a cache of at most `reach` tokens after n tokens."""
    return numbers * min(n, reach)


@formula(SegmentStack, is_breakdown=True)
def _segments(module: SegmentStack, shape: CallShape) -> ModuleCost:
    """Once the memories are full, every segment costs the same."""
    sizes = [0]
    for memory in module.memories:
        if isinstance(memory, HiddenStateMemory):
            sizes.append(memory.size)
        elif isinstance(memory, CompressiveMemory):
            sizes.append(memory.memory_length + memory.compressed_length * memory.compression.rate)
    return _extrapolate(
        module, shape, module.segment_length, 2 + ceil(max(sizes) / module.segment_length)
    )


# ------------------------------------------------------------ loops over chunks
@formula(LinearAttention, is_breakdown=True)
def _linear_attention(module: LinearAttention, shape: CallShape) -> ModuleCost:
    return _extrapolate(module, shape, module.chunk if shape.causal else shape.n, 1)


@formula(Recurrence, is_breakdown=True)
def _recurrence(module: Recurrence, shape: CallShape) -> ModuleCost:
    return _extrapolate(module, shape, module.inner.chunk, 1)


def _extrapolate(module: nn.Module, shape: CallShape, chunk: int, warmup: int) -> ModuleCost:
    """Cost of a module that works chunk by chunk: after the first `warmup` chunks, every chunk
    costs the same.

    So a long sequence is counted at two short lengths, which gives the same result to the unit if
    the length is a multiple of the chunk.
    """
    chunks, first, second = ceil(shape.n / chunk), 8 + warmup, 16 + warmup
    if chunks <= second:
        return count_on_meta(module, shape)
    m = shape.m if isinstance(module, Layer) else None  # a context keeps its length
    short, long = (count_on_meta(module, shape.with_length(c * chunk, m)) for c in (first, second))

    def extend(name: str) -> int:
        low, high = getattr(short, name), getattr(long, name)
        return round(low + (high - low) * (chunks - first) / (second - first))

    return ModuleCost(
        extend("forward"),
        extend("backward"),
        extend("recomputed"),
        extend("saved"),
        extend("state"),
        long.state_growth,
    )


@formula(BPTransformer, is_breakdown=True)
def _bp_transformer(module: BPTransformer, shape: CallShape) -> ModuleCost:
    """A long sequence is extrapolated from two short ones.

    Each doubling of the length adds one level of spans, at the same cost per token.
    """
    base = 1 << 13
    if shape.n <= 2 * base:
        return count_on_meta(module, shape)
    short, long = (count_on_meta(module, shape.with_length(n)) for n in (base, 2 * base))
    doublings = log2(shape.n / (2 * base))

    def extend(name: str) -> int:
        low, high = getattr(short, name) / base, getattr(long, name) / (2 * base)
        return round(shape.n * (high + (high - low) * doublings))

    state = long.state + (long.state - short.state) * ceil(doublings)
    return ModuleCost(
        extend("forward"),
        extend("backward"),
        extend("recomputed"),
        extend("saved"),
        state,
        long.state_growth,
    )


# ------------------------------------------------------------ sizes that depend on data
@formula(MixtureOfExperts)
def _mixture_of_experts(module: MixtureOfExperts, shape: CallShape) -> ModuleCost:
    """The router, and `top_k` experts for each token.

    With a capacity every expert is assumed to fill its buffer; without one, tokens are assumed to
    spread evenly.
    """
    d, count = module.dim, module.num_experts
    capacity = module.capacity if module.training else module.eval_capacity
    share = module.top_k * shape.n / count
    slots = shape.b * share if capacity is None else shape.b * max(1, int(capacity * share))
    slots = max(1, int(slots))
    router = matmul_cost(1, shape.tokens, d, count, saved=shape.tokens * (d + 3 * count))
    if module.router.noise is not None:
        router += matmul_cost(1, shape.tokens, d, count, saved=0)
    bank = module.bank.bank if isinstance(module.bank, ShardedExpertBank) else module.bank
    combine_saved = shape.tokens * module.top_k * (d + 2)
    return sum_parts(
        router=router,
        bank=module_cost(bank, CallShape(count, slots, slots)),
        take=matmul_cost(shape.tokens, 1, module.top_k, d, saved=combine_saved),
    )


@formula(RoutedAttention)
def _routed_attention(module: RoutedAttention, shape: CallShape) -> ModuleCost:
    """Each cluster attends within its n / clusters nearest tokens."""
    assert isinstance(module.route, KMeans)
    clusters = module.route.clusters
    passes = (1 if module.route.shared else 2) * (
        2 if module.training else 1
    )  # centroids move in training
    assign = ModuleCost(2 * shape.bh * clusters * shape.n * shape.e * passes)
    size = ceil(shape.n / clusters)
    return assign + _group_attention(shape, clusters, size, size, masked=shape.causal)


@formula(LSHAttention)
def _lsh(module: LSHAttention, shape: CallShape) -> ModuleCost:
    """In each round, each chunk of the sorted tokens attends to itself and to the chunk before.

    Causal chunks are cut inside each bucket. Their number depends on the data; tokens are assumed
    to fall into the buckets at random.
    """
    rounds, buckets, chunk = module.hashing.rounds, module.hashing.buckets, module.chunk
    hashing = ModuleCost(shape.bh * rounds * shape.n * shape.e * buckets)
    chunks = _expected_chunks(shape.n, buckets, chunk) if shape.causal else ceil(shape.n / chunk)
    attention = _group_attention(shape, rounds * chunks, chunk, 2 * chunk, masked=True)
    most, numbers = 2 * chunk * buckets * rounds, shape.bh * (shape.e + shape.f)
    return (hashing + attention).with_state(shape.n, partial(_cache_size, numbers, most))


def _group_attention(
    shape: CallShape, groups: int, queries: int, keys: int, *, masked: bool
) -> ModuleCost:
    """Fused attention inside groups of tokens.

    It saves indices and masks, q, k and v, but no scores.
    """
    scores = matmul_cost(shape.bh * groups, queries, shape.e, keys, saved=0)
    values = matmul_cost(shape.bh * groups, queries, keys, shape.f, saved=0)
    indices = 2 * (queries + keys) + (queries * keys if masked else 0)
    saved = shape.bh * (groups * indices + (shape.n + shape.m) * (shape.e + shape.f))
    return scores + values + ModuleCost(saved=saved)


def _expected_chunks(n: int, buckets: int, chunk: int) -> int:
    """E Σ ⌈tokens / chunk⌉ over the buckets, with a Poisson number of tokens in each: Σ_j P(more
    than j chunks)."""
    mean = n / buckets
    if mean > 500:  # half of the last chunk is empty on average
        return ceil(n / chunk + buckets / 2)
    below, term, expected = 0.0, exp(-mean), 0.0
    for tokens in range(ceil(mean + 12 * sqrt(mean) + 12)):
        below += term
        expected += 1 - below if tokens % chunk == 0 else 0.0
        term *= mean / (tokens + 1)
    return ceil(buckets * expected)


@formula(RotaryEmbedding)
def _rotary(module: RotaryEmbedding, shape: CallShape) -> ModuleCost:
    """Elementwise with fixed factors: no products, and no activations are saved."""
    return ModuleCost()


@formula(TransformerXLBias)
def _transformer_xl(module: TransformerXLBias, shape: CallShape) -> ModuleCost:
    """(q + v) · W R for n + m - 1 distances, and u · k.

    R is fixed, so W R has one product going backward.
    """
    distances = shape.n + shape.m - 1
    flops = 2 * shape.h * distances * module.dim * shape.e
    queries = matmul_cost(shape.bh, shape.n, shape.e, distances)
    return ModuleCost(flops, flops) + queries + matmul_cost(shape.bh, shape.m, shape.e, 1, saved=0)


# ------------------------------------------------------------ additive attention
@formula(AdditiveAttention)
def _additive(module: AdditiveAttention, shape: CallShape) -> ModuleCost:
    b, n, m, e, f = shape.bh, shape.n, shape.m, shape.e, shape.f
    cost = _additive_scores(b, n, m, e, causal=shape.causal) + matmul_cost(b, n, m, f)
    return cost.with_state(n, lambda n: b * n * (e + f))


@formula(SoftVisualAttention)
def _soft_visual(module: SoftVisualAttention, shape: CallShape) -> ModuleCost:
    b, n, m, d, width = shape.b, shape.n, shape.m, module.dim, module.query.out_features
    project = matmul_cost(1, b * n, d, width + 1, saved=b * n * d) + matmul_cost(
        1, b * m, d, width, saved=0
    )
    scores = _additive_scores(b, n, m, width, causal=module.causal)
    cost = project + scores + matmul_cost(b, n, m, d)
    return cost.with_state(n, lambda n: b * n * (d + width))


def _additive_scores(b: int, n: int, m: int, e: int, *, causal: bool) -> ModuleCost:
    """v · tanh(q + k) for each pair.

    Large calls are split, and their parts computed again going backward.
    """
    flops, is_split = 2 * b * n * m * e, b * n * m * e > MAX_ELEMENTS
    recomputed = flops if is_split else 0
    saved = (b * e * (n + m) if is_split else b * n * m * e) + (n * m * (b + 1) if causal else 0)
    return ModuleCost(flops, 2 * flops + recomputed, recomputed, saved)
