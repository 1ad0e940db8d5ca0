"""The recipe registry: named functions that build attentions and token mixers.

An attention recipe is a function of the heads and their width that returns an `Attention`:

    @recipe("Luong et al. 2015", arxiv="1508.04025", family="sparse", formula="softmax over ...")
    def local(heads, head_dim, *, window=128): ...

`create` wraps it into a `MultiHead`, and `create_attention` returns it as it is, for callers that
have queries, keys and values. A recipe of a token mixer has one stage. It is a function of the
model width, and of the heads if it has any, and returns a `Mixer`:

    @recipe("Beltagy et al. 2020", arxiv="2004.05150", family="sparse", formula="softmax over ...")
    def longformer(dim, heads, *, window=256, causal=False): ...

Other packages add recipes through the entry-point group "regard.recipes". Entry points are loaded
on the first lookup.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any, get_type_hints

import numpy as np
import torch

from regard.can import NO_HEADS
from regard.device import DTYPES, resolve_device, resolve_dtype
from regard.errors import Unsupported, check_int, did_you_mean
from regard.mixer import Attention, Can, Mixer, MultiHead, check_heads
from regard.recipe_index import (
    ENTRY_POINT_GROUP,
    FAMILIES as FAMILIES,
    check_capabilities,
    find_family,
)

MAX_NUMBER = 1 << 53  # larger arguments cannot be sizes

# Arguments of `create` that set up the projections around an attention.
LAYER_ARGUMENTS = ("head_dim", "kv_heads", "bias", "qk_norm", "dropout")
_LAYER_PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(MultiHead).parameters.items()
    if name in ("dim", "heads", "causal", *LAYER_ARGUMENTS)
}

RecipeFunction = Callable[..., Attention | Mixer]
Parameters = Mapping[str, inspect.Parameter]


@dataclass(frozen=True)
class LayerNumber:
    """Layer `index` of the `count` layers of a model that have the same recipe."""

    index: int
    count: int


@dataclass(frozen=True)
class Recipe:
    """A registered function that builds an attention or a token mixer, with its paper.

    Attributes:
        name: Name in the registry, which is the name of the function.
        function: The function, in one of three forms:
            `(heads, head_dim, *, ...) -> Attention`;
            `(dim, heads, *, causal=False, ...) -> Mixer`;
            `(dim, *, causal=False, ...) -> Mixer`, for a mixer without heads.
        paper: Authors and year.
        arxiv: arXiv number, or "".
        family: Key of `FAMILIES`, or "".
        formula: The mixer in one line.
        example_kwargs: Arguments for an example of about twenty tokens, used by tests and pictures.
        listed: False for variants that reproduce one published checkpoint: `create` finds them,
            listings do not.
    """

    name: str
    function: RecipeFunction
    paper: str
    arxiv: str
    family: str
    formula: str
    example_kwargs: Mapping[str, Any]
    listed: bool = True

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        text = " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())
        return text.split(". ")[0].rstrip(".")

    @property
    def is_attention(self) -> bool:
        """Whether the function returns an `Attention`, of heads of a given width."""
        return list(self._signature)[:2] == ["heads", "head_dim"]

    @property
    def options(self) -> Parameters:
        """The recipe's own parameters, without sizes and `causal`."""
        sizes = ("dim", "heads", "head_dim", "causal")
        return {name: p for name, p in self._signature.items() if name not in sizes}

    @property
    def parameters(self) -> Parameters:
        """Parameters of `create` for this recipe, by name."""
        if self.is_attention:
            layer = {name: _LAYER_PARAMETERS[name] for name in LAYER_ARGUMENTS}
            names = ("dim", "heads", *self.options, *layer, "causal")
            return {name: {**_LAYER_PARAMETERS, **self.options}[name] for name in names}
        if "heads" in self._signature:
            return self._signature
        heads = _LAYER_PARAMETERS["heads"].replace(default=1)
        return {"dim": self._signature["dim"], "heads": heads, **self._signature}

    @property
    def attention_parameters(self) -> Parameters:
        """Parameters of `create_attention` for this recipe, by name."""
        sizes = {name: self._signature[name] for name in ("heads", "head_dim")}
        layer = {name: _LAYER_PARAMETERS[name] for name in ("dropout", "causal")}
        return {**sizes, **self.options, **layer}

    def type_hints(self) -> Mapping[str, Any]:
        """Types of the parameters of `create`, by name."""
        layer = get_type_hints(MultiHead.__init__) if self.is_attention else {}
        return {**layer, **get_type_hints(self.function)}

    @property
    def _signature(self) -> Parameters:
        return inspect.signature(self.function).parameters

    def build(self, dim: int, heads: int | None = None, **arguments: Any) -> Mixer:
        """Build the mixer; `heads=None` takes the default of the recipe. See `create`."""
        heads = self.default_heads(1) if heads is None else heads
        check_int(1, dim=dim, heads=heads)
        if not self.is_attention:
            has_heads = "heads" in self._signature
            mixer = self.function(dim, *([heads] if has_heads else []), **arguments)
            assert isinstance(mixer, Mixer), f"{self.name} returned {type(mixer).__name__}"
            if not has_heads:
                mixer.can = mixer.can.without(heads=NO_HEADS)
            return mixer
        layer = {name: arguments.pop(name) for name in LAYER_ARGUMENTS if name in arguments}
        causal = arguments.pop("causal", False)
        if layer.get("head_dim") is None:
            check_heads(dim, heads)
            layer["head_dim"] = dim // heads
        attention = self.build_attention(heads, layer["head_dim"], causal=causal, **arguments)
        return MultiHead(dim, heads, attention, causal=causal, **layer)

    def build_attention(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        **options: Any,
    ) -> Attention:
        """Build the attention without projections. See `create_attention`."""
        check_int(1, heads=heads, head_dim=head_dim)
        if "causal" in self._signature:
            options["causal"] = causal
        attention = self.function(heads, head_dim, **options)
        assert isinstance(attention, Attention), f"{self.name} returned {type(attention).__name__}"
        if dropout:
            attention.set_dropout(dropout)
        return attention

    def default_heads(self, otherwise: int) -> int:
        """Default number of heads of the recipe, or `otherwise` if it has none."""
        default = self.parameters["heads"].default
        return otherwise if default is inspect.Parameter.empty else int(default)

    def example(self, dim: int = 8, *, causal: bool | None = None) -> Mixer:
        """Build a small example; `causal=None` takes the default of the recipe."""
        if causal is None:
            causal = bool(self.parameters["causal"].default)
        return self.build(dim, self.default_heads(2), **self.example_kwargs, causal=causal)

    def layer_options(
        self, arguments: Mapping[str, Any], *, layer: LayerNumber | None, seed: int
    ) -> dict[str, int]:
        """Options that differ from layer to layer of a model, unless the arguments set them: the
        layer's number, for recipes that alternate, and its seed.

        A layer that is the only one of its recipe keeps the default number. Cross-attention does
        not alternate: `layer` is None there.
        """
        values = {}
        parameter = self.parameters.get("layer")
        if layer is not None and parameter is not None:
            alternates = parameter.default is not None and layer.count > 1
            if alternates or arguments.get("split") == "layers":
                values["layer"] = layer.index
        if "seed" in self.parameters:
            values["seed"] = seed
        return {name: value for name, value in values.items() if name not in arguments}

    def causal_options(self) -> list[bool]:
        """Values of `causal` that the recipe can be built with."""
        options = []
        for causal in (False, True):
            with suppress(Unsupported):
                self.example(causal=causal)
                options.append(causal)
        return options

    def can(self) -> Can:
        """Capabilities, found by building small examples."""
        can = self.example().can
        try:
            self.example(causal=True)
        except Unsupported as error:
            return not_causal(can, error)
        return can


