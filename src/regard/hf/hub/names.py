"""The name of an attention: `regard:local?window=256`, a recipe and its arguments, as transformers passes them around.

    attention = "regard:" recipe ["?" argument "=" value {"&" argument "=" value}]

A value is a Python literal, or a word; `true`, `false` and `none` may be written small.  Sequences are written with commas.
One argument is not the recipe's: `cross`, the recipe for layers that look at another sequence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from regard.attentions.kv_cache import KVCacheAttention
from regard.errors import Unsupported, did_you_mean
from regard.mixer import Attention, Mixer, MultiHead
from regard.pattern import Band, Full, Keys
from regard.registry import create, get_recipe, list_recipes

PREFIX = "regard:"
SWAP = "regard.swap puts it into a model"
THEIRS = {
    "dim": "the width is",
    "heads": "the heads are",
    "kv_heads": "the heads are",
    "causal": "what is causal is",
    "bias": "the projections are",
}
WORDS = {"true": True, "false": False, "none": None}
TRIAL = {
    "heads": 4,
    "width": 16,
    "length": 64,
}  # a size at which to try out a name before there is a model


@dataclass(frozen=True)
class AttentionSpec:
    """What a name asks for: a recipe, its arguments, and the recipe for cross-attention where that is another."""

    recipe: str
    arguments: tuple[tuple[str, Any], ...] = ()
    cross: str | None = None

    def __str__(self) -> str:
        more = (*self.arguments, *((("cross", self.cross),) if self.cross else ()))
        return f"{PREFIX}{self.recipe}" + (
            "?" + "&".join(f"{k}={_text(v)}" for k, v in more) if more else ""
        )

    @property
    def for_cross(self) -> AttentionSpec:
        """The attention of layers that look at another sequence."""
        return self if self.cross is None else AttentionSpec(self.cross)

    def build(self, *, heads: int, width: int, causal: bool, length: int | None) -> Attention:
        """The attention for heads of some width, without projections: those are the model's.

        length   how long the model's sequences may be, for recipes that must know; None: nobody knows
        """
        _check_kind(self.recipe)
        given = dict(self.arguments)
        asked = get_recipe(self.recipe).parameters.get("length")
        if (
            asked is not None
            and "length" not in given
            and (asked.default is asked.empty or asked.default is None)
        ):
            if length is None and asked.default is asked.empty:
                raise ValueError(
                    f"{self} must know the longest sequence, and the model does not say: give length=..."
                )
            given["length"] = length
        with aside():
            mixer = create(self.recipe, dim=heads * width, heads=heads, causal=causal, **given)
            refusal = why_not(mixer)
        if refusal is not None:
            raise Unsupported(f"{self} is not for an attention function: {refusal}; {SWAP}")
        assert isinstance(mixer, MultiHead)
        return mixer.inner


@contextmanager
def aside() -> Iterator[None]:
    """Inside, what is built is real, also while a model is built without its weights, and the global generator is left alone:
    projections are drawn only to be thrown away."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        yield


@lru_cache(1024)
def _check_kind(recipe: str) -> None:
    """Refuse a recipe that is no function of queries, keys and values, whatever its arguments."""
    with aside():
        refusal = why_not(get_recipe(recipe).example(16))
    if refusal is not None:
        raise Unsupported(f"{PREFIX}{recipe} is not for an attention function: {refusal}; {SWAP}")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value)) + ("," if len(value) == 1 else "")
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    if not text or set(text) & set("?&=:/, "):
        raise ValueError(f"{value!r} cannot be written in a name")
    return text


