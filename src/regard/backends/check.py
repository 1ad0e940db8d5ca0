"""Checks of a backend against the textbook formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.call import AttentionCall, make_call
from regard.backends.linear_scan import LinearCall
from regard.backends.protocol import Backend, check_is_backend
from regard.pattern import (
    Band,
    Causal,
    Chunks,
    Full,
    Global,
    GlobalMask,
    Keys,
    Pattern,
    PerHead,
    PerSegment,
    RandomBlocks,
)
from regard.prior import ALiBi, Sinks, SoftCap

EXACT = "exact"
# largest error of outputs and gradients, relative to their largest value
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}

Case = tuple[str, AttentionCall | LinearCall]


def check_backend(
    backend: Backend[Any],
    *,
    lengths: tuple[int, ...] = (7, 70, 200),
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCES),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, str]:
    """Run a backend on calls of all kinds and compare it with the textbook formula in float64.

    Outputs and the gradients of all inputs are compared, for every dtype that the backend does not
    refuse. A prepared function that may be remembered is called twice, with different tensors.

    Args:
        backend: The backend, for softmax or for linear attention.
        lengths: Numbers of tokens.
        dtypes: Floating-point dtypes of the tensors.
        device: Device of the tensors.
        seed: Seed of the inputs.

    Returns:
        Name of the case -> "exact", or the reason why the backend refuses it.

    Raises:
        AssertionError: If a result is wrong, inputs are modified, or an answer is not valid. Also
            if the backend refuses every case.
    """
    check_is_backend(backend)
    generator = torch.Generator().manual_seed(seed)
    results = {}
    with torch.random.fork_rng(devices=[]):
        for dtype in dtypes:
            for n in lengths:
                for name, call in _cases(backend.operation, n, dtype, device, generator):
                    label = f"{name}, {n} tokens, {str(dtype).removeprefix('torch.')}"
                    refusal = backend.refuses(call)
                    if refusal is None:
                        _check_case(label, backend, call, generator)
                    assert refusal is None or (isinstance(refusal, str) and refusal), (
                        f"{label}: refuses must return a reason or None, not {refusal!r}"
                    )
                    results[label] = EXACT if refusal is None else refusal
    assert EXACT in results.values(), f"{backend.name} refuses every call: {set(results.values())}"
    return results


def _check_case(
    label: str, backend: Backend[Any], call: AttentionCall | LinearCall, generator: torch.Generator
) -> None:
    seconds = backend.cost(call)
    assert seconds is None or (isinstance(seconds, float | int) and 0 <= seconds < float("inf")), (
        f"{label}: cost must return seconds or None, not {seconds!r}"
    )
    run = backend.prepare(call)
    state = call.state if isinstance(call, LinearCall) else None
    tensors = [call.q, call.k, call.v, *(() if state is None else (state,))]
    _compare(label, run, call, tensors, generator)
    if call.signature() is not None:  # the function may be remembered
        _compare(label, run, call, [_random_like(x, generator) for x in tensors], generator)


def _compare(
    label: str,
    run: Callable[..., Any],
    call: AttentionCall | LinearCall,
    inputs: list[Tensor],
    generator: torch.Generator,
) -> None:
    """Outputs and gradients of `run` on the inputs, against the formula in float64."""
    copies = [x.detach().clone() for x in inputs]
    arguments = [*inputs, None] if isinstance(call, LinearCall) and len(inputs) == 3 else inputs
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    names = ["q", "k", "v", "the state"][: len(inputs)]
    if isinstance(call, AttentionCall):
        sinks = None
        if call.sinks is not None:
            sinks = call.sinks.detach().double().requires_grad_(call.sinks.requires_grad)
        expected = [_softmax_attention(call, exact[0], exact[1], exact[2], sinks)]
        if call.sinks is not None and sinks is not None:
            names, exact, inputs = [*names, "sinks"], [*exact, sinks], [*inputs, call.sinks]
            copies.append(call.sinks.detach().clone())
    else:
        expected = _linear_attention(call.causal, *exact)
    got = run(*arguments)
    got = [got] if isinstance(got, Tensor) else [y for y in got if y is not None]
    assert len(got) == len(expected), f"{label}: {len(got)} results instead of {len(expected)}"
    tolerance = TOLERANCES[inputs[0].dtype]

    def assert_close(what: str, mine: Tensor, formula: Tensor) -> None:
        assert mine.shape == formula.shape, (
            f"{label}: {what} has shape {tuple(mine.shape)}, not {tuple(formula.shape)}"
        )
        assert mine.dtype == inputs[0].dtype, (
            f"{label}: {what} is {mine.dtype}, not {inputs[0].dtype}"
        )
        error = (mine.double() - formula).abs().max().item() if formula.numel() else 0.0
        limit = tolerance * max(1.0, formula.abs().max().item() if formula.numel() else 0.0)
        assert error <= limit, f"{label}: {what} differs from the formula by {error:.3g}"

    for y, formula in zip(got, expected, strict=True):
        assert_close("the output", y, formula)
    if any(x.requires_grad for x in inputs):
        weights = [_random_like(y.detach(), generator) for y in expected]
        loss = sum((y * w.to(y.dtype)).sum() for y, w in zip(got, weights, strict=True))
        exact_loss = sum((y * w).sum() for y, w in zip(expected, weights, strict=True))
        grads = torch.autograd.grad(loss, inputs)
        exact_grads = torch.autograd.grad(exact_loss, exact)  # type: ignore[arg-type]
        for name, mine, formula in zip(names, grads, exact_grads, strict=True):
            assert_close(f"the gradient of {name}", mine, formula)
    for x, copy in zip(inputs, copies, strict=True):
        assert torch.equal(x, copy), f"{label}: an input was modified"


# ---------------------------------------------------------------------- formulas
def _softmax_attention(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """softmax over the visible keys, in float64; zero for a query that sees none."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("bhne,bhme->bhnm", q, k) * call.scale
    if call.prior is not None:
        scores = scores + call.prior(*call.position_grid(), q, k)
    keep = call.dense_mask().expand(scores.shape)
    largest = scores.detach().amax(-1, keepdim=True)
    weights = torch.where(keep, (scores - largest).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks[:, None, None] - largest).exp()
    return torch.einsum("bhnm,bhmf->bhnf", weights / torch.where(total > 0, total, 1.0), v)


