"""Attention masks of transformers as patterns.

transformers describes the mask of a call by a function of positions. `LazyMask` passes for the
resulting mask (b, 1, n, m) but stores only the pattern and the padding. Our attention functions
read these; any other operation on it materializes the dense mask, so models that slice or combine
masks still work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from regard.pattern import Band, Causal, Full, Pattern

MaskFunction = Callable[..., Any]


class MaskRule(NamedTuple):
    """Which keys the queries of a call may see.

    Args:
        causal: Whether the pattern hides all later keys.
        keep: Padding mask (b, m), True = token. None: no padding.
        first: Position of the first token of each example, (b). None: 0 for all.
        q_start: Position of the first query.
        k_start: Position of the first key.
    """

    pattern: Pattern
    causal: bool
    keep: Tensor | None = None
    first: Tensor | None = None
    q_start: int = 0
    k_start: int = 0

    def dense(self, n: int, m: int, device: torch.device) -> Tensor:
        """The mask (b, 1, n, m) or (1, 1, n, m), True = visible."""
        q, k = (
            torch.arange(n, device=device) + self.q_start,
            torch.arange(m, device=device) + self.k_start,
        )
        visible = self.pattern.allows(q[:, None], k[None, :])[None, None]
        return visible if self.keep is None else visible & self.keep[:, None, None, :]

    def with_padding(self, mask: Tensor | None, m: int) -> MaskRule:
        """The rule with the padding of a mask (b, s) over all tokens, for the m keys of a call."""
        if mask is None:
            return self
        padded = F.pad(mask, (0, max(0, self.k_start + m - mask.shape[1])))
        keep, first = padded[:, self.k_start : self.k_start + m], padded.int().argmax(1)
        return self._replace(
            keep=None if keep.all() else keep, first=first if first.any() else None
        )


class LazyMask(Tensor):
    """A `MaskRule` that passes for its dense mask (b, 1, n, m) of bools."""

    rule: MaskRule

    @staticmethod
    def __new__(
        cls, rule: MaskRule, shape: tuple[int, int, int, int], device: torch.device
    ) -> LazyMask:
        """Allocates no n × m memory."""
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.rule = rule
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyMask({self.rule.pattern!r}, {tuple(self.shape)})"

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        b, _, n, m = self.shape
        return self.rule.dense(n, m, self.device).expand(b, 1, n, m)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operation on the dense mask."""
        args, kwargs = torch.utils._pytree.tree_map_only(
            LazyMask, LazyMask.dense, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The mask of a call, with the signature of `AttentionMaskInterface`.

    Returns:
        A `LazyMask` where `mask_function` is a known pattern, else the dense mask (b, 1, n, m).
    """
    pattern = read_mask_function(mask_function)
    if pattern is None or torch.compiler.is_compiling():
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        dense = masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset=q_offset,  # type: ignore[arg-type]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            **kwargs,
        )
        assert dense is not None  # it may not be skipped
        return dense
    q_start = int(q_offset)
    causal = isinstance(pattern, Band) and pattern.right == 0
    if (
        isinstance(pattern, Band) and pattern.step == 1
    ):  # drop bounds that no pair of this call reaches
        end = max(q_start + q_length, kv_offset + kv_length)
        left, right = (
            None if side is None or side >= end else side for side in (pattern.left, pattern.right)
        )
        pattern = Full() if left is None and right is None else Band(left, right)
    rule = MaskRule(pattern, causal, q_start=q_start, k_start=kv_offset).with_padding(
        attention_mask, kv_length
    )
    return LazyMask(rule, (batch_size, 1, q_length, kv_length), torch.device(device))


# --------------------------------------------------------------------------- reading mask functions
# transformers gives a mask only as a closure: no attribute says which mask it is, and `local_size`,
# which comes with windows, does not say whether they are causal. So closures are recognized by the
# code object of the factory that made them. `test_lazy_masks_equal_transformers_masks` fails if
# transformers changes these factories.
_SLIDING_WINDOW, _BIDIRECTIONAL_WINDOW, _AND = (
    closure.__code__
    for closure in (
        masking_utils.sliding_window_overlay(1),
        masking_utils.sliding_window_bidirectional_overlay(1),
        masking_utils.and_masks(masking_utils.causal_mask_function),
    )
)


def read_mask_function(function: MaskFunction) -> Pattern | None:
    """The pattern of a mask function of transformers, or None if it is not a known one."""
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return Full()
    code = getattr(function, "__code__", None)
    if code not in (_SLIDING_WINDOW, _BIDIRECTIONAL_WINDOW, _AND):
        return None
    variables = inspect.getclosurevars(function).nonlocals
    if code is _SLIDING_WINDOW:
        return Band(variables["sliding_window"] - 1, None)
    if code is _BIDIRECTIONAL_WINDOW:
        return Band(variables["sliding_window"], variables["sliding_window"])
    pattern: Pattern = Full()
    for part in map(read_mask_function, variables["mask_functions"]):
        if part is None:
            return None
        pattern = intersect(pattern, part)
    return pattern


def intersect(a: Pattern, b: Pattern) -> Pattern:
    """a & b in its simplest form: equal patterns share a layout."""
    if a == b or b == Full():
        return a
    if a == Full():
        return b
    if isinstance(a, Band) and isinstance(b, Band) and a.step == b.step == 1:
        left, right = (
            min((bound for bound in bounds if bound is not None), default=None)
            for bounds in ((a.left, b.left), (a.right, b.right))
        )
        return Band(left, right)
    return a & b


# ----------------------------------------------------------------------------- masks made by others
def infer_rule(mask: Tensor | None, n: int, m: int, *, causal: bool) -> MaskRule | None:
    """The rule of a mask for n queries and m keys, or None if no rule describes it.

    Args:
        causal: Whether the layer is causal. A missing mask then means that queries see the past.
    """
    if isinstance(mask, LazyMask):
        return mask.rule
    if mask is None:
        return (
            MaskRule(Causal(), True, q_start=m - 1 if n == 1 else 0)
            if causal
            else MaskRule(Full(), False)
        )
    visible = as_bool(mask)
    if visible is None or visible.shape[1] != 1:
        return None
    if visible.shape[2] == 1 < n:
        return MaskRule(Full(), False).with_padding(visible[:, 0, 0], visible.shape[-1])
    past, full = MaskRule(Causal(), True, q_start=m - n), MaskRule(Full(), False)
    for rule in (past, full) if causal else (full, past):
        rule = rule.with_padding(visible[:, 0, -1], visible.shape[-1])
        if rule.q_start >= 0 and bool((rule.dense(n, m, visible.device) == visible).all()):
            return rule
    return None


def as_bool(mask: Tensor) -> Tensor | None:
    """A mask (b, 1, n, m) as bool, True = visible; None if it adds other values to the scores."""
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return visible if bool((visible | hidden).all()) else None
