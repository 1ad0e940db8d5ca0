"""Models with any mixer: whole sequences, streams, padding, attention maps, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard
from regard import models
from regard.hf import weights
from regard.models import (
    LMHeadConfig,
    ModelConfig,
    PatchInput,
    TokenInput,
    VectorInput,
    build,
    heads,
    module_spec,
)
from regard.models.model import Decoder, Encoder, Seq2Seq
from regard.registry import get_recipe

LENGTH = 48
CAUSAL = [name for name in regard.list_recipes() if True in get_recipe(name).causal_options()]
PLAIN = [name for name in regard.list_recipes() if False in get_recipe(name).causal_options()]


def mixer(name):
    """Module spec of a recipe with small arguments, without length and patterns."""
    small = {
        key: value
        for key, value in get_recipe(name).example_kwargs.items()
        if key not in ("length", "patterns")
    }
    return module_spec(name, **small)


def second_layer(name):
    """Recipe for the layer after `name`: vanilla, unless all layers must be the same."""
    return name if get_recipe(name).example().requires_stack else "vanilla"


def small(kind, *names, **more):
    names = [mixer(name) if isinstance(name, str) else name for name in names]
    usual = {
        "input": TokenInput(vocab_size=11),
        "dim": 8,
        "heads": 2,
        "layers": len(names),
        "length": LENGTH,
        "mixer": names,
    }
    return ModelConfig(kind=kind, **{**usual, **more})


def build_model(config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config).double().eval()
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
    return model


def tokens(b=2, n=20, vocab_size=11, seed=0):
    return torch.randint(0, vocab_size, (b, n), generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------- any mixer
@pytest.mark.parametrize("name", CAUSAL)
def test_language_model_with_every_causal_mixer(name):
    """Logits do not depend on later tokens, nor on the chunks."""
    config = small("decoder", name, second_layer(name), head=LMHeadConfig())
    model, x = build_model(config), tokens()
    assert isinstance(model, Decoder)
    whole, other = model(x), x.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 11
    torch.testing.assert_close(model(other)[:, :12], whole[:, :12], rtol=0, atol=1e-12)
    assert not torch.allclose(model(other)[:, 12:], whole[:, 12:])
    if not model.backbone.stack.can.stream:
        with pytest.raises(regard.Unsupported, match="does not support streaming"):
            model.stream(x)
        return
    state, parts = None, []
    for chunk in x.split((1, 7, 1, 11), 1):
        y, state = model.stream(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("name", PLAIN)
def test_encoder_with_every_mixer(name):
    """Every mixer works in an encoder, and padding has no influence."""
    model, x = (
        build_model(
            small(
                "encoder",
                name,
                second_layer(name),
                head={"kind": "sequence_classification", "num_classes": 3, "pooling": "mean"},
            )
        ),
        tokens(),
    )
    assert isinstance(model, Encoder) and model(x).shape == (2, 3)
    mask = torch.arange(20).expand(2, 20) < torch.tensor([[20], [15]])
    if not model.backbone.stack.can.mask:
        with pytest.raises(regard.Unsupported, match="does not support mask"):
            model(x, mask)
        return
    other = x.masked_fill(~mask, -1)  # no token at all
    torch.testing.assert_close(model(other, mask), model(x, mask), rtol=0, atol=1e-12)
    if get_recipe(name).example().stack_name != "sequential":
        with pytest.raises(regard.Unsupported, match="no attention maps"):
            model.attention_maps(x, mask)
        return
    maps = model.attention_maps(x, mask)
    assert (
        len(maps) == 2
        and (maps[0] is not None) == model.backbone.stack.layers[0].mixer.can.maps
        and maps[1].shape == (2, 2, 20, 20)
    )


@pytest.mark.parametrize(
    "name", [name for name in regard.list_recipes(can=["cross"]) if name in PLAIN]
)
def test_cross_attention_with_every_mixer(name):
    """Mixers with cross-attention work in seq2seq models and read the source."""
    config = small("seq2seq", "vanilla", cross=mixer(name), head=LMHeadConfig())
    if get_recipe(name).example().requires_stack:
        with pytest.raises(regard.Unsupported, match="cross-attention passes nothing on"):
            build(config)
        return
    if not get_recipe(name).can().independent_queries:
        with pytest.raises(regard.Unsupported, match="cross-attention in a causal block"):
            build(config)
        return
    model, x, y = build_model(config), tokens(), tokens(n=7, seed=1)
    assert model(x, y).shape == (2, 7, 11)
    assert not torch.allclose(model(x, y), model((x + 1) % 11, y))


def test_hybrid_alternates_mixers():
    """A list of mixers has one per layer, or is repeated evenly."""
    model = build_model(small("encoder", "fnet", "vanilla", layers=4))
    assert [layer.mixer.name for layer in model.backbone.stack.layers] == [
        "fnet",
        "vanilla",
        "fnet",
        "vanilla",
    ]
    assert [m is None for m in model.attention_maps(tokens())] == [True, False, True, False]


# ------------------------------------------------------------------------------------------ oracles
def test_alternating_feed_forward_layers():
    """A list of feed-forward layers is repeated; an uneven list raises an error."""
    base = ModelConfig(
        kind="encoder", input=TokenInput(vocab_size=9), dim=8, heads=2, layers=4, length=8
    )
    model = build(base.replace(ffn=["glu", None]))
    kinds = [
        None if layer.ffn is None else type(layer.ffn).__name__
        for layer in model.backbone.stack.layers
    ]
    assert kinds == ["GLU", None, "GLU", None]
    assert base.replace(ffn="mlp") == base and base.replace(ffn=None).ffn == [None]
    assert ModelConfig.model_validate_json(
        base.replace(ffn=["glu", None]).model_dump_json()
    ) == base.replace(ffn=["glu", None])
    with pytest.raises(ValueError, match="ffn has 3 entries for 4 layers"):
        base.replace(ffn=["mlp", None, "glu"])
    with pytest.raises(ValueError, match="which is no multiple of"):
        build(base.replace(ffn=["mlp", "glu"], stack=module_spec("shared", blocks=1)))


def test_embedding_dim(rand):
    """Narrow embeddings are W norm(x + p) + b; weights that do not fit cannot be tied."""
    config = ModelConfig(
        kind="encoder",
        input=TokenInput(vocab_size=9, embedding_dim=6, norm=True),
        dim=8,
        heads=2,
        layers=1,
        length=8,
        head=LMHeadConfig(tie_weights=False),
    )
    embed = build(config).double().backbone.embed
    x = torch.tensor([[1, 4, 2]])
    narrow = nn.functional.layer_norm(
        embed.tokens.weight[x] + embed.position.table[:3], (6,), embed.norm.weight, embed.norm.bias
    )
    torch.testing.assert_close(embed(x)[0], narrow @ embed.project.weight.T + embed.project.bias)
    with pytest.raises(
        ValueError, match=r"the embedding table is \(9, 6\), the head needs \(9, 8\)"
    ):
        build(config.replace(head=LMHeadConfig()))


def test_class_attention(rand):
    """The class token comes first; without positions, patch order does not matter."""
    config = ModelConfig(
        kind="encoder",
        input=VectorInput(width=3),
        position="none",
        dim=8,
        heads=2,
        layers=2,
        stack=module_spec("class_attention", class_layers=2),
        head=models.SequenceClassificationHeadConfig(num_classes=3),
    )
    model, x, order = build(config).double().eval(), rand(2, 7, 3), torch.randperm(7)
    torch.testing.assert_close(model(x), model(x[:, order]))
    y, _ = model.backbone(x)
    assert y.shape == (2, 8, 8) and not torch.allclose(y[:, 0], y[:, 1])
    torch.testing.assert_close(model(x), model.head.out(y[:, 0]))
    with pytest.raises(regard.Unsupported, match="the mask would not cover the class token"):
        model(x, torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(regard.Unsupported, match="a class token joins after the last layer"):
        build(config.replace(kind="decoder"))


def test_reversible_concat(rand):
    """A reversible stack with concat=True returns both streams, with all gradients."""
    config = ModelConfig(
        kind="decoder",
        input=TokenInput(vocab_size=9),
        dim=8,
        heads=2,
        layers=2,
        length=8,
        stack=module_spec("reversible", concat=True),
        head=LMHeadConfig(tie_weights=False),
    )
    model, x = build(config).double(), torch.tensor([[1, 4, 2, 7]])
    a = b = model.backbone.embed(x)[0]
    for half in model.backbone.stack.sublayers:
        a, b = b, a + half(b)
    wanted = model.head(model.backbone.norm(torch.cat((a, b), -1)))
    torch.testing.assert_close(model(x), wanted)
    weight, table = rand(*wanted.shape), model.backbone.embed.tokens.weight
    found, (right,) = (
        torch.autograd.grad((model(x) * weight).sum(), table),
        torch.autograd.grad((wanted * weight).sum(), table),
    )
    torch.testing.assert_close(found[0], right)
    torch.testing.assert_close(model.stream(x)[0], wanted)


def test_conv_stem(rand):
    """The convolutional stem gives one vector per patch; other patch sizes are errors."""
    given = PatchInput(height=16, width=24, patch_size=8, class_token=False, stem="conv")
    config = ModelConfig(kind="encoder", input=given, dim=8, heads=2, layers=1)
    assert build(config)(torch.randn(2, 3, 16, 24)).shape == (2, 6, 8)
    with pytest.raises(ValueError, match=r"needs a patch_size that is a power of 2, not 6"):
        PatchInput(height=12, width=12, patch_size=6, stem="conv")
    with pytest.raises(ValueError, match="dim must be divisible by 4, not 6"):
        build(config.replace(dim=6))


def test_attention_map_of_a_layer():
    """The map of a layer is computed from the tokens that the layer gets."""
    model, x = build_model(small("encoder", "vanilla", "vanilla", residual="post")), tokens()
    mask = torch.arange(20).expand(2, 20) < 17
    seen = {}
    second = model.backbone.stack.layers[1].mixer
    second.q.register_forward_pre_hook(lambda module, given: seen.setdefault("x", given[0]))
    model(x, mask)
    q, k, _ = second.project(seen["x"], None)
    scores = (q @ k.transpose(2, 3) / math.sqrt(4)).masked_fill(~mask[:, None, None], -torch.inf)
    torch.testing.assert_close(model.attention_maps(x, mask)[1], scores.softmax(-1))


def test_attention_maps_in_training_change_nothing():
    """Fails if the maps of a model count as a training call, or depend on the mode."""
    model = build_model(small("encoder", "routing", "vanilla", dropout=0.5)).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    maps = model.attention_maps(tokens())
    after = model.state_dict()
    assert model.training and all(torch.equal(after[key], value) for key, value in before.items())
    assert all(map(torch.equal, maps, model.eval().attention_maps(tokens())))


def test_attention_maps_with_global_mask():
    """Attention maps respect the global_attention_mask."""
    model, x = build_model(small("encoder", module_spec("longformer", window=1))), tokens()
    global_attention_mask = torch.arange(20).expand(2, 20) == 9
    (plain,), (marked,) = (
        model.attention_maps(x),
        model.attention_maps(x, global_attention_mask=global_attention_mask),
    )
    assert not plain[:, :, 0, 9].any() and (marked[:, :, 0, 9] > 0).all()


def naive_mha(attend, x, memory, keep):
    """Attention with torch's weights, in a loop over examples and heads."""
    d, h = x.shape[-1], attend.num_heads
    w, bias = attend.in_proj_weight.split(d), attend.in_proj_bias.split(d)
    q, k, v = x @ w[0].T + bias[0], memory @ w[1].T + bias[1], memory @ w[2].T + bias[2]
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for i in range(h):
            at = slice(i * d // h, (i + 1) * d // h)
            scores = (q[b, :, at] @ k[b, :, at].T / math.sqrt(d // h)).masked_fill(
                ~keep[b], -torch.inf
            )
            out[b, :, at] = scores.softmax(-1) @ v[b, :, at]
    return out @ attend.out_proj.weight.T + attend.out_proj.bias


def test_seq2seq_matches_torch():
    """The encoder-decoder equals a naive one, and that torch's layers, with equal weights."""
    torch.manual_seed(0)
    dim, source, target = 8, tokens(n=9), tokens(n=6, seed=1)
    config = models.transformer(
        2, dim, 2, vocab_size=11, mixer=module_spec("vanilla", bias=True), dropout=0.0
    )
    model = build_model(config.replace(cross=module_spec("vanilla", bias=True)))
    options = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    encoders = [nn.TransformerEncoderLayer(dim, 2, **options).eval() for _ in range(2)]
    decoders = [nn.TransformerDecoderLayer(dim, 2, **options).eval() for _ in range(2)]
    for layer in (*encoders, *decoders):
        for p in layer.parameters():
            nn.init.normal_(p, std=0.4)
    table = torch.randn(11, dim, dtype=torch.float64)
    weights.load_weights(model, torch_weights(encoders, decoders, table), TORCH)
    mask = torch.arange(9).expand(2, 9) < torch.tensor([[9], [5]])
    waves = torch.tensor(
        [
            [f(i / 10000 ** (2 * j / dim)) for j in range(4) for f in (math.sin, math.cos)]
            for i in range(9)
        ]
    )
    x, y = (table[t] * math.sqrt(dim) + waves[: t.shape[1]].double() for t in (source, target))
    for layer in encoders:
        mixed = naive_mha(layer.self_attn, x, x, mask[:, None].expand(2, 9, 9))
        naive = layer.norm1(x + mixed)
        naive = layer.norm2(naive + layer.linear2(layer.linear1(naive).relu()))
        x = layer(x, src_key_padding_mask=~mask)
        torch.testing.assert_close(naive[mask], x[mask])
        x = naive
    ahead = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for layer in decoders:
        y = layer(y, x, tgt_mask=ahead, memory_key_padding_mask=~mask)
    torch.testing.assert_close(model(source, target, mask=mask), y @ table.T)
    encoder, decoder, across = model.attention_maps(source, target, mask=mask)
    assert [m.shape[2:] for m in (*encoder, *decoder, *across)] == [(9, 9)] * 2 + [(6, 6)] * 2 + [
        (6, 9)
    ] * 2
    assert across[0][1, :, :, 5:].max() == 0 and decoder[1].triu(1).max() == 0
    assert (
        model.encoder.embed is model.decoder.embed
        and model.head.proj.weight is model.encoder.embed.tokens.weight
    )


def three(t):
    return tuple(t.chunk(3))


def _layer(side, ours, theirs, number):
    attend = [
        row
        for name, mine in theirs.items()
        for kind in ("weight", "bias")
        for row in (
            weights.WeightRule(
                (f"{side}.{{i}}.{name}.in_proj_{kind}",),
                tuple(f"{ours}.{mine}.{p}.{kind}" for p in "qkv"),
                three,
            ),
            weights.rule(f"{side}.{{i}}.{name}.out_proj.{kind}", f"{ours}.{mine}.out.{kind}"),
        )
    ]
    around = (
        ["mixer_residual", "ffn_residual"]
        if number == 2
        else ["mixer_residual", "cross_residual", "ffn_residual"]
    )
    norms = [
        weights.weight_bias_rules(f"{side}.{{i}}.norm{i + 1}", f"{ours}.{name}.norm")
        for i, name in enumerate(around)
    ]
    feed = [
        weights.weight_bias_rules(f"{side}.{{i}}.linear{i + 1}", f"{ours}.ffn.{name}")
        for i, name in enumerate(("up", "down"))
    ]
    return [*attend, *sum(norms, ()), *sum(feed, ())]


TORCH = weights.WeightMap(
    rules=(
        weights.rule("table", "encoder.embed.tokens.weight"),
        *_layer("encoder", "encoder.stack.layers.{i}", {"self_attn": "mixer"}, 2),
        *_layer(
            "decoder",
            "decoder.stack.layers.{i}",
            {"self_attn": "mixer", "multihead_attn": "cross"},
            3,
        ),
    )
)


def torch_weights(encoders, decoders, table):
    sides = {"encoder": encoders, "decoder": decoders}
    every = [
        (f"{side}.{i}", layer) for side, layers in sides.items() for i, layer in enumerate(layers)
    ]
    return {
        "table": table,
        **{f"{at}.{name}": p for at, layer in every for name, p in layer.state_dict().items()},
    }


@pytest.mark.parametrize("name", heads.POOLINGS)
def test_pooling(name, rand):
    """Pooling equals its loop, and masked tokens, even NaN, have no influence."""
    torch.manual_seed(0)
    x, mask = (
        rand(4, 5, 6),
        torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool(),
    )
    pool = heads.build_pooling(name, 6, 2).double()
    got = pool(x.masked_fill(~mask[..., None], torch.nan), mask)
    assert (got[3] == 0).all() and got.isfinite().all()
    for b in range(3):
        real = [x[b, i] for i in range(5) if mask[b, i]]
        want = {
            "cls": lambda real: real[0],
            "last": lambda real: real[-1],
            "mean": lambda real: sum(real) / len(real),
            "max": lambda real: torch.stack([max(r[c] for r in real) for c in range(6)]),
            "attention": lambda real: weighted(real, pool.score.weight[0]),
            "pma": lambda real: pool(
                torch.stack(real)[None], torch.ones(1, len(real), dtype=torch.bool)
            )[0],
        }[name](real)
        torch.testing.assert_close(got[b], want)


def weighted(real, w):
    each = [(r @ w).exp() for r in real]
    return sum(e * r for e, r in zip(each, real, strict=True)) / sum(each)


def test_patch_embedding(rand):
    """Patches, the class token and 2D positions are in the expected order."""
    spec = PatchInput(height=4, width=6, patch_size=2, channels=3)
    config = ModelConfig(
        kind="encoder", input=spec, dim=8, heads=2, layers=1, position="sinusoid_2d"
    )
    embed, images = build_model(config).backbone.embed, rand(2, 3, 4, 6)
    got, mask = embed(images, torch.tensor([[True] * 6, [True] * 5 + [False]]))
    assert got.shape == (2, 7, 8) and mask.tolist()[1] == [True] * 6 + [False]
    torch.testing.assert_close(got[:, 0], embed.class_token.expand(2, -1))
    weight = embed.project.weight.flatten(1)
    for row in range(2):
        for column in range(3):
            patch = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1)
            place = [
                f(at / 10000 ** (2 * j / 4))
                for at in (row, column)
                for j in range(2)
                for f in (math.sin, math.cos)
            ]
            want = patch @ weight.T + embed.project.bias + torch.tensor(place, dtype=torch.float64)
            torch.testing.assert_close(got[:, 1 + 3 * row + column], want)


def test_set_input_is_permutation_invariant(rand):
    """The order of a set does not change the output."""
    config = ModelConfig(
        kind="encoder",
        input=VectorInput(width=3),
        dim=8,
        heads=2,
        layers=2,
        mixer="isab",
        position="none",
        residual="post",
        head={"kind": "regression", "pooling": "pma"},
    )
    model, x, order = build_model(config), rand(2, 9, 3), torch.randperm(9)
    mask = torch.arange(9).expand(2, 9) < torch.tensor([[9], [6]])
    torch.testing.assert_close(model(x[:, order], mask[:, order]), model(x, mask))


def test_sum_of_embeddings(rand):
    """Embeddings are norm(tokens √d + type + position)."""
    model = build_model(
        small(
            "encoder",
            "vanilla",
            input=TokenInput(vocab_size=11, type_vocab_size=2, scale_embeddings=True, norm=True),
        )
    )
    embed, x, types = model.backbone.embed, tokens(n=4), torch.tensor([[0, 1, 1, 0]] * 2)
    got, _ = embed(x, token_type_ids=types, start=3)
    for b in range(2):
        for i in range(4):
            y = (
                embed.tokens.weight[x[b, i]] * math.sqrt(8)
                + embed.token_types.weight[types[b, i]]
                + embed.position.table[3 + i]
            )
            y = (y - y.mean()) / (
                y.var(unbiased=False) + 1e-5
            ).sqrt() * embed.norm.weight + embed.norm.bias
            torch.testing.assert_close(got[b, i], y)
    torch.testing.assert_close(embed(x)[0], embed(x, token_type_ids=torch.zeros_like(x))[0])


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (None, (2, 20, 8)),
        ({"kind": "lm", "tie_weights": False, "bias": True}, (2, 20, 11)),
        ({"kind": "masked_lm"}, (2, 20, 11)),
        ({"kind": "sequence_classification", "num_classes": 3, "hidden_layer": True}, (2, 3)),
        ({"kind": "token_classification", "num_classes": 4}, (2, 20, 4)),
        ({"kind": "regression", "num_outputs": 2}, (2, 2)),
        ({"kind": "regression", "pooling": "none"}, (2, 20, 1)),
        ({"kind": "pooling", "pooling": "max", "normalize": True}, (2, 8)),
    ],
)
def test_heads(head, shape):
    """Heads have the expected output shapes, and all parameters get gradients."""
    model = build_model(small("encoder", "vanilla", head=head))
    y = model(tokens())
    assert y.shape == shape
    (y * torch.randn(shape, dtype=y.dtype)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p.dim())


