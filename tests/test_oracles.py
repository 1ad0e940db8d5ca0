"""Every recipe against its naive loop: outputs and all gradients, in float64, on both executors."""

import ast
from pathlib import Path

import pytest
import torch

import oracles
import regard
from regard import Band, Global

LENGTHS = (1, 23, 63, 100)
SPLITS = [{"split": split, "layer": layer} for split, layer in (("heads", 0), ("merged", 0), ("layers", 0), ("layers", 1))]
RULES = [lambda i, j: abs(i - j) <= 2, lambda i, j: (abs(i - j) <= 8 and (i - j) % 4 == 0) or i == 0 or j == 0]

# what each recipe is built with; a function where the length matters
ARGUMENTS = {
    "parameter_free": [{}],
    "vanilla": [{}, {"bias": True, "kv_heads": 2}, {"kv_heads": 1}],
    "global_tokens": [{"tokens": 3}, {"tokens": 70}, {"tokens": 0}],
    "local": [{"window": 3}, {"window": 0}, {"window": 40}],
    "dilated": [{"window": 2, "step": 3}, {"window": 20, "step": 7}],
    "random_blocks": [{"block": 4, "count": 2}, {"block": 16, "count": 1, "seed": 5}],
    "block_local": [{"block": 5}, {"block": 32}, {"block": 1}],
    "sparse_strided": [{"stride": 4, **split} for split in SPLITS] + [{"stride": 10}],
    "sparse_fixed": [{"stride": 5, "cells": 2, **split} for split in SPLITS] + [{"stride": 16, "cells": 1}],
    "longformer": [{"window": 2}, {"window": 2, "steps": (1, 3, 1, 5)}],
    "bigbird": [{"block": 4, "globals": 1, "random": 1}, {"block": 8, "window": 1, "globals": 2, "random": 2, "seed": 3}],
    "image_local_2d": [{"width": 6, "block": (2, 3), "memory": (2, 1)}, {"width": 20, "block": (3, 4), "memory": (1, 2)}],
    "axial": [{"width": 5}, {"width": 10}],
    "per_head": [{"patterns": (Band(2, 2), Band(2, 2, 4) | Global(1))}, {}],
    "linear": [{}, {"chunk": 7}],
    "linformer": [{"rank": 5, "share": share} for share in ("heads", "none", "kv")],
    "fnet": [{}],
    "mlp_mixer": [{"hidden": 6}, {}],
}
LIMITED = ("random_blocks", "bigbird", "linformer", "mlp_mixer")
WITHOUT_MASK = ("fnet", "mlp_mixer")
CASES = [(name, i) for name in ARGUMENTS for i in range(len(ARGUMENTS[name]))]


def cases(*lengths):
    """(recipe, its arguments, tokens, causal), but only one length for all arguments beside the first."""
    for name, i in CASES:
        for n in lengths if i == 0 else lengths[-1:]:
            for causal in (False, True):
                if not (causal and name in ("linformer", "fnet", "mlp_mixer")):
                    yield pytest.param(name, i, n, causal, id=f"{name}{i}-{n}{'-causal' if causal else ''}")


def make(name, i, n, causal):
    """The mixer in float64, a function that runs its oracle, and the number of heads."""
    arguments = dict(ARGUMENTS[name][i])
    heads = 1 if name in ("fnet", "mlp_mixer") else 4
    if name in LIMITED:
        arguments["length"] = max(n + 3, 8)
    if name == "bigbird" and causal:
        arguments["globals"] = 0
    torch.manual_seed(0)
    mixer = regard.create(name, dim=8, heads=heads, causal=causal, **arguments).double()
    if name == "per_head" and arguments.pop("patterns", None):
        arguments["rules"] = RULES

    def oracle(x, **inputs):
        return oracles.ORACLES[name](dict(mixer.named_parameters()), x, heads=heads, causal=causal, **arguments, **inputs)

    return mixer, oracle


