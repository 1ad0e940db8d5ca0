"""Unusual and invalid input: each gives the right result or a clear error."""

import resource
from pathlib import Path

import pytest
import torch

import regard
from regard import (
    ALiBi,
    Band,
    Causal,
    Chunks,
    Full,
    Global,
    MultiHead,
    RandomBlocks,
    SoftmaxAttention,
    Unsupported,
)
from regard.pattern import GlobalMask, PerHead
from regard.registry import get_recipe

NAMES = regard.list_recipes()
MASKED = [name for name in NAMES if get_recipe(name).can().mask]
CROSS = regard.list_recipes(can="cross")
# Outputs of these do not come from the keys alone: they add the token or a bias, or attend to
# learned vectors.
RESIDUAL = (
    "sab",
    "isab",
    "perceiver",
    "gmlp",
    "amlp",
    "xcit",
    "dynamic_conv",
    "draw_write",
    "average",
    "all_attention",
    "lite",
)
HEADED = [name for name in NAMES if get_recipe(name).can().heads and name != "parameter_free"]
CHOOSY = ["reformer", "routing"]  # rounding may change the bucket of a token
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def small(name, dtype=torch.float64, **more):
    """The recipe's example with fixed weights, and without the noise of training."""
    torch.manual_seed(0)
    return get_recipe(name).example(**more).to(dtype).eval()


# ------------------------------------------------------------------------------------------ lengths
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 13, 31, 32])
def test_any_length(name, n, executor, rand):
    """Every length is valid, also short ones and those that do not fill a block."""
    x = rand(2, n, 8).requires_grad_()
    for causal in get_recipe(name).causal_options():
        y = small(name, causal=causal)(x)
        assert y.shape == x.shape and y.isfinite().all()
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert grad.shape == x.shape and grad.isfinite().all()


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("n", [1, 20])
def test_mask_of_padding_only(name, n, executor, rand):
    """Padding alone gives no NaN, and zero without an inner residual."""
    x, mask = rand(2, n, 8).requires_grad_(), torch.ones(2, n, dtype=torch.bool)
    mask[0] = False
    mixer = small(name)
    y = mixer(x, mask=mask)
    assert y.isfinite().all() and (name in RESIDUAL or not y[0].any())
    assert y[1].any() or n == 1  # random blocks need not hold the token itself
    torch.testing.assert_close(y[1:], mixer(x[1:]))
    grads = torch.autograd.grad(y.sum(), [x, *mixer.parameters()], allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in grads) and not grads[0][0].any()


@pytest.mark.parametrize("name", [name for name in CROSS if name not in RESIDUAL])
def test_context_of_padding_gives_zero(name, executor, rand):
    """A query that sees nothing gives zero."""
    mask = torch.tensor([[False] * 9, [True] * 9])
    y = small(name)(rand(2, 5, 8), rand(2, 9, 8), mask=mask)
    assert (name in RESIDUAL or not y[0].any()) and y[1].any()


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize("m", [1, 4, 5, 30])
def test_context_of_any_length(name, m, executor, rand):
    """The context may have another length than x."""
    y = small(name)(rand(2, 5, 8), rand(2, m, 8))
    assert y.shape == (2, 5, 8) and y.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_empty_batch(name, executor, rand):
    """An empty batch is valid."""
    x = rand(0, 12, 8)
    assert small(name)(x).shape == (0, 12, 8)
    if name in MASKED:
        assert small(name)(x, mask=torch.ones(0, 12, dtype=torch.bool)).shape == (0, 12, 8)


@pytest.mark.parametrize("name", regard.list_recipes(can=["mask", "maps"]))
def test_attention_maps_of_few_tokens(name, rand):
    """Attention maps of one token, of none, and of no examples exist."""
    for causal in get_recipe(name).causal_options():
        mixer = small(name, causal=causal)
        for b, n in ((2, 0), (2, 1), (0, 5), (0, 0)):
            weights = mixer.attention_map(rand(b, n, 8))
            assert (weights.shape[0], *weights.shape[2:]) == (b, n, n)


