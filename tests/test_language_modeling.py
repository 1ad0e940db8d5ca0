"""Language modelling: windows, splits, bits, and a language whose entropy is known."""

import collections
import itertools
import lzma
import math
import re

import numpy as np
import pytest
import torch

from real import real
from regard.tasks import corpus as corpora, create_task
from regard.tasks.base import IGNORE_INDEX
from regard.tasks.baselines import constant
from regard.tasks.corpus import iter_texts, utf8_boundary
from regard.tasks.grammar import (
    NOUNS,
    VERBS,
    entropy_per_character,
    expected_length,
    generate_sentence,
    generate_text,
    inflect_noun,
    inflect_verb,
)
from regard.tasks.language_modeling import ENDLESS
from token_examples import tokens_and_labels, total

PLAIN = "".join(f"line {i} of a text, ünd mehr\n" for i in range(400))


def constant_score(task):
    return task.metric.compute(constant(task, task.sample("test", 512).tolist()))


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "text.txt"
    found.write_text(PLAIN, encoding="utf-8")
    return found


def said(made, split):
    """The text of all windows of a split, and of the first token before them."""
    found = [made.example(split, index) for index in range(made.size(split))]
    return made.processor.tokenizer.decode(
        [int(found[0].inputs["x"][0]), *torch.cat([e.targets["labels"] for e in found]).tolist()]
    )


@pytest.mark.parametrize("tokenizer", ["byte", "char", "bpe"])
def test_each_token_is_foretold_once(path, tokenizer):
    """Fails if windows overlap, leave a gap, or splits are not cut by position between
    characters."""
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    made = create_task("lm", data=str(path), tokenizer=tokenizer, length=50)
    valid, test = said(made, "valid"), said(made, "test")
    assert PLAIN.endswith(valid + test) and "\ufffd" not in valid + test
    share = 0.05 * len(PLAIN.encode())
    assert abs(len(test.encode()) - share) < 4 and abs(len(valid.encode()) - share) < 4
    for index in range(made.size("valid")):
        tokens, target = tokens_and_labels(made.example("valid", index))
        assert len(tokens) == len(target) <= 50 and torch.equal(tokens[1:], target[:-1])


def test_training_windows_stand_anywhere_in_the_training_split(path):
    """Fails if a window leaves the split, an offset is never drawn, or a number gives another
    window the next time."""
    made = create_task("lm", data=str(path), tokenizer="byte", length=64)
    rest = len(PLAIN.encode()) - sum(len(made.streams[s]) for s in ("valid", "test"))
    train = PLAIN.encode()[:rest]
    seen = [tokens_and_labels(made.example("train", i)) for i in range(300)]
    for tokens, target in seen:
        whole = bytes((torch.cat((tokens, target[-1:])) - 1).tolist())
        assert whole in train and len(whole) == 65
    assert (
        len({tuple(tokens.tolist()) for tokens, _ in seen}) > 200 and made.size("train") == ENDLESS
    )
    short = create_task("lm", data=str(path), tokenizer="byte", length=rest - 2)
    assert {
        int((short.example("train", i).inputs["x"] == seen[0][0][0]).sum()) > 0 for i in range(9)
    } == {True}
    with pytest.raises(
        ValueError, match=f"train split has {rest} tokens, but at least {rest + 1} are needed"
    ):
        create_task("lm", data=str(path), tokenizer="byte", length=rest)
    with pytest.raises(IndexError, match="there is no example"):
        made.example("valid", made.size("valid"))


def test_bits_are_counted_by_bytes_or_characters():
    """Fails if bits of byte pairs are for each token, so that levels could not be compared."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    for tokenizer, unit in (("byte", "byte"), ("char", "character"), ("bpe", "byte")):
        made = create_task("lm", tokenizer=tokenizer, length=40)
        target = made.example("valid", 0).targets["labels"][None]
        target[0, :3] = IGNORE_INDEX
        logits = torch.randn(1, 40, made.vocab_size, generator=torch.Generator().manual_seed(0))
        logp = logits[0].double().log_softmax(-1)
        there = [(i, int(t)) for i, t in enumerate(target[0].tolist()) if t != IGNORE_INDEX]
        bits, count = total(made.metric, logits, target)
        assert bits == pytest.approx(
            -sum(float(logp[i, t]) for i, t in there) / math.log(2), rel=1e-5
        )
        assert (
            count == len(made.processor.tokenizer.decode([t for _, t in there]).encode())
            and made.processor.tokenizer.unit == unit
        )


def test_the_baseline_is_in_the_same_units(path):
    """Fails if always saying the frequencies costs something else than their cross-entropy by
    bytes."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    for tokenizer in ("byte", "bpe"):
        made = create_task("lm", data=str(path), tokenizer=tokenizer, length=32)
        seen = collections.Counter(
            t
            for i in made.sample("train", 512).tolist()
            for t in made.example("train", i).targets["labels"].tolist()
        )
        whole = sum(seen.values()) + made.vocab_size
        asked = [
            t
            for i in sorted(made.sample("test", 512).tolist())
            for t in made.example("test", i).targets["labels"].tolist()
        ]
        bits = -sum(math.log2((seen[t] + 1) / whole) for t in asked)
        assert constant_score(made) == pytest.approx(
            bits / len(made.processor.tokenizer.decode(asked).encode()), rel=1e-5
        )


