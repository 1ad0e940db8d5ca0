"""Recipes by name: they exist, wrong names and arguments get a hint, and other packages can add theirs."""

import warnings
from importlib import metadata

import pytest

import regard
from regard import Mixer, recipe, registry

ISSUE = {  # the catalogue's rows, and their names
    "A1": ["bahdanau"],
    "A2": ["graves_window"],
    "A3": ["draw_read", "draw_write"],
    "A4": ["show_attend"],
    "B1": ["parameter_free"],
    "B2": ["vanilla"],
    "C1": ["global_tokens"],
    "C2": ["local"],
    "C3": ["dilated"],
    "C4": ["random_blocks"],
    "C5": ["block_local"],
    "C6": ["sparse_strided", "sparse_fixed"],
    "C7": ["star"],
    "C8": ["longformer"],
    "C9": ["etc"],
    "C10": ["bigbird"],
    "C11": ["bp_transformer"],
    "C12": ["image_local_1d", "image_local_2d"],
    "C13": ["axial"],
    "C14": ["per_head"],
    "C15": ["sinks", "neighbourhood", "swin"],
    "E1": ["linear"],
    "F1": ["linformer"],
    "F2": ["low_rank", "low_rank_band"],
    "F3": ["nystrom"],
    "F4": ["memory_compressed"],
    "F5": ["clustered", "clustered_improved"],
    "F6": ["funnel", "prob_sparse"],
    "F7": ["isab", "sab"],
    "F8": ["luna", "perceiver", "pooling"],
    "H1": [
        "synthesizer_dense",
        "synthesizer_random",
        "synthesizer_factorised",
        "synthesizer_mixture",
    ],
    "H2": ["fnet"],
    "H3": ["mlp_mixer"],
    "H4": ["gmlp", "amlp"],
    "H5": ["xcit"],
    "H6": ["dynamic_conv", "aft", "average_pool"],
}


@pytest.fixture
def fresh(monkeypatch):
    """The registry as it was, afterwards; entry points are looked for again."""
    monkeypatch.setattr(registry, "_recipes", dict(registry._recipes))
    registry._loaded.cache_clear()
    yield
    registry._loaded.cache_clear()


class Entry:
    """Stands for an entry point of another package."""

    def __init__(self, name, load):
        self.name, self.value, self.load = name, f"other_package:{name}", load


def installed(monkeypatch, *entries):
    def entry_points(*, group):
        return entries if group == "regard.recipes" else ()

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    registry._loaded.cache_clear()


# ---------------------------------------------------------------------------------------------- what there is
@pytest.mark.parametrize("row", ISSUE)
def test_every_row_has_its_names(row):
    """Fails if a mechanism is missing, or goes by another name."""
    for name in ISSUE[row]:
        found = registry.get_recipe(name)
        assert found.row == row and found.name == name and name in regard.list_recipes(row[0])


def test_every_recipe_says_where_it_comes_from():
    """Fails if a recipe has no paper, formula, summary or family."""
    for name in regard.list_recipes():
        found = registry.get_recipe(name)
        assert found.paper and found.formula and found.summary and found.family in registry.FAMILIES
        assert found.arxiv == "" or (len(found.arxiv) in (9, 10) and found.arxiv[4] == ".")
        assert (
            "dim" in found.parameters
            and "heads" in found.parameters
            and "causal" in found.parameters
        )
        assert isinstance(found.example(), Mixer)


def test_list_by_family():
    """Fails if a family is not found by its letter and by its name, in any case."""
    assert (
        regard.list_recipes("C")
        == regard.list_recipes("c")
        == regard.list_recipes("sparse by position")
        == regard.list_recipes("Sparse by position")
    )
    assert (
        regard.list_recipes("B") == ["parameter_free", "vanilla"]
        and regard.list_recipes("A")[0] == "bahdanau"
    )
    assert [
        name for letter in registry.FAMILIES for name in regard.list_recipes(letter)
    ] == regard.list_recipes()
    with pytest.raises(ValueError, match=r"no family 'sparse by positon'.*'sparse by position'"):
        regard.list_recipes("sparse by positon")
    with pytest.raises(ValueError, match="no family 'Z'"):
        regard.list_recipes("Z")


def test_list_by_promise():
    """Fails if a promise does not select."""
    both = set(regard.list_recipes(can=["cross", "stream"]))
    assert (
        both == set(regard.list_recipes(can="cross")) & set(regard.list_recipes(can="stream"))
        and {"bahdanau", "vanilla", "linear"} <= both
    )
    assert regard.list_recipes(can="global_attention_mask") == ["longformer"]
    assert "fnet" not in regard.list_recipes(can="mask") and "fnet" in regard.list_recipes(
        can="length"
    )
    assert {"bigbird", "linear", "vanilla"} <= set(regard.list_recipes(can="causal"))
    assert not {"linformer", "fnet", "mlp_mixer"} & set(regard.list_recipes(can="causal"))
    with pytest.raises(ValueError, match=r"no promise 'casual'.*'causal'"):
        regard.list_recipes(can=["casual"])


