"""A task whose package is not installed says which one to install."""

import sys

import pytest

from regard.tasks import create_task
from test_file_folders import write_images, write_sounds
from test_regression import write_houses
from test_translation import write_rows


@pytest.fixture
def hide(monkeypatch):
    """Makes packages look as if they were not installed."""

    def hide(*packages):
        for name in list(sys.modules):
            if name.split(".")[0] in packages:
                monkeypatch.delitem(sys.modules, name)
        for name in packages:
            monkeypatch.setitem(sys.modules, name, None)

    return hide


def test_pillow(tmp_path, hide):
    folder = write_images(tmp_path / "a")
    hide("PIL")
    with pytest.raises(ImportError, match="requires the package Pillow: pip"):
        create_task("image_folder", data=folder)


def test_sacrebleu(tmp_path, hide):
    data = write_rows(tmp_path / "x.jsonl")
    arguments = {"data": data, "source": "de", "target": "en", "tokenizer": "byte"}
    hide("sacrebleu")
    create_task("seq2seq", **arguments)
    with pytest.raises(ImportError, match=r"chrF needs the package sacrebleu: pip install"):
        create_task("seq2seq", **arguments, generate=True)


def test_scikit_learn(tmp_path, hide):
    regress = create_task("regress", data=write_houses(tmp_path / "a.csv"), target="price")
    sounds = create_task("sound_folder", data=write_sounds(tmp_path / "b"), mels=16)
    hide("sklearn")
    with pytest.raises(ImportError, match="ridge regression needs the package scikit-learn"):
        regress.baselines()["ridge"](range(3))
    assert regress.baselines()["mean"](range(3)).shape == (3, 2)
    name = "linear on mean and deviation of the frames"
    with pytest.raises(ImportError, match="logistic regression needs the package scikit-learn"):
        sounds.baselines()[name](range(3))


def test_tokenizers(tmp_path, hide):
    hide("tokenizers")
    with pytest.raises(ImportError, match="tokenizer='bpe' requires the package tokenizers"):
        create_task("seq2seq", data=write_rows(tmp_path / "x.jsonl"), source="de", target="en")
