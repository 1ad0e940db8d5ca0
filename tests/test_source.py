"""What must not occur in the source: strings that are run as code, and unescaped output."""

import ast
from pathlib import Path

import pytest
import torch

import regard

ROOT = Path(regard.__file__).parent
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}


def find(code, rule):
    """The lines of a module at which a rule applies."""
    tree = ast.parse(code) if isinstance(code, str) else code
    return [node.lineno for node in ast.walk(tree) if rule(node)]


def name_of(node):
    """The dotted name of what is called, such as "torch.load"; "" if it has none."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def keyword(node, name):
    """The value of a keyword argument as source; None if it is not given."""
    return next((ast.unparse(given.value) for given in node.keywords if given.arg == name), None)


# ---------------------------------------------------------------------------------- run as code
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "code"}
UNSAFE_BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE_CALLS = {"os.system", "os.popen", "yaml.load", "torch.jit.load", "torch.package"}


def runs_strings(node):
    """Whether a node can run code from a string or from a file."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] in UNSAFE_MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        unsafe = any(alias.name in UNSAFE_BUILTINS for alias in node.names)
        return unsafe or (node.module or "").partition(".")[0] in UNSAFE_MODULES
    if isinstance(node, ast.Name):  # also without a call: `run = eval`
        return node.id in UNSAFE_BUILTINS
    if isinstance(node, ast.Attribute) and node.attr in UNSAFE_BUILTINS:
        return ast.unparse(node.value) in ("builtins", "__builtins__")
    if not isinstance(node, ast.Call):
        return False
    name = name_of(node)
    if name == "torch.load":
        return keyword(node, "weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return keyword(node, "allow_pickle") != "False"
    return name in UNSAFE_CALLS or keyword(node, "shell") not in (None, "False")


@pytest.mark.parametrize(
    ("code", "unsafe"),
    [
        ("eval(text)", True),
        ("run = exec", True),
        ("builtins.eval(text)", True),
        ("compile(text, 'a', 'exec')", True),
        ("__import__(name)", True),
        ("import pickle", True),
        ("from pickle import loads", True),
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("np.load(path)", True),
        ("subprocess.run(command, shell=True)", True),
        ("os.system(command)", True),
        ("yaml.load(text)", True),
        ("model.eval()", False),
        ("re.compile(text)", False),
        ("torch.compile(f)", False),
        ("ast.literal_eval(text)", False),
        ("torch.load(path, weights_only=True)", False),
        ("np.load(path, allow_pickle=False)", False),
    ],
)
def test_rule_against_code_from_strings(code, unsafe):
    """Fails if the search misses a way to run code, or takes a harmless call for one."""
    assert bool(find(code, runs_strings)) == unsafe


def test_no_string_is_run_as_code():
    """Fails if any module can run code that a file, a graph or an option contains."""
    found = {path: lines for path, tree in TREES.items() if (lines := find(tree, runs_strings))}
    assert not found


def test_edited_graph_runs_no_code(tmp_path):
    """Fails if the pattern of an operator in a graph is anything but the id of a known pattern."""
    x, target = torch.zeros(1, 1, 4, 2), tmp_path / "made"
    for text in (
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        f"Band(*[__import__('os').system('touch {target}')])",
        "Causal()",
        "",
    ):
        with pytest.raises(ValueError, match=r"pattern .* does not exist in this process"):
            torch.ops.regard.attend(x, x, x, None, None, None, text, 1.0, 0, 0)
    assert not target.exists()


def test_edited_export_runs_no_code(tmp_path):
    """Fails if a saved graph whose operator was edited runs what its string says."""

    class Attend(torch.nn.Module):
        def forward(self, q):
            return torch.ops.regard.attend(q, q, q, None, None, None, PLACEHOLDER, 1.0, 0, 0)

    target = tmp_path / "made"
    program = torch.export.export(Attend(), (torch.zeros(1, 1, 4, 2),))
    code = f"__import__('pathlib').Path({str(target)!r}).touch()"
    for node in program.graph.nodes:
        node.args = tuple(code if value == PLACEHOLDER else value for value in node.args)
    torch.export.save(program, tmp_path / "edited.pt2")
    loaded = torch.export.load(tmp_path / "edited.pt2").module()
    with pytest.raises(ValueError, match="does not exist in this process"):
        loaded(torch.zeros(1, 1, 4, 2))
    assert not target.exists()


PLACEHOLDER = "the id of a pattern"


# -------------------------------------------------------------------------------------- output
# These print nothing that a user wrote to a terminal: the worker writes to its log.
PRINTS = {"cli/__init__.py", "compare/worker.py"}
UNESCAPED = {"print", "typer.echo", "typer.secho", "typer.confirm", "typer.prompt", "Console"}
UNESCAPED |= {"click.echo", "rich.print", "sys.stdout.write", "sys.stderr.write"}


def prints_unescaped(node):
    """Whether a node prints text without escaping control characters and markup."""
    name = name_of(node)
    if name in ("TextColumn", "rich_progress.TextColumn"):
        return keyword(node, "markup") != "False"
    return name in UNESCAPED or name.endswith("console.Console")


def test_output_is_escaped_in_one_place():
    """Fails if a command prints by itself: `regard.cli.output` and `regard.console` escape."""
    allowed = PRINTS | {"cli/output.py"}
    found = {
        path: lines
        for path, tree in TREES.items()
        if path not in allowed and (lines := find(tree, prints_unescaped))
    }
    assert not found
