"""The promises, as checks that any mixer can be put through; third parties use them on their own.

    from regard.testing import check_mixer
    check_mixer(lambda causal: my_mixer(dim=8, heads=2, causal=causal))

Every promise in `mixer.can` is tested, and so is every refusal: what is not promised must raise `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor

from regard.errors import Unsupported
from regard.mixer import Mixer, MultiHead, merge_heads
from regard.state import take

SUPPORTED, UNSUPPORTED = "kept", "refused"
TRIALS = 8  # replacements tried; a routing that depends on content shows its leaks only for some

Build = Callable[[bool], Mixer]


def check_mixer(build: Build, *, length: int = 23, seed: int = 0) -> dict[str, str]:
    """Put a mixer through every check; a broken promise raises AssertionError.  Returns check -> "kept" or "refused".

    build    build(causal) -> Mixer, or raises `Unsupported` where there is no such form
    length   tokens to test with, at least 20: an odd number meets no block size
    """
    forms = {causal: _built(build, causal, seed) for causal in (False, True)}
    plain = forms[False] or forms[True]
    assert plain is not None, "it can be built neither causal nor otherwise"
    result = {"causal": SUPPORTED if forms[True] is not None else UNSUPPORTED}
    for name, check in CHECKS.items():
        outcomes = {check(mixer, length) for mixer in forms.values() if mixer is not None}
        result[name] = SUPPORTED if SUPPORTED in outcomes else UNSUPPORTED
    return result


def _built(build: Build, causal: bool, seed: int) -> Mixer | None:
    """A mixer in float64, with the same parameters each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            mixer = build(causal)
        except Unsupported as refusal:
            assert str(refusal), "a refusal must give its reason"
            return None
    assert mixer.causal == causal, f"built with causal={causal}, but says {mixer.causal}"
    assert mixer.can.causal or not causal, "built causal, though it promises not to"
    return mixer.double().eval()  # noise and moving averages belong to training


