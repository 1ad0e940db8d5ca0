"""Attention functions for Hugging Face transformers: importing this registers them.

    import regard.hf.hub
    from transformers import AutoModel

    model = AutoModel.from_pretrained("bert-base-uncased", attn_implementation="regard:bigbird")
    model.set_attn_implementation("regard:local?window=256")
    model.set_attn_implementation(regard.hf.hub.register("local", window=256))  # the same

`regard.hf.hub.NAMES` lists the plain names.  docs/hugging-face.md says what is honoured and what is refused.
"""

from __future__ import annotations

from typing import Any

from regard.hf.hub.names import make

try:
    from regard.hf.hub.setting import ensure, install
except ImportError as error:
    if (error.name or "").partition(".")[0] != "transformers":
        raise
    raise ImportError(
        "regard.hf.hub needs transformers, 5 or newer: pip install 'regard[hf]'",
        name="transformers",
    ) from error

__all__ = ["NAMES", "register"]

NAMES = install()


def register(recipe: str, /, **arguments: Any) -> str:
    """Register a recipe with arguments, checked, and return its name: "regard:local?window=256".

    A name need not be registered before it is set; this is for those who would rather not write names by hand.
    """
    name = str(make(recipe, **arguments))
    ensure(name)
    return name
