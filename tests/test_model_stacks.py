"""Stacks in model configurations: whole sequences, streams, files, and errors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard
from regard import models
from regard.models import (
    EncoderConfig,
    LMHeadConfig,
    ModelConfig,
    TokenInput,
    build,
    generate,
    load,
    module_spec,
    save,
)
from regard.models.stacks import STACKS
from regard.registry import get_recipe
from regard.residual import DeepNorm
from regard.stack import CompressiveMemory, ReversibleStack, SegmentStack

SEGMENTS = {"segment_length": 5, "memory_length": 4}
ARGUMENTS = {
    "shared": {"blocks": 2, "order": "cycle"},
    "universal": {"halting": True},
    "segments": SEGMENTS,
    "compressive": {
        "segment_length": 4,
        "memory_length": 4,
        "compressed_length": 3,
        "compression_rate": 2,
    },
    "funnel": {"block_sizes": [1, 2]},
}
MIXERS = {"universal": "vanilla", "realformer": "realformer", "luna": "luna"}
READERS = ("funnel", "class_attention", "luna")  # encoders only
STREAMS = [name for name in STACKS if name not in READERS]


def config(stack, kind="decoder", **more):
    usual = {
        "input": TokenInput(vocab_size=11),
        "dim": 8,
        "heads": 2,
        "layers": 4,
        "length": 32,
        "mixer": MIXERS.get(stack, ["vanilla", "vanilla"]),
        "stack": module_spec(stack, **ARGUMENTS.get(stack, {})),
    }
    return ModelConfig(kind=kind, **{**usual, **more})


def build_model(changes):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(changes).double().eval()
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
    return model


def tokens(n=13, b=2):
    return torch.randint(0, 11, (b, n), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", STREAMS)
def test_decoders_stream_and_generate(name):
    """Decoders are causal, stream as they run whole, and generate."""
    model, x = build_model(config(name, head=LMHeadConfig())), tokens()
    whole, parts, state = model(x), [], None
    for chunk in (x[:, :3], x[:, 3:4], x[:, 4:11], x[:, 11:]):
        y, state = model.stream(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)
    other = x.clone()
    other[:, 9:] = (x[:, 9:] + 1) % 11
    torch.testing.assert_close(model(other)[:, :9], whole[:, :9], rtol=0, atol=1e-12)
    (found,) = generate(model.stream, [x[0].tolist()], max_new_tokens=2)
    assert found.tokens[0] == whole[0, -1].argmax()


@pytest.mark.parametrize(
    "name", ["sequential", "shared", "universal", "reversible", "funnel", "realformer", "luna"]
)
def test_encoders_ignore_padding(name):
    """Padding does not change real tokens."""
    model, x, mask = (
        build_model(config(name, "encoder")),
        tokens(12),
        torch.arange(12) < torch.tensor([[12], [7]]),
    )
    other = x.masked_fill(~mask, 3)
    torch.testing.assert_close(model(x, mask)[mask], model(other, mask)[mask], rtol=0, atol=1e-12)
    torch.testing.assert_close(model(x[1:, :7]), model(x, mask)[1:, :7], rtol=0, atol=1e-10)


@pytest.mark.parametrize("stack", ["sequential", "shared", "universal", "reversible", "funnel"])
@pytest.mark.parametrize("name", ["nystrom", "clustered", "clustered_improved", "prob_sparse"])
def test_padding_where_queries_influence_each_other(name, stack):
    """Padded is the same as cut, also where queries are pooled and keys are not."""
    mixer = module_spec(name, **get_recipe(name).example_kwargs)
    model, x = build_model(config(stack, "encoder", mixer=mixer)), tokens(30)
    for real in (5, 19):
        mask = torch.arange(30).expand(2, 30) < real
        torch.testing.assert_close(model(x, mask)[:, :real], model(x[:, :real]))


@pytest.mark.parametrize("name", STACKS)
def test_save_and_load(name, tmp_path):
    """The stack is saved, and shared layers are shared after loading."""
    kind = "encoder" if name in READERS else "decoder"
    model = build_model(config(name, kind))
    save(model, tmp_path)
    again, x = load(tmp_path), tokens()
    assert again.config == model.config and torch.equal(again(x), model(x))
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in model.parameters())
    assert type(again.backbone.stack) is type(model.backbone.stack)


def test_arguments_reach_the_stack():
    """Arguments of the configuration reach the stack."""
    found = {
        name: build(config(name, "encoder" if name in READERS else "decoder")).backbone.stack
        for name in STACKS
    }
    assert (
        found["shared"].order == (0, 1, 0, 1)
        and found["universal"].steps == 4
        and found["universal"].halting is not None
    )
    assert (
        isinstance(found["segments"], SegmentStack)
        and [m.size for m in found["segments"].memories] == [4] * 4
    )
    assert (
        isinstance(found["compressive"].memories[0], CompressiveMemory)
        and found["compressive"].memories[0].compressed_length == 3
    )
    assert (
        len(found["class_attention"].layers) == 4
        and len(found["class_attention"].class_layers) == 2
    )
    assert [len(group) for group in found["funnel"].groups] == [1, 2] and len(
        found["funnel"].decoder
    ) == 1
    assert (
        isinstance(found["reversible"], ReversibleStack) and len(found["reversible"].sublayers) == 8
    )
    assert build(config("reversible")).backbone.norm is not None  # its output is not normalised


@pytest.mark.parametrize("name", regard.list_recipes())
def test_any_mixer_in_repeating_stacks(name):
    """Every mixer works in stacks that only call it, except those that must hand something on."""
    small = {
        key: value
        for key, value in get_recipe(name).example_kwargs.items()
        if key not in ("length", "patterns")
    }
    kind = "decoder" if True in get_recipe(name).causal_options() else "encoder"
    for stack, more in (
        ("sequential", {}),
        ("shared", {}),
        ("universal", {"halting": True}),
        ("reversible", {}),
    ):
        changes = config("plain", kind, layers=2, mixer=module_spec(name, **small)).replace(
            stack=module_spec(stack, **more)
        )
        if name == "realformer":
            with pytest.raises(regard.Unsupported, match="needs the stack 'realformer'"):
                build(changes)
            continue
        model = build_model(changes)
        y = model(tokens(16))
        assert y.isfinite().all() and y.std() > 0.01
        if kind == "decoder" and model.backbone.stack.can.stream:
            first, state = model.stream(tokens(16)[:, :7])
            both = torch.cat((first, model.stream(tokens(16)[:, 7:], state)[0]), 1)
            torch.testing.assert_close(both, y, rtol=0, atol=1e-8)


def test_encoder_stack_of_seq2seq():
    """The encoder has the stack of the decoder unless it has its own."""
    both = config("shared", "seq2seq", head=LMHeadConfig())
    assert [type(side.stack).__name__ for side in (build(both).encoder, build(both).decoder)] == [
        "SharedStack",
        "SharedStack",
    ]
    own = config(
        "segments",
        "seq2seq",
        head=LMHeadConfig(),
        encoder=EncoderConfig(layers=2, mixer=[module_spec("vanilla")]),
    )
    model, x = build_model(own), tokens()
    assert [type(side.stack).__name__ for side in (model.encoder, model.decoder)] == [
        "SequentialStack",
        "SegmentStack",
    ]
    step = model.decoding_step(x)
    first, state = step(x[:, :6], None)
    torch.testing.assert_close(
        torch.cat((first, step(x[:, 6:], state)[0]), 1), model(x, x), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stack": "recurrent"},
            "no stack 'recurrent': choose from class_attention, compressive",
        ),
        (
            {"stack": module_spec("segments", segment=3)},
            "the stack 'segments' has no argument 'segment': did you mean 'segment_length'",
        ),
        ({"stack": "segments"}, "the stack 'segments' needs segment_length"),
        (
            {"stack": module_spec("segments", segment_length=3)},
            "needs a memory: set it, as in memory=128",
        ),
        (
            {"stack": module_spec("shared", blocks=3)},
            "the stack has 3 blocks, which is no multiple of the 2 mixers",
        ),
        ({"stack": module_spec("shared", blocks=8)}, "depth must be an integer >= 8, not 4"),
        ({"stack": "universal"}, "the stack has 1 blocks, which is no multiple of the 2 mixers"),
        (
            {"stack": module_spec("universal", loss_weight=0.5), "mixer": "vanilla"},
            "need halting=true",
        ),
        (
            {"stack": "reversible", "residual": "post"},
            "a reversible stack has its own pre-norm residuals",
        ),
        ({"stack": "realformer"}, "vanilla cannot pass on attention scores"),
        (
            {"stack": "realformer", "mixer": "realformer", "kind": "seq2seq", "residual": "postt"},
            "no residual 'postt'",
        ),
        (
            {"stack": module_spec("funnel", block_sizes=[3, 2]), "kind": "encoder"},
            "block_sizes need 5 layers, but the model has 4",
        ),
        (
            {"stack": module_spec("funnel", block_sizes=3), "kind": "encoder"},
            "block_sizes must be a list",
        ),
        (
            {"stack": module_spec("funnel", block_sizes=[2, 2], pool_q_only=False)},
            "a decoder needs a causal stack",
        ),
        ({"stack": module_spec("segments", **SEGMENTS), "kind": "encoder"}, "causal"),
        (
            {"stack": module_spec("compressive", **ARGUMENTS["compressive"], loss="none?")},
            "loss must be",
        ),
    ],
)
def test_invalid_configurations(changes, message):
    """Invalid stacks raise an error with a helpful message."""
    with pytest.raises((ValueError, TypeError), match=message):
        build(config("sequential").replace(**changes))


@pytest.mark.parametrize("name", STREAMS)
def test_streams_under_autocast(name):
    """Fails if a stack caches a dtype in which it cannot continue under autocast."""
    model, x = build_model(config(name)).float(), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, state = model.stream(x[:, :5])
        y, _ = model.stream(x[:, 5:6], state)
    assert y.shape[:2] == (len(x), 1) and y.isfinite().all()


def test_attention_maps():
    """Stacks that do not call their mixers raise an error instead of omitting maps."""
    x = tokens()
    assert (
        len(build_model(config("universal")).attention_maps(x)) <= 4
        and len(build_model(config("shared")).attention_maps(x)) == 4
    )
    for name in ("segments", "feedback", "realformer"):
        with pytest.raises(regard.Unsupported, match="it has no attention maps"):
            build_model(config(name)).attention_maps(x)


# ----------------------------------------------------------------------------------------- DeepNorm
def spread(linear):
    """Standard deviation relative to Xavier initialisation: the gain."""
    return (linear.weight.std() / (2 / sum(linear.weight.shape)) ** 0.5).item()


def test_deepnorm_initialisation():
    """Models with DeepNorm have its gains; seq2seq models have those of both stacks."""
    torch.manual_seed(0)
    alone = build(
        models.gpt(4, 64, 4, vocab_size=11, length=8).replace(residual="deepnorm")
    ).backbone.stack.layers[2]
    assert spread(alone.mixer.v) == pytest.approx(32**-0.25, rel=0.05) and spread(
        alone.mixer.q
    ) == pytest.approx(1, rel=0.05)
    assert (
        spread(alone.ffn.up) == pytest.approx(32**-0.25, rel=0.05) and not alone.mixer.v.bias.any()
    )
    assert alone.ffn_residual.alpha == pytest.approx(8**0.25)
    deep = models.transformer(3, 64, 4, vocab_size=11).replace(
        residual="deepnorm", encoder=EncoderConfig(layers=6, mixer=[module_spec("vanilla")])
    )
    model = build(deep)
    both = (6**4 * 3) ** (1 / 16)
    for side, alpha, beta in (
        (model.encoder, 0.81 * both, 0.87 / both),
        (model.decoder, 9**0.25, 36**-0.25),
    ):
        layer = side.stack.layers[1]
        alphas = {r.alpha for r in side.modules() if isinstance(r, DeepNorm)}
        assert len(alphas) == 1 and alphas.pop() == pytest.approx(alpha)
        assert (
            spread(layer.mixer.out)
            == pytest.approx(beta, rel=0.05)
            == pytest.approx(spread(layer.ffn.down), rel=0.05)
        )
    assert spread(model.decoder.stack.layers[0].cross.v) == pytest.approx(36**-0.25, rel=0.05)
    assert (
        build(deep.replace(residual=module_spec("deepnorm", alpha=2.0)))
        .decoder.stack.layers[0]
        .mixer_residual.alpha
        == 2.0
    )
    with pytest.raises(
        regard.Unsupported,
        match="fnet does not support deepnorm: it has no value or output projection",
    ):
        build(models.bert(2, 8, 2, mixer="fnet").replace(residual="deepnorm"))
