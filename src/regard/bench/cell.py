"""What is measured: a call of given sizes, and what each contender runs in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attentions.cached import Cached
from regard.errors import Unsupported
from regard.measure.cost import Cost, cost
from regard.measure.pairs import pairs
from regard.mixer import Mixer, MultiHead, merge, split
from regard.models import Part
from regard.pattern import Pattern
from regard.registry import create, get
from regard.show.build import fitted, heads_of, pattern_of
from regard.state import State

LEVELS = {"kernel": "the attention alone, on given queries, keys and values", "layer": "the whole mixer, with its projections"}
WAYS = {
    "forward": "without gradients",
    "training": "forward and backward",
    "decode": "one token after `length` others, from the state that they left",
}
DENSE = "dense SDPA"
CHUNK = 1024  # tokens of a prompt that are read at once
LAST = 64  # tokens over which the cost of one more is told
BYTES = 4  # of a number


@dataclass(frozen=True)
class Cell:
    """The sizes of a call, float32.  A decoded token stands behind `length` others."""

    level: str
    way: str
    length: int
    batch: int = 1
    heads: int = 8
    width: int = 64
    causal: bool = False

    @property
    def dim(self) -> int:
        """The width of a token."""
        return self.heads * self.width

    @property
    def past(self) -> bool:
        """Whether no token sees later ones; a stream has none."""
        return self.causal or self.way == "decode"


class Run(NamedTuple):
    """A call, and the tensors that get gradients from it."""

    call: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()


class Needs(NamedTuple):
    """What a call needs by formula: FLOPs of products, exponentials, bytes, and the share of pairs that are seen, if any are.

    Bytes are parameters and what autograd keeps, and for training the gradients too; without gradients less may do.
    """

    flops: float
    exps: float
    bytes: float
    density: float | None


class Contender(ABC):
    """Something that can run in a cell.  It is a value: another process builds the same from it."""

    label: str
    foreign: bool = False  # somebody else's code
    levels: Sequence[str] = tuple(LEVELS)  # that it has a place at
    module: str | None = None  # what it imports beside Regard
    compiles: bool = False  # its first call makes code, and says nothing of the others

    @abstractmethod
    def build(self, cell: Cell) -> Run:
        """What to run.  ValueError or Unsupported: it cannot, and why."""

    def needs(self, cell: Cell) -> Needs | None:
        """By formula; None: there is none."""
        return None


def ready(contender: Contender, cell: Cell) -> Callable[[], object]:
    """The call to be timed, on inputs that are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run = contender.build(cell)
    if cell.way != "training":
        return torch.no_grad()(run.call)
    back = torch.ones(run.call().shape)

    def step() -> None:
        for leaf in run.leaves:
            leaf.grad = None
        run.call().backward(back)

    return step


def tokens(cell: Cell, count: int | None = None) -> Tensor:
    """x (b n d), normal numbers."""
    n = cell.length if count is None else count
    return torch.randn(cell.batch, n, cell.dim, requires_grad=cell.way == "training")


def of_layer(module: nn.Module, cell: Cell, call: Callable[[Tensor], Tensor] | None = None) -> Run:
    """A whole layer, on tokens; `call` unwraps what it gives, where it is no tensor."""
    module.train(cell.way == "training")
    x, apply = tokens(cell), module if call is None else call
    return Run(lambda: apply(x), [x, *module.parameters()])


def of_heads(call: Callable[..., Tensor], cell: Cell, *shapes: Sequence[int], more: Sequence[Tensor] = ()) -> Run:
    """An attention, on normal numbers of these shapes; `more` are parameters that get gradients too."""
    given = [torch.randn(*shape, requires_grad=cell.way == "training") for shape in shapes]
    return Run(lambda: call(*given), [*given, *more])


