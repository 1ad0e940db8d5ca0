"""Attention functions in transformers models, compared with `eager` and with explicit masks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from transformers import DynamicCache, StaticCache  # noqa: E402

import hf_models as small  # noqa: E402
import regard.hf  # noqa: E402, F401
from regard import Unsupported  # noqa: E402

transformers.logging.set_verbosity_error()
CLOSE = {"atol": 3e-6, "rtol": 1e-5}


def result(out: object) -> Tensor:
    """The tensor that matters."""
    for name in ("logits", "logits_per_text", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    raise AssertionError(type(out))


def real(y: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Without the rows of padding, where each implementation may say what it likes."""
    mask = given.get("attention_mask")
    return y[mask.bool()] if mask is not None and y.shape[:2] == mask.shape else y


# ------------------------------------------------------------------------------------------ vanilla
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", small.ALL)
def test_vanilla_equals_eager(family: str, side: str) -> None:
    model, given = small.build(family), small.inputs(family, side)
    with torch.no_grad():
        expected = result(model(**given))
        model.set_attn_implementation("regard:vanilla")
        found = result(model(**given))
    assert real(expected, given).abs().max() > 0.01
    torch.testing.assert_close(real(found, given), real(expected, given), **CLOSE)


@pytest.mark.parametrize("family", small.ALL)
def test_gradients_equal_eager(family: str) -> None:
    model, given = small.build(family), small.inputs(family, "right")
    model.train()
    grads = []
    for implementation in ("eager", "regard:vanilla"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        torch.manual_seed(0)
        y = real(result(model(**given)), given)
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and grads[0]
    for name, expected in grads[0].items():
        torch.testing.assert_close(
            grads[1][name],
            expected,
            atol=1e-4,
            rtol=1e-3,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", [*small.DECODERS, *small.PAIRS])
def test_generation_equals_eager(family: str, cache: str) -> None:
    if cache == "static" and family in small.PAIRS and family != "bart":
        pytest.skip("one family of encoder and decoder is enough for the static cache")
    model = small.build(family)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    given = {"input_ids": small.ids(), "attention_mask": small.padding("left")}
    more = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    found = []
    for implementation in ("eager", "regard:vanilla"):
        model.set_attn_implementation(implementation)
        found.append(
            model.generate(
                **given,
                max_new_tokens=6,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
                **more,
            )
        )
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(torch.stack(found[1].scores), torch.stack(found[0].scores), **CLOSE)


# ------------------------------------------------------------------------------------------ windows
def band(n: int, window: int, given: Tensor | None = None) -> Tensor:
    """The mask of a causal window by hand, (b 1 n n), as an addend."""
    i = torch.arange(n)
    keep = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - window)
    keep = keep[None, None] if given is None else keep[None, None] & given.bool()[:, None, None, :]
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "make", [lambda config: DynamicCache(config=config), lambda config: StaticCache(config, 32)]
)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_llama_window_equals_band_mask(make, side: str) -> None:
    model, ids = small.build("llama"), small.ids(3, 20)
    mask = (
        None
        if side == "none"
        else torch.cat((small.padding(side, 3, 12), torch.ones(3, 8, dtype=torch.long)), 1)
    )
    places = torch.arange(20).expand(3, -1)
    with torch.no_grad():
        expected = model(ids, attention_mask=band(20, 4, mask), position_ids=places).logits
        model.set_attn_implementation("regard:local?window=4")
        whole = model(ids, attention_mask=mask, position_ids=places).logits
        cache, steps = make(model.config), []
        for at, to in (
            (0, 12),
            (12, 15),
            *((i, i + 1) for i in range(15, 20)),
        ):  # the prompt, a chunk, token by token
            part = None if mask is None else mask[:, :to]
            out = model(
                ids[:, at:to],
                attention_mask=part,
                position_ids=places[:, at:to],
                past_key_values=cache,
                use_cache=True,
            )
            steps.append(out.logits)
    kept = torch.ones(3, 20, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(whole[kept], expected[kept], **CLOSE)
    torch.testing.assert_close(torch.cat(steps, 1)[kept], expected[kept], **CLOSE)
    model.set_attn_implementation("regard:vanilla")
    assert (model(ids, attention_mask=mask, position_ids=places).logits - expected)[
        kept
    ].abs().max() > 1e-3


def test_sparse_backend_equals_band_mask() -> None:
    """Long enough for tiles, with padding, forward and backward."""
    model = small.build("bert", max_position_embeddings=512, num_hidden_layers=1)
    ids, n = small.ids(2, 500), 500
    mask = (torch.arange(n) < torch.tensor([[500], [333]])).long()
    i = torch.arange(n)
    keep = ((i[None, :] - i[:, None]).abs() <= 16) & mask.bool()[:, None, None, :]
    by_hand = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    found = []
    for implementation, attention_mask in (("eager", by_hand), ("regard:local?window=16", mask)):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        y = model(ids, attention_mask=attention_mask).last_hidden_state[mask.bool()]
        (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        found.append((y.detach(), model.embeddings.word_embeddings.weight.grad.clone()))
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-4, rtol=1e-3)


# ------------------------------------------------------------------------------------------ padding
CAUSAL = [
    "sinks?sinks=2&window=3",
    "bigbird?block=2&random=1",
    "block_local?block=4",
    "sparse_fixed?stride=4&cells=1",
    "fixed_span?spans=2,5",
    "top_k?k=3",
    "linear",
    "performer?features=8",
    "cosformer",
    "global_tokens?tokens=2",
    "disagreement",
]
WHOLE = [
    "nystrom?landmarks=4",
    "clustered?clusters=3",
    "efficient",
    "prob_sparse?factor=1",
    "bigbird?block=2&random=1",
    "performer?features=8",
    "dilated?window=2&dilation=2",
]


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_decoder(name: str, side: str) -> None:
    """Each example equals itself alone, at once and token by token."""
    model = small.build("llama", f"regard:{name}")
    ids, mask = small.ids(3, 12), small.padding(side).bool()
    padded = ids.masked_fill(~mask, 0)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=places).logits
        alone = [model(row[keep][None]).logits[0] for row, keep in zip(ids, mask, strict=True)]
        for i, expected in enumerate(alone):
            torch.testing.assert_close(found[i][mask[i]], expected, **CLOSE)
        if side == "left":
            cache = DynamicCache(config=model.config)
            model(
                padded[:, :8],
                attention_mask=mask[:, :8],
                position_ids=places[:, :8],
                past_key_values=cache,
            )
            for at, to in ((8, 10), (10, 11), (11, 12)):
                out = model(
                    padded[:, at:to],
                    attention_mask=mask[:, :to],
                    position_ids=places[:, at:to],
                    past_key_values=cache,
                ).logits
                torch.testing.assert_close(
                    out[mask[:, at:to]], found[:, at:to][mask[:, at:to]], **CLOSE
                )


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_an_encoder(name: str, side: str) -> None:
    model = small.build("bert", f"regard:{name}")
    ids, mask = small.ids(3, 12), small.padding(side).bool()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(
            ids.masked_fill(~mask, 0), attention_mask=mask, position_ids=places
        ).last_hidden_state
        for row, keep, y in zip(ids, mask, found, strict=True):
            torch.testing.assert_close(
                y[keep], model(row[keep][None]).last_hidden_state[0], **CLOSE
            )