def test_dropout_only_in_training():
    """Dropout is active in training and not in evaluation."""
    model, x = build_model(small("encoder", "vanilla", dropout=0.5)), tokens()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_vector_input_streams(rand):
    """A decoder over vectors streams; pooling heads cannot."""
    config = small(
        "decoder",
        "vanilla",
        "retnet",
        input=VectorInput(width=3),
        head={"kind": "regression", "pooling": "none"},
    )
    model, x = build_model(config), rand(2, 9, 3)
    first, state = model.stream(x[:, :5])
    torch.testing.assert_close(torch.cat((first, model.stream(x[:, 5:], state)[0]), 1), model(x))
    for head in (
        {"kind": "sequence_classification", "num_classes": 2, "pooling": "last"},
        {"kind": "pooling"},
    ):
        with pytest.raises(regard.Unsupported, match="gives one output per sequence"):
            build_model(config.replace(head=head)).stream(x)


def test_embeddings_compile_and_models_run_on_the_meta_device():
    """Token checks do not break a graph, and models run without values."""
    model, x = build_model(small("decoder", "vanilla", head=LMHeadConfig())), tokens()
    graph = torch.compile(model.backbone.embed, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(x)[0], model.backbone.embed(x)[0])
    with torch.device("meta"):
        ghost = build(small("decoder", "vanilla", head=LMHeadConfig()))
    assert models.next_token_loss(ghost(x.to("meta")), x.to("meta")).shape == ()


