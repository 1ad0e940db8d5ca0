"""The registry: names, arguments, errors that help, and recipes of other packages."""

import warnings
from importlib import metadata

import pytest
import torch

import regard
from regard import registry
from regard.mixer import Mixer

FIXED = [
    "parameter_free", "vanilla", "global_tokens", "local", "dilated", "random_blocks", "block_local", "sparse_strided",
    "sparse_fixed", "longformer", "bigbird", "image_local_2d", "axial", "per_head", "linear", "linformer", "fnet", "mlp_mixer",
]  # fmt: skip


@pytest.fixture
def clean():
    """What a test registers is forgotten."""
    known = dict(registry._loaded())
    yield
    registry._recipes.clear()
    registry._recipes.update(known)
    registry._loaded.cache_clear()


def test_the_names_that_users_type_exist():
    """Fails if a name of the catalogue is lost."""
    assert set(FIXED) <= set(regard.list())


@pytest.mark.parametrize("name", FIXED)
def test_every_recipe_says_what_it_is(name):
    """Fails if a recipe has no paper, row, formula or docstring, or its function and its name differ."""
    found = registry.get(name)
    assert found.paper and found.formula and found.row[0] in registry.FAMILIES and found.row[1:].isdigit()
    assert found.summary and found.build.__name__ == name
    assert isinstance(found.example(), Mixer)
    assert "causal" in found.parameters and list(found.parameters)[:2] == ["dim", "heads"]


def test_lists_filter():
    """Fails if a filter lets the wrong ones through."""
    assert regard.list("H") == regard.list("without attention") == ["fnet", "mlp_mixer"]
    assert regard.list(can="causal") == regard.list(can=["causal"])
    assert "linformer" not in regard.list(can="causal") and "linformer" in regard.list(can=["cross", "mask"])
    assert regard.list(can=["marks"]) == ["longformer"]
    assert regard.list("C", can=["cross"]) == ["global_tokens"]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: regard.create("bigbrd", dim=8, heads=2), ValueError, "did you mean 'bigbird'"),
        (lambda: regard.create("zzz", dim=8, heads=2), ValueError, "there are: .*vanilla"),
        (lambda: regard.create("local", dim=8, heads=2, windw=3), TypeError, "did you mean 'window'"),
        (lambda: regard.create("local", dim=8), TypeError, "local needs heads"),
        (lambda: regard.create("bigbird", dim=8, heads=2), TypeError, "bigbird needs length"),
        (lambda: regard.create("linformer", dim=8, heads=2, length=9, rank=4, causal=True), TypeError, "linformer: .*position"),
        (lambda: regard.create("fnet", dim=8, heads=4), ValueError, "no heads"),
        (lambda: regard.list("Q"), ValueError, "no family 'Q'"),
        (lambda: regard.list(can="causl"), ValueError, "did you mean 'causal'"),
    ],
)  # fmt: skip
def test_errors_name_the_nearest(call, error, words):
    """Fails if a wrong word is accepted, or the message does not help."""
    with pytest.raises(error, match=words):
        call()


def test_a_refusal_names_what_was_asked_for():
    """Fails if messages of a built mixer speak of inner classes."""
    x = torch.zeros(1, 3, 8)
    with pytest.raises(regard.Unsupported, match=r"^local cannot look at another sequence"):
        regard.create("local", dim=8, heads=2)(x, x)


def test_a_name_is_given_once(clean):
    """Fails if a package can replace a recipe unseen."""

    def vanilla(dim, heads, *, causal=False):
        raise NotImplementedError

    with pytest.raises(ValueError, match="already, from regard"):
        regard.recipe("somebody")(vanilla)


class Entry:
    """An entry point that loads a function, or fails."""

    name, value = "mine", "my_package.recipes:mine"

    def __init__(self, load):
        self.load = load


def test_other_packages_add_recipes(clean, monkeypatch):
    """Fails if an entry point is not loaded, or a broken one hides the others."""

    def mine(dim, heads, *, causal=False):
        """A window of one."""
        return regard.MultiHead(dim, heads, regard.SoftmaxAttention(regard.Band(1, 1)), causal=causal)

    def broken():
        raise ImportError("no module named nonsense")

    entries = [Entry(broken), Entry(lambda: regard.recipe("me", row="C2", formula="a window")(mine))]
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries if group == "regard.recipes" else [])
    registry._loaded.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert "mine" in regard.list()
    assert any("could not be loaded: no module named nonsense" in str(w.message) for w in seen)
    assert regard.create("mine", dim=8, heads=2).causal is False