@pytest.mark.parametrize(
    "name",
    [
        "vanilla",
        "linear",
        "performer?features=8",
        "top_k?k=3",
        "sinks?sinks=1&window=3&cross=linear",
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_cross_attention(name: str, side: str) -> None:
    """BART: padding is that of the encoder. Equal lengths on both sides hide no mistakes."""
    model = small.build("bart", f"regard:{name}")
    hidden = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(4))
    mask, ids = small.padding(side).bool(), small.ids(3, 12, seed=6)
    with torch.no_grad():
        found = model.model.decoder(
            ids, encoder_hidden_states=hidden, encoder_attention_mask=mask
        ).last_hidden_state
        for i, keep in enumerate(mask):
            alone = model.model.decoder(
                ids[i : i + 1], encoder_hidden_states=hidden[i : i + 1, keep]
            ).last_hidden_state
            torch.testing.assert_close(found[i], alone[0], **CLOSE)


def test_bias_tensor_equals_dense_attention() -> None:
    """Long enough for tiles, which look up the bias of a layer."""
    from regard import Band, attend
    from regard.hf.attention_functions import BiasTensor

    make = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 300, 8, generator=make, dtype=torch.float64)
    prior = BiasTensor(torch.randn(1, 2, 300, 300, generator=make, dtype=torch.float64), 7, 7)
    mask = torch.arange(300) < torch.tensor([[300], [211]])
    found = [
        attend(
            q,
            k,
            v,
            pattern=Band(9, 4),
            prior=prior,
            mask=mask,
            q_start=7,
            k_positions=7,
            backend=backend,
        )
        for backend in ("reference", "sparse")
    ]
    torch.testing.assert_close(found[1], found[0])


