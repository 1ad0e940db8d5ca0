"""The registry: a paper is a function, and the function is the entry.

    @recipe("Zaheer et al. 2020", arxiv="2007.14062", row="C10", formula="softmax over window, global and random blocks")
    def bigbird(dim, heads, *, length, block=64, causal=False): ...

Other packages add theirs under the entry-point group "regard.recipes"; they are loaded on the first look-up.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from typing import Any

from regard.errors import Unsupported, did_you_mean
from regard.mixer import CAPABILITIES, Can, Mixer

GROUP = "regard.recipes"
FAMILIES = {
    "A": "before 2017",
    "B": "2017 and its parts",
    "C": "sparse by position",
    "D": "sparse by content",
    "E": "linearised",
    "F": "low rank and compressed",
    "G": "priors and heads",
    "H": "without attention",
    "I": "around attention",
}

RecipeFunction = Callable[..., Mixer]


@dataclass(frozen=True)
class Recipe:
    """A mechanism of the literature.

    build    the function: (dim, heads, *, causal=False, ...) -> Mixer
    paper    author and year; `arxiv` its number, or ""
    row      its place in the catalogue, such as "C10"
    formula  one line
    small    arguments at which it shows itself on some twenty tokens: for tests and pictures
    """

    name: str
    build: RecipeFunction
    paper: str
    arxiv: str
    row: str
    formula: str
    small: Mapping[str, Any]

    @property
    def family(self) -> str:
        """The letter of the catalogue."""
        return self.row[:1]

    @property
    def summary(self) -> str:
        """The first sentence of the docstring."""
        text = " ".join((inspect.getdoc(self.build) or "").split("\n\n")[0].split())
        return text.split(". ")[0].rstrip(".")

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What may be given to it."""
        return inspect.signature(self.build).parameters

    def example(self, dim: int = 8, *, causal: bool | None = None) -> Mixer:
        """A small one, with two heads unless it prefers another number; causal where that is asked, or its default."""
        causal = bool(self.parameters["causal"].default) if causal is None else causal
        preferred = self.parameters["heads"].default
        return self.build(
            dim,
            2 if preferred is inspect.Parameter.empty else preferred,
            **self.small,
            causal=causal,
        )

    def causal_options(self) -> list[bool]:
        """What `causal` may be, found out by building it."""
        found = []
        for causal in (False, True):
            with suppress(Unsupported):
                self.example(causal=causal)
                found.append(causal)
        return found

    def can(self) -> Can:
        """What it promises, found out by building it: causal or not, it is the same but for what causality costs."""
        plain = self.example().can
        try:
            self.example(causal=True)
        except Unsupported as refusal:
            return plain & Can(
                supports_global_mask=True, causal=str(refusal), stream="only a causal form can"
            )
        return plain


_recipes: dict[str, Recipe] = {}


def recipe(
    paper: str,
    *,
    arxiv: str = "",
    row: str = "",
    formula: str = "",
    small: Mapping[str, Any] | None = None,
) -> Callable[[RecipeFunction], RecipeFunction]:
    """Register the decorated function under its name; see `Recipe` for the arguments."""

    def register(build: RecipeFunction) -> RecipeFunction:
        name = build.__name__
        known = _recipes.get(name)
        if known is not None and build.__module__ not in (known.build.__module__, "__main__"):
            raise ValueError(f"there is a recipe {name!r} already, from {known.build.__module__}")
        _recipes[name] = Recipe(name, build, paper, arxiv, row, formula, dict(small or {}))
        return build

    return register


@lru_cache(1)
def _loaded() -> dict[str, Recipe]:
    import_module("regard.recipes")
    for entry in metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # one broken package must not take the others with it
            warnings.warn(
                f"the recipe {entry.name!r} of {entry.value!r} could not be loaded: {error}",
                stacklevel=2,
            )
    return _recipes


def get_recipe(name: str) -> Recipe:
    """The recipe of that name; a wrong one raises with the nearest that exists."""
    recipes = _loaded()
    if name not in recipes:
        raise ValueError(f"no recipe {name!r}: {did_you_mean(str(name), recipes)}")
    return recipes[name]


def list_recipes(family: str | None = None, *, can: Iterable[str] = ()) -> list[str]:
    """The names of all recipes, of one family ("C" or "sparse by position"), or of those that promise all of `can`."""
    wanted = [can] if isinstance(can, str) else list(can)
    for promise in wanted:
        if promise not in CAPABILITIES:
            raise ValueError(f"no promise {promise!r}: {did_you_mean(promise, CAPABILITIES)}")
    letter = None if family is None else _letter(family)
    found = (r for r in _loaded().values() if letter in (None, r.family))
    return [r.name for r in sorted(found, key=_place) if all(getattr(r.can(), p) for p in wanted)]


def _letter(family: str) -> str:
    letters = {name: letter for letter, name in FAMILIES.items()} | {
        letter: letter for letter in FAMILIES
    }
    key = family.upper() if len(family) == 1 else family.lower()
    if key not in letters:
        raise ValueError(f"no family {family!r}: {did_you_mean(family, letters)}")
    return letters[key]


def _place(r: Recipe) -> tuple[str, int, str]:
    number = r.row[1:]
    return r.family or "~", int(number) if number.isdigit() else 0, r.name


def create(name: str, /, **arguments: Any) -> Mixer:
    """Build a mixer by name: `create("bigbird", dim=512, heads=8, length=4096)`.

    Unknown names and arguments raise, with the nearest that exist.
    """
    found = get_recipe(name)
    parameters = found.parameters
    for argument in arguments:
        if argument not in parameters:
            raise TypeError(
                f"{name} takes no argument {argument!r}: {did_you_mean(argument, parameters)}"
            )
        _check(argument, arguments[argument], str(parameters[argument].annotation))
    missing = [
        p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments
    ]
    if missing:
        raise TypeError(f"{name} needs {', '.join(missing)}")
    try:
        mixer = found.build(**arguments)
    except Unsupported as refusal:
        raise Unsupported(f"{name}: {refusal}") from None
    except ValueError as error:  # a part may know the argument by another name: say what was given
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ValueError(f"{error}, in {name}({given})") from None
    mixer.name = name  # so that its messages name what was asked for
    return mixer


WORDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "True or False",
    "str": "a word",
}
LARGEST = 1 << 53  # numbers beyond are no sizes


def _check(name: str, value: object, annotation: str) -> None:
    """A value must be of its annotated type, where that is a plain one."""
    kinds = [kind.strip() for kind in annotation.split("|")]
    if not set(kinds) <= {*WORDS, "None"} or (value is None and "None" in kinds):
        return
    if any(_is(value, kind) for kind in kinds if kind != "None"):
        return
    expected = " or ".join(WORDS.get(kind, kind) for kind in kinds)
    raise (TypeError if kinds == ["bool"] else ValueError)(
        f"{name} must be {expected}, not {value!r}"
    )


def _is(value: object, kind: str) -> bool:
    if kind in ("bool", "str"):
        return isinstance(value, bool if kind == "bool" else str)
    number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
    return number and not isinstance(value, bool) and -LARGEST < value < LARGEST  # type: ignore[operator]
