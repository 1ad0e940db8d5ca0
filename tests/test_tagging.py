"""Tagging: CoNLL files and lists, words and their tokens, entities in all schemes, predictions."""

import json
import lzma
import random

import pytest
import torch

from real import real
from regard.models.losses import IGNORE_INDEX
from regard.tasks import create_task
from regard.tasks.base import SPLITS
from regard.tasks.entities import Entity, EntityF1, are_tags, find_entities

PEOPLE = ["Ada Lovelace", "Alan Turing", "Grace Hopper"]


def sentences(count):
    rows = []
    for number in range(count):
        first, last = PEOPLE[number % 3].split()
        words = [first, last, "met", f"Nr{number}", "in", "Paris", "."]
        rows.append((words, ["B-per", "I-per", "O", "O", "O", "B-loc", "O"]))
    return rows


def words_and_starts(task, x):
    encoder = task.processor.encoder
    return encoder.decode(x), encoder.starts(x)


def write_conll(path, count=60, extra="", start=""):
    text = "\n".join(
        "".join(f"{word}{extra}\t{label}\n" for word, label in zip(*row, strict=True))
        for row in sentences(count)
    )
    path.write_text(start + text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_labels_are_at_the_first_token_of_each_word(tmp_path, tokenizer):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    task = create_task("tag", data=write_conll(tmp_path / "a.conll"), tokenizer=tokenizer)
    assert sum(map(task.size, SPLITS)) == 60 and task.metric.name == "entity_f1"
    example = task.example("train", 0)
    labels = example.targets["labels"]
    words, starts = words_and_starts(task, example.inputs["x"])
    assert words == sentences(1)[0][0]
    assert [task.processor.labels[i] for i in labels[starts].tolist()] == sentences(1)[0][1]
    assert int((labels != IGNORE_INDEX).sum()) == 7


def test_conll_comments_documents_and_a_hash_that_is_a_word(tmp_path):
    start = "-DOCSTART- -X- O\n\n# id 7\n#\tO\nyes\tO\n\r\n \t\n"
    task = create_task("tag", data=write_conll(tmp_path / "a.txt", start=start), tokenizer="byte")
    words = words_and_starts(task, task.example("train", 0).inputs["x"])[0]
    assert words == ["#", "yes"] and sum(map(task.size, SPLITS)) == 61


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a\tO\nb\n", r"line 2 of \S+ has one column, 'b'"),
        ("a x O\nb O\n", r"line 2 of \S+ has 2 columns, but line 1 has 3"),
        ("a\tO\n\tO\n", r"line 2 of \S+ has a label, 'O', but no word"),
        ("a O\n\n" * 60, "All training words have the label 'O'"),
        ("a O\n\nb B-x\n", "The valid split has no rows"),
    ],
)
def test_bad_files_name_the_line(tmp_path, content, words):
    (tmp_path / "a.conll").write_text(content)
    with pytest.raises(ValueError, match=words):
        create_task("tag", data=tmp_path / "a.conll", tokenizer="byte")


def test_lists_in_json_and_their_errors(tmp_path):
    rows = [{"words": w, "tags": t} for w, t in sentences(60)]
    rows[3]["tags"] = rows[3]["tags"][:2]
    rows[15]["words"] = rows[15]["tags"] = []
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"data": path, "tokens": "words", "labels": "tags", "tokenizer": "byte"}
    task = create_task("tag", **arguments)
    assert sum(map(task.size, SPLITS)) == 58
    assert "7 words have 2 labels" in task.notes()[0]
    with pytest.raises(ValueError, match=r"line 4 .*: 7 words have 2 labels"):
        create_task("tag", **arguments, missing="error")
    with pytest.raises(ValueError, match="no column 'word': did you mean 'words'"):
        create_task("tag", **{**arguments, "tokens": "word"})
    path.write_text(json.dumps({"words": "a b", "tags": "O O"}) + "\n")
    with pytest.raises(ValueError, match="'words' must be a list with an entry per word, not str"):
        create_task("tag", **arguments)


@pytest.mark.parametrize(
    ("labels", "entities"),
    [
        ("B-a I-a O B-b", [(0, 2, "a"), (3, 4, "b")]),  # IOB2
        ("I-a I-a B-a O I-b", [(0, 2, "a"), (2, 3, "a"), (4, 5, "b")]),  # IOB1
        ("S-a B-b I-b E-b S-b", [(0, 1, "a"), (1, 4, "b"), (4, 5, "b")]),  # BIOES
        ("U-a B-b L-b", [(0, 1, "a"), (1, 3, "b")]),  # BILOU
        ("B-a I-b", [(0, 1, "a"), (1, 2, "b")]),
        ("B-a-b I-a-b", [(0, 2, "a-b")]),
        ("O O", []),
    ],
)
def test_entities_in_all_schemes(labels, entities):
    assert find_entities(labels.split()) == [Entity(*each) for each in entities]


