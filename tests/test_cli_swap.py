"""`regard swap`: drift, speed, memory, recovery, and errors in one line."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.swap import parse_extra_options, parse_mixer, read_texts
from regard.hf import load_swapped

hf = pytest.importorskip("transformers")
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "a",
    "dog",
    "cat",
    "sees",
    "hears",
    "old",
    "red",
    "big",
    "small",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny BERT with a tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = hf.BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=64,
            pad_token_id=0,
        )
        hf.BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    hf.BertTokenizerFast(vocab_size={word: i for i, word in enumerate(WORDS)}).save_pretrained(
        folder
    )
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sample.txt"
    path.write_text(
        "\n".join(
            f"the {a} dog {v} a {b} cat"
            for a in WORDS[11:]
            for v in ("sees", "hears")
            for b in WORDS[9:12]
        )
    )
    return str(path)


def run(*words):
    return CliRunner().invoke(app, ["swap", *words])


def test_max_tokens(model, data, tmp_path):
    """Fails if texts are not cut, or --recover reads whole ones."""
    words = ("--mixer", "vanilla", "--data", data, "--lengths", "8", "--json")
    short = run(model, *words, "--max-tokens", "4", "--recover", "1s", "--batch-size", "4")
    assert short.exit_code == 0, short.output
    found = json.loads(short.stdout)
    assert found["recovery"]["steps"] >= 1
    too_long = run(model, *words, "--max-tokens", "65", "--recover", "1s")
    assert too_long.exit_code == 1 and "the model has 64 positions" in too_long.stderr


def test_table(model, data):
    """Fails if drift, speed or memory is not shown."""
    found = run(model, "--mixer", "local", "--window", "2", "--data", data, "--lengths", "8,32")
    assert found.exit_code == 0, found.output
    for words in (
        "local window=2",
        "BertSelfAttention",
        "Cosine similarity of the embedding",
        "speed-up",
        "MB after",
    ):
        assert words in found.output


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.safetensors"])
def test_out_of_somebody_else_is_refused(model, data, tmp_path, name):
    """Fails if a folder that is not a swapped model is written to."""
    path = tmp_path / "mine" / name
    path.parent.mkdir()
    path.write_text("mine")
    words = (model, "--mixer", "local", "--window", "2", "--data", data, "--lengths", "8")
    found = run(*words, "--out", str(tmp_path / "mine"))
    assert path.read_text() == "mine"
    assert found.exit_code == 1 and f"contains {name!r} and is not a swapped model" in found.stderr
    assert [each.name for each in (tmp_path / "mine").iterdir()] == [name]
    assert "is a file" in run(*words, "--out", str(path)).stderr


def test_projections_shared_by_layers_are_refused(model, data):
    """Fails if each layer gets a projection of its own without a word."""
    words = (model, "--mixer", "linformer:share=layers:rank=4", "--data", data)
    found = run(*words, "--lengths", "8")
    assert found.exit_code == 1 and "share='kv'" in found.stderr


def test_json_recovery_and_out(model, data, tmp_path):
    """Fails if the JSON lacks the numbers or the curve, or the new model is not saved."""
    folder = tmp_path / "new"
    words = [
        model,
        "--mixer",
        "linear",
        "--layers",
        "1",
        "--data",
        data,
        "--lengths",
        "16",
        "--recover",
        "2s",
        "--batch-size",
        "4",
    ]
    found = run(*words, "--out", str(folder), "--json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert [c["layer"] for c in result["drift"]["changes"]] == [1] and result["speed"][0][
        "length"
    ] == 16
    assert (
        result["recovery"]["curve"][-1]["stage"] == "model"
        and result["recovery"]["after"]["output"] <= 1.0001
    )
    again = load_swapped(folder)
    with torch.no_grad():
        assert again(torch.tensor([[2, 5, 7, 3]])).last_hidden_state.isfinite().all()
    assert (
        run(str(folder), "--mixer", "local", "--data", data).exit_code == 1
    )  # its old attentions are not there


def test_three_ways_to_write_an_option():
    """Fails if they differ, or are not checked."""
    for word, settings, extra in (
        ("local:window=8", [], []),
        ("local", ["window=8"], []),
        ("local", [], ["--window", "8"]),
    ):
        assert parse_mixer(word, settings, extra).arguments == {"window": 8}
    assert parse_extra_options(["--a-b=3", "--c", "x"]) == ["a_b=3", "c=x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mixer", "locl"], "did you mean 'local'"),
        (["--mixer", "local", "--windw", "3"], "did you mean 'window'"),
        (["--mixer", "local", "--window"], "--window needs a value"),
        (["--mixer", "local", "stray"], "Unexpected argument 'stray'"),
        (["--mixer", "fnet"], "does not support the padding"),
        (["--mixer", "local", "--layers", "5"], "from 0 to 1"),
        (["--mixer", "local", "--layers", "x"], "--layers"),
        (["--mixer", "local", "--recover", "soon"], "Expected a duration"),
        (["--mixer", "local:window=3", "--window", "4"], "window is given twice"),
        (["--mixer", "local", "--window", "3", "--set", "window=4"], "window is given twice"),
        (["--mixer", "local", "--out", "/dev/null/x"], "/dev/null/x"),
        (["--mixer", "local", "--lengths", "99"], "positions for 64"),
        (["--mixer", "retnet"], "recurrence"),
    ],
)
def test_wrong_options_give_one_line(model, data, words, message):
    """Fails if a mistake of the user is a traceback."""
    found = run(model, *words, "--data", data)
    assert found.exit_code == 1 and message in found.stderr and "Traceback" not in found.output


def test_texts_of_a_table(tmp_path):
    """Fails if NaN or a list becomes a text, a 0 is lost, or an encoding cannot be given."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": NaN}\n{"text": null}\n{"text": " "}\n{"text": 0}\n')
    assert read_texts(str(path), "text", "utf-8") == ["a", "0"]
    path.write_text('{"text": ["a"]}')
    with pytest.raises(ValueError, match=r"line 1 of .* must be text or a number, not list"):
        read_texts(str(path), "text", "utf-8")
    (tmp_path / "a.txt").write_text("Köln\n", encoding="latin-1")
    assert read_texts(str(tmp_path / "a.txt"), "text", "latin-1") == ["Köln"]


