"""Classification of texts: splits, labels, what is missing, and everything that prediction
needs."""

import collections
import json

import pytest
import torch

from real import real
from regard.tasks import create_task, find_task, text_classification as module
from regard.tasks.base import SPLITS


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def some(count, labels="aab"):
    return [{"body": f"text number {i}", "topic": labels[i % len(labels)]} for i in range(count)]


def texts(made, split):
    return [made.render(made.example(split, i)).to_text() for i in range(made.size(split))]


def test_rows_are_split_by_their_number(tmp_path):
    """Fails if a row is lost, stands in two splits, moves when rows are appended, or the seed does
    nothing."""
    made = create_task(
        "classify",
        data=write(tmp_path / "x.jsonl", some(1000)),
        text="body",
        label="topic",
        tokenizer="byte",
    )
    sizes = [made.size(split) for split in SPLITS]
    assert sum(sizes) == 1000 and abs(sizes[1] - 100) < 40 and abs(sizes[2] - 100) < 40
    shown = [line for split in SPLITS for line in texts(made, split)]
    assert sorted(shown) == sorted(f"{row['body']} → {row['topic']}" for row in some(1000))
    more = create_task(
        "classify",
        data=write(tmp_path / "y.jsonl", some(1300)),
        text="body",
        label="topic",
        tokenizer="byte",
    )
    assert all(set(texts(made, split)) <= set(texts(more, split)) for split in SPLITS)
    other = create_task(
        "classify",
        data=write(tmp_path / "x.jsonl", some(1000)),
        text="body",
        label="topic",
        tokenizer="byte",
        seed=1,
    )
    assert texts(other, "test") != texts(made, "test")


def test_files_named_after_splits(tmp_path):
    """Fails if files are mixed; where only some are there, if the others are not drawn from the
    training rows."""
    rows = {"train": some(200), "test": [{"body": f"other {i}", "topic": "b"} for i in range(30)]}
    for split, found in rows.items():
        write(tmp_path / f"payload_{split}.jsonl", found)
    made = create_task("classify", data=str(tmp_path), text="body", label="topic", tokenizer="byte")
    assert texts(made, "test") == [f"other {i} → b" for i in range(30)]
    assert made.size("train") + made.size("valid") == 200 and 5 < made.size("valid") < 40
    write(tmp_path / "valid.jsonl", some(7))
    made = create_task("classify", data=str(tmp_path), text="body", label="topic", tokenizer="byte")
    assert [made.size(split) for split in SPLITS] == [200, 7, 30]


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_all_that_prediction_needs_is_in_the_facts(tmp_path, tokenizer):
    """Fails if tokens or labels cannot be made again without the data."""
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    made = create_task(
        "classify",
        data=write(tmp_path / "x.jsonl", some(60)),
        text="body",
        label="topic",
        tokenizer=tokenizer,
        length=9,
    )
    processor = find_task("classify").load_processor(
        json.loads(json.dumps(made.processor.to_dict()))
    )
    assert processor.labels == ("a", "b") and processor.labels[1] == "b"
    _, row = next(
        module.LabelledRows(
            {"all": [("", r) for r in some(60)]}, "body", "topic", drop=False, seed=0
        ).walk("train")
    )
    encoded, wanted = processor.encode(row.text), made.example("train", 0).inputs
    assert list(encoded) == ["x"] and torch.equal(encoded["x"], wanted["x"])
    assert (
        len(processor.encode_text("text " * 99)) == 9
        and made.vocab_size == processor.tokenizer.vocab_size
    )


def test_classes_are_in_the_order_of_frequency(tmp_path):
    """Fails if class 0 is not the most frequent, or equals are not in the order of their names;
    numbers are labels too."""
    rows = [{"text": "x", "label": n} for n in [3] * 5 + [1] * 9 + [2] * 5 + [True] * 2]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "valid.jsonl", rows[:1])
    write(tmp_path / "test.jsonl", rows[-1:])
    made = create_task("classify", data=str(tmp_path))
    assert made.processor.labels == ("1", "2", "3", "True") and made.classes == 4
    counted = collections.Counter(
        int(made.example("train", i).targets["labels"]) for i in range(made.size("train"))
    )
    assert (
        counted == {0: 9, 1: 5, 2: 5, 3: 2} and int(made.example("test", 0).targets["labels"]) == 3
    )


@pytest.mark.parametrize(
    ("rows", "given", "words"),
    [
        (some(40), {"text": "bdy"}, "no column 'bdy': did you mean 'body'"),
        (some(40), {"label": "tpic"}, "no column 'tpic': did you mean 'topic'"),
        (
            [{"body": "x", "topic": f"id {i}"} for i in range(10_000)],
            {},
            "'topic' has 10,000 different values in 10,000 training rows, so it is no label",
        ),
        (some(40, "a"), {}, "All training rows have the label 'a'"),
        (some(3), {}, "split has no rows"),
        ([], {}, "split has no rows"),
        ([{"body": ["x"], "topic": "a"}] * 40, {}, "'body' must be text or a number, not list"),
        ([{"body": "x", "topic": {}}] * 40, {}, "'topic' must be text or a number, not dict"),
        (some(40), {"missing": "ignore"}, "missing must be one of 'error', 'drop'"),
        (some(40), {"length": 0}, "length must be"),
        (some(40), {"data": "nowhere.csv"}, "nowhere.csv does not exist"),
        (some(40), {"data": None}, "also give data"),
    ],
)
def test_bad_rows_are_refused(tmp_path, rows, given, words):
    """Fails if nonsense is learned from, or the reason not told."""
    arguments = {
        "data": write(tmp_path / "x.jsonl", rows),
        "text": "body",
        "label": "topic",
    } | given
    with pytest.raises(ValueError, match=words):
        create_task("classify", **arguments)