def test_packed_examples_do_not_see_each_other() -> None:
    model, ids = small.build("llama", "regard:local?window=3"), small.ids(1, 12)
    places = torch.cat((torch.arange(5), torch.arange(7)))[None]
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False).logits
        apart = torch.cat([model(part).logits for part in (ids[:, :5], ids[:, 5:])], 1)
    torch.testing.assert_close(packed, apart, **CLOSE)
    for name, reason in (
        ("sinks", "depends on positions"),
        ("linear", "supports padding and causal masks"),
    ):
        model.set_attn_implementation(f"regard:{name}")
        with pytest.raises(Unsupported, match=reason):
            model(ids, position_ids=places, use_cache=False)


# ------------------------------------------------------------------- bias, cross-attention, dropout
def test_position_bias_and_cross_attention() -> None:
    """T5 with a window and its bias in the encoder; cross-attention stays dense."""
    model, given = small.build("t5"), small.inputs("t5", "right")
    i = torch.arange(12)
    keep = ((i[None, :] - i[:, None]).abs() <= 2) & given["attention_mask"].bool()[:, None, None, :]
    by_hand = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    mask = given["attention_mask"]
    with torch.no_grad():
        expected = model.encoder(given["input_ids"], attention_mask=by_hand).last_hidden_state
        model.set_attn_implementation("regard:local?window=2&cross=vanilla")
        found = model.encoder(given["input_ids"], attention_mask=mask).last_hidden_state
        wide = model(**given).logits
        model.set_attn_implementation("regard:local?window=40&cross=vanilla")
        full = model(**given).logits
        model.set_attn_implementation("eager")
        dense = model(**given).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], **CLOSE)
    torch.testing.assert_close(full, dense, **CLOSE)
    assert (wide - dense).abs().max() > 1e-3


def test_copies_know_their_cross_attention_layers() -> None:
    """In GPT-2 only the name tells, and with equal lengths the shapes do not."""
    model = small.build("gpt2", "regard:local?window=2&cross=vanilla", add_cross_attention=True)
    hidden = torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(4))
    given = {"input_ids": small.ids(), "encoder_hidden_states": hidden}
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(**given).logits, model(**given).logits)


def test_windows_of_model_and_name_both_apply() -> None:
    """Mistral sees five tokens: a window of two is narrower, one of nine changes nothing."""
    model, ids = small.build("mistral"), small.ids(2, 14)
    with torch.no_grad():
        own = model(ids).logits
        narrow = model(ids, attention_mask=band(14, 2).expand(2, -1, -1, -1)).logits
        for window, expected in ((9, own), (2, narrow)):
            model.set_attn_implementation(f"regard:local?window={window}")
            torch.testing.assert_close(model(ids).logits, expected, **CLOSE)


def test_dropout_drops_attention_weights() -> None:
    """Values identify keys: each weight is dropped or scaled by 1 / (1 − p)."""
    from transformers import AttentionInterface

    q, k = torch.randn(2, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
    layer = small.build("llama", "regard:local?window=2").model.layers[0].self_attn.train()
    function = AttentionInterface()["regard:local?window=2"]
    eye = torch.eye(6).expand(1, 2, -1, -1)
    whole = function(layer, q, k, eye, None, scaling=0.3)[0]
    torch.manual_seed(0)
    dropped = function(layer, q, k, eye, None, scaling=0.3, dropout=0.25)[0]
    gone = dropped == 0
    torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75)
    assert gone[whole > 0].any() and not gone[whole > 0].all()