# ---------------------------------------------------------------------------------------------- dense
class Projected(nn.Module):
    """W⁰ attend(W_q x, W_k x, W_v x): plain multi-head attention in plain PyTorch, the thing to beat."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.heads, self.causal = cell.heads, cell.causal
        self.q, self.k, self.v, self.out = (nn.Linear(cell.dim, cell.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x (b n d) -> (b n d)."""
        q, k, v = (split(part(x), self.heads) for part in (self.q, self.k, self.v))
        return self.out(merge(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))

    def step(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next token x (b 1 d), written behind the keys and values (b h m+1 e) so far."""
        k[:, :, -1:], v[:, :, -1:] = split(self.k(x), self.heads), split(self.v(x), self.heads)
        return self.out(merge(F.scaled_dot_product_attention(split(self.q(x), self.heads), k, v)))


class Dense(Contender):
    """PyTorch's fused attention over all pairs, causal where the cell is; its cache is there before, and large enough."""

    label = DENSE

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        all_heads = (cell.batch, cell.heads, cell.length, cell.width)
        if cell.way == "decode":
            k, v = (torch.randn(cell.batch, cell.heads, cell.length + 1, cell.width) for _ in range(2))
            if cell.level == "kernel":
                one = (cell.batch, cell.heads, 1, cell.width)
                return of_heads(lambda q: F.scaled_dot_product_attention(q, k, v), cell, one)
            layer, x = Projected(cell), tokens(cell, 1)
            return Run(lambda: layer.step(x, k, v))
        if cell.level == "layer":
            return of_layer(Projected(cell), cell)
        return of_heads(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=cell.causal), cell, *[all_heads] * 3)

    def needs(self, cell: Cell) -> Needs:
        """See `Contender`."""
        return _needs(mixer_of(Part(name="vanilla"), cell, device="meta"), cell)


# ---------------------------------------------------------------------------------------------- ours
@dataclass(frozen=True)
class Ours(Contender):
    """A recipe, with arguments."""

    part: Part

    @property
    def label(self) -> str:  # type: ignore[override]
        """As it is written: local:window=64."""
        return ":".join([self.part.name, *(f"{name}={value}" for name, value in self.part.arguments.items())])

    def build(self, cell: Cell) -> Run:
        """See `Contender`."""
        mixer = mixer_of(self.part, cell).train(cell.way == "training")
        if mixer.length is not None and cell.length + (cell.way == "decode") > mixer.length:
            raise ValueError(f"it was built for at most {mixer.length:,} tokens")
        if cell.way == "decode":
            return _decoding(mixer, cell)
        if cell.level == "layer":
            return of_layer(mixer, cell)
        inner, shapes = _inside(mixer, cell, cell.length)
        return of_heads(
            lambda *given: inner.inner.attend(*_filled(given), causal=cell.past)[0], cell, *shapes,
            more=list(inner.inner.parameters()),
        )  # fmt: skip

    def needs(self, cell: Cell) -> Needs | None:
        """See `Contender`; None where the formula cannot be asked."""
        try:
            return _needs(mixer_of(self.part, cell, device="meta"), cell)
        except (ValueError, TypeError, NotImplementedError, RuntimeError):
            return None  # built at random, by numbers that the meta device has not; or not causal, which `build` will say


def mixer_of(part: Part, cell: Cell, *, device: str = "cpu") -> Mixer:
    """Built for the cell; where it has to know the length, for one token more than a prompt has."""
    recipe = get(part.name)
    given = {"heads": heads_of(recipe, cell.heads), **part.arguments, "dim": cell.dim}
    told = fitted(recipe, cell.length + (cell.way == "decode"), given)
    default = bool(recipe.parameters["causal"].default)
    with torch.device(device):
        return create(recipe.name, **told, **({"causal": True} if cell.past or default else {}))


def _inside(mixer: Mixer, cell: Cell, n: int) -> tuple[MultiHead, list[tuple[int, ...]]]:
    """The heads, and the shapes of what they take: queries, keys unless they are made of these, values."""
    if not isinstance(mixer, MultiHead):
        raise Unsupported(f"{mixer.name} has no attention on given queries, keys and values: see the level layer")
    groups = mixer.kv_heads if mixer.inner.shares else mixer.heads
    e = cell.dim // mixer.heads
    asked, read = (cell.batch, mixer.heads, n, e), (cell.batch, groups, n, e)
    return mixer, [asked, read] if mixer.inner.keyless else [asked, read, read]


