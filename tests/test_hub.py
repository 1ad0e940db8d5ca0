"""Attention functions in models of transformers: the same numbers as its own `eager`, and as masks written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

import hub_models as small  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

import regard.hub  # noqa: E402
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


# ---------------------------------------------------------------------------------------------- vanilla is eager
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", small.ALL)
def test_vanilla_is_eager(family: str, side: str) -> None:
    model, given = small.build(family), small.inputs(family, side)
    with torch.no_grad():
        expected = result(model(**given))
        model.set_attn_implementation("regard:vanilla")
        found = result(model(**given))
    assert real(expected, given).abs().max() > 0.01
    torch.testing.assert_close(real(found, given), real(expected, given), **CLOSE)


@pytest.mark.parametrize("family", small.ALL)
def test_gradients_are_those_of_eager(family: str) -> None:
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
        torch.testing.assert_close(grads[1][name], expected, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", [*small.DECODERS, *small.PAIRS])
def test_generation_is_that_of_eager(family: str, cache: str) -> None:
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
                **given, max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True, **more
            )
        )
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(torch.stack(found[1].scores), torch.stack(found[0].scores), **CLOSE)


# ---------------------------------------------------------------------------------------------- a window in Llama
def band(n: int, window: int, given: Tensor | None = None) -> Tensor:
    """The mask of a causal window by hand, (b 1 n n), as an addend."""
    i = torch.arange(n)
    keep = (i[None, :] <= i[:, None]) & (i[None, :] >= i[:, None] - window)
    keep = keep[None, None] if given is None else keep[None, None] & given.bool()[:, None, None, :]
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("make", [lambda config: DynamicCache(config=config), lambda config: StaticCache(config, 32)])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_a_window_in_llama_is_a_band_by_hand(make, side: str) -> None:
    model, ids = small.build("llama"), small.ids(3, 20)
    mask = None if side == "none" else torch.cat((small.padding(side, 3, 12), torch.ones(3, 8, dtype=torch.long)), 1)
    places = torch.arange(20).expand(3, -1)
    with torch.no_grad():
        expected = model(ids, attention_mask=band(20, 4, mask), position_ids=places).logits
        model.set_attn_implementation("regard:local?window=4")
        whole = model(ids, attention_mask=mask, position_ids=places).logits
        cache, steps = make(model.config), []
        for at, to in ((0, 12), (12, 15), *((i, i + 1) for i in range(15, 20))):  # the prompt, a chunk, token by token
            part = None if mask is None else mask[:, :to]
            out = model(
                ids[:, at:to], attention_mask=part, position_ids=places[:, at:to], past_key_values=cache, use_cache=True
            )
            steps.append(out.logits)
    kept = torch.ones(3, 20, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(whole[kept], expected[kept], **CLOSE)
    torch.testing.assert_close(torch.cat(steps, 1)[kept], expected[kept], **CLOSE)
    model.set_attn_implementation("regard:vanilla")
    assert (model(ids, attention_mask=mask, position_ids=places).logits - expected)[kept].abs().max() > 1e-3


def test_the_sparse_executor_runs_and_agrees() -> None:
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


# ---------------------------------------------------------------------------------------------- padded is cut
CAUSAL = ["sinks?sinks=2&window=3", "bigbird?block=2&random=1", "block_local?block=4", "sparse_fixed?stride=4&cells=1",
          "fixed_span?spans=2,5", "top_k?k=3", "linear", "performer?features=8", "cosformer", "global_tokens?tokens=2",
          "disagreement", "hard_gaussian?sigma=1.5"]  # fmt: skip
WHOLE = ["nystrom?landmarks=4", "clustered?clusters=3", "efficient", "prob_sparse?factor=1", "bigbird?block=2&random=1",
         "performer?features=8", "dilated?window=2&step=2"]  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_in_a_decoder(name: str, side: str) -> None:
    """Each example as if it were alone; from its first token, and token by token."""
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
            model(padded[:, :8], attention_mask=mask[:, :8], position_ids=places[:, :8], past_key_values=cache)
            for at, to in ((8, 10), (10, 11), (11, 12)):
                out = model(
                    padded[:, at:to], attention_mask=mask[:, :to], position_ids=places[:, at:to], past_key_values=cache
                ).logits
                torch.testing.assert_close(out[mask[:, at:to]], found[:, at:to][mask[:, at:to]], **CLOSE)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_in_an_encoder(name: str, side: str) -> None:
    model = small.build("bert", f"regard:{name}")
    ids, mask = small.ids(3, 12), small.padding(side).bool()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(ids.masked_fill(~mask, 0), attention_mask=mask, position_ids=places).last_hidden_state
        for row, keep, y in zip(ids, mask, found, strict=True):
            torch.testing.assert_close(y[keep], model(row[keep][None]).last_hidden_state[0], **CLOSE)


def test_packed_examples_do_not_see_each_other() -> None:
    model, ids = small.build("llama", "regard:local?window=3"), small.ids(1, 12)
    places = torch.cat((torch.arange(5), torch.arange(7)))[None]
    with torch.no_grad():
        packed = model(ids, position_ids=places).logits
        apart = torch.cat([model(part).logits for part in (ids[:, :5], ids[:, 5:])], 1)
    torch.testing.assert_close(packed, apart, **CLOSE)
    for name, reason in (("sinks", "goes by positions"), ("linear", "takes padding and causality")):
        model.set_attn_implementation(f"regard:{name}")
        with pytest.raises(Unsupported, match=reason):
            model(ids, position_ids=places)


def test_names_are_for_the_hub() -> None:
    assert regard.hub.register("local", window=4) == "regard:local?window=4"
