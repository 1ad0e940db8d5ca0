"""Checks of a mixer's capabilities, for any mixer; of models (`check_model`), recipes in models
(`check_recipe`), backends (`check_backend`) and tasks (`check_task`).

    from regard.testing import check_mixer

    check_mixer(lambda causal: my_mixer(dim=8, heads=2, causal=causal))

Every capability in `mixer.can` is tested. Whatever the mixer does not support must raise
`Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import product
from time import process_time

import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch.func import functional_call, grad, vmap
from torch.fx import GraphModule

from regard.attentions.softmax import SoftmaxAttention
from regard.backends.check import check_backend as check_backend
from regard.errors import Unsupported, check_choice
from regard.mixer import Mixer, MultiHead, State, merge_heads
from regard.models.check import check_model as check_model, check_recipe as check_recipe
from regard.state import join, split, take
from regard.tasks.check import check_task as check_task

SUPPORTED, UNSUPPORTED = "supported", "unsupported"
TRIALS = 8  # content-based routing leaks the future only for some of the replaced tokens

MixerFactory = Callable[[bool], Mixer]


def check_mixer(
    build: MixerFactory, *, length: int = 23, seed: int = 0, checks: Iterable[str] | None = None
) -> dict[str, str]:
    """Run checks on a mixer, causal and not.

    Args:
        build: Function `build(causal) -> Mixer`. It raises `Unsupported` if there is no such form.
        length: Number of tokens, at least 20. An odd number fits no block size.
        seed: Seed of the parameters.
        checks: Names of the checks to run, from `CHECKS`. Default: all.

    Returns:
        Check name -> "supported" or "unsupported", and "causal".

    Raises:
        AssertionError: If the mixer does not do what `mixer.can` says.
    """
    names = CHECKS if checks is None else list(checks)
    for name in names:
        check_choice("checks", name, CHECKS)
    mixers = {causal: _build_mixer(build, causal, seed) for causal in (False, True)}
    assert any(m is not None for m in mixers.values()), (
        "it can be built neither with causal=False nor with causal=True"
    )
    result = {"causal": SUPPORTED if mixers[True] is not None else UNSUPPORTED}
    for name in names:
        outcomes = set()
        for causal, mixer in mixers.items():
            if mixer is not None and name == "meta_device":
                outcomes.add(meta_device(mixer, length, build, causal))
            elif mixer is not None:
                outcomes.add(CHECKS[name](mixer, length))
        result[name] = SUPPORTED if SUPPORTED in outcomes else UNSUPPORTED
    return result


def _build_mixer(build: MixerFactory, causal: bool, seed: int) -> Mixer | None:
    """Build a float64 mixer in eval mode, with the same parameters each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            mixer = build(causal)
        except Unsupported as error:
            assert str(error), "Unsupported must give a reason"
            return None
    assert mixer.causal == causal, f"built with causal={causal}, but mixer.causal is {mixer.causal}"
    assert mixer.can.causal or not causal, "built with causal=True, but mixer.can.causal is False"
    return mixer.double().eval()  # noise and moving averages are for training


def random_tokens(mixer: Mixer, n: int, b: int = 2, seed: int = 1) -> Tensor:
    """Random tokens (b n d) from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, n, mixer.dim, dtype=torch.float64, generator=generator)


def max_change(f: Callable[[Tensor], Tensor], x: Tensor, cols: slice, rows: slice) -> float:
    """Largest change of output `rows` when input `cols` are replaced; also finds leaks without a
    gradient.
    """
    base, largest = f(x), 0.0
    for trial in range(TRIALS):
        generator = torch.Generator().manual_seed(trial)
        other = x.clone()
        other[:, cols] = 3 * torch.randn(other[:, cols].shape, dtype=x.dtype, generator=generator)
        largest = max(largest, (f(other) - base)[:, rows].abs().max().item())
    return largest


def influence(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Largest absolute gradient of output token i with respect to input token j, (n n)."""
    jacobian = torch.autograd.functional.jacobian(lambda one: f(one[None])[0], x[0])
    return jacobian.abs().amax(dim=(1, 3))