def test_recipes_without_softmax_refuse_dropout() -> None:
    model = small.build("bert", "regard:performer", attention_probs_dropout_prob=0.1)
    model(small.ids())
    with pytest.raises(Unsupported, match="no softmax weights to drop"):
        model.train()(small.ids())


@pytest.mark.parametrize(
    "family", ["bert", "gpt2", "llama", "t5", "bart", "vit", "whisper", "modernbert"]
)
def test_attention_maps_equal_eager(family: str) -> None:
    model, given = small.build(family), small.inputs(family, "right")
    with torch.no_grad():
        expected = model(**given, output_attentions=True)
        model.set_attn_implementation("regard:vanilla")
        found = model(**given, output_attentions=True)
    names = [name for name in expected if name.endswith("attentions")]
    assert any(len(expected[name]) for name in names)
    for name in names:
        assert len(found[name]) == len(expected[name])
        for ours, theirs in zip(found[name], expected[name], strict=True):
            rows = theirs.isfinite().all(-1) & (
                ours.sum(-1) > 0
            )  # a query that sees nothing has no map
            torch.testing.assert_close(ours[rows], theirs[rows], **CLOSE)


def test_attention_maps_only_on_request() -> None:
    model = small.build("llama", "regard:local?window=2")
    assert model(small.ids()).attentions is None
    maps = model(small.ids(), output_attentions=True).attentions[0]
    i = torch.arange(12)
    outside = (i[None, :] > i[:, None]) | (i[None, :] < i[:, None] - 2)
    assert maps[:, :, outside].abs().max() == 0 and torch.allclose(maps.sum(-1), torch.ones(()))
    cache = DynamicCache(config=model.config)
    model(small.ids()[:, :11], past_key_values=cache)
    last = model(small.ids()[:, 11:], past_key_values=cache, output_attentions=True).attentions[0]
    torch.testing.assert_close(
        last, maps[:, :, 11:], **CLOSE
    )  # all keys of the cache, also those that left the window


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["vanilla", "local?window=3", "linear", "sinks?sinks=1&window=2"])
def test_other_precisions(dtype: torch.dtype, name: str) -> None:
    model = small.build("llama", f"regard:{name}")
    with torch.no_grad():
        expected = model(small.ids()).logits
        found = model.to(dtype)(small.ids()).logits
    assert found.dtype == dtype
    close = CLOSE if dtype == torch.float64 else {"atol": 0.02, "rtol": 0.1}
    torch.testing.assert_close(found.float(), expected, **close)


def test_custom_masks_apply() -> None:
    """A mask of four dimensions, bool or an addend, that is no window and no padding."""
    model, ids = small.build("bert"), small.ids(2, 9)
    keep = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.5
    keep |= torch.eye(9, dtype=torch.bool)
    addend = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=addend).last_hidden_state
        model.set_attn_implementation("regard:vanilla")
        for mask in (keep, addend):
            torch.testing.assert_close(
                model(ids, attention_mask=mask).last_hidden_state, expected, **CLOSE
            )


# --------------------------------------------------------------------------------- caps and sinks
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_caps_and_sinks_in_every_path(family: str) -> None:
    """Packed examples, which have a mask of their own, attention maps, and dropout keep the cap of
    Gemma 2 and the sinks of gpt-oss."""
    tokens = torch.arange(7, 20)[None]
    positions = torch.cat((torch.arange(6), torch.arange(7)))[None]
    for arguments in (
        {"position_ids": positions, "use_cache": False},
        {"output_attentions": True},
        {"attention_mask": torch.ones_like(tokens)},
    ):
        found = []
        for implementation in ("eager", "regard:vanilla"):
            model = small.build(family, implementation, attention_dropout=1e-12)
            model.train("attention_mask" in arguments)
            out = model(tokens, **arguments)
            found.append([out.logits, *(out.attentions or ())])
        assert len(found[0]) == len(found[1]) == (3 if "output_attentions" in arguments else 1)
        for got, expected in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, expected, **CLOSE)
    model = small.build(family, "regard:vanilla")
    changed = model(tokens).logits.detach()
    for layer in model.model.layers:
        if family == "gemma2":
            layer.self_attn.attn_logit_softcapping = None
        else:
            layer.self_attn.sinks.data.fill_(-torch.inf)
    assert (model(tokens).logits - changed).abs().max() > 1e-3