@pytest.mark.parametrize("name", ["random_blocks", "bigbird", "linformer", "mlp_mixer"])
def test_too_long(name, rand):
    """Inputs beyond the length raise an error with the maximum."""
    mixer = small(name)
    with pytest.raises(
        ValueError, match=rf"Input has {mixer.length + 1} tokens.*length={mixer.length}"
    ):
        mixer(rand(1, mixer.length + 1, 8))
    if name == "linformer":
        with pytest.raises(ValueError, match=r"Context has .* tokens.*length="):
            mixer(rand(1, 4, 8), rand(1, mixer.length + 1, 8))


@pytest.mark.parametrize("name", ["random_blocks", "bigbird"])
def test_too_long_stream(name, rand):
    """The maximum length applies to all chunks together."""
    mixer, state = small(name, causal=True), None
    _, state = mixer.stream(rand(1, mixer.length, 8), state)
    with pytest.raises(ValueError, match=str(mixer.length)):
        mixer.stream(rand(1, 1, 8), state)


# -------------------------------------------------------------------------------------------- masks
@pytest.mark.parametrize("name", MASKED)
def test_invalid_masks(name, rand):
    """Masks of another dtype or shape raise an error."""
    mixer, x = small(name), rand(2, 6, 8)
    good = torch.ones(2, 6, dtype=torch.bool)
    for wrong in (good.float(), good.long(), good.byte()):
        with pytest.raises(
            TypeError, match=r"mask must be a bool tensor, True = keep, not torch\."
        ):
            mixer(x, mask=wrong)
    with pytest.raises(TypeError, match=r"mask must be a bool tensor.*not list"):
        mixer(x, mask=good.tolist())
    for shape in ((2, 5), (2, 7), (6,), (1, 6), (2, 1), (2, 6, 6), (2, 6, 1), (6, 2), ()):
        with pytest.raises(ValueError, match=r"mask must have shape \(2, 6\), not \("):
            mixer(x, mask=torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("name", CROSS)
def test_mask_of_context(name, rand):
    """With a context, the mask must fit the context."""
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 9\), not \(2, 6\)"):
        small(name)(rand(2, 6, 8), rand(2, 9, 8), mask=torch.ones(2, 6, dtype=torch.bool))


def test_invalid_global_attention_mask(rand):
    """Invalid global attention masks raise an error."""
    mixer, x = small("longformer"), rand(2, 6, 8)
    with pytest.raises(TypeError, match="global_attention_mask must be a bool tensor"):
        mixer(x, global_attention_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"global_attention_mask must have shape \(2, 6\)"):
        mixer(x, global_attention_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(Unsupported, match="does not support a global_attention_mask"):
        small("local")(x, global_attention_mask=torch.ones(2, 6, dtype=torch.bool))


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_nan_in_padding(name, poison, executor, rand):
    """Values in padding reach neither an output nor a gradient."""
    clean, mask = rand(2, 20, 8), torch.arange(20).expand(2, 20) % 4 != 2
    results = []
    for bad in (0.0, poison):
        mixer = small(name)
        x = torch.where(mask[..., None], clean, bad).requires_grad_()
        y = mixer(x, mask=mask)[mask]
        results.append(
            [y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()], allow_unused=True)]
        )
    for want, got in zip(*results, strict=True):
        assert (want is None) == (got is None)
        assert got is None or torch.equal(want, got)


@pytest.mark.parametrize("name", CROSS)
def test_nan_in_padded_context(name, executor, rand):
    """Values in the padding of a context do not reach an output."""
    mixer, x, context = small(name), rand(2, 5, 8), rand(2, 9, 8)
    mask = torch.arange(9).expand(2, 9) < 6
    poisoned = context.masked_fill(~mask[..., None], torch.nan)
    assert torch.equal(mixer(x, poisoned, mask=mask), mixer(x, context, mask=mask))


# ------------------------------------------------------------------------------------------- tokens
@pytest.mark.parametrize("name", NAMES)
def test_invalid_tokens(name, rand):
    """The error states what was given and what was expected."""
    mixer = small(name)
    for shape in ((6, 8), (8,), (1, 2, 6, 8)):
        with pytest.raises(
            ValueError, match=r"x must be a floating-point tensor of shape \(b, n, 8\), not"
        ):
            mixer(rand(*shape))
    for dtype in (torch.long, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=r"x must be a floating-point tensor.*torch\."):
            mixer(torch.ones(2, 6, 8, dtype=dtype))
    for width in (0, 1, 7, 9, 16):
        with pytest.raises(ValueError, match=f"x must have width 8, not {width}"):
            mixer(rand(2, 6, width))
    for other in (None, [[1.0]], "tokens"):
        with pytest.raises(ValueError, match="x must be a floating-point tensor"):
            mixer(other)