def test_the_order_is_that_of_the_catalogue():
    """Fails if C10 comes before C2."""
    rows = [registry.get_recipe(name).row for name in regard.list_recipes("C")]
    assert rows == sorted(rows, key=lambda row: int(row[1:]))


# ---------------------------------------------------------------------------------------------- create
def test_create():
    """Fails if the arguments do not arrive."""
    mixer = regard.create("local", dim=8, heads=2, window=5, causal=True)
    assert (mixer.dim, mixer.heads, mixer.causal, mixer.inner.pattern) == (
        8,
        2,
        True,
        regard.Band(5, 5),
    )
    assert regard.create("fnet", dim=8).dim == 8


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("bigbrid", "bigbird"), ("longfomer", "longformer"), ("Linear", "linear"), ("f_net", "fnet")],
)
def test_a_wrong_name_gets_the_nearest(wrong, right):
    """Fails if a misspelt name is not answered with the right one."""
    with pytest.raises(ValueError, match=f"no recipe '{wrong}': did you mean '{right}'"):
        regard.create(wrong, dim=8, heads=2)


def test_a_name_like_no_other_gets_all_of_them():
    """Fails if a name that resembles none is not answered with what there is."""
    with pytest.raises(ValueError, match=r"there are: .*bigbird.*vanilla"):
        regard.create("qqqq", dim=8, heads=2)
    with pytest.raises(ValueError, match="no recipe ''"):
        regard.create("")


def test_a_wrong_argument_gets_the_nearest():
    """Fails if a misspelt argument is swallowed, or not answered with the right one."""
    with pytest.raises(TypeError, match=r"local takes no argument 'windw': did you mean 'window'"):
        regard.create("local", dim=8, heads=2, windw=3)
    with pytest.raises(TypeError, match=r"vanilla takes no argument 'zzz': there are: .*kv_heads"):
        regard.create("vanilla", dim=8, heads=2, zzz=3)


def test_missing_arguments_are_named():
    """Fails if the message does not say what is missing."""
    with pytest.raises(TypeError, match="bigbird needs dim, heads, length"):
        regard.create("bigbird")
    with pytest.raises(TypeError, match="linformer needs length"):
        regard.create("linformer", dim=8, heads=2)


# ---------------------------------------------------------------------------------------------- other packages
def toy(dim, heads=1, *, causal=False):
    """A recipe of another package. It is Fourier by another name."""
    return regard.create("fnet", dim=dim, causal=causal)


def test_another_package_adds_a_recipe(fresh, monkeypatch):
    """Fails if an entry point is not loaded on the first look-up."""
    installed(
        monkeypatch,
        Entry("toy", lambda: recipe("Somebody 2030", row="H9", formula="Re F F x")(toy)),
    )
    assert "toy" in regard.list_recipes() and "toy" in regard.list_recipes("H")
    assert regard.create("toy", dim=6).dim == 6
    assert registry.get_recipe("toy").summary == "A recipe of another package"
    regard.testing.check_mixer(lambda causal: regard.create("toy", dim=6, causal=causal))


def test_a_broken_package_takes_nobody_with_it(fresh, monkeypatch):
    """Fails if one import error hides all recipes, or is silent."""

    def broken():
        raise ImportError("no module named nonsense")

    installed(
        monkeypatch,
        Entry("bad", broken),
        Entry("toy", lambda: recipe("Somebody 2030", row="H9")(toy)),
    )
    with pytest.warns(
        UserWarning,
        match=r"'bad' of 'other_package:bad' could not be loaded: no module named nonsense",
    ):
        names = regard.list_recipes()
    assert "toy" in names and "bigbird" in names
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert regard.list_recipes() == names  # and it warns once


def test_no_second_recipe_of_a_name(fresh):
    """Fails if another package can replace a recipe unnoticed."""

    def vanilla(dim, heads, *, causal=False):
        """Not the vanilla you know."""

    regard.list_recipes()
    with pytest.raises(
        ValueError, match=r"there is a recipe 'vanilla' already, from regard\.recipes\.vanilla"
    ):
        recipe("Somebody 2030")(vanilla)


def test_a_duplicate_by_entry_point_warns(fresh, monkeypatch):
    """Fails if a package that takes a name again breaks the others, or wins."""

    def vanilla(dim, heads, *, causal=False):
        """Not the vanilla you know."""

    installed(monkeypatch, Entry("vanilla", lambda: recipe("Somebody 2030")(vanilla)))
    with pytest.warns(UserWarning, match="there is a recipe 'vanilla' already"):
        assert regard.create("vanilla", dim=8, heads=2).heads == 2


def test_a_decorated_function_stays_a_function(fresh):
    """Fails if a recipe can only be reached by its name."""
    assert recipe("Somebody 2030", row="H9")(toy) is toy


def test_a_recipe_without_a_row_is_listed_last(fresh):
    """Fails if a recipe outside the catalogue breaks the order."""
    recipe("Somebody 2030")(toy)
    assert regard.list_recipes()[-1] == "toy" and registry.get_recipe("toy").family == ""


def test_the_documented_group_exists():
    """Fails if the name that other packages write into their metadata changes."""
    assert registry.GROUP == "regard.recipes"