def _linear_attention(
    causal: bool, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None
) -> list[Tensor]:
    """The sums of linear attention from the matrix of all scores."""
    scores = torch.einsum("bhnr,bhmr->bhnm", q, k)
    if not causal:
        return [scores @ v, scores.sum(-1, keepdim=True)]
    scores = scores.tril()
    ones = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    both, after = scores @ ones, torch.einsum("bhmr,bhmf->bhrf", k, ones)
    if state is not None:
        both, after = both + q @ state, after + state
    return [both[..., :-1], both[..., -1:], after]


# ---------------------------------------------------------------------- cases
def _cases(
    operation: str,
    n: int,
    dtype: torch.dtype,
    device: torch.device | str,
    generator: torch.Generator,
) -> Iterator[Case]:
    for grad in (False, True):
        ending = " with gradients" if grad else ""

        def draw(*shape: int, grad: bool = grad) -> Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return x.to(device, dtype).requires_grad_(grad)

        cases = _softmax_cases if operation == "softmax" else _linear_cases
        for name, call in cases(n, draw, device, generator, grad):
            yield name + ending, call


def _softmax_cases(
    n: int,
    draw: Callable[..., Tensor],
    device: torch.device | str,
    generator: torch.Generator,
    grad: bool,
) -> Iterator[Case]:
    b, h, e, m = 2, 4, 16, n + 13
    patterns: dict[str, Pattern] = {
        "full": Full(),
        "causal": Causal(),
        "band": Band(5, 3),
        "dilated band": Band(4, 4, 3),
        "global tokens": Band(4, 0) | Global(3),
        "chunks": Chunks(6),
        "random blocks": RandomBlocks(16, 2, -(-m // 16), 0),
        "a pattern per head": PerHead((Band(2, 2), Full(), Causal(), Chunks(5))),
        "queries that see nothing": Keys(0, 3) & Band(4, 0),
    }
    for name, pattern in patterns.items():
        q, k, v = draw(b, h, n, e), draw(b, h, n, e), draw(b, h, n, e)
        yield name, make_call(q, k, v, pattern=pattern)
    band, short = patterns["band"], torch.arange(n, device=device) < max(1, n // 2)
    padding = torch.stack((short, torch.ones_like(short)))
    first = torch.arange(n, device=device) % 5 == 0
    options: dict[str, dict[str, Any]] = {
        "padding": {"mask": padding},
        "all keys are padding": {"mask": padding & ~short},
        "prior": {"prior": ALiBi(h).to(device)},
        "soft cap": {"prior": SoftCap(1.5)},
        "sinks": {"prior": Sinks(h, start=0.5).requires_grad_(grad).to(draw(1))},
        "pair mask": {"attn_mask": torch.rand(n, n, generator=generator).to(device) < 0.7},
        "pair mask per head": {
            "attn_mask": torch.rand(b, h, n, n, generator=generator).to(device) < 0.7,
            "mask": padding,
        },
        "packed sequences": {"pattern": PerSegment(Causal(), (n - n // 3, n // 3))},
        "scale": {"scale": 0.3},
        "later positions": {"q_start": 9, "k_positions": 4},
        "scattered keys": {"k_positions": torch.arange(n, device=device) * 2},
        "global attention mask": {
            "pattern": GlobalMask() | band,
            "global_attention_mask": torch.stack((first, ~first)),
            "mask": padding,
        },
    }
    for name, more in options.items():
        q, k, v = draw(b, h, n, e), draw(b, h, n, e), draw(b, h, n, e)
        yield name, make_call(q, k, v, **{"pattern": band, **more})
    q, k, v = draw(b, h, n, e), draw(b, h // 2, n, e), draw(b, h // 2, n, e)
    yield "grouped-query heads", make_call(q, k, v, pattern=band)
    yield "one key head", make_call(q, k[:, :1], v[:, :1], pattern=Causal(), mask=padding)
    q, k, v = draw(b, h, n, e), draw(b, h, m, e), draw(b, h, m, e)
    yield "other keys", make_call(q, k, v, pattern=band)
    yield "wide values", make_call(q, k, draw(b, h, m, e + 5), pattern=band)
    q, k, v = (draw(b, s, h, e).transpose(1, 2) for s in (n, m, m))
    yield "heads split from tokens", make_call(q, k, v, pattern=band)


def _linear_cases(
    n: int,
    draw: Callable[..., Tensor],
    device: torch.device | str,
    generator: torch.Generator,
    grad: bool,
) -> Iterator[Case]:
    b, h, r, f = 2, 3, 8, 5
    q, k, v, state = draw(b, h, n, r), draw(b, h, n, r), draw(b, h, n, f), draw(b, h, r, f + 1)
    yield "causal", LinearCall(q, k, v, None, causal=True)
    yield "causal with a state", LinearCall(q, k, v, state, causal=True)
    yield "all keys", LinearCall(q, k, v, None, causal=False)
    k, v = draw(b, h, n + 13, r), draw(b, h, n + 13, f)
    yield "other keys", LinearCall(q, k, v, None, causal=False)
    q, k, v = (draw(b, n, h, width).transpose(1, 2) for width in (r, r, f))
    yield "heads split from tokens", LinearCall(q, k, v, None, causal=True)


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Other numbers with the shape, dtype and device of x, that require a gradient if x does."""
    other = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return other.to(x.device, x.dtype).requires_grad_(x.requires_grad)
