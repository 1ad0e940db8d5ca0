"""Attention names such as "regard:local?window=256", as passed to `set_attn_implementation`.

    name = "regard:" recipe ["?" argument "=" value {"&" argument "=" value}]

Values are Python literals or bare words. `true`, `false` and `none` may be written in lower case,
sequences with commas. `cross` is not an argument of the recipe: it names the recipe for
cross-attention layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from regard.attentions.kv_cache import KVCacheAttention
from regard.errors import Unsupported, did_you_mean
from regard.literals import parse_literal
from regard.mixer import Attention, SharedQKAttention
from regard.pattern import Band, Full
from regard.registry import LAYER_ARGUMENTS, create_attention, get_recipe, list_recipes

PREFIX = "regard:"
MODEL_ARGUMENTS = ("dim", "heads", "causal", *LAYER_ARGUMENTS)  # set by the model, not by a name
TRIAL_HEADS, TRIAL_HEAD_DIM, TRIAL_LENGTH = (
    4,
    16,
    64,
)  # sizes at which a name is checked before there is a model


@dataclass(frozen=True)
class AttentionSpec:
    """A parsed attention name: recipe, arguments, and the recipe of cross-attention layers."""

    recipe: str
    arguments: tuple[tuple[str, Any], ...] = ()
    cross: str | None = None

    def __str__(self) -> str:
        arguments = dict(self.arguments) | ({"cross": self.cross} if self.cross else {})
        query = "&".join(f"{name}={format_value(value)}" for name, value in arguments.items())
        return f"{PREFIX}{self.recipe}" + (f"?{query}" if query else "")

    @property
    def for_cross(self) -> AttentionSpec:
        """The spec of cross-attention layers."""
        return self if self.cross is None else AttentionSpec(self.cross)

    def build(self, *, heads: int, head_dim: int, causal: bool, length: int | None) -> Attention:
        """Build the attention without projections, which are the model's.

        Args:
            length: Maximum sequence length of the model, for recipes that need it. None: the model
                has none.
        """
        arguments = dict(self.arguments)
        parameter = get_recipe(self.recipe).options.get("length")
        if parameter is not None and "length" not in arguments:
            required = parameter.default is parameter.empty
            if required and length is None:
                raise ValueError(
                    f"{self} needs the maximum sequence length, and the model's configuration has "
                    "none: "
                    f"give length=... in the name."
                )
            if required or parameter.default is None:
                arguments["length"] = length
        with isolated_build():
            attention = create_attention(
                self.recipe, heads=heads, head_dim=head_dim, causal=causal, **arguments
            )
            check_is_function(attention, heads, head_dim, self)
        return attention


@contextmanager
def isolated_build() -> Iterator[None]:
    """Build on the CPU, whatever the default device, without changing the random state."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        yield


# ------------------------------------------------------------------------ reading and writing names
def parse_name(name: str) -> AttentionSpec:
    """Parse and check a name: the recipe exists and accepts the arguments."""
    recipe, question_mark, query = name.removeprefix(PREFIX).partition("?")
    get_recipe(recipe)
    if question_mark and not query:
        raise ValueError(f"{name!r} ends in '?' without an argument.")
    arguments: dict[str, Any] = {}
    for item in query.split("&") if query else ():
        key, equals, text = item.partition("=")
        if not (key and equals and text):
            raise ValueError(f"Arguments in {name!r} must be written name=value, not {item!r}.")
        if key in arguments:
            raise ValueError(f"{name!r} gives {key} twice.")
        arguments[key] = parse_value(text)
    return make_spec(recipe, **arguments)


def parse_value(text: str) -> Any:
    """A constant or Python literal, or else the text itself."""
    return None if text.lower() == "none" else parse_literal(text)


def format_value(value: Any) -> str:
    """The inverse of `parse_value`."""
    if isinstance(value, list | tuple):
        return ",".join(map(format_value, value)) + ("," if len(value) == 1 else "")
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    if not text or set(text) & set("?&=:/, "):
        raise ValueError(f"{value!r} cannot be written in an attention name.")
    return text


