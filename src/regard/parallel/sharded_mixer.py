"""One sequence on several processes, each with a slice of its tokens."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.attentions import EfficientAttention, LinearAttention
from regard.attentions.disagreement import DisagreementAttention
from regard.attentions.kv_cache import KVCacheAttention
from regard.errors import Unsupported
from regard.mixer import Can, Mixer, MultiHead, State
from regard.mixers.positional import PositionEmbeddedMixer
from regard.numerics import zero_padding_tokens
from regard.parallel.communication import (
    CallHeader,
    OptionalProcessGroup,
    ShardedCall,
    exchange_headers,
)
from regard.parallel.linear_attention import over_sums
from regard.parallel.pattern_attention import over_keys
from regard.parallel.relay import by_relay

KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Way = Callable[[Any, Tensor, Tensor | None, ShardedCall], Tensor]

NO_MASK = "its state is passed on from process to process as a stream passes it, and a stream leaves no token out"


def sequence_parallel(mixer: Mixer, group: OptionalProcessGroup = None) -> Mixer:
    """The mixer for one sequence of which every process of the group holds a slice, in the order of their ranks:
    (b n d) -> (b n d), for n tokens of its own.

    The result is that of one process with the whole sequence, forward and backward.  Positions, the pattern and masks hold for
    the whole; slices may differ in length, and may be empty.  All processes must call it together, and go back together.
    Gradients of the parameters are those of the tokens here: `all_reduce_gradients` adds them up.

        spread = regard.parallel.sharded_mixer(regard.create("local", dim=512, heads=8, window=128))
        y = spread(regard.parallel.local_slice(x))

    group   the processes; all of them unless given
    """
    if isinstance(mixer, SequenceParallelMixer):
        raise Unsupported(f"{mixer.name} runs on several processes already")
    return SequenceParallelMixer(mixer, group)


class SequenceParallelMixer(Mixer):
    """See `sequence_parallel`."""

    def __init__(self, inner: Mixer, group: OptionalProcessGroup) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "no processes have met yet: start them with torchrun, inside `with regard.train.init_distributed():`"
            )
        self.way = way_of(inner)
        unsupported = {
            "cross": "it holds a slice of one sequence, and of another it would need a slice too",
            "stream": "a stream has one token after the other, and the slices stand side by side",
            "maps": "each process would have the rows of its own tokens only: ask the mixer inside for a map",
        }
        if _by_relay(inner):
            unsupported["mask"] = NO_MASK
        super().__init__(
            inner.dim,
            can=Can(supports_global_mask=False, **unsupported) & inner.can,
            causal=inner.causal,
            length=inner.length,
            name=inner.name,
        )
        self.inner, self.group = inner, group
        self.build = zlib.crc32(re.sub(r" at 0x\w+", "", repr(inner)).encode())

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
    ) -> Tensor:
        """See `Mixer`.  A process without tokens takes part too, for the others wait for it."""
        try:
            x, context = self._check_inputs(x, context, mask, global_attention_mask)
        except (ValueError, TypeError):
            self._absent()
            raise
        return self.mix(x, context, mask, None)[0]

    def _absent(self) -> None:
        """Tell the others not to wait."""
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        with contextlib.suppress(RuntimeError):  # it says what is known here
            exchange_headers(CallHeader(), device, self.group)

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """Meet, and go the way of this mixer."""
        learns = x.requires_grad or any(p.requires_grad for p in self.inner.parameters())
        graph, kind = (
            learns and torch.is_grad_enabled(),
            KINDS.index(x.dtype) if x.dtype in KINDS else -1,
        )
        brought = CallHeader(
            False, x.shape[0], x.shape[1], mask is not None, graph, kind, self.build
        )
        meeting = exchange_headers(brought, x.device, self.group)
        if self.length is not None and meeting.length > self.length:
            raise ValueError(
                f"all processes hold {meeting.length} tokens, and this was built for at most {self.length}"
            )
        return self.way(self.inner, x, mask, meeting), None


def way_of(mixer: Mixer) -> Way:
    """How a mixer runs on slices; raises `Unsupported`, with the reason, where there is no way."""
    if type(mixer) is PositionEmbeddedMixer:
        way_of(mixer.inner)
        return _embedded
    if type(mixer) is MultiHead and isinstance(mixer.inner, KVCacheAttention):
        return over_keys
    if type(mixer) is MultiHead and isinstance(mixer.inner, LinearAttention | EfficientAttention):
        return over_sums
    if any(isinstance(part, DisagreementAttention) for part in mixer.modules()):
        raise Unsupported(
            f"{mixer.name} cannot run on slices: its cost is of all tokens, and a state does not carry it"
        )
    if mixer.causal and mixer.can.stream:
        return by_relay
    why = (
        mixer.can.reason("stream")
        if mixer.causal
        else "it was not built causal, so that no state can be passed on"
    )
    raise Unsupported(
        f"{mixer.name} cannot run on slices of a sequence: it is neither attention over a pattern nor sums over keys, and {why}"
    )


def _embedded(
    mixer: PositionEmbeddedMixer, x: Tensor, mask: Tensor | None, meeting: ShardedCall
) -> Tensor:
    return way_of(mixer.inner)(
        mixer.inner, zero_padding_tokens(mixer.embed(x, meeting.at), mask), mask, meeting
    )


def _by_relay(mixer: Mixer) -> bool:
    return (
        _by_relay(mixer.inner)
        if type(mixer) is PositionEmbeddedMixer
        else way_of(mixer) is by_relay
    )


def local_slice(x: Tensor, group: OptionalProcessGroup = None) -> Tensor:
    """The slice of x (b n ...) that belongs here: as even as n allows, earlier processes have more."""
    return x.tensor_split(dist.get_world_size(group), 1)[dist.get_rank(group)]


@torch.no_grad()
def all_reduce_gradients(module: nn.Module, group: OptionalProcessGroup = None) -> None:
    """Add up the gradients of the parameters over all processes, so that each has those of the whole sequence.

    A parameter without a gradient anywhere keeps none.
    """
    learning = [p for p in module.parameters() if p.requires_grad]
    if not learning:
        return
    known = torch.tensor(
        [p.grad is not None for p in learning], dtype=torch.int, device=learning[0].device
    )
    dist.all_reduce(known, group=group)
    for p, there in zip(learning, known.tolist(), strict=True):
        if there:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
