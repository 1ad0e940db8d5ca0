"""What one call of a module costs: FLOPs, activations, streaming state and parameters.

`module_cost` runs the module on the meta device, where tensors have a shape and no data, and
counts. A module that cannot be counted that way has a formula instead:

    @formula(MyMixer)
    def _my_mixer(module: MyMixer, shape: CallShape) -> ModuleCost:
        scores = matmul_cost(shape.b, shape.n, module.dim, module.rank)
        return module_cost(module.up, shape) + scores

`regard.measure.formulas` has the formulas of the library, each with the reason for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from regard.block import Layer
from regard.ffn import MixtureOfExperts, ProductKeyMemory
from regard.mixer import Mixer


@dataclass(frozen=True)
class CallShape:
    """Sizes of one call.

    Args:
        b: Batch size.
        n: Number of queries (or of tokens, where there are no queries).
        m: Number of keys.
        h: Number of heads, for an `Attention`.
        e: Head width of queries and keys.
        f: Head width of values.
        kv_heads: Number of key and value heads. Default: h.
        causal: Whether an `Attention` is called with causal=True.
    """

    b: int
    n: int
    m: int
    h: int = 1
    e: int = 1
    f: int = 1
    kv_heads: int | None = None
    causal: bool = False

    @property
    def tokens(self) -> int:
        """b * n."""
        return self.b * self.n

    @property
    def bh(self) -> int:
        """b * h."""
        return self.b * self.h

    def with_length(self, n: int, m: int | None = None) -> CallShape:
        """The same call with n queries and m keys (default: n)."""
        return replace(self, n=n, m=n if m is None else m)


@dataclass(frozen=True)
class ModuleCost:
    """Cost of one call, in FLOPs and in numbers (not bytes).

    Args:
        forward: FLOPs of matrix products, convolutions and transforms. A multiply-add counts as 2.
        backward: FLOPs of the backward pass.
        recomputed: The share of `backward` that repeats forward work instead of storing its result.
        saved: Numbers that autograd saves for the backward pass.
        state: Numbers in the streaming state after n tokens.
        state_growth: Numbers that each further token adds to the state.
        parameters: Learned numbers, including those of all parts.
        active: Parameters that one token uses. Differs from `parameters` for experts and product
            keys.
        kind: Class name of the module.
        parts: Costs of the parts, by name.
    """

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    saved: int = 0
    state: int = 0
    state_growth: float = 0.0
    parameters: int = 0
    active: int = 0
    kind: str = ""
    parts: Mapping[str, ModuleCost] = field(default_factory=dict)

    def __add__(self, other: ModuleCost) -> ModuleCost:
        sums = {name: getattr(self, name) + getattr(other, name) for name in ADDITIVE}
        return ModuleCost(**sums, parts={**self.parts, **other.parts})

    def __mul__(self, times: int) -> ModuleCost:
        return ModuleCost(**{name: times * getattr(self, name) for name in ADDITIVE})

    __rmul__ = __mul__

    def with_state(self, n: int, size: Callable[[int], int]) -> ModuleCost:
        """The same with a streaming state of size(n) numbers after n tokens."""
        growth = max(0, size(n) - size(n // 2)) / (n - n // 2)
        return replace(self, state=size(n), state_growth=growth)

    def without_state(self) -> ModuleCost:
        """The same for a module that does not stream."""
        return replace(self, state=0, state_growth=0.0)


ADDITIVE = ("forward", "backward", "recomputed", "saved", "state", "state_growth")

Formula = Callable[[Any, CallShape], ModuleCost]
_formulas: dict[type, Formula] = {}
_breakdowns: dict[type, Formula] = {}


def formula(*kinds: type, is_breakdown: bool = False) -> Callable[[Formula], Formula]:
    """Register the decorated (module, shape) -> ModuleCost for these classes and their subclasses.

    Args:
        kinds: Classes of modules.
        is_breakdown: Whether the formula only adds up parts. A module that contains such a part is
            counted with the part as it is; with any other formula, the formula stands in for the
            part.
    """

    def register(function: Formula) -> Formula:
        (_breakdowns if is_breakdown else _formulas).update(dict.fromkeys(kinds, function))
        return function

    return register


def find_formula(module: nn.Module, *, breakdown: bool = False) -> Formula | None:
    """The formula for the class of a module, or for its nearest base class that has one."""
    known = _formulas | _breakdowns if breakdown else _formulas
    return next((known[kind] for kind in type(module).__mro__ if kind in known), None)


def module_cost(module: nn.Module, shape: CallShape) -> ModuleCost:
    """Cost of a call: by formula where there is one, else counted on the meta device."""
    from regard.measure.meta import count_on_meta  # which uses the formulas of submodules

    cost = (find_formula(module, breakdown=True) or count_on_meta)(module, shape)
    if isinstance(module, Mixer | Layer) and not (module.causal and module.can.stream):
        cost = cost.without_state()
    parameters = sum(p.numel() for p in module.parameters())
    active = parameters - _inactive_parameters(module)
    return replace(cost, parameters=parameters, active=active, kind=type(module).__name__)


def _inactive_parameters(module: nn.Module) -> int:
    """Parameters that one token does not use: other experts, and slots it does not read."""
    total = 0
    for part in module.modules():
        if isinstance(part, MixtureOfExperts):
            experts = sum(p.numel() for p in part.bank.parameters())
            total += experts * (part.num_experts - part.top_k) // part.num_experts
        elif isinstance(part, ProductKeyMemory):
            total += part.values.numel()
            total -= min(len(part.values), part.heads * part.top_k) * part.dim
    return total


def sum_parts(**parts: ModuleCost) -> ModuleCost:
    """The sum of named parts. Parts that cost nothing are not listed."""
    total = sum(parts.values(), ModuleCost())
    listed = {name: part for name, part in parts.items() if part != ModuleCost(kind=part.kind)}
    return replace(total, parts=listed)


def sum_layers(layers: Iterable[nn.Module], shape: CallShape) -> ModuleCost:
    """Cost of layers that run one after the other. Identical layers are counted once."""
    known: dict[Any, ModuleCost] = {}
    parts = {}
    for i, layer in enumerate(layers):
        key = _signature(layer)
        if key not in known:
            known[key] = module_cost(layer, shape)
        parts[f"layer {i}"] = known[key]
    return sum_parts(**parts)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of the same classes, settings and tensor shapes."""
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    tensors = [
        (name, t.shape, t.requires_grad)
        for name, t in (*module._parameters.items(), *module._buffers.items())
        if t is not None
    ]
    children = [(name, _signature(child)) for name, child in module.named_children()]
    return type(module), repr(settings), tuple(tensors), tuple(children)


def matmul_cost(b: int, n: int, inner: int, m: int, *, saved: int | None = None) -> ModuleCost:
    """b matrix products (n, inner) @ (inner, m). The backward pass has two products for each.

    Autograd saves both factors, unless `saved` says otherwise.
    """
    flops = 2 * b * n * inner * m
    return ModuleCost(flops, 2 * flops, saved=b * inner * (n + m) if saved is None else saved)
