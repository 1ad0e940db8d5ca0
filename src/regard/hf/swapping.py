"""`swap` replaces the attention layers of a model by mixers, in place, and `restore` undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.block import Block
from regard.device import autocast, resolve_device, resolve_dtype
from regard.errors import Unsupported
from regard.hf.drift import LayerChange, SwapReport, evaluate_metric, measure_drift, model_outputs
from regard.hf.families import ADAPTERS, find_adapter
from regard.hf.families.base import AttentionAdapter, AttentionWeights
from regard.hf.families.regard_models import MIXER_ADAPTER
from regard.hf.fitting import fit_mixer
from regard.hf.model_inputs import make_batches
from regard.hf.modules import Replacement, SwappedAttention, SwappedMixer, install_capturing_hooks
from regard.mixer import Mixer
from regard.models.config import ModuleSpec
from regard.models.model import Model
from regard.registry import LayerNumber, derive_seed, get_recipe

# Attributes of a swapped model, for `restore`.
BEFORE_RECOVERY = (
    "_regard_before_recovery"  # weights that `recover` changed outside the mixers, by name
)
NESTED_TENSOR_BEFORE = (
    "_regard_nested_tensor_before"  # use_nested_tensor of an nn.TransformerEncoder
)
CONFIG_BEFORE = (
    "_regard_config_before"  # configuration of a Regard model, which no longer describes it
)

Layers = Sequence[int] | slice | range | Mapping[int, str | ModuleSpec] | int | None


class AttentionSite(NamedTuple):
    """An attention layer: its number, its path, the module there, and its adapter."""

    layer: int
    path: str
    module: nn.Module
    adapter: AttentionAdapter

    @property
    def is_swapped(self) -> bool:
        """Whether the module is a replacement."""
        return isinstance(self.module, Replacement)

    @property
    def old(self) -> nn.Module:
        """The layer before any swap."""
        return self.module.old if isinstance(self.module, Replacement) else self.module


def swap(
    model: nn.Module,
    mixer: str | ModuleSpec | None = None,
    layers: Layers = None,
    report: Any = None,
    *,
    tokenizer: Any = None,
    metric: Callable[[nn.Module], float] | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "float32",
    **arguments: Any,
) -> SwapReport:
    """Replace the attention layers of a model by a mixer, in place, and measure the drift.

    The mixer takes over the model's query, key, value and output projections; other weights start
    near softmax attention. If anything does not fit, an error is raised and the model is unchanged.
    `restore` undoes the swap. Attention dropout is dropped.

    Example: ``regard.swap(model, "local", window=256, report=texts, tokenizer=tokenizer)``

    Args:
        mixer: Name of a recipe, or a `ModuleSpec`. `arguments` are passed to the recipe.
        layers: Layers to swap: numbers, a slice or a range (default: all), or a dict from layer to
            name or `ModuleSpec`, in which case `mixer` is left out.
        report: Sample to measure the drift on: texts (with `tokenizer`), a tensor, a dict of model
            inputs, or a list of these. A function of the model is used as `metric`.
        metric: Function of the model, evaluated before and after.
        seed: Seed of new weights, and of what mixers draw beside them (hashes, random blocks).
        device: Move the model there first: "auto", "cpu", "cuda", "cuda:1" or "mps". Default: it
            stays where it is.
        dtype: Precision of the drift measurement: "float32" (the weights' own), or "bfloat16" or
            "float16" for autocast. The weights are not converted.
    """
    sites = find_sites(model)
    if device is not None:
        model.to(resolve_device(device))
    model_device = next((p.device for p in model.parameters()), torch.device("cpu"))
    autocast_dtype = resolve_dtype(dtype, model_device)
    check_old_weights(sites)
    if model.__dict__.get(BEFORE_RECOVERY):
        raise ValueError(
            "This model was trained by `recover`: call `regard.restore` before swapping again."
        )
    specs = add_layer_options(choose_specs(mixer, layers, arguments, len(sites)), seed)
    if callable(report) and metric is None:
        report, metric = None, report
    sample = None if report is None else make_batches(model, report, tokenizer)

    # Build all mixers before anything is changed.
    prepared: list[tuple[AttentionSite, AttentionWeights, Mixer, tuple[str, ...]]] = []
    for site in sites:
        if site.layer in specs:
            try:
                weights = site.adapter.weights(site.old, sites[0].old)
                mixer_and_kept = fit_mixer(weights, specs[site.layer], layer=site.layer, seed=seed)
            except Unsupported as refusal:
                raise Unsupported(f"Layer {site.layer} ({site.path}): {refusal}") from None
            prepared.append((site, weights, *mixer_and_kept))
    install_capturing_hooks(model)
    try:
        before = None
        if metric is not None:
            with original_attention(model), autocast(model_device, autocast_dtype):
                before = evaluate_metric(metric, model)
        changes = [
            install(model, site, specs[site.layer], weights, mixer_, kept)
            for site, weights, mixer_, kept in prepared
        ]
        update_model_state(model)
        result = SwapReport(changes)
        if sample is not None:
            blocks = [change.block for change in changes]

            def old_outputs(batch: Any) -> Any:
                with original_attention(model):
                    return model_outputs(model, blocks, batch)

            with autocast(model_device, autocast_dtype):
                measure_drift(
                    result, sample, old_outputs, lambda batch: model_outputs(model, blocks, batch)
                )
        if metric is not None and before is not None:
            with autocast(model_device, autocast_dtype):
                result.metric = (before, evaluate_metric(metric, model))
        return result
    except BaseException:
        for site in sites:
            replace_module(model, site.path, site.module)
        update_model_state(model)
        raise


def restore(model: nn.Module) -> nn.Module:
    """Undo all swaps and the training of `recover`, bit for bit.

    Weights outside the swapped layers that were trained by other code are not changed. Returns the
    model.
    """
    swapped = [site for site in find_sites(model, required=False) if site.is_swapped]
    check_old_weights(swapped)
    put_back_old(model, swapped)
    update_model_state(model)
    before: dict[str, Tensor] = model.__dict__.pop(BEFORE_RECOVERY, {})
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in before.items():
        tensors[name].data.copy_(tensor)
    return model


@contextmanager
def original_attention(model: nn.Module) -> Iterator[nn.Module]:
    """Use the old attention layers inside the context."""
    swapped = [site for site in find_sites(model) if site.is_swapped]
    try:
        put_back_old(model, swapped)
        yield model
    finally:
        for site in swapped:
            replace_module(model, site.path, site.module)


def check_old_weights(sites: Sequence[AttentionSite]) -> None:
    """Raise if the weights of the old layers are lost."""
    if any(isinstance(site.module, Replacement) and site.module.old_weights_lost for site in sites):
        raise ValueError(
            "This model was loaded from a folder without the weights of its old attention: load "
            "the original model."
        )


# ----------------------------------------------------------------------------------- finding layers
def find_sites(model: nn.Module, *, required: bool = True) -> list[AttentionSite]:
    """The attention layers of a model that can be swapped, swapped or not, in order."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module, got {type(model).__name__}: load the model first."
        )
    found: list[AttentionSite] = []
    for path, module in model.named_modules():
        adapter = site_adapter(model, path, module)
        if adapter is not None:
            found.append(AttentionSite(len(found), path, module, adapter))
    if required and not found:
        names = sorted(
            {type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()}
        )
        has = f" (it has {', '.join(names[:3])})" if names else ""
        raise Unsupported(
            f"{type(model).__name__} has no attention layer that can be swapped{has}. Supported "
            "are "
            f"{', '.join(ADAPTERS)} and the blocks of Regard. Models that use transformers' "
            "attention interface "
            'take an attention name: model.set_attn_implementation("regard:local?window=256").'
        )
    return found


