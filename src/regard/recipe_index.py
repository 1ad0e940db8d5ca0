"""The recipes as data: name, family, paper and capabilities, without importing torch.

`recipes/index.json` is generated from the registry, and a test keeps it up to date. Write it again
after adding or changing a recipe:

    python -m regard.recipe_index
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from regard.can import CAPABILITIES
from regard.errors import did_you_mean

ENTRY_POINT_GROUP = "regard.recipes"
INDEX_FILE = Path(__file__).parent / "recipes" / "index.json"
FAMILIES = {  # in the order of listings
    "early": "before 2017",
    "dense": "dense softmax attention",
    "sparse": "sparse by position",
    "routed": "sparse by content",
    "linear": "linear attention and recurrences",
    "compressed": "low-rank and compressed attention",
    "priors": "priors and head variants",
    "attention-free": "token mixing without attention",
    "hybrid": "attention combined with other layers",
}

Entry = dict[str, Any]


def find_family(family: str) -> str:
    """The key of a family, given its key or title in any case."""
    keys = {title: key for key, title in FAMILIES.items()} | {key: key for key in FAMILIES}
    if family.lower() not in keys:
        raise ValueError(f"no family {family!r}: {did_you_mean(family.lower(), keys)}")
    return keys[family.lower()]


def check_capabilities(names: Iterable[str]) -> list[str]:
    """The names as a list; an unknown one raises."""
    names = list(names)
    for name in names:
        if name not in CAPABILITIES:
            raise ValueError(f"no capability {name!r}: {did_you_mean(name, CAPABILITIES)}")
    return names


def find_entries(
    pattern: str = "",
    *,
    family: str | None = None,
    can: Iterable[str] = (),
    registered: bool = False,
) -> list[Entry]:
    """Return the recipes that match, as `regard.list_recipes` does, with what is known of them.

    The registry, and with it torch, is imported only if other packages add recipes.

    Args:
        registered: Use the registry, because plugins have added recipes.
    """
    family = None if family is None else find_family(family)
    capabilities = check_capabilities(can)
    entries: list[Entry] = json.loads(INDEX_FILE.read_text(encoding="utf-8"))
    if registered or metadata.entry_points(group=ENTRY_POINT_GROUP):
        from regard.registry import list_recipes

        known = {entry["name"]: entry for entry in entries}
        entries = [known.get(name) or describe(name) for name in list_recipes()]
    return [
        entry
        for entry in entries
        if family in (None, entry["family"])
        and fnmatchcase(entry["name"], pattern or "*")
        and all(entry["can"][name] for name in capabilities)
    ]


def describe(name: str) -> Entry:
    """Return the entry of a recipe, computed by building an example of it."""
    from regard.registry import get_recipe
    from regard.show.build import build_example, mixer_capabilities
    from regard.show.description import recipe_json

    recipe = get_recipe(name)
    mixer = build_example(recipe, 32)
    arguments = {**recipe.example_kwargs, "dim": mixer.dim, "heads": mixer.dim // 8}
    return recipe_json(recipe, mixer_capabilities(recipe, mixer, arguments))


def build_index() -> list[Entry]:
    """Return the entries of all recipes of this package."""
    from regard.registry import get_recipe, list_recipes

    names = (name for name in list_recipes() if is_builtin(get_recipe(name).function.__module__))
    return [describe(name) for name in names]


def is_builtin(module: str) -> bool:
    """Whether a module belongs to this package."""
    return module.partition(".")[0] == "regard"


if __name__ == "__main__":
    text = json.dumps(build_index(), indent=1, ensure_ascii=False)
    INDEX_FILE.write_text(text + "\n", encoding="utf-8")
