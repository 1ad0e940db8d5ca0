"""The commands around one run: train, eval, predict, generate, runs."""

import csv
import errno
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess

import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.parsing import absolute_path, parse_spec
from regard.cli.renamed import RENAMED_OPTIONS, RENAMED_SETTINGS
from regard.cli.text_plot import plot_text
from regard.compare import Schedule
from regard.models import generate
from regard.tasks import create_task
from regard.tasks.metrics import Accuracy, MacroF1
from regard.train import checkpoint
from regard.train.inference import evaluate, generation_step, load_run, predict
from regard.train.run import read_spec
from token_examples import token_batch, tokens_and_labels

LM = (
    "--task",
    "lm",
    "--length",
    "24",
    "--dim",
    "16",
    "--heads",
    "2",
    "--layers",
    "1",
    "--batch-size",
    "4",
    "--set",
    "eval_examples=8",
)
SMALL = (
    "--length",
    "32",
    "--dim",
    "16",
    "--heads",
    "2",
    "--layers",
    "1",
    "--batch-size",
    "4",
    "--set",
    "eval_examples=8",
)


def run(*arguments, code=0, **more):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"}, **more)
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
    ), result.output
    return result.stderr


@pytest.fixture(scope="module")
def speaks(tmp_path_factory):
    """A run of ten steps on the built-in language."""
    folder = tmp_path_factory.mktemp("runs") / "lm"
    run("train", *LM, "--mixer", "local:window=8", "--steps", 10, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A small CSV file: the letter decides."""
    path = tmp_path_factory.mktemp("data") / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "topic"])
        writer.writerows((f"{'xy'[i % 2] * 5} {i}", "ab"[i % 2]) for i in range(120))
    return path


@pytest.fixture(scope="module")
def labels(tmp_path_factory, rows):
    """A run of fifty steps on it."""
    folder = tmp_path_factory.mktemp("runs") / "classify"
    words = (
        "classify:text=body:label=topic",
        "--data",
        rows,
        "--lr",
        "0.01",
        "--steps",
        50,
        "--set",
        "warmup_steps=5",
    )
    run("train", *SMALL, "--task", *words, "--out", folder)
    return folder


def test_columns_of_parquet_have_options(tmp_path, monkeypatch):
    """Fails if --data --text --label is not read, by train or by compare."""
    arrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "my.parquet"
    arrow.parquet.write_table(
        arrow.Table.from_pylist(
            [{"body": f"{'xy'[i % 2]} {i}", "topic": i % 2} for i in range(99)]
        ),
        path,
    )
    words = ("--data", path, "--text", "body", "--label", "topic")
    run("train", *SMALL, "--task", "classify", *words, "--steps", 2, "--out", tmp_path / "run")
    assert read_spec(tmp_path / "run").task.arguments == {
        "length": 32,
        "data": str(path),
        "text": "body",
        "label": "topic",
    }
    said = refused(
        "train",
        *SMALL,
        "--task",
        "classify",
        *words[:3],
        "bdy",
        *words[4:],
        "--out",
        tmp_path / "other",
    )
    assert f"row 1 of {path} has no column 'bdy': did you mean 'body'?" in said
    monkeypatch.setattr(Schedule, "run", lambda self, cells: None)
    plain = (
        "--lengths",
        16,
        "--dim",
        8,
        "--heads",
        2,
        "--layers",
        1,
        "--out",
        tmp_path / "both",
        "--json",
    )
    found = run("compare", "--mixers", "linear", "--tasks", "classify", *words, *plain)
    assert json.loads(found.stdout)["rows"][-1]["mixer"] == "TF-IDF + linear"
    assert "takes no --text: its arguments are length, seed" in refused(
        "compare", "--mixers", "linear", "--tasks", "parity", *words, *plain
    )


def test_names_of_hugging_face_have_a_colon(tmp_path, monkeypatch):
    """Fails if the colon of hf: is taken for that of an argument, or a folder is looked for from
    somewhere else."""
    assert parse_spec("classify:data=hf:a/b#c:text=body").arguments == {
        "data": "hf:a/b#c",
        "text": "body",
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    assert (
        absolute_path("hf:set") == f"hf:{tmp_path / 'set'}"
        and absolute_path("hf:imdb") == "hf:imdb"
    )


@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["eval"],
        ["predict"],
        ["generate"],
        *(["runs", c] for c in ("list", "show", "compare", "delete")),
    ],
)
def test_help_has_an_example_and_json(command):
    """Fails if a command does not say how it is used."""
    shown = run(*command, "--help").stdout
    assert f"Example: regard {' '.join(command)}" in " ".join(shown.split()) and "--json" in shown


# -------------------------------------------------------------------------------------------- train
def test_train_writes_a_run_and_says_what_came_of_it(tmp_path):
    """Fails if options do not reach the run, progress is on stdout, or the same words again train
    again."""
    words = (
        *LM,
        "--mixer",
        "local:window=8",
        "--steps",
        10,
        "--set",
        "ema_decay=0.9",
        "--seed",
        3,
        "--out",
        tmp_path / "x",
    )
    found = run("train", *words, "--json")
    result = json.loads(found.stdout)
    spec = read_spec(tmp_path / "x")
    assert result["steps"] == 10 and result["metric"] == "bits_per_character" and found.stderr == ""
    assert (spec.mixer.arguments, spec.settings.ema_decay, spec.settings.seed, spec.dim) == (
        {"window": 8},
        0.9,
        3,
        16,
    )
    again = run("train", *words)
    assert "saved to" in again.stdout and "10 steps" in again.stdout
    assert (
        json.loads(run("train", "--resume", tmp_path / "x", "--json").stdout)["test"]
        == result["test"]
    )


def test_progress_goes_to_stderr_with_loss_speed_and_time(tmp_path):
    """Fails if somebody who waits is told nothing."""
    shown = run("train", *LM, "--steps", 10, "--warmup", 5, "--out", tmp_path / "x").stderr
    assert shown.count("\n") == 14 and all(
        word in shown for word in ("step 10/10", "loss ", "tokens/s", "s left")
    )


def test_a_run_that_is_over_is_trained_for_longer(tmp_path):
    """Fails if --resume --steps does nothing, or a number that is too small costs the result."""
    words = (*LM, "--steps", 4, "--out", tmp_path / "x")
    run("train", *words)
    assert "has already used 4 steps: give more than that, not 4" in refused(
        "train", "--resume", tmp_path / "x", "--steps", 4
    )
    assert "omit --lr" in refused("train", "--resume", tmp_path / "x", "--lr", "0.1")
    assert json.loads(run("train", "--resume", tmp_path / "x", "--json").stdout)["steps"] == 4
    assert (
        json.loads(run("train", "--resume", tmp_path / "x", "--steps", 9, "--json").stdout)["steps"]
        == 9
    )
    assert read_spec(tmp_path / "x").settings.steps == 9


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_keeps_the_run_and_says_how_to_go_on(tmp_path, monkeypatch, twice):
    """Fails if what was done is lost, or the run that goes on comes to something else; a second
    Ctrl-C does not wait."""
    words = (*LM, "--steps", 10, "--set", "save_every=2")
    whole = json.loads(run("train", *words, "--out", tmp_path / "whole", "--json").stdout)
    usual = checkpoint.save

    def stopping(root, step, *rest, **more):
        for _ in range(1 + twice if step == 4 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return usual(root, step, *rest, **more)

    monkeypatch.setattr(checkpoint, "save", stopping)
    said = refused("train", *words, "--out", tmp_path / "parts", "--json", code=130)
    monkeypatch.undo()
    assert (
        "Stopped at once" if twice else "Stopped at step 4"
    ) in said and f"regard train --resume {tmp_path / 'parts'}" in said
    rest = json.loads(run("train", "--resume", tmp_path / "parts", "--json").stdout)
    assert (rest["test"], rest["loss"]) == (whole["test"], whole["loss"])


def test_ctrl_c_before_the_first_step(tmp_path, monkeypatch):
    """Fails if a folder is named to go on with where there is nothing."""

    def stopping(spec):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.train.run.build_task", stopping)
    assert "nothing was saved" in refused("train", *LM, "--out", tmp_path / "x", "--json", code=130)


def test_a_disk_that_fills(tmp_path, monkeypatch):
    """Fails if a full disk costs the last checkpoint, or is not told with how to go on."""
    usual = checkpoint.write_json
    words = (*LM, "--steps", 10, "--set", "save_every=3", "--out", tmp_path / "x", "--json")

    def full(path, value):
        if "step" in value and value["step"] == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(path, value)

    monkeypatch.setattr(checkpoint, "write_json", full)
    said = refused("train", *words)
    assert "No space left on device" in said and "step-00000003" in said and "--resume" in said
    monkeypatch.undo()
    left = sorted(path.name for path in (tmp_path / "x" / "checkpoints").iterdir())
    assert left == ["step-00000003"]
    checkpoint.load(tmp_path / "x" / "checkpoints" / "step-00000003")
    assert json.loads(run("train", *words).stdout)["steps"] == 10


def test_a_small_disk(tmp_path):
    """Fails on a disk that is really full: the last checkpoint must be whole, and the message say
    what to do."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=360k", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("a disk can only be mounted by root")
    try:
        words = (*LM, "--steps", 400, "--set", "save_every=1", "--out", disk / "x", "--json")
        (disk / "other").write_bytes(bytes(200_000))
        said = refused("train", *words)
        assert (
            "No space left on device" in said
            and "step-000" in said
            and f"--resume {disk / 'x'}" in said
        )
        last = checkpoint.latest_checkpoint(disk / "x" / "checkpoints")
        assert last is not None and str(last) in said
        (disk / "other").unlink()
        go_on = run("train", "--resume", disk / "x", "--steps", int(last.name[5:]) + 1, "--json")
        assert json.loads(go_on.stdout)["steps"] == int(last.name[5:]) + 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_where_results_go_is_asked_before_training(tmp_path):
    """Fails if a comparison trains for hours and then cannot write its page, or leaves one of two
    outputs out."""
    words = (
        "compare",
        "--mixers",
        "linear",
        "--tasks",
        "parity",
        "--lengths",
        8,
        "--out",
        tmp_path / "x",
    )
    assert "is a folder" in refused(*words, "--html", tmp_path)
    assert "give one of them" in refused(*words, "--json", "--csv")
    assert not (tmp_path / "x").exists()


def test_a_disk_that_fills_under_a_comparison(tmp_path, monkeypatch):
    """Fails if a ledger that cannot be written to is a traceback."""

    def full(self, cells):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Schedule, "run", full)
    words = ("--mixers", "linear", "--tasks", "parity", "--lengths", 8, "--steps", 2)
    said = run("compare", *words, "--out", tmp_path / "x", code=1).stderr
    last = said.splitlines()[-1]
    assert last.startswith("error: database or disk is full. Finished runs are kept")


