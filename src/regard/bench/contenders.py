"""Contenders: dense attention in plain PyTorch, and the recipes of Regard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions.kv_cache import KVCacheAttention
from regard.bench.cell import (
    DENSE,
    BenchCall,
    BenchCell,
    CallEstimate,
    Contender,
    heads_call,
    layer_call,
    random_tokens,
    tensor_defaults,
)
from regard.bench.estimate import estimate_call
from regard.device import DTYPES
from regard.errors import Unsupported
from regard.mixer import Mixer, MultiHead, merge_heads, split_heads
from regard.models import ModuleSpec
from regard.registry import create, get_recipe
from regard.show.build import fill_length_arguments
from regard.state import State

PROMPT_CHUNK = 1024  # tokens of a prompt that are processed at once


class DenseAttentionLayer(nn.Module):
    """Multi-head attention in plain PyTorch, the baseline of every measurement."""

    def __init__(self, cell: BenchCell) -> None:
        super().__init__()
        self.heads, self.causal = cell.heads, cell.causal
        self.q, self.k, self.v, self.out = (
            nn.Linear(cell.dim, cell.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, n, d) to (b, n, d)."""
        q, k, v = (split_heads(linear(x), self.heads) for linear in (self.q, self.k, self.v))
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))

    def step(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Decode x (b, 1, d); its key and value go to the end of the cache (b, h, m + 1, e)."""
        k[:, :, -1:], v[:, :, -1:] = (split_heads(w(x), self.heads) for w in (self.k, self.v))
        q = split_heads(self.q(x), self.heads)
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v)))


class DenseContender(Contender):
    """PyTorch's fused dense attention. When decoding, its cache is allocated in advance."""

    label = DENSE

    def build(self, cell: BenchCell) -> BenchCall:
        if cell.mode == "decode":
            cache = (cell.batch, cell.heads, cell.length + 1, cell.head_dim)
            k, v = torch.randn(*cache), torch.randn(*cache)
            if cell.scope == "kernel":
                query = (cell.batch, cell.heads, 1, cell.head_dim)
                return heads_call(lambda q: F.scaled_dot_product_attention(q, k, v), cell, query)
            layer, x = DenseAttentionLayer(cell), random_tokens(cell, 1)
            return BenchCall(lambda: layer.step(x, k, v))
        if cell.scope == "layer":
            return layer_call(DenseAttentionLayer(cell), cell)
        return heads_call(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal),
            cell,
            *[cell.shape] * 3,
        )

    def estimate(self, cell: BenchCell) -> CallEstimate | None:
        return RecipeContender(ModuleSpec(name="vanilla")).estimate(cell)


@dataclass(frozen=True)
class RecipeContender(Contender):
    """A recipe of Regard with arguments."""

    spec: ModuleSpec

    @property
    def label(self) -> str:  # type: ignore[override]
        """The spec as the user writes it: local:window=64."""
        arguments = (f"{name}={value}" for name, value in self.spec.arguments.items())
        return ":".join([self.spec.name, *arguments])

    def build(self, cell: BenchCell) -> BenchCall:
        mixer = build_mixer(self.spec, cell).train(cell.mode == "training")
        if mixer.length is not None and cell.length + (cell.mode == "decode") > mixer.length:
            raise ValueError(f"it was built with length={mixer.length}")
        if cell.mode == "decode":
            return decode_call(mixer, cell)
        if cell.scope == "layer":
            return layer_call(mixer, cell)
        attention, shapes = attention_shapes(mixer, cell, cell.length)

        def attend(q: Tensor, *kv: Tensor) -> Tensor:
            k, v = kv if len(kv) == 2 else (q, *kv)
            return attention.inner(q, k, v, causal=cell.is_causal)[0]

        return heads_call(attend, cell, *shapes, parameters=list(attention.inner.parameters()))

    def estimate(self, cell: BenchCell) -> CallEstimate | None:
        try:
            return estimate_call(build_mixer(self.spec, cell, device="meta"), cell)
        except (ValueError, TypeError, NotImplementedError, RuntimeError):
            # some recipes need random numbers that the meta device does not have; unsupported
            # arguments are reported by `build`
            return None


def build_mixer(spec: ModuleSpec, cell: BenchCell, *, device: str | None = None) -> Mixer:
    """Build a recipe for a cell; a fixed length is one token more when decoding.

    Args:
        device: "meta" for a mixer without memory. None: the device of the cell.
    """
    recipe = get_recipe(spec.name)
    arguments = {"heads": recipe.default_heads(cell.heads), **spec.arguments, "dim": cell.dim}
    arguments = fill_length_arguments(recipe, cell.length + (cell.mode == "decode"), arguments)
    if cell.is_causal or recipe.parameters["causal"].default:
        arguments["causal"] = True
    # weights are drawn on the CPU in float32, so that they are the same on every device
    with tensor_defaults(device or "cpu", "float32"):
        mixer = create(recipe.name, **arguments)
    return mixer if device else mixer.to(cell.device, DTYPES[cell.dtype])


def attention_shapes(
    mixer: Mixer, cell: BenchCell, n: int
) -> tuple[MultiHead, list[tuple[int, ...]]]:
    """Return the mixer and the shapes of its queries, keys (unless shared) and values."""
    if not isinstance(mixer, MultiHead):
        raise Unsupported(
            f"{mixer.name} has no attention on given queries, keys and values: use --scope layer"
        )
    kv_heads = mixer.kv_heads if mixer.inner.supports_gqa else mixer.heads
    e = cell.dim // mixer.heads
    q, kv = (cell.batch, mixer.heads, n, e), (cell.batch, kv_heads, n, e)
    return mixer, [q, kv] if mixer.inner.shared_qk else [q, kv, kv]


def decode_call(mixer: Mixer, cell: BenchCell) -> BenchCall:
    """Return a call that decodes the next token of a stream.

    Every call continues the stream, because a state that is used twice has to be copied. Only a
    mixer of fixed length, which has no room for more tokens, repeats the same one.
    """
    state: State = None
    shapes: list[tuple[int, ...]] = [(cell.batch, 1, cell.dim)]
    if cell.scope == "kernel":
        if not mixer.can.stream:
            reason = mixer.can.reason("stream")
            raise Unsupported(f"{mixer.name} does not support streaming: {reason}")
        attention, shapes = attention_shapes(mixer, cell, 1)
        state = attention.inner.initial_state()

    def step(inputs: list[Tensor], state: State) -> tuple[Tensor, State]:
        if cell.scope == "layer":
            return mixer.stream(inputs[0], state)
        q, *kv = inputs
        k, v = kv if len(kv) == 2 else (q, *kv)
        return attention.inner(q, k, v, causal=True, state=state)

    def next_token() -> Tensor:
        nonlocal state
        out, after = step(inputs, state)
        state = after if mixer.length is None else state
        return out

    with torch.no_grad(), skip_attention(mixer):
        for start in range(0, cell.length, PROMPT_CHUNK):
            n = min(PROMPT_CHUNK, cell.length - start)
            _, state = step([torch.randn(*shape[:-2], n, shape[-1]) for shape in shapes], state)
    inputs = [torch.randn(*shape) for shape in shapes]
    return BenchCall(next_token)


@contextmanager
def skip_attention(mixer: Mixer) -> Iterator[None]:
    """Fill the KV cache without attending to it, so that a prompt takes linear time."""
    modules = [module for module in mixer.modules() if isinstance(module, KVCacheAttention)]
    for module in modules:
        module.attend = lambda q, k, v, *_, **__: q.new_zeros(*q.shape[:3], v.shape[3])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.attend
