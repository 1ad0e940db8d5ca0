"""Converted checkpoints of further families, compared with the original code."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import regard.hf
from hf_models import randomize_weights
from regard import Unsupported, models
from regard.hf.families import xcit
from test_hf_weights import SMALL, assert_equal, padded, pair, tokens

hf = pytest.importorskip("transformers")

ROBERTA = {**SMALL, "max_position_embeddings": 18, "pad_token_id": 0, "type_vocab_size": 1}


pytestmark = pytest.mark.usefixtures("seeded")


# ---------------------------------------------------------------------------------------- BERT-like
def test_roberta():
    """Fails if positions or a layer differ. RoBERTa's positions skip padding in front."""
    ours, peer = pair(hf.RobertaModel(hf.RobertaConfig(**ROBERTA), add_pooling_layer=False))
    x, mask = tokens(), padded("right")
    x = x.masked_fill(~mask, 0)
    assert_equal(ours(x, mask), peer(x, mask.long()).last_hidden_state, mask)
    assert ours.config.length == 17


def test_roberta_heads():
    """Fails if a masked LM or classification head differs."""
    config, x, mask = hf.RobertaConfig(**ROBERTA, num_labels=5), tokens(), padded("right")
    x = x.masked_fill(~mask, 0)
    ours, peer = pair(hf.RobertaForMaskedLM(config), models.MaskedLMHeadConfig())
    assert_equal(ours(x, mask), peer(x, mask.long()).logits, mask)
    ours, peer = pair(
        hf.RobertaForSequenceClassification(config),
        models.SequenceClassificationHeadConfig(num_classes=5, hidden_layer=True),
    )
    assert_equal(ours(x, mask), peer(x, mask.long()).logits)
    ours, peer = pair(
        hf.RobertaForTokenClassification(config),
        models.TokenClassificationHeadConfig(num_classes=5),
    )
    assert_equal(ours(x, mask), peer(x, mask.long()).logits, mask)


@pytest.mark.parametrize("with_global", [False, True])
def test_longformer(with_global):
    """Fails if windows of each layer, global attention, its projections or padding differ."""
    config = hf.LongformerConfig(
        **{**ROBERTA, "max_position_embeddings": 40}, attention_window=[4, 8]
    )
    ours, peer = pair(hf.LongformerModel(config, add_pooling_layer=False))
    x, mask = tokens(24), padded("right", 24)
    x, global_attention_mask = x.masked_fill(~mask, 0), torch.zeros(2, 24, dtype=torch.bool)
    global_attention_mask[0, [0, 11]] = global_attention_mask[1, 3] = with_global
    theirs = peer(
        x, mask.long(), global_attention_mask=global_attention_mask.long()
    ).last_hidden_state
    assert_equal(
        ours(x, mask, global_attention_mask=global_attention_mask if with_global else None),
        theirs,
        mask,
        atol=3e-5,
    )  # theirs rounds to float32


BIGBIRD = {
    **SMALL,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "block_size": 4,
    "num_random_blocks": 2,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "hidden_act": "gelu_new",
}


@pytest.mark.parametrize("kind", ["original_full", "block_sparse"])
def test_bigbird_in_evaluation(kind):
    """Fails if window, global blocks or the repeated first block differ."""
    config = hf.BigBirdConfig(**BIGBIRD, attention_type=kind)
    ours, peer = pair(hf.BigBirdModel(config, add_pooling_layer=False))
    x, mask = tokens(48), padded("right", 48)
    assert_equal(ours(x, mask), peer(x, mask.long()).last_hidden_state, mask)
    assert peer.attention_type == kind


def test_bigbird_with_the_same_random_blocks():
    """Fails if given random blocks are not those that are seen; transformers draws by numpy."""
    peer = randomize_weights(
        hf.BigBirdModel(hf.BigBirdConfig(**BIGBIRD), add_pooling_layer=False)
    ).train()
    config, names = regard.hf.convert_config(peer.config.to_dict())
    mixers = []
    for number, layer in enumerate(peer.encoder.layer):
        draw = layer.attention.self
        np.random.seed(number)
        plan = draw._bigbird_block_rand_mask_with_head(
            48, 48, 4, 4, 2, *draw._get_rand_attn_plan(48, 4, 2)
        )
        drawn = [[[], *head.tolist(), []] for head in plan]
        mixers.append(models.module_spec("bigbird_hf", block=4, random_blocks=drawn))
    ours = models.build(config.replace(mixer=mixers)).double().train()
    regard.hf.load_weights(ours, peer.state_dict(), names)
    x = tokens(48)
    assert_equal(ours(x), peer(x).last_hidden_state)