# ------------------------------------------------------------------------------------------- losses
def test_losses_match_loops(rand):
    """Losses equal loops, with ignored targets and smoothing; without targets they are zero."""
    logits, targets = (
        rand(2, 5, 4).requires_grad_(),
        torch.tensor([[0, 3, -100, 1, 2], [-100, 1, 1, -100, 0]]),
    )
    for label_smoothing in (0.0, 0.2):
        total, counted = 0.0, 0
        for b in range(2):
            for i in range(5):
                if targets[b, i] != -100:
                    logs = logits[b, i].log_softmax(-1)
                    total = (
                        total
                        - (1 - label_smoothing) * logs[targets[b, i]]
                        - label_smoothing * logs.mean()
                    )
                    counted += 1
        got = models.cross_entropy_loss(logits, targets, label_smoothing=label_smoothing)
        torch.testing.assert_close(got, total / counted)
        torch.testing.assert_close(
            torch.autograd.grad(got, logits), torch.autograd.grad(total / counted, logits)
        )
    assert models.cross_entropy_loss(logits, torch.full((2, 5), -100)) == 0
    torch.testing.assert_close(
        models.cross_entropy_loss(logits[:, 0], targets[:, 1]),
        models.cross_entropy_loss(logits[:, :1], targets[:, 1:2]),
    )


