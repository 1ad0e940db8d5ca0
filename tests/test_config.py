"""Configurations: JSON in and out, unknown words, and mixers that do not fit."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

import regard
from regard import models
from regard.models import ModelConfig, PatchInput, TokenInput, VectorInput, build, module_spec
from regard.models.components import build_position

USUAL = {
    "input": {"kind": "tokens", "vocab_size": 11},
    "dim": 8,
    "heads": 2,
    "layers": 2,
    "length": 16,
}


def config(kind="encoder", **more):
    return ModelConfig(kind=kind, **{**USUAL, **more})


ALL = {
    "bert": models.bert(2, 8, 2),
    "gpt": models.gpt(2, 8, 2, mixer=["vanilla", module_spec("sparse_strided", stride=4)]),
    "vit": models.vit(
        2,
        8,
        2,
        image_size=8,
        patch_size=4,
        head=models.SequenceClassificationHeadConfig(num_classes=3, pooling="attention"),
    ),
    "transformer": models.transformer(2, 8, 2),
    "vectors": config(
        input=VectorInput(width=3),
        head={"kind": "regression", "pooling": "none"},
        ffn=None,
        dropout=0.25,
    ),
    "captions": config(
        "seq2seq",
        input=PatchInput(height=4, width=4, patch_size=2),
        target={"vocab_size": 7},
        head={"kind": "lm", "tie_weights": False},
        encoder={"layers": 1, "mixer": "fnet"},
        cross=module_spec("linear"),
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_json_round_trip(name):
    """Fails if a configuration comes back from JSON as another one, or builds another model."""
    text = ALL[name].model_dump_json()
    again = ModelConfig.model_validate_json(text)
    assert again == ALL[name] and again.model_dump_json() == text
    assert ModelConfig(**json.loads(text)) == again
    shapes = [{n: t.shape for n, t in build(c).state_dict().items()} for c in (again, ALL[name])]
    assert shapes[0] == shapes[1]


def test_short_forms_are_the_long_ones():
    """Fails if a name alone is not the part without arguments."""
    assert (
        config(mixer="fnet")
        == config(mixer=[{"name": "fnet", "arguments": {}}])
        == config(mixer=["fnet"])
    )
    assert config(norm="layer").norm == module_spec("layer")
    assert config(input=TokenInput(vocab_size=11)) == config()
    assert module_spec("longformer", dilation=(1, 2)).arguments == {
        "dilation": [1, 2]
    }  # as JSON says it


def test_lists_reach_a_recipe_as_tuples():
    """Fails if what JSON can only say as a list is refused by a recipe that wants a tuple."""
    model = build(config(mixer=module_spec("longformer", window=2, dilation=(1, 3))))
    assert model.backbone.stack.layers[0].mixer.name == "longformer"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dims": 8}, "Config has no 'dims': did you mean 'dim'"),
        (
            {"input": {"kind": "tokens", "vocab_size": 11, "type_vocab": 2}},
            "TokenInput has no 'type_vocab': did you mean 'type_vocab_size'",
        ),
        (
            {"head": {"kind": "sequence_classification", "num_clases": 2}},
            "SequenceClassificationHeadConfig has no 'num_clases': did you mean 'num_classes'",
        ),
        (
            {"mixer": {"name": "fnet", "argument": {}}},
            "ModuleSpec has no 'argument': did you mean 'arguments'",
        ),
        ({"kind": "encodr"}, "'encoder', 'decoder', 'seq2seq', 'dual_encoder' or 'draw'"),
        ({"input": {"kind": "words"}}, "'tokens', 'features', 'vectors', 'patches'"),
        ({"dim": 8.5}, "dim"),
        ({"dim": "8"}, "valid integer"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"dropout": 1.0}, "less than 1"),
        ({"dim": 1 << 40}, "less than or equal to 1048576"),
        ({"mixer": ["fnet"] * 3}, "mixer has 3 entries for 2 layers"),
        ({"mixer": []}, "mixer has 0 entries"),
        (
            {"mixer": module_spec("fnet"), "encoder": {"layers": 1, "mixer": "fnet"}},
            "encoder is for kind 'seq2seq'",
        ),
        ({"cross": "vanilla"}, "cross is for kind 'seq2seq', not 'encoder'"),
        (
            {"input": VectorInput(width=3), "head": {"kind": "lm"}},
            "head 'lm' needs a vocabulary, but the input is 'vectors'",
        ),
        (
            {"kind": "decoder", "head": {"kind": "masked_lm"}},
            "head 'masked_lm' needs kind 'encoder', not 'decoder'",
        ),
        (
            {"kind": "seq2seq", "head": {"kind": "token_classification", "num_classes": 2}},
            "needs kind 'encoder' or 'decoder', not 'seq2seq': use head 'lm'",
        ),
        ({"kind": "seq2seq", "input": VectorInput(width=3)}, "the input is 'vectors': set target"),
        (
            {"kind": "seq2seq", "encoder": {"layers": 3, "mixer": ["fnet", "fnet"]}},
            "encoder.mixer has 2 entries",
        ),
        (
            {"input": PatchInput(height=4, width=4, patch_size=2)},
            "length is 16 but the image has 5 tokens",
        ),
        (
            {
                "kind": "decoder",
                "length": None,
                "input": PatchInput(height=4, width=4, patch_size=2),
            },
            "set class_token=false",
        ),
        (
            {"mixer": {"name": "local", "arguments": {"window": float("inf")}}},
            "must be JSON values",
        ),
        (
            {"ffn": {"name": "mlp", "arguments": {"hidden": 10**30}}},
            "10000000000000000000… is larger than 2\\^53",
        ),
        ({"ffn": {"name": "mlp", "arguments": {"hidden": [[-(10**5000)]]}}}, "must be JSON values"),
        (
            {"mixer": {"name": "per_head", "arguments": {"patterns": [regard.Full()]}}},
            "must be JSON values",
        ),
    ],
)
def test_what_is_wrong_is_said(wrong, message):
    """Fails if a wrong key or value is taken, or the message does not help."""
    with pytest.raises(ValidationError, match=message):
        ModelConfig(**{"kind": "encoder", **USUAL, **wrong})


def test_changes_are_checked():
    """Fails if a changed copy skips the checks, or a copy that pydantic did not check is built."""
    assert (
        config().replace(mixer="fnet", dim=16) == config(mixer="fnet", dim=16)
        and config().replace() == config()
    )
    with pytest.raises(ValidationError, match="has no 'mixr': did you mean 'mixer'"):
        config().replace(mixr="fnet")
    with pytest.raises(ValidationError, match="mixer has 3 entries"):
        build(config().model_copy(update={"mixer": [module_spec("fnet")] * 3}))


def test_patches_fill_the_image():
    """Fails if a rest of an image is cut off in silence."""
    with pytest.raises(ValidationError, match="patch_size 3 does not divide the image size 4 × 6"):
        PatchInput(height=4, width=6, patch_size=3)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "decoder",
            {"mixer": ["vanilla", "fnet"]},
            "layer 1 of the decoder: fnet.* does not support causal=True",
        ),
        ("encoder", {"mixer": "retnet"}, "layer 0 of the encoder: retnet"),
        (
            "seq2seq",
            {"cross": module_spec("fnet")},
            "layer 0 of the decoder: fnet does not support cross-attention",
        ),
        (
            "seq2seq",
            {"mixer": "linformer"},
            "layer 0 of the decoder: linformer.* does not support causal=True",
        ),
    ],
)
def test_a_mixer_that_does_not_fit_is_refused_when_built(kind, more, message):
    """Fails if a mixer that cannot do its part is built in, or the reason is not given."""
    with pytest.raises(regard.Unsupported, match=message):
        build(config(kind, **more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mixer": "vanila"}, "no recipe 'vanila': did you mean 'vanilla'"),
        (
            {"mixer": module_spec("local", windw=3)},
            "local has no argument 'windw': did you mean 'window'",
        ),
        ({"mixer": module_spec("local", dim=3)}, "local: the model sets dim"),
        ({"mixer": module_spec("fnet", heads=0)}, "heads must be an integer >= 1"),
        (
            {"mixer": "linformer", "length": None, "position": "none"},
            "linformer needs a maximum length",
        ),
        ({"norm": "layr"}, "no norm 'layr': did you mean 'layer'"),
        (
            {"norm": module_spec("layer", epz=1.0)},
            "the norm 'layer' has no argument 'epz': did you mean 'eps'",
        ),
        (
            {"residual": module_spec("pre", norm="layer")},
            "the residual 'pre' has no argument 'norm'",
        ),
        (
            {"ffn": module_spec("mlp", activation="gellu")},
            "no activation 'gellu': did you mean 'gelu'",
        ),
        ({"ffn": module_spec("mpl")}, "no ffn 'mpl'"),
        (
            {"ffn": module_spec("mlp", activation=[1])},
            "cannot build the ffn 'mlp' from its arguments: ",
        ),
        ({"ffn": "switch"}, "the ffn 'switch' needs num_experts"),
        ({"position": "sinusoids"}, "no position 'sinusoids': did you mean 'sinusoid'"),
        ({"position": module_spec("none", base=3)}, "the position 'none' has no argument 'base'"),
        (
            {"position": "learned", "length": None},
            "position 'learned' needs length: set it in the configuration",
        ),
        ({"position": "complex"}, "'complex' replaces the token embeddings"),
        (
            {"position": module_spec("rope", bse=3)},
            "^rope takes no argument 'bse': did you mean 'base'",
        ),
        ({"position": "rope_2d"}, "'rope_2d' needs columns: it is for images"),
        ({"position": "sinusoid_2d"}, "'sinusoid_2d' needs columns: it is for images"),
        (
            {"head": {"kind": "sequence_classification", "num_classes": 2, "pooling": "men"}},
            "no pooling 'men': did you mean 'mean'",
        ),
        ({"heads": 3}, "must be divisible by heads"),
    ],
)
def test_wrong_words_are_said_when_built(more, message):
    """Fails if a word that no table has is taken, or the message does not help."""
    with pytest.raises((ValueError, TypeError), match=message):
        build(config(**more))


def test_recipes_are_told_what_they_need():
    """Fails if heads or a length are not handed on, or a recipe without heads is given some."""
    mixers = [
        module_spec("linformer", rank=3),
        module_spec("fnet"),
        module_spec("vanilla", heads=4),
        module_spec("linformer", rank=3, length=20),
    ]
    layers = build(config(mixer=mixers, layers=4)).backbone.stack.layers
    assert [layer.mixer.length for layer in layers] == [16, None, None, 20]
    assert layers[0].mixer.heads == 2 and layers[2].mixer.heads == 4
    image = build(
        config(
            input=PatchInput(height=4, width=4, patch_size=2),
            length=None,
            mixer=module_spec("linformer", rank=3),
        )
    )
    assert image.backbone.stack.length == 5


def test_turns_of_images_are_told_the_grid(rand):
    """Fails if positions within mixers do not know how many columns an image has."""
    image = PatchInput(height=4, width=6, patch_size=2, class_token=False)
    told = config(input=image, length=None, position="rope_2d", dim=16)
    given = told.replace(position=module_spec("rope_2d", columns=3))
    models_ = [build(c).double() for c in (told, given)]
    models_[1].load_state_dict(models_[0].state_dict())
    x = rand(1, 3, 4, 6)
    assert (models_[0](x) == models_[1](x)).all()
    with pytest.raises(ValueError, match="'rope_2d' needs columns"):
        build(told.replace(input=PatchInput(height=4, width=6, patch_size=2)))


def test_the_last_norm_stands_where_a_sum_is_left():
    """Fails if a stack of pre-norm layers ends without a norm, or one of post-norm layers with
    one."""
    assert (
        build(config(residual="pre")).backbone.norm is not None
        and build(config(residual="post")).backbone.norm is None
    )


def test_positions_are_told_the_sizes_they_take():
    """Fails if an argument of the configuration does not reach a position."""
    assert build_position(module_spec("sinusoid", base=100.0), dim=8, length=None).base == 100.0
    assert (
        build_position(
            module_spec("sinusoid_2d", columns=3), dim=8, length=None, columns=None
        ).columns
        == 3
    )