def test_a_disk_that_fills_while_tensors_are_written(tmp_path, monkeypatch):
    """Fails if safetensors' own way of telling is not understood."""
    tensors = {"model": {"w": torch.zeros(3)}}
    first = checkpoint.save(tmp_path, 1, tensors, {})

    def full(*_):
        raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(
        checkpoint.CheckpointWriteError,
        match=r"Cannot write the checkpoint of step 2: .*No space.*last checkpoint is .*00001",
    ):
        checkpoint.save(tmp_path, 2, tensors, {})
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Give a task"),
        (("--task", "lmm"), "No task 'lmm'"),
        (("--task", "lm:lenght=3"), "did you mean 'length'"),
        (("--task", "lm", "--mixer", "fnet"), "fnet does not support causal=True"),
        (("--task", "lm", "--mixer", "loca"), "did you mean 'local'"),
        (("--task", "lm", "--mixer", "local:windw=3"), "did you mean 'window'"),
        (("--task", "lm", "--dim", "10", "--heads", "3"), "divisible"),
        (("--task", "lm", "--set", "warmpu_steps=3"), "did you mean 'warmup_steps'"),
        (("--task", "lm", "--set", "warmup_steps"), "--set takes name=value"),
        (("--task", "lm", "--max-time", "soon"), "Expected a duration"),
        (("--task", "lm", "--data", "nowhere/x.txt"), "there is no folder"),
        (("--task", "recall", "--data", "x.txt"), "takes no --data: its arguments are alpha, keys"),
        (("--task", "regress", "--label", "y"), "takes no --label: did you mean 'target'? Its arg"),
        (("--task", "tag", "--text", "x"), "did you mean 'tokens'? Its arguments are data"),
        (("--task", "seq2seq", "--text", "x"), "did you mean 'source'?"),
        (("--task", "image_folder", "--label", "x"), "Write arguments as --task image_folder:na"),
        (("--task", "regress:label=y"), "takes no argument 'label': did you mean 'target'?"),
        (("--task", "lm", "--lr", "0"), "lr: "),
        (("--task", "lm", "--position", "lerned"), "lerned"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_training(tmp_path, words, said):
    """Fails if a wrong word, or a task and a mixer that do not fit, leave anything behind."""
    assert said in refused("train", *words, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [(command, *pair) for command, names in RENAMED_OPTIONS.items() for pair in names.items()],
)
def test_renamed_options_name_the_new_one(command, old, new):
    """Fails if an old option is accepted, or its error does not name the new option."""
    result = run(command, old, "1", code=2)
    assert f"No such option: {old}. Did you mean {new}?" in " ".join(result.output.split())
    assert new in run(command, "--help").stdout


def test_unknown_options_and_renamed_settings_suggest_a_name(tmp_path):
    """Fails if a typo or an old setting is not answered with the name to use."""
    assert "Did you mean --layers?" in run("train", "--layer", "3", code=2).output
    for old, new in RENAMED_SETTINGS.items():
        said = refused("train", *LM, "--set", f"{old}=1", "--out", tmp_path / "x")
        assert f"No setting {old!r}: did you mean {new!r}?" in said


def test_bad_data_is_refused_in_one_line(tmp_path, rows):
    """Fails if empty, torn or wrongly encoded files, missing labels or columns end in anything but
    a line of words."""
    files = {
        "empty.csv": b"",
        "torn.csv": b"body,topic\n" + b"x,a\n" * 9 + b"y\n",
        "coded.csv": b"body,topic\nx,\xe9\n",
        "lacking.csv": b"body,topic\n" + b"x,a\n" * 50 + b"z,\n" * 50,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    said = {
        "empty.csv": "is empty",
        "torn.csv": "has 1 fields, but the header has 2",
        "coded.csv": "offset 13, line 2",
        "lacking.csv": "there is one class",
    }
    for name, words in said.items():
        given = (
            "train",
            "--task",
            "classify:text=body:label=topic",
            "--data",
            tmp_path / name,
            "--out",
            tmp_path / "x",
        )
        assert words in refused(*given)
    given = (
        "train",
        "--task",
        "classify:text=bdy:label=topic",
        "--data",
        rows,
        "--out",
        tmp_path / "x",
    )
    assert "did you mean 'body'" in refused(*given)
    assert not (tmp_path / "x").exists()


def test_another_run_in_the_folder_is_not_overwritten(speaks, tmp_path):
    """Fails if other words take over a folder, or options beside --resume are ignored."""
    assert "has a run with a different mixer" in refused(
        "train", *LM, "--steps", 10, "--out", speaks
    )
    assert "omit --dim" in refused("train", "--resume", speaks, "--dim", 20)
    assert "omit --set" in refused("train", "--resume", speaks, "--set", "ema_decay=0.9")
    assert "is not a run" in refused("train", "--resume", tmp_path)
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("train", *LM, "--out", tmp_path / "file")


def test_data_that_changed_are_not_resumed(tmp_path):
    """Fails if a run goes on with other characters than it began with."""
    (tmp_path / "x.txt").write_text("abcd\n" * 100)
    words = ("train", *LM, "--data", tmp_path / "x.txt", "--steps", 4, "--out", tmp_path / "run")
    run(*words)
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "x.txt").write_text("abce\n" * 100)
    assert "changed since it started" in refused(*words)


# --------------------------------------------------------------------------------------------- eval
def test_eval_measures_a_whole_split(speaks):
    """Fails if the metric is not that of the model over all windows, counted by hand."""
    found = json.loads(run("eval", speaks, "--split", "valid", "--batch-size", 7, "--json").stdout)
    made, model = create_task("lm", length=24), load_run(speaks).model
    bits = 0.0
    for index in range(made.size("valid")):
        tokens, target = tokens_and_labels(made.example("valid", index))
        logp = model(tokens[None])[0].detach().double().log_softmax(-1)
        bits -= float(logp[range(len(target)), target].sum()) / 0.6931471805599453
    assert found["bits_per_character"] == pytest.approx(
        bits / (len(made.streams["valid"]) - 1), rel=1e-5
    )
    assert found["examples"] == made.size("valid")
    assert found["perplexity"] == pytest.approx(2 ** found["bits_per_character"], rel=1e-5)
    assert "over 5 examples of test" in run("eval", speaks, "--max-examples", 5).stdout


def test_macro_f1():
    """Fails if it is not the mean of F1 over the classes that were said or meant."""
    meant, said = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 1, 1, 0])
    logits, batch = torch.nn.functional.one_hot(said, 4).float(), token_batch(said, meant)
    found = {
        metric.name: metric.compute(metric.update(logits, batch, []))
        for metric in (Accuracy(), MacroF1(4))
    }
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["macro_f1"] == pytest.approx((2 / 4 + 4 / 5 + 0) / 3)


