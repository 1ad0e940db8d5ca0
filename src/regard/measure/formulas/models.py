"""Models: what goes in, the layers, and what comes out."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from regard.measure.work import CallShape, ModuleCost, formula, kept, module_cost, product, together
from regard.models.embeddings import PatchEmbedding, TokenEmbedding, VectorEmbedding
from regard.models.heads import (
    AttentionPooling,
    LMHead,
    MaskedLMHead,
    ModelHead,
    PMAPooling,
    Pooling,
    PoolingHead,
    PredictionHead,
)
from regard.models.model import Backbone, Decoder, Encoder, Seq2Seq


# ---------------------------------------------------------------------------------------------- what goes in
@formula(TokenEmbedding)
def _tokens(module: TokenEmbedding, call: CallShape) -> ModuleCost:
    """Tables are looked up; positions and a norm behind them may cost more."""
    more = [part for part in (module.position, module.norm, module.project) if part is not None]
    return sum((module_cost(part, call) for part in more), module_cost(module.tokens, call))


@formula(VectorEmbedding)
def _vectors(module: VectorEmbedding, call: CallShape) -> ModuleCost:
    return module_cost(module.project, call) + module_cost(module.position, call)


@formula(PatchEmbedding)
def _patches(module: PatchEmbedding, call: CallShape) -> ModuleCost:
    """A layer over the numbers of each patch, O(n patch² channels d), or convolutions, each at a quarter of the places."""
    patches = call.n - (module.cls is not None)
    steps = [part for part in module.project.modules() if isinstance(part, nn.Conv2d)]
    cut = module_cost(module.position, call.of(patches))
    for left, step in enumerate(reversed(steps)):
        inside, places = step.weight[0].numel(), call.b * patches * 4**left
        cut = cut + product(1, places, inside, len(step.weight), saved=places * inside)
    return cut


# ---------------------------------------------------------------------------------------------- what comes out
@formula(Pooling)
def _pool(module: Pooling, call: CallShape) -> ModuleCost:
    """One token, or sums."""
    return ModuleCost()


@formula(AttentionPooling)
def _weighted(module: AttentionPooling, call: CallShape) -> ModuleCost:
    return module_cost(module.score, call) + product(call.b, 1, call.n, module.score.in_features)


@formula(PMAPooling)
def _asked(module: PMAPooling, call: CallShape) -> ModuleCost:
    return module_cost(module.ask, call)


@formula(LMHead)
def _words(module: LMHead, call: CallShape) -> ModuleCost:
    """O(n d vocabulary)."""
    return module_cost(module.words, call)


@formula(MaskedLMHead)
def _masked(module: MaskedLMHead, call: CallShape) -> ModuleCost:
    """A layer more, and what its activation and norm keep."""
    parts = sum(
        (module_cost(part, call) for part in (module.transform, module.norm, module.words)),
        ModuleCost(),
    )
    return parts + kept(call.rows * module.transform.out_features)


@formula(PredictionHead)
def _predict(module: PredictionHead, call: CallShape) -> ModuleCost:
    """Pooled, there is one token left of each example."""
    left = call if module.pool is None else call.of(1)
    first = ModuleCost() if module.pool is None else module_cost(module.pool, call)
    return (
        first
        + (ModuleCost() if module.hidden is None else module_cost(module.hidden, left))
        + module_cost(module.last, left)
    )


@formula(PoolingHead)
def _pooled(module: PoolingHead, call: CallShape) -> ModuleCost:
    return module_cost(module.pool, call)


def answers(head: ModelHead | None, call: CallShape) -> int:
    """How many numbers a loss reads: logits or values; without a head, or where it only pools, none are known."""
    if isinstance(head, MaskedLMHead):
        head = head.words
    last = (
        head.words
        if isinstance(head, LMHead)
        else head.last
        if isinstance(head, PredictionHead)
        else None
    )
    if head is None or last is None:
        return 0
    return (call.b if head.pools else call.rows) * last.out_features


# ---------------------------------------------------------------------------------------------- the whole
@formula(Backbone)
def _trunk(module: Backbone, call: CallShape) -> ModuleCost:
    """Embedding, layers and norm.  Where one layer cannot stream, none keeps anything."""
    stack = module_cost(module.stack, call)
    layers = dict(stack.parts) or {"stack": stack}
    if not stack.state:
        layers = {name: part.holding(0) for name, part in layers.items()}
    norm = {} if module.norm is None else {"norm": module_cost(module.norm, call)}
    return together(embedding=module_cost(module.embed, call), **layers, **norm)


def _out(head: ModelHead | None, call: CallShape) -> dict[str, ModuleCost]:
    """The head, and the loss, which keeps the probabilities of all choices and a number for each target."""
    loss = {"loss": kept(answers(head, call) + 2 * call.rows)}
    return {} if head is None else {"head": module_cost(head, call), **loss}


@formula(Encoder, Decoder)
def _model(module: Encoder | Decoder, call: CallShape) -> ModuleCost:
    return together(**module_cost(module.backbone, call).parts, **_out(module.head, call))


@formula(Seq2Seq)
def _seq2seq(module: Seq2Seq, call: CallShape) -> ModuleCost:
    """m tokens are read, n written.  A stream keeps what was read, (b m d)."""
    source, target = module_cost(module.encoder, call.of(call.m)), module_cost(module.decoder, call)
    parts = {f"encoder {name}": part.holding(0) for name, part in source.parts.items()}
    parts |= {f"decoder {name}": part for name, part in target.parts.items()}
    total = together(**parts, **_out(module.head, call))
    read = call.b * call.m * module.decoder.stack.dim
    return replace(total, state=total.state + read if total.state else 0)