def assert_unsupported(f: Callable[[], object]) -> str:
    """Assert that `f` raises `Unsupported` with a reason."""
    try:
        f()
    except Unsupported as error:
        assert str(error), "Unsupported must give a reason"
        return UNSUPPORTED
    raise AssertionError("a capability that is not listed must raise Unsupported")


# ----------------------------------------------------------------------------------------- checks
def finite_output(mixer: Mixer, n: int) -> str:
    """The output is finite and has the shape and dtype of the input, also for one token, for none
    and for no examples; so has the attention map.
    """
    for examples, size in ((2, n), (2, 1), (2, 0), (0, n)):
        x = random_tokens(mixer, size, b=examples)
        y = mixer(x)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert y.isfinite().all()
        if mixer.can.maps:
            weights = mixer.attention_map(x)
            assert weights.isfinite().all() and len(weights) == examples
            assert weights.shape[2:] == (size, size)
    return SUPPORTED


def gradients(mixer: Mixer, n: int) -> str:
    """The input and every parameter get a finite gradient, and no parameter's is zero."""
    x = random_tokens(mixer, n).requires_grad_()
    weight = random_tokens(mixer, n, seed=2)
    mixer.zero_grad()
    kwargs = {}
    if mixer.can.global_attention_mask:
        kwargs["global_attention_mask"] = torch.arange(n).expand(2, n) % 7 == 3
    (mixer(x, **kwargs) * weight).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    for name, p in mixer.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), f"no finite gradient for {name}"
        assert p.grad.abs().max() > 0, f"zero gradient for {name}"
    return SUPPORTED


def causality(mixer: Mixer, n: int) -> str:
    """Causal: later tokens have no influence, by gradient or when replaced.

    Otherwise: some have.
    """
    x, cut = random_tokens(mixer, n, b=1), n // 2 + 1
    future_gradient = influence(mixer, x).triu(1).max()
    if not mixer.causal:
        assert future_gradient > 0, "not causal, yet no later token has influence"
        return UNSUPPORTED
    assert future_gradient == 0, "a later token has a gradient"
    change = max_change(mixer, x, slice(cut, n), slice(0, cut))
    assert change == 0, "a later token has influence when replaced"
    return SUPPORTED


def cross_attention(mixer: Mixer, n: int) -> str:
    """A context, longer or shorter than x, has influence, and its mask is respected.

    Queries are independent of each other and of their number and positions exactly if
    `mixer.can.independent_queries` says so. Padded queries are the same as truncated ones.
    """
    x, context = random_tokens(mixer, n - 4), random_tokens(mixer, n, seed=3)
    if not mixer.can.cross or mixer.causal:
        return assert_unsupported(lambda: mixer(x, context))
    for a, b in ((x, context), (context, x)):
        y = mixer(a, b)
        assert y.shape == a.shape and y.isfinite().all()
        assert not torch.equal(y, mixer(a, b + 1)), "the context has no influence"
    if mixer.can.mask:
        mask = (torch.arange(n) < n - 5).expand(2, n)
        change = max_change(lambda t: mixer(x, t, mask=mask), context, slice(n - 5, n), slice(0, n))
        assert change == 0, "a masked context token has influence"
        real = n - 9
        query_mask = (torch.arange(n - 4) < real).expand(2, n - 4)
        padded = mixer(x, context, mask=mask, query_mask=query_mask)[:, :real]
        torch.testing.assert_close(padded, mixer(x[:, :real], context[:, : n - 5]))
    together, alone = (
        torch.cat([mixer(part, context) for part in x.split(size, 1)], 1) for size in (n, 1)
    )
    if mixer.can.independent_queries:
        change = max_change(lambda t: mixer(t, context), x, slice(1, n, 2), slice(0, n, 2))
        assert change == 0, "a query has influence on another one"
        torch.testing.assert_close(alone, together)
    else:
        assert not torch.allclose(alone, together), (
            "each query alone gives the same output, but mixer.can.independent_queries is False"
        )
    return SUPPORTED


