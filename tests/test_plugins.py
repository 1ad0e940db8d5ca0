"""Recipes and tasks from a file of the user."""

import json
import shutil
import sys
from hashlib import sha256

import pytest
from typer.testing import CliRunner

import regard
from regard import plugins, registry
from regard.cli import app
from regard.compare.ledger import Ledger
from regard.compare.plan import ComparisonPlan
from regard.compare.record import LEDGER_FILE, ComparisonRecord, write_record
from regard.models import ModuleSpec
from regard.plugins import PluginFile, load_plugin, require_plugins
from regard.tasks import TASKS
from regard.train.run import read_spec, run_training

PLUGIN = '''
import regard
from regard.tasks import TASKS
from regard.tasks.probes import CopyTask


class MyCopy(CopyTask):
    """Copying, under another name."""


TASKS["my_copy"] = MyCopy


@regard.recipe("me", family="sparse", formula="softmax in a window")
def my_window(heads, head_dim, *, window=4):
    """A window."""
    return regard.create_attention("local", heads=heads, head_dim=head_dim, window=window)
'''
WORDS = (
    *("train", "--task", "my_copy:length=9", "--mixer", "my_window:window=2", "--steps", 2),
    *("--dim", 8, "--heads", 2, "--layers", 1, "--batch-size", 4, "--set", "eval_examples=4"),
)


def run(*arguments, code=0, **more):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"}, **more)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def forget():
    """As in a new process, where no plugin was imported."""
    plugins._loaded.clear()
    registry._recipes.pop("my_window", None)
    TASKS.pop("my_copy", None)


@pytest.fixture(autouse=True)
def clean():
    registry.get_recipe("vanilla")
    yield
    forget()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    return path


def test_a_run_remembers_its_plugin_and_needs_it_again(file, tmp_path):
    """Fails if a run cannot be used with the file, or can without: a folder that was downloaded
    must not have a file executed."""
    folder = tmp_path / "run"
    assert "No task 'my_copy'" in run(*WORDS, "--out", folder, code=1).stderr
    run(*WORDS, "--plugin", file, "--out", folder)
    (recorded,) = read_spec(folder).plugins
    assert recorded.path == str(file) and len(recorded.sha256) == 64
    for words in (("eval", folder), ("train", "--resume", folder, "--steps", 3)):
        forget()
        said = run(*words, code=1).stderr
        assert f"was trained with the plugin {file}" in said and f"add --plugin {file}" in said
        assert "my_copy" not in TASKS, "it was executed"
        run(*words, "--plugin", file)
    forget()
    with pytest.raises(ValueError, match=r"or plugins=\['.*mine.py'\] in Python"):
        regard.load(folder)
    assert regard.load(folder, plugins=[file]).spec.mixer.name == "my_window"
    forget()
    with pytest.raises(ValueError, match="was trained with the plugin"):
        run_training(read_spec(folder), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_plugin_that_changed_is_a_warning_and_one_that_is_gone_an_error(file, tmp_path):
    """Fails if a model is run with other code than it was trained with, without a word."""
    folder = tmp_path / "run"
    run(*WORDS, "--plugin", file, "--out", folder)
    forget()
    file.write_text(PLUGIN + "# changed\n")
    shown = run("eval", folder, "--plugin", file)
    assert f"warning: The plugin {file} has changed since the run" in shown.stderr
    again = run(*WORDS, "--plugin", file, "--out", folder)  # the same command resumes
    assert "has changed since" in again.stderr
    moved = tmp_path / "moved" / "other.py"
    moved.parent.mkdir()
    moved.write_text(PLUGIN)
    file.unlink()
    forget()
    said = run("eval", folder, code=1).stderr
    assert "which does not exist any more" in said
    assert "does not exist" in run("eval", folder, "--plugin", file, code=1).stderr
    assert run("eval", folder, "--plugin", moved).stderr == ""  # the same content elsewhere


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def f(:", "SyntaxError"),
        ("x = 1\nraise KeyError('a')", "line 2: KeyError: 'a'"),
        ("import no_such_package_at_all", "line 1: ModuleNotFoundError"),
        (
            "import regard\n\n@regard.recipe('x')\ndef local(heads, head_dim): pass",
            "Recipe 'local' is already registered by regard.recipes",
        ),
    ],
)
def test_a_plugin_with_an_error_is_one_line(tmp_path, content, said):
    """Fails if a mistake in the file is a traceback, or leaves a half-imported module."""
    path = tmp_path / "bad.py"
    path.write_text(content)
    shown = run("list", "--plugin", path, code=1).stderr
    assert shown.startswith(f"error: Cannot import the plugin {path}") and shown.count("\n") == 1
    assert said in shown
    assert not any("regard_plugin_bad" in name for name in sys.modules)


def test_what_is_no_plugin_is_refused(tmp_path, file):
    """Fails if a folder or a file of another kind is imported."""
    for path in (tmp_path, tmp_path / "mine.txt"):
        if path.suffix:
            shutil.copy(file, path)
        with pytest.raises(ValueError, match="A plugin is a Python file"):
            load_plugin(path)
    with pytest.raises(ValueError, match=r"did you mean 'mine\.py'"):
        load_plugin(tmp_path / "mien.py")


def test_a_file_is_imported_again_only_when_it_changed(file):
    """Fails if an edit in the same second is not seen, or state is lost without one."""
    first = load_plugin(file)
    recipe = registry.get_recipe("my_window").function
    assert load_plugin(file) == first and registry.get_recipe("my_window").function is recipe
    file.write_text(PLUGIN.replace("window=4", "window=5"))
    assert load_plugin(file).sha256 != first.sha256
    assert registry.get_recipe("my_window").options["window"].default == 5
    assert not (file.parent / "__pycache__").exists()
    require_plugins([first], file.parent, lambda text: None)


def test_a_comparison_is_reported_with_its_plugins(file, tmp_path):
    """Fails if the page of a comparison with a plugin cannot be written again, or a file that its
    plan names is executed although this user never gave it."""
    folder = tmp_path / "comparison"
    plan = ComparisonPlan(
        tasks=[ModuleSpec(name="my_copy", arguments={"length": 9})],
        mixers=[ModuleSpec(name="my_window")],
        plugins=(load_plugin(file),),
    )
    write_record(folder, ComparisonRecord(plan=plan, command="regard compare", keys=[]))
    Ledger(folder / LEDGER_FILE).close()
    forget()
    data = json.loads(run("report", folder, "--json").stdout)
    assert data["plan"]["tasks"][0]["name"] == "my_copy" and "my_copy" in TASKS
    for changed in (True, False):  # another content; or a file that was never named
        forget()
        if changed:
            file.write_text(PLUGIN + "# never named\n")
        else:
            content = PluginFile(path=str(file), sha256=sha256(file.read_bytes()).hexdigest())
            other = plan.model_copy(update={"plugins": (content,)})
            write_record(folder, ComparisonRecord(plan=other, command="", keys=[]))
        said = run("report", folder, "--json", code=1).stderr
        assert f"add --plugin {file}" in said and "my_copy" not in TASKS, "it was executed"
    run("report", folder, "--json", "--plugin", file)


def test_list_and_show_know_plugins(file):
    """Fails if the user's recipe is not listed beside the others."""
    entries = json.loads(run("list", "my_*", "--plugin", file, "--json").stdout)
    assert [entry["name"] for entry in entries] == ["my_window"]
    assert "softmax in a window" in run("show", "my_window", "--plugin", file).stdout
