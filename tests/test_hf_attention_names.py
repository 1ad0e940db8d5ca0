"""Attention names, when they are refused, and lazy masks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from transformers import masking_utils as theirs  # noqa: E402

import hf_models as small  # noqa: E402
import regard.hf  # noqa: E402
from regard import Unsupported  # noqa: E402
from regard.hf.attention_spec import AttentionSpec, parse_name  # noqa: E402
from regard.hf.masks import LazyMask, create_mask, infer_rule, read_mask_function  # noqa: E402
from regard.hf.patching import model_configs  # noqa: E402

transformers.logging.set_verbosity_error()


# -------------------------------------------------------------------------------------------- names
def test_names_and_specs_round_trip() -> None:
    assert regard.hf.register("local", window=256) == "regard:local?window=256"
    assert parse_name("regard:fixed_span?spans=4,8") == AttentionSpec(
        "fixed_span", (("spans", (4, 8)),)
    )
    for name in (
        "regard:vanilla",
        "regard:performer?features=8&seed=3",
        "regard:bigbird?globals=none&length=64",
        "regard:fixed_span?spans=4,",
        "regard:local?window=3&cross=vanilla",
        "regard:top_k?k=3",
    ):
        assert str(parse_name(name)) == name
    with pytest.raises(ValueError, match="cannot be written in an attention name"):
        str(AttentionSpec("local", (("window", "a&b"),)))
    assert (
        regard.hf.register("local", window=3, cross="vanilla")
        == "regard:local?window=3&cross=vanilla"
    )


def test_attention_names_are_those_of_suitable_recipes() -> None:
    names = set(regard.hf.attention_names())
    assert {
        f"regard:{recipe}" for recipe in ("vanilla", "local", "bigbird", "performer", "nystrom")
    } <= names
    assert not {"regard:linformer", "regard:fnet", "regard:reformer", "regard:routing"} & names
    for name in names:
        assert regard.hf.register(name.removeprefix("regard:")) == name
        assert name in transformers.AttentionInterface()
        assert name in theirs.AttentionMaskInterface()


def test_importing_is_cheap() -> None:
    """Fails if the import loads torch or transformers, builds recipes, or never patches."""
    code = (
        "import sys, regard.hf\n"
        "assert not {'torch', 'transformers', 'regard.registry'} & set(sys.modules)\n"
        "from transformers import PreTrainedModel\n"
        "assert hasattr(PreTrainedModel.set_attn_implementation, '_regard')\n"
        "assert 'regard.recipes' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import transformers.modeling_utils as theirs, regard.hf\n"
        "assert hasattr(theirs.PreTrainedModel.post_init, '_regard')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vanila", "did you mean 'vanilla'"),
        ("local?windw=3", "did you mean 'window'"),
        ("local?window=x", "window must be an integer, not 'x'"),
        ("local?window=-1", "window|left"),
        ("local?window", "name=value"),
        ("local?window=", "name=value"),
        ("local?", "ends in '\\?' without an argument"),
        ("local?window=3&window=4", "window twice"),
        ("local?dim=8", "does not accept 'dim': the model sets it"),
        ("local?heads=8", "does not accept 'heads': the model sets it"),
        ("vanilla?bias=true", "does not accept 'bias': the model sets it"),
        ("vanilla?causal=true", "does not accept 'causal': the model sets it"),
        ("local?cross=vanila", "did you mean 'vanilla'"),
        ("local?cross=local", "local does not support cross-attention"),
        ("local?cross=nystrom", "depend on more than its own query: a landmark is a mean"),
        ("linformer?length=64", r"has parameters .compression.e, compression.f.*regard.swap"),
        ("fnet", "mixes tokens, with projections of its own or without any.*regard.swap"),
        ("reformer", "shares queries and keys.*regard.swap"),
        ("routing", "training changes its buffers .route.centroids.*regard.swap"),
        ("performer?redraw=2", "training changes its buffers .feature.calls.*regard.swap"),
        ("grouped_query", "projections of its own.*regard.swap"),
        ("per_head?patterns=3", "patterns"),
    ],
)
def test_wrong_names_raise_with_a_hint(name: str, message: str) -> None:
    model = small.build("bert")
    with pytest.raises((ValueError, TypeError), match=message):
        model.set_attn_implementation(f"regard:{name}")
    assert model.config._attn_implementation == "eager"
    with pytest.raises((ValueError, TypeError), match=message):
        small.build("bert", f"regard:{name}")


def test_other_names_are_passed_through() -> None:
    model = small.build("bert")
    with pytest.raises(ValueError, match="not supported"):
        model.set_attn_implementation("regard_local")
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_save_and_load(tmp_path) -> None:
    """transformers does not save the implementation, but reads it from the configuration."""
    model = small.build("bert", "regard:bigbird?block=4")
    ids = small.ids()
    model.save_pretrained(tmp_path / "plain")
    loaded = transformers.AutoModel.from_pretrained(
        tmp_path / "plain", attn_implementation="regard:bigbird?block=4"
    ).eval()
    torch.testing.assert_close(loaded(ids).last_hidden_state, model(ids).last_hidden_state)
    plain = transformers.AutoModel.from_pretrained(tmp_path / "plain")
    assert plain.config._attn_implementation == "sdpa"
    model.config.attn_implementation = "regard:bigbird?block=4"
    model.save_pretrained(tmp_path / "named")
    again = transformers.AutoModel.from_pretrained(tmp_path / "named").eval()
    assert again.config._attn_implementation == "regard:bigbird?block=4"
    torch.testing.assert_close(again(ids).last_hidden_state, model(ids).last_hidden_state)


def test_sub_models_with_different_names() -> None:
    model, given = small.build("clip"), small.inputs("clip", "right")
    expected = model(**given).logits_per_text
    model.set_attn_implementation(
        {"text_config": "regard:local?window=40", "vision_config": "regard:vanilla"}
    )
    assert model.config.vision_config._attn_implementation == "regard:vanilla"
    torch.testing.assert_close(model(**given).logits_per_text, expected, atol=3e-6, rtol=1e-5)


def test_unknown_sub_models_raise() -> None:
    for family, key, message in (
        ("clip", "text_cfg", "did you mean 'text_config'"),
        ("bert", "text_config", "it has no sub-models"),
    ):
        model = small.build(family)
        with pytest.raises(ValueError, match=f"has no sub-model '{key}': {message}"):
            model.set_attn_implementation({key: "regard:vanilla"})
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", regard.hf.attention_names())
def test_from_pretrained_with_every_name(name: str, tmp_path_factory) -> None:
    """Fails if a recipe is built on the meta device or in bfloat16, as models are."""
    folder = tmp_path_factory.getbasetemp() / "bert"
    if not folder.exists():
        small.build("bert").save_pretrained(folder)
    kind = transformers.AutoModel
    model = kind.from_pretrained(folder, attn_implementation=name, dtype=torch.bfloat16).eval()
    assert model.config._attn_implementation == name
    assert model(small.ids()).last_hidden_state.isfinite().all()


def test_names_do_not_change_the_random_state() -> None:
    """Fails if setting a name or a first call draws random numbers."""
    weights = [
        small.build("llama", name).lm_head.weight
        for name in ("sdpa", "regard:performer?seed=5&features=9")
    ]
    assert torch.equal(*weights)
    model, before = small.build("llama"), torch.get_rng_state()
    model.set_attn_implementation("regard:performer?seed=6&features=7")
    model(small.ids())
    assert torch.equal(torch.get_rng_state(), before)
    code = (
        "import torch, regard.hf; before = torch.get_rng_state(); regard.hf.attention_names()\n"
        "assert torch.equal(before, torch.get_rng_state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sub_models_without_the_interface_are_refused() -> None:
    """The text model of BLIP computes attention itself; its vision model uses the interface."""
    text = {**small.SMALL, "encoder_hidden_size": 32}
    vision = {**small.SIDE, "image_size": 16, "patch_size": 8}
    model = transformers.BlipModel(
        transformers.BlipConfig(text_config=text, vision_config=vision, projection_dim=16)
    )
    before = [config._attn_implementation for config in model_configs(model)]
    for asked in ("regard:vanilla", {"text_config": "regard:vanilla"}):
        with pytest.raises(Unsupported, match=r"does not use .*regard\.swap"):
            model.set_attn_implementation(asked)
        assert before == [config._attn_implementation for config in model_configs(model)]


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("family", "name", "reason"),
    [
        ("llama", "nystrom", "is causal"),
        ("gpt2", "efficient", "is causal"),
        ("bart", "clustered", "is causal"),
        ("clip", "nystrom", "is causal"),
        ("llama", "bigbird?globals=2", "Use globals=0"),
        ("bart", "local", "is cross-attention, which .* does not support.*cross=vanilla"),
        ("bart", "global_tokens", "positions of the queries.*cross=vanilla"),
        ("whisper", "local", "is cross-attention, which .* does not support.*cross=vanilla"),
        ("t5", "linear", "adds a position bias"),
        ("mistral", "linear", "has a sliding window"),
        ("t5", "bigbird", "maximum sequence length.*give length"),
    ],
)
def test_unsupported_recipes_are_refused_when_set(family: str, name: str, reason: str) -> None:
    model, given = small.build(family), small.inputs(family, "right")
    before = {id(config): config._attn_implementation for config in model_configs(model)}
    with pytest.raises((Unsupported, ValueError), match=reason):
        model.set_attn_implementation(f"regard:{name}")
    assert before == {id(config): config._attn_implementation for config in model_configs(model)}
    model(**given)
    with pytest.raises((Unsupported, ValueError), match=reason):
        small.build(family, f"regard:{name}")


def test_encoder_as_decoder() -> None:
    with pytest.raises(Unsupported, match="is causal"):
        small.build("bert", "regard:nystrom", is_decoder=True)
    small.build("bert", "regard:nystrom")


def test_decoder_as_encoder() -> None:
    """EmbeddingGemma: bidirectional recipes are accepted and agree with transformers' masks."""
    kinds = {"layer_types": ["full_attention"] * 2, "use_bidirectional_attention": True}
    config = transformers.Gemma3TextConfig(**small.GROUPED, head_dim=8, **kinds)
    model = transformers.Gemma3TextModel._from_config(config, attn_implementation="eager").eval()
    given, real = (
        {"input_ids": small.ids(), "attention_mask": small.padding("right")},
        small.padding("right").bool(),
    )
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        model.set_attn_implementation("regard:vanilla")
        torch.testing.assert_close(
            model(**given).last_hidden_state[real], expected[real], atol=3e-6, rtol=1e-5
        )
        model.set_attn_implementation("regard:nystrom?landmarks=64")
        torch.testing.assert_close(
            model(**given).last_hidden_state[real], expected[real], atol=1e-3, rtol=1e-3
        )


