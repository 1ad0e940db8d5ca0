"""Layers of a built model: what they hand on, where they alternate, what they draw and share."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

import regard
from regard import registry
from regard.errors import Unsupported
from regard.mixers.synthesizer import FactorisedRandomLogits, RandomLogits
from regard.models import (
    LMHeadConfig,
    ModelConfig,
    TokenInput,
    build,
    load,
    module_spec,
    save,
)
from regard.models.model import outer_mixers
from regard.registry import get_recipe
from regard.testing import check_recipe

RANDOM = {  # arguments of recipes whose default draws nothing
    "synthesizer_factorised": {"kind": "random"},
    "synthesizer_mixture": {"parts": ("random", "dense")},
}
# Recipes whose outputs are those of softmax attention by definition.
SAME_AS_VANILLA = {
    "vanilla": "it is softmax attention",
    "disagreement": "it adds a loss, and the outputs stay the same",
}


def config(mixer, kind=None, **changes):
    """Two layers of a recipe at the sizes of its example, over 24 tokens."""
    spec = module_spec(mixer) if isinstance(mixer, str) else mixer
    recipe = get_recipe(spec.name)
    left_out = ("length", "layer", "patterns", *spec.arguments)
    small = {key: value for key, value in recipe.example_kwargs.items() if key not in left_out}
    if kind is None:
        kind = "encoder" if False in recipe.causal_options() else "decoder"
    settings = {
        "input": TokenInput(vocab_size=11),
        "dim": 8,
        "heads": 2,
        "layers": 2,
        "length": 24,
        "mixer": module_spec(spec.name, **small, **spec.arguments),
    }
    return ModelConfig(kind=kind, **{**settings, **changes})


def build_model(changes, seed=0):
    """A model with weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(changes).eval()


