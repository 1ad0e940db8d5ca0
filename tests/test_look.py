"""`regard.look`: maps are what models compute, their numbers, interventions, and bad input."""

import json
import math

import pytest
import torch
from torch import nn

import regard
from hf_models import GROUPED, SEQ2SEQ, SMALL, T5, ids, randomize_weights
from regard.inspection.attribution import attributions, average_ranks, rank_correlation
from regard.inspection.controls import induction, shuffle_patches, shuffled_subject
from regard.inspection.influence import Influence
from regard.inspection.inspected import InspectedModel
from regard.inspection.interventions import HeadChange, changed_answer, head_importance
from regard.inspection.lens import logit_lens
from regard.inspection.maps import layer_map
from regard.inspection.metrics import MapRows, head_metrics, induction_scores, map_rows
from regard.inspection.operators import DenseHeads
from regard.inspection.recording import record_call
from regard.inspection.session import ViewSession
from regard.inspection.subject import find_subject
from regard.inspection.tiles import compute_tile, encode_tile
from regard.models import bert, build, gpt, transformer, vit
from regard.models.config import SequenceClassificationHeadConfig
from regard.registry import get_recipe, list_recipes
from regard.show.build import build_example


def look_into(module, inputs):
    """The model with its maps."""
    return InspectedModel(find_subject(module, inputs))


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return build(gpt(2, 32, 4, vocab_size=50, length=64)).eval()


# ------------------------------------------------------------------------------------------- maps
@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_has_a_map_and_says_what_it_is(name):
    """Fails if a recipe has no map, an exact map is not, or a pooled tile is not its mean."""
    torch.manual_seed(0)
    mixer = build_example(get_recipe(name), 12).eval()
    x = torch.randn(1, 12, mixer.dim)
    with torch.no_grad():
        layers, _ = record_call(mixer, lambda: mixer(x))
    found = layer_map(layers[0])
    assert found.kind == "exact" if mixer.can.maps else found.kind in ("implied", "influence")
    assert bool(found.reason) == (found.kind != "exact")
    weights = found.operator.dense()
    assert weights.shape[1:] == (12, 12) and weights.isfinite().all()
    if mixer.can.maps:
        assert found.error < 1e-5
        torch.testing.assert_close(weights, mixer.attention_map(x)[0].detach())
    if not isinstance(found.operator, Influence):
        tile = found.operator.pool_map(slice(2, 10), slice(0, 12), (2, 3))
        wanted = weights[:, 2:10].unflatten(1, (2, 4)).unflatten(3, (3, 4)).mean((2, 4))
        torch.testing.assert_close(tile, wanted)
        torch.testing.assert_close(found.operator.rows(slice(3, 7)), weights[:, 3:7])


@pytest.mark.parametrize("name", ["fnet", "mlp_mixer", "gmlp", "xcit", "axial_passes"])
def test_influence_is_the_norm_of_the_jacobian(name):
    """Fails if the map is not ‖∂y_i/∂x_j‖, or the estimate of many probes is far from it."""
    torch.manual_seed(0)
    mixer = build_example(get_recipe(name), 9).double().eval()
    x = torch.randn(1, 9, mixer.dim, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x)[0], x)[:, :, 0]
    wanted = jacobian.square().sum((1, 3)).sqrt()
    exact = Influence(mixer, x)
    torch.testing.assert_close(exact.dense()[0], wanted)
    pooled = exact.pool_map(slice(0, 8), slice(1, 9), (2, 4))[0]
    squares = wanted[:8, 1:].square().unflatten(0, (2, 4)).unflatten(2, (4, 2)).mean((1, 3))
    torch.testing.assert_close(pooled, squares.sqrt())
    estimate = Influence(mixer, x, probes=600)
    estimate.is_exact = lambda rows, shape: False
    close = (estimate.dense()[0] - wanted).abs() <= 0.2 * wanted + 1e-3 * wanted.max()
    assert close.all()


