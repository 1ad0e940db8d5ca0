"""Models that read two sequences."""

import pytest
import torch

from regard.models import DualEncoder, MatchingHeadConfig, ModelConfig, build, load, save


def build_model(**changed):
    torch.manual_seed(0)
    plan = {
        "kind": "dual_encoder",
        "input": {"kind": "tokens", "vocab_size": 20},
        "head": {"kind": "matching", "num_classes": 3, "hidden": 5},
    }
    config = ModelConfig.model_validate(
        plan | {"dim": 8, "heads": 2, "layers": 2, "length": 12} | changed
    )
    return build(config).double().eval()


def pairs(count=4, length=9):
    """Tokens (b, 2, n) and a mask with sequences of many lengths."""
    torch.manual_seed(1)
    lengths = torch.tensor([[9, 4], [1, 9], [5, 5], [9, 9]])[:count]
    return torch.randint(1, 20, (count, 2, length)), torch.arange(length) < lengths[..., None]


def oracle(model, x, mask):
    """Each sequence alone and without padding, its mean, and the head, output by output."""
    rows = []
    for pair, there in zip(x, mask, strict=True):
        u, v = (
            model.backbone(one[real][None])[0][0].mean(0)
            for one, real in zip(pair, there, strict=True)
        )
        both = [
            *u,
            *v,
            *(a * b for a, b in zip(u, v, strict=True)),
            *(a - b for a, b in zip(u, v, strict=True)),
        ]
        first, last = model.head.hidden, model.head.out
        hidden = [
            sum(w * y for w, y in zip(line, both, strict=True)) + b
            for line, b in zip(first.weight, first.bias, strict=True)
        ]
        hidden = [value if value > 0 else 0 * value for value in hidden]
        rows.append(
            [
                sum(w * y for w, y in zip(line, hidden, strict=True)) + b
                for line, b in zip(last.weight, last.bias, strict=True)
            ]
        )
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("mixer", ["vanilla", "linear", "local"])
def test_sequences_are_independent(mixer):
    """Sequences are encoded independently; outputs and gradients equal the formula."""
    model, (x, mask) = build_model(mixer=mixer), pairs()
    assert isinstance(model, DualEncoder)
    found, expected = model(x, mask=mask), oracle(model, x, mask)
    torch.testing.assert_close(found, expected)
    parameters = list(model.parameters())
    mine, theirs = (
        torch.autograd.grad(y.square().sum(), parameters, allow_unused=True)
        for y in (found, expected)
    )
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b, atol=1e-9))


def test_padding_and_other_pairs_do_not_matter():
    """Padding and other pairs do not change the output."""
    model, (x, mask) = build_model(), pairs()
    other = torch.where(mask, x, torch.randint(1, 20, x.shape))
    torch.testing.assert_close(model(x, mask=mask), model(other, mask=mask))
    torch.testing.assert_close(model(x, mask=mask)[2:3], model(x[2:3], mask=mask[2:3]))
    torch.testing.assert_close(model(x), model(x, mask=torch.ones_like(mask)))


def test_save_and_load(tmp_path):
    """A loaded model has the same outputs."""
    model, (x, mask) = build_model(), pairs()
    save(model, tmp_path)
    again = load(tmp_path)
    assert (
        isinstance(again, DualEncoder)
        and again.config == model.config
        and torch.equal(again(x, mask=mask), model(x, mask=mask))
    )


def test_attention_maps():
    """There is a map for each sequence."""
    model, (x, mask) = build_model(), pairs()
    maps = model.attention_maps(x, mask)
    assert [m.shape for m in maps] == [(4, 2, 2, 9, 9)] * 2
    assert (maps[0].sum(2).sum(2)[~mask] == 0).all()  # no attention to padding
    torch.testing.assert_close(
        maps[1][1, 1], model.attention_maps(x[1:2].flip(1), mask[1:2].flip(1))[1][0, 0]
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"head": None}, "kind 'dual_encoder' needs head 'matching', not None"),
        (
            {"head": {"kind": "sequence_classification", "num_classes": 2}},
            "needs kind 'encoder' or 'decoder', not 'dual_encoder': use head 'matching'",
        ),
        ({"kind": "encoder"}, "head 'matching' needs kind 'dual_encoder', not 'encoder'"),
        (
            {"input": {"kind": "vectors", "width": 3}},
            "kind 'dual_encoder' reads 'tokens', not 'vectors'",
        ),
        ({"head": {"kind": "matching", "num_classes": 2, "pooling": "man"}}, "did you mean 'mean'"),
        ({"head": {"kind": "matching", "num_classes": 0}}, "greater than or equal"),
    ],
)
def test_invalid_configurations(changed, words):
    """Invalid configurations raise an error."""
    with pytest.raises(ValueError, match=words):
        build_model(**changed)


def test_invalid_shapes():
    """Other numbers of sequences, and masks of another shape, raise an error."""
    model, (x, mask) = build_model(), pairs()
    for wrong in (x[:, 0], x.repeat(1, 2, 1)[:, :3]):
        with pytest.raises(ValueError, match=r"reads pairs \(b, 2, n\)"):
            model(wrong)
    with pytest.raises(ValueError, match="mask must have the shape of the pairs"):
        model(x, mask=mask[..., :4])
    assert MatchingHeadConfig(num_classes=2).hidden is None
