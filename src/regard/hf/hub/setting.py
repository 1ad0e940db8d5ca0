"""When a name is set, not when it runs: which model it is set in, and whether the recipe can do what its layers ask.

Three methods of `PreTrainedModel` are wrapped, for names that begin with "regard:" and for no others:

    get_correct_attn_implementation   asked for each name, by a model under construction too: here names are registered
    post_init                         the end of each construction, before any weight is loaded: here the layers are known
    set_attn_implementation           after a refusal all configurations are as they were
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from regard.attentions import SoftmaxAttention
from regard.attentions.kv_cache import KVCacheAttention
from regard.errors import Unsupported, did_you_mean
from regard.hf.hub import names, roles
from regard.hf.hub.functions import forward
from regard.hf.hub.masks import mask_function
from regard.hf.hub.names import PREFIX, AttentionSpec
from regard.mixer import Attention

NOT_ASKED = (
    "does not ask transformers' AttentionInterface for its attention, so no name can change it; "
    "regard.swap is for such models, where it knows their attention"
)


def ensure(name: str) -> AttentionSpec:
    """Register a name, if it is right, with the attention and with the mask interface."""
    spec = names.parse(name)
    AttentionInterface.register(name, partial(forward, spec))
    AttentionMaskInterface.register(name, mask_function)
    return spec


def is_ours(name: object) -> bool:
    """Whether a name is for us."""
    return isinstance(name, str) and name.startswith(PREFIX)


# ---------------------------------------------------------------------------------------------- does it fit?
def check(model: PreTrainedModel) -> None:
    """Refuse, with the reason, what the layers of a model cannot be."""
    asked = [sub for sub in _models(model) if is_ours(sub.config._attn_implementation)]
    if not asked:
        return
    roles.note(model)
    for sub in asked:
        left = roles.stubborn(sub)
        kind = type(left[0]) if left else type(sub)
        if left or not roles.layers(sub):
            raise Unsupported(f"{sub.config._attn_implementation}: {kind.__name__} {NOT_ASKED}")
    for name, module in roles.layers(model):
        implementation = _implementation(module, model)
        if is_ours(implementation):
            _check_layer(names.parse(implementation), f"{name} of {type(model).__name__}", module)


def _models(model: nn.Module) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _implementation(module: nn.Module, model: PreTrainedModel) -> Any:
    config = getattr(module, "config", model.config)
    return getattr(config, "_attn_implementation", None)


def _check_layer(spec: AttentionSpec, where: str, module: nn.Module) -> None:
    cross = roles.is_cross(module)
    spec = spec.for_cross if cross else spec
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    heads = heads if isinstance(heads, int) else names.TRIAL["heads"]
    try:
        inner = spec.build(
            heads=heads,
            width=names.TRIAL["width"],
            causal=not cross and roles.is_among_causal(module),
            length=roles.length_of(module),
        )
    except Unsupported as refusal:
        raise Unsupported(f"{where} is causal: {refusal}") from None
    reason = _why_not(inner, module, cross)
    if reason is not None:
        raise Unsupported(f"{where} {reason.format(spec=spec)}")


def _why_not(inner: Attention, module: nn.Module, cross: bool) -> str | None:
    """What a layer asks for that an attention cannot give."""
    elsewhere = names.why_not_cross(inner) if cross else None
    if elsewhere is not None:
        dense = "cross=vanilla in the name leaves such layers dense"
        return f"looks at another sequence, and {{spec}} cannot: {elsewhere}; {dense}"
    if getattr(module, "attn_logit_softcapping", None):
        return "caps its scores, which {spec} cannot"
    if isinstance(getattr(module, "sinks", None), nn.Parameter):
        return "has learned sinks beside its keys, which {spec} cannot"
    if roles.has_window(module) and not isinstance(inner, KVCacheAttention):
        return "sees a window of its own, and {spec} sees all keys or all before it"
    if roles.has_chunks(module) and not (
        isinstance(inner, SoftmaxAttention) and names.shiftless(inner)
    ):
        return "sees chunks of its own, and {spec} goes by positions, or sees all keys before it"
    biased = hasattr(module, "has_relative_attention_bias")
    if biased and (not isinstance(inner, SoftmaxAttention) or inner.prior is not None):
        return "adds a position bias to its scores, and {spec} has none to add to"
    return None


# ---------------------------------------------------------------------------------------------- the three methods
def _wrap(method: str, around: Callable[..., Any]) -> None:
    """Put a function around a method of all models; once, however often this is imported."""
    original = getattr(PreTrainedModel, method)
    if getattr(original, "_regard", False):
        return

    @wraps(original)
    def wrapped(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return around(partial(original, self), self, *args, **kwargs)

    wrapped._regard = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, method, wrapped)


def _correct(
    original: Callable[..., str],
    model: PreTrainedModel,
    asked: str | None,
    *args: Any,
    **kwargs: Any,
) -> str:
    if is_ours(asked):
        assert asked is not None
        ensure(asked)
    return original(asked, *args, **kwargs)


def _post_init(original: Callable[[], None], model: PreTrainedModel) -> None:
    original()
    check(model)


def _set(
    original: Callable[..., None],
    model: PreTrainedModel,
    asked: str | dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    ours = [name for name in _flat(asked) if is_ours(name)]
    if not ours:
        return original(asked, *args, **kwargs)
    _check_parts(asked, model)
    for name in ours:
        ensure(name)
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        original(asked, *args, **kwargs)
        _check_taken(asked, ours, model)
        check(model)
    except BaseException:
        for config, name in before:
            config._attn_implementation_internal = name
        raise


def _check_parts(asked: str | dict[str, Any], model: PreTrainedModel) -> None:
    """The parts that a dict names exist; "" is the model itself."""
    for key in asked if isinstance(asked, dict) else ():
        if key and key not in model.config.sub_configs:
            parts = list(model.config.sub_configs)
            hint = did_you_mean(key, parts) if parts else "it has none: give the name alone"
            raise ValueError(f"{type(model).__name__} has no part {key!r}: {hint}")


def _check_taken(asked: str | dict[str, Any], ours: list[str], model: PreTrainedModel) -> None:
    """Where a part of a model does not ask for its attention, transformers warns and goes on; we do not."""
    for part in _models(model) if isinstance(asked, str) else ():
        if part.config._attn_implementation != asked:
            raise Unsupported(f"{asked}: {type(part).__name__} {NOT_ASKED}")
    taken = {config._attn_implementation for config in _configs(model)}
    for name in ours:
        if name not in taken:
            raise Unsupported(
                f"{name}: the part of {type(model).__name__} that it is for {NOT_ASKED}"
            )


def _flat(asked: Any) -> Iterator[Any]:
    if isinstance(asked, dict):
        for value in asked.values():
            yield from _flat(value)
    else:
        yield asked


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every configuration in a model, its parts' too."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [sub.config for sub in _models(model)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return list(found.values())


def install() -> list[str]:
    """Register every suitable recipe under its plain name, and begin to watch over models; returns the names."""
    _wrap("get_correct_attn_implementation", _correct)
    _wrap("post_init", _post_init)
    _wrap("set_attn_implementation", _set)
    plain = [f"{PREFIX}{recipe}" for recipe in names.suitable()]
    for name in plain:
        ensure(name)
    return plain
