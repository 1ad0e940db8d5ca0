"""The backend protocol: every backend is held to the formula, and other packages can add one."""

import subprocess
import sys
import textwrap
from importlib import metadata

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.backends import linear_backends, protocol, softmax_backends
from regard.backends.call import FLOAT_DTYPES, make_call
from regard.testing import check_backend

ONE_LENGTH = {"lengths": (70,), "dtypes": [torch.float32]}
reference = softmax_backends.get("reference")


@pytest.mark.parametrize("name", ["reference", "sdpa", "cpp", "sparse", "flex"])
def test_softmax_backends(name):
    """Every call that a backend accepts is exact, and `cpp` and `sparse` accept most."""
    backend = softmax_backends.get(name)
    dtypes = {"flex": [torch.float32], "sdpa": [torch.float32, torch.float64]}
    results = check_backend(
        backend,
        lengths=(7, 200) if name in ("cpp", "sparse") else (70,),
        dtypes=dtypes.get(name, list(FLOAT_DTYPES)),
    )
    exact = sum(outcome == "exact" for outcome in results.values()) / len(results)
    assert exact >= {"cpp": 0.4, "sparse": 0.9, "flex": 0.3}.get(name, 1)


@pytest.mark.parametrize("name", ["products", "cpp"])
def test_linear_backends(name):
    """Causal with and without a state, and over all keys."""
    results = check_backend(linear_backends.get(name))
    assert all(x == "exact" for label, x in results.items() if "float64" in label)


# A backend in a package of its own: this is the whole file.
TOY = '''
import torch
from regard import Backend


class FormulaBackend(Backend):
    """Plain causal attention in two matrix products."""

    name = "formula"

    def refuses(self, call):
        if not call.is_plain_causal() or call.q.dtype != torch.float32:
            return "it computes plain causal attention in float32"
        return None

    def cost(self, call):
        return 1e-12 * call.q.numel() * call.k.shape[2]

    def prepare(self, call):
        n, scale = call.q.shape[2], call.scale
        future = torch.ones(n, n, dtype=torch.bool).triu(1)

        def run(q, k, v):
            scores = (q @ k.mT * scale).masked_fill(future, -torch.inf)
            return scores.softmax(-1) @ v

        return run
'''
USE = """
import torch, regard
from regard.backends import softmax_backends
from regard.testing import check_backend

x = torch.randn(1, 2, 300, 8)
choice = regard.explain(regard.Causal(), 300, heads=2, width=8)
assert choice.backend == "formula" and "ms formula" in choice.reason, choice
out = regard.attend(x, x, x, pattern=regard.Causal())
exact = regard.attend(x, x, x, pattern=regard.Causal(), backend="reference")
torch.testing.assert_close(out, exact)
assert regard.explain(regard.Band(9, 9), 300).backend != "formula"
results = check_backend(softmax_backends.get("formula"), lengths=(70,))
print(sum(r == "exact" for r in results.values()), "exact")
"""


def test_backend_of_another_package(tmp_path):
    """An installed package's backend is found by its entry point, chosen, explained and checked."""
    (tmp_path / "toy_backend.py").write_text(TOY)
    info = tmp_path / "toy_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[regard.backends]\nformula = toy_backend:FormulaBackend\n"
    )
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{USE}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2 exact"
    assert len(textwrap.dedent(TOY).strip().splitlines()) <= 30


