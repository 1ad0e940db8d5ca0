"""Sequence to sequence: aligned files and rows, what the decoder reads and writes, generation."""

import json

import pytest
import torch

from real import real
from regard.models import build
from regard.tasks import create_task
from regard.tasks.base import SPLITS
from regard.train.run import RunSpec, model_config

WORDS = ["red", "green", "blue", "dog", "cat", "house"]


def write_rows(path, count=80):
    rows = []
    for i in range(count):
        text = f"{WORDS[i % 3]} {WORDS[3 + i // 3 % 3]} {i}"
        rows.append({"de": text, "en": text[::-1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(path, **arguments):
    defaults = {"source": "de", "target": "en", "tokenizer": "char", "length": 24}
    return create_task("seq2seq", data=path, **defaults | arguments)


def tiny_model(task, mixer="vanilla"):
    torch.manual_seed(0)
    spec = RunSpec(task={"name": "seq2seq"}, mixer=mixer, dim=16, heads=2, layers=1)
    return build(model_config(spec, task)).eval()


@pytest.fixture
def task(tmp_path):
    return make(write_rows(tmp_path / "x.jsonl"))


def test_the_decoder_reads_the_target_one_token_behind(task):
    assert sum(map(task.size, SPLITS)) == 80
    example, processor = task.example("train", 0), task.processor
    read, write = example.inputs["target"].tolist(), example.targets["labels"].tolist()
    assert read == [processor.start, *write[:-1]] and write[-1] == processor.end
    source = processor.tokenizer.decode(example.inputs["source"].tolist())
    assert processor.decode_text(write) == source[::-1]
    assert task.render(example, {"text": "?"}).to_text().splitlines()[-1] == "predicted  ?"


def test_long_texts_are_cut_and_have_no_end(tmp_path):
    task = make(write_rows(tmp_path / "x.jsonl"), length=5)
    example = task.example("train", 0)
    assert example.inputs["target"].shape == example.targets["labels"].shape == (5,)
    assert task.processor.end not in example.targets["labels"]
    assert any("texts have more than 5 tokens" in note for note in task.notes())


def test_bits_count_the_end_token_but_no_unit_for_it(task):
    batch = task.batch("test", range(4))
    logits = torch.zeros(*batch.targets["labels"].shape, task.processor.vocab_size)
    statistics = task.metric.update(logits, batch, [])
    lengths = (batch.targets["labels"] >= 0).sum(1)
    assert statistics[:, 1].tolist() == (lengths - 1).tolist()
    expected = lengths * torch.tensor(task.processor.vocab_size).log2()
    assert torch.allclose(statistics[:, 0], expected.double(), rtol=1e-5)


def test_ngrams_are_better_than_frequencies(task):
    scores = {n: task.metric.compute(b(range(8))) for n, b in task.baselines().items()}
    assert scores["n-grams"] < scores["constant"]


@pytest.mark.parametrize("mixer", ["vanilla", "linear"])
def test_streamed_and_whole_decoding_write_the_same(tmp_path, mixer, monkeypatch):
    task = make(write_rows(tmp_path / "x.jsonl"), length=8)
    model, batch = tiny_model(task, mixer), task.batch("test", range(5))
    streamed = task.predict(model, batch)
    monkeypatch.setattr("regard.tasks.translation.outer_mixers", lambda module: [_Closed])
    assert task.predict(model, batch) == streamed
    alone = [task.predict(model, task.batch("test", [i]))[0] for i in range(5)]
    assert alone == streamed


class _Closed:
    can = type("Can", (), {"stream": False})


def test_beam_search_finds_more_probable_texts(tmp_path):
    task = make(write_rows(tmp_path / "x.jsonl"), beams=3, length=6)
    model = tiny_model(task)
    beams = task.predict(model, task.batch("test", range(3)))
    assert len(beams) == 3 and all(isinstance(each["text"], str) for each in beams)
    restored = task.load_processor(json.loads(json.dumps(task.processor.to_dict())))
    assert restored.beams == 3
    assert restored.predict(model, task.batch("test", range(3)).inputs) == beams


def test_generated_texts_are_scored_as_by_sacrebleu(tmp_path):
    sacrebleu = pytest.importorskip("sacrebleu")
    task = make(write_rows(tmp_path / "x.jsonl"), generate=True)
    assert [m.name for m in task.metrics][2:] == ["chrf", "exact_match"]
    batch = task.batch("test", range(6))
    targets = [
        task.processor.decode_text([t for t in row if t >= 0])
        for row in batch.targets["labels"].tolist()
    ]
    texts = [targets[0], targets[1][::-1], "", targets[3][:4], *targets[4:]]
    predictions = [{"text": text} for text in texts]
    chrf, exact = task.metrics[2:]
    parts = [chrf.update(None, task.batch("test", [i]), predictions[i : i + 1]) for i in range(6)]
    value = chrf.compute(chrf.merge(parts))
    assert value == pytest.approx(sacrebleu.corpus_chrf(texts, [targets]).score)
    assert exact.compute(exact.update(None, batch, predictions)) == 0.5


def test_files_with_aligned_lines(tmp_path):
    for name, count in (("train", 30), ("val", 4), ("test_2016", 5)):
        for language in ("de", "en"):
            lines = "".join(f"{name} {language} {i}\n" for i in range(count))
            (tmp_path / f"{name}.{language}").write_text(lines)
    task = make(tmp_path, tokenizer="byte")
    assert [task.size(split) for split in SPLITS] == [30, 4, 5]
    shown = task.render(task.example("valid", 2)).to_text()
    assert "val de 2" in shown and "val en 2" in shown
    (tmp_path / "val.en").write_text("only one\n")
    with pytest.raises(ValueError, match=r"val.de has more lines than \S+val.en, which has 1"):
        make(tmp_path)
    (tmp_path / "val.en").unlink()
    with pytest.raises(ValueError, match=r"has val.de but no val.en"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source": "dee"}, "no column 'dee': did you mean 'de'"),
        ({"target": "de"}, "source and target are both 'de'"),
        ({"length": 1}, "length must be"),
        ({"beams": 0}, "beams must be"),
        ({"vocab_size": 300}, "vocab_size applies to tokenizer='bpe'"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(write_rows(tmp_path / "x.jsonl"), **arguments)


def test_real_pairs():
    task = make(real("multi30k") / "multi30k", tokenizer="byte", length=16)
    assert [task.size(split) for split in SPLITS] == [29_000, 1014, 3532]


def test_a_carriage_return_inside_a_line_ends_no_line(tmp_path):
    lines = {"de": [f"ein {i}" for i in range(40)], "en": [f"one {i}" for i in range(40)]}
    lines["de"][3] = "ein\r3"
    lines["en"][30] = "one\r30"
    for name, each in lines.items():
        (tmp_path / f"train.{name}").write_bytes("".join(f"{line}\n" for line in each).encode())
    task = create_task("seq2seq", data=tmp_path, source="de", target="en", tokenizer="byte")
    pairs = [pair for split in SPLITS for _, pair in task.source.walk(split)]
    assert len(pairs) == 40
    assert all(pair.source[4:] == pair.target[4:] for pair in pairs)


def test_names_of_languages_may_have_capitals(tmp_path):
    for name in ("de_DE", "en_US"):
        (tmp_path / f"train.{name}").write_text("".join(f"{name} {i}\n" for i in range(40)))
    task = create_task("seq2seq", data=tmp_path, source="de_DE", target="en_US", tokenizer="byte")
    assert sum(map(task.size, SPLITS)) == 40
