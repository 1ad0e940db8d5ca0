"""What transformers says about who may look at whom, as a pattern: its mask functions are read, not evaluated.

A `LazyMask` stands for a mask of four dimensions (b 1 n m), but holds only the expression and the padding.  Whatever touches it,
other than our attention functions, gets the dense mask that it stands for: so a model that cuts or combines its masks stays
right, and one that hands them on stays fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils as theirs

from regard.pattern import Band, Causal, Full, Pattern

MaskFunction = Callable[..., Any]


class MaskRule(NamedTuple):
    """Who may look at whom in a call, by position and by padding.

    causal   whether the pattern hides all later keys
    real     (b m), True = a real token; None: all are
    first    (b), the position of the first real token of each example; None: 0 for all
    """

    pattern: Pattern
    causal: bool
    real: Tensor | None = None
    first: Tensor | None = None
    q_start: int = 0
    k_positions: int = 0

    def dense(self, n: int, m: int, device: torch.device) -> Tensor:
        """The mask of four dimensions, (b 1 n m) or (1 1 n m), True = may look."""
        q, k = (
            torch.arange(n, device=device) + self.q_start,
            torch.arange(m, device=device) + self.k_positions,
        )
        keep = self.pattern.allows(q[:, None], k[None, :])[None, None]
        return keep if self.real is None else keep & self.real[:, None, None, :]


class LazyMask(Tensor):
    """A `MaskRule` that passes for the dense mask that it stands for, (b 1 n m), bool."""

    rule: MaskRule

    @staticmethod
    def __new__(
        cls, rule: MaskRule, shape: tuple[int, int, int, int], device: torch.device
    ) -> LazyMask:
        """Takes no memory for its n × m."""
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.rule = rule
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mask({self.rule.pattern!r}, {tuple(self.shape)})"

    def dense(self) -> Tensor:
        """What it stands for."""
        b, _, n, m = self.shape
        return self.rule.dense(n, m, self.device).expand(b, 1, n, m)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Any operation works on the dense mask."""
        spread = torch.utils._pytree.tree_map_only(LazyMask, LazyMask.dense, (args, kwargs or {}))
        return func(*spread[0], **spread[1])


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: MaskFunction = theirs.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The mask of a call as transformers describes it: a `LazyMask` where it is an expression, else dense, (b 1 n m).

    attention_mask   (b s), True = a real token, of all tokens so far
    """
    pattern = read(mask_function)
    if pattern is None or torch.compiler.is_compiling():
        kwargs |= {
            "q_offset": q_offset,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
            "device": device,
        }
        dense = theirs.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
        assert dense is not None  # since it may leave nothing out
        return dense
    at, last = int(q_offset), max(int(q_offset) + q_length, kv_offset + kv_length)
    real, first = _padding(attention_mask, kv_length, kv_offset)
    rule = MaskRule(_simplest(pattern, last), _hides_future(pattern), real, first, at, kv_offset)
    return LazyMask(rule, (batch_size, 1, q_length, kv_length), torch.device(device))


def _padding(mask: Tensor | None, m: int, k_positions: int) -> tuple[Tensor | None, Tensor | None]:
    """Which of the keys of a call are real, and where each example begins; None where there is nothing to say."""
    if mask is None:
        return None, None
    whole = F.pad(mask, (0, max(0, k_positions + m - mask.shape[1])))
    real, first = whole[:, k_positions : k_positions + m], whole.int().argmax(1)
    return None if real.all() else real, first if first.any() else None


# ---------------------------------------------------------------------------------------------- reading their functions
def _parts(function: MaskFunction) -> dict[str, Any]:
    """What a closure holds, by name."""
    cells = function.__closure__ or ()
    return dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    )


_WINDOW, _NEAR, _AND = (
    function.__code__
    for function in (
        theirs.sliding_window_overlay(1),
        theirs.sliding_window_bidirectional_overlay(1),
        theirs.and_masks(theirs.causal_mask_function),
    )
)


def read(function: MaskFunction) -> Pattern | None:
    """The pattern that a mask function of transformers describes; None where it is not one of those that we know."""
    if function is theirs.causal_mask_function:
        return Causal()
    if function is theirs.bidirectional_mask_function:
        return Full()
    code = getattr(function, "__code__", None)
    if code is _WINDOW:
        return Band(_parts(function)["sliding_window"] - 1, None)
    if code is _NEAR:
        window = _parts(function)["sliding_window"]
        return Band(window, window)
    if code is _AND:
        found = [read(part) for part in _parts(function)["mask_functions"]]
        return None if None in found else _meet([part for part in found if part is not None])
    return None


def _meet(patterns: list[Pattern]) -> Pattern:
    """What all allow; two bands are one."""
    met: Pattern = Full()
    for pattern in patterns:
        met = meet(met, pattern)
    return met


def meet(a: Pattern, b: Pattern) -> Pattern:
    """a & b, written as simply as it can be: equal patterns share a layout."""
    if a == b or b == Full():
        return a
    if a == Full():
        return b
    if isinstance(a, Band) and isinstance(b, Band) and a.step == b.step == 1:
        return Band(_least(a.left, b.left), _least(a.right, b.right))
    return a & b


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _simplest(pattern: Pattern, last: int) -> Pattern:
    """Without limits that no pair of the first `last_row` positions reaches."""
    if not isinstance(pattern, Band) or pattern.step > 1:
        return pattern
    left, right = (
        None if side is None or side >= last else side for side in (pattern.left, pattern.right)
    )
    return Full() if left is None and right is None else Band(left, right)


def _hides_future(pattern: Pattern) -> bool:
    return isinstance(pattern, Band) and pattern.right == 0


# ---------------------------------------------------------------------------------------------- masks that others made
def rule_of(mask: Tensor | None, n: int, m: int, *, causal: bool) -> MaskRule | None:
    """The rule of whatever mask came with a call; None: it is dense, and no rule that we know says the same.

    causal   whether the layer calls itself so: a mask that was left out then means the past
    """
    if isinstance(mask, LazyMask):
        return mask.rule
    if mask is None:
        return (
            MaskRule(Causal(), True, q_start=m - 1 if n == 1 else 0)
            if causal
            else MaskRule(Full(), False)
        )
    keep = as_bool(mask)
    if keep is None or keep.shape[1] != 1:
        return None
    if keep.shape[2] == 1 < n:
        return _with(MaskRule(Full(), False), keep[:, 0, 0])
    real = keep[:, 0, -1]
    past = _with(MaskRule(Causal(), True, q_start=m - n), real) if m >= n else None
    whole = _with(MaskRule(Full(), False), real)
    for rule in (past, whole) if causal else (whole, past):
        if rule is not None and bool((rule.dense(n, m, keep.device) == keep).all()):
            return rule
    return None


def _with(rule: MaskRule, real: Tensor) -> MaskRule:
    found, first = _padding(real, real.shape[1], 0)
    return rule._replace(real=found, first=first)


def as_bool(mask: Tensor) -> Tensor | None:
    """A mask (b 1 n m) as bool, True = may look; None where it is an addend that says more."""
    if mask.dtype == torch.bool:
        return mask
    kept = mask == 0
    shut = mask <= torch.finfo(mask.dtype).min / 2
    return kept if bool((kept | shut).all()) else None