def test_next_token_loss_skips_padding(rand):
    """Masked tokens are neither targets nor predict one."""
    logits, x = rand(2, 5, 4), tokens(n=5, vocab_size=4)
    mask = torch.tensor([[True] * 5, [False, False, True, True, False]])
    pairs = [(0, i, i + 1) for i in range(4)] + [(1, 2, 3)]
    want = sum(-logits[b, i].log_softmax(-1)[x[b, j]] for b, i, j in pairs) / len(pairs)
    torch.testing.assert_close(models.next_token_loss(logits, x.masked_fill(~mask, 99), mask), want)
    assert models.next_token_loss(logits[:, :1], x[:, :1]) == 0


def test_mse_loss(rand):
    """Masked values, even NaN, do not count."""
    y, target, mask = (
        rand(2, 3, 2),
        rand(2, 3, 2),
        torch.tensor([[True, True, False], [False, False, False]]),
    )
    want = ((y[0, :2] - target[0, :2]) ** 2).mean()
    torch.testing.assert_close(
        models.mse_loss(y, target.masked_fill(~mask[..., None], torch.nan), mask), want
    )
    torch.testing.assert_close(models.mse_loss(y, target), ((y - target) ** 2).mean())
    with pytest.raises(ValueError, match=r"outputs \(2, 3, 2\) do not match targets \(2, 3\)"):
        models.mse_loss(y, target[..., 0])


