"""Tasks: examples that are what their rules say, and always the same."""

import numpy as np
import pytest
import torch

from regard.tasks import IGNORE_INDEX, TASKS, create_task
from regard.tasks.base import Example, collate, token_example
from regard.tasks.metrics import Bits
from regard.tasks.probes import BLANK, FIRST, QUERY
from token_examples import token_batch, tokens_and_labels, total

NEED_DATA = {
    *("regress", "tag", "ner", "image_folder", "sound_folder"),
    *("seq2seq", "translate", "summarise"),
    *("masked_leaves", "next_event", "forecast"),
}
WITHOUT_DATA = [name for name in TASKS if name not in NEED_DATA]
OF_PIXELS = {"draw", "segmentation", "detection", "video"}  # neither tokens nor one label
OF_TOKENS = [name for name in WITHOUT_DATA if name not in OF_PIXELS]


@pytest.mark.parametrize("name", WITHOUT_DATA)
def test_examples_do_not_depend_on_who_asks(name):
    """Fails if an example changes with the order, the batch or the instance, or splits share
    examples."""
    one, two = create_task(name), create_task(name)
    for split in ("train", "valid", "test"):
        batch = one.batch(split, [5, 2, 5])
        again = two.example(split, 5)
        assert torch.equal(
            batch.inputs["x"][0][..., : again.inputs["x"].shape[-1]], again.inputs["x"]
        )
        assert torch.equal(batch.inputs["x"][0], batch.inputs["x"][2])
    assert any(
        not torch.equal(one.example("train", i).inputs["x"], one.example("valid", i).inputs["x"])
        for i in range(4)
    )


@pytest.mark.parametrize("name", OF_TOKENS)
def test_examples_are_within_what_the_task_says(name):
    """Fails if tokens, targets or lengths leave their range."""
    made = create_task(name)
    for index in range(20):
        tokens, target = tokens_and_labels(made.example("train", index))
        there = target[target != IGNORE_INDEX]
        assert (
            (tokens[..., 0] > 0).all()
            and tokens.max() < made.vocab_size
            and tokens.shape[-1] <= made.length
        )
        assert tokens.min() > 0 or (
            made.output == "pair" and tokens.min() == 0
        )  # the shorter of two is filled up
        assert len(there.view(-1)) and there.min() >= 0 and there.max() < made.classes
        assert made.render(Example({"x": tokens}, {"labels": target})).to_text()


def test_copy():
    """Fails if what is asked is not what stood there, in order, behind the gap."""
    tokens, target = tokens_and_labels(create_task("copy", length=20, gap=5).example("train", 3))
    assert (
        tokens[12] == QUERY
        and (tokens[7:12] == BLANK).all()
        and (target[:12] == IGNORE_INDEX).all()
    )
    assert torch.equal(target[12:], tokens[:7])
    tokens, target = tokens_and_labels(
        create_task("copy", length=20, gap=5, lead=4).example("train", 3)
    )
    assert (
        (tokens[:4] == BLANK).all()
        and torch.equal(target[14:], tokens[4:9])
        and tokens[14] == QUERY
        and len(tokens) == 19
    )


def test_selective_copy():
    """Fails if the symbols after the sign are not those before it, in order."""
    tokens, target = tokens_and_labels(
        create_task("selective_copy", length=30, count=6).example("train", 1)
    )
    assert (
        torch.equal(target[target != IGNORE_INDEX], tokens[tokens >= FIRST]) and tokens[24] == QUERY
    )


def test_recall():
    """Fails if a key is asked that was not given, or with another value; or if the gaps are not
    mostly short."""
    made, gaps = create_task("recall", length=256, pairs=8), []
    for index in range(50):
        tokens, target = tokens_and_labels(made.example("train", index))
        pairs = dict(zip(tokens[:16:2].tolist(), tokens[1:16:2].tolist(), strict=True))
        asked = (target != IGNORE_INDEX).nonzero()[:, 0]
        assert len(asked) == len(pairs) == 8 and asked.min() >= 16
        for at in asked.tolist():
            assert pairs[int(tokens[at])] == FIRST + made.keys + int(target[at])
        gaps += (asked - 16).tolist()
    assert np.median(gaps) < 60 < max(gaps)


def test_parity_and_dyck():
    """Fails if a running parity, or the bracket that is due, is wrong."""
    tokens, target = tokens_and_labels(create_task("parity", length=33).example("train", 0))
    assert [
        sum(t - FIRST for t in tokens[: i + 1].tolist()) % 2 for i in range(33)
    ] == target.tolist()
    made, opened = create_task("dyck", length=200, kinds=3, depth=4), []
    tokens, target = tokens_and_labels(made.example("train", 0))
    for token, due in zip((tokens - FIRST).tolist(), target.tolist(), strict=True):
        if token < 3:
            opened.append(token)
        else:
            assert opened.pop() == token - 3
        assert due == (opened[-1] if opened else 3) and len(opened) <= 4


def test_batches_of_different_lengths_are_filled_up():
    """Fails if padding is not masked, or has a target."""
    examples = [
        token_example([3, 4], np.array([1, 2])),
        token_example([5], np.array([0])),
    ]
    batch = collate(examples)
    assert batch.inputs["x"].tolist() == [[3, 4], [5, 0]] and batch.inputs["mask"].tolist() == [
        [True, True],
        [True, False],
    ]
    assert batch.targets["labels"].tolist() == [[1, 2], [0, IGNORE_INDEX]]
    whole = collate([token_example(e.inputs["x"], 7) for e in examples])
    assert whole.targets["labels"].tolist() == [7, 7]


def test_loss_and_score_count_what_is_there():
    """Fails if ignored targets count, or bits are nats."""
    made = create_task("parity")
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [9.0, 0.0]]])
    target = torch.tensor([[0, 0, IGNORE_INDEX]])
    assert made.metric.name == "accuracy" and total(made.metric, logits, target) == (1.0, 2)
    expected = -torch.log_softmax(logits[0, :2], -1)[:, 0]
    torch.testing.assert_close(made.loss(logits, token_batch(target, target)), expected.mean())
    bits, count = total(Bits(), logits, target)
    assert count == 2 and bits == pytest.approx(float(expected.sum()) / np.log(2), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("recal", {}, "did you mean 'recall'"),
        ("copy", {"lenght": 3}, "did you mean 'length'"),
        ("copy", {"length": 2}, "length must be"),
        ("copy", {"length": 9, "gap": 9}, "no room"),
        ("copy", {"length": 9, "gap": 3, "lead": 4}, "lead=4 leave no room"),
        ("copy", {"causal": "no"}, "causal must be"),
        ("recall", {"length": 8, "pairs": 3}, "at least 12"),
        ("recall", {"pairs": 9, "keys": 4}, "as many keys, but keys=4"),
        ("selective_copy", {"length": 4, "count": 3}, "at least 6"),
        ("dyck", {"depth": 0}, "depth must be"),
        ("parity", {"seed": -1}, "seed must be"),
    ],
)
def test_wrong_arguments_are_named(name, arguments, words):
    """Fails if a task is made of nonsense."""
    with pytest.raises((ValueError, TypeError), match=words):
        create_task(name, **arguments)
