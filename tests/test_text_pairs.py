"""Pairs of texts: how they are joined and shortened, what is learned, predictions, bad rows."""

import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from regard.cli import app
from regard.tasks import create_task
from regard.tasks.text_pairs import PairProcessor
from regard.tasks.tokenizers import ByteTokenizer
from regard.testing import check_task


def run(*arguments, code=0, stdin=None):
    result = CliRunner().invoke(app, list(map(str, arguments)), input=stdin)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Pairs whose second text repeats the first or not."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    lines = []
    for i in range(200):
        word = ("red", "blue", "green", "white")[i % 4]
        other = word if i % 2 else ("blue", "red", "white", "green")[i % 4]
        lines.append((f"the {word} house {i}", f"a house that is {other}", ("no", "yes")[i % 2]))
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("premise", "claim", "gold"), *lines])
    return path


def test_both_encoders_keep_the_promises_of_a_task(rows):
    """Fails if an input, a metric or a saved processor of either form is wrong."""
    arguments = {"data": rows, "first": "premise", "second": "claim", "label": "gold"}
    for encoder in ("joint", "dual"):
        task = create_task("pair", **arguments, encoder=encoder)
        assert "processor" in check_task(task) and task.classes == 2
        assert "\n--\na house that is" in task.render(task.example("test", 0)).to_text()
    causal = create_task("pair", **arguments, causal=True)
    assert causal.needs.kind == "decoder" and causal.needs.head.pooling == "last"


def test_a_joint_sequence_is_cls_first_sep_second_sep():
    """Fails if a special token, a segment or the shortening of the longer text is another."""
    processor = PairProcessor(ByteTokenizer(), 10, ["a"], "joint", ["first", "second"])
    cls, sep = 257, 258
    made = processor.encode({"first": "AB", "second": "C"})
    assert made["x"].tolist() == [cls, 66, 67, sep, 68, sep]
    assert made["token_type_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    for first, second, kept in (
        ("AB", "0123456789", ("AB", "01234")),
        ("0123456789", "AB", ("01234", "AB")),
        ("0123456789", "abcdefghij", ("0123", "abc")),
        ("", "", ("\0", "\0")),
    ):
        x = processor.encode({"first": first, "second": second})["x"]
        assert processor.split(x) == kept and len(x) <= 10
    dual = PairProcessor(ByteTokenizer(), 4, ["a"], "dual", ["first", "second"])
    x = dual.encode({"first": "ABC", "second": "D"})["x"]
    assert x.tolist() == [[cls, 66, 67, sep], [cls, 69, sep, 0]]
    with pytest.raises(ValueError, match="length must be at least 5 for encoder='joint'"):
        PairProcessor(ByteTokenizer(), 4, ["a"], "joint", ["first", "second"])
    with pytest.raises(TypeError, match="a row with the columns 'first' and 'second'"):
        processor.encode("A B")
    with pytest.raises(TypeError, match="'second' must be a text, not int"):
        processor.encode({"first": "A", "second": 3})


def test_built_in_sentences_need_the_order_of_the_words():
    """Fails if words alone give the label away, a sentence is in two splits, or labels are wrong:
    the oracle parses the sentences."""
    task = create_task("pair")
    scores = {n: task.metric.compute(b(range(400))) for n, b in task.baselines().items()}
    assert len(scores) == 2 and all(0.4 < score < 0.6 for score in scores.values())
    assert task.notes() == []
    for index in range(50):
        example = task.example("valid", index)
        facts = []
        for text in task.processor.split(example.inputs["x"]):
            words = text.split()
            passive = "by" in words
            facts.append((words[-1], words[1]) if passive else (words[1], words[-1]))
        label = task.processor.labels[int(example.targets["labels"])]
        assert (facts[0] == facts[1]) == (label == "same")


def test_train_predict_and_bad_rows(rows, tmp_path):
    """Fails if a pair cannot be trained, evaluated or predicted on the command line, or if its
    embedding ignores the segments."""
    import regard

    task = "pair:first=premise:second=claim:label=gold"
    common = ("--data", rows, "--dim", 32, "--layers", 1, "--heads", 2, "--batch-size", 16)
    run("train", "--task", task, *common, "--steps", 3, "--out", tmp_path / "run")
    line = json.dumps({"premise": "the red house", "claim": "a house that is red", "id": 3})
    shown = run("predict", tmp_path / "run", "-", "--json", stdin=line + "\n").stdout
    (found,) = json.loads(shown)
    assert found["claim"] == "a house that is red" and found["id"] == 3
    assert found["predicted_label"] in ("yes", "no")
    assert abs(sum(found["predicted_probabilities"].values()) - 1) < 1e-6
    loaded = regard.load(tmp_path / "run")
    pair = {"premise": "the red house", "claim": "a house that is red"}
    vector = loaded.embed([pair])
    inputs = loaded.processor.encode(pair)
    with torch.no_grad():
        plain, _ = loaded.model.backbone(inputs["x"][None])
    assert vector.shape == (1, 32) and not torch.allclose(vector, plain.mean(1))

    said = run("predict", tmp_path / "run", "-", stdin='{"premise": "x"}\n', code=1).stderr
    assert "has no column 'claim'" in said
    for arguments, words in (
        ("pair:first=premis", "no column 'premis': did you mean 'premise'"),
        ("pair:first=claim:second=claim", "the same column, 'claim'"),
        ("pair:encoder=both", "encoder must be one of 'joint', 'dual'"),
        ("pair:encoder=dual:causal=true", "A dual encoder cannot be causal"),
    ):
        said = run("train", "--task", arguments, *common, "--out", tmp_path / "x", code=1).stderr
        assert words in said and not (tmp_path / "x").exists()
    said = run("train", "--task", "pair:first=premise", "--out", tmp_path / "x", code=1).stderr
    assert "also give data" in said


def test_characters_that_are_not_in_the_vocabulary_are_counted(tmp_path):
    """Fails if a model reads another alphabet as one character, and nothing is said."""
    folders = {name: tmp_path / name for name in ("pair", "lm", "ner")}
    for folder in folders.values():
        folder.mkdir()
    for split, word in (("train", "ab"), ("valid", "ba"), ("test", "жшa")):
        (folders["lm"] / f"{split}.txt").write_text(f"{word} " * 60)
        (folders["ner"] / f"{split}.conll").write_text(f"{word} B-x\na O\n\n" * 20)
        rows = "".join(f"{word},a,{'xy'[i % 2]}\n" for i in range(20))
        (folders["pair"] / f"{split}.csv").write_text(f"first,second,label\n{rows}")
    found = {"lm": 120, "mlm": 120, "pair": 40, "ner": 40, "tag": 40, "classify": 40}
    columns = {"text": "first"}
    for name, count in found.items():
        data = folders[{"mlm": "lm", "tag": "ner", "classify": "pair"}.get(name, name)]
        given = {"data": data, "tokenizer": "char", **(columns if name == "classify" else {})}
        notes = create_task(name, length=16, **given).notes()
        (note,) = [each for each in notes if "not in the vocabulary" in each]
        assert note.startswith(f"{count} of ") and "of the test split" in note