def test_any_module_has_an_influence_map():
    """Fails if a module without attention of ours cannot be looked at."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(5, 8)
    view = regard.look(model, x)
    maps = view.data()["models"][0]["maps"]
    assert [each["kind"] for each in maps] == ["influence", "influence"]
    first = view.models[0].maps[0].map.operator.dense()[0]
    jacobian = torch.autograd.functional.jacobian(lambda x: model.layers[0](x)[0], x[None])[:, :, 0]
    torch.testing.assert_close(first, jacobian.square().sum((1, 3)).sqrt())


def test_a_long_sequence_makes_no_whole_map():
    """Fails if a tensor of n x n numbers is made for a page of 4,096 tokens, or a fine tile of it
    is wrong."""
    torch.manual_seed(0)
    mixer = regard.create("linear", dim=16, heads=2, causal=True)
    n = 4096
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple) else (out,):
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    x = torch.randn(1, n, 16)
    with Watch():
        view = regard.look(mixer, x)
        data = view.data()
        tile = view.tile(0, 0, (4000, 4032), (3968, 4032), rows=32, columns=64)
    assert largest < n * n / 4
    assert data["models"][0]["maps"][0]["error"] < 1e-4
    assert (tile["rows"], tile["columns"]) == (32, 64)
    weights = mixer.attention_map(x)[0, :, 4000:4032, 3968:4032].detach()
    assert tile == encode_tile(weights, (4000, 4032), (3968, 4032)) or torch.allclose(
        torch.tensor(tile["scale"]), weights.flatten(1).amax(1), rtol=1e-4
    )


def hugging_face_models():
    """Small models of several families by name, with their inputs."""
    import transformers as t

    tokens = ids(1, 10)
    bert_config = t.BertConfig(**SMALL)
    gpt2_config = t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60)
    vit_config = t.ViTConfig(
        **{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=16, patch_size=4
    )
    pair = {"input_ids": tokens, "decoder_input_ids": ids(1, 6, seed=1)}
    return {
        "bert": (t.BertForMaskedLM(bert_config), tokens),
        "gpt2": (t.GPT2LMHeadModel(gpt2_config), tokens),
        "llama": (t.LlamaForCausalLM(t.LlamaConfig(**GROUPED)), tokens),
        "vit": (t.ViTForImageClassification(vit_config), torch.randn(1, 3, 16, 16)),
        "t5": (t.T5ForConditionalGeneration(t.T5Config(**T5)), pair),
        "bart": (t.BartForConditionalGeneration(t.BartConfig(**SEQ2SEQ)), pair),
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa", "regard:vanilla"])
def test_hugging_face_models(attention):
    """Fails if looking changes an output, or a map is not the one of eager attention."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    for name, (model, inputs) in hugging_face_models().items():
        randomize_weights(model, torch.float32)
        given = inputs if isinstance(inputs, dict) else {model.main_input_name: inputs}
        model.set_attn_implementation("eager")
        with torch.no_grad():
            eager = (
                model(**given, output_attentions=True, use_cache=False)
                if name != "vit"
                else (model(**given, output_attentions=True))
            )
        model.set_attn_implementation(attention)
        with torch.no_grad():
            before = model(**given).logits
        found = look_into(model, inputs)
        torch.testing.assert_close(found.output.logits, before, rtol=0, atol=0)
        with torch.no_grad():
            assert torch.equal(model(**given).logits, before), f"{name}: a hook was left"
        names = {
            "self": "attentions",
            "encoder": "encoder_attentions",
            "decoder": "decoder_attentions",
            "cross": "cross_attentions",
        }
        roles = [placed.role for placed in found.maps]
        assert set(roles) == (
            {"self"} if name not in ("t5", "bart") else {"encoder", "decoder", "cross"}
        )
        for placed in found.maps:
            assert placed.map.kind == "exact" and placed.map.error < 1e-4, (name, placed.map)
            wanted = eager[names[placed.role]][placed.layer][0]
            torch.testing.assert_close(placed.map.operator.dense(), wanted, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(
                placed.map.operator.rows(slice(1, 3)), wanted[:, 1:3], rtol=1e-3, atol=1e-5
            )


def test_swapped_model_beside_the_original():
    """Fails if heads are not matched with themselves, or a swap shows no difference."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    models = [transformers.BertModel(transformers.BertConfig(**SMALL)).eval() for _ in range(2)]
    randomize_weights(models[0], torch.float32)
    models[1].load_state_dict(models[0].state_dict())
    same = regard.look(models[0], ids(1, 12), against=models[1]).data()["matches"]
    assert len(same) == 8
    assert all(match["first"] == match["second"] for match in same)
    assert all(match["similarity"] > 0.9999 for match in same)
    regard.swap(models[1], "local", window=1)
    data = regard.look(models[0], ids(1, 12), against=models[1], against_name="swapped").data()
    assert [each["name"] for each in data["models"]] == ["BertModel", "swapped"]
    assert min(match["same_place"] for match in data["matches"]) < 0.9
    (table,) = [t for t in data["models"][1]["tables"] if "differ" in t["title"]]
    assert [row[2] for row in table["rows"]] == ["local", "local"]


# ----------------------------------------------------------------------------------------- numbers
def test_numbers_of_known_maps():
    """Fails if a number of a head is not what its name says."""
    n = 6
    previous = torch.diag(torch.ones(n - 1), -1)
    previous[0, 0] = 1
    uniform = torch.full((n, n), 1 / n)
    rows = map_rows(DenseHeads(torch.stack((previous, uniform, torch.eye(n)))))
    tokens = torch.tensor([7, 8, 7, 9, 10, 11])
    numbers = head_metrics(rows, same_sequence=True, ids=tokens)
    assert numbers["previous"] == [1, pytest.approx(1 / n, abs=1e-5), 0]
    assert numbers["same"] == [pytest.approx(1 / n, abs=1e-5), pytest.approx(1 / n, abs=1e-5), 1]
    assert numbers["entropy"] == [0, pytest.approx(math.log2(n), abs=1e-4), 0]
    assert numbers["first"][0] == pytest.approx(2 / n, abs=1e-5)
    assert numbers["effective rank"] == [
        pytest.approx(numbers["effective rank"][0]),
        pytest.approx(1, abs=1e-4),
        pytest.approx(n, abs=1e-4),
    ]
    assert numbers["same word"][1] == pytest.approx(1 / n, abs=1e-5)
    # on a grid of 2 x 3 patches behind a class token, each patch looks at the one below it
    below = torch.zeros(7, 7)
    below[0, 0] = 1
    below[torch.arange(1, 7), torch.tensor([4, 5, 6, 1, 2, 3])] = 1
    image = MapRows(torch.arange(7), below[None], True)
    distance = head_metrics(image, same_sequence=True, grid=(2, 3), first_patch=1)["distance"]
    assert distance == [1]


def test_induction_scores_of_a_perfect_head():
    """Fails if the score is not the weight on the token after the earlier occurrence."""
    perfect = torch.zeros(1, 8, 8)
    perfect[0, torch.arange(4, 8), torch.arange(1, 5)] = 1
    scores = induction_scores(perfect, 4)
    assert scores["induction"].tolist() == [1] and scores["duplicate"].tolist() == [0]


def test_controls_keep_what_they_should(decoder):
    """Fails if a shuffle loses a token, moves a special one, or mixes pixels of patches."""
    subject = find_subject(decoder, torch.arange(1, 20))
    subject.special = frozenset({1, 5})
    other = shuffled_subject(subject).ids["x"][0]
    assert sorted(other.tolist()) == list(range(1, 20)) and other.tolist() != list(range(1, 20))
    assert (other[0], other[4]) == (1, 5)
    pixels = torch.arange(36.0).view(1, 1, 6, 6)
    shuffled = shuffle_patches(pixels, (3, 3))
    assert sorted(shuffled.flatten().tolist()) == list(range(36))
    patches = {
        tuple(p.flatten().tolist())
        for p in pixels[0, 0].unfold(0, 2, 2).unfold(1, 2, 2).flatten(0, 1)
    }
    found = {
        tuple(p.flatten().tolist())
        for p in shuffled[0, 0].unfold(0, 2, 2).unfold(1, 2, 2).flatten(0, 1)
    }
    assert patches == found
    scores, chance = induction(look_into(decoder, torch.arange(1, 20)))
    assert len(scores) == 2 and set(scores[0]) == {"induction", "duplicate"} == set(chance[0])


# ----------------------------------------------------------------------------------- interventions
@pytest.mark.parametrize("mixer", ["vanilla", "linear", "retnet", "local", "aft"])
def test_a_head_that_is_off_is_a_head_whose_projection_is_zero(mixer):
    """Fails if switching a head off is not the same as zeros in the output projection."""
    torch.manual_seed(0)
    model = build(gpt(2, 16, 2, vocab_size=20, length=16, mixer=mixer)).eval()
    found = look_into(model, torch.randint(1, 20, (8,)))
    base = found.output
    same = changed_answer(found, [])
    torch.testing.assert_close(same.values, base)
    off = changed_answer(found, [HeadChange(1, None)])
    layer = model.backbone.stack.layers[1].mixer
    with torch.no_grad():
        if mixer in ("vanilla", "linear", "local"):
            part = changed_answer(found, [HeadChange(1, 1)])
            kept = layer.out.weight[:, 8:].clone()
            layer.out.weight[:, 8:] = 0
            torch.testing.assert_close(part.values, model(*found.subject.inputs.args))
            layer.out.weight[:, 8:] = kept
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
        torch.testing.assert_close(off.values, model(*found.subject.inputs.args))


def test_replaced_maps(decoder):
    """Fails if uniform, identity or another example's map is not what the head then uses."""
    tokens = torch.randint(1, 50, (9,))
    found = look_into(decoder, tokens)
    record = found.maps[0].map.attention
    values = record.values()[0]
    seen = {}

    def watch(replace, weights=None):
        calls = []
        layer = decoder.backbone.stack.layers[0].mixer
        handle = layer.out.register_forward_pre_hook(lambda _, args: calls.append(args[0]))
        changed_answer(found, [HeadChange(0, 2, replace, weights)])
        handle.remove()
        seen[replace] = calls[0][0].unflatten(-1, (4, 8))[:, 2]

    other = torch.rand(4, 9, 9).softmax(-1)
    for replace, weights in (("identity", None), ("uniform", None), ("example", other)):
        watch(replace, weights)
    torch.testing.assert_close(seen["identity"], values[2])
    causal_mean = values[2].cumsum(0) / torch.arange(1, 10)[:, None]
    torch.testing.assert_close(seen["uniform"], causal_mean)
    torch.testing.assert_close(seen["example"], other[2] @ values[2])


def test_importance_agrees_with_single_interventions(decoder):
    """Fails if a batch of heads that are off is not each of them alone."""
    found = look_into(decoder, torch.randint(1, 50, (10,)))
    rows = head_importance(found)
    assert len(rows) == 2 * (4 + 1)
    answer = changed_answer(found, [])
    for row in rows[::3]:
        alone = changed_answer(found, [HeadChange(row["map"], row["head"])])
        assert float(answer.changes(alone)) == pytest.approx(row["change"], rel=1e-3, abs=1e-8)


def test_lens_ends_in_the_answer(decoder):
    """Fails if the last layer of the lens is not the prediction, or a head that is off changes
    nothing behind its layer."""
    found = look_into(decoder, torch.randint(1, 50, (10,)))
    lens = logit_lens(found)
    assert len(lens.streams) == 2
    best = lens.data()["layers"][-1][-1][0]
    assert best[0] == str(int(found.output[0, -1].argmax()))
    view = regard.look(decoder, torch.randint(1, 50, (10,)))
    result = view.intervene(0, [{"map": 1, "head": None, "replace": "zero"}])
    assert result["change"] > 0
    before, after = (result[k]["lens"]["layers"] for k in ("before", "after"))
    assert before[0] == after[0] and before[1] != after[1]


# ------------------------------------------------------------------------------------- attribution
def test_rank_correlation():
    """Fails if it is not Spearman's, with the mean rank of ties."""
    assert average_ranks(torch.tensor([3.0, 1.0, 3.0])).tolist() == [1.5, 0, 1.5]
    a = torch.tensor([1.0, 2, 3, 4])
    assert rank_correlation(a, a.exp()) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    # 1 - 6 Σd² / n(n² - 1) with d = (1, 1, 0, 0)
    assert rank_correlation(a, torch.tensor([2.0, 1, 3, 4])) == pytest.approx(0.8)


def test_attribution_finds_the_only_token_that_matters():
    """Fails if a method gives most weight to a token that a model does not read."""
    torch.manual_seed(0)
    head = SequenceClassificationHeadConfig(num_classes=3, pooling="mean")
    model = build(bert(1, 16, 2, vocab_size=30, length=16, head=head)).eval()
    with torch.no_grad():  # only token 7 has a direction of its own
        for p in model.backbone.embed.position.parameters():
            p.zero_()
        rows = model.backbone.embed.tokens.weight
        rows.copy_(torch.randn(16).expand(30, -1))
        rows[7] = 3 * torch.randn(16)
    tokens = torch.tensor([3, 4, 5, 7, 8, 9, 10, 11])
    scores = attributions(look_into(model, tokens))
    assert set(scores) >= {"occlusion", "gradient x input", "gradient x attention", "rollout"}
    assert all(len(values) == 8 for values in scores.values())
    assert max(range(8), key=lambda i: abs(scores["occlusion"][i])) == 3


# ------------------------------------------------------------------------------------- views
def test_view_of_an_image_and_of_a_translation():
    """Fails if patches, class token, roles or the data of a page are wrong."""
    torch.manual_seed(0)
    head = SequenceClassificationHeadConfig(num_classes=4)
    model = build(vit(1, 16, 2, image_size=12, patch_size=4, head=head)).eval()
    data = regard.look(model, torch.rand(3, 12, 12)).data()
    (sequence,) = data["sequences"]
    assert (sequence["kind"], sequence["count"], sequence["first_patch"]) == ("image", 10, 1)
    assert sequence["image"].startswith("data:image/png;base64,")
    assert [figure["title"] for figure in data["models"][0]["figures"]] == [
        "Patch embedding",
        "Position embeddings",
    ]
    assert set(data["models"][0]["maps"][0]["chance"]) >= {"distance", "entropy"}
    model = build(transformer(1, 16, 2, vocab_size=20, length=16)).eval()
    pair = {"source": torch.randint(1, 20, (1, 7)), "target": torch.randint(1, 20, (1, 5))}
    data = regard.look(model, pair).data()
    maps = data["models"][0]["maps"]
    assert [(m["role"], m["queries"], m["keys"]) for m in maps] == [
        ("encoder", "source", "source"),
        ("decoder", "target", "target"),
        ("cross", "target", "source"),
    ]
    json.dumps(data, allow_nan=False)


def test_a_view_is_a_page_and_a_picture(decoder, tmp_path):
    """Fails if a view cannot be saved, or answers to a page are wrong."""
    view = regard.look(decoder, torch.randint(1, 50, (6,)))
    assert view.save(tmp_path / "look.html").read_text(encoding="utf-8").startswith("<!")
    assert "<iframe" in view._repr_html_()
    for number, options in enumerate(({}, {"map": 1}, {"map": 0, "head": 2}, {"rollout": True})):
        path = view.png(tmp_path / f"{number}.png", **options)
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="map 7"):
        view.png(tmp_path / "x.png", map=7)
    session = ViewSession(view)
    assert session.view()["server"] and not view.data()["server"]
    with pytest.raises(ValueError, match="0 to 6"):
        session.tile(0, 0, (0, 9), (0, 6), rows=4, columns=4)
    with pytest.raises(ValueError, match="not of a text"):
        session.look(["a text"])
    with pytest.raises(ValueError, match="no head 4"):
        session.intervene(0, [{"map": 0, "head": 4, "replace": "zero"}])