def random_tokens(mixer: Mixer, n: int, b: int = 2, seed: int = 1) -> Tensor:
    """Random tokens (b n d) that disturb no other generator."""
    return torch.randn(
        b, n, mixer.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def max_change(f: Callable[[Tensor], Tensor], x: Tensor, cols: slice, rows: slice) -> float:
    """The largest change of output `rows` when input `cols` are replaced: sees what no gradient does."""
    base, worst = f(x), 0.0
    for trial in range(TRIALS):
        other = x.clone()
        other[:, cols] = 3 * torch.randn(
            other[:, cols].shape, dtype=x.dtype, generator=torch.Generator().manual_seed(trial)
        )
        worst = max(worst, (f(other) - base)[:, rows].abs().max().item())
    return worst


def influence(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """(n n): how much output token i moves with input token j, by the Jacobian."""
    jacobian = torch.autograd.functional.jacobian(lambda one: f(one[None])[0], x[0])
    return jacobian.abs().amax(dim=(1, 3))


def assert_unsupported(f: Callable[[], object]) -> str:
    """It must raise `Unsupported`, with a reason."""
    try:
        f()
    except Unsupported as refusal:
        assert str(refusal), "a refusal must give its reason"
        return UNSUPPORTED
    raise AssertionError("what is not promised must raise Unsupported")


# ---------------------------------------------------------------------------------------------- the checks
def finite_output(mixer: Mixer, n: int) -> str:
    """The output has the shape of the input, and is finite; for 1 token too, and for none."""
    for size in (n, 1, 0):
        x = random_tokens(mixer, size)
        y = mixer(x)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert y.isfinite().all()
    return SUPPORTED


def gradients(mixer: Mixer, n: int) -> str:
    """A gradient reaches the input and every parameter that the plain call uses."""
    x = random_tokens(mixer, n).requires_grad_()
    weight = random_tokens(mixer, n, seed=2)
    mixer.zero_grad()
    global_attention_mask = (
        {"global_attention_mask": torch.arange(n).expand(2, n) % 7 == 3}
        if mixer.can.global_attention_mask
        else {}
    )
    (mixer(x, **global_attention_mask) * weight).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    for name, p in mixer.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, (
            f"no gradient for {name}"
        )
    return SUPPORTED


def causality(mixer: Mixer, n: int) -> str:
    """Causal: no later token has influence, neither by its gradient nor when replaced.  Else: one does."""
    x, cut = random_tokens(mixer, n, b=1), n // 2 + 1
    ahead = influence(mixer, x).triu(1).max()
    if not mixer.causal:
        assert ahead > 0, "not causal, and yet blind to the future"
        return UNSUPPORTED
    assert ahead == 0, "a later token has a gradient"
    assert max_change(mixer, x, slice(cut, n), slice(0, cut)) == 0, (
        "a later token has influence when replaced"
    )
    return SUPPORTED


def cross(mixer: Mixer, n: int) -> str:
    """Another sequence, longer or shorter, is looked at; its mask holds."""
    x, context = random_tokens(mixer, n - 4), random_tokens(mixer, n, seed=3)
    if not mixer.can.cross or mixer.causal:
        return assert_unsupported(lambda: mixer(x, context))
    for a, b in ((x, context), (context, x)):
        y = mixer(a, b)
        assert y.shape == a.shape and y.isfinite().all()
        assert not torch.equal(y, mixer(a, b + 1)), "memory has no influence"
    if mixer.can.mask:
        mask = (torch.arange(n) < n - 5).expand(2, n)
        assert (
            max_change(lambda m: mixer(x, m, mask=mask), context, slice(n - 5, n), slice(0, n)) == 0
        )
    return SUPPORTED


def padding(mixer: Mixer, n: int) -> str:
    """Left-out tokens have no influence, by gradient or when replaced, even by NaN; at the end they are as if cut off."""
    x, real = random_tokens(mixer, n, b=1), n - 5
    mask = torch.arange(n)[None] < real
    if not mixer.can.mask:
        return assert_unsupported(lambda: mixer(x, mask=mask))

    def masked(t: Tensor) -> Tensor:
        return mixer(t, mask=mask)

    assert influence(masked, x)[:real, real:].max() == 0, "padding has a gradient"
    assert max_change(masked, x, slice(real, n), slice(0, real)) == 0, (
        "padding has influence when replaced"
    )
    poisoned = x.clone()
    poisoned[:, real:] = torch.nan
    torch.testing.assert_close(masked(poisoned)[:, :real], masked(x)[:, :real])
    torch.testing.assert_close(masked(x)[:, :real], mixer(x[:, :real]))
    assert mixer(x, mask=torch.zeros_like(mask)).isfinite().all(), (
        "nothing but padding must be finite"
    )
    holes = torch.arange(n)[None] % 3 != 1
    assert max_change(lambda t: mixer(t, mask=holes), x, slice(1, n, 3), slice(0, n, 3)) == 0, (
        "a hole has influence"
    )
    return SUPPORTED


def stream(mixer: Mixer, n: int) -> str:
    """Chunks of 1, 7, 1, ... give what the whole gives; so do single tokens."""
    x = random_tokens(mixer, n)
    if not (mixer.can.stream and mixer.causal):
        return assert_unsupported(lambda: mixer.stream(x))
    whole = mixer(x)
    for sizes in ([1, 7, 1, n - 9], [1] * n):
        state, got = None, []
        for part in x.split(sizes, 1):
            y, state = mixer.stream(part, state)
            got.append(y)
        torch.testing.assert_close(torch.cat(got, 1), whole)
    return SUPPORTED


def reorder(mixer: Mixer, n: int) -> str:
    """Examples of a state may be reordered, repeated and dropped: the stream goes on as theirs would have."""
    if not (mixer.can.stream and mixer.causal):
        return assert_unsupported(lambda: mixer.stream(random_tokens(mixer, n)))
    x = random_tokens(mixer, n, b=4)
    for at, order in ((9, [3, 0, 3, 1]), (10, [2, 0, 2, 1, 0]), (n - 1, [1])):
        _, state = mixer.stream(x[:, :at])
        first, state = mixer.stream(x[order, at : at + 1], take(state, order))
        rest, _ = mixer.stream(x[order, at + 1 :], state)
        torch.testing.assert_close(torch.cat((first, rest), 1), mixer(x[order])[:, at:])
    return SUPPORTED


def any_length(mixer: Mixer, n: int) -> str:
    """Lengths that fit no block; where there is a limit, more raises."""
    for size in (1, 2, n // 2, n):
        assert mixer(random_tokens(mixer, size)).shape[1] == size
    if mixer.can.length:
        assert mixer.length is None
        assert mixer(random_tokens(mixer, 4 * n + 1)).isfinite().all()
        return SUPPORTED
    assert mixer.length is not None, "without a limit, any length must do"
    try:
        mixer(random_tokens(mixer, mixer.length + 1))
    except ValueError as error:
        assert str(mixer.length) in str(error), "the error must name the limit"
        return UNSUPPORTED
    raise AssertionError("more tokens than it was built for must raise")


def maps(mixer: Mixer, n: int) -> str:
    """The map times the values is the output."""
    x = random_tokens(mixer, n)
    if not mixer.can.maps:
        return assert_unsupported(lambda: mixer.attention_map(x))
    a = mixer.attention_map(x)
    assert a.dim() == 4 and a.shape[0] == 2 and a.shape[2:] == (n, n) and a.isfinite().all()
    if isinstance(mixer, MultiHead):
        _, _, v = mixer.project(x, None)
        v = v.repeat_interleave(a.shape[1] // v.shape[1], 1)
        torch.testing.assert_close(mixer.out(merge_heads(a @ v)), mixer(x))
    return SUPPORTED


def global_attention_mask(mixer: Mixer, n: int) -> str:
    """Marked tokens change the output, in their own example only, and padding stays without influence."""
    x = random_tokens(mixer, n)
    marked = torch.zeros(2, n, dtype=torch.bool)
    marked[0, n // 2] = True
    if not mixer.can.global_attention_mask:
        return assert_unsupported(lambda: mixer(x, global_attention_mask=marked))
    y = mixer(x, global_attention_mask=marked)
    plain = mixer(x)
    assert not torch.equal(y[0], plain[0]), "a mark changes nothing"
    torch.testing.assert_close(y[1], plain[1])
    torch.testing.assert_close(mixer(x, global_attention_mask=torch.zeros_like(marked)), plain)
    mask = (torch.arange(n) < n - 5).expand(2, n)
    assert (
        max_change(
            lambda t: mixer(t, mask=mask, global_attention_mask=marked),
            x,
            slice(n - 5, n),
            slice(0, n - 5),
        )
        == 0
    )
    return SUPPORTED


def batch_independence(mixer: Mixer, n: int) -> str:
    """Examples of a batch do not touch each other."""
    x = random_tokens(mixer, n, b=3)
    torch.testing.assert_close(mixer(x)[1:2], mixer(x[1:2]))
    return SUPPORTED


def save_load(mixer: Mixer, n: int) -> str:
    """Saved and loaded, with safe types only, it gives the same."""
    from safetensors.torch import load, save

    x = random_tokens(mixer, n)
    want = mixer(x)
    kept = load(save({name: t.detach().clone() for name, t in mixer.state_dict().items()}))
    originals = {name: t.clone() for name, t in mixer.state_dict().items()}
    for p in mixer.state_dict().values():
        p.zero_()
    mixer.load_state_dict(kept)
    torch.testing.assert_close(mixer(x), want, rtol=0, atol=0)
    assert all(torch.equal(t, originals[name]) for name, t in mixer.state_dict().items())
    return SUPPORTED


def low_precision(mixer: Mixer, n: int) -> str:
    """bfloat16 gives about what float64 gives."""
    x = random_tokens(mixer, n)
    want = mixer(x)
    got = deepcopy(mixer).bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    error = (got.double() - want).abs().mean() / want.abs().mean().clamp(min=1e-3)
    assert error < 0.1, f"bfloat16 is off by {error:.0%} in the mean"
    return SUPPORTED


CHECKS: dict[str, Callable[[Mixer, int], str]] = {
    "finite": finite_output,
    "gradients": gradients,
    "future": causality,
    "cross": cross,
    "padding": padding,
    "stream": stream,
    "reorder": reorder,
    "length": any_length,
    "maps": maps,
    "global_attention_mask": global_attention_mask,
    "rows": batch_independence,
    "saved": save_load,
    "bfloat16": low_precision,
}