def test_mlm_masking():
    """Fractions of masked, random and unchanged tokens, special tokens and targets are right."""
    x = tokens(100, 200, vocab_size=50)
    may = torch.arange(200).expand(100, 200) % 4 != 0
    read, targets = models.mask_tokens(
        x, 50, mask_token_id=7, seed=0, mask=may, mlm_probability=0.2
    )
    chosen = targets != models.IGNORE_INDEX
    assert (
        not (chosen & ~may).any()
        and torch.equal(targets[chosen], x[chosen])
        and torch.equal(read[~chosen], x[~chosen])
    )
    count, was = chosen.sum().item(), read[chosen]
    hidden, kept = (was == 7).sum().item(), (was == x[chosen]).sum().item()
    assert abs(count / may.sum().item() - 0.2) < 0.015
    assert (
        abs(hidden / count - (0.8 + 0.1 / 50 + 0.1 / 50)) < 0.03
        and abs(kept / count - (0.1 + 0.8 / 50 + 0.1 / 50)) < 0.03
    )
    again = models.mask_tokens(x, 50, mask_token_id=7, seed=0, mask=may, mlm_probability=0.2)
    assert torch.equal(again[0], read) and not torch.equal(
        models.mask_tokens(x, 50, mask_token_id=7, seed=1, mask=may, mlm_probability=0.2)[0], read
    )
    with pytest.raises(ValueError, match=r"mask_token_id must be below 50, not 50"):
        models.mask_tokens(x, 50, mask_token_id=50, seed=0, mlm_probability=0.2)