def site_adapter(model: nn.Module, path: str, module: nn.Module) -> AttentionAdapter | None:
    """The adapter of a module, or None if it is not self-attention."""
    if isinstance(module, SwappedMixer):
        return MIXER_ADAPTER
    if isinstance(module, Mixer):
        owner, _, name = path.rpartition(".")
        return (
            MIXER_ADAPTER
            if name == "mixer" and isinstance(model.get_submodule(owner), Block)
            else None
        )
    old = module.old if isinstance(module, SwappedAttention) else module
    adapter = find_adapter(old)
    if (
        adapter is None or not adapter.applies(old) or path.endswith("multihead_attn")
    ):  # torch's cross-attention
        return None
    return adapter


def choose_specs(
    mixer: str | ModuleSpec | None, layers: Layers, arguments: Mapping[str, Any], count: int
) -> dict[int, ModuleSpec]:
    """The mixer of each layer that is swapped."""
    if isinstance(layers, Mapping):
        if mixer is not None or arguments:
            raise ValueError("`layers` is a dict of mixers: leave out `mixer` and its arguments.")
        return {
            layer_number(layer, count): ModuleSpec.model_validate(spec)
            for layer, spec in layers.items()
        }
    if mixer is None:
        raise ValueError(
            "Give a mixer, e.g. 'local', or a dict of layers, e.g. layers={0: 'local'}."
        )
    if not isinstance(mixer, str | ModuleSpec):
        raise TypeError(
            f"mixer must be the name of a recipe or a ModuleSpec, not {type(mixer).__name__}."
        )
    base = mixer if isinstance(mixer, ModuleSpec) else ModuleSpec(name=mixer)
    spec = ModuleSpec.model_construct(name=base.name, arguments={**base.arguments, **arguments})
    if layers is None or isinstance(layers, slice):
        numbers = list(range(count)[slice(None) if layers is None else layers])
    else:
        numbers = [layers] if isinstance(layers, int) else list(layers)
    if not numbers:
        raise ValueError(f"`layers` selects none of the {count} layers.")
    return {layer_number(number, count): spec for number in numbers}


