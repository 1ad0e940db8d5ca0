"""The defaults of text classification: words or bytes, and the length, from the training split."""

import json
import random

import numpy as np
import pytest

from regard.tasks import TextProcessor, create_task
from regard.tasks.tokenizers import (
    MIN_COUNT,
    WordTokenizer,
    choose_tokenizer,
    split_words,
    tokenizer_from_dict,
    train_tokenizer,
)

SENTENCES = [
    f"The {animal} {verb} the {thing}, and it's {end}!"
    for animal in ("cat", "dog", "bird")
    for verb in ("saw", "liked", "ate")
    for thing in ("fish", "tree", "house")
    for end in ("good", "bad")
]


def write_rows(path, texts):
    rows = [{"text": text, "label": "ab"[number % 2]} for number, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_words_are_split_at_spaces_and_punctuation():
    assert split_words("Don't STOP, é-1!") == ["don't", "stop", ",", "é", "-", "1", "!"]


def test_word_tokenizer_decodes_what_it_knows():
    tokenizer = WordTokenizer.train([*SENTENCES, "unique"])
    assert "unique" not in tokenizer.words and "it's" in tokenizer.words
    tokens = tokenizer.encode("The cat liked THE zebra, and it's bad!")
    assert tokenizer.decode(tokens.tolist()) == "the cat liked the \ufffd, and it's bad!"
    assert tokens.max() < tokenizer.vocab_size and tokens.min() > 1
    assert tokenizer.decode([0, 1]) == "" and len(tokenizer.encode(" ")) == 0


def test_unknown_words_have_several_tokens_and_always_the_same():
    tokenizer = WordTokenizer.train(SENTENCES)
    unknown = [f"zebra{number}" for number in range(100)]
    tokens = [int(tokenizer.encode(word)[0]) for word in unknown]
    assert len(set(tokens)) > 50
    saved = json.loads(json.dumps(tokenizer.to_dict()))
    loaded = tokenizer_from_dict(saved)
    assert [int(loaded.encode(word)[0]) for word in unknown] == tokens
    assert loaded.vocab_size == tokenizer.vocab_size


def test_the_most_frequent_words_are_kept():
    texts = ["b " * 5, "a " * 5, "c " * 9, "d " * MIN_COUNT, "e"]
    tokenizer = WordTokenizer.train(texts, vocab_size=2 + 256 + 3)
    assert tokenizer.words == ("c", "a", "b")
    assert WordTokenizer.train(texts).words == ("c", "a", "b", "d")
    units = tokenizer.token_units()
    assert len(units) == tokenizer.vocab_size and units[:5].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (SENTENCES, "word"),
        (["ACGT" * 50] * 20, "byte"),  # DNA: one long word
        (["".join(random.Random(i).choices("ACGT", k=60)) for i in range(50)], "byte"),
        (["中文的句子之间没有空格所以不能按照空格来分词" * 2] * 20, "byte"),
        ([f"{i:032x} {i * i:032x}" for i in range(99)], "byte"),  # every word occurs once
        ([f"user{i} logged in from host{i}" for i in range(99)], "word"),
        (["", " "], "byte"),
        ([], "byte"),
    ],
)
def test_words_for_texts_whose_words_occur_again(texts, expected):
    assert choose_tokenizer(texts) == expected
    assert train_tokenizer("auto", lambda: iter(texts), choices=("auto",)).name == expected


def test_the_length_is_that_of_most_training_texts(tmp_path):
    texts = ["one two three"] * 400 + ["four five " * 10] * 90 + ["six seven " * 300] * 10
    random.Random(0).shuffle(texts)
    task = create_task("classify", data=write_rows(tmp_path / "x.jsonl", texts))
    assert task.processor.tokenizer.name == "word" and task.length == 32  # 20 tokens, rounded up
    assert task.notes()[0] == ("10 of 500 texts have more than 32 tokens (word) and are truncated.")
    long = create_task("classify", data=write_rows(tmp_path / "y.jsonl", ["go on " * 2000] * 60))
    assert long.length == 1024
    given = create_task("classify", data=tmp_path / "x.jsonl", length=7)
    assert given.length == 7 and given.notes()[0].startswith("100 of 500 texts")


def test_a_length_that_fits_all_texts_is_no_note(tmp_path):
    data = write_rows(tmp_path / "x.jsonl", SENTENCES)
    task = create_task("classify", data=data)
    assert not any("truncated" in note for note in task.notes())


def test_the_processor_keeps_words_and_length(tmp_path):
    data = write_rows(tmp_path / "x.jsonl", SENTENCES)
    task = create_task("classify", data=data)
    saved = TextProcessor.from_dict(json.loads(json.dumps(task.processor.to_dict())))
    assert saved.length == task.length and saved.labels == task.processor.labels
    for text in ("the dog ate the house", "never seen before"):
        assert np.array_equal(saved.encode_text(text), task.processor.encode_text(text))


def test_a_file_without_words_is_read_as_bytes(tmp_path):
    genes = ["".join(random.Random(i).choices("acgt", k=57)) for i in range(60)]
    task = create_task("classify", data=write_rows(tmp_path / "x.jsonl", genes))
    assert task.processor.tokenizer.name == "byte" and task.length == 64


def test_language_models_refuse_words():
    with pytest.raises(ValueError, match="No tokenizer 'word': choose from"):
        create_task("lm", tokenizer="word")