def test_eval_refusals(speaks, tmp_path):
    """Fails if a split that is none, an endless one, or a run that is not over is measured."""
    assert "split must be one of" in refused("eval", speaks, "--split", "tset")
    assert "may be endless" in refused("eval", speaks, "--split", "train")
    assert "is not a run" in refused("eval", tmp_path)
    shutil.copytree(speaks, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "model")
    assert f"is not finished. Resume it with: regard train --resume {tmp_path / 'half'}" in refused(
        "eval", tmp_path / "half"
    )
    assert (
        evaluate(load_run(speaks).model, create_task("lm", length=24), "train", examples=3)[
            "examples"
        ]
        == 3
    )


# ------------------------------------------------------------------------------------------ predict
def test_predict_labels_texts_without_the_data(labels, tmp_path):
    """Fails if a learned rule is not applied, probabilities do not sum to one, or the data are
    needed."""
    moved = tmp_path / "moved"
    shutil.copytree(labels, moved)
    spec = json.loads((moved / "spec.json").read_text())
    spec["task"]["arguments"]["data"] = "/nowhere.csv"
    (moved / "spec.json").write_text(json.dumps(spec))
    found = json.loads(
        run(
            "predict", moved, "--text", "xxxxx 7", "--text", "yyyyy 8", "--text", "", "--json"
        ).stdout
    )
    assert [one["label"] for one in found][:2] == ["a", "b"] and len(found) == 3
    for one in found:
        assert sum(one["probabilities"].values()) == pytest.approx(1) and one["probability"] == max(
            one["probabilities"].values()
        )
    assert run("predict", moved, "--text", "xxxxx 7").stdout.startswith("a  ")


