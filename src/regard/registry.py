"""The recipe registry: named functions that build mixers.

    @recipe("Zaheer et al. 2020", arxiv="2007.14062", family="sparse", formula="softmax over ...")
    def bigbird(dim, heads, *, length, block=64, causal=False): ...

Other packages add recipes through the entry-point group "regard.recipes". Entry points are loaded
on the first lookup.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any

from regard.errors import Unsupported, did_you_mean
from regard.mixer import Can, Mixer
from regard.recipe_index import (
    ENTRY_POINT_GROUP,
    FAMILIES as FAMILIES,
    check_capabilities,
    find_family,
)

MAX_NUMBER = 1 << 53  # larger arguments cannot be sizes

RecipeFunction = Callable[..., Mixer]


@dataclass(frozen=True)
class Recipe:
    """A registered function that builds a mixer, with its paper.

    Attributes:
        name: Name in the registry, which is the name of the function.
        build: The function: `(dim, heads, *, causal=False, ...) -> Mixer`.
        paper: Authors and year.
        arxiv: arXiv number, or "".
        family: Key of `FAMILIES`, or "".
        formula: The mixer in one line.
        example_kwargs: Arguments for an example of about twenty tokens, used by tests and pictures.
        listed: False for variants that reproduce one published checkpoint: `create` finds them,
            listings do not.
    """

    name: str
    build: RecipeFunction
    paper: str
    arxiv: str
    family: str
    formula: str
    example_kwargs: Mapping[str, Any]
    listed: bool = True

    @property
    def summary(self) -> str:
        """First sentence of the docstring."""
        text = " ".join((inspect.getdoc(self.build) or "").split("\n\n")[0].split())
        return text.split(". ")[0].rstrip(".")

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Parameters of the function, by name."""
        return inspect.signature(self.build).parameters

    def default_heads(self, otherwise: int) -> int:
        """Default number of heads of the recipe, or `otherwise` if it has none."""
        default = self.parameters["heads"].default
        return otherwise if default is inspect.Parameter.empty else int(default)

    def example(self, dim: int = 8, *, causal: bool | None = None) -> Mixer:
        """Build a small example; `causal=None` takes the default of the recipe."""
        if causal is None:
            causal = bool(self.parameters["causal"].default)
        return self.build(dim, self.default_heads(2), **self.example_kwargs, causal=causal)

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
    return can & Can(
        supports_global_mask=True, causal=reason, stream="only causal mixers can stream"
    )


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
    """Register the decorated function as a recipe under its name; see `Recipe` for arguments."""

    def register(build: RecipeFunction) -> RecipeFunction:
        name = build.__name__
        known = _recipes.get(name)
        if known is not None and build.__module__ not in (known.build.__module__, "__main__"):
            raise ValueError(f"Recipe {name!r} is already registered by {known.build.__module__}.")
        kwargs = dict(example_kwargs or {})
        _recipes[name] = Recipe(name, build, paper, arxiv, family, formula, kwargs, listed)
        return build

    return register


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


def create(name: str, /, **arguments: Any) -> Mixer:
    """Build a mixer by recipe name: `create("bigbird", dim=512, heads=8, length=4096)`.

    Unknown names and arguments raise an error that names the closest match.
    """
    found = get_recipe(name)
    parameters = found.parameters
    for argument, value in arguments.items():
        if argument not in parameters:
            raise TypeError(
                f"{name} has no argument {argument!r}: {did_you_mean(argument, parameters)}"
            )
        _check_argument(argument, value, str(parameters[argument].annotation))
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments
    ]
    if missing:
        raise TypeError(f"{name} is missing required arguments: {', '.join(missing)}")
    try:
        mixer = found.build(**arguments)
    except Unsupported as error:
        raise Unsupported(_unsupported_message(found, arguments, error)) from None
    except ValueError as error:
        # The failing module may call the argument something else, so show the call.
        call = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(f"{error}, in {name}({call})") from None
    mixer.name = name  # used in error messages
    return mixer


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
    expected = " or ".join(_TYPE_NAMES.get(kind, kind) for kind in kinds)
    raise (TypeError if kinds == ["bool"] else ValueError)(
        f"{name} must be {expected}, not {value!r}"
    )


def _is_instance(value: object, kind: str) -> bool:
    if kind in ("bool", "str"):
        return isinstance(value, bool if kind == "bool" else str)
    number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
    return number and not isinstance(value, bool) and -MAX_NUMBER < value < MAX_NUMBER  # type: ignore[operator]