def padding(mixer: Mixer, n: int) -> str:
    """Masked tokens have no influence, by gradient or when replaced, even by NaN; padding equals
    truncating.
    """
    x, real = random_tokens(mixer, n, b=1), n - 5
    mask = torch.arange(n)[None] < real
    if not mixer.can.mask:
        return assert_unsupported(lambda: mixer(x, mask=mask))

    def mix_masked(t: Tensor) -> Tensor:
        return mixer(t, mask=mask)

    assert influence(mix_masked, x)[:real, real:].max() == 0, "padding has a gradient"
    change = max_change(mix_masked, x, slice(real, n), slice(0, real))
    assert change == 0, "padding has influence when replaced"
    poisoned = x.clone()
    poisoned[:, real:] = torch.nan
    torch.testing.assert_close(mix_masked(poisoned)[:, :real], mix_masked(x)[:, :real])
    torch.testing.assert_close(mix_masked(x)[:, :real], mixer(x[:, :real]))
    nothing = mixer(x, mask=torch.zeros_like(mask))
    assert nothing.isfinite().all(), "the output is not finite if all tokens are masked"
    holes = torch.arange(n)[None] % 3 != 1
    change = max_change(lambda t: mixer(t, mask=holes), x, slice(1, n, 3), slice(0, n, 3))
    assert change == 0, "a masked token between others has influence"
    return SUPPORTED


def pair_mask(mixer: Mixer, n: int) -> str:
    """Pairs that `attn_mask` does not keep have no influence, by gradient or when replaced; a query
    that sees nothing gives a finite output.
    """
    x, half = random_tokens(mixer, n, b=1), n // 2
    keep = torch.ones(n, n, dtype=torch.bool)
    keep[:half, half:] = False
    if not mixer.can.attn_mask:
        return assert_unsupported(lambda: mixer(x, attn_mask=keep))

    def mix_masked(t: Tensor) -> Tensor:
        return mixer(t, attn_mask=keep)

    assert influence(mix_masked, x)[:half, half:].max() == 0, "a hidden pair has a gradient"
    change = max_change(mix_masked, x, slice(half, n), slice(0, half))
    assert change == 0, "a hidden pair has influence when a token is replaced"
    torch.testing.assert_close(mixer(x, attn_mask=torch.ones_like(keep)), mixer(x))
    batch = random_tokens(mixer, n)
    both = torch.stack((keep, torch.ones_like(keep)))
    expected = torch.cat((mixer(batch[:1], attn_mask=keep), mixer(batch[1:])))
    torch.testing.assert_close(mixer(batch, attn_mask=both), expected)
    torch.testing.assert_close(mixer(batch, attn_mask=both[:, None]), expected)
    assert mixer(x, attn_mask=torch.zeros_like(keep)).isfinite().all(), (
        "the output is not finite if no pair is visible"
    )
    if mixer.can.maps:
        weights = mixer.attention_map(x, attn_mask=keep)
        assert (weights[:, :, ~keep] == 0).all(), "a hidden pair has a weight"
    return SUPPORTED


def packed_sequences(mixer: Mixer, n: int) -> str:
    """Packed sequences give the outputs and gradients of each sequence alone."""
    lengths = (n, 2, 7, n, 1)
    x = random_tokens(mixer, sum(lengths), b=1).requires_grad_()
    weight = random_tokens(mixer, sum(lengths), b=1, seed=2)
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0)

    def alone(t: Tensor, **_: Tensor) -> Tensor:
        return torch.cat([mixer(part) for part in t.split(lengths, 1)], 1)

    results = []
    for mix in (mixer, alone):
        mixer.zero_grad()
        y = mix(x, cu_seqlens=cu_seqlens)
        (grad,) = torch.autograd.grad((y * weight).sum(), x)
        results.append((y, grad))
    torch.testing.assert_close(*results)
    return SUPPORTED


def stream(mixer: Mixer, n: int) -> str:
    """Streaming in chunks of several sizes, or token by token, gives the output of one call."""
    x = random_tokens(mixer, n)
    if not (mixer.can.stream and mixer.causal):
        return assert_unsupported(lambda: mixer.stream(x))
    whole = mixer(x)
    for sizes in ([1, 7, 1, n - 9], [1] * n):
        state, outputs = None, []
        for chunk in x.split(sizes, 1):
            y, state = mixer.stream(chunk, state)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 1), whole)
    return SUPPORTED