def test_folders_of_splits_and_of_texts(tmp_path):
    """Fails if files named after splits are mixed, or others not read one after the other; a
    missing split is cut off."""
    folder = tmp_path / "wiki"
    folder.mkdir()
    for split, letter in (("train", "a"), ("valid", "b"), ("test", "c")):
        (folder / f"{split}.txt.xz").write_bytes(lzma.compress(letter.encode() * 100))
    (folder / "SOURCE.txt").write_text("not a part of it")
    made = create_task("lm", data=str(folder), tokenizer="byte", length=8)
    assert [bytes(made.streams[s]) for s in ("train", "valid", "test")] == [
        b"a" * 100,
        b"b" * 100,
        b"c" * 100,
    ]
    (folder / "valid.txt.xz").unlink()
    made = create_task("lm", data=str(folder), tokenizer="byte", length=8)
    assert {s: len(made.streams[s]) for s in made.streams} == {"train": 95, "valid": 5, "test": 100}
    several = tmp_path / "texts"
    several.mkdir()
    for name in "zab":
        (several / f"{name}.md").write_text(name * 40)
    made = create_task("lm", data=str(several), tokenizer="byte", length=8)
    assert (
        b"".join(bytes(made.streams[s]) for s in ("train", "valid", "test"))
        == b"a" * 40 + b"b" * 40 + b"z" * 40
    )


def test_a_column_of_rows(tmp_path):
    """Fails if texts in rows are not read as a text, or the column is not checked."""
    (tmp_path / "x.csv").write_text("body,n\n" + "".join(f'"words, {i}",1\n' for i in range(50)))
    made = create_task("lm", data=str(tmp_path / "x.csv"), text="body", length=8)
    assert "".join(
        made.processor.tokenizer.decode(made.streams[s].tolist())
        for s in ("train", "valid", "test")
    ) == "".join(f"words, {i}\n" for i in range(50))
    with pytest.raises(ValueError, match="no column 'bdy': did you mean 'body'"):
        create_task("lm", data=str(tmp_path / "x.csv"), text="bdy")


def test_texts_are_cut_between_lines_and_lose_nothing(monkeypatch):
    """Fails if chunks lose, double or split a character, or a line without end is held whole."""
    monkeypatch.setattr(corpora, "CHUNK", 16)
    for content in (PLAIN[:300], "ü" * 100, "", "\n\n\n", "a" * 50 + "\n" + "b" * 5):
        found = list(iter_texts(np.frombuffer(content.encode(), np.uint8), "x"))
        assert (
            "".join(found) == content
            and all(map(len, found))
            and max(map(len, found), default=0) < 64
        )


def test_boundaries_fall_between_characters():
    """Fails if a character is cut in two."""
    whole = np.frombuffer("aü日𝄞b".encode(), np.uint8)
    for at in range(1, len(whole)):
        whole[: utf8_boundary(whole, at)].tobytes().decode()
        whole[utf8_boundary(whole, at) :].tobytes().decode()


@pytest.mark.parametrize(
    ("content", "given", "words"),
    [
        (b"", {}, "is empty"),
        (b"abc", {}, "train split has 1 tokens, but at least 257 are needed"),
        (b"ab\xffcd\n" * 200, {}, r"byte 0xff at offset 2, line 1"),
        (b"ab\n" * 500, {"tokenizer": "word"}, "No tokenizer 'word'"),
        (b"ab\n" * 500, {"vocab_size": 300}, "vocab_size applies to tokenizer='bpe'"),
        (
            b"ab\n" * 500,
            {"tokenizer": "bpe", "vocab_size": 200},
            "vocab_size must be an integer >= 258",
        ),
        (b"ab\n" * 500, {"encoding": "utf8x"}, "No encoding 'utf8x'"),
    ],
)
def test_bad_texts_are_refused(tmp_path, content, given, words):
    """Fails if a text that cannot be learned from is accepted, or the reason not told."""
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        create_task("lm", data=str(path), **given)