def add_layer_options(specs: dict[int, ModuleSpec], seed: int) -> dict[int, ModuleSpec]:
    """The specs with the number and seed of each layer, for recipes that have them. They are saved
    with the model, so that a loaded one draws the same."""
    complete = {}
    for layer, spec in specs.items():
        if spec.name == "linformer" and spec.arguments.get("share") == "layers":
            raise ValueError(
                "swap builds each layer on its own and cannot share a projection between layers: "
                "use share='kv', or train a model with share='layers' from a configuration."
            )
        alike = sorted(other for other in specs if specs[other] == spec)
        options = get_recipe(spec.name).layer_options(
            spec.arguments,
            layer=LayerNumber(alike.index(layer), len(alike)),
            seed=derive_seed(seed, layer),
        )
        arguments = {**spec.arguments, **options}
        complete[layer] = ModuleSpec.model_construct(name=spec.name, arguments=arguments)
    return complete


def layer_number(layer: int, count: int) -> int:
    """A layer number; negative numbers count from the end."""
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise ValueError(f"Layers are whole numbers from 0 to {count - 1}, not {layer!r}.")
    return layer % count


# -------------------------------------------------------------------------------- replacing modules
def install(
    model: nn.Module,
    site: AttentionSite,
    spec: ModuleSpec,
    weights: AttentionWeights,
    mixer: Mixer,
    kept: tuple[str, ...],
) -> LayerChange:
    """Put a mixer in place of an attention layer."""
    old = site.old
    out = None if weights.out is None else weights.out.to_linear()
    new: Replacement
    if isinstance(old, Mixer):
        assert out is not None
        new = SwappedMixer(mixer, old, out)
    else:
        new = SwappedAttention(mixer, site.adapter.forward, old, out)
        new.kept.update({name: getattr(old, name) for name in site.adapter.kept_modules})
        names = list(site.adapter.kept_methods)
        if isinstance(old, nn.MultiheadAttention):
            names += ["batch_first", "embed_dim", "num_heads"]
            # torch's layers read these, and then do not take their fast path
            new.__dict__.update({"in_proj_bias": None, "_qkv_same_embed_dim": False})
        new.__dict__.update({name: getattr(old, name) for name in names})
    new.spec = {"name": spec.name, "arguments": spec.arguments}
    new.train(old.training)
    replace_module(model, site.path, new)
    projections = [
        getattr(module, name)
        for name in kept
        for module in mixer.modules()
        if isinstance(getattr(module, name, None), nn.Linear)
    ]
    new_weights = sum(p.numel() for p in mixer.parameters())
    new_weights -= sum(p.numel() for projection in projections for p in projection.parameters())
    return LayerChange(site.layer, site.path, type(old).__name__, spec, (*kept, "out"), new_weights)


def put_back_old(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """Put the old layers back in place."""
    for site in sites:
        replace_module(model, site.path, site.old.train(site.module.training))


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at a path, wherever it is used: layers may share it."""
    old = model.get_submodule(path)
    for owner in list(model.modules()):
        for name in [name for name, child in owner._modules.items() if child is old]:
            setattr(owner, name, module)


def update_model_state(model: nn.Module) -> None:
    """Adjust what depends on whether layers are swapped, after a change."""

    def has_swapped(module: nn.Module) -> bool:
        return any(isinstance(inner, Replacement) for inner in module.modules())

    sites = find_sites(model, required=False)
    partial_swap = not all(site.is_swapped for site in sites)
    for site in sites:
        if isinstance(site.module, SwappedAttention):
            site.module.partial = partial_swap
    for module in list(model.modules()):
        if isinstance(
            module, nn.TransformerEncoder
        ):  # nested tensors work with torch's own attention only
            if has_swapped(module):
                module.__dict__.setdefault(NESTED_TENSOR_BEFORE, module.use_nested_tensor)
                module.use_nested_tensor = False
            elif NESTED_TENSOR_BEFORE in module.__dict__:
                module.use_nested_tensor = module.__dict__.pop(NESTED_TENSOR_BEFORE)
        if hasattr(type(module), "save_pretrained"):
            module.__dict__.pop("save_pretrained", None)
            if has_swapped(module):
                module.__dict__["save_pretrained"] = partial(save_pretrained, module)
    if isinstance(model, Model):
        if has_swapped(model) and model.config is not None:
            model.__dict__[CONFIG_BEFORE], model.config = model.config, None
        elif not has_swapped(model) and CONFIG_BEFORE in model.__dict__:
            model.config = model.__dict__.pop(CONFIG_BEFORE)


def save_pretrained(model: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained` of transformers, and a file with the mixer of each layer."""
    from regard.hf.files import write_swapped_layers

    write_swapped_layers(model, folder)
    kwargs.setdefault("save_original_format", False)  # names as they are in memory
    type(model).save_pretrained(model, folder, *args, **kwargs)
