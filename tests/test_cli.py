"""The command line: what it prints, where, and with which exit code."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import typer
from typer.testing import CliRunner

import regard
from regard import registry
from regard.cli import COMMANDS, app
from regard.cli.parsing import parse_key_values
from regard.cli.renamed import RENAMED_OPTIONS
from regard.mixer import CAPABILITIES
from regard.recipe_index import FAMILIES, INDEX_FILE, build_index

NAMES = regard.list_recipes()


def run(*arguments, code=0, **environment):
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120", **environment})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*arguments, code=1):
    """One line on stderr, nothing on stdout."""
    result = run(*arguments, code=code)
    assert (
        result.stdout == ""
        and result.stderr.startswith("error: ")
        and result.stderr.count("\n") == 1
    )
    return result.stderr


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("false", False), ("true", True), ("null", None), ("False", False), ("x", "x")],
)
def test_words_for_yes_and_no(text, meant):
    """Fails if causal=false is a text, which would count as true."""
    assert parse_key_values([f"causal={text}"], "") == {"causal": meant}


def test_version():
    assert run("--version").stdout == f"regard {regard.__version__}\n"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS if name != "runs")])
def test_help_has_an_example(command):
    assert "Example: regard" in run(*command, "--help").stdout


def test_help_summarizes_every_command():
    """Fails if the summary of a command is not the first paragraph of its docstring."""
    shown = " ".join(run("--help", COLUMNS="300").stdout.split())
    group = typer.main.get_command(app)
    for name, entry in COMMANDS.items():
        summary = group.get_command(None, name).help.partition("\n\n")[0]
        assert summary == entry.summary() and f"│ {name} {summary} │" in shown


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["list", "--json"]])
def test_start_up_does_not_import_torch(arguments):
    """Fails if a command that needs no tensors waits for torch."""
    code = (
        "import sys; from regard.cli import app; app(sys.argv[1:], standalone_mode=False);"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_slow_commands_print_a_first_line_at_once():
    """Fails if a long command is silent while torch is imported."""
    code = "import sys; sys.modules['torch'] = None; from regard.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", "--mixers", "linear", "--tasks", "copy"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith("regard compare: loading PyTorch") and done.stdout == ""


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (command, old, new)
        for command, options in RENAMED_OPTIONS.items()
        for old, new in options.items()
    ],
)
def test_renamed_options_suggest_the_new_name(command, old, new):
    """Fails if an old option works, or its error does not name the current one."""
    parameters = typer.main.get_command(app).get_command(None, command).params
    options = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    assert old not in options and new in options
    if command != "swap":  # it reads its own options
        assert f"Did you mean {new}?" in " ".join(run(command, old, "1", code=2).stderr.split())


# ---------------------------------------------------------------------- list
def test_the_recipe_index_is_up_to_date():
    """Fails if a recipe changed and `python -m regard.recipe_index` was not run."""
    assert build_index() == json.loads(INDEX_FILE.read_text(encoding="utf-8"))


def test_recipes_of_other_packages_are_listed(monkeypatch):
    """Fails if `regard list` shows only what the index has."""
    before = dict(registry._recipes)

    def load():
        @regard.recipe("Nobody 2099", family="sparse", formula="x")
        def from_elsewhere(dim, heads, *, causal=False):
            return regard.create("local", dim=dim, heads=heads, causal=causal, window=2)

    entry = type("EntryPoint", (), {"name": "from_elsewhere", "value": "x:y", "load": load})
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: [entry])
    registry._load_recipes.cache_clear()
    try:
        found = json.loads(run("list", "--family", "sparse", "--json").stdout)
        assert "from_elsewhere" in {each["name"] for each in found} > {"local", "bigbird"}
    finally:
        registry._recipes.clear()
        registry._recipes.update(before)
        registry._load_recipes.cache_clear()


def test_list_json_has_every_recipe_with_its_capabilities():
    found = json.loads(run("list", "--json").stdout)
    assert [entry["name"] for entry in found] == NAMES
    for entry in found:
        assert set(entry["can"]) == set(CAPABILITIES) and all(
            isinstance(x, bool) for x in entry["can"].values()
        )
        assert entry["family"] in FAMILIES and entry["paper"] and entry["formula"]
        assert entry["url"] is None or entry["url"].endswith(entry["arxiv"])
    by_name = {entry["name"]: entry["can"] for entry in found}
    assert (
        by_name["local"]["causal"]
        and not by_name["linformer"]["causal"]
        and by_name["bigbird"]["causal"]
    )
    assert (
        by_name["longformer"]["global_attention_mask"]
        and not by_name["local"]["global_attention_mask"]
    )
    assert not by_name["fnet"]["maps"] and by_name["linear"]["maps"]


def test_list_filters():
    family = [e["name"] for e in json.loads(run("list", "--family", "sparse", "--json").stdout)]
    assert family == regard.list_recipes(family="sparse") and 0 < len(family) < len(NAMES)
    able = json.loads(run("list", "--can", "causal, stream", "--json").stdout)
    assert 0 < len(able) < len(NAMES) and all(
        e["can"]["causal"] and e["can"]["stream"] for e in able
    )
    assert "linformer" not in {e["name"] for e in able}
    assert (
        json.loads(run("list", "--family", "attention-free", "--can", "cross", "--json").stdout)
        == []
    )


def test_list_table_groups_by_family_and_ticks():
    shown = run("list").stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert set(NAMES) <= set(lines)
    assert (
        shown.index("sparse by position")
        < shown.index("bigbird")
        < shown.index("without attention")
        < shown.index("fnet")
    )
    assert lines["local"].count("✓") == 7 and lines["fnet"].count("✓") == 2
    assert "…" not in shown  # no name is cut


def test_list_refusals():
    assert "did you mean 'causal'" in refused("list", "--can", "casual")
    assert "no family 'Z'" in refused("list", "--family", "Z")
    run("list", "--nope", code=2)


# ---------------------------------------------------------------------- show
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", ["1", "20"])
def test_show_every_recipe(name, length):
    shown = run("show", name, "--length", length).stdout
    assert shown.startswith(name)
    for word in ("capabilities", "parameters", "pattern", "tokens, rows are queries"):
        assert word in shown
    for promise in CAPABILITIES:
        assert f"✓ {promise}" in shown or f"✗ {promise}" in shown


@pytest.mark.parametrize("name", NAMES)
def test_show_small_example_and_json(name):
    assert "small example" in run("show", name, "--dim", "64").stdout
    found = json.loads(run("show", name, "--length", "64", "--dim", "64", "--json").stdout)
    assert found["name"] == name and found["length"] == 64 and found["parameters"] >= 0
    assert set(found["reasons"]) == {p for p, kept in found["can"].items() if not kept}
    assert (found["pattern"] is None) == (found["density"] is None) == (found["forward"] is None)


def test_show_bigbird_says_all_that_matters():
    shown = " ".join(run("show", "bigbird", "--length", "2048").stdout.split())
    for word in (
        "https://arxiv.org/abs/2007.14062",
        "Chunks(64, 1, 1) | RandomBlocks(64, 3, 32)",
        "1,048,576",
        "can be built with causal=True",
        "at most 2,048 of 2,048",
        "## window",
        "== global queries",
        "|| global keys",
        "oo random blocks",
    ):
        assert word in shown, word
    assert (
        "forward" in shown
        and "with backward" in shown
        and any(
            f"{name} (estimate" in shown or f"{name}: " in shown
            for name in ("cpp", "sparse", "sdpa")
        )
    )


def test_show_numbers():
    found = json.loads(
        run("show", "local", "--length", "100", "--set", "window=3", "--json").stdout
    )
    assert found["keys_per_query"] == {
        "mean": pytest.approx(6.88),
        "max": 7,
        "exact": True,
    }
    assert found["density"] == pytest.approx(0.0688)
    assert found["pattern"] == "Band(3, 3)" and found["arguments"]["window"] == 3
    assert found["parameters"] == 4 * 512 * 512 and found["forward"]["backend"] in ("sdpa", "cpp")
    large = json.loads(run("show", "mlp_mixer", "--length", "100000", "--json").stdout)
    assert large["parameters"] == 2 * 100_000 * 50_000 + 150_000


def test_show_causal_and_settings():
    shown = run(
        "show",
        "sparse_strided",
        "--causal",
        "--length",
        "40",
        "--set",
        "split=merged",
        "--set",
        "stride=7",
    ).stdout
    assert "(Band(7, 7) | Band(None, None, 7)) & Causal()" in shown and "every 7th token" in shown
    assert (
        json.loads(run("show", "axial", "--length", "90", "--json").stdout)["arguments"]["width"]
        == 9
    )
    steps = run(
        "show",
        "longformer",
        "--heads",
        "2",
        "--length",
        "32",
        "--set",
        "dilation=1,3",
        "--set",
        "window=2",
    ).stdout
    assert "head 1" in steps and "head 2" in steps and "dilated window" in steps


def test_show_draws_without_colour_or_with():
    colourless = run("show", "bigbird", NO_COLOR="1", FORCE_COLOR="1").stdout
    assert "####" in colourless and "▀" not in colourless
    assert (
        "▀"
        in run(
            "show", "bigbird", FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color"
        ).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bigbrd"], "did you mean 'bigbird'?"),
        (["bigbird", "--causal", "--set", "globals=1"], "globals=0"),
        (["linformer", "--causal"], "mixes all positions"),
        (["bigbird", "--set", "wndow=3"], "did you mean 'window'?"),
        (["bigbird", "--set", "window=4"], "odd"),
        (["bigbird", "--set", "window=x"], "integer"),
        (["bigbird", "--set", "window"], "name=value"),
        (["bigbird", "--set", "length=3"], "--length"),
        (["bigbird", "--set", "block=99999999999999999999999"], "larger than the largest position"),
        (["per_head", "--set", "patterns=[1]"], "written in Python"),
        (["parameter_free", "--set", "x=1"], "it has no arguments"),
        (["local", "--set", "window=__import__('os').getcwd()"], "integer"),
        (["local", "--dim", "10", "--heads", "3"], "divisible"),
        (["local", "--heads", "0"], "heads"),
        (["local", "--dim", "0"], "dim"),
        (["fnet", "--heads", "0"], "heads"),
    ],
)
def test_show_refusals(arguments, words):
    assert words in refused("show", *arguments)


def test_show_says_that_there_are_no_heads():
    """Fails if heads of a mixer without them are refused, or nothing says that they have no use."""
    shown = run("show", "fnet", "--heads", "2", "--length", "16").stdout
    assert "✗ heads" in shown and "no: it has no heads" in shown


@pytest.mark.parametrize("length", ["0", "-1", "1000000000000"])
def test_show_lengths_that_make_no_sense(length):
    assert "--length must be between 1 and" in refused("show", "local", "--length", length, code=2)


def test_show_usage_errors():
    run("show", code=2)
    run("show", "local", "--length", "many", code=2)


def test_a_bug_is_not_swallowed(monkeypatch):
    def broken(*_):
        raise TypeError("a bug")

    monkeypatch.setattr("regard.cli.showing._print", broken)
    with pytest.raises(TypeError, match="a bug"):
        run("show", "local")


# ---------------------------------------------------------------------- pictures
def test_show_png(tmp_path):
    imread = pytest.importorskip("matplotlib.image").imread
    path = tmp_path / "picture.png"
    result = run("show", "bigbird", "--length", "512", "--png", str(path), "--json")
    assert json.loads(result.stdout)["name"] == "bigbird" and str(path) in result.stderr
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = imread(path)
    assert len({tuple(p) for p in (pixels[::7, ::7, :3] * 255).round().reshape(-1, 3).tolist()}) > 5


@pytest.mark.parametrize("command", [["show", "local"], ["gallery"]])
def test_png_that_cannot_be_written(command, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    assert "No such file" in refused(*command, "--png", str(tmp_path / "no" / "x.png"))
    assert "directory" in refused(*command, "--png", str(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install regard[plot]" in refused(*command, "--png", str(tmp_path / "x.png"))


def test_gallery(tmp_path):
    shown = run("gallery").stdout
    assert all(name in shown for name in regard.list_recipes(family="sparse"))
    pytest.importorskip("matplotlib")
    run("gallery", "--png", str(tmp_path / "all.png"))
    assert (tmp_path / "all.png").stat().st_size > 10_000


# ---------------------------------------------------------------------- tour
def test_tour():
    shown = run("tour").stdout
    assert (
        "oo random blocks" in shown and "dense softmax (torch SDPA)" in shown and "threads" in shown
    )
    assert "Unsupported: " in shown and "mixes all positions" in shown
    difference = float(shown.split("largest difference ")[1].split()[0])
    most = int(shown.split("never more than ")[1].split()[0])
    assert difference < 1e-10 and 33 <= most < 300
