"""swap and restore: other mixers in the attentions that a model has, and the old ones again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.block import Block
from regard.errors import Unsupported
from regard.hf.adapters import ADAPTERS, OWN, AttentionAdapter, known
from regard.hf.drift import LayerChange, MetricBefore, SwapReport, measured, scored
from regard.hf.fitting import Fitted, fitted
from regard.hf.modules import (
    AttentionWeights,
    Replacement,
    SwappedAttention,
    SwappedMixer,
    prepare_to_gather,
)
from regard.hf.sample import make_batches
from regard.mixer import Mixer
from regard.models.config import ModuleSpec
from regard.models.model import Model

BEFORE = (
    "before_recovery"  # what `recover` changed outside the mixers, by name: `restore` puts it back
)
NESTED = "nested_before_swap"
BUILT = (
    "config_before_swap"  # the configuration of a model of ours, which no longer says what it is
)

Layers = Sequence[int] | slice | range | Mapping[int, str | ModuleSpec] | int | None


class AttentionSite(NamedTuple):
    """Where an attention stands: its number in the order of the model, its path, the module there, and how to swap it."""

    layer: int
    path: str
    module: nn.Module
    adapter: AttentionAdapter

    @property
    def old(self) -> nn.Module:
        """What stood there first."""
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
    **arguments: Any,
) -> SwapReport:
    """Put a mixer in the place of the model's attentions, in place, and say how far its results drift.

    Queries, keys, values and the last projection are those of the model; what the mixer has beside them begins so as to disturb
    least.  What does not fit raises, and the model is as it was.  `restore` undoes it.  Dropout inside attention is left out.

    mixer      the name of a recipe, or a `Part`; `arguments` are those of the recipe: swap(model, "local", window=256)
    layers     None: all; numbers, a slice or a range; or layer -> name or `Part`, beside which `mixer` is left out
    report     a sample to measure the drift on: texts (with `tokenizer`), a tensor, a dict of what the model takes, a list of
               such, or a function model -> number, which is then the metric
    metric     the user's own number, before and after: model -> number
    seed       of weights that are new
    """
    sites = find_sites(model)
    check_whole_model(model, sites)
    wanted = chosen(mixer, layers, arguments, len(sites))
    if callable(report) and metric is None:
        report, metric = None, report
    given = None if report is None else make_batches(model, report, tokenizer)
    first = sites[0].old
    made = {
        site.layer: prepared(site, first, wanted[site.layer], seed)
        for site in sites
        if site.layer in wanted
    }
    prepare_to_gather(model)
    try:
        with original_attention(model):
            score = None if metric is None else MetricBefore(metric, scored(metric, model))
        changes = [
            install(model, site, wanted[site.layer], made[site.layer])
            for site in sites
            if site.layer in wanted
        ]
        settle(model)
        return measured(model, changes, given, original_attention, score)
    except BaseException:
        for site in sites:
            place(model, site.path, site.module)
        settle(model)
        raise


def restore(model: nn.Module) -> nn.Module:
    """Undo all swaps, and what `recover` trained: the model gives bit by bit what it gave before.  Returns the model.

    Weights outside the swapped attentions that others have trained meanwhile stay as they are.
    """
    swapped = [
        site for site in find_sites(model, must=False) if isinstance(site.module, Replacement)
    ]
    check_kept(swapped)
    put_back(model, swapped)
    settle(model)
    before: dict[str, Tensor] = model.__dict__.pop(BEFORE, {})
    mine = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in before.items():
        mine[name].data.copy_(tensor)
    return model


@contextmanager
def original_attention(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the attentions are the old ones."""
    swapped = [site for site in find_sites(model) if isinstance(site.module, Replacement)]
    try:
        put_back(model, swapped)
        yield model
    finally:
        for site in swapped:
            place(model, site.path, site.module)