TINY = small.SMALL
OWN = {
    "longformer": (
        "Longformer",
        {**TINY, "attention_window": 4, "max_position_embeddings": 64, "pad_token_id": 1},
    ),
    "big_bird": ("BigBird", {**TINY, "attention_type": "original_full"}),
    "fnet": ("FNet", {k: v for k, v in TINY.items() if k != "num_attention_heads"}),
    "nystromformer": ("Nystromformer", {**TINY, "num_landmarks": 4}),
    "deberta": ("DebertaV2", TINY),
    "yoso": ("Yoso", TINY),
    "funnel": (
        "Funnel",
        {
            "vocab_size": 60,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
        },
    ),
    "bloom": ("Bloom", {"vocab_size": 60, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "reformer": (
        "Reformer",
        {
            "vocab_size": 60,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "attention_head_size": 8,
            "feed_forward_size": 48,
            "attn_layers": ["local"],
            "axial_pos_shape": [4, 4],
            "axial_pos_embds_dim": [16, 16],
            "max_position_embeddings": 16,
            "is_decoder": False,
        },
    ),
    "longt5": ("LongT5", {**small.T5, "local_radius": 4}),
}


@pytest.mark.parametrize("family", OWN)
def test_models_without_the_interface_are_refused(family: str) -> None:
    stem, arguments = OWN[family]
    kind, config = (
        getattr(transformers, f"{stem}Model"),
        getattr(transformers, f"{stem}Config")(**arguments),
    )
    with pytest.raises(Unsupported, match=r"does not use .*regard\.swap"):
        kind._from_config(config, attn_implementation="regard:vanilla")
    config._attn_implementation = "eager"
    model = kind(config)
    with pytest.raises(Unsupported, match=r"does not use .*regard\.swap"):
        model.set_attn_implementation("regard:vanilla")
    assert model.config._attn_implementation == "eager"


def test_capped_scores_and_learned_sinks_need_a_softmax() -> None:
    for family, reason in (("gemma2", "caps its attention scores"), ("gpt_oss", "learned sinks")):
        model = small.build(family)
        for name in ("linear", "top_k"):
            with pytest.raises(Unsupported, match=reason):
                model.set_attn_implementation(f"regard:{name}")
        model.set_attn_implementation("regard:local?window=3")
        assert model.config._attn_implementation == "regard:local?window=3"


def test_chunked_attention() -> None:
    """Llama 4: plain attention and windows keep to its chunks, others are refused."""
    config = transformers.Llama4TextConfig(
        **small.GROUPED,
        head_dim=8,
        attention_chunk_size=4,
        num_local_experts=2,
        intermediate_size_mlp=48,
        no_rope_layers=[1, 0],
    )
    model = transformers.Llama4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    given = {
        "input_ids": small.ids(),
        "attention_mask": small.padding("left"),
        "pad_token_id": 0,
        "do_sample": False,
    }
    expected = model.generate(**given, max_new_tokens=5)
    for name in ("sinks", "linear", "bigbird"):
        with pytest.raises(Unsupported, match="attends within chunks"):
            model.set_attn_implementation(f"regard:{name}")
    for name in ("vanilla", "local?window=40"):
        model.set_attn_implementation(f"regard:{name}")
        assert torch.equal(model.generate(**given, max_new_tokens=5), expected)


def test_inputs_longer_than_the_recipe_raise() -> None:
    model = small.build("bert", "regard:bigbird?block=4&length=8")
    model(small.ids(1, 8))
    with pytest.raises(
        ValueError, match="at most 8 positions, but the sequence has 12: set length=12"
    ):
        model(small.ids(1, 12))
    model = small.build("llama", "regard:cosformer?length=8")
    with pytest.raises(ValueError, match="at most 8 positions"):
        model(small.ids(1, 12))


def test_missing_transformers_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import regard.hf; regard.hf.register('local')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "pip install 'regard[hf]'" in done.stderr


# -------------------------------------------------------------------------------------------- masks
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "whole": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "near": theirs.sliding_window_bidirectional_mask_function(3),
    "wide": theirs.sliding_window_causal_mask_function(50),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize(
    ("n", "m", "q_start", "k_positions"),
    [(12, 12, 0, 0), (1, 12, 11, 0), (3, 16, 9, 0), (2, 6, 10, 6)],
)
def test_lazy_masks_equal_transformers_masks(
    kind: str, side: str, n: int, m: int, q_start: int, k_positions: int
) -> None:
    real = None if side == "none" else small.padding(side).bool()
    asked = {
        "batch_size": 3,
        "q_length": n,
        "kv_length": m,
        "q_offset": q_start,
        "kv_offset": k_positions,
        "mask_function": FUNCTIONS[kind],
        "attention_mask": real,
    }
    ours, dense = create_mask(**asked), theirs.sdpa_mask(**asked, allow_is_causal_skip=False)
    assert isinstance(ours, LazyMask) and ours.shape == dense.shape and ours.dtype == torch.bool
    assert torch.equal(ours.dense(), dense)
    for touch in (lambda x: x[..., :4], torch.logical_not, lambda x: x & dense, torch.Tensor.float):
        assert type(touch(ours)) is torch.Tensor and torch.equal(touch(ours), touch(dense))
    assert str(ours).startswith("LazyMask(")


def test_unknown_mask_functions_become_dense() -> None:
    packed = theirs.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]]))
    mixed = theirs.and_masks(theirs.causal_mask_function, packed)
    assert read_mask_function(mixed) is None
    found = create_mask(1, 4, 4, mask_function=mixed, attention_mask=None)
    assert type(found) is torch.Tensor and found.int().sum() == 6


def test_rules_are_inferred_from_dense_masks() -> None:
    real = small.padding("right").bool()
    asked = {"batch_size": 3, "q_length": 12, "kv_length": 12, "attention_mask": real}
    past = theirs.sdpa_mask(**asked, allow_is_causal_skip=False)
    addend = theirs.eager_mask(**asked)
    for mask in (past, addend):
        rule = infer_rule(mask, 12, 12, causal=True)
        assert rule is not None and rule.causal and torch.equal(rule.keep, real)
    whole = infer_rule(real[:, None, None, :], 12, 12, causal=False)
    assert whole is not None and not whole.causal and torch.equal(whole.keep, real)
    assert infer_rule(past ^ torch.eye(12, dtype=torch.bool), 12, 12, causal=True) is None
    assert infer_rule(torch.randn(3, 1, 12, 12), 12, 12, causal=False) is None