def test_language_model_learns():
    """A small model learns a rule: each token is the previous one plus one."""
    torch.manual_seed(0)
    model = build(small("decoder", "local", "vanilla", head=LMHeadConfig(), dim=16))
    step = torch.optim.Adam(model.parameters(), 1e-2)
    for i in range(60):
        x = (tokens(16, 1, seed=i) + torch.arange(12)) % 11
        loss = models.next_token_loss(model(x), x)
        step.zero_grad()
        loss.backward()
        step.step()
    assert loss < 0.1


# ---------------------------------------------------------------------------------------- bad input
def test_invalid_tokens():
    """Invalid tokens and other kinds of input raise a clear error."""
    model, x = build_model(small("decoder", "vanilla", head=LMHeadConfig())), tokens()
    with pytest.raises(
        ValueError, match=r"token id 11 at position 3 of sequence 1 is not in 0\.\.10"
    ):
        model(x.index_put((torch.tensor(1), torch.tensor(3)), torch.tensor(11)))
    with pytest.raises(ValueError, match="token id -1 at position 0 of sequence 0"):
        model.stream(x - x - 1)
    with pytest.raises(ValueError, match="token ids must be int64 or int32"):
        model(x.double())
    with pytest.raises(ValueError, match="token ids must be int64 or int32"):
        model(x[0])
    with pytest.raises(ValueError, match="the model has no token types"):
        model(x, token_type_ids=x)
    with pytest.raises(TypeError, match="mask must be a bool tensor"):
        model(x, torch.ones(2, 20))
    typed = build_model(
        small("encoder", "vanilla", input=TokenInput(vocab_size=11, type_vocab_size=2))
    )
    with pytest.raises(ValueError, match="token type id 5 at position 0"):
        typed(x, token_type_ids=torch.full_like(x, 5))
    with pytest.raises(ValueError, match="token_type_ids must have the shape"):
        typed(x, token_type_ids=x[:, :3])