# ------------------------------------------------------------------------------------- bad input
def test_bad_input_is_named(decoder):
    """Fails if an input that cannot be shown is accepted, or the error does not say why."""
    cases = [
        (torch.zeros(1, 0, dtype=torch.long), "no tokens"),
        (torch.zeros(3, 4, dtype=torch.long), "One example"),
        (torch.zeros(1, 65, dtype=torch.long), "at most 64"),
        ({"x": torch.ones(1, 4, dtype=torch.long), "mask": torch.zeros(1, 4).bool()}, "padding"),
        ("a text", "tokenizer"),
        (object(), "tensor or a dict"),
    ]
    for inputs, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            regard.look(decoder, inputs)
    with pytest.raises(ValueError, match="no layer 5"):
        regard.look(decoder, torch.ones(4, dtype=torch.long), layers=[5])
    with pytest.raises(TypeError, match="module"):
        regard.look(3, "a")
    mixer = regard.create("vanilla", dim=64, heads=64)
    with pytest.raises(ValueError, match=r"100,000 tokens x 64 heads .* 6.6 GB.* at most 32,768"):
        regard.look(mixer, torch.zeros(1, 100_000, 64))
    with pytest.raises(ValueError, match=r"60,000 tokens x 64 heads .* --layers 0"):
        regard.look(mixer, torch.zeros(1, 60_000, 64))
    with pytest.raises(ValueError, match="NaN"):
        regard.look(mixer, torch.full((1, 4, 64), math.nan))
    with pytest.raises(ValueError, match="1 to 512"):
        compute_tile(DenseHeads(torch.eye(4)[None]), (0, 4), (0, 4), 600, 4)


def test_one_token_and_nan_in_a_layer(decoder):
    """Fails if one token is refused, or a NaN is not said with its layer."""
    data = regard.look(decoder, torch.tensor([3])).data()
    assert data["sequences"][0]["count"] == 1
    with torch.no_grad():
        decoder.backbone.stack.layers[1].mixer.q.weight[0, 0] = math.nan
    data = regard.look(decoder, torch.randint(1, 50, (5,))).data()
    assert any("layer 1" in note and "NaN" in note for note in data["notes"])
    json.dumps(data, allow_nan=False)


def test_padding_is_no_part_of_an_answer():
    """Fails if what a model gives for padding counts in a change: eager and fused attention
    differ there."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    randomize_weights(model, torch.float32)
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[0, :3] = 0
    changes = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        view = regard.look(model, {"input_ids": ids(1, 10), "attention_mask": mask})
        edit = {"map": 0, "head": None, "replace": "uniform"}
        changes.append(view.intervene(0, [edit])["change"])
        weights = view.models[0].maps[1].map.operator.dense()
        assert (weights[:, 3:, :3] == 0).all()
    assert changes[0] == pytest.approx(changes[1], rel=1e-4)
