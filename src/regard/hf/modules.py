"""What an attention of another library is made of, and what stands in its place after a swap."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.errors import Unsupported
from regard.mixer import Mixer, State
from regard.position.rotary import RotaryEmbedding
from regard.prior import Prior
from regard.state import take

GATHERS = "_output_capturing_hooks_installed"


class LinearWeights(NamedTuple):
    """Of a projection: weight (out in), bias (out) or None."""

    weight: Tensor
    bias: Tensor | None

    def linear(self) -> nn.Linear:
        """A layer with copies of them."""
        wide, narrow = self.weight.shape
        made = nn.Linear(narrow, wide, bias=self.bias is not None, device="meta").to_empty(
            device=self.weight.device
        )
        made.weight = nn.Parameter(self.weight.detach().clone())
        if self.bias is not None:
            made.bias = nn.Parameter(self.bias.detach().clone())
        return made


class AttentionWeights(NamedTuple):
    """An attention, taken apart.

    dim      width of a token
    q k v    projections to the heads
    out      the last projection; None: it stands outside, and stays where it is
    causal   whether it looks back only; None: the module does not say
    length   the longest sequence that the model is for; None: any
    scale    of the scores; None: 1/√e
    kv_heads  heads of keys and values; None: as many as of queries
    marked   projections q, k, v of marked tokens, where they have their own
    prior    what is added to the scores
    turn     what turns queries and keys
    pads     whether tokens may be left out
    """

    dim: int
    heads: int
    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    out: LinearWeights | None = None
    causal: bool | None = False
    length: int | None = None
    scale: float | None = None
    kv_heads: int | None = None
    marked: tuple[LinearWeights, LinearWeights, LinearWeights] | None = None
    prior: Prior | None = None
    rotary: RotaryEmbedding | None = None
    pads: bool = True


def linear_weights(layer: nn.Module) -> LinearWeights:
    """Of a linear layer."""
    bias = getattr(layer, "bias", None)
    return LinearWeights(layer.weight, bias)  # type: ignore[arg-type]


class Replacement(nn.Module):
    """Stands in the place of a module, and keeps that one: outside the parameters and the state dict, but moved along.

    said   the name and the arguments of what stands here now
    lost   whether the old one has no weights: then it is there for its shape alone
    """

    said: dict[str, Any]
    lost: bool = False

    def keep(self, old: nn.Module) -> None:
        """Remember it; a tuple is not seen by nn.Module."""
        self.__dict__["kept"] = (old,)

    @property
    def old(self) -> nn.Module:
        """What stood here before."""
        return self.__dict__["kept"][0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.old._apply(fn, recurse)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class SwappedAttention(Replacement):
    """A mixer in the place of an attention of another library.

    call     how that one is called, and what it gives back: (self, ...) -> ...
    out      the last projection, where the old module had it inside
    rest     other modules of the old one that go on working, such as the norm behind it
    partial  whether some layers of the model were left as they were
    """

    def __init__(
        self, mixer: Mixer, call: Callable[..., Any], old: nn.Module, out: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self.keep(old)
        self.mixer, self.call, self.out = mixer, call, nn.Identity() if out is None else out
        self.rest = nn.ModuleDict()
        self.partial = False
        self.streams: WeakKeyDictionary[Any, tuple[State, int]] = WeakKeyDictionary()

    def forward(self, *given: Any, **named: Any) -> Any:
        """As the old one."""
        return self.call(self, *given, **named)

    def run(
        self,
        x: Tensor,
        mask: Tensor | None,
        *,
        global_attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """x (b n d), mask (b n) -> (b n d); with a cache of transformers, the next tokens of a stream."""
        maps = gathered()
        if maps is not None:
            if cache is not None and cache.get_seq_length(layer_of(self.old)):
                raise Unsupported(
                    "a stream has no maps of what went before: ask for attentions with use_cache=False"
                )
            maps.append(
                self.mixer.attention_map(
                    x, context, mask=mask, global_attention_mask=global_attention_mask
                )
            )
        y = (
            self.mixer(x, context, mask=mask, global_attention_mask=global_attention_mask)
            if cache is None
            else self._next(x, mask, cache)
        )
        return self.out(y)

    def _next(self, x: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """Their cache counts the tokens and carries the numbers of the examples, by which beams were reordered; the state of
        the mixer is kept beside it."""
        layer = layer_of(self.old)
        seen = int(cache.get_seq_length(layer))
        if seen == 0:
            state: State = None
        elif cache not in self.streams or self.streams[cache][1] != seen:
            raise Unsupported(
                "the cache was filled elsewhere, cropped, or began with padding: generate with use_cache=False, or one text at "
                "a time"
            )
        else:
            state = take(self.streams[cache][0], rows_in(cache, layer))
        rows = torch.arange(
            1, len(x) + 1, dtype=torch.float32, device=x.device
        )  # as they are numbered from now on
        count(cache, layer, rows, x.shape[1])
        if cache.layers[layer].keys.shape[-2] != seen + x.shape[1]:
            raise Unsupported(
                "only a cache that grows can carry a stream, not one of a fixed size: generate without it"
            )
        if seen == 0 and (not self.mixer.can.stream or (mask is not None and not mask.all())):
            self.streams.pop(cache, None)
            return self.mixer(x, mask=mask)
        y, state = self.mixer.stream(x, state)
        self.streams[cache] = (state, seen + x.shape[1])
        return y

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"in place of {type(self.old).__name__}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "streams": None}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "streams": WeakKeyDictionary()})  # type: ignore[no-untyped-call]


def gathered() -> list[Tensor] | None:
    """Where transformers gathers the maps of the call that is under way; None: nobody asked for them.

    It finds them by the class of a module, so that a layer of another class has to bring its own.
    """
    theirs = sys.modules.get("transformers.utils.output_capturing")
    found = None if theirs is None else theirs._active_collector.get()
    return None if found is None else found.get("attentions")


def prepare_to_gather(model: nn.Module) -> None:
    """Let transformers find the layers whose maps it gathers while they are all there: it looks for them only once."""
    theirs, models = (
        sys.modules.get(f"transformers.{name}")
        for name in ("utils.output_capturing", "modeling_utils")
    )
    if theirs is None or models is None:
        return
    for part in model.modules():
        inner = [each for each in part.modules() if isinstance(each, models.PreTrainedModel)]
        if isinstance(part, models.PreTrainedModel) and not any(
            getattr(each, GATHERS, False) for each in inner
        ):
            theirs.maybe_install_capturing_hooks(
                part
            )  # and in all models inside, which a second time would gather twice


def layer_of(old: nn.Module) -> int:
    """Its number in a cache."""
    return getattr(old, "layer_idx", None) or 0


def rows_in(cache: Any, layer: int) -> Tensor:
    """Which example of the last call each row is now: beams move the rows of a cache."""
    return cache.layers[layer].keys[:, 0, -1, 0].long() - 1


def count(cache: Any, layer: int, rows: Tensor, n: int) -> None:
    """Tell their cache of n more tokens: what it keeps of each is the number of its example."""
    numbers = rows[:, None, None, None].expand(-1, 1, n, 1)
    cache.update(numbers, numbers, layer)


class SwappedMixer(Replacement, Mixer):
    """A mixer of ours in the place of another of ours, with the last projection of that one."""

    def __init__(self, mixer: Mixer, old: nn.Module, out: nn.Linear) -> None:
        Mixer.__init__(
            self,
            mixer.dim,
            can=mixer.can,
            causal=mixer.causal,
            length=mixer.length,
            name=mixer.name,
        )
        self.keep(old)
        self.mixer, self.out = mixer, out

    def initial_state(self) -> State:
        """Of the mixer inside."""
        return self.mixer.initial_state()

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State, **more: Any
    ) -> tuple[Tensor, State]:
        """Mix, then project."""
        y, state = self.mixer.mix(x, context, mask, state, **more)
        return self.out(y), state

    def weights(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, **more: Any
    ) -> Tensor:
        """The map of the mixer inside."""
        return self.mixer.weights(x, context, mask, **more)
