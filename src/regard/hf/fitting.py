"""A mixer made to fit in the place of an attention: its projections taken over, and what is its own begun so as to disturb
least."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard import registry
from regard.attentions.adaptive_span import AdaptiveSpanAttention
from regard.attentions.nystrom import NystromAttention
from regard.compression import ConvCompression, LengthProjection
from regard.errors import Unsupported
from regard.hf.modules import AttentionWeights, LinearWeights
from regard.mixer import Mixer, MultiHead
from regard.mixers import Longformer, with_position
from regard.mixers.bp_transformer import BPTransformer
from regard.models.config import ModuleSpec

NAMES = ("q", "k", "v")
TOLD = ("dim", "heads")


class Fitted(NamedTuple):
    """A mixer without its last projection, and the names of what it took over, "out" being the model's own."""

    mixer: Mixer
    kept: tuple[str, ...]


def fitted(parts: AttentionWeights, part: ModuleSpec, *, layer: int, seed: int = 0) -> Fitted:
    """The mixer that `part` names, for the place that `parse_specs` were taken from.  What cannot stand there raises."""
    mixer = made(parts, part, layer, seed)
    if parts.pads and not mixer.can.mask:
        raise Unsupported(
            f"{part.name} cannot leave tokens out, and this model pads: {mixer.can.reason('mask')}"
        )
    kept = take_over(mixer, parts)
    for module in mixer.modules():
        begin = GENTLE.get(type(module))
        if begin is not None:
            with torch.no_grad():
                begin(module, part.arguments)
    mixer = with_positions(mixer, parts)
    mixer.name = part.name
    like = parts.q.weight
    return Fitted(mixer.to(like.device, like.dtype), kept)


def made(parts: AttentionWeights, part: ModuleSpec, layer: int, seed: int) -> Mixer:
    """The recipe, told what the model knows; new weights depend on the seed and the layer alone."""
    arguments = dict(part.arguments)
    told = sorted(set(TOLD) & set(arguments))
    if told:
        raise ValueError(
            f"{told[0]} is told by the model, so the arguments of {part.name} may not give it"
        )
    known = registry.get_recipe(part.name).parameters
    if known["heads"].default is inspect.Parameter.empty:
        arguments["heads"] = parts.heads
    arguments.setdefault("causal", bool(parts.causal))
    if parts.causal is not None and arguments["causal"] != parts.causal:
        raise ValueError(f"causal is told by the model, and it is {parts.causal} here")
    if "length" in known and parts.length is not None:
        arguments.setdefault("length", parts.length)
    if "layer" in known and (
        known["layer"].default is not None or arguments.get("split") == "layers"
    ):
        arguments.setdefault("layer", layer)
    inner = parts.q.weight.shape[
        0
    ]  # as wide as all heads together, which need not be the width of a token
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + layer)
        mixer = registry.create(part.name, dim=inner, **arguments)
    if inner != parts.dim:
        if not isinstance(mixer, MultiHead):
            raise Unsupported(
                f"{parts.heads} heads of {inner // parts.heads} are not as wide as a token, {parts.dim}: only a "
                f"MultiHead fits there, and {part.name} is none"
            )
        mixer.dim = parts.dim
    return mixer


# ---------------------------------------------------------------------------------------------- what is taken over
def take_over(mixer: Mixer, parts: AttentionWeights) -> tuple[str, ...]:
    """Put the model's queries, keys and values into the mixer, where it has the like, and nothing in place of its last
    projection, for the model's own stands behind it."""
    homes = [
        m
        for m in mixer.modules()
        if isinstance(getattr(m, "v", None), nn.Linear) and hasattr(m, "out")
    ]
    if len([home for home in homes if isinstance(home.out, nn.Linear)]) > 1:
        return ()  # several attentions in a row: none of them is the old one
    kept: list[str] = []
    for home in homes:
        given = dict(zip(NAMES, scaled(parts), strict=True))
        if (
            parts.marked is not None
            and isinstance(mixer, Longformer)
            and home is mixer.global_heads
        ):
            given = dict(zip(NAMES, parts.marked, strict=True))
        taken = {name for name in ("q", "v") if put(home, name, given[name], parts)}
        if "q" in taken and put(
            home, "k", given["k"], parts
        ):  # keys without the queries that they answer are worth nothing
            taken.add("k")
        kept.extend(taken)
        out = home.out
        if isinstance(out, nn.Linear) and out.in_features == out.out_features:
            home.out = nn.Identity()
    return tuple(name for name in NAMES if name in kept)


