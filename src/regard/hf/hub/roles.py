"""What the layers of a model are: which ask the interface for their attention, which are causal, which look elsewhere.

Transformers says this nowhere in one place, so it is read off the modules: the code of `forward`, attributes, and names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

ELSEWHERE = re.compile(r"cross_?att|encoder_att|enc_?dec_?att|co_?attention", re.IGNORECASE)
CAUSAL_MASKS = {
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_chunked_causal_mask",
}
OTHER_MASKS = {"create_bidirectional_mask", "create_bidirectional_sliding_window_mask"}

ROLE = "_regard_role"  # on the module itself, so that a copy of a model knows it too
CROSS, CAUSAL, WHOLE = "cross", "causal", "whole"


@lru_cache(4096)
def _words(kind: Any) -> frozenset[str]:
    """The names that the methods of a class use."""
    own = [
        f
        for base in kind.__mro__
        if base not in nn.Module.__mro__
        for f in vars(base).values()
        if inspect.isroutine(f)
    ]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in own if callable(f)]
    return frozenset(name for code in codes if code is not None for name in code.co_names)


def asks(kind: type[nn.Module]) -> bool:
    """Whether modules of this class ask the interface for their attention."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that ask the interface, with their names."""
    return [(name, module) for name, module in model.named_modules() if asks(type(module))]


def stubborn(model: nn.Module) -> list[nn.Module]:
    """Attention of a model's own that does not ask the interface: a mask in our form, or a name, would mean nothing to it."""
    own = type(model).__module__.split(".")[0]

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if asks(type(module)):
            return
        found = [x for child in module.children() for x in walk(child)]
        yield from found
        kind = type(module)
        projects = any(
            type(child).__name__ in ("Linear", "Conv1D", "Conv2d") for child in module.children()
        )
        named = "Attention" in kind.__name__ and kind.__module__.split(".")[0] == own
        if named and projects and not found and not layers(module):
            yield module

    return list(walk(model))


def note(model: nn.Module) -> None:
    """Remember which layers of a model look elsewhere and which are causal, as far as it shows from outside of them."""
    for name, module in layers(model):
        parents = [type(model.get_submodule(prefix)) for prefix in _prefixes(name)]
        path = ".".join(
            (name.split(".")[-1], *(kind.__name__ for kind in parents[-2:]), type(module).__name__)
        )
        told = getattr(module, "is_cross_attention", None)
        if told is True or ELSEWHERE.search(path) or _decodes_without_past(module):
            role = CROSS
        else:
            looks_back = bool(getattr(module, "is_causal", False)) or (
                _among_causal(parents) and not _both_ways(module)
            )
            role = CAUSAL if looks_back else WHOLE
        setattr(module, ROLE, role)


def _prefixes(name: str) -> list[str]:
    pieces = name.split(".") if name else []
    return [".".join(pieces[:i]) for i in range(len(pieces))]


def _decodes_without_past(module: nn.Module) -> bool:
    """How the layers of BART and its many kin tell: part of a decoder, and not causal."""
    return (
        getattr(module, "is_decoder", False) is True and getattr(module, "is_causal", None) is False
    )


def _among_causal(parents: list[type]) -> bool:
    """Whether the nearest of the enclosing modules that makes masks makes causal ones only, as the text half of CLIP."""
    for kind in reversed(parents):
        words = _words(kind)
        if words & (CAUSAL_MASKS | OTHER_MASKS):
            return not words & OTHER_MASKS
    return False


def _both_ways(module: nn.Module) -> bool:
    """Whether the configuration makes an encoder of what is a decoder by its code, as EmbeddingGemma."""
    return getattr(getattr(module, "config", None), "use_bidirectional_attention", None) in (
        True,
        "all",
    )


def is_cross(module: nn.Module) -> bool:
    """Whether a layer looks at another sequence."""
    role = getattr(module, ROLE, None)
    return _decodes_without_past(module) if role is None else role == CROSS


def is_causal(module: nn.Module) -> bool:
    """Whether a layer calls itself causal."""
    return getattr(module, ROLE, None) != CROSS and bool(getattr(module, "is_causal", False))


def is_among_causal(module: nn.Module) -> bool:
    """Whether a layer is causal by itself or by where it stands."""
    return getattr(module, ROLE, None) == CAUSAL


def length_of(module: nn.Module) -> int | None:
    """The longest sequence that the configuration of a layer, or of a model, speaks of."""
    return getattr(getattr(module, "config", None), "max_position_embeddings", None)


def has_window(module: nn.Module) -> bool:
    """Whether a layer sees a window of its own; some tell it themselves, others leave it to the configuration."""
    config = getattr(module, "config", None)
    by_layer = getattr(config, "layer_types", None)
    of_config = (
        getattr(config, "sliding_window", None)
        if by_layer is None or "sliding_attention" in by_layer
        else None
    )
    return bool(getattr(module, "sliding_window", of_config))


def has_chunks(module: nn.Module) -> bool:
    """Whether a layer may see chunks of its own, as in Llama 4."""
    return "chunked_attention" in (
        getattr(getattr(module, "config", None), "layer_types", None) or ()
    )