@lru_cache(1024)
def _check_spec(spec: AttentionSpec) -> Attention:
    """Build a small attention, so that errors in a name show before there is a model."""
    recipe = get_recipe(spec.recipe)
    if not recipe.is_attention:
        raise not_a_function(
            f"{PREFIX}{spec.recipe}", "it mixes tokens, with projections of its own or without any"
        )
    with isolated_build():
        heads, head_dim = 2, 8
        example = recipe.build_attention(heads, head_dim, **recipe.example_kwargs)
        check_is_function(example, heads, head_dim, f"{PREFIX}{spec.recipe}")
        causal = recipe.causal_options()[0]
    return spec.build(
        heads=TRIAL_HEADS, head_dim=TRIAL_HEAD_DIM, causal=causal, length=TRIAL_LENGTH
    )


def make_spec(recipe: str, /, **arguments: Any) -> AttentionSpec:
    """A checked spec of a recipe with arguments, and `cross` where given."""
    cross = arguments.pop("cross", None)
    known = list(get_recipe(recipe).options)
    for name in arguments:
        if name in MODEL_ARGUMENTS:
            raise ValueError(f"{PREFIX}{recipe} does not accept {name!r}: the model sets it.")
        if name not in known:
            hint = did_you_mean(name, [*known, "cross"]) if known else "it has none."
            raise ValueError(f"{PREFIX}{recipe} has no argument {name!r}: {hint}")
    if cross is not None:
        get_recipe(cross)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in arguments.items()}
    spec = AttentionSpec(recipe, tuple(sorted(values.items())), cross)
    _check_spec(spec)
    if cross is not None:
        reason = why_not_cross(_check_spec(spec.for_cross))
        if reason is not None:
            raise Unsupported(f"cross={cross}: {cross} does not support cross-attention: {reason}.")
    return spec


@lru_cache(1)
def attention_names() -> list[str]:
    """Names of all recipes that can be attention functions with their default arguments.

    The first call builds every recipe once, which takes a second or two.
    """
    names = []
    for recipe in list_recipes():
        try:
            names.append(str(make_spec(recipe)))
        except (Unsupported, ValueError, TypeError):
            continue
    return names


# ---------------------------------------------------------------------- which recipes are functions
def check_is_function(attention: Attention, heads: int, head_dim: int, name: object) -> None:
    """Raise `Unsupported` unless the attention is a function of q, k and v without parameters."""
    if isinstance(attention, SharedQKAttention):
        raise not_a_function(name, "it shares queries and keys, and the model projects both")
    if own := ", ".join(name for name, _ in attention.named_parameters()):
        raise not_a_function(
            name, f"it has parameters ({own}), and a function has no place for them"
        )
    if trained := ", ".join(trained_buffers(attention, heads, head_dim)):
        raise not_a_function(
            name, f"training changes its buffers ({trained}), and a function has no place for them"
        )


def not_a_function(name: object, reason: str) -> Unsupported:
    """The error for a recipe that cannot be an attention function."""
    return Unsupported(
        f"{name} cannot be an attention function: {reason}. Use regard.swap to put it into a model."
    )


def trained_buffers(inner: Attention, heads: int, head_dim: int) -> list[str]:
    """Names of buffers that training changes, which would have to be saved with the model."""
    before = dict(inner.named_buffers())
    if not before:
        return []
    x = torch.randn(1, heads, 8, head_dim, generator=torch.Generator().manual_seed(0))
    trained = deepcopy(inner).train()
    with torch.no_grad():
        trained(x, x, x)
    return [
        name for name, buffer in trained.named_buffers() if not torch.equal(buffer, before[name])
    ]


def why_not_cross(inner: Attention) -> str | None:
    """The reason why an attention cannot serve cross-attention layers, or None if it can."""
    reason = inner.can.reason("independent_queries")
    if not inner.can.cross or reason is None:
        return inner.can.reason("cross")
    return f"an output would depend on more than its own query: {reason}"


def is_shift_invariant(inner: Attention) -> bool:
    """Whether the attention depends on relative positions only, as windows do."""
    return isinstance(inner, KVCacheAttention) and all(
        isinstance(leaf, Full | Band) for leaf in inner.pattern.leaves()
    )