def not_causal(can: Can, error: Unsupported) -> Can:
    """Capabilities of a recipe whose causal form cannot be built, because of `error`."""
    reason = can.reason("causal") or str(error)
    return can.without(causal=reason, stream="only causal mixers can stream")


def derive_seed(seed: int, *key: int) -> int:
    """A seed, below 2³², for one of several parts that draw independently: other keys and other
    seeds give unrelated ones."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])


_recipes: dict[str, Recipe] = {}


def recipe(
    paper: str,
    *,
    arxiv: str = "",
    family: str = "",
    formula: str = "",
    example_kwargs: Mapping[str, Any] | None = None,
    listed: bool = True,
) -> Callable[[RecipeFunction], RecipeFunction]:
    """Register the decorated function as a recipe under its name.

    The first parameters of the function tell what it builds: `(heads, head_dim, *, ...)` returns
    an `Attention`, `(dim, heads, *, causal, ...)` and `(dim, *, causal, ...)` return a `Mixer`.
    See `Recipe` for the arguments of the decorator.
    """

    def register(function: RecipeFunction) -> RecipeFunction:
        name = function.__name__
        known = _recipes.get(name)
        if known is not None and function.__module__ not in (known.function.__module__, "__main__"):
            raise ValueError(
                f"Recipe {name!r} is already registered by {known.function.__module__}."
            )
        kwargs = dict(example_kwargs or {})
        new = Recipe(name, function, paper, arxiv, family, formula, kwargs, listed)
        _check_signature(new)
        _recipes[name] = new
        return function

    return register


def _check_signature(recipe: Recipe) -> None:
    """Raise TypeError unless the function has one of the forms that `Recipe` lists."""
    names = list(inspect.signature(recipe.function).parameters)
    if recipe.is_attention:
        taken = [name for name in LAYER_ARGUMENTS if name in recipe.options]
        if taken:
            raise TypeError(
                f"{recipe.name} cannot have a parameter {taken[0]!r}: it is an argument of "
                "regard.create that sets up the projections of every attention recipe"
            )
    elif names[:1] != ["dim"] or "causal" not in names:
        raise TypeError(
            f"the parameters of {recipe.name} must start with (heads, head_dim), for a function "
            "that returns an Attention, or be (dim, heads, *, causal, ...) or (dim, *, causal, "
            f"...), for one that returns a Mixer, not ({', '.join(names)})"
        )


@lru_cache(1)
def _load_recipes() -> dict[str, Recipe]:
    """All recipes, those of other packages included."""
    import_module("regard.recipes")
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except Exception as error:  # a broken package must not hide the other recipes
            warnings.warn(
                f"Could not load recipe {entry.name!r} from {entry.value!r}: {error}", stacklevel=2
            )
    return _recipes


def get_recipe(name: str) -> Recipe:
    """Look up a recipe by name."""
    recipes = _load_recipes()
    if name not in recipes:
        listed = [known for known, found in recipes.items() if found.listed]
        raise ValueError(f"no recipe {name!r}: {did_you_mean(str(name), listed)}")
    return recipes[name]


def list_recipes(
    pattern: str = "", *, family: str | None = None, can: str | Iterable[str] = ()
) -> list[str]:
    """Names of the recipes, ordered by family and then by name.

    Args:
        pattern: Wildcard pattern such as "big*" or "synthesizer_*"; "" matches all.
        family: Only this family: a key of `FAMILIES` ("sparse") or its title
            ("sparse by position").
        can: Only recipes with all of these capabilities, such as "causal" or ["causal", "stream"].
    """
    family = None if family is None else find_family(family)
    capabilities = check_capabilities([can] if isinstance(can, str) else can)
    found = [
        recipe
        for recipe in _load_recipes().values()
        if recipe.listed
        and family in (None, recipe.family)
        and fnmatchcase(recipe.name, pattern or "*")
    ]
    order = {name: number for number, name in enumerate(FAMILIES)}
    found.sort(key=lambda recipe: (order.get(recipe.family, len(order)), recipe.name))
    if capabilities:
        found = [
            recipe for recipe in found if all(getattr(recipe.can(), name) for name in capabilities)
        ]
    return [recipe.name for recipe in found]


def create(
    name: str,
    /,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **arguments: Any,
) -> Mixer:
    """Build a mixer by recipe name: `create("bigbird", dim=512, heads=8, length=4096)`.

    Unknown names and arguments raise an error that names the closest match.

    Args:
        name: Name of the recipe.
        device: Device of the parameters, such as "cuda" or "auto". Default: PyTorch's. Parameters
            are drawn first and then moved, so they are the same on every device.
        dtype: Floating-point dtype of the parameters, such as "bfloat16". Default: PyTorch's.
        **arguments: `dim`, `heads`, `causal`, and the options of the recipe. A mixer without heads
            accepts `heads` too, and `mixer.can.heads` is False. Attention recipes also take the
            arguments of the layer around the attention: `head_dim` (width of a head, default
            dim / heads), `kv_heads`, `bias`, `qk_norm` and `dropout`; see `MultiHead`.
    """
    place = _resolve_place(device, dtype)
    found = get_recipe(name)
    if not found.is_attention:
        for argument in LAYER_ARGUMENTS:
            if argument in arguments and argument not in found.parameters:
                raise Unsupported(
                    f"{name} does not take {argument}: it is a token mixer, with projections of "
                    "its own or without any"
                )
    _check_arguments(found, found.parameters, arguments)
    with _explain_errors(found, arguments):
        mixer = found.build(**arguments)
    mixer.name = name  # used in error messages
    return mixer.to(**place)


def create_attention(
    name: str,
    /,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **arguments: Any,
) -> Attention:
    """Build an attention by recipe name, without projections, for given queries, keys and values:
    `create_attention("local", heads=8, head_dim=64, window=128)`.

    Recipes of token mixers raise `Unsupported`.

    Args:
        name: Name of the recipe.
        device: Device of the parameters, if there are any. See `create`.
        dtype: Floating-point dtype of the parameters. See `create`.
        **arguments: `heads`, `head_dim`, the options of the recipe, `dropout`, and `causal`:
            whether the attention will be called with causal=True. Some recipes then draw another
            pattern, and recipes that cannot be causal raise `Unsupported`.
    """
    place = _resolve_place(device, dtype)
    found = get_recipe(name)
    if not found.is_attention:
        raise Unsupported(
            f"{name} has no attention over given queries, keys and values: it is a token mixer, "
            f"with projections of its own or without any. Use regard.create({name!r}, ...)."
        )
    _check_arguments(found, found.attention_parameters, arguments)
    with _explain_errors(found, arguments):
        attention = found.build_attention(**arguments)
        reason = attention.can.reason("causal")
        if arguments.get("causal") and reason is not None:
            raise Unsupported(reason)
    return attention.to(**place)


def _resolve_place(
    device: str | torch.device | None, dtype: str | torch.dtype | None
) -> dict[str, Any]:
    """Arguments of `Module.to` for a device and a dtype; raises if one of them is not there."""
    found = None if device is None else resolve_device(device)
    place: dict[str, Any] = {} if found is None else {"device": found}
    if dtype is not None:
        place["dtype"] = resolve_dtype(dtype, found, DTYPES)
    return place


def _check_arguments(
    recipe: Recipe, parameters: Parameters, arguments: Mapping[str, object]
) -> None:
    """Raise unless the arguments are known, of the annotated types, and complete."""
    for argument, value in arguments.items():
        if argument not in parameters:
            raise TypeError(
                f"{recipe.name} has no argument {argument!r}: {did_you_mean(argument, parameters)}"
            )
        _check_argument(argument, value, str(parameters[argument].annotation))
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments
    ]
    if missing:
        raise TypeError(f"{recipe.name} is missing required arguments: {', '.join(missing)}")


@contextmanager
def _explain_errors(recipe: Recipe, arguments: Mapping[str, object]) -> Iterator[None]:
    """Name the recipe and the call in errors of its function."""
    try:
        yield
    except Unsupported as error:
        raise Unsupported(_unsupported_message(recipe, arguments, error)) from None
    except ValueError as error:
        # The failing module may call the argument something else, so show the call.
        call = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(f"{error}, in {recipe.name}({call})") from None


def _unsupported_message(found: Recipe, arguments: Mapping[str, Any], error: Unsupported) -> str:
    reason = found.can().reason("causal") if arguments.get("causal") else None
    if reason is None:
        return f"{found.name}: {error}"
    return (
        f"{found.name} does not support causal=True: {reason}. "
        "Causal alternatives: local, linear, performer."
    )


_TYPE_NAMES = {
    "int": "an integer",
    "float": "a finite number",
    "bool": "True or False",
    "str": "a string",
}


def _check_argument(name: str, value: object, annotation: str) -> None:
    """Check a value against its annotation, if that consists of plain types."""
    kinds = [kind.strip() for kind in annotation.split("|")]
    if not set(kinds) <= {*_TYPE_NAMES, "None"} or (value is None and "None" in kinds):
        return
    if any(_is_instance(value, kind) for kind in kinds if kind != "None"):
        return
    if isinstance(value, int) and not isinstance(value, bool) and "int" in kinds:
        raise ValueError(f"{name} must be between -2^53 and 2^53, not {value!r}")
    expected = " or ".join(_TYPE_NAMES.get(kind, kind) for kind in kinds)
    raise (TypeError if kinds == ["bool"] else ValueError)(
        f"{name} must be {expected}, not {value!r}"
    )


def _is_instance(value: object, kind: str) -> bool:
    if kind in ("bool", "str"):
        return isinstance(value, bool if kind == "bool" else str)
    number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
    return number and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]