def test_missing_labels_are_refused_by_line_or_dropped(tmp_path):
    """Fails if rows without a label are learned, dropped without a word, or not named."""
    rows = some(100)
    for at, value in ((0, None), (1, ""), (2, float("nan"))):
        rows[at]["topic"] = value
    path = write(tmp_path / "train.jsonl", rows)
    for split in ("valid", "test"):
        write(tmp_path / f"{split}.jsonl", some(5))
    with pytest.raises(
        ValueError, match=r"no 'topic' in line 1 of .*, line 2 of .*, line 3 of [^,]*: fill in"
    ):
        create_task("classify", data=str(tmp_path), text="body", label="topic", missing="error")
    made = create_task("classify", data=str(tmp_path), text="body", label="topic")
    assert made.size("train") == 97 and made.notes()[0].startswith("3 rows without 'body' or")
    write(tmp_path / "train.jsonl", [row | {"topic": None} for row in rows[:20]] + rows[3:])
    with pytest.raises(ValueError, match=r"line 5 of \S+ and 15 more: fill in"):
        create_task("classify", data=str(tmp_path), text="body", label="topic", missing="error")
    assert path


def test_lines_that_lack_a_column_are_dropped_and_a_wrong_name_is_not(tmp_path):
    """Fails if missing="drop" is of no use for JSON that leaves fields out, or hides a column that
    is not there."""
    rows = some(100)
    path = write(tmp_path / "x.jsonl", [{"body": "x"}, *rows, {"body": "y"}])
    made = create_task("classify", data=path, text="body", label="topic", missing="drop")
    assert sum(made.size(split) for split in ("train", "valid", "test")) == 100
    with pytest.raises(ValueError, match="has no column 'topik': did you mean 'topic'"):
        create_task(
            "classify",
            data=write(tmp_path / "y.jsonl", rows),
            text="body",
            label="topik",
            missing="drop",
        )


def test_a_label_that_training_lacks_is_named(tmp_path):
    """Fails if a label that no model could say is counted in silence."""
    write(tmp_path / "train.jsonl", some(50))
    write(tmp_path / "valid.jsonl", some(5))
    write(tmp_path / "test.jsonl", [*some(5), {"body": "x", "topic": "c"}])
    with pytest.raises(
        ValueError,
        match=r"line 6 of .*test.jsonl has label 'c', which no training row has: choose from a, b",
    ):
        create_task("classify", data=str(tmp_path), text="body", label="topic")


def test_long_and_short_texts(tmp_path):
    """Fails if a text is not cut, or a batch of different lengths not masked."""
    rows = [{"text": "x" * (1 + i), "label": "ab"[i % 2]} for i in range(90)]
    made = create_task(
        "classify", data=write(tmp_path / "x.jsonl", rows), length=16, tokenizer="byte"
    )
    assert {
        made.example("train", i).inputs["x"].shape[0] for i in range(made.size("train"))
    } <= set(range(1, 17))
    batch = made.batch("train", range(made.size("train")))
    assert (
        batch.inputs["x"].shape[1] == 16
        and torch.equal(batch.inputs["mask"], batch.inputs["x"] != 0)
        and batch.targets["labels"].dim() == 1
    )


def test_the_built_in_sentences_need_a_look_from_afar():
    """Fails if the classes are not even, or a class can be told from the words alone."""
    made = create_task("classify")
    assert made.processor.labels == ("right", "wrong")
    counts = collections.Counter(
        int(made.example("train", i).targets["labels"]) for i in range(made.size("train"))
    )
    assert counts[0] == counts[1]
    words = [collections.Counter(), collections.Counter()]
    for i in range(made.size("train")):
        text, _, label = made.render(made.example("train", i)).to_text().rpartition(" → ")
        words[label == "wrong"].update(text.rstrip(".").split())
    for word in words[0]:
        both = words[0][word] + words[1][word]
        assert (
            abs(words[0][word] - words[1][word]) < 5 * both**0.5
        )  # five deviations of a fair coin


def test_real_rows():
    """Fails if the CSV files of http-params, with quotes and code inside, or bbc-news are not read
    whole."""
    folder = real("http-params", "bbc-news")
    made = create_task(
        "classify", data=str(folder / "http-params"), text="payload", label="attack_type", length=64
    )
    assert (
        made.size("train") + made.size("valid") == 20_712
        and made.size("test") == 10_355
        and made.classes == 5
    )
    news = create_task("classify", data=str(folder / "bbc-news" / "bbc.jsonl.xz"), length=32)
    assert sum(map(news.size, SPLITS)) == 2225 and set(news.processor.labels) == {
        "business",
        "entertainment",
        "politics",
        "sport",
        "tech",
    }


def test_a_split_with_fewer_rows_than_classes_is_a_warning(tmp_path):
    write(tmp_path / "train.jsonl", some(30, "abc"))
    write(tmp_path / "valid.jsonl", [{"body": "new", "topic": "a"}])
    write(tmp_path / "test.jsonl", [{"body": f"new {i}", "topic": "abc"[i]} for i in range(3)])
    made = create_task("classify", data=str(tmp_path), text="body", label="topic")
    assert made.notes() == ["The valid split has 1 row for 3 classes: its score says little."]