class Entry:
    """Stands for an entry point of another package."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"other_package:{name}", load


def test_broken_backend_package(monkeypatch):
    """A package that cannot be imported, or provides something else, is reported, and calls go
    on."""

    def broken():
        raise ImportError("no module named nonsense")

    entries = [Entry("bad", broken), Entry("odd", lambda: "a string")]
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: entries)
    monkeypatch.setattr(softmax_backends, "_loaded_entry_points", False)
    with pytest.warns(UserWarning, match="Could not load backend") as caught:
        assert "cpp" in softmax_backends.names()
    messages = [str(warning.message) for warning in caught]
    assert "no module named nonsense" in messages[0] and "instance of regard.Backend" in messages[1]


class Constant(regard.Backend):
    """A backend that can be made wrong in several ways."""

    name = "constant"
    refusal = None
    seconds = 1e-9

    def refuses(self, call):
        return self.refusal

    def cost(self, call):
        return self.seconds

    def prepare(self, call):
        return F.scaled_dot_product_attention


def variant(**changes):
    return type("Variant", (Constant,), changes)()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (variant(), "the output differs from the formula"),
        (variant(refusal=""), "refuses must return a reason"),
        (variant(refusal="never"), "refuses every call"),
        (variant(seconds=-1.0), "cost must return seconds"),
        (variant(seconds="fast"), "cost must return seconds"),
        (variant(prepare=lambda self, call: lambda q, k, v: v[..., :1]), "the output has shape"),
        (
            variant(
                refuses=lambda self, call: None if call.pattern == regard.Full() else "not full",
                prepare=lambda self, call: (
                    lambda q, k, v: F.scaled_dot_product_attention(q, k, v.detach() + 0 * v)
                ),
            ),
            "the gradient of v differs",
        ),
        (
            variant(
                refuses=lambda self, call: None if call.pattern == regard.Full() else "not full",
                prepare=lambda self, call: (
                    lambda q, k, v: F.scaled_dot_product_attention(call.q, k, v)
                ),
            ),
            "the output differs",
        ),
        (
            variant(
                refuses=lambda self, call: None if call.pattern == regard.Full() else "not full",
                prepare=lambda self, call: (
                    lambda q, k, v: F.scaled_dot_product_attention(q, k, v).double()
                ),
            ),
            "the output is torch.float64, not torch.float32",
        ),
        (
            variant(
                refuses=lambda self, call: (
                    reference.refuses(call) or ("sinks only" if call.sinks is None else None)
                ),
                prepare=lambda self, call: reference.prepare(
                    call._replace(sinks=call.sinks.detach() + 0 * call.sinks)
                ),
            ),
            "the gradient of sinks differs",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_check_backend_finds_errors(backend, message):
    """Wrong results, gradients, shapes and answers fail the check; so does keeping old tensors."""
    with pytest.raises(AssertionError, match=message):
        check_backend(backend, **ONE_LENGTH)


def test_remembered_choice_of_other_arguments(rand):
    """A choice for one scale, or one shape of the pair mask, is not taken for another."""
    q = rand(1, 2, 64, 8)
    backend = variant(
        refuses=lambda self, call: (
            None
            if call.scale == 0.5 and call.attn_mask is not None and call.attn_mask.shape[1] == 1
            else "another scale or mask"
        ),
    )
    regard.register_backend(backend)
    try:
        for scale, shape in ((0.5, (64, 64)), (0.1, (64, 64)), (0.5, (1, 2, 64, 64))):
            call = make_call(
                q,
                q,
                q,
                pattern=regard.Full(),
                scale=scale,
                attn_mask=torch.ones(shape, dtype=torch.bool),
            )
            chosen = softmax_backends.choose(call).backend
            assert (chosen == "constant") == (backend.refuses(call) is None)
    finally:
        softmax_backends.unregister("constant")


def test_register_backend(rand):
    """A registered backend is chosen if it is the cheapest, remembered calls included."""
    q = rand(1, 2, 80, 8)
    backend = variant(refuses=lambda self, call: None if call.pattern == regard.Full() else "no")
    for _ in range(2):
        regard.attend(q, q, q)
    regard.register_backend(backend)
    try:
        assert softmax_backends.choose(make_call(q, q, q, pattern=regard.Full())).backend == (
            "constant"
        )
        assert regard.explain(regard.Full(), 80).seconds() == 1e-9
        torch.testing.assert_close(
            regard.attend(q, q, q), regard.attend(q, q, q, backend="reference")
        )
        with pytest.raises(regard.Unsupported, match="backend 'constant': no"):
            regard.attend(q, q, q, pattern=regard.Causal(), backend="constant")
    finally:
        softmax_backends.unregister("constant")
    assert regard.explain(regard.Full(), 80).backend != "constant"


def test_invalid_backends():
    """What is no backend, or takes the name of another, is refused."""
    with pytest.raises(TypeError, match=r"instance of regard\.Backend"):
        regard.register_backend(F.softmax)
    with pytest.raises(TypeError, match="string other than 'auto'"):
        regard.register_backend(variant(name="auto"))
    with pytest.raises(TypeError, match="operation 'conv': choose from softmax, linear"):
        regard.register_backend(variant(operation="conv"))
    with pytest.raises(ValueError, match="'sdpa' is already registered by"):
        regard.register_backend(variant(name="sdpa"))
    with pytest.raises(ValueError, match="is the default"):
        softmax_backends.unregister("sdpa")
    assert protocol.ENTRY_POINT_GROUP == "regard.backends"