def test_invalid_vectors_and_images(rand):
    """Inputs of another shape raise a clear error."""
    vectors = build_model(small("encoder", "vanilla", input=VectorInput(width=3)))
    with pytest.raises(ValueError, match=r"shape \(b, n, 3\), not \(2, 5, 4\)"):
        vectors(rand(2, 5, 4))
    with pytest.raises(ValueError, match="token_type_ids are for models that read token ids"):
        vectors(rand(2, 5, 3), token_type_ids=tokens(n=5))
    images = build_model(models.vit(1, 8, 2, image_size=8, patch_size=4))
    with pytest.raises(ValueError, match=r"of shape \(b, 3, 8, 8\), not \(2, 3, 8, 12\)"):
        images(rand(2, 3, 8, 12))
    config = small(
        "decoder",
        "vanilla",
        input=PatchInput(height=4, width=4, patch_size=2, class_token=False),
        length=None,
    )
    decoder = build_model(config)
    _, state = decoder.stream(rand(1, 3, 4, 4))
    with pytest.raises(ValueError, match="an image cannot be streamed"):
        decoder.stream(rand(1, 3, 4, 4), state)


def test_too_long_input():
    """Inputs beyond the mixer's length or the positions are errors, also in a stream."""
    fixed = build_model(small("decoder", "bigbird", position="sinusoid", head=LMHeadConfig()))
    with pytest.raises(
        ValueError,
        match=f"Input has {LENGTH + 1} tokens but the mixer was built with length={LENGTH}",
    ):
        fixed(tokens(n=LENGTH + 1))
    _, state = fixed.stream(tokens(n=LENGTH))
    with pytest.raises(
        ValueError,
        match=f"the stream has {LENGTH + 1} tokens, but the mixer was built with length={LENGTH}",
    ):
        fixed.stream(tokens(n=1), state)

    learned = build_model(small("decoder", "vanilla", head=LMHeadConfig()))
    too_far = (
        f"reaches position {LENGTH} but the embedding was built for positions 0 to {LENGTH - 1}"
    )
    with pytest.raises(ValueError, match=too_far):
        learned(tokens(n=LENGTH + 1))
    _, state = learned.stream(tokens(n=LENGTH))
    with pytest.raises(ValueError, match=too_far):
        learned.stream(tokens(n=1), state)


