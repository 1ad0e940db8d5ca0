"""Speaker tagging, and the speeches that come with the package."""

import itertools
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.tasks import create_task
from regard.tasks.base import SPLITS
from regard.tasks.speakers import HELD_OUT, NAIVE_BAYES, load_corpus
from regard.tasks.speeches import SPEECHES, load_speeches


def test_the_speeches_are_small_and_their_licence_is_stated():
    speeches = load_speeches()
    speakers = {speech.speaker for speech in speeches}
    assert len(speeches) == 48 and len(speakers) == 6
    for speaker in speakers:
        own = [speech for speech in speeches if speech.speaker == speaker]
        assert len(own) == 8 and 295_000 < sum(len(speech.text) for speech in own) <= 300_000
    assert SPEECHES.stat().st_size < 500_000
    readme = (SPEECHES.parent / "README.md").read_text(encoding="utf-8")
    assert "Public domain" in readme and "Source" in readme


def test_the_wheel_contains_the_speeches(tmp_path):
    """The build backend decides which files of the package are included."""
    pytest.importorskip("hatchling", reason="the package hatchling is not installed")
    from hatchling.builders.wheel import WheelBuilder

    root = Path(regard.__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        pytest.skip("regard is not installed from its repository")
    path = next(WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(path) as wheel:
        folder = "regard/tasks/speeches/"
        assert wheel.read(folder + "speeches.jsonl.xz") == SPEECHES.read_bytes()
        assert folder + "README.md" in wheel.namelist()


def test_every_word_has_the_speaker_who_said_it():
    task, corpus = create_task("speakers", length=300, shortest=20, longest=40), load_corpus()
    for split in SPLITS:
        example = task.example(split, 7)
        words, labels = example.inputs["x"].numpy(), example.targets["labels"].numpy()
        assert words.shape == labels.shape == (300,)
        starts = [0, *np.flatnonzero(np.diff(labels)) + 1, 300]
        sizes = np.diff(starts)
        assert (sizes[:-1] >= 20).all() and (sizes <= 40).all()
        for start, end in itertools.pairwise(starts):
            speech = corpus.tokens[split][labels[start]]
            windows = np.lib.stride_tricks.sliding_window_view(speech, end - start)
            assert (windows == words[start:end]).all(1).any()


def test_examples_are_always_the_same_and_differ_by_seed():
    first, again = (create_task("speakers", length=64).example("train", 3) for _ in range(2))
    other = create_task("speakers", length=64, seed=1).example("train", 3)
    assert torch.equal(first.inputs["x"], again.inputs["x"])
    assert not torch.equal(first.inputs["x"], other.inputs["x"])


def test_no_speech_is_in_two_splits():
    corpus = load_corpus()
    own = [speech for speech in load_speeches() if speech.speaker == "Barack Obama"]
    number = corpus.speakers.index("Barack Obama")
    for split, held_out in HELD_OUT.items():
        assert np.array_equal(
            corpus.tokens[split][number], corpus.tokenizer.encode(own[held_out].text)
        )
    rest = [speech.text for k, speech in enumerate(own) if k not in HELD_OUT.values()]
    assert len(rest) == 6
    expected = corpus.tokenizer.encode(" ".join(rest))
    assert np.array_equal(corpus.tokens["train"][number], expected)


def test_naive_bayes_is_well_above_chance():
    task = create_task("speakers")
    indices = task.sample("test", 24).tolist()
    scores = {
        name: task.metric.compute(baseline(indices)) for name, baseline in task.baselines().items()
    }
    assert scores["constant"] < 0.3 and 0.65 < scores[NAIVE_BAYES] < 0.85


def test_render_marks_the_passages():
    task = create_task("speakers", length=100, shortest=20, longest=30)
    example = task.example("test", 0)
    labels = example.targets["labels"].tolist()
    shown = task.render(example)
    changes = sum(a != b for a, b in itertools.pairwise(labels))
    assert len(shown.spans) == 1 + changes
    assert shown.spans[0][2] == task.corpus.speakers[labels[0]]
    assert shown.spans[-1][1] == len(shown.text)
    text = task.render(example, {"labels": [0] * 100}).to_text()
    assert "predicted:" in text and text.endswith("(Andrew Jackson)")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 0}, "length must be"),
        ({"shortest": 50, "longest": 40}, "longest must be"),
        ({"longest": 10**6}, "longest=1000000 is more than the"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        create_task("speakers", **arguments)


def test_the_file_is_data_for_other_tasks():
    task = create_task("classify", data=SPEECHES, label="speaker", length=64)
    assert task.classes == 6 and task.processor.tokenizer.name == "word"
