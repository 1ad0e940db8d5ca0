"""Run a mixer on one sequence that is split over several processes."""

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
from regard.mixer import Attention, Can, Mixer, MultiHead, State
from regard.mixers.positional import PositionEmbeddedMixer
from regard.numerics import zero_padding_tokens
from regard.parallel.communication import (
    CallHeader,
    OptionalProcessGroup,
    ShardedCall,
    exchange_headers,
)
from regard.parallel.linear_attention import attend_sums
from regard.parallel.pattern_attention import attend_pattern
from regard.parallel.relay import relay_state

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Method = Callable[[Any, Tensor, Tensor | None, ShardedCall], Tensor]


def sequence_parallel(mixer: Mixer, group: OptionalProcessGroup = None) -> Mixer:
    """Run a mixer on a sequence of which every process holds a slice, in the order of the ranks.

    The result, forward and backward, is that of one process with the whole sequence. Positions,
    patterns and masks refer to the whole sequence. Slices may have different lengths and may be
    empty. All processes must call the mixer together, forward and backward. The gradients of the
    parameters are those of the local tokens: sum them with `all_reduce_gradients`.

        mixer = sequence_parallel(regard.create("local", dim=512, heads=8, window=128))
        y = mixer(local_slice(x))

    Args:
        mixer: The mixer, built identically in all processes.
        group: The processes. None: all.
    """
    if isinstance(mixer, SequenceParallelMixer):
        raise Unsupported(f"{mixer.name} is already sequence-parallel.")
    return SequenceParallelMixer(mixer, group)


class SequenceParallelMixer(Mixer):
    """See `sequence_parallel`."""

    def __init__(self, inner: Mixer, group: OptionalProcessGroup) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialized: start the processes with torchrun, inside "
                "`with regard.train.init_distributed():`"
            )
        self.method = parallel_method(inner)
        unsupported = {
            "cross": "it holds slices of one sequence only",
            "stream": "a stream is sequential, but the slices are processed together",
            "attn_mask": "each process would need the rows of its tokens: use a pattern",
            "maps": "each process has only the rows of its tokens: use the wrapped mixer",
        }
        core = inner
        while type(core) is PositionEmbeddedMixer:
            core = core.inner
        if parallel_method(core) is relay_state:
            unsupported["mask"] = "its state is passed on as in a stream, which supports no mask"
        super().__init__(
            inner.dim,
            can=Can(**unsupported) & inner.can,
            causal=inner.causal,
            length=inner.length,
            name=inner.name,
        )
        self.inner, self.group = inner, group
        self.mixer_hash = zlib.crc32(re.sub(r" at 0x\w+", "", repr(inner)).encode())

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """See `Mixer`. A process without tokens must call it too."""
        try:
            if cu_seqlens is not None:
                raise Unsupported(
                    f"{self.name} on several processes does not support cu_seqlens: each process "
                    "holds a slice of one sequence. Give whole sequences to the processes instead."
                )
            x, context = self._check_inputs(x, context, mask, global_attention_mask)
            self._optional_masks(x, context, attn_mask, global_attention_mask, query_mask)
        except (ValueError, TypeError):
            device = next((p.device for p in self.parameters()), torch.device("cpu"))
            with contextlib.suppress(RuntimeError):  # tell the others not to wait
                exchange_headers(CallHeader(), device, self.group)
            raise
        return self.mix(x, context, mask, None)[0]

    def mix(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """See `Mixer`."""
        trainable = x.requires_grad or any(p.requires_grad for p in self.inner.parameters())
        header = CallHeader(
            failed=False,
            batch_size=x.shape[0],
            tokens=x.shape[1],
            masked=mask is not None,
            needs_grad=trainable and torch.is_grad_enabled(),
            dtype=DTYPES.index(x.dtype) if x.dtype in DTYPES else -1,
            mixer_hash=self.mixer_hash,
        )
        call = exchange_headers(header, x.device, self.group)
        if self.length is not None and call.length > self.length:
            raise ValueError(
                f"The sequence has {call.length} tokens on all processes, but the mixer was built "
                f"with length={self.length}."
            )
        return self.method(self.inner, x, mask, call), None


def parallel_method(mixer: Mixer) -> Method:
    """How a mixer runs on slices; raises `Unsupported` if it cannot."""
    if any(isinstance(part, Attention) and part.dropout for part in mixer.modules()):
        raise Unsupported(
            f"{mixer.name} does not support sequence parallelism with dropout of attention weights."
        )
    if type(mixer) is PositionEmbeddedMixer:
        inner_method = parallel_method(mixer.inner)

        def embed_first(
            mixer: PositionEmbeddedMixer, x: Tensor, mask: Tensor | None, call: ShardedCall
        ) -> Tensor:
            x = zero_padding_tokens(mixer.embed(x, call.start), mask)
            return inner_method(mixer.inner, x, mask, call)

        return embed_first
    if type(mixer) is MultiHead and isinstance(mixer.inner, KVCacheAttention):
        return attend_pattern
    if type(mixer) is MultiHead and isinstance(mixer.inner, LinearAttention | EfficientAttention):
        return attend_sums
    if any(isinstance(module, DisagreementAttention) for module in mixer.modules()):
        raise Unsupported(
            f"{mixer.name} does not support sequence parallelism: its auxiliary loss depends on "
            "all tokens, and the stream state does not contain it."
        )
    if mixer.causal and mixer.can.stream:
        return relay_state
    reason = mixer.can.reason("stream") if mixer.causal else "it was built with causal=False"
    raise Unsupported(
        f"{mixer.name} does not support sequence parallelism: it is neither attention over a "
        f"pattern nor linear attention, and it cannot pass on a state: {reason}."
    )


def local_slice(x: Tensor, group: OptionalProcessGroup = None) -> Tensor:
    """The slice of x (b, n, ...) for this process; earlier processes get the longer slices."""
    return x.tensor_split(dist.get_world_size(group), 1)[dist.get_rank(group)]


@torch.no_grad()
def all_reduce_gradients(module: nn.Module, group: OptionalProcessGroup = None) -> None:
    """Sum the gradients of the parameters over all processes.

    Parameters without a gradient in any process keep none.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return
    has_grad = torch.tensor(
        [p.grad is not None for p in parameters], dtype=torch.int, device=parameters[0].device
    )
    dist.all_reduce(has_grad, group=group)
    for p, anywhere in zip(parameters, has_grad.tolist(), strict=True):
        if anywhere:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=group)