def test_fnet():
    """Fails if the embedding projection, the transform or the head differs."""
    config = hf.FNetConfig(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=2,
        intermediate_size=12,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    ours, peer = pair(hf.FNetModel(config, add_pooling_layer=False))
    x, types = tokens(), torch.randint(0, 4, (2, 9))
    assert_equal(ours(x, token_type_ids=types), peer(x, token_type_ids=types).last_hidden_state)
    ours, peer = pair(
        hf.FNetForMaskedLM(config),
        models.MaskedLMHeadConfig(activation="gelu_tanh"),
        ignore=["pooler.*"],
    )
    assert_equal(ours(x), peer(x).logits)


@pytest.fixture
def doubles():
    """Nyströmformer's identity is of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_nystromformer(doubles):
    """Fails if landmarks, the inverse or the convolution differ.

    Equal at segment_means_seq_len, without padding, and with each inverse initialized by itself.
    """
    config = hf.NystromformerConfig(
        **SMALL,
        max_position_embeddings=24,
        segment_means_seq_len=24,
        num_landmarks=6,
        conv_kernel_size=5,
        pad_token_id=0,
    )
    ours, peer = pair(hf.NystromformerModel(config))
    for layer in peer.encoder.layer:
        layer.attention.self.init_option = "exact"
    x = tokens(24)
    assert_equal(ours(x), peer(x).last_hidden_state, atol=1e-8)
    ours, peer = pair(
        hf.NystromformerForSequenceClassification(config),
        models.SequenceClassificationHeadConfig(num_classes=2, hidden_layer=True),
    )
    assert not regard.hf.match_weights(
        ours, peer.state_dict(), regard.hf.convert_config(config.to_dict())[1]
    ).unmatched.unexpected


# ------------------------------------------------------------------------------------------- Switch
@pytest.mark.parametrize("sparse", [1, 2])
def test_switch(sparse):
    """Fails if experts, router or sparse layers differ. No expert is over its capacity."""
    config = hf.SwitchTransformersConfig(
        vocab_size=31,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=3,
        num_sparse_encoder_layers=2 // sparse,
        num_sparse_decoder_layers=2 // sparse,
        expert_capacity=64,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        decoder_start_token_id=0,
    )
    ours, peer = pair(hf.SwitchTransformersForConditionalGeneration(config), models.LMHeadConfig())
    x, y, mask = tokens(), tokens(7), padded("right")
    theirs = peer(input_ids=x, attention_mask=mask.long(), decoder_input_ids=y).logits
    assert_equal(
        ours(x, y, mask=mask), theirs, atol=5e-6
    )  # norms and the router compute in float32


# ----------------------------------------------------------------------------------------- Reformer
def reformer(layers, **more):
    """A small configuration."""
    return hf.ReformerConfig(
        vocab_size=31,
        hidden_size=8,
        num_attention_heads=2,
        attention_head_size=4,
        feed_forward_size=12,
        attn_layers=layers,
        num_buckets=4,
        num_hashes=2,
        lsh_attn_chunk_length=6,
        local_attn_chunk_length=6,
        axial_pos_shape=(4, 6),
        axial_pos_embds_dim=(3, 5),
        hash_seed=7,
        pad_token_id=0,
        **more,
    )


def test_reformer_with_local_layers():
    """Fails if reversible layers, axial positions or chunks differ in a causal model."""
    peer = hf.ReformerModelWithLMHead(reformer(["local", "local"], is_decoder=True))
    ours, peer = pair(peer, models.LMHeadConfig(tie_weights=False))
    x = tokens(24)
    assert_equal(ours(x), peer(x).logits)
    first, state = ours.stream(x[:, :10])
    assert_equal(torch.cat((first, ours.stream(x[:, 10:], state)[0]), 1), peer(x).logits)


def test_reformer_lsh_within_a_chunk():
    """Fails if shared queries and keys differ within one chunk.

    In longer inputs of transformers the first chunk of a round sees the last of another. Its norm
    has an epsilon under the root, so outputs agree to 1e-4.
    """
    ours, peer = pair(hf.ReformerModel(reformer(["lsh", "local"])))
    x = tokens(6)
    assert_equal(ours(x), peer(x).last_hidden_state, atol=1e-4)


def test_reformer_uses_hash_seed():
    """Fails if the rotations are not those of hash_seed."""
    config = reformer(["lsh"])
    ours = regard.hf.convert_checkpoint(
        hf.ReformerModel(config).state_dict(), config=config.to_dict()
    )
    torch.manual_seed(7)
    drawn = torch.randn(2, 4, 2, 2).transpose(1, 2)
    assert torch.equal(ours.backbone.stack.sublayers[0].mixer.inner.hashing.rotations, drawn)


# --------------------------------------------------------------------------------------------- timm
def linear(p, name, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def layer_norm(p, name, x):
    x = x - x.mean(-1, keepdim=True)
    return (
        x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"]
        + p[f"{name}.bias"]
    )


def mlp(p, name, x):
    return linear(p, f"{name}.fc2", F.gelu(linear(p, f"{name}.fc1", x)))


def random_tensors(shapes):
    """Tensors of these shapes in float64; variances are positive."""
    found = {name: torch.randn(shape, dtype=torch.float64) * 0.3 for name, shape in shapes.items()}
    return {name: t.abs() + 0.5 if name.endswith("running_var") else t for name, t in found.items()}


def pairs_of(name, out, inside, *more):
    return {f"{name}.weight": (out, inside, *more), f"{name}.bias": (out,)}


def norms(*names, dim):
    return {f"{name}.{kind}": (dim,) for name in names for kind in ("weight", "bias")}


def mixer_shapes(dim=6, layers=2, patches=16, inside=5, feed=7):
    found = {
        **pairs_of("stem.proj", dim, 3, 4, 4),
        **norms("norm", dim=dim),
        **pairs_of("head", 3, dim),
    }
    for i in range(layers):
        found |= norms(f"blocks.{i}.norm1", f"blocks.{i}.norm2", dim=dim)
        found |= pairs_of(f"blocks.{i}.mlp_tokens.fc1", inside, patches) | pairs_of(
            f"blocks.{i}.mlp_tokens.fc2", patches, inside
        )
        found |= pairs_of(f"blocks.{i}.mlp_channels.fc1", feed, dim) | pairs_of(
            f"blocks.{i}.mlp_channels.fc2", dim, feed
        )
    return found


def naive_mixer(p, images):
    """MLP-Mixer as timm runs it."""
    x = F.conv2d(images, p["stem.proj.weight"], p["stem.proj.bias"], stride=4).flatten(2).mT
    for i in range(2):
        x = x + mlp(p, f"blocks.{i}.mlp_tokens", layer_norm(p, f"blocks.{i}.norm1", x).mT).mT
        x = x + mlp(p, f"blocks.{i}.mlp_channels", layer_norm(p, f"blocks.{i}.norm2", x))
    return linear(p, "head", layer_norm(p, "norm", x).mean(1))


def read_timm(p, name, head, **more):
    """Ours, in float64, by the tensors alone."""
    config, names = regard.hf.convert_config({"architecture": name, **more}, head, p)
    ours = models.build(config).double().eval()
    regard.hf.load_weights(ours, p, names)
    return ours


def test_mlp_mixer(rand):
    """Fails if a tensor of timm is misplaced, or sizes are read incorrectly."""
    p, images = random_tensors(mixer_shapes()), rand(2, 3, 16, 16)
    ours = read_timm(
        p, "mixer_s4_16", models.SequenceClassificationHeadConfig(num_classes=3, pooling="mean")
    )
    assert_equal(ours(images), naive_mixer(p, images))


def xcit_shapes(dim=8, heads=2, layers=2, last=2, feed=12):
    """XCiT with patches of 8: three convolutions."""
    found = {
        "cls_token": (1, 1, dim),
        **pairs_of("pos_embed.token_projection", dim, 64, 1, 1),
        **norms("norm", dim=dim),
    }
    found |= pairs_of("head", 3, dim)
    for step, (a, b) in zip((0, 2, 4), ((3, 2), (2, 4), (4, 8)), strict=True):
        found |= {
            f"patch_embed.proj.{step}.0.weight": (b, a, 3, 3),
            **batch(f"patch_embed.proj.{step}.1", b),
        }
    for i in range(layers):
        name = f"blocks.{i}"
        found |= norms(f"{name}.norm1", f"{name}.norm2", f"{name}.norm3", dim=dim)
        found |= {f"{name}.gamma{k}": (dim,) for k in (1, 2, 3)} | {
            f"{name}.attn.temperature": (heads, 1, 1)
        }
        found |= pairs_of(f"{name}.attn.qkv", 3 * dim, dim) | pairs_of(
            f"{name}.attn.proj", dim, dim
        )
        found |= pairs_of(f"{name}.local_mp.conv1", dim, 1, 3, 3) | pairs_of(
            f"{name}.local_mp.conv2", dim, 1, 3, 3
        )
        found |= (
            batch(f"{name}.local_mp.bn", dim)
            | pairs_of(f"{name}.mlp.fc1", feed, dim)
            | pairs_of(f"{name}.mlp.fc2", dim, feed)
        )
    for i in range(last):
        name = f"cls_attn_blocks.{i}"
        found |= norms(f"{name}.norm1", f"{name}.norm2", dim=dim) | {
            f"{name}.gamma{k}": (dim,) for k in (1, 2)
        }
        for kind in ("q", "k", "v", "proj"):
            found |= pairs_of(f"{name}.attn.{kind}", dim, dim)
        found |= pairs_of(f"{name}.mlp.fc1", feed, dim) | pairs_of(f"{name}.mlp.fc2", dim, feed)
    return found


def batch(name, dim):
    return {
        f"{name}.{kind}": (dim,) for kind in ("weight", "bias", "running_mean", "running_var")
    } | {f"{name}.num_batches_tracked": ()}


def batch_norm(p, name, x):
    """x (b c h w), by the running numbers."""
    mean, var, gain, bias = (
        p[f"{name}.{k}"].view(-1, 1, 1) for k in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (var + 1e-5).sqrt() * gain + bias


def naive_positions(p, side, hidden=32):
    """Their table, number by number."""
    rows = []
    for y in range(side):
        for x in range(side):
            row = []
            for place in (y, x):
                at = (place + 1) / (side + 1e-6) * 2 * math.pi
                for i in range(hidden):
                    angle = at / 10000 ** (2 * (i // 2) / hidden)
                    row.append(math.sin(angle) if i % 2 == 0 else math.cos(angle))
            rows.append(row)
    waves = torch.tensor(rows, dtype=torch.float64)
    return (
        waves @ p["pos_embed.token_projection.weight"].flatten(1).T
        + p["pos_embed.token_projection.bias"]
    )


def naive_xcit(p, images, heads=2):
    """XCiT as timm runs it: 2 layers, 2 more for the class token."""
    x = images
    for step in (0, 2, 4):
        x = batch_norm(
            p,
            f"patch_embed.proj.{step}.1",
            F.conv2d(x, p[f"patch_embed.proj.{step}.0.weight"], stride=2, padding=1),
        )
        x = x if step == 4 else F.gelu(x)
    side = x.shape[-1]
    x = x.flatten(2).mT + naive_positions(p, side)
    b, n, d = x.shape
    for i in range(2):
        name = f"blocks.{i}"
        q, k, v = (
            linear(p, f"{name}.attn.qkv", layer_norm(p, f"{name}.norm1", x))
            .view(b, n, 3, heads, -1)
            .permute(2, 0, 3, 4, 1)
        )
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * p[f"{name}.attn.temperature"]
        y = (scores.softmax(-1) @ v).permute(0, 3, 1, 2).reshape(b, n, d)
        x = x + p[f"{name}.gamma1"] * linear(p, f"{name}.attn.proj", y)
        y = layer_norm(p, f"{name}.norm3", x).mT.reshape(b, d, side, side)
        y = F.conv2d(
            y,
            p[f"{name}.local_mp.conv1.weight"],
            p[f"{name}.local_mp.conv1.bias"],
            padding=1,
            groups=d,
        )
        y = batch_norm(p, f"{name}.local_mp.bn", F.gelu(y))
        y = F.conv2d(
            y,
            p[f"{name}.local_mp.conv2.weight"],
            p[f"{name}.local_mp.conv2.bias"],
            padding=1,
            groups=d,
        )
        x = x + p[f"{name}.gamma3"] * y.flatten(2).mT
        x = x + p[f"{name}.gamma2"] * mlp(p, f"{name}.mlp", layer_norm(p, f"{name}.norm2", x))
    x = torch.cat((p["cls_token"].expand(b, 1, d), x), 1)
    for i in range(2):
        name = f"cls_attn_blocks.{i}"
        y = layer_norm(p, f"{name}.norm1", x)
        q, k, v = (
            linear(p, f"{name}.attn.{kind}", y).view(b, n + 1, heads, -1).transpose(1, 2)
            for kind in "qkv"
        )
        weights = (q[:, :, :1] @ k.mT / (d // heads) ** 0.5).softmax(-1)
        asked = linear(p, f"{name}.attn.proj", (weights @ v).transpose(1, 2).reshape(b, 1, d))
        x = layer_norm(
            p, f"{name}.norm2", x + p[f"{name}.gamma1"] * torch.cat((asked, y[:, 1:]), 1)
        )
        x = x + torch.cat((p[f"{name}.gamma2"] * mlp(p, f"{name}.mlp", x[:, :1]), x[:, 1:]), 1)
    return linear(p, "head", layer_norm(p, "norm", x)[:, 0])


def test_xcit(rand):
    """Fails if a tensor of timm is misplaced, or scales, positions or class layers differ."""
    p, images = random_tensors(xcit_shapes()), rand(2, 3, 32, 32)
    size = {"pretrained_cfg": {"input_size": [3, 32, 32]}}
    ours = read_timm(
        p, "xcit_nano_2_p8_32", models.SequenceClassificationHeadConfig(num_classes=3), **size
    )
    assert_equal(ours(images), naive_xcit(p, images), atol=1e-9)
    assert set(xcit.convert(p, None, 32)[0].mixer[0].arguments) == {"width", "component"}


# ------------------------------------------------------------------------------------------- errors
def test_all_unmatched_weights_are_listed():
    """Fails if a missing, unexpected or mismatched tensor is not named with its shapes."""
    peer = hf.RobertaModel(hf.RobertaConfig(**ROBERTA), add_pooling_layer=False)
    given = dict(peer.state_dict())
    del given["encoder.layer.1.output.dense.bias"]
    given |= {
        "odd": torch.zeros(1),
        "embeddings.LayerNorm.weight": torch.ones(9),
        "embeddings.LayerNorm.bias": torch.ones(2, 8),
    }
    with pytest.raises(ValueError, match="The weights do not fit the model") as error:
        regard.hf.convert_checkpoint(given, config=peer.config.to_dict())
    message = str(error.value)
    assert (
        "unexpected in the checkpoint: odd" in message
        and "missing in the checkpoint: backbone.stack.layers.1.ffn.down.bias" in message
    )
    assert (
        "embeddings.LayerNorm.weight has shape (9,) for backbone.embed.norm.weight, "
        "but the model expects (8,)" in message
    )
    assert "embeddings.LayerNorm.bias has shape (2, 8)" in message


def test_tensors_that_cannot_be_transformed_are_named():
    """Fails if experts of different sizes end in an error of torch."""
    config = hf.SwitchTransformersConfig(
        vocab_size=31,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=2,
        num_experts=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    )
    given = dict(hf.SwitchTransformersModel(config).state_dict())
    given["encoder.block.0.layer.1.mlp.experts.expert_1.wi.weight"] = torch.zeros(3, 8)
    with pytest.raises(
        ValueError,
        match=r"expert_0.wi.weight and .*expert_1.wi.weight has shape .* expects \(2, 12, 8\)",
    ):
        regard.hf.convert_checkpoint(given, config=config.to_dict())


def test_pickles_are_refused(tmp_path):
    """Fails if a pickle is opened, or the error does not explain how to convert it."""
    peer = hf.GPT2Model(hf.GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    peer.config.save_pretrained(tmp_path)
    torch.save(peer.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"pytorch_model.bin is a pickle.*weights_only=True.*save_file"
    ):
        regard.hf.convert_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="is a pickle"):
        regard.hf.convert_checkpoint(tmp_path / "pytorch_model.bin", config=peer.config.to_dict())
    save_file(
        {name: t.clone().contiguous() for name, t in peer.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    assert regard.hf.convert_checkpoint(tmp_path).config.dim == 8


def test_sharded_weights(tmp_path):
    """Fails if a sharded checkpoint is not read completely."""
    peer = hf.GPT2Model(
        hf.GPT2Config(vocab_size=31, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    ).eval()
    peer.save_pretrained(tmp_path, max_shard_size="2KB")
    assert (tmp_path / "model.safetensors.index.json").is_file() and len(
        list(tmp_path.glob("*.safetensors"))
    ) > 2
    x = tokens()
    torch.testing.assert_close(regard.hf.convert_checkpoint(tmp_path)(x), peer(x).last_hidden_state)


def test_nonfinite_weights_warn(tmp_path):
    """Fails if NaN in weights gives no warning, from a checkpoint or our own file."""
    peer = hf.GPT2Model(hf.GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    given = dict(peer.state_dict())
    given["wte.weight"] = given["wte.weight"].index_fill(0, torch.tensor(3), math.nan)
    with pytest.warns(UserWarning, match="NaN or infinity in backbone.embed.tokens.weight"):
        ours = regard.hf.convert_checkpoint(given, config=peer.config.to_dict())
    models.save(ours, tmp_path)
    with pytest.warns(
        UserWarning,
        match=r"model.safetensors: NaN or infinity in backbone.embed.tokens.weight",
    ):
        models.load(tmp_path)


def test_unsupported_settings_raise():
    """Fails if a setting that changes the model is ignored."""
    reformed = reformer(["lsh"]).to_dict()
    with pytest.raises(Unsupported, match=r"num_buckets=\[2, 4\] is not supported"):
        regard.hf.convert_config({**reformed, "num_buckets": [2, 4]})
    with pytest.raises(
        Unsupported, match="2 heads of width 64 are not supported in a model of width 8"
    ):
        regard.hf.convert_config({**reformed, "attention_head_size": 64})
    with pytest.raises(Unsupported, match="it must be an even number"):
        regard.hf.convert_config({**hf.LongformerConfig().to_dict(), "attention_window": [3] * 12})
    with pytest.raises(Unsupported, match="router_bias=True is not supported"):
        regard.hf.convert_config({**hf.SwitchTransformersConfig().to_dict(), "router_bias": True})
    with pytest.raises(
        ValueError, match="Cannot convert the timm model 'mixxer_b16_224': did you mean 'mixer'"
    ):
        regard.hf.convert_config({"architecture": "mixxer_b16_224"})
    with pytest.raises(ValueError, match="are read from its weights: give the tensors"):
        regard.hf.convert_config({"architecture": "mixer_b16_224"})
    with pytest.raises(ValueError, match="give `config`, the contents of"):
        regard.hf.convert_checkpoint({"wte.weight": torch.zeros(2, 2)})


def test_timm_folder(tmp_path, rand):
    """Fails if a folder of timm is not read."""
    p = {name: t.float() for name, t in random_tensors(mixer_shapes()).items()}
    save_file(p, tmp_path / "model.safetensors")
    settings = {
        "architecture": "mixer_s4_16",
        "num_classes": 3,
        "pretrained_cfg": {"input_size": [3, 16, 16]},
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ours, images = (
        regard.hf.convert_checkpoint(
            tmp_path, models.SequenceClassificationHeadConfig(num_classes=3, pooling="mean")
        ),
        rand(2, 3, 16, 16).float(),
    )
    torch.testing.assert_close(ours(images), naive_mixer(p, images), rtol=1e-4, atol=1e-5)