def check_whole_model(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """What is to be swapped is the model as it was."""
    check_kept(sites)
    if model.__dict__.get(BEFORE):
        raise ValueError("`recover` has trained this model: restore it first, then swap anew")


def check_kept(sites: Sequence[AttentionSite]) -> None:
    """The old attentions are there."""
    if any(isinstance(site.module, Replacement) and site.module.lost for site in sites):
        raise ValueError(
            "the model was read from a folder that does not hold its old attentions: load the old model instead"
        )


# ---------------------------------------------------------------------------------------------- where
def find_sites(model: nn.Module, *, must: bool = True) -> list[AttentionSite]:
    """The attentions of a model that can be swapped, swapped or not, in the order in which they stand."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"a torch.nn.Module is swapped, not {type(model).__name__}: load the model first"
        )
    found = [
        AttentionSite(0, path, module, how)
        for path, module in model.named_modules()
        if (how := adapter_of(model, path, module))
    ]
    if must and not found:
        raise Unsupported(
            f"no attention of a kind that is known in {type(model).__name__}{_others(model)}; known are {', '.join(ADAPTERS)} "
            "and the blocks of Regard. Models that use transformers' attention interface take a name in place of a swap"
        )
    return [site._replace(layer=number) for number, site in enumerate(found)]


def adapter_of(model: nn.Module, path: str, module: nn.Module) -> AttentionAdapter | None:
    """How to swap the module at this path; None: it is no attention, or one that asks another sequence."""
    if isinstance(module, SwappedMixer):
        return OWN
    if isinstance(module, Mixer):
        owner, _, name = path.rpartition(".")
        return OWN if name == "mixer" and isinstance(model.get_submodule(owner), Block) else None
    old = module.old if isinstance(module, SwappedAttention) else module
    how = known(old)
    return (
        how if how is not None and how.suits(old) and not path.endswith("multihead_attn") else None
    )


def _others(model: nn.Module) -> str:
    """What looks like attention."""
    names = {type(m).__name__ for m in model.modules()}
    found = sorted(name for name in names if "attention" in name.lower())
    return f", which has {', '.join(found[:3])}" if found else ""


def chosen(
    mixer: str | ModuleSpec | None, layers: Layers, arguments: Mapping[str, Any], count: int
) -> dict[int, ModuleSpec]:
    """layer -> what goes there."""
    if isinstance(layers, Mapping):
        if mixer is not None or arguments:
            raise ValueError(
                "layers says which mixer goes where: leave mixer and its arguments out"
            )
        return {
            number(layer, count): ModuleSpec.model_validate(each) for layer, each in layers.items()
        }
    if mixer is None:
        raise ValueError(
            "which mixer? give a name, such as 'local', or layers as {0: 'local', ...}"
        )
    if not isinstance(mixer, str | ModuleSpec):
        raise TypeError(
            f"mixer is the name of a recipe, such as 'local', or a Part, not {type(mixer).__name__}"
        )
    given = mixer if isinstance(mixer, ModuleSpec) else ModuleSpec(name=mixer)
    whole = ModuleSpec.model_construct(name=given.name, arguments={**given.arguments, **arguments})
    if layers is None or isinstance(layers, slice):
        wanted = list(range(count)[slice(None) if layers is None else layers])
    else:
        wanted = [layers] if isinstance(layers, int) else list(layers)
    if not wanted:
        raise ValueError(f"layers names none of the {count}")
    return {number(layer, count): whole for layer in wanted}


def number(layer: int, count: int) -> int:
    """A layer, counted from the end where negative."""
    if isinstance(layer, bool) or not isinstance(layer, int) or not -count <= layer < count:
        raise ValueError(f"layers are whole numbers from 0 to {count - 1}, not {layer!r}")
    return layer % count


# ---------------------------------------------------------------------------------------------- in and out
class PreparedMixer(NamedTuple):
    """All that goes to one place."""

    parts: AttentionWeights
    fit: Fitted


def prepared(site: AttentionSite, first: nn.Module, part: ModuleSpec, seed: int) -> PreparedMixer:
    """The mixer for a place, with nothing of the model changed."""
    try:
        parts = site.adapter.parts(site.old, first)
        return PreparedMixer(parts, fitted(parts, part, layer=site.layer, seed=seed))
    except Unsupported as refusal:
        raise Unsupported(f"layer {site.layer} ({site.path}): {refusal}") from None


def install(
    model: nn.Module, site: AttentionSite, part: ModuleSpec, made: PreparedMixer
) -> LayerChange:
    """Put the mixer there."""
    old, (parts, (mixer, kept)) = site.old, made
    out = None if parts.out is None else parts.out.linear()
    if isinstance(old, Mixer):
        assert out is not None
        new: Replacement = SwappedMixer(mixer, old, out)
    else:
        new = SwappedAttention(mixer, site.adapter.call, old, out)
        new.rest.update({name: getattr(old, name) for name in site.adapter.rest})
        for name in site.adapter.passed:
            new.__dict__[name] = getattr(old, name)
        if isinstance(
            old, nn.MultiheadAttention
        ):  # torch's layers look at these, and then take no fast path
            told = {"in_proj_bias": None, "_qkv_same_embed_dim": False}
            new.__dict__.update(
                {name: getattr(old, name) for name in ("batch_first", "embed_dim", "num_heads")}
                | told
            )
    new.said = {"name": part.name, "arguments": part.arguments}
    new.train(old.training)
    place(model, site.path, new)
    fresh = sum(p.numel() for p in mixer.parameters()) - sum(
        linear_size(mixer, name) for name in kept
    )
    return LayerChange(site.layer, site.path, type(old).__name__, part, (*kept, "out"), fresh)


def linear_size(mixer: Mixer, name: str) -> int:
    """Of a projection, wherever it is."""
    homes = [
        getattr(m, name) for m in mixer.modules() if isinstance(getattr(m, name, None), nn.Linear)
    ]
    return sum(p.numel() for home in homes for p in home.parameters())


def put_back(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """The old modules."""
    for site in sites:
        place(model, site.path, site.old.train(site.module.training))


def place(model: nn.Module, path: str, module: nn.Module) -> None:
    """Set the module at a path, and wherever else the one that stands there does: layers may share an attention."""
    old = model.get_submodule(path)
    for owner in list(model.modules()):
        for name in [name for name, child in owner._modules.items() if child is old]:
            setattr(owner, name, module)


def settle(model: nn.Module) -> None:
    """Tell swapped layers whether others were left as they were; a model of ours no longer is what its configuration says."""
    sites = find_sites(model, must=False)
    swapped = [site.module for site in sites if isinstance(site.module, Replacement)]
    for module in swapped:
        if isinstance(module, SwappedAttention):
            module.partial = len(swapped) < len(sites)
    for encoder in (m for m in model.modules() if isinstance(m, nn.TransformerEncoder)):
        if any(
            isinstance(m, Replacement) for m in encoder.modules()
        ):  # they would be given tensors that only torch's own know
            encoder.__dict__.setdefault(NESTED, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False
        elif NESTED in encoder.__dict__:
            encoder.use_nested_tensor = encoder.__dict__.pop(NESTED)
    for part in (m for m in model.modules() if hasattr(type(m), "save_pretrained")):
        part.__dict__.pop("save_pretrained", None)
        if any(isinstance(m, Replacement) for m in part.modules()):
            part.__dict__["save_pretrained"] = partial(save_pretrained, part)
    if isinstance(model, Model):
        if swapped and model.config is not None:
            model.__dict__[BUILT], model.config = model.config, None
        elif not swapped and BUILT in model.__dict__:
            model.config = model.__dict__.pop(BUILT)


def save_pretrained(model: Any, folder: Any, *given: Any, **named: Any) -> None:
    """Theirs, and beside its files what stands in which layer, without which the weights would find no place."""
    from regard.hf.files import write_layers

    write_layers(model, folder)
    named.setdefault(
        "save_original_format", False
    )  # names as they are here, for no other model has such
    type(model).save_pretrained(model, folder, *given, **named)