def tokens(n=24, b=2):
    return torch.randint(0, 11, (b, n), generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------------- differs from vanilla
@pytest.mark.parametrize("name", regard.list_recipes())
def test_recipe_in_a_model(name):
    """With the weights of a softmax model, a model of another recipe gives other outputs, also of
    one layer; layers and seeds draw apart."""
    if name == "per_head":
        pytest.skip("its patterns are no JSON")
    check_recipe(
        name,
        same_as_softmax=name in SAME_AS_VANILLA,
        layers=(2,) if name == "realformer" else (1, 2),  # its first layer has no earlier scores
        **RANDOM.get(name, {}),
    )


def test_check_recipe_finds_faults(monkeypatch):
    """Fails if the check passes for softmax attention under another name, or for one seed in all
    layers."""
    with pytest.raises(AssertionError, match="disagreement in 1 layers is plain softmax"):
        check_recipe("disagreement")
    monkeypatch.setattr(registry, "derive_seed", lambda seed, *key: seed)
    with pytest.raises(AssertionError, match="two layers of performer draw the same"):
        check_recipe("performer")
    monkeypatch.setattr(registry, "derive_seed", lambda seed, *key: sum(key))
    with pytest.raises(AssertionError, match="another seed changes nothing in performer"):
        check_recipe("performer")


def test_realformer_brings_its_stack():
    """A model of `realformer` passes scores on, whether or not it names the stack; other stacks,
    other mixers beside it and cross-attention are refused."""
    left_out, named = config("realformer"), config("realformer", stack="realformer")
    assert torch.equal(build_model(left_out)(tokens()), build_model(named)(tokens()))
    both = config("realformer", kind="seq2seq", head=LMHeadConfig())
    sides = build(both)
    assert {type(side.stack).__name__ for side in (sides.encoder, sides.decoder)} == {
        "RealFormerStack"
    }
    for changes, message in (
        ({"stack": "sequential"}, "layer 0 of the encoder: realformer needs .* Leave stack out"),
        ({"stack": "shared"}, "needs the stack 'realformer'"),
        ({"stack": "reversible"}, "needs the stack 'realformer'"),
        ({"mixer": ["realformer", "vanilla"]}, "vanilla cannot pass on attention scores"),
        ({"kind": "seq2seq", "mixer": "vanilla", "cross": "realformer"}, "use cross='vanilla'"),
    ):
        with pytest.raises(Unsupported, match=message):
            build(left_out.replace(**changes))


# ------------------------------------------------------------------ layers and seeds draw apart
SEEDED = [name for name in regard.list_recipes() if "seed" in get_recipe(name).parameters]


def drawn(model):
    """What the mixers of the layers drew from their seeds: patterns, buffers, tables and seeds."""
    layers = []
    for layer in model.backbone.stack.layers:
        values = [repr(layer.mixer), *(buffer.tolist() for buffer in layer.mixer.buffers())]
        for module in layer.mixer.modules():
            values.append(vars(module).get("seed"))
            if isinstance(module, RandomLogits | FactorisedRandomLogits):
                values += [table.tolist() for table in module.parameters()]
        layers.append(repr(values))
    return layers


@pytest.mark.parametrize("name", SEEDED)
def test_layers_and_seeds_draw_apart(name, tmp_path):
    """Two layers draw differently, and so do two seeds; the same seed gives the same model, also
    after saving; an explicit seed is that of all layers."""
    options = RANDOM.get(name, {})
    changes = config(module_spec(name, **options), seed=1)
    model = build_model(changes)
    first = drawn(model)
    second = drawn(build_model(changes.replace(seed=2)))
    assert len({*first, *second}) == 4
    again, x = build_model(changes), tokens()
    assert drawn(again) == first and torch.equal(again(x), model(x))
    save(model, tmp_path)
    loaded = load(tmp_path)
    assert drawn(loaded) == first and torch.equal(loaded(x), model(x))
    own = build_model(config(module_spec(name, seed=5, **options), seed=1))
    assert len(set(drawn(own))) == 1


def test_experts_of_layers_draw_apart():
    """The noise of a router has another seed in each layer."""
    model = build(config("vanilla", ffn=module_spec("switch", hidden=8, num_experts=2)))
    assert len({layer.ffn.router.seed for layer in model.backbone.stack.layers}) == 2


# --------------------------------------------------------------------------------- layer numbers
def test_recipes_alternate_over_layers():
    """Layers take turns where a recipe says so, unless the arguments set the layer."""
    for kind in ("encoder", "decoder"):
        mixer = module_spec("memory_compressed", block=5)
        layers = build(config(mixer, kind, layers=4)).backbone.stack.layers
        kinds = [type(layer.mixer.inner).__name__ for layer in layers]
        assert kinds == ["SoftmaxAttention", "BlockCompressedAttention"] * 2
    for name, options in (("sparse_strided", {"split": "layers"}), ("swin", {"width": 6})):
        first, second = (
            layer.mixer.inner.pattern
            for layer in build(config(module_spec(name, **options))).backbone.stack.layers
        )
        assert first != second
    for changes, expected in (
        ({"layers": 1}, ["BlockCompressedAttention"]),
        ({"stack": "shared"}, ["BlockCompressedAttention"]),
        (
            {"layers": 4, "mixer": ["memory_compressed", "linear"]},
            ["SoftmaxAttention", "LinearAttention", "BlockCompressedAttention", "LinearAttention"],
        ),
    ):
        model = build(config("memory_compressed").replace(**changes))
        assert [type(mixer.inner).__name__ for mixer in outer_mixers(model)] == expected
    own = build(config(module_spec("memory_compressed", layer=1))).backbone.stack.layers
    assert {type(layer.mixer.inner).__name__ for layer in own} == {"BlockCompressedAttention"}


# ---------------------------------------------------------------------------------------- packed
@pytest.mark.parametrize("residual", ["pre", "post"])
def test_luna_passes_its_packed_sequence_on(residual):
    """P of a layer is the packed sequence of the layer before, with a residual as for tokens; every
    parameter is trained, and padding has no influence."""
    model = build_model(config("luna", layers=3, residual=residual))
    x, mask = tokens(), torch.arange(24) < torch.tensor([[24], [15]])
    stack = model.backbone.stack
    y = model.backbone.embed(x, mask)[0]
    p = stack.blocks[0].mixer.p.expand(2, -1, -1)
    for i, block in enumerate(stack.blocks):
        before, packed_before = (
            (block.mixer_residual.norm(y), stack.packed_residuals[i].norm(p))
            if residual == "pre"
            else (y, p)
        )
        mixed, packed = block.mixer.update(before, packed_before, mask=mask)
        y, p = y + mixed, p + packed
        if residual == "post":
            y = block.mixer_residual.norm(y)
            p = stack.packed_residuals[i].norm(p) if i < 2 else p
        fed = block.ffn(block.ffn_residual.prepare(y), mask)
        y = block.ffn_residual.add(y, fed)
    y = y if model.backbone.norm is None else model.backbone.norm(y)
    found = model(x, mask)
    torch.testing.assert_close(found[mask], y[mask])
    found.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    torch.testing.assert_close(model(x.masked_fill(~mask, 3), mask)[mask], found[mask])


def test_luna_saves_and_mixes_with_others(tmp_path):
    """A Luna model is saved as it is, layers of other mixers run in between, and a decoder, which
    has no packed sequence, uses a plain stack."""
    model = build_model(config("luna", layers=4).replace(mixer=["luna", "vanilla"]))
    save(model, tmp_path)
    assert torch.equal(load(tmp_path)(tokens()), model(tokens()))
    assert sum(name.endswith("mixer.p") for name, _ in model.named_parameters()) == 1
    assert type(build(config("luna", "decoder")).backbone.stack).__name__ == "SequentialStack"
    with pytest.raises(ValueError, match="use the mixer 'luna', not causal"):
        build(config("luna", "decoder", stack="luna"))


def test_linformer_shares_its_projection_over_layers(tmp_path):
    """With share="layers" all layers have one projection: trained by all, and saved once."""
    changes = config(module_spec("linformer", share="layers"), layers=3)
    model, x = build_model(changes), tokens()
    layers = [layer.mixer.inner for layer in model.backbone.stack.layers]
    (shared,) = {id(p) for layer in layers for p in layer.parameters()}
    parameter = next(p for p in model.parameters() if id(p) == shared)
    plain = build_model(config(module_spec("linformer", share="kv"), layers=3))
    count = sum(p.numel() for p in model.parameters())
    assert count == sum(p.numel() for p in plain.parameters()) - 2 * parameter.numel()
    before = model(x)
    before.square().sum().backward()
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    assert parameter.grad.any() and not torch.equal(model(x), before)
    save(model, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        sizes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    assert sizes.count(tuple(parameter.shape)) == 1
    loaded = load(tmp_path)
    assert torch.equal(loaded(x), model(x))
    assert len({id(layer.mixer.inner.compression.e) for layer in loaded.backbone.stack.layers}) == 1
