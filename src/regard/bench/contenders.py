"""Contenders: dense attention in plain PyTorch, and the recipes of Regard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
from regard.mixer import Attention, Mixer, SharedQKAttention, merge_heads, split_heads
from regard.models import ModuleSpec
from regard.registry import create, create_attention, get_recipe
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
        scope = build_attention if cell.scope == "kernel" else build_mixer
        module = scope(self.spec, cell).train(cell.mode == "training")
        if module.length is not None and cell.length + (cell.mode == "decode") > module.length:
            raise ValueError(f"it was built with length={module.length}")
        if cell.mode == "decode":
            return decode_call(self.spec, module, cell)
        if isinstance(module, Mixer):
            return layer_call(module, cell)

        def attend(q: Tensor, *kv: Tensor) -> Tensor:
            k, v = kv if len(kv) == 2 else (q, *kv)
            return module(q, k, v, causal=cell.is_causal)[0]

        shapes = attention_shapes(self.spec, module, cell, cell.length)
        return heads_call(attend, cell, *shapes, parameters=list(module.parameters()))

    def estimate(self, cell: BenchCell) -> CallEstimate | None:
        try:
            mixer = build_mixer(self.spec, cell, device="meta")
            return estimate_call(mixer, cell, recipe_arguments(self.spec, cell)["heads"])
        except (ValueError, TypeError, NotImplementedError, RuntimeError):
            # some recipes need random numbers that the meta device does not have; unsupported
            # arguments are reported by `build`
            return None


def recipe_arguments(spec: ModuleSpec, cell: BenchCell) -> dict[str, Any]:
    """Arguments of a recipe for a cell; a fixed length is one token more when decoding."""
    recipe = get_recipe(spec.name)
    arguments = {"heads": recipe.default_heads(cell.heads), **spec.arguments}
    arguments = fill_length_arguments(recipe, cell.length + (cell.mode == "decode"), arguments)
    if cell.is_causal or recipe.parameters["causal"].default:
        arguments["causal"] = True
    return arguments


def build_mixer(spec: ModuleSpec, cell: BenchCell, *, device: str | None = None) -> Mixer:
    """Build a recipe for a cell, with projections.

    Args:
        device: "meta" for a mixer without memory. None: the device of the cell.
    """
    # weights are drawn on the CPU in float32, so that they are the same on every device
    with tensor_defaults(device or "cpu", "float32"):
        mixer = create(spec.name, **{**recipe_arguments(spec, cell), "dim": cell.dim})
    return mixer if device else mixer.to(cell.device, DTYPES[cell.dtype])


def build_attention(spec: ModuleSpec, cell: BenchCell) -> Attention:
    """Build the attention of a recipe for a cell, without projections."""
    if not get_recipe(spec.name).is_attention:
        raise Unsupported(
            f"{spec.name} has no attention on given queries, keys and values: use --scope layer"
        )
    arguments = recipe_arguments(spec, cell)
    arguments.pop("kv_heads", None)  # of the keys and values, see `attention_shapes`
    arguments.setdefault("head_dim", cell.dim // arguments["heads"])
    with tensor_defaults("cpu", "float32"):
        attention = create_attention(spec.name, **arguments)
    return attention.to(cell.device, DTYPES[cell.dtype])


def attention_shapes(
    spec: ModuleSpec, attention: Attention, cell: BenchCell, n: int
) -> list[tuple[int, ...]]:
    """Shapes of n queries, keys (unless they are the queries) and values."""
    arguments = recipe_arguments(spec, cell)
    heads = arguments["heads"]
    kv_heads = arguments.get("kv_heads", heads) if attention.can.gqa else heads
    e = arguments.get("head_dim", cell.dim // heads)
    q, kv = (cell.batch, heads, n, e), (cell.batch, kv_heads, n, e)
    return [q, kv] if isinstance(attention, SharedQKAttention) else [q, kv, kv]


def decode_call(spec: ModuleSpec, module: Mixer | Attention, cell: BenchCell) -> BenchCall:
    """Return a call that decodes the next token of a stream.

    Every call continues the stream, because a state that is used twice has to be copied. Only a
    module of fixed length, which has no room for more tokens, repeats the same one.
    """
    state: State = None
    shapes: list[tuple[int, ...]] = [(cell.batch, 1, cell.dim)]
    if isinstance(module, Attention):
        if not module.can.stream:
            reason = module.can.reason("stream")
            raise Unsupported(f"{spec.name} does not support streaming: {reason}")
        shapes = attention_shapes(spec, module, cell, 1)
        state = module.initial_state()

    def step(inputs: list[Tensor], state: State) -> tuple[Tensor, State]:
        if isinstance(module, Mixer):
            return module.stream(inputs[0], state)
        q, *kv = inputs
        k, v = kv if len(kv) == 2 else (q, *kv)
        out: tuple[Tensor, State] = module(q, k, v, causal=True, state=state)
        return out

    def next_token() -> Tensor:
        nonlocal state
        out, after = step(inputs, state)
        state = after if module.length is None else state
        return out

    with torch.no_grad(), skip_attention(module):
        for start in range(0, cell.length, PROMPT_CHUNK):
            n = min(PROMPT_CHUNK, cell.length - start)
            _, state = step([torch.randn(*shape[:-2], n, shape[-1]) for shape in shapes], state)
    inputs = [torch.randn(*shape) for shape in shapes]
    return BenchCall(next_token)


@contextmanager
def skip_attention(module: nn.Module) -> Iterator[None]:
    """Fill the KV cache without attending to it, so that a prompt takes linear time."""
    modules = [part for part in module.modules() if isinstance(part, KVCacheAttention)]
    for part in modules:
        part.attend = lambda q, k, v, *_, **__: q.new_zeros(*q.shape[:3], v.shape[3])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in modules:
            del part.attend