def test_predict_a_file_in_batches(labels, rows, tmp_path):
    """Fails if rows are lost, out of order, or depend on their batch."""
    given = list(csv.DictReader(rows.open()))
    shown = list(
        csv.DictReader(
            io.StringIO(run("predict", labels, "--data", rows, "--batch-size", 7, "--csv").stdout)
        )
    )
    assert [{name: one[name] for name in given[0]} for one in shown] == given
    assert sum(one["predicted_label"] == one["topic"] for one in shown) > 110
    alone = next(predict(load_run(labels), [given[0]["body"]]))
    assert float(shown[0]["predicted_probability"]) == pytest.approx(alone["probability"], rel=1e-5)
    (tmp_path / "lines.txt").write_text("xxxxx\nyyyyy\n")
    assert (
        len(json.loads(run("predict", labels, "--data", tmp_path / "lines.txt", "--json").stdout))
        == 2
    )


def test_predict_refusals(labels, speaks, rows):
    """Fails if what cannot be predicted is."""
    assert "Give inputs: --text, --data" in refused("predict", labels)
    assert "--column is a column of --data" in refused(
        "predict", labels, "--text", "x", "--column", "body"
    )
    assert "did you mean 'body'" in refused("predict", labels, "--data", rows, "--column", "bdy")
    assert f"regard generate {speaks}" in refused("predict", speaks, "--text", "x")


