"""Attention names in transformers models: registered when first used, checked when set.

Importing this module patches transformers, which has no public hook for this: three methods of
`PreTrainedModel` are wrapped. The wrappers act on names that begin with "regard:" only.

- `get_correct_attn_implementation` sees every name, also while a model is built. The wrapper
  registers the name.
- At `post_init` the layers exist, and weights are not loaded yet. The wrapper checks that the name
  fits the layers.
- The wrapper of `set_attn_implementation` checks this too, and restores the configurations if not.
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
from regard.hf import attention_functions, introspection, masks
from regard.hf.attention_spec import (
    PREFIX,
    TRIAL_HEAD_DIM,
    TRIAL_HEADS,
    AttentionSpec,
    is_shift_invariant,
    make_spec,
    parse_name,
    why_not_cross,
)
from regard.mixer import Attention

NO_INTERFACE = (
    "does not use transformers' AttentionInterface, so attention names have no effect on it. "
    "Use regard.swap, which supports some of these models."
)


def register(recipe: str, /, **arguments: Any) -> str:
    """Register a recipe with arguments and return its name, e.g. "regard:local?window=256".

    Names are also registered when they are first set, so this only saves writing the name by hand.
    """
    name = str(make_spec(recipe, **arguments))
    register_name(name)
    return name


def register_name(name: str) -> None:
    """Check a name and register it with the attention interface and the mask interface."""
    AttentionInterface.register(
        name, partial(attention_functions.attention_forward, parse_name(name))
    )
    AttentionMaskInterface.register(name, masks.create_mask)


def is_regard_name(name: object) -> bool:
    """Whether an attention implementation is a Regard attention name."""
    return isinstance(name, str) and name.startswith(PREFIX)


# ------------------------------------------------------------------------- does a name fit a model?
def check_model(model: PreTrainedModel) -> None:
    """Raise `Unsupported` if a layer of the model cannot use the attention of its name."""
    ours = [
        sub
        for sub in introspection.submodels(model)
        if is_regard_name(sub.config._attn_implementation)
    ]
    if not ours:
        return
    introspection.annotate_roles(model)
    for submodel in ours:
        module = introspection.layer_without_interface(submodel)
        if module is not None:
            raise Unsupported(
                f"{submodel.config._attn_implementation}: {type(module).__name__} {NO_INTERFACE}"
            )
    for path, layer in introspection.attention_layers(model):
        config: Any = getattr(layer, "config", model.config)
        name: Any = getattr(config, "_attn_implementation", None)
        if is_regard_name(name):
            check_layer(parse_name(name), layer, f"{path} of {type(model).__name__}")


def check_layer(spec: AttentionSpec, layer: nn.Module, where: str) -> None:
    """Raise `Unsupported` if a layer cannot use an attention; `where` names the layer."""
    cross = introspection.is_cross(layer)
    spec = spec.for_cross if cross else spec
    heads = getattr(getattr(layer, "config", None), "num_attention_heads", None)
    try:
        inner = spec.build(
            heads=heads if isinstance(heads, int) else TRIAL_HEADS,
            head_dim=TRIAL_HEAD_DIM,
            causal=getattr(layer, introspection.ROLE, None) == introspection.CAUSAL,
            length=introspection.max_positions(layer),
        )
    except Unsupported as refusal:
        raise Unsupported(f"{where} is causal: {refusal}") from None
    reason = why_not_layer(inner, layer, str(spec))
    if reason is not None:
        raise Unsupported(f"{where} {reason}.")


def why_not_layer(inner: Attention, layer: Any, name: str) -> str | None:
    """What a layer needs that an attention does not support, or None if it fits."""
    softmax = isinstance(inner, SoftmaxAttention)
    if introspection.is_cross(layer) and (reason := why_not_cross(inner)) is not None:
        return (
            f"is cross-attention, which {name} does not support: {reason}; "
            "add cross=vanilla to the name for dense cross-attention"
        )
    if getattr(layer, "attn_logit_softcapping", None) and not softmax:
        return f"caps its attention scores, which {name} does not support"
    if isinstance(getattr(layer, "sinks", None), nn.Parameter) and not softmax:
        return f"has learned sinks, which {name} does not support"
    if introspection.has_sliding_window(layer) and not isinstance(inner, KVCacheAttention):
        return f"has a sliding window, but {name} sees all keys or all past keys"
    if introspection.has_chunks(layer) and not (softmax and is_shift_invariant(inner)):
        return (
            f"attends within chunks, but {name} depends on absolute positions or sees all past keys"
        )
    if hasattr(layer, "has_relative_attention_bias") and (not softmax or inner.prior is not None):
        return f"adds a position bias to its scores, which {name} does not support"
    return None


# ------------------------------------------------------------------------------ the wrapped methods
def patch_transformers() -> None:
    """Wrap the three methods of `PreTrainedModel`, once."""
    for method, wrapper in (
        ("get_correct_attn_implementation", _get_correct_attn_implementation),
        ("post_init", _post_init),
        ("set_attn_implementation", _set_attn_implementation),
    ):
        original = getattr(PreTrainedModel, method)
        if not hasattr(original, "_regard"):
            setattr(PreTrainedModel, method, _wrap(original, wrapper))


def _wrap(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return wrapper(partial(original, self), self, *args, **kwargs)

    method._regard = True  # type: ignore[attr-defined]
    return method


def _get_correct_attn_implementation(
    original: Callable[..., str],
    model: PreTrainedModel,
    requested: str | None,
    *args: Any,
    **kwargs: Any,
) -> str:
    if requested is not None and is_regard_name(requested):
        register_name(requested)
    return original(requested, *args, **kwargs)


def _post_init(original: Callable[[], None], model: PreTrainedModel) -> None:
    original()
    check_model(model)


def _set_attn_implementation(
    original: Callable[..., None],
    model: PreTrainedModel,
    requested: str | dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    ours = [name for name in _flatten(requested) if is_regard_name(name)]
    if not ours:
        return original(requested, *args, **kwargs)

    # transformers ignores unknown keys of a dict; "" is the model itself.
    for key in requested if isinstance(requested, dict) else ():
        if key and key not in model.config.sub_configs:
            known = list(model.config.sub_configs)
            hint = (
                did_you_mean(key, known) if known else "it has no sub-models, give the name alone."
            )
            raise ValueError(f"{type(model).__name__} has no sub-model {key!r}: {hint}")
    for name in ours:
        register_name(name)
    before = [(config, config._attn_implementation_internal) for config in model_configs(model)]
    try:
        original(requested, *args, **kwargs)
        # Where a model does not use the interface, transformers only warns.
        for submodel in introspection.submodels(model) if isinstance(requested, str) else ():
            if submodel.config._attn_implementation != requested:
                raise Unsupported(f"{requested}: {type(submodel).__name__} {NO_INTERFACE}")
        in_use = {config._attn_implementation for config in model_configs(model)}
        for name in ours:
            if name not in in_use:
                raise Unsupported(
                    f"{name}: the sub-model of {type(model).__name__} that it is for {NO_INTERFACE}"
                )
        check_model(model)
    except BaseException:
        for config, name in before:
            config._attn_implementation_internal = name
        raise


def _flatten(requested: Any) -> Iterator[Any]:
    if isinstance(requested, dict):
        for value in requested.values():
            yield from _flatten(value)
    else:
        yield requested


def model_configs(model: PreTrainedModel) -> list[Any]:
    """All configurations of a model, including those of its sub-models."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [sub.config for sub in introspection.submodels(model)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return list(found.values())


patch_transformers()