def holes(n):
    """One example whole, one padded at the end, one with holes."""
    at = torch.arange(n)
    return torch.stack((at >= 0, at < max(1, n - n // 3), at % 3 != 1))


def run(f, leaves, weight, x, inputs):
    """The outputs that count, and all gradients."""
    y = f(x, **inputs)
    grads = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [y * (weight != 0), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))]


def compare(forced, mixer, oracle, x, rows=None, **inputs):
    """Outputs and the gradients of x, memory and every parameter agree; `rows` (b n) tells which outputs count.

    Once with the executor that is picked, and once on sparse; returns what ran there.
    """
    weight = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(9))
    weight = weight if rows is None else weight * rows[..., None]
    leaves = [t.requires_grad_() for t in (x, inputs.get("memory"), *mixer.parameters()) if t is not None]
    want = run(oracle, leaves, weight, x, inputs)
    plain = run(mixer, leaves, weight, x, inputs)
    with forced() as picked:
        sparse = run(mixer, leaves, weight, x, inputs)
    for name, results in (("auto", plain), ("sparse", sparse)):
        for got, expected in zip(results, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    return picked


@pytest.mark.parametrize(("name", "i", "n", "causal"), [*cases(*LENGTHS)])
def test_recipe(name, i, n, causal, forced, rand):
    """Fails if a recipe does not do what its paper says, or its gradient is another."""
    mixer, oracle = make(name, i, n, causal)
    picked = compare(forced, mixer, oracle, rand(2 if n < 50 else 1, n, 8))
    assert set(picked) == (set() if name in ("linear", "fnet", "mlp_mixer") else {"sparse"})


@pytest.mark.parametrize(("name", "i", "n", "causal"), [c for c in cases(1, 40) if c.values[0] not in WITHOUT_MASK])
def test_padding(name, i, n, causal, forced, rand):
    """Fails if a left-out token is seen, or its place is counted, at the end or in the middle."""
    mixer, oracle = make(name, i, n, causal)
    mask = holes(n)
    compare(forced, mixer, oracle, rand(3, n, 8), rows=mask, mask=mask)


@pytest.mark.parametrize("sizes", [(1, 7), (23, 5), (5, 23), (20, 45)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["parameter_free", "vanilla", "global_tokens", "linear", "linformer"])
def test_cross(name, sizes, masked, forced, rand):
    """Fails if queries of one sequence do not look at keys of another, shorter or longer, as the paper says."""
    (n, m), more = sizes, {}
    mixer, oracle = make(name, 0, max(sizes), False)
    if masked:
        more["mask"] = holes(m)
    compare(forced, mixer, oracle, rand(3, n, 8), memory=rand(3, m, 8), **more)


def test_cross_is_tested_for_all_that_promise_it():
    """Fails if a recipe promises cross-attention, and no oracle looks."""
    promised = {name for name in ARGUMENTS if make(name, 0, 20, False)[0].can.cross}
    assert promised == {"parameter_free", "vanilla", "global_tokens", "linear", "linformer"}


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("n", [1, 23, 63])
@pytest.mark.parametrize("masked", [False, True])
def test_longformer_marks(i, n, masked, forced, rand):
    """Fails if marked tokens are not global, do not use projections of their own, or are marked in the wrong example."""
    mixer, oracle = make("longformer", i, n, False)
    marks = torch.zeros(3, n, dtype=torch.bool)
    marks[0, 0] = True
    marks[2, 1::9] = True
    mask = {"mask": holes(n)} if masked else {}
    compare(forced, mixer, oracle, rand(3, n, 8), rows=mask.get("mask"), marks=marks, **mask)


def test_every_recipe_has_an_oracle():
    """Fails if a recipe was added without one."""
    assert set(oracles.ORACLES) == set(ARGUMENTS) == set(regard.list())


def test_oracles_share_no_code_and_stay_short():
    """Fails if an oracle leans on what it should check, or is too long to be believed at sight."""
    files = list(Path(oracles.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                assert not any(module.split(".")[0] == "regard" for module in modules), file
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 25, f"{file}: {node.name}"