def test_entities_and_f1_agree_with_seqeval():
    metrics = pytest.importorskip("seqeval.metrics")
    rng = random.Random(0)
    for names in (["O", "B-x", "I-x", "B-y", "I-y"], ["O", "B-x", "I-x", "E-x", "S-x", "S-y"]):
        gold = [[rng.choice(names) for _ in range(8)] for _ in range(200)]
        predicted = [[rng.choice((g, rng.choice(names))) for g in row] for row in gold]
        metric = EntityF1(names)
        batch = type("Batch", (), {"targets": {"labels": index(gold, names)}})
        logits = torch.nn.functional.one_hot(index(predicted, names), len(names)).float()
        ours = metric.compute(metric.update(logits, batch, []))
        assert abs(ours - metrics.f1_score(gold, predicted)) < 1e-12


def index(rows, names):
    return torch.tensor([[names.index(label) for label in row] for row in rows])


def test_labels_that_mark_no_entities_are_scored_per_word(tmp_path):
    assert are_tags(["O", "B-x"]) and not are_tags(["O"]) and not are_tags(["NN", "B-x"])
    (tmp_path / "a.conll").write_text("the DET\ndog NOUN\n\n" * 60)
    task = create_task("tag", data=tmp_path / "a.conll", tokenizer="byte")
    assert [metric.name for metric in task.metrics] == ["accuracy", "macro_f1"]
    scores = {n: task.metric.compute(b(range(3))) for n, b in task.baselines().items()}
    assert scores == {"constant": 0.5, "most frequent label of the word": 1.0}


def test_predictions_have_spans_with_offsets(tmp_path):
    task = create_task("tag", data=write_conll(tmp_path / "a.conll"), tokenizer="byte")
    encoded = task.processor.encode("Ada Lovelace, in Paris")
    words, starts = words_and_starts(task, encoded["x"])
    assert words == ["Ada", "Lovelace", ",", "in", "Paris"]
    output = torch.zeros(1, len(encoded["x"]), task.classes)
    for start, label in zip(starts, ["B-per", "I-per", "O", "O", "B-loc"], strict=True):
        output[0, start, task.processor.labels.index(label)] = 1
    (prediction,) = task.processor.decode(output, {"x": encoded["x"][None]})
    assert prediction["text"] == "Ada Lovelace , in Paris"
    scores = [span.pop("score") for span in prediction["spans"]]
    assert all(0.1 < score < 0.8 for score in scores)
    assert prediction["spans"] == [
        {"start": 0, "end": 12, "label": "per", "text": "Ada Lovelace"},
        {"start": 18, "end": 23, "label": "loc", "text": "Paris"},
    ]
    shown = task.render(task.example("train", 0), prediction).to_text()
    assert shown.startswith("[Ada Lovelace](per) met Nr0 in [Paris](loc) .\npredicted:\n")


def test_long_sentences_are_cut_between_words_and_counted(tmp_path):
    task = create_task("tag", data=write_conll(tmp_path / "a.conll"), tokenizer="byte", length=20)
    example = task.example("train", 0)
    assert words_and_starts(task, example.inputs["x"])[0] == ["Ada", "Lovelace", "met"]
    assert any("60 sentences have more than 20 tokens" in note for note in task.notes())


def test_words_baseline_and_real_data(tmp_path):
    folder = real("wnut17") / "wnut17"
    files = {"train": "wnut17train.conll.xz", "dev": "emerging.dev.conll.xz"}
    for split, name in files.items():
        lines = lzma.decompress((folder / name).read_bytes()).decode().split("\n")[:8000]
        (tmp_path / f"{split}.conll").write_text("\n".join(lines), encoding="utf-8")
    task = create_task("tag", data=tmp_path, tokenizer="byte")
    assert task.size("train") > 300 and "B-person" in task.processor.labels
    indices = task.sample("test", 60).tolist()
    scores = {n: task.metric.compute(b(indices)) for n, b in task.baselines().items()}
    assert scores["constant"] == 0 < scores["most frequent label of the word"] < 0.5
