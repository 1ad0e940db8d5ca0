"""A seeded fuzz of command lines: every command ends with an exit code and, if it fails, a
message; it never ends in a traceback, and writes nothing outside its folder."""

import random
import re

import pytest
import typer
from typer.testing import CliRunner

from fuzzing import examples
from regard.cli import COMMANDS, app

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
NAMES = ["vanilla", "local", "local:window=4", "linear", "mlp_mixer", "nosuch", "local:window=-1"]
NAMES += ["local:window=99999999999999999999", "local:[/x]=1", "local:window", ":", ",", "vanilla:"]
TASKS = ["recall", "copy", "lm", "classify", "nosuch", "recall:pairs=-1", "lm:length=x"]
PATHS = ["rows.csv", "empty.csv", "text.txt", "missing.csv", "folder", ".", "../..", "rows.csv/x"]
PATHS += ["[/x]a", "\x1b[31m", "a\x00b", "\udcff", "x" * 300, "", " ", "hf:", "/dev/null"]
NUMBERS = [
    "0",
    "1",
    "2",
    "-1",
    "3.5",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "9" * 30,
    "0x10",
    "",
    "x",
    "٣",
]
HOSTILE = [
    "",
    "[/x]",
    "[red]b",
    "\x1b[31m",
    "\u202e",
    "é",
    "汉字",
    "\udcff",
    "%s",
    "{}",
    "a" * 3000,
]
HOSTILE += ["--help", "--", "-", "=", "a=b", "'", "\n", "\r", "\0"]
POOLS = [NAMES, TASKS, PATHS, NUMBERS, HOSTILE]

# Options that keep the work of valid lines tiny; they come last, and the last value counts.
SMALL = {
    "--steps": "1",
    "--length": "8",
    "--lengths": "8",
    "--dim": "8",
    "--heads": "1",
    "--layers": "1",
    "--batch-size": "2",
    "--budget": "1s",
    "--max-new-tokens": "1",
    "--vocab-size": "20",
}
# These start processes, measure for seconds or load packages: only lines that fail are drawn.
LONG = {"compare", "bench", "demo", "tour", "swap", "few-shot", "export", "gallery", "look"}
LONG_WATCH = {"demo", "serve", "follow", "bench"}  # of regard watch


def commands():
    """The names of all commands with their parameters."""
    group = typer.main.get_command(app)
    context = group.make_context("regard", ["list"], resilient_parsing=True)
    found = {}
    for name in COMMANDS:
        command = group.get_command(context, name)
        parts = getattr(command, "commands", None)
        if parts is None:
            found[name,] = command.params
        else:
            found |= {(name, part): each.params for part, each in parts.items()}
    return found


PARAMETERS = commands()


def draw_value(rng, parameter):
    """A value that the parameter may accept, or one of any pool."""
    name = parameter.opts[0].strip("-")
    if rng.random() < 0.3:
        return rng.choice(rng.choice(POOLS))
    if name in ("mixer", "mixers", "name", "recipe", "names", "pattern"):
        return rng.choice(NAMES)
    if name in ("task", "tasks"):
        return rng.choice(TASKS)
    if name in ("data", "out", "html", "png", "folder", "root", "config", "path", "resume"):
        return rng.choice(PATHS)
    annotation = str(parameter.type_descriptor.annotation)
    return rng.choice(NUMBERS if "int" in annotation or "float" in annotation else HOSTILE)


def draw_line(rng, command):
    """The arguments of a command: some options, some arguments, values of any pool."""
    line, parameters = [], PARAMETERS[command]
    for parameter in parameters:
        is_argument = parameter.param_type_name == "argument"
        if rng.random() > (0.9 if is_argument else rng.choice([0.05, 0.25])):
            continue
        flag = getattr(parameter, "is_flag", False)
        for _ in range(rng.choice([1, 1, 1, 2])):
            value = draw_value(rng, parameter)
            if is_argument:
                line.append(value)
            elif flag:
                line.append(parameter.opts[0])
            elif rng.random() < 0.2:
                line.append(f"{parameter.opts[0]}={value}")
            else:
                line += [parameter.opts[0], value]
    if rng.random() < 0.1:
        line.insert(rng.randrange(len(line) + 1), rng.choice(rng.choice(POOLS)))
    known = {option for parameter in parameters for option in parameter.opts}
    line += [word for name, value in SMALL.items() if name in known for word in (name, value)]
    if command[0] in LONG or (command[0] == "watch" and command[1] in LONG_WATCH):
        line += [rng.choice(["--nosuch", "--nosuch=[/x]\x1b[31m", "--help"])]
    return [*command, *line]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a few data files, two levels down: "../.." is still inside tmp_path."""
    inside = tmp_path / "a" / "b" / "c"
    inside.mkdir(parents=True)
    rows = [f"text {i},{'ab'[i % 2]}" for i in range(60)]
    (inside / "rows.csv").write_text("\n".join(["text,label", *rows]))
    (inside / "empty.csv").write_text("")
    (inside / "text.txt").write_text("the dog barks\n" * 200)
    (inside / "folder").mkdir()
    monkeypatch.chdir(inside)
    monkeypatch.setenv("COLUMNS", "200")
    return inside


def check_line(line, tmp_path):
    """Run one command line and check how it ends."""
    outside = {path for path in tmp_path.rglob("*") if "c" not in path.relative_to(tmp_path).parts}
    result = CliRunner().invoke(app, line)
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        raise AssertionError(f"{line}: {error!r}") from error
    output = result.stdout + result.stderr
    assert result.exit_code in (0, 1, 2, 130), (line, result.exit_code)
    assert "Traceback" not in output, (line, output)
    assert not CONTROLS.search(output), (line, output)
    assert result.exit_code == 0 or output.strip(), line
    after = {path for path in tmp_path.rglob("*") if "c" not in path.relative_to(tmp_path).parts}
    assert after == outside, (line, after - outside)
    return result.exit_code


@pytest.mark.parametrize("command", PARAMETERS, ids=" ".join)
def test_random_command_lines(command, folder, tmp_path):
    """Fails if a command line ends in a traceback, without a message, or in control characters."""
    for seed in range(examples(6, 300)):
        rng = random.Random(f"{command} {seed}")
        check_line(draw_line(rng, command), tmp_path)


BASES = [
    ["train", "--task", "classify", "--data", "rows.csv"],
    ["train", "--task", "lm", "--data", "text.txt"],
    ["cost", "vanilla"],
    ["show", "local"],
]


@pytest.mark.parametrize("base", BASES, ids=" ".join)
def test_valid_command_lines_with_one_odd_option(base, folder, tmp_path):
    """Fails if a line that does work ends in a traceback because of one option."""
    command = (base[0],)
    parameters = [p for p in PARAMETERS[command] if p.param_type_name == "option"]
    known = {option for parameter in parameters for option in parameter.opts}
    small = [word for name, value in SMALL.items() if name in known for word in (name, value)]
    codes = []
    for seed in range(examples(4, 200)):
        rng = random.Random(f"{base} {seed}")
        parameter = rng.choice(parameters)
        odd = [parameter.opts[0]]
        if not getattr(parameter, "is_flag", False):
            odd.append(draw_value(rng, parameter))
        # last, so that it counts; work stays small, since no pool has a large number that is valid
        folder_option = ["--out", f"run{seed}"] if "--out" in known else []
        codes.append(check_line([*base, *small, *folder_option, *odd], tmp_path))
    codes.append(check_line([*base, *small], tmp_path))
    assert codes[-1] == 0