# ----------------------------------------------------------------------------------------- generate
def test_generate_is_the_same_streamed_or_whole_and_by_its_seed(speaks):
    """Fails if the stream differs from the whole, a seed does nothing, or a text longer than the
    model's window ends."""
    words = (
        "generate",
        speaks,
        "--prompt",
        "the ",
        "--max-new-tokens",
        60,
        "--temperature",
        "0.9",
        "--top-k",
        10,
        "--top-p",
        "0.95",
    )
    found = json.loads(run(*words, "--seed", 1, "--json").stdout)
    assert run(*words, "--seed", 1).stdout == "the " + found["text"] + "\n"
    assert len(found["tokens"]) == len(found["text"]) == 60 and found["finish_reason"] == "length"
    assert json.loads(run(*words, "--seed", 2, "--json").stdout)["text"] != found["text"]


def test_a_speaker_reads_half_again_when_its_window_is_full(speaks):
    """Fails if the next token is not what the model says after the tokens that it still sees."""
    ready = load_run(str(speaks), device="cpu")
    step, codec = generation_step(ready), ready.processor.tokenizer
    prompt = codec.encode("the dog sees the ").tolist()
    new = generate(step, [prompt], max_new_tokens=40)[0].tokens
    whole, seen = prompt + new, len(prompt)
    for at in range(len(prompt), len(whole)):
        logits = ready.model(torch.tensor([whole[at - seen : at]]))[0, -1]
        logits[:2] = -torch.inf
        assert int(logits.argmax()) == whole[at]
        seen = seen + 1 if seen < 24 else 12
    long = codec.encode("the dog sees the cat and more of it all").tolist()
    prompts = [long[:30], long[:5], long[3:]]
    together = generate(step, prompts, max_new_tokens=40)
    for prompt, found in zip(prompts, together, strict=True):
        assert generate(step, [prompt], max_new_tokens=40)[0].tokens == found.tokens