@pytest.mark.parametrize("name", CROSS)
def test_invalid_context(name, rand):
    """A context that does not fit raises an error that names it."""
    mixer, x = small(name), rand(2, 6, 8)
    with pytest.raises(ValueError, match="context must have width 8, not 9"):
        mixer(x, rand(2, 6, 9))
    with pytest.raises(
        ValueError, match=r"context must be a floating-point tensor of shape \(b, n, 8\)"
    ):
        mixer(x, rand(6, 8))
    for b in (0, 1, 3):
        with pytest.raises(
            ValueError, match=rf"context \({b}, 6, 8\).* does not match x \(2, 6, 8\)"
        ):
            mixer(x, rand(b, 6, 8))
    with pytest.raises(ValueError, match=r"context .*float32 does not match x .*float64"):
        mixer(x, rand(2, 6, 8).float())
    with pytest.raises(ValueError, match="context has no tokens"):
        mixer(x, rand(2, 0, 8))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CROSS])
def test_no_context_with_relative_positions(name, rand):
    """Mixers that compare positions reject another sequence."""
    with pytest.raises(Unsupported, match="does not support cross-attention"):
        small(name)(rand(2, 6, 8), rand(2, 6, 8))


@pytest.mark.parametrize("name", CROSS)
def test_no_context_if_causal(name, rand):
    """Causal mixers reject another sequence."""
    if not get_recipe(name).can().causal:
        with pytest.raises(Unsupported, match="causal"):
            small(name, causal=True)
    else:
        with pytest.raises(Unsupported, match=r"causal.*cross-attention"):
            small(name, causal=True)(rand(2, 6, 8), rand(2, 6, 8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(name, dtype, executor, rand):
    """The dtype is kept, and the result is close to float64."""
    x = rand(2, 20, 8)
    want = small(name)(x)
    low = x.to(dtype).requires_grad_()
    mixer = small(name, dtype)
    y = mixer(low)
    y.sum().backward()
    assert y.dtype == dtype and low.grad.dtype == dtype and low.grad.isfinite().all()
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.1}[
        dtype
    ]
    error = (y.double() - want).abs().amax(-1).flatten()
    worst = error.quantile(0.9) if name in CHOOSY else error.max()
    assert worst <= bound * want.abs().max().clamp(min=1)


@pytest.mark.parametrize("name", NAMES)
def test_strides(name, executor, rand):
    """Inputs need not be contiguous."""
    mixer = small(name)
    wide, columns = rand(2, 40, 16), rand(8, 20, 2)
    for x in (
        wide[:, ::2, ::2],
        columns.permute(2, 1, 0),
        rand(1, 20, 8).expand(3, 20, 8),
        rand(2, 1, 8).expand(2, 20, 8),
    ):
        assert not x.is_contiguous()
        torch.testing.assert_close(mixer(x), mixer(x.contiguous()))
    if name in MASKED:
        x, mask = columns.permute(2, 1, 0), (torch.arange(20) < 15).expand(2, 20)
        torch.testing.assert_close(
            mixer(x, mask=mask), mixer(x.contiguous(), mask=mask.contiguous())
        )


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_not_modified(name, executor, rand):
    """A mixer does not modify its input."""
    x = rand(2, 20, 8)
    copy, mask = x.clone(), torch.arange(20).expand(2, 20) < 15
    small(name)(x)
    if name in MASKED:
        small(name)(x, mask=mask)
    assert torch.equal(x, copy)


@pytest.mark.parametrize("name", NAMES)
def test_partial_requires_grad(name, executor, rand):
    """Frozen parameters or inputs do not change the other gradients."""
    x, mixer = rand(2, 20, 8), small(name)
    both = x.clone().requires_grad_()
    mixer(both).square().sum().backward()
    want = {key: p.grad.clone() for key, p in mixer.named_parameters() if p.grad is not None}
    mixer.zero_grad()
    if want:
        mixer(x).square().sum().backward()
        for key, p in mixer.named_parameters():
            assert (p.grad is not None) == (key in want)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, want[key])
    frozen = x.clone().requires_grad_()
    mixer.requires_grad_(False)(frozen).square().sum().backward()
    torch.testing.assert_close(frozen.grad, both.grad)
    for i, p in enumerate(mixer.parameters()):
        p.requires_grad_(i % 2 == 0)
    mixer.zero_grad()
    if want and any(p.requires_grad for p in mixer.parameters()):
        mixer(x).square().sum().backward()
        for key, p in mixer.named_parameters():
            if p.requires_grad and key in want:
                torch.testing.assert_close(p.grad, want[key])