def reorder(mixer: Mixer, n: int) -> str:
    """After `regard.state.take` reorders, repeats or drops examples of a state, streaming continues
    correctly.
    """
    if not (mixer.can.stream and mixer.causal):
        return assert_unsupported(lambda: mixer.stream(random_tokens(mixer, n)))
    x = random_tokens(mixer, n, b=4)
    for start, order in ((9, [3, 0, 3, 1]), (10, [2, 0, 2, 1, 0]), (n - 1, [1])):
        _, state = mixer.stream(x[:, :start])
        first, state = mixer.stream(x[order, start : start + 1], take(state, order))
        rest, _ = mixer.stream(x[order, start + 1 :], state)
        torch.testing.assert_close(torch.cat((first, rest), 1), mixer(x[order])[:, start:])
    return SUPPORTED


def join_streams(mixer: Mixer, n: int) -> str:
    """Streams at different positions that are joined by `regard.state.join`, one of which has not
    begun, continue as if alone: in chunks, after `take` and `split`, and joined again.
    """
    if not (mixer.can.stream and mixer.causal):
        return assert_unsupported(lambda: mixer.stream(random_tokens(mixer, n)))
    x = random_tokens(mixer, n, b=4)
    whole, position = mixer(x), {0: 0, 1: 3, 2: n - 12, 3: 3}
    states = [mixer.stream(x[i : i + 1, :end])[1] if end else None for i, end in position.items()]

    def advance(state: State, examples: list[int], count: int) -> State:
        """Stream the next tokens of these examples, and compare with the whole sequence."""
        spans = [(i, slice(position[i], position[i] + count)) for i in examples]
        y, state = mixer.stream(torch.stack([x[span] for span in spans]), state)
        expected = torch.stack([whole[span] for span in spans])
        message = "a joined stream gives another output than the stream alone"
        torch.testing.assert_close(y, expected, msg=lambda details: f"{message}\n{details}")
        for i in examples:
            position[i] += count
        return state

    state = join(states)
    for count in (1, 3, 1):
        state = advance(state, [0, 1, 2, 3], count)
    second, first, others = split(take(state, [1, 0, 3, 2]), [1, 1, 2])
    second = advance(second, [1], 2)
    state = advance(join([others, join([first, second])]), [3, 2, 0, 1], 1)
    advance(state, [3, 2, 0, 1], 3)
    return SUPPORTED