def scaled(parts: AttentionWeights) -> tuple[LinearWeights, LinearWeights, LinearWeights]:
    """q, k and v; queries so that scores over √e are scaled as they were."""
    width = parts.q.weight.shape[0] // parts.heads
    factor = 1.0 if parts.scale is None else parts.scale * width**0.5
    q = (
        parts.q
        if factor == 1.0
        else LinearWeights(*(None if t is None else t * factor for t in parts.q))  # type: ignore[arg-type]
    )
    return q, parts.k, parts.v


def put(home: nn.Module, name: str, weights: LinearWeights, parts: AttentionWeights) -> bool:
    """Take one projection over, if it has the shape; fewer heads of keys and values are the means of those that they stand
    for (Ainslie et al. 2023, arXiv 2305.13245)."""
    mine = getattr(home, name, None)
    if not isinstance(mine, nn.Linear):
        return False
    width, given = parts.q.weight.shape[0] // parts.heads, parts.kv_heads or parts.heads
    own = mine.out_features // width
    if (
        name != "q"
        and isinstance(home, MultiHead)
        and mine.out_features in (parts.heads * width, home.kv_heads * width)
    ):
        if own > given:
            home.kv_heads = given  # as few as the model has
        elif given % own:
            return False
        elif own < given:
            weights = LinearWeights(
                *(None if t is None else grouped(t, given, given // own) for t in weights)  # type: ignore[arg-type]
            )
    elif mine.out_features != weights.weight.shape[0]:
        return False
    setattr(home, name, weights.linear())
    return True


def grouped(tensor: Tensor, heads: int, share: int) -> Tensor:
    """(h e ...) -> (h / share e ...), the means."""
    return tensor.unflatten(0, (heads // share, share, -1)).mean(1).flatten(0, 1)


def with_positions(mixer: Mixer, parts: AttentionWeights) -> Mixer:
    """The model's own positions inside attention, put into the new one."""
    for scheme in (parts.rotary, parts.prior):
        mixer = mixer if scheme is None else placed(mixer, scheme)
    return mixer


def placed(mixer: Mixer, scheme: nn.Module) -> Mixer:
    """`with_position`, for heads that are together wider or narrower than a token too."""
    if (
        not isinstance(mixer, MultiHead)
        or not isinstance(mixer.q, nn.Linear)
        or mixer.q.out_features == mixer.dim
    ):
        return with_position(mixer, deepcopy(scheme))
    dim, wide = mixer.dim, mixer.q.out_features
    mixer.dim = wide  # the check of sizes is about heads
    made = with_position(mixer, deepcopy(scheme))
    made.dim = dim
    return made


# ---------------------------------------------------------------------------------------------- what is the mixer's own
def mean_of_segments(memory: Any, given: dict[str, Any]) -> None:
    """Linformer: each row of E and F is the mean of the tokens in its share of the length, so that a key stands for its
    neighbours; where there are as many rows as tokens, attention is what it was."""
    rank, length = memory.rank, memory.length
    owner = torch.arange(length) * rank // length
    rows = torch.nn.functional.one_hot(owner, rank).T.to(memory.e)
    for table in (memory.e, memory.f):
        table.copy_(rows / rows.sum(1, keepdim=True))


def mean_of_blocks(memory: Any, given: dict[str, Any]) -> None:
    """Memory-compressed attention: the convolutions begin as means of the tokens of a block."""
    for conv in (memory.k, memory.v):
        width = conv.weight.shape[1]
        conv.weight.copy_(
            (torch.eye(width) / memory.stride)[:, :, None].repeat(conv.groups, 1, memory.stride)
        )
        if conv.bias is not None:
            conv.bias.zero_()


def widest_spans(attention: Any, given: dict[str, Any]) -> None:
    """Adaptive spans begin as wide as they may be, unless the user says where."""
    if "start" not in given:
        attention.share.fill_(1.0)
        attention.initial_share = 1.0


def no_convolution(attention: Any, given: dict[str, Any]) -> None:
    """Nyströmformer: what the convolution adds begins as nothing."""
    if attention.conv is not None:
        attention.conv.weight.zero_()


def no_labels(mixer: Any, given: dict[str, Any]) -> None:
    """BP-Transformer: the vectors that tell where a span stands begin as nothing."""
    mixer.labels.zero_()


GENTLE: dict[type[nn.Module], Callable[[Any, dict[str, Any]], None]] = {
    LengthProjection: mean_of_segments,
    ConvCompression: mean_of_blocks,
    AdaptiveSpanAttention: widest_spans,
    NystromAttention: no_convolution,
    BPTransformer: no_labels,
}
