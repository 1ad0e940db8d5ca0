"""Who takes turns: dense attention in plain PyTorch, and ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    tokens,
)
from regard.bench.estimate import estimate_call
from regard.errors import Unsupported
from regard.mixer import Mixer, MultiHead, merge_heads, split_heads
from regard.models import ModuleSpec
from regard.registry import create, get_recipe
from regard.show.build import default_heads, fill_length_arguments
from regard.state import State

CHUNK = 1024  # tokens of a prompt that are read at once


# ---------------------------------------------------------------------------------------------- dense
class DenseAttentionLayer(nn.Module):
    """W⁰ attend(W_q x, W_k x, W_v x): plain multi-head attention in plain PyTorch, the thing to beat."""

    def __init__(self, cell: BenchCell) -> None:
        super().__init__()
        self.heads, self.causal = cell.heads, cell.causal
        self.q, self.k, self.v, self.out = (
            nn.Linear(cell.dim, cell.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (b n d) -> (b n d)."""
        q, k, v = (split_heads(part(x), self.heads) for part in (self.q, self.k, self.v))
        return self.out(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))

    def step(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next token x (b 1 d), written behind the keys and values (b h m+1 e) so far."""
        k[:, :, -1:], v[:, :, -1:] = (
            split_heads(self.k(x), self.heads),
            split_heads(self.v(x), self.heads),
        )
        return self.out(
            merge_heads(F.scaled_dot_product_attention(split_heads(self.q(x), self.heads), k, v))
        )


class DenseContender(Contender):
    """PyTorch's fused attention over all pairs, causal where the cell is; its cache is there before, and large enough."""

    label = DENSE

    def build(self, cell: BenchCell) -> BenchCall:
        """See `Contender`."""
        if cell.way == "decode":
            k, v = (
                torch.randn(cell.batch, cell.heads, cell.length + 1, cell.width) for _ in range(2)
            )
            if cell.level == "kernel":
                one = (cell.batch, cell.heads, 1, cell.width)
                return heads_call(lambda q: F.scaled_dot_product_attention(q, k, v), cell, one)
            layer, x = DenseAttentionLayer(cell), tokens(cell, 1)
            return BenchCall(lambda: layer.step(x, k, v))
        if cell.level == "layer":
            return layer_call(DenseAttentionLayer(cell), cell)
        return heads_call(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal),
            cell,
            *[cell.shape] * 3,
        )

    def needs(self, cell: BenchCell) -> CallEstimate | None:
        """See `Contender`."""
        return RecipeContender(ModuleSpec(name="vanilla")).needs(cell)


# ---------------------------------------------------------------------------------------------- ours
@dataclass(frozen=True)
class RecipeContender(Contender):
    """A recipe, with arguments."""

    part: ModuleSpec

    @property
    def label(self) -> str:  # type: ignore[override]
        """As it is written: local:window=64."""
        return ":".join(
            [self.part.name, *(f"{name}={value}" for name, value in self.part.arguments.items())]
        )

    def build(self, cell: BenchCell) -> BenchCall:
        """See `Contender`."""
        mixer = build_mixer(self.part, cell).train(cell.way == "training")
        if mixer.length is not None and cell.length + (cell.way == "decode") > mixer.length:
            raise ValueError(f"it was built for at most {mixer.length:,} tokens")
        if cell.way == "decode":
            return _decoding(mixer, cell)
        if cell.level == "layer":
            return layer_call(mixer, cell)
        inner, shapes = _inside(mixer, cell, cell.length)
        attend, past, parameters = inner.inner, cell.past, list(inner.inner.parameters())
        if len(shapes) == 2:
            return heads_call(
                lambda q, v: attend(q, q, v, causal=past)[0], cell, *shapes, more=parameters
            )
        return heads_call(
            lambda q, k, v: attend(q, k, v, causal=past)[0], cell, *shapes, more=parameters
        )

    def needs(self, cell: BenchCell) -> CallEstimate | None:
        """See `Contender`; None where the formula cannot be asked."""
        try:
            return estimate_call(build_mixer(self.part, cell, device="meta"), cell)
        except (ValueError, TypeError, NotImplementedError, RuntimeError):
            return None  # built at random, by numbers that the meta device has not; or not causal, which `build` will say


def build_mixer(part: ModuleSpec, cell: BenchCell, *, device: str = "cpu") -> Mixer:
    """Built for the cell; where it has to know the length, for one token more than a prompt has."""
    recipe = get_recipe(part.name)
    given = {"heads": default_heads(recipe, cell.heads), **part.arguments, "dim": cell.dim}
    told = fill_length_arguments(recipe, cell.length + (cell.way == "decode"), given)
    default = bool(recipe.parameters["causal"].default)
    with torch.device(device):
        return create(recipe.name, **told, **({"causal": True} if cell.past or default else {}))


def _inside(mixer: Mixer, cell: BenchCell, n: int) -> tuple[MultiHead, list[tuple[int, ...]]]:
    """The heads, and the shapes of what they take: queries, keys unless they are made of these, values."""
    if not isinstance(mixer, MultiHead):
        raise Unsupported(
            f"{mixer.name} has no attention on given queries, keys and values: see the level layer"
        )
    groups = mixer.kv_heads if mixer.inner.supports_gqa else mixer.heads
    e = cell.dim // mixer.heads
    asked, read = (cell.batch, mixer.heads, n, e), (cell.batch, groups, n, e)
    return mixer, [asked, read] if mixer.inner.shared_qk else [asked, read, read]


def _filled(given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Queries stand for keys where there are none."""
    return (given[0], *given) if len(given) == 2 else given


# ---------------------------------------------------------------------------------------------- the next token
def _decoding(mixer: Mixer, cell: BenchCell) -> BenchCall:
    """Each call is the next token: a state that is used twice would be copied.  One that was built for no more tokens is."""
    if cell.level == "kernel" and not mixer.can.stream:
        raise Unsupported(f"{mixer.name} cannot run chunk by chunk: {mixer.can.reason('stream')}")
    state: State = None
    shapes: list[tuple[int, ...]] = [(cell.batch, 1, cell.dim)]
    if cell.level == "kernel":
        inner, shapes = _inside(mixer, cell, 1)
        state = inner.inner.initial_state()

    def step(given: list[Tensor], before: State) -> tuple[Tensor, State]:
        if cell.level == "layer":
            return mixer.stream(given[0], before)
        return inner.inner(*_filled(given), causal=True, state=before)

    def one() -> Tensor:
        nonlocal state
        out, after = step(given, state)
        state = after if mixer.length is None else state
        return out

    with torch.no_grad(), skip_attention(mixer):
        for n in _chunks(cell.length):
            _, state = step([torch.randn(*shape[:-2], n, shape[-1]) for shape in shapes], state)
    given = [torch.randn(*shape) for shape in shapes]
    return BenchCall(one)


def _chunks(length: int) -> Iterator[int]:
    yield from [CHUNK] * (length // CHUNK)
    if length % CHUNK:
        yield length % CHUNK


@contextmanager
def skip_attention(mixer: Mixer) -> Iterator[None]:
    """Inside, attention over a cache of keys keeps its cache and gives zeros: a long prompt is read in linear time."""
    caches = [module for module in mixer.modules() if isinstance(module, KVCacheAttention)]
    for module in caches:
        module.attend = lambda q, k, v, *_, **__: q.new_zeros(*q.shape[:3], v.shape[3])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in caches:
            del module.attend