def any_length(mixer: Mixer, n: int) -> str:
    """Lengths that fit no block work; more tokens than `mixer.length` raise."""
    for size in (1, 2, n // 2, n):
        assert mixer(random_tokens(mixer, size)).shape[1] == size
    if mixer.can.length:
        assert mixer.length is None
        assert mixer(random_tokens(mixer, 4 * n + 1)).isfinite().all()
        return SUPPORTED
    assert mixer.length is not None, "mixer.can.length is False, but mixer.length is None"
    try:
        mixer(random_tokens(mixer, mixer.length + 1))
    except ValueError as error:
        assert str(mixer.length) in str(error), "the error must name the maximum length"
        return UNSUPPORTED
    raise AssertionError("more tokens than mixer.length must raise ValueError")


def maps(mixer: Mixer, n: int) -> str:
    """The attention map times the values is the output."""
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
    """Global tokens change the output of their own example only, and padding keeps having no
    influence.
    """
    x = random_tokens(mixer, n)
    is_global = torch.zeros(2, n, dtype=torch.bool)
    is_global[0, n // 2] = True
    if not mixer.can.global_attention_mask:
        return assert_unsupported(lambda: mixer(x, global_attention_mask=is_global))
    y, plain = mixer(x, global_attention_mask=is_global), mixer(x)
    assert not torch.equal(y[0], plain[0]), "a global token changes nothing"
    torch.testing.assert_close(y[1], plain[1])
    none = torch.zeros_like(is_global)
    torch.testing.assert_close(mixer(x, global_attention_mask=none), plain)
    mask = (torch.arange(n) < n - 5).expand(2, n)

    def mix_masked(t: Tensor) -> Tensor:
        return mixer(t, mask=mask, global_attention_mask=is_global)

    change = max_change(mix_masked, x, slice(n - 5, n), slice(0, n - 5))
    assert change == 0, "padding has influence"
    return SUPPORTED


def batch_independence(mixer: Mixer, n: int) -> str:
    """Examples of a batch do not influence each other."""
    x = random_tokens(mixer, n, b=3)
    torch.testing.assert_close(mixer(x)[1:2], mixer(x[1:2]))
    return SUPPORTED


def save_load(mixer: Mixer, n: int) -> str:
    """A state dict that goes through safetensors gives the same output and the same tensors."""
    from safetensors.torch import load, save

    x = random_tokens(mixer, n)
    expected = mixer(x)
    originals = {name: t.detach().clone() for name, t in mixer.state_dict().items()}
    loaded = load(save(originals))
    for t in mixer.state_dict().values():
        t.zero_()
    mixer.load_state_dict(loaded)
    torch.testing.assert_close(mixer(x), expected, rtol=0, atol=0)
    assert all(torch.equal(t, originals[name]) for name, t in mixer.state_dict().items())
    return SUPPORTED


def low_precision(mixer: Mixer, n: int) -> str:
    """The bfloat16 output is close to the float64 output."""
    x = random_tokens(mixer, n)
    expected = mixer(x)
    y = deepcopy(mixer).bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    error = (y.double() - expected).abs().mean() / expected.abs().mean().clamp(min=1e-3)
    assert error < 0.1, f"the mean relative error in bfloat16 is {error:.0%}"
    return SUPPORTED


def equal_tokens(mixer: Mixer, n: int) -> str:
    """Padding equals truncating also for equal tokens, whose ties a mechanism must break alike, for
    zero tokens, with masked tokens between others, and in 16 bits.
    """
    if not mixer.can.mask:
        return UNSUPPORTED
    x, real = random_tokens(mixer, n, b=1), n - 5
    position = torch.arange(n)
    inputs = {
        "equal tokens": x[:, position * 0],
        "pairs of equal tokens": x[:, position // 2],
        "three alternating tokens": x[:, position % 3],
        "zero tokens": x * 0,
    }
    tail, holes = position < real, (position < real) & (position % 3 != 1)
    for dtype, masks, tolerance in (
        (torch.float64, (tail, holes), 1e-9),
        (torch.float16, (tail, holes), 0.02),
        (torch.bfloat16, (holes,), 0.02),
    ):
        low = deepcopy(mixer).to(dtype)
        for (kind, tokens), keep in product(inputs.items(), masks):
            mask, t = keep[None], tokens.to(dtype)
            padded, cut = low(t, mask=mask), low(t[:, :real], mask=mask[:, :real])
            padded, cut = padded[:, :real][mask[:, :real]], cut[mask[:, :real]]
            assert padded.isfinite().all(), f"{kind} with padding give NaN in {dtype}"
            change = (padded - cut).abs().mean() / cut.abs().mean().clamp(min=1e-3)
            assert change < tolerance, f"{kind}: padded differs from cut by {change:.0%}"
    return SUPPORTED


def zero_tokens(mixer: Mixer, n: int) -> str:
    """A zero token among others has a gradient of ordinary size in float32: a norm that divides by
    almost zero shows here.
    """
    x = random_tokens(mixer, n).float()
    x[:, 3::4] = 0
    (x_grad,) = torch.autograd.grad(deepcopy(mixer).float()(x.requires_grad_()).square().sum(), x)
    assert x_grad.isfinite().all(), "the gradient at a zero token is not finite"
    assert x_grad.abs().max() < 1e6, f"the gradient at a zero token is {x_grad.abs().max():.0e}"
    return SUPPORTED


def buffer_reuse(mixer: Mixer, n: int) -> str:
    """The caller may overwrite a chunk after it was streamed, and the output: the state keeps no
    view of them.
    """
    if not (mixer.can.stream and mixer.causal):
        return UNSUPPORTED
    x, state, outputs = random_tokens(mixer, n), None, []
    for chunk in x.split([5, 1, 7, 1, n - 14], 1):
        chunk = chunk.clone()
        y, state = mixer.stream(chunk, state)
        outputs.append(y.clone())
        for used in (chunk, y):
            used.fill_(7)
    message = "overwriting a chunk or its output after the call changes later outputs"
    torch.testing.assert_close(torch.cat(outputs, 1), mixer(x), msg=message)
    return SUPPORTED


def large_inputs(mixer: Mixer, n: int) -> str:
    """Inputs × 20 and × 150 give finite outputs and gradients in every dtype (but for gradients of
    × 150 in float16), wherever softmax attention does and the exact result is in the range of the
    dtype.
    """
    softmax = _build_mixer(lambda causal: MultiHead(mixer.dim, 1, SoftmaxAttention()), False, 0)
    assert softmax is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low, largest = deepcopy(mixer).to(dtype), torch.finfo(dtype).max / 4
        for scale in (20, 150):
            x = (scale * random_tokens(mixer, n)).to(dtype).requires_grad_()
            exact = x.detach().double().requires_grad_()
            expected = mixer(exact)
            if expected.abs().max() > largest or not softmax.to(dtype)(x).isfinite().all():
                continue
            y = low(x)
            assert y.isfinite().all(), f"the output for inputs × {scale} is not finite in {dtype}"
            if dtype == torch.float16 and scale > 20:
                continue
            (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
            (x_grad,) = torch.autograd.grad(y.sum(), x)
            finite = x_grad.isfinite().all() or expected_grad.abs().max() > largest
            assert finite, f"the gradient for inputs × {scale} is not finite in {dtype}"
    return SUPPORTED


def map_in_training(mixer: Mixer, n: int) -> str:
    """In training, `attention_map` changes no buffer, no counter and no random state."""
    if not mixer.can.maps:
        return UNSUPPORTED
    mixer = deepcopy(mixer).train()

    def snapshot() -> dict[str, object]:
        """Buffers, plain attributes and the state of the global generator."""
        found: dict[str, object] = {"random state": torch.get_rng_state().tolist()}
        for name, buffer in mixer.named_buffers():
            found[name] = buffer.tolist()
        for name, module in mixer.named_modules():
            for key, value in vars(module).items():
                if isinstance(value, bool | int | float | str | list | dict):
                    found[f"{name}.{key}"] = repr(value)
                elif isinstance(value, torch.Generator):
                    found[f"{name}.{key}"] = value.get_state().tolist()
        return found

    before = snapshot()
    for _ in range(3):
        mixer.attention_map(random_tokens(mixer, n))
    after = snapshot()
    changed = [name for name, value in before.items() if after[name] != value]
    assert not changed, f"attention_map changes {', '.join(changed)}"
    return SUPPORTED


def func_grad(mixer: Mixer, n: int) -> str:
    """`torch.func.grad` gives the gradients of autograd, or raises `Unsupported`. So it does for a
    stream that is long enough to evict keys.
    """
    if mixer.can.stream and mixer.causal:
        tokens = random_tokens(mixer, 3 * n if mixer.length is None else n)
        try:
            found = grad(lambda x: mixer.stream(x)[0].square().sum())(tokens)
        except Unsupported as error:
            assert str(error), "Unsupported must give a reason"
        else:
            leaf = tokens.clone().requires_grad_()
            (wanted,) = torch.autograd.grad(mixer.stream(leaf)[0].square().sum(), leaf)
            torch.testing.assert_close(found, wanted)
    x, weight = random_tokens(mixer, n), random_tokens(mixer, n, seed=2)
    parameters = {name: p.detach() for name, p in mixer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return (functional_call(mixer, parameters, (x,)) * weight).sum()

    try:
        grads, x_grad = grad(loss, argnums=(0, 1))(parameters, x)
    except Unsupported as error:
        assert str(error), "Unsupported must give a reason"
        return UNSUPPORTED
    x = x.requires_grad_()
    expected = torch.autograd.grad(
        loss(dict(mixer.named_parameters()), x), [x, *mixer.parameters()], allow_unused=True
    )
    for found, wanted in zip((x_grad, *grads.values()), expected, strict=True):
        torch.testing.assert_close(found, torch.zeros_like(found) if wanted is None else wanted)
    return SUPPORTED


def func_vmap(mixer: Mixer, n: int) -> str:
    """`torch.func.vmap` over examples gives the output of the batch, or raises `Unsupported`. So it
    does for a stream that is long enough to evict keys.
    """
    if mixer.can.stream and mixer.causal:
        tokens = random_tokens(mixer, 3 * n if mixer.length is None else n)
        try:
            y = vmap(lambda one: mixer.stream(one[None])[0][0], randomness="different")(tokens)
        except Unsupported as error:
            assert str(error), "Unsupported must give a reason"
        else:
            torch.testing.assert_close(y, mixer.stream(tokens)[0])
    x = random_tokens(mixer, n)
    try:
        y = vmap(lambda one: mixer(one[None])[0], randomness="different")(x)
    except Unsupported as error:
        assert str(error), "Unsupported must give a reason"
        return UNSUPPORTED
    torch.testing.assert_close(y, mixer(x))
    return SUPPORTED


def meta_device(mixer: Mixer, n: int, build: MixerFactory, causal: bool) -> str:
    """Built on the meta device, then given memory and loaded, it is the same mixer, whatever was in
    the memory.
    """
    with torch.device("meta"):
        other = build(causal).double().eval()
    other.to_empty(device="cpu")
    for tensor in (*other.parameters(), *other.buffers()):
        tensor.detach().fill_(7 if tensor.is_floating_point() else 0)
    other.load_state_dict(mixer.state_dict())
    x = random_tokens(mixer, n)
    torch.testing.assert_close(other(x), mixer(x))
    return SUPPORTED


def check_compile(
    mixer: Mixer,
    *,
    lengths: tuple[int, ...] = (9, 23, 31),
    max_nodes: int = 4000,
    max_seconds: float = 60,
) -> None:
    """Check that `torch.compile` gives the outputs and gradients of eager mode at several lengths,
    at a bounded cost: a loop over tokens that is unrolled takes minutes to compile.

    Args:
        mixer: A float64 mixer in eval mode.
        lengths: Numbers of tokens.
        max_nodes: Limit for the nodes of all compiled graphs together.
        max_seconds: Limit for the processor time of compiling and running them.

    Raises:
        AssertionError: If a result differs or a limit is exceeded.
    """
    compile_graph = lookup_backend("aot_eager")
    graphs: list[int] = []

    def count_nodes(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(len(graph.graph.nodes))
        return compile_graph(graph, inputs)

    torch.compiler.reset()
    compiled, start = torch.compile(mixer, backend=count_nodes), process_time()
    for length in lengths:
        results = []
        for run in (compiled, mixer):
            x = random_tokens(mixer, length).requires_grad_()
            y = run(x)
            inputs = [x, *mixer.parameters()]
            grads = torch.autograd.grad((y * y).sum(), inputs, materialize_grads=True)
            results.append((y, *grads))
        torch.testing.assert_close(*results)
        nodes, seconds = sum(graphs), process_time() - start
        assert nodes <= max_nodes, f"up to {length} tokens, {nodes} nodes were compiled"
        assert seconds <= max_seconds, f"up to {length} tokens, compiling took {seconds:.0f} s"


CHECKS: dict[str, Callable[..., str]] = {
    "finite": finite_output,
    "gradients": gradients,
    "causality": causality,
    "cross": cross_attention,
    "padding": padding,
    "attn_mask": pair_mask,
    "stream": stream,
    "reorder": reorder,
    "join": join_streams,
    "length": any_length,
    "packed": packed_sequences,
    "maps": maps,
    "global_attention_mask": global_attention_mask,
    "batch_independence": batch_independence,
    "save_load": save_load,
    "bfloat16": low_precision,
    "equal_tokens": equal_tokens,
    "zero_tokens": zero_tokens,
    "large_inputs": large_inputs,
    "buffer_reuse": buffer_reuse,
    "map_in_training": map_in_training,
    "func_grad": func_grad,
    "func_vmap": func_vmap,
    "meta_device": meta_device,
}