def test_half_of_a_surrogate_pair_is_read(model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "the \\ud800 dog"}\n' * 4)
    words = ("--mixer", "vanilla", "--data", str(tmp_path / "a.jsonl"), "--lengths", "8")
    found = run(model, *words)
    assert found.exit_code == 0, found.output


def test_wrong_files(model, data, tmp_path):
    """Fails if a missing or empty file, or no model, is a traceback."""
    (tmp_path / "blank.txt").write_text("\n \n")
    for words, message in (
        ([model, "--data", str(tmp_path / "none.txt")], "none.txt"),
        ([model, "--data", str(tmp_path / "blank.txt")], "contains no text"),
        ([str(tmp_path), "--data", data], "config.json"),
    ):
        found = run(words[0], "--mixer", "local", *words[1:])
        assert found.exit_code == 1 and message in found.stderr and "Traceback" not in found.output


def test_run_folder(data, tmp_path):
    """Fails if a run folder is not swapped, or its logits are taken for hidden states."""
    made = {
        "--task": "lm",
        "--data": data,
        "--length": "16",
        "--dim": "16",
        "--steps": "2",
        "--out": str(tmp_path / "run"),
    }
    done = CliRunner().invoke(app, ["train", *(word for pair in made.items() for word in pair)])
    assert done.exit_code == 0, done.output
    words = [str(tmp_path / "run"), "--mixer", "linear", "--data", data]
    found = run(*words, "--recover", "1s", "--json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert result["drift"]["kind"] == "logits" and result["recovery"]["after"]["kind"] == "logits"
    assert [each["length"] for each in result["speed"]] == [16]
    for more, message in (
        (["--out", str(tmp_path / "new")], "is a run"),
        (["--lengths", "99"], "positions for 16"),
    ):
        found = run(*words, *more)
        assert found.exit_code == 1 and message in found.stderr and not (tmp_path / "new").exists()
    found = run(str(tmp_path / "run" / "model"), "--mixer", "linear", "--data", data)
    assert found.exit_code == 1 and "the folder of its run" in found.stderr


def test_help_has_an_example():
    """Fails if --help has no example."""
    found = run("--help")
    assert found.exit_code == 0 and "regard swap" in found.output and "--recover" in found.output
