"""Strings of the user in the output: markup, control characters, and text that is no UTF-8."""

import io
import json
import re

import pytest
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.output import print_json
from regard.console import PlainConsole, escape_controls
from regard.progress import progress_bar

HOSTILE = "[/x]a [red]b[/red] :warning: \x1b[31m\a\r\x9b2J\u202eevil\u2028\ud800"
SHOWN = r"[/x]a [red]b[/red] :warning: \x1b[31m\x07\r\x9b2J\u202eevil\u2028\ud800"
CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def test_escapes():
    """Fails if a control character is left, or ordinary text is changed."""
    assert escape_controls(HOSTILE) == SHOWN
    plain = "tab\t, line\nfeed, \\x1b, é, 汉字, 🏳️‍🌈"
    assert escape_controls(plain) == plain


@pytest.mark.parametrize("wrap", [str, Text, lambda text: Text.assemble((text, "bold"))])
def test_console_prints_strings_as_they_are(wrap):
    """Fails if markup, emoji codes or control characters of a string reach the terminal."""
    file = io.StringIO()
    console = PlainConsole(file=file, width=200, force_terminal=True, color_system=None)
    table = Table(title=HOSTILE, box=None)
    table.add_column(HOSTILE)
    table.add_row(wrap(HOSTILE))
    console.print(wrap(HOSTILE))
    console.print(table)
    text = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())  # the styles of rich itself
    assert not CONTROLS.search(text)
    assert text.count("[/x]a [red]b[/red] :warning: ") == 4
    assert text.count(SHOWN) == (4 if wrap is str else 2)


def test_progress_bar_prints_strings_as_they_are(monkeypatch):
    """Fails if the description of a progress bar is read as markup."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar() as bar:
        bar.update(0.5, HOSTILE)
        shown = bar.progress.console
        with shown.capture() as captured:
            shown.print(bar.progress.get_renderable())
    assert "[/x]a" in captured.get() and "\x9b" not in captured.get()


def test_json_is_exact_and_escaped(capsys):
    """Fails if JSON changes a value, or contains a raw control character."""
    print_json({HOSTILE: [HOSTILE, "é"]})
    text = capsys.readouterr().out
    assert not CONTROLS.search(text) and "é" in text
    assert json.loads(text) == {HOSTILE: [HOSTILE, "é"]}


def call(*arguments):
    """Call the command line; fails with the traceback of anything but an exit code."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert not CONTROLS.search(result.output), result.output
    return result


SMALL = ("--steps", 1, "--dim", 8, "--heads", 1, "--layers", 1, "--length", 8)


def test_commands_with_hostile_names(tmp_path, monkeypatch):
    """Fails if a folder, a column or a label that looks like markup ends in a traceback after all
    training, hides other runs, or reaches the terminal as a control sequence."""
    monkeypatch.chdir(tmp_path)
    column, folder = "[/x]\x1b[31m", "mk/[/x]a [red]b\x1b[31m"
    labels = ("[/y]\x1b]0;t\a", "[red]b")
    rows = [{"text": f"text {i}", column: labels[i % 2]} for i in range(60)]
    (tmp_path / "[red]a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ("--data", "[red]a.jsonl", "--label", column)
    done = call("train", "--task", "classify", *data, *SMALL, "--out", folder)
    assert done.exit_code == 0 and r"saved to mk/[/x]a [red]b\x1b[31m" in done.stdout
    listed = call("runs", "list", "mk")
    assert listed.exit_code == 0 and "[/x]a" in listed.stdout and "[red]b" in listed.stdout
    for command in ("show", "compare"):
        folders = (folder, folder)[: 1 + (command == "compare")]
        assert "[red]" in call("runs", command, *folders).stdout
    said = call("predict", folder, "--text", "a\x1b[2Jb")
    assert said.exit_code == 0 and r"a\x1b[2Jb" in said.stdout
    assert r"[/y]\x1b]0;t\x07" in said.stdout or "[red]b  " in said.stdout
    read = json.loads(call("predict", folder, "--text", "a\x1b[2Jb", "--json").stdout)
    assert read[0]["text"] == "a\x1b[2Jb" and read[0]["label"] in labels
    wrong = call(
        "train", "--task", "classify", "--data", "[red]a.jsonl", "--text", "[/z]\x9b", *SMALL
    )
    assert wrong.exit_code == 1 and r"'[/z]\x9b'" in wrong.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--[/x]\x1b[31m"],
        ["[/x]\x1b[31m"],
        ["--\x1b[31m"],
        ["runs", "\x1b[31m"],
        ["runs", "list", "[/x]\x1b[31m"],
        ["show", "[/x]\x1b[31m"],
        ["train", "--task", "[/x]\x1b[31m"],
        ["train", "--task", "recall", "--mixer", "[red]\u202eb"],
    ],
)
def test_errors_with_hostile_strings(arguments):
    """Fails if an error message sends control characters, reads markup, or is empty."""
    result = call(*arguments)
    assert result.exit_code in (1, 2) and result.stderr.strip()
    assert any(shown in result.stderr for shown in (r"\x1b[31m", r"\u202eb"))


def test_labels_that_are_not_utf8(tmp_path):
    """Fails if half of a surrogate pair in a label is found after all training."""
    rows = [{"text": f"text {i}", "label": "b\ud800" if i == 7 else "ab"[i % 2]} for i in range(60)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = call("train", "--task", "classify", "--data", path, *SMALL, "--out", tmp_path / "out")
    assert result.exit_code == 1 and not (tmp_path / "out").exists()
    assert f"line 8 of {path}: 'label' is 'b\\ud800'" in result.stderr
    assert "step" not in result.stderr