def test_a_prompt_longer_than_the_context_is_noted(speaks):
    shown = run("generate", speaks, "--prompt", "the dog sees the cat and more", "--json")
    assert "the prompt has 29 tokens, but the model reads at most 24: it sees the last 16" in (
        shown.stderr
    )
    assert not run("generate", speaks, "--prompt", "the dog sees the cat and").stderr


def test_generate_with_beams_stops_and_the_best(speaks):
    """Fails if a stop is not heard, beams do not search, or temperature 0 is not the best token
    each time."""
    stopped = json.loads(
        run("generate", speaks, "--prompt", "the ", "--stop", "e", "--json").stdout
    )
    assert "e" not in stopped["text"] and stopped["finish_reason"] == "stop_string"
    best = json.loads(
        run(
            "generate",
            speaks,
            "--prompt",
            "the ",
            "--max-new-tokens",
            8,
            "--temperature",
            0,
            "--json",
        ).stdout
    )
    wide = json.loads(
        run(
            "generate",
            speaks,
            "--prompt",
            "the ",
            "--max-new-tokens",
            8,
            "--num-beams",
            4,
            "--json",
        ).stdout
    )
    assert sum(wide["logprobs"]) >= sum(best["logprobs"]) - 1e-6
    assert (
        run("generate", speaks, "--prompt", "the ", "--max-new-tokens", 8, "--num-beams", 4).stdout
        == f"the {wide['text']}\n"
    )


def test_generate_refusals(speaks, labels):
    """Fails if a word is ignored, or a model made to speak that cannot."""
    assert "does not generate text" in refused("generate", labels)
    assert "The prompt is empty" in refused("generate", speaks, "--prompt", "")
    assert "'Q', which is not in the training text" in refused(
        "generate", speaks, "--prompt", "the Q"
    )
    assert "--top-k applies to sampling" in refused(
        "generate", speaks, "--num-beams", 2, "--top-k", 3
    )
    assert "--seed applies to sampling" in refused(
        "generate", speaks, "--temperature", 0, "--seed", 3
    )
    assert "p must be" in refused("generate", speaks, "--top-p", 3)
    assert "--min-p applies to sampling" in refused(
        "generate", speaks, "--temperature", 0, "--min-p", 0.1
    )
    assert "--repetition-penalty does not apply to beam search" in refused(
        "generate", speaks, "--num-beams", 2, "--repetition-penalty", 1.2
    )
    assert "--length-penalty applies to beam search" in refused(
        "generate", speaks, "--length-penalty", 2
    )


