"""Summaries: references, ROUGE, baselines, two lengths, and an encoder apart from the decoder."""

import json

import pytest
import torch
from typer.testing import CliRunner

from real import real
from regard.cli import app
from regard.models import build
from regard.tasks import create_task
from regard.tasks.base import SPLITS
from regard.tasks.rouge import ROUGE_TYPES, Rouge
from regard.tasks.summarisation import split_lines
from regard.train import TrainSettings
from regard.train.run import RunSpec, model_config, read_model_settings, run_training

ARGUMENTS = {"tokenizer": "char", "source_length": 40, "target_length": 16}


def rows(count=60):
    return [
        {
            "dialogue": f"#A#: Good day, I am number {i}.\n#B#: Hi!\n#A#: Bye.\n#B#: Bye {i}.",
            "summary": f"{i} says hi." if i % 7 else [f"{i} says hi.", f"hi from {i}"],
        }
        for i in range(count)
    ]


def write(path, content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return str(path)


def write_dialogues(path):
    pytest.importorskip("rouge_score")
    return write(path, rows())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dialogues(tmp_path_factory.mktemp("sum") / "x.jsonl")


def test_texts_and_summaries_have_lengths_of_their_own(data):
    task = create_task("summarise", data=data, **ARGUMENTS | {"target_length": 8})
    assert task.needs.length == 40 and sum(map(task.size, SPLITS)) == 60
    example = task.example("train", 0)
    assert example.inputs["source"].shape == (40,)
    assert example.inputs["target"].shape == example.targets["labels"].shape == (8,)
    notes = " ".join(task.notes())
    assert "60 of 60 texts have more than 40 tokens" in notes
    assert "60 of 60 summaries have more than 8 tokens" in notes
    encoded = task.processor.encode(rows()[0]["dialogue"])
    assert torch.equal(encoded["source"], example.inputs["source"])


def test_unknown_characters_are_counted(tmp_path):
    pytest.importorskip("rouge_score")
    write(tmp_path / "train.jsonl", rows(20))
    write(tmp_path / "valid.jsonl", rows(2))
    write(tmp_path / "test.jsonl", [*rows(2), {"dialogue": "Ça va?", "summary": "Où?"}])
    task = create_task("summarise", data=tmp_path, **ARGUMENTS)
    assert "2 texts and summaries have characters" in " ".join(task.notes())


def test_references_are_a_list_or_in_numbered_columns(tmp_path):
    pytest.importorskip("rouge_score")
    content = rows(40)
    for number, row in enumerate(content[:10]):
        del row["summary"]
        row |= {f"summary{i}": f"{i} of {number}" for i in (10, 1, 2)}
    content[10]["summary"] = ["", None]
    task = create_task("summarise", data=write(tmp_path / "x.jsonl", content), **ARGUMENTS)
    assert sum(map(task.size, SPLITS)) == 39 and "1 rows without" in task.notes()[0]
    shown = task.render(task.example("train", 0), {"text": "?"}).to_text()
    order = [shown.index(f"{i} of 0") for i in (1, 2, 10)]
    assert order == sorted(order) and shown.splitlines()[-1] == "predicted  ?"
    with pytest.raises(ValueError, match="no column 'sumary': did you mean 'summary"):
        create_task("summarise", data=str(tmp_path / "x.jsonl"), target="sumary")


@pytest.mark.parametrize("name", ROUGE_TYPES)
def test_rouge_is_the_mean_or_the_best_of_the_references(name):
    """Against n-grams and the longest common subsequence, counted here."""
    pytest.importorskip("rouge_score")
    text, references = "the cat sat on the mat", ["the cat on a mat", "a dog sat on the mat now"]

    def overlap(first, second):
        if name == "rouge_l":
            table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
            for i, a in enumerate(first):
                for j, b in enumerate(second):
                    best = max(table[i][j + 1], table[i + 1][j])
                    table[i + 1][j + 1] = table[i][j] + 1 if a == b else best
            return table[-1][-1], len(first), len(second)
        n = int(name[-1])
        grams = [
            [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            for words in (first, second)
        ]
        both = sum(min(grams[0].count(g), grams[1].count(g)) for g in set(grams[0]))
        return both, len(grams[0]), len(grams[1])

    scores = []
    for reference in references:
        both, mine, theirs = overlap(text.split(), reference.split())
        scores.append(200 * both / (mine + theirs))
    for choice, expected in (("mean", sum(scores) / 2), ("best", max(scores))):
        metric = Rouge(name, choice)
        assert metric.compute(metric.score_texts([text], [references])) == pytest.approx(expected)


def test_baselines_copy_lines_or_sentences(data):
    assert split_lines("a\n\n b \nc") == ["a", "b", "c"]
    assert split_lines("One. Two! Three") == ["One.", "Two!", "Three"]
    task = create_task("summarise", data=data, lead=2, **ARGUMENTS)
    test = range(task.size("test"))
    metric, baselines = task.metric, task.baselines()
    assert list(baselines) == ["lead-2", "longest line"] and metric.name == "rouge_1"
    documents = [document for _, document in task.source.walk("test")]
    for name, lines in (("lead-2", slice(2)), ("longest line", slice(1))):
        texts = ["\n".join(each.text.split("\n")[lines]) for each in documents]
        expected = metric.score_texts(texts, [each.summaries for each in documents])
        assert torch.equal(baselines[name](test), expected)


def test_an_encoder_apart_from_the_decoder(data, tmp_path):
    path = tmp_path / "model.json"
    mixer = {"name": "local", "arguments": {"window": 8}}
    path.write_text(json.dumps({"mixer": "linear", "encoder_layers": 3, "encoder_mixer": mixer}))
    task = create_task("summarise", data=data, **ARGUMENTS)
    spec = RunSpec(task={"name": "summarise"}, dim=16, heads=2, **read_model_settings(path))
    config = model_config(spec, task)
    assert config.layers == 2 and config.encoder.layers == 3
    assert config.encoder.mixer[0].name == "local" and config.mixer[0].name == "linear"
    model = build(config).eval()
    batch = task.batch("test", range(3))
    together = task.predict(model, batch)
    assert together == [task.predict(model, task.batch("test", [i]))[0] for i in range(3)]
    spec = RunSpec(task={"name": "copy"}, **read_model_settings(path))
    with pytest.raises(ValueError, match="encoder_mixer is for tasks whose model"):
        model_config(spec, create_task("copy"))


def test_train_and_predict(data, tmp_path):
    spec = RunSpec(
        task={"name": "summarise", "arguments": {"data": data, **ARGUMENTS}},
        dim=16,
        heads=2,
        layers=1,
        settings=TrainSettings(steps=3, batch_size=8, eval_examples=4),
    )
    result = run_training(spec, tmp_path / "run")
    assert list(result["metrics"]) == [*ROUGE_TYPES, "bits_per_character"]
    arguments = ["predict", str(tmp_path / "run"), data, "--json"]  # the column of the task
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert len(json.loads(shown.stdout)) == 60
    assert "60 of 60 texts have more than 40 tokens" in shown.stderr
    words = ["predict", str(tmp_path / "run"), "--text", "ÄÖ", "--text", "Hi!", "--text", ""]
    assert "1 of 3 texts have characters that do not occur" in CliRunner().invoke(app, words).stderr


def test_real_dialogues():
    """LEAD-3 of the test split, with the mean of three references: published 27.5, 6.8."""
    pytest.importorskip("rouge_score")
    folder = real("dialogsum") / "dialogsum"
    task = create_task("summarise", data=folder, tokenizer="byte")
    assert [task.size(split) for split in SPLITS] == [12_460, 500, 500]
    statistics = task.baselines()["lead-3"](range(500))
    assert abs(task.metric.compute(statistics) - 26.9) < 0.1
