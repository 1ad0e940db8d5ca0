"""Every recipe against its naive loop: outputs and all gradients, in float64, on both executors."""

import ast
from contextlib import suppress
from inspect import Parameter
from pathlib import Path

import pytest
import torch

import oracles
import regard
from oracles import CASES, ORACLES
from regard import Band, Global, SoftmaxAttention, Unsupported
from regard.registry import get_recipe

LENGTHS = (1, 23, 63, 100)
PATTERNS = (Band(2, 2), Band(2, 2, 4) | Global(1))  # what the oracle of per_head has as RULES


def heads_of(name):
    """Four, or what the recipe prefers."""
    preferred = get_recipe(name).parameters["heads"].default
    return 4 if preferred is Parameter.empty else preferred


def cases(*lengths, promise=None):
    """(recipe, its arguments, tokens, causal) of all that make a promise; one length for all
    arguments beside the first.
    """
    for name, arguments in CASES.items():
        can = get_recipe(name).can()
        for i in range(len(arguments)) if promise is None or getattr(can, promise) else ():
            for n in lengths if i == 0 else lengths[-1:]:
                for causal in forms(name, i):
                    yield pytest.param(
                        name, i, n, causal, id=f"{name}{i}-{n}{'-causal' if causal else ''}"
                    )


def forms(name, i):
    """What `causal` may be with these arguments."""
    found = []
    for causal in (False, True):
        with suppress(Unsupported):
            make(name, i, 8, causal)
            found.append(causal)
    return found


def make(name, i, n, causal):
    """The mixer in float64, and a function that runs its oracle."""
    arguments = dict(CASES[name][i])
    heads = arguments.pop("heads", heads_of(name))
    if "length" in get_recipe(name).parameters:
        arguments["length"] = max(n + 3, 8)
    if name == "bigbird" and causal:
        arguments["globals"] = 0
    told = dict(arguments)
    if "patterns" in arguments:
        arguments["patterns"] = PATTERNS
    torch.manual_seed(0)
    mixer = regard.create(name, dim=8, heads=heads, causal=causal, **arguments).double().eval()
    inside = dict(mixer.named_parameters()) | dict(mixer.named_buffers())

    def oracle(x, **inputs):
        return ORACLES[name](inside, x, heads=heads, causal=causal, **told, **inputs)

    return mixer, oracle


def holes(n):
    """One example whole, one padded at the end, one with holes."""
    at = torch.arange(n)
    return torch.stack((at >= 0, at < max(1, n - n // 3), at % 3 != 1))


def run(f, leaves, weight, x, inputs):
    """The outputs that count, and all gradients."""
    y = f(x, **inputs)
    grads = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [
        y * (weight != 0),
        *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)),
    ]


def compare(forced, mixer, oracle, x, rows=None, **inputs):
    """Outputs and the gradients of x, memory and every parameter agree; `rows` (b n) tells which
    outputs count.

    With the executor that is picked, then on sparse and on compiled; returns what ran on sparse.
    """
    weight = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(9))
    weight = weight if rows is None else weight * rows[..., None]
    leaves = [
        t.requires_grad_() for t in (x, inputs.get("context"), *mixer.parameters()) if t is not None
    ]
    want = run(oracle, leaves, weight, x, inputs)
    plain = run(mixer, leaves, weight, x, inputs)
    with forced("sparse") as picked:
        sparse = run(mixer, leaves, weight, x, inputs)
    with forced("cpp"):
        compiled = run(mixer, leaves, weight, x, inputs)
    for name, results in (("auto", plain), ("sparse", sparse), ("cpp", compiled)):
        for got, expected in zip(results, want, strict=True):
            torch.testing.assert_close(
                got, expected, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )
    return picked


@pytest.mark.parametrize(("name", "i", "n", "causal"), [*cases(*LENGTHS)])
def test_recipe(name, i, n, causal, forced, rand):
    """Fails if a recipe does not do what its paper says, or its gradient is another."""
    mixer, oracle = make(name, i, n, causal)
    picked = compare(forced, mixer, oracle, rand(2 if n < 50 else 1, n, 8))
    if any(isinstance(module, SoftmaxAttention) for module in mixer.modules()):
        assert set(picked) == {"sparse"}


@pytest.mark.parametrize(("name", "i", "n", "causal"), [*cases(1, 40, promise="mask")])
def test_padding(name, i, n, causal, forced, rand):
    """Fails if a left-out token is seen, or its place is counted, at the end or in the middle."""
    mixer, oracle = make(name, i, n, causal)
    mask = holes(n)
    compare(forced, mixer, oracle, rand(3, n, 8), rows=mask, mask=mask)


@pytest.mark.parametrize("sizes", [(1, 7), (23, 5), (5, 23), (20, 45)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [name for name in CASES if get_recipe(name).can().cross])
def test_cross(name, sizes, masked, forced, rand):
    """Fails if queries of one sequence do not look at keys of another, shorter or longer, as the
    paper says.
    """
    (n, m), more = sizes, {}
    mixer, oracle = make(name, 0, max(sizes), False)
    if masked:
        more["mask"] = holes(m)
    compare(forced, mixer, oracle, rand(3, n, 8), context=rand(3, m, 8), **more)


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("n", [1, 23, 63])
@pytest.mark.parametrize("masked", [False, True])
def test_longformer_marks(i, n, masked, forced, rand):
    """Fails if marked tokens are not global, do not use projections of their own, or are marked in
    the wrong example.
    """
    mixer, oracle = make("longformer", i, n, False)
    global_attention_mask = torch.zeros(3, n, dtype=torch.bool)
    global_attention_mask[0, 0] = True
    global_attention_mask[2, 1::9] = True
    mask = {"mask": holes(n)} if masked else {}
    compare(
        forced,
        mixer,
        oracle,
        rand(3, n, 8),
        rows=mask.get("mask"),
        global_attention_mask=global_attention_mask,
        **mask,
    )


def test_every_recipe_has_an_oracle():
    """Fails if a recipe was added without one."""
    assert set(ORACLES) == set(regard.list_recipes())


def test_oracles_share_no_code_and_stay_short():
    """Fails if an oracle leans on what it should check, or is too long to be believed at sight."""
    files = list(Path(oracles.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = (
                    [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                )
                assert not any(module.split(".")[0] == "regard" for module in modules), file
            if isinstance(node, ast.FunctionDef):
                statements = sum(isinstance(part, ast.stmt) for part in ast.walk(node))
                assert statements < 25, f"{file}: {node.name}"