def test_bytes_that_are_no_text_are_fine_at_the_level_of_bytes(tmp_path):
    """Fails if bytes are checked where nobody asked for text."""
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(256)) * 20)
    made = create_task("lm", data=str(path), tokenizer="byte", length=16)
    assert (
        made.vocab_size == 257
        and int(torch.stack([made.example("train", i).inputs["x"] for i in range(200)]).min()) == 1
    )


def test_a_text_of_eight_gigabytes_takes_no_time(tmp_path):
    """Fails if a text is read into memory to be trained on: this one is sparse, and has a letter at
    its end."""
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(8 << 30)
        file.seek((8 << 30) - 1)
        file.write(b"z")
    made = create_task("lm", data=str(path), tokenizer="byte", length=64)
    assert [len(made.streams[s]) >> 20 for s in ("train", "valid", "test")] == [7372, 409, 409]
    assert (
        made.example("train", 9).inputs["x"].shape == (64,)
        and int(made.example("test", made.size("test") - 1).targets["labels"][-1]) == 123
    )


def test_a_missing_package_is_named(monkeypatch):
    """Fails if byte pairs without `tokenizers` end in anything else than how to get it."""
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[text\]'"):
        create_task("lm", tokenizer="bpe")


# -------------------------------------------------------------------------- the language of our own
WORDS = {inflect_noun(w, p): p for w in NOUNS for p in (0, 1)}
ACTS = {inflect_verb(w, p): p for w in VERBS for p in (0, 1)}


def probability(line):
    """Of a sentence, by taking it apart; it must be right."""
    found = re.fullmatch(r"the (\w+)((?: that the \w+ \w+)*) (\w+) the (\w+)\.", line)
    subject, clauses, last, thing = found.groups()
    inner = re.findall(r"that the (\w+) (\w+)", clauses)
    assert all(WORDS[n] == ACTS[v] for n, v in [*inner, (subject, last)]) and thing in WORDS
    p_noun, p_verb = 1 / (2 * len(NOUNS)), 1 / len(VERBS)
    return p_noun**2 * p_verb * (0.5 * p_noun * p_verb) ** len(inner) * 0.5


def test_the_entropy_of_the_language():
    """Fails if the best possible number of bits is not what the sentences themselves cost."""
    lines = generate_text(np.random.default_rng(0), 20_000).splitlines()
    bits = -sum(math.log2(probability(line)) for line in lines)
    length = sum(len(line) + 1 for line in lines)
    assert length / len(lines) == pytest.approx(expected_length(), rel=0.01)
    assert bits / length == pytest.approx(entropy_per_character(), rel=0.01)
    assert (
        len(WORDS) == 2 * len(NOUNS) and len(ACTS) == 2 * len(VERBS) and not set(WORDS) & set(ACTS)
    )


def test_every_sentence_has_one_derivation():
    """Fails if two derivations give one sentence: then its entropy would be less."""
    short = itertools.product(WORDS, VERBS, WORDS)
    made = {f"the {s} {inflect_verb(v, WORDS[s])} the {o}." for s, v, o in short}
    assert len(made) == (2 * len(NOUNS)) ** 2 * len(VERBS)
    assert sum(map(probability, made)) == pytest.approx(0.5)  # half of all sentences have no clause


def test_sentences_that_do_not_agree():
    """Fails if a wrong sentence is right."""
    for seed in range(50):
        with pytest.raises(AssertionError):
            probability(generate_sentence(np.random.default_rng(seed), agree=False))


def test_the_built_in_language_knows_its_best():
    """Fails if the constant answer beats what cannot be beaten, or splits are the same."""
    made = create_task("lm")
    assert (
        made.best == pytest.approx(entropy_per_character()) and constant_score(made) > 3 > made.best
    )
    assert bytes(made.streams["valid"][:200]) != bytes(made.streams["test"][:200])
    assert create_task("lm").streams["test"].tolist() == made.streams["test"].tolist()


def test_real_text_of_a_known_size():
    """Fails if tinyshakespeare does not have its 65 characters, or wikitext-2 its splits."""
    real_data = real("tinyshakespeare", "wikitext-2")
    made = create_task("lm", data=str(real_data / "tinyshakespeare" / "input.txt.xz"))
    assert made.vocab_size == 67 and sum(map(len, made.streams.values())) == 1_115_394
    wiki = create_task("lm", data=str(real_data / "wikitext-2"), tokenizer="byte")
    words = [
        len(bytes(wiki.streams[s]).split()) + bytes(wiki.streams[s]).count(b"\n")
        for s in ("valid", "test")
    ]
    assert words == [217_646, 245_569]