def _filled(given: Sequence[Tensor]) -> Sequence[Tensor]:
    """Queries stand for keys where there are none."""
    return (given[0], *given) if len(given) == 2 else given


# ---------------------------------------------------------------------------------------------- the next token
def _decoding(mixer: Mixer, cell: Cell) -> Run:
    with torch.no_grad(), not_looking(mixer):
        if cell.level == "layer":
            state: State = None
            for n in _chunks(cell.length):
                _, state = mixer.stream(tokens(cell, n), state)
            x, last = tokens(cell, 1), state
            run = Run(lambda: mixer.stream(x, last)[0])
        else:
            inner, shapes = _inside(mixer, cell, 1)
            if not mixer.can.stream:
                raise Unsupported(f"{mixer.name} cannot run chunk by chunk: {mixer.can.reason('stream')}")
            state = inner.inner.start()
            for n in _chunks(cell.length):
                given = [torch.randn(*shape[:2], n, shape[3]) for shape in shapes]
                _, state = inner.inner.attend(*_filled(given), causal=True, state=state)
            there = state
            run = of_heads(lambda *one: inner.inner.attend(*_filled(one), causal=True, state=there)[0], cell, *shapes)
    return run


def _chunks(length: int) -> Iterator[int]:
    yield from [CHUNK] * (length // CHUNK)
    if length % CHUNK:
        yield length % CHUNK


@contextmanager
def not_looking(mixer: Mixer) -> Iterator[None]:
    """Inside, attention over a cache of keys keeps its cache and gives zeros: a long prompt is read in linear time."""
    caches = [module for module in mixer.modules() if isinstance(module, Cached)]
    for module in caches:
        module.over = lambda q, k, v, *_, **__: q.new_zeros(*q.shape[:3], v.shape[3])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in caches:
            del module.over


# ---------------------------------------------------------------------------------------------- by formula
def _needs(mixer: Mixer, cell: Cell) -> Needs:
    n, pattern = cell.length, pattern_of(mixer)
    if cell.way == "decode":
        before = max(0, n + 1 - LAST)
        flops = _marginal([_part(cost(mixer, m, batch=cell.batch), cell).forward for m in (before or 1, n + 1)], before, n)
        exps = 0.0 if pattern is None else _marginal([_seen(pattern, m, cell) for m in (before, n + 1)], before, n)
        found = _part(cost(mixer, n + 1, batch=cell.batch), cell)
        return Needs(flops, exps, found.state + BYTES * found.parameters, None)
    found = _part(cost(mixer, n, batch=cell.batch), cell)
    seen = 0 if pattern is None else _seen(pattern, n, cell)
    density = None if pattern is None else seen / (cell.batch * _heads(mixer, cell) * n * n)
    if cell.way == "forward":
        held = max(found.saved, 2 * BYTES * cell.batch * n * cell.dim)  # at least what goes in and what comes out
        return Needs(found.forward, seen, held + BYTES * found.parameters, density)
    leaves = 3 if cell.level == "kernel" else 1  # q, k and v, or x
    gradients = BYTES * (leaves + 1) * cell.batch * n * cell.dim  # and that of the result
    held = found.saved + 2 * BYTES * found.parameters + gradients
    return Needs(found.forward + found.backward, 2 * seen, held, density)  # fused attention makes its scores twice


def _marginal(counts: Sequence[float], before: int, n: int) -> float:
    """Of the last token: the mean of the last few, for chunks are counted whole."""
    return (counts[1] - (counts[0] if before else 0)) / (n + 1 - before)


def _part(found: Cost, cell: Cell) -> Cost:
    """Of the whole mixer, or of the attention in it."""
    if cell.level == "layer":
        return found
    return next((part for part in found.parts if part.name == "attend"), found)


def _seen(pattern: Pattern, n: int, cell: Cell) -> float:
    return float(cell.batch * pairs(pattern, n, n, cell.heads)) if n else 0.0


def _heads(mixer: Mixer, cell: Cell) -> int:
    return mixer.heads if isinstance(mixer, MultiHead) else cell.heads
