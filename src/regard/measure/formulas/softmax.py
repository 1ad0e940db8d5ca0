"""Attention with a softmax over pairs: what counts is how many pairs the pattern allows."""

from __future__ import annotations

from dataclasses import replace

from regard.attentions import (
    AdaptiveSpanAttention,
    AdditiveAttention,
    DisagreementAttention,
    HardCodedAttention,
    LocalnessAttention,
    MaterializedAttention,
    PersistentMemoryAttention,
    SoftmaxAttention,
)
from regard.attentions.additive import MAX_ELEMENTS
from regard.backends.sdpa import WIDEST
from regard.head_mixing import TalkingHeads
from regard.measure.pairs import count_live_keys, count_pairs
from regard.measure.work import (
    CallShape,
    ModuleCost,
    formula,
    kept,
    module_cost,
    one_sided,
    product,
)
from regard.pattern import Causal, Full, Pattern
from regard.position import ShawBias, TransformerXLBias, TUPEBias
from regard.position.relative import RelativeLabels
from regard.prior import Prior

PLAIN = (Full(), Causal())


def over_pairs(pattern: Pattern, call: CallShape) -> ModuleCost:
    """softmax(q kᵀ) v over the pairs of a pattern, fused: 2 (e + f) for each pair; O(n² d) where all are allowed.

    Kept: q, k, v and a sum for each query, and where the call is not plain the result, which is laid out anew for those who
    read it; widths that differ are filled up.  The scores are made again in the backward pass.
    """
    seen = call.b * count_pairs(pattern, call.n, call.m, call.h)
    scores, values = 2 * seen * call.e, 2 * seen * call.f
    wide = max(call.e, call.f) if max(call.e, call.f) <= WIDEST else 0
    keys, out = (call.e + call.f, 0) if call.e == call.f or not wide else (2 * wide, wide)
    out = out if pattern in PLAIN else max(out, call.f)
    saved = call.bh * (call.n * (max(wide, call.e) + 1 + out) + call.m * keys)
    return ModuleCost(scores + values, 2 * (scores + values) + scores, scores, saved)


def cache(pattern: Pattern, call: CallShape) -> int:
    """Numbers of the keys and values that later queries may still see."""
    return call.b * call.groups * (call.e + call.f) * count_live_keys(pattern, call.n)


@formula(SoftmaxAttention)
def _softmax(module: SoftmaxAttention, call: CallShape) -> ModuleCost:
    pattern = module.causal_pattern if call.causal else module.pattern
    prior = (
        ModuleCost()
        if module.prior is None
        else module_cost(module.prior, call) + kept(_addend(module.prior, pattern, call))
    )
    return over_pairs(pattern, call).holding(cache(pattern, call)) + prior


def _addend(prior: Prior, pattern: Pattern, call: CallShape) -> int:
    """What is kept of a prior: dense, where many pairs are seen; else of those that are.  A relative one repeats."""
    seen, every = count_pairs(pattern, call.n, call.m, call.h), call.h * call.n * call.m
    if 8 * seen > every:
        return 9 * every // 4 * (call.b if isinstance(prior, RelativeLabels) else 1)
    return 0 if prior.relative else 6 * call.b * seen


@formula(ShawBias)
def _shaw(module: ShawBias, call: CallShape) -> ModuleCost:
    """q · a for every distance: O(n distances d)."""
    return _of_labels(len(module.vectors), call)


@formula(TransformerXLBias)
def _xl(module: TransformerXLBias, call: CallShape) -> ModuleCost:
    """(q + v) · W R of every distance, n + m - 1 of them, and u · k: O(n (n + m) d)."""
    gaps = call.n + call.m - 1
    places = one_sided(call.h, gaps, module.dim, call.e)
    return (
        places
        + product(call.bh, call.n, call.e, gaps)
        + product(call.bh, call.m, call.e, 1, saved=0)
    )


@formula(TUPEBias)
def _tupe(module: TUPEBias, call: CallShape) -> ModuleCost:
    """Places that ask places, once for all examples: O(n² d + n d²)."""
    asked = module_cost(module.q, CallShape(1, call.n, call.n)) + module_cost(
        module.k, CallShape(1, call.m, call.m)
    )
    return asked + product(call.h, call.n, call.e, call.m)


@formula(Prior)
def _prior(module: Prior, call: CallShape) -> ModuleCost:
    """Most look their numbers up, or compute them element by element."""
    return ModuleCost()


@formula(RelativeLabels)
def _labels(module: RelativeLabels, call: CallShape) -> ModuleCost:
    """q · a for every label: O(n labels d)."""
    return _of_labels(module.vectors.shape[1], call)


def _of_labels(labels: int, call: CallShape) -> ModuleCost:
    return product(call.bh, call.n, call.e, labels, saved=call.bh * call.n * labels)


