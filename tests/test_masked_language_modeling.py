"""Masked language modeling: what is masked, metrics, baselines, and filling in."""

import math

import pytest
import torch

from regard.models import ModelConfig, SequenceClassificationHeadConfig, build
from regard.models.losses import IGNORE_INDEX
from regard.tasks import create_task


@pytest.fixture(scope="module")
def task():
    return create_task("mlm", length=64)


def test_fifteen_per_cent_are_selected_as_in_bert_and_always_the_same(task):
    batch, plain = task.batch("train", range(200)), create_task("lm", length=64)
    x, labels = batch.inputs["x"], batch.targets["labels"]
    tokens = torch.stack([plain.example("train", i).inputs["x"] for i in range(200)])
    selected = labels != IGNORE_INDEX
    assert torch.equal(x[~selected], tokens[~selected])
    assert torch.equal(labels[selected], tokens[selected])
    shares = [
        selected.float().mean(),
        (x[selected] == task.processor.mask_token).float().mean(),
        (x[selected] == tokens[selected]).float().mean(),
    ]
    expected = [0.15, 0.8, 0.1]
    for share, wanted in zip(shares, expected, strict=True):
        deviation = math.sqrt(wanted * (1 - wanted) / int(selected.sum()))
        assert abs(float(share) - wanted) < 5 * deviation + 0.01
    again = task.batch("train", range(200))
    assert torch.equal(again.inputs["x"], x) and torch.equal(again.targets["labels"], labels)
    assert len({tuple(row) for row in selected.int().tolist()}) > 190  # masks differ


def test_training_computes_the_head_at_the_selected_tokens_only(task):
    """Fails if the loss or a gradient differs from that of the whole output."""
    torch.manual_seed(0)
    config = ModelConfig(**dict(task.needs), dim=16, heads=2, layers=1)
    model, batch = build(config).double(), task.batch("train", range(4))
    found = {}
    for name, given in (("whole", batch), ("selected", task.training_batch(batch))):
        model.zero_grad()
        output = model(**given.inputs)
        loss = task.loss(output.double(), given)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        found[name] = (output.shape, loss.item(), gradients)
    assert found["whole"][0] == (4, 64, task.vocab_size)
    assert found["selected"][0] == (1, task.count_targets(batch), task.vocab_size)
    assert abs(found["whole"][1] - found["selected"][1]) < 1e-6
    for one, other in zip(found["whole"][2], found["selected"][2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    pooled = build(config.replace(head=SequenceClassificationHeadConfig(num_classes=2))).double()
    with pytest.raises(ValueError, match="output_mask selects tokens, but PredictionHead"):
        pooled(**task.training_batch(batch).inputs)


def test_every_example_has_a_target():
    task = create_task("mlm", length=3)
    for index in range(50):
        assert (task.example("valid", index).targets["labels"] != IGNORE_INDEX).any()


def test_neighbours_are_better_than_frequencies(task):
    scores = {n: task.metric.compute(b(range(40))) for n, b in task.baselines().items()}
    assert task.metric.name == "bits_per_masked_token"
    assert scores["neighbouring tokens"] < scores["constant"] - 0.5 > 2
    with pytest.raises(ValueError, match="also give data"):
        create_task("mlm", text="body")


def test_predictions_fill_in_masks(task):
    processor = task.processor
    x = processor.encode("the [MASK]og sees the [MASK]og")["x"]
    logits = torch.zeros(1, len(x), task.vocab_size)
    logits[0, :, processor.mask_token] = 9  # a mask is never predicted, nor padding
    logits[0, :, 0] = 9
    logits[0, 4, processor.tokenizer.encode("d")[0]] = 5
    logits[0, 17, processor.tokenizer.encode("f")[0]] = 5
    (prediction,) = processor.decode(logits, {"x": x[None]})
    assert prediction["text"] == "the dog sees the fog"
    assert next(iter(prediction["masks"][0])) == "d" and len(prediction["masks"]) == 2
    with pytest.raises(ValueError, match=r"has no \[MASK\]"):
        processor.encode("the dog")
    with pytest.raises(ValueError, match="comes after 64 tokens"):
        processor.encode("x" * 64 + "[MASK]")
    assert (
        processor.render(prediction)
        .to_text()
        .startswith(f"the dog sees the fog\n  mask 1: 'd' {prediction['masks'][0]['d']:.3f}, ")
    )
    shown = task.render(task.example("valid", 0), prediction).to_text()
    assert "[MASK]" in shown and "→ '" in shown and "predicted: text the dog sees the fog" in shown


def test_guesses_with_the_same_text_have_the_larger_probability():
    """Fails if a part of a character replaces a more probable one."""
    task = create_task("mlm", tokenizer="byte", length=16)
    x = task.processor.encode("a[MASK]")["x"]
    logits = torch.zeros(1, 2, task.vocab_size)
    logits[0, 1, [0xC4, 0xC5, 0x62]] = torch.tensor([5.0, 4.0, 3.0])  # 0xC3 and 0xC4, and "a"
    (prediction,) = task.processor.decode(logits, {"x": x[None]})
    best, second = list(prediction["masks"][0].items())[:2]
    assert best[0] == "\N{REPLACEMENT CHARACTER}" and second[0] == "a"
    assert best[1] > 3 * second[1]