def test_empty_input():
    """Empty inputs are valid, except for pooling."""
    model = build_model(small("decoder", "vanilla", "linear", head=LMHeadConfig()))
    assert model(tokens(n=0)).shape == (2, 0, 11) and model(tokens(b=0)).shape == (0, 20, 11)
    y, state = model.stream(tokens(n=0))
    assert y.shape == (2, 0, 11)
    torch.testing.assert_close(model.stream(tokens(), state)[0], model(tokens()))
    with pytest.raises(ValueError, match="cannot pool an empty sequence"):
        build_model(
            small("encoder", "vanilla", head={"kind": "sequence_classification", "num_classes": 2})
        )(tokens(n=0))
    both = build_model(small("seq2seq", "vanilla", head=LMHeadConfig()))
    with pytest.raises(ValueError, match="context has no tokens"):
        both(tokens(n=0), tokens(n=3))


def test_invalid_targets(rand):
    """Targets outside of the classes raise a clear error."""
    with pytest.raises(ValueError, match=r"target 4 is not in 0\.\.3, nor ignore_index -100"):
        models.cross_entropy_loss(rand(2, 4), torch.tensor([0, 4]))
    with pytest.raises(
        ValueError, match=r"logits \(2, 4\) need targets of shape \(2,\), not \(3,\)"
    ):
        models.cross_entropy_loss(rand(2, 4), torch.tensor([0, 1, 2]))


def test_manually_built_models_are_checked():
    """Decoders of non-causal layers, and tied weights of other shapes, raise an error."""
    backbone = build_model(small("encoder", "vanilla")).backbone
    with pytest.raises(regard.Unsupported, match="a decoder needs causal layers"):
        Decoder(backbone)
    with pytest.raises(regard.Unsupported, match="a decoder needs causal layers"):
        Seq2Seq(backbone, backbone)
    with pytest.raises(
        ValueError, match=r"the embedding table is \(11, 8\), the head needs \(12, 8\)"
    ):
        heads.LMHead(8, 12, weight=backbone.embed.tokens.weight)
    assert Encoder(backbone).config is None
