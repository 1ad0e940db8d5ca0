"""Models: what goes in, the layers, and what comes out."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from regard.measure.work import Call, Work, formula, kept, product, together, work
from regard.models.embed import PatchEmbed, TokenEmbed, VectorEmbed
from regard.models.heads import Asked, Head, LanguageHead, MaskedHead, Pool, PooledHead, Predict, Weighted
from regard.models.model import Decoder, Encoder, Seq2Seq, Trunk


# ---------------------------------------------------------------------------------------------- what goes in
@formula(TokenEmbed)
def _tokens(module: TokenEmbed, call: Call) -> Work:
    """Tables are looked up; positions and a norm behind them may cost more."""
    more = [part for part in (module.position, module.norm, module.project) if part is not None]
    return sum((work(part, call) for part in more), work(module.tokens, call))


@formula(VectorEmbed)
def _vectors(module: VectorEmbed, call: Call) -> Work:
    return work(module.project, call) + work(module.position, call)


@formula(PatchEmbed)
def _patches(module: PatchEmbed, call: Call) -> Work:
    """A layer over the numbers of each patch, O(n patch² channels d), or convolutions, each at a quarter of the places."""
    patches = call.n - (module.cls is not None)
    steps = [part for part in module.project.modules() if isinstance(part, nn.Conv2d)]
    cut = work(module.position, call.of(patches))
    for left, step in enumerate(reversed(steps)):
        inside, places = step.weight[0].numel(), call.b * patches * 4**left
        cut = cut + product(1, places, inside, len(step.weight), saved=places * inside)
    return cut


# ---------------------------------------------------------------------------------------------- what comes out
@formula(Pool)
def _pool(module: Pool, call: Call) -> Work:
    """One token, or sums."""
    return Work()


@formula(Weighted)
def _weighted(module: Weighted, call: Call) -> Work:
    return work(module.score, call) + product(call.b, 1, call.n, module.score.in_features)


@formula(Asked)
def _asked(module: Asked, call: Call) -> Work:
    return work(module.ask, call)


@formula(LanguageHead)
def _words(module: LanguageHead, call: Call) -> Work:
    """O(n d vocabulary)."""
    return work(module.words, call)


@formula(MaskedHead)
def _masked(module: MaskedHead, call: Call) -> Work:
    """A layer more, and what its activation and norm keep."""
    parts = sum((work(part, call) for part in (module.transform, module.norm, module.words)), Work())
    return parts + kept(call.rows * module.transform.out_features)


@formula(Predict)
def _predict(module: Predict, call: Call) -> Work:
    """Pooled, there is one token left of each example."""
    left = call if module.pool is None else call.of(1)
    first = Work() if module.pool is None else work(module.pool, call)
    return first + (Work() if module.hidden is None else work(module.hidden, left)) + work(module.last, left)


@formula(PooledHead)
def _pooled(module: PooledHead, call: Call) -> Work:
    return work(module.pool, call)


def answers(head: Head | None, call: Call) -> int:
    """How many numbers a loss reads: logits or values; without a head, or where it only pools, none are known."""
    if isinstance(head, MaskedHead):
        head = head.words
    last = head.words if isinstance(head, LanguageHead) else head.last if isinstance(head, Predict) else None
    if head is None or last is None:
        return 0
    return (call.b if head.pools else call.rows) * last.out_features


# ---------------------------------------------------------------------------------------------- the whole
@formula(Trunk)
def _trunk(module: Trunk, call: Call) -> Work:
    """Embedding, layers and norm.  Where one layer cannot stream, none keeps anything."""
    stack = work(module.stack, call)
    layers = dict(stack.parts) or {"stack": stack}
    if not stack.state:
        layers = {name: part.holding(0) for name, part in layers.items()}
    norm = {} if module.norm is None else {"norm": work(module.norm, call)}
    return together(embedding=work(module.embed, call), **layers, **norm)


def _out(head: Head | None, call: Call) -> dict[str, Work]:
    """The head, and the loss, which keeps the probabilities of all choices and a number for each target."""
    loss = {"loss": kept(answers(head, call) + 2 * call.rows)}
    return {} if head is None else {"head": work(head, call), **loss}


@formula(Encoder, Decoder)
def _model(module: Encoder | Decoder, call: Call) -> Work:
    return together(**work(module.trunk, call).parts, **_out(module.head, call))


@formula(Seq2Seq)
def _seq2seq(module: Seq2Seq, call: Call) -> Work:
    """m tokens are read, n written.  A stream keeps what was read, (b m d)."""
    source, target = work(module.encoder, call.of(call.m)), work(module.decoder, call)
    parts = {f"encoder {name}": part.holding(0) for name, part in source.parts.items()}
    parts |= {f"decoder {name}": part for name, part in target.parts.items()}
    total = together(**parts, **_out(module.head, call))
    read = call.b * call.m * module.decoder.stack.dim
    return replace(total, state=total.state + read if total.state else 0)