def parse(name: str) -> AttentionSpec:
    """The parts of a name, checked: the recipe exists, and takes these arguments."""
    recipe, mark, rest = name.removeprefix(PREFIX).partition("?")
    get_recipe(recipe)
    if mark and not rest:
        raise ValueError(f"{name!r} ends in '?', and no argument follows")
    found: dict[str, Any] = {}
    for piece in rest.split("&") if rest else ():
        key, equals, text = piece.partition("=")
        if not (key and equals and text):
            raise ValueError(f"in {name!r} each argument must be written name=value, not {piece!r}")
        if key in found:
            raise ValueError(f"{name!r} gives {key} twice")
        found[key] = _value(text)
    return make(recipe, **found)


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def make(recipe: str, /, **arguments: Any) -> AttentionSpec:
    """A recipe with its arguments; whatever is wrong with them is said now."""
    cross = arguments.pop("cross", None)
    known = [name for name in get_recipe(recipe).parameters if name not in THEIRS]
    for name in arguments:
        if name in THEIRS:
            raise ValueError(
                f"{PREFIX}{recipe} takes no {name!r}: {THEIRS[name]} for the model to say"
            )
        if name not in known:
            hint = did_you_mean(name, [*known, "cross"]) if known else "there is nothing to set"
            raise ValueError(f"{PREFIX}{recipe} takes no argument {name!r}: {hint}")
    if cross is not None:
        get_recipe(cross)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in arguments.items()}
    spec = AttentionSpec(recipe, tuple(sorted(values.items())), cross)
    try_out(spec)
    if cross is not None:
        reason = why_not_cross(try_out(spec.for_cross))
        if reason is not None:
            raise Unsupported(f"cross={cross}: {cross} cannot look at another sequence: {reason}")
    return spec


@lru_cache(1024)
def try_out(spec: AttentionSpec) -> Attention:
    """A small one, so that what is wrong with a name shows before there is a model."""
    _check_kind(spec.recipe)
    with aside():
        causal = get_recipe(spec.recipe).causal_options()[0]
    return spec.build(**TRIAL, causal=causal)


def why_not(mixer: Mixer) -> str | None:
    """Why a mechanism cannot be a function of queries, keys and values; None: it can."""
    if type(mixer) is not MultiHead:
        return "it works on the tokens themselves, not on queries, keys and values"
    if mixer.inner.shared_qk:
        return "it makes its keys of the queries, and a model projects both"
    if mixer.rotary is not None or not all(
        _plain(x, mixer.dim) for x in (mixer.q, mixer.k, mixer.v)
    ):
        return "it projects tokens in a way of its own"
    own = [name for name, _ in mixer.inner.named_parameters()]
    if own:
        return (
            f"it has parameters of its own ({', '.join(own)}), and a function has no place for them"
        )
    learned = _learned(mixer.inner, mixer.heads, mixer.dim // mixer.heads)
    if learned:
        return f"it changes while training ({', '.join(learned)}), and a function has no place for that"
    return None


def _plain(layer: nn.Module, dim: int) -> bool:
    return isinstance(layer, nn.Linear) and layer.out_features == dim


def _learned(inner: Attention, heads: int, width: int) -> list[str]:
    """The buffers that one call in training changes: they would have to be saved with the model."""
    before = dict(inner.named_buffers())
    if not before:
        return []
    x = torch.randn(1, heads, 8, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        (trained := deepcopy(inner)).train()(x, x, x)
    return [name for name, x in trained.named_buffers() if not torch.equal(x, before[name])]


def why_not_cross(inner: Attention) -> str | None:
    """Why an attention cannot serve a layer that looks at another sequence; None: it can."""
    if (
        inner.can.cross
        and isinstance(inner, KVCacheAttention)
        and not all(isinstance(x, Full | Keys) for x in inner.pattern.leaves())
    ):
        return "its pattern goes by where the queries stand, and that is not told for such layers"
    return inner.can.reason("cross")


def suitable() -> list[str]:
    """The recipes that can be attention functions, asked of each."""
    found = []
    for name in list_recipes():
        try:
            make(name)
        except (Unsupported, ValueError, TypeError):
            continue
        found.append(name)
    return found


def shiftless(inner: Attention) -> bool:
    """Whether it matters where a sequence begins: windows and full attention do not care."""
    return isinstance(inner, KVCacheAttention) and all(
        isinstance(leaf, Full | Band) for leaf in inner.pattern.leaves()
    )