def test_generate_with_every_processor(speaks):
    """Fails if an option does nothing: typical sampling and n-grams change the text."""
    words = ("generate", speaks, "--prompt", "the ", "--max-new-tokens", 40, "--json")

    def text(*more):
        return json.loads(run(*words, *more).stdout)["text"]

    greedy = text("--temperature", 0)
    unique = text("--temperature", 0, "--no-repeat-ngram", 4)
    whole = "the " + unique
    grams = [whole[i : i + 4] for i in range(len(whole) - 3)]
    assert len(set(grams)) == len(grams)
    assert greedy != unique and text("--temperature", 0, "--repetition-penalty", 3) != greedy
    plain = text()
    for option in (("--typical-p", 0.2), ("--min-p", 0.95), ("--top-p", 0.2), ("--top-k", 1)):
        assert text(*option) != plain
    long = text("--num-beams", 3, "--length-penalty", 2)
    assert len(long) == 40


# --------------------------------------------------------------------------------------------- runs
def test_runs_list_show_and_compare(speaks, labels, tmp_path):
    """Fails if a run, one that is not over, or a broken one is not told as what it is."""
    for name, folder in (("one", speaks), ("two", labels), ("half", speaks), ("broken", speaks)):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "half" / "result.json").unlink()
    (tmp_path / "broken" / "spec.json").write_text("{")
    found = run("runs", "list", tmp_path, "--json")
    listed = {entry["folder"].rsplit("/")[-1]: entry for entry in json.loads(found.stdout)}
    assert set(listed) == {"one", "two", "half"} and "broken" in found.stderr
    assert listed["one"]["metric"] == "bits_per_character" and listed["two"]["test"] > 0.9
    assert listed["half"]["test"] is None and listed["half"]["steps"] == 10
    assert "local(window=8)" in run("runs", "list", tmp_path).stdout
    shown = run("runs", "show", tmp_path / "one").stdout
    assert "bits_per_character on valid" in shown and "│" in shown and "█" in shown
    assert "Not finished" in run("runs", "show", tmp_path / "half").stdout
    assert len(json.loads(run("runs", "show", tmp_path / "one", "--json").stdout)["curve"]) == 10
    beside = run("runs", "compare", tmp_path / "one", tmp_path / "two").stdout
    assert (
        "mixer.name" in beside
        and "bits_per_character" in beside
        and "accuracy" in beside
        and "dropout" not in beside
    )
    assert (
        len(json.loads(run("runs", "compare", tmp_path / "one", tmp_path / "two", "--json").stdout))
        == 2
    )
    assert "at least two" in refused("runs", "compare", tmp_path / "one")
    assert "There is no folder" in refused("runs", "list", tmp_path / "none")


def test_runs_delete_only_what_a_run_wrote(speaks, tmp_path):
    """Fails if something else than a run is deleted, or a run without being asked."""
    shutil.copytree(speaks, tmp_path / "x")
    assert "is not a run" in refused("runs", "delete", tmp_path, "--yes")
    run("runs", "delete", tmp_path / "x", code=1, input="n\n")
    (tmp_path / "x" / "thesis.tex").write_text("mine")
    assert "contains 'thesis.tex'" in refused("runs", "delete", tmp_path / "x", "--yes")
    (tmp_path / "x" / "thesis.tex").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert "is a symbolic link" in refused("runs", "delete", tmp_path / "link", "--yes")
    assert (tmp_path / "x" / "model").is_dir()
    run("runs", "delete", tmp_path / "x", input="y\n")
    assert not (tmp_path / "x").exists()


def test_a_curve():
    """Fails if a curve does not rise where its values do, or few, equal or no values break it."""
    lines = plot_text([1, 2, 3], [0.0, 0.5, 1.0], "up", width=3, height=2).splitlines()
    assert lines == ["up", "1 │ ▁█", "0 │▁██", "  └───", "   1 3"]
    assert (
        len({len(line) for line in plot_text(range(500), list(range(500)), "x").splitlines()[1:7]})
        == 1
    )
    assert "1" in plot_text([1], [2.0], "x") and plot_text([], [], "x").endswith("no values yet")
    assert "█" in plot_text([1, 2], [3.0, 3.0], "x") and plot_text(
        [1], [float("nan")], "x"
    ).endswith("no values yet")