@pytest.mark.parametrize("name", MASKED)
def test_large_scores(name, executor, rand):
    """Large scores do not overflow in the exponential."""
    y = small(name, torch.float32)(rand(2, 20, 8).float() * 1e4)
    assert y.isfinite().all()


# ----------------------------------------------------------------------------------------- building
@pytest.fixture
def little_memory():
    """An endless loop over heads ends in a MemoryError instead of exhausting the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", HEADED)
@pytest.mark.parametrize("heads", [0, -1, 1.5, 3, 16, "2", None])
def test_invalid_heads(name, heads, little_memory):
    """The error mentions heads."""
    with pytest.raises((ValueError, TypeError), match="heads"):
        regard.create(name, dim=8, heads=heads, **get_recipe(name).example_kwargs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, -8, 8.0, "8", None])
def test_invalid_dim(name, dim):
    """The error mentions dim."""
    with pytest.raises((ValueError, TypeError), match="dim"):
        regard.create(
            name,
            dim=dim,
            heads=1,
            **{k: v for k, v in get_recipe(name).example_kwargs.items() if k != "dilation"},
        )


@pytest.mark.parametrize("name", ["fnet", "mlp_mixer", "gmlp", "amlp", "aft", "average_pool"])
def test_heads_of_mixers_without_heads(name):
    """Mixers without heads take the argument, say that it changes nothing, and still check it."""
    kwargs = {"dim": 8, **get_recipe(name).example_kwargs}
    mixer = regard.create(name, heads=2, **kwargs)
    assert "heads" in mixer.can.reason("heads")
    for wrong in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="heads"):
            regard.create(name, heads=wrong, **kwargs)


ABSURD = [
    ("vanilla", {"kv_heads": 3}, "kv_heads"),
    ("vanilla", {"kv_heads": 0}, "kv_heads"),
    ("vanilla", {"kv_heads": 1.0}, "kv_heads"),
    ("vanilla", {"kv_heads": 4}, "kv_heads"),
    ("global_tokens", {"tokens": -1}, "-1"),
    ("global_tokens", {"tokens": 1.5}, r"1\.5"),
    ("local", {"window": -1}, "-1"),
    ("local", {"window": 2.0}, r"2\.0"),
    ("local", {"window": "3"}, "3"),
    ("local", {"window": True}, "True"),
    ("dilated", {"dilation": 0}, "dilation.*0"),
    ("dilated", {"window": -3}, "-3"),
    ("random_blocks", {"length": 0}, "length"),
    ("random_blocks", {"length": -5}, "length"),
    ("random_blocks", {"length": 32, "block": 0}, "block|size"),
    ("random_blocks", {"length": 32, "count": -1}, "count.*-1"),
    ("random_blocks", {"length": 32, "seed": -1}, "seed.*-1"),
    ("random_blocks", {"length": 32, "seed": None}, "seed.*None"),
    ("block_local", {"block": 0}, "size.*0|block.*0"),
    ("sparse_strided", {"stride": 0}, "stride|step"),
    ("sparse_strided", {"split": "head"}, "split must be one of .*'heads'.*not 'head'"),
    ("sparse_fixed", {"cells": 0}, "cells"),
    ("sparse_fixed", {"cells": 200}, "cells"),
    ("sparse_fixed", {"stride": 0, "cells": 0}, "cells|stride"),
    ("longformer", {"dilation": (1,)}, "dilation"),
    ("longformer", {"dilation": (1, 2, 3)}, "dilation"),
    ("longformer", {"dilation": 0}, "dilation"),
    ("longformer", {"dilation": "ab"}, "dilation"),
    ("bigbird", {"length": 0}, "length"),
    ("bigbird", {"length": 32, "window": 2}, "odd"),
    ("bigbird", {"length": 32, "window": -1}, "window|back"),
    ("bigbird", {"length": 32, "block": 0}, "block|size"),
    ("bigbird", {"length": 32, "random": -1}, "count|random"),
    ("bigbird", {"length": 32, "globals": -1}, "globals|hi"),
    ("image_local_2d", {"width": 0}, "width.*0"),
    ("image_local_2d", {"width": 6, "block": (0, 3)}, "rows.*0"),
    ("image_local_2d", {"width": 6, "block": 4}, "block"),
    ("image_local_2d", {"width": 6, "memory": (1,)}, "memory"),
    ("image_local_2d", {"width": 6, "memory": (-1, 2)}, "-1"),
    (
        "image_local_2d",
        {"width": 6, "order": "blocks"},
        "order must be one of 'raster', 'block', not 'blocks'",
    ),
    ("image_local_1d", {"block": 0}, "block.*0"),
    ("image_local_1d", {"memory": -1}, "memory.*-1"),
    ("star", {"cycles": 0}, "cycles.*0"),
    ("longformer", {"window": (1, 2, 3)}, "window"),
    ("longformer", {"window": -1}, "left.*-1"),
    ("etc", {"globals": -1}, "globals.*-1"),
    ("etc", {"radius": -1}, "radius.*-1"),
    ("etc", {"clip": -1}, "clip.*-1"),
    ("etc", {"segment": 0}, "segment.*0"),
    ("etc", {"causal": True}, "global tokens"),
    ("bp_transformer", {"near": 0}, "near.*0"),
    ("bp_transformer", {"clip": 0}, "clip.*0"),
    ("sinks", {"sinks": -1}, "sinks.*-1"),
    ("sinks", {"window": -1}, "left.*-1"),
    ("neighbourhood", {"length": 0}, "length.*0"),
    ("neighbourhood", {"length": 9, "size": 0}, "kernel_cols.*0"),
    ("neighbourhood", {"length": 9, "size": (3, 3)}, "size must be one number"),
    ("neighbourhood", {"length": 9, "size": (3,), "width": 3}, "size must be two numbers"),
    ("neighbourhood", {"length": 9, "width": 0}, "width.*0"),
    ("swin", {"width": 0}, "width.*0"),
    ("swin", {"width": 6, "window": 0}, "rows.*0"),
    ("swin", {"width": 6, "window": (1, 2, 3)}, "window must be two numbers"),
    ("swin", {"width": 6, "layer": -1}, "layer.*-1"),
    ("axial", {"width": 4, "form": "both"}, "form must be one of .*'row'.*not 'both'"),
    ("axial_passes", {"width": 0}, "0"),
    ("axial", {"width": 0}, "0"),
    ("axial", {"width": -4}, "-4"),
    ("per_head", {"patterns": ()}, "patterns"),
    ("per_head", {"patterns": (1, 2)}, "pattern"),
    ("per_head", {"patterns": (PerHead((Band(1, 1), Band(2, 2))),)}, "pattern"),
    ("linear", {"chunk": 0}, "chunk"),
    ("linear", {"chunk": 1.5}, "chunk"),
    ("linformer", {"length": 32, "rank": 0}, "rank"),
    ("linformer", {"length": 32, "rank": 33}, "rank"),
    ("linformer", {"length": 0, "rank": 1}, "length"),
    ("linformer", {"length": 32, "rank": 4, "share": "all"}, "share must be .*'all'"),
    ("mlp_mixer", {"length": 0}, "length"),
    ("mlp_mixer", {"length": 8, "hidden": 0}, "hidden"),
    ("mlp_mixer", {"length": 8.5}, "length"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "words"), ABSURD, ids=lambda x: x if isinstance(x, str) else repr(x)[:40]
)
def test_invalid_arguments(name, arguments, words):
    """Invalid arguments raise an error that names them."""
    heads = 1 if name == "mlp_mixer" else 2
    with pytest.raises((ValueError, TypeError), match=words):
        regard.create(name, dim=8, heads=heads, **arguments)


def test_huge_windows_and_blocks(rand):
    """Windows and blocks larger than the sequence neither overflow nor allocate."""
    x, dense = rand(1, 30, 8), small("vanilla")
    for name, arguments in (
        ("local", {"window": 10**15}),
        ("block_local", {"block": 10**15}),
        ("global_tokens", {"tokens": 10**15}),
        ("dilated", {"window": 10**15, "dilation": 1}),
        ("longformer", {"window": 10**15}),
        ("axial", {"width": 10**12}),
        ("image_local_2d", {"width": 10**12, "block": (8, 10**12)}),
    ):
        torch.manual_seed(0)
        mixer = regard.create(name, dim=8, heads=2, **arguments).double()
        (getattr(mixer, "local", mixer)).load_state_dict(dense.state_dict())
        torch.testing.assert_close(mixer(x), dense(x))


# ------------------------------------------------------------------------------------ regard.attend
def qkv(rand, b=2, h=2, n=6, e=4):
    return [rand(b, h, n, e) for _ in range(3)]


def test_a_number_beyond_json_is_named():
    """Fails if a number that is an integer is said not to be one."""
    with pytest.raises(ValueError, match=r"window must be between -2\^53 and 2\^53"):
        regard.create("local", dim=8, heads=2, window=2**53)


def test_attend_at_positions_that_overflow(rand):
    """Fails if a position near 2**63 wraps around, so that other keys are visible, silently."""
    q, k, v = qkv(rand)
    for large in (2**63 - 1, 2**63 - 7, 2**62, 2**41):
        for positions in (
            {"q_start": large},
            {"k_positions": large},
            {"k_positions": torch.full((6,), large)},
            {"k_positions": torch.full((6,), -large)},
            {"q_start": torch.full((2,), large), "k_positions": torch.arange(6).expand(2, 6)},
        ):
            with pytest.raises(ValueError, match=r"(q_start|k_positions) must be"):
                regard.attend(q, k, v, pattern=Causal(), **positions)
    with pytest.raises(ValueError, match="q_start must be at most"):
        regard.attend(q, k, v, pattern=Causal(), q_start=2**63)
    # keys far beyond the queries are not visible, wherever they are
    far = torch.full((2, 6), 2**63 - 1)
    out = regard.attend(q, k, v, pattern=Causal(), q_start=torch.zeros(2).long(), k_positions=far)
    assert not out.any()


@pytest.mark.parametrize("backend", ["reference", "sdpa", "sparse", "auto", "flex"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 0, 5),
        (2, 2, 5, 0),
        (0, 2, 5, 5),
        (2, 0, 5, 5),
        (2, 2, 1, 1),
        (2, 2, 1, 200),
        (2, 2, 200, 1),
    ],
)
def test_attend_to_few_tokens(backend, shape, rand):
    """Empty inputs and single tokens are valid."""
    b, h, n, m = shape
    q, k, v = rand(b, h, n, 4), rand(b, h, m, 4), rand(b, h, m, 3)
    out = regard.attend(q, k, v, pattern=Band(3, 3), backend=backend)
    assert out.shape == (b, h, n, 3) and out.isfinite().all()
    if m == 0:
        assert not out.any()


def test_attend_with_zero_width(rand):
    """Values of width zero are valid, queries are not."""
    q, k, v = qkv(rand)
    assert regard.attend(q, k, v[..., :0]).shape == (2, 2, 6, 0)
    with pytest.raises(ValueError, match="the same width > 0"):
        regard.attend(q[..., :0], k[..., :0], v)


def test_attend_invalid_tensors(rand):
    """The error names the tensor and the mismatch."""
    q, k, v = qkv(rand)
    for bad in (q[0], q[..., 0], q[None]):
        with pytest.raises(ValueError, match=r"q must be a tensor of shape \(b h n e\)"):
            regard.attend(bad, k, v)
        with pytest.raises(ValueError, match=r"v must be a tensor of shape \(b h n e\)"):
            regard.attend(q, k, bad)
    with pytest.raises(ValueError, match=r"k must be a tensor.*list"):
        regard.attend(q, k.tolist(), v)
    with pytest.raises(
        TypeError, match=r"the same floating point dtype, not torch\.float64, torch\.int64"
    ):
        regard.attend(q, k.long(), v)
    with pytest.raises(TypeError, match="the same floating point dtype"):
        regard.attend(q, k.float(), v)
    with pytest.raises(ValueError, match="k and v must have the same"):
        regard.attend(q, k, v[:, :, :5])
    with pytest.raises(ValueError, match="the same width > 0, not 4 and 3"):
        regard.attend(q, k[..., :3], v)
    with pytest.raises(ValueError, match="must have the batch size of q"):
        regard.attend(q, k[:1], v[:1])
    three = rand(2, 3, 6, 4)
    with pytest.raises(ValueError, match="a divisor of its heads"):
        regard.attend(q, three, three)
    with pytest.raises(ValueError, match="a divisor of its heads"):
        regard.attend(q, k[:, :0], v[:, :0])


def test_attend_invalid_masks(rand):
    """Masks of another dtype or shape raise an error."""
    q, k, v = qkv(rand)
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        regard.attend(q, k, v, mask=torch.ones(2, 6))
    for shape in ((6,), (2, 5), (1, 6), (2, 6, 6), (2, 1, 1, 6)):
        with pytest.raises(ValueError, match=r"mask must have shape \(2, 6\)"):
            regard.attend(q, k, v, mask=torch.ones(shape, dtype=torch.bool))
    global_attention_mask = torch.ones(2, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="has no GlobalMask"):
        regard.attend(q, k, v, pattern=Band(1, 1), global_attention_mask=global_attention_mask)
    with pytest.raises(ValueError, match=r"self-attention.*6 queries and 5 keys"):
        regard.attend(
            q,
            k[:, :, :5],
            v[:, :, :5],
            pattern=GlobalMask(),
            global_attention_mask=global_attention_mask,
        )


def test_attend_invalid_patterns(rand):
    """Patterns for other heads or lengths raise an error."""
    q, k, v = qkv(rand)
    for wrong in (None, "causal", torch.ones(6, 6), Band):
        with pytest.raises(TypeError, match="pattern must be a Pattern"):
            regard.attend(q, k, v, pattern=wrong)
    with pytest.raises(ValueError, match="for 3 heads, but q has 2"):
        regard.attend(q, k, v, pattern=PerHead((Full(),) * 3))
    with pytest.raises(ValueError, match="supports 4 positions, but the sequence has 6"):
        regard.attend(q, k, v, pattern=RandomBlocks(2, 1, 2))
    with pytest.raises(ValueError, match="supports 8 positions, but the sequence has 16"):
        regard.attend(q, k, v, pattern=RandomBlocks(2, 1, 4), q_start=10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prior": "alibi"}, "prior"),
        ({"prior": torch.zeros(6, 6)}, "prior"),
        ({"k_positions": torch.arange(5)}, "k_positions"),
        ({"k_positions": torch.arange(12).view(2, 6)}, "k_positions"),
        ({"k_positions": torch.arange(6).float()}, "k_positions"),
        ({"k_positions": 1.5}, "k_positions"),
        ({"k_positions": -1}, "k_positions"),
        ({"q_start": -3}, "q_start"),
        ({"q_start": 0.5}, "q_start"),
        ({"q_start": None}, "q_start"),
        ({"scale": "big"}, "scale"),
    ],
    ids=lambda x: repr(x)[:30],
)
@pytest.mark.parametrize("backend", ["auto", "sparse"])
def test_attend_invalid_options(options, words, backend, rand):
    """Invalid options raise an error that names them."""
    q, k, v = qkv(rand)
    with pytest.raises((ValueError, TypeError, Unsupported), match=words):
        regard.attend(q, k, v, pattern=Band(2, 2), backend=backend, **options)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "sparse", "auto"])
@pytest.mark.parametrize(
    "pattern", [Full(), Causal(), Band(5, 5) | Global(2), Chunks(16)], ids=repr
)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_attend_nan_in_padding(backend, pattern, poison, rand):
    """NaN or Inf in masked keys or values has no effect, forward or backward."""
    mask = torch.arange(210).expand(2, 210) % 4 != 1
    clean = qkv(rand, n=210)
    results = []
    for bad in (0.0, poison):
        q, *kv = clean
        k, v = (x.masked_fill(~mask[:, None, :, None], bad).requires_grad_() for x in kv)
        q = q.clone().requires_grad_()
        out = regard.attend(q, k, v, pattern=pattern, mask=mask, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


def test_attend_prior_for_other_heads(rand):
    """A prior for another number of heads raises an error."""
    with pytest.raises((ValueError, RuntimeError)):
        regard.attend(*qkv(rand), prior=ALiBi(4).double())


# --------------------------------------------------------------------------------------- components
def test_multihead_invalid_arguments():
    """Components that do not fit raise an error."""
    with pytest.raises(ValueError, match="dim=10 must be divisible by heads=4"):
        MultiHead(10, 4, SoftmaxAttention())
    with pytest.raises(ValueError, match="project=False"):
        MultiHead(8, 4, SoftmaxAttention(), kv_heads=2, project=False)
    with pytest.raises(ValueError, match="no backend 'fast'"):
        SoftmaxAttention(backend="fast")
    with pytest.raises(ValueError, match="3 heads"):
        MultiHead(8, 4, SoftmaxAttention(PerHead((Full(),) * 3)))


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("bigbird", {"length": 64, "window": "3"}, "window must be an integer"),
        ("bigbird", {"length": 64, "globals": -1}, "globals must be an integer"),
        ("sparse_strided", {"split": "layers", "layer": "a"}, "layer must be an integer"),
        ("sparse_strided", {"layer": 1}, "layer is only used with split=.layers."),
        ("sparse_fixed", {"cells": "a"}, "cells must be an integer"),
        ("sparse_fixed", {"stride": 4, "cells": 5}, "cells must be between"),
        ("longformer", {"dilation": 1.5}, "dilation must be an integer"),
        ("longformer", {"dilation": "ab"}, "dilation must be an integer"),
        ("per_head", {"patterns": Band(1, 1)}, "list of at least one Pattern"),
        ("per_head", {"patterns": [1]}, "list of at least one Pattern"),
    ],
)
def test_absurd_recipe_arguments(name, arguments, says):
    with pytest.raises(ValueError, match=says):
        regard.create(name, dim=8, heads=2, **arguments)


def test_unknown_name():
    with pytest.raises(ValueError, match="no recipe None"):
        regard.create(None)


def test_prior_for_another_number_of_heads(rand):
    q = rand(1, 4, 5, 8)
    for heads in (1, 2, 8):
        with pytest.raises(ValueError, match=f"the prior is for {heads} heads, but q has 4"):
            regard.attend(q, q, q, prior=ALiBi(heads))
    with pytest.raises(ValueError, match="integer"):
        ALiBi(0)


@pytest.mark.parametrize("name", ["vanilla", "linear", "local"])
def test_stream_with_another_batch_size(name):
    mixer = regard.create(name, dim=8, heads=2, causal=True)
    _, state = mixer.stream(torch.zeros(2, 3, 8))
    with pytest.raises(ValueError, match="the state has 2 examples"):
        mixer.stream(torch.zeros(3, 1, 8), state)


def test_input_of_another_dtype():
    with pytest.raises(TypeError, match=r"x is torch\.float64 but the mixer is torch\.float32"):
        regard.create("vanilla", dim=8, heads=2)(torch.zeros(1, 3, 8, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_another_type(name):
    """Arguments of another type than annotated raise an error that names them."""
    plain = {
        "int": (1.5, "x", None, [], True, 10**30),
        "float": ("x", None, float("nan"), [], True),
        "bool": ("x", None, 1),
    }
    for key, parameter in get_recipe(name).parameters.items():
        if key in ("dim", "heads"):
            continue
        for nonsense in plain.get(str(parameter.annotation), ()):
            arguments = {"dim": 8, "heads": 1, **get_recipe(name).example_kwargs, key: nonsense}
            with pytest.raises((ValueError, TypeError), match=f"{key} must be"):
                regard.create(name, **arguments)


def test_component_errors_name_the_arguments():
    with pytest.raises(ValueError, match=r"in local\(dim=8, heads=2, window=-1\)"):
        regard.create("local", dim=8, heads=2, window=-1)