@formula(PersistentMemoryAttention)
def _persistent(module: PersistentMemoryAttention, call: CallShape) -> ModuleCost:
    """The attention inside, and learned keys that every query sees: O(n (n + count) d)."""
    inside = module_cost(module.inner, call)
    more = over_pairs(Full(), call.of(call.n, module.count))
    joined = kept(
        call.bh * (call.m * (call.e + call.f) + module.count * (call.e + call.f))
    )  # behind the tokens
    return inside + replace(more, saved=0) + joined


@formula(AdaptiveSpanAttention)
def _span(module: AdaptiveSpanAttention, call: CallShape) -> ModuleCost:
    """The pairs that the spans reach now: it costs less as they shrink."""
    pattern = module.causal_pattern if call.causal else module.pattern
    seen, every = count_pairs(pattern, call.n, call.m, call.h), call.h * call.n * call.m
    ramp = kept(5 * every if 4 * seen > every else 0)  # dense where most is reached
    return over_pairs(pattern, call).holding(cache(pattern, call)) + ramp


@formula(DisagreementAttention)
def _disagreeing(module: DisagreementAttention, call: CallShape) -> ModuleCost:
    """The attention inside; what the heads pay is computed only where somebody listens."""
    return module_cost(module.inner, call)


def scored(call: CallShape) -> ModuleCost:
    """All scores in hand, whatever the pattern: O(n² d).  Kept: q, k, v and the weights."""
    return product(call.bh, call.n, call.e, call.m) + product(call.bh, call.n, call.m, call.f)


@formula(MaterializedAttention)
def _scored(module: MaterializedAttention, call: CallShape) -> ModuleCost:
    every = (
        5 * call.bh * call.n * call.m // 4
    )  # the softmax before rows of nothing are dropped, and what is kept of the mask
    talk = sum(
        (
            module_cost(part, call)
            for part in (module.before, module.after)
            if isinstance(part, TalkingHeads)
        ),
        ModuleCost(),
    )
    return (scored(call) + talk + kept(every)).holding(cache(module.pattern, call))


@formula(TalkingHeads)
def _talk(module: TalkingHeads, call: CallShape) -> ModuleCost:
    """Heads mixed for each pair: O(n² h²)."""
    new, old = module.weight.shape
    return product(call.b, new, old, call.n * call.m, saved=call.b * old * call.n * call.m)


def masked(call: CallShape, heads: int) -> ModuleCost:
    """What a softmax over some of the keys keeps beside its weights."""
    return kept(call.n * call.m * (call.b * heads + 1) if call.causal else 0)


def additive(b: int, n: int, m: int, e: int) -> ModuleCost:
    """v · tanh(q + k): O(n² e).  In parts, where it is large, which are then computed again in the backward pass."""
    flops = 2 * b * n * m * e
    parts = b * n * m * e > MAX_ELEMENTS
    again = flops if parts else 0
    return ModuleCost(flops, 2 * flops + again, again, b * e * (n + m) if parts else b * n * m * e)


@formula(AdditiveAttention)
def _additive(module: AdditiveAttention, call: CallShape) -> ModuleCost:
    values = product(call.bh, call.n, call.m, call.f)
    return (additive(call.bh, call.n, call.m, call.e) + values + masked(call, call.h)).holding(
        cache(Full(), call)
    )


@formula(LocalnessAttention)
def _located(module: LocalnessAttention, call: CallShape) -> ModuleCost:
    """Plain attention, and small networks of each query that place its Gaussian: O(n d e)."""
    total = over_pairs(Full(), call) + kept(3 * call.bh * call.n * call.m)
    if module.w is not None:
        total = total + product(
            call.bh, call.n, call.e, call.e, saved=2 * call.bh * call.n * call.e
        )
    for vector, of_keys in ((module.where, False), (module.wide, module.w_keys is not None)):
        if vector is not None:
            total = total + product(call.bh, 1 if of_keys else call.n, call.e, 1, saved=0)
    return total if module.w_keys is None else total + product(call.bh, 1, call.e, call.e)


@formula(HardCodedAttention)
def _hard(module: HardCodedAttention, call: CallShape) -> ModuleCost:
    """A fixed kernel slides over the values: O(n d reach)."""
    taps = 2 * module.reach + 1
    slid = one_sided(call.b, call.n, taps, call.h * call.f, saved=4 * call.bh * call.n * call.f)
    return slid.holding(call.b * call.h * call.f * module.reach)


def dense(call: CallShape) -> ModuleCost:
    """Fused attention of all queries to all keys, or of each to those before it."""
    return over_pairs(Causal() if call.causal else Full(), call)


def short(call: CallShape, n: int, m: int) -> ModuleCost:
    """Fused attention of n queries to m keys, not causal."""
    return over_pairs(Full(), replace(call, n=n, m=m, causal=False))
