"""Rows behind rows: a cache grows by a token at a time, and is not copied at each.

A state is a value: several streams may go on from one, and each must find what was there.  So the rows of a cache stand in
tensors that are longer, and one number, shared by all states that have them, says how many of their rows were ever written.
Who holds all of those may write the next ones in place.  Who holds fewer goes on in a copy.  No row is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LEAST = 64  # rows that are free after a copy, or half as many as are written

Room = NDArray[
    np.int64
]  # how many rows are written, and the position of each, written or still free
_one_at_a_time = Lock()


def append_rows(
    old: Sequence[Tensor], new: Sequence[Tensor], at: NDArray[np.int64], end: int, room: Room | None
) -> tuple[list[Tensor], NDArray[np.int64], Room | None]:
    """Each of `new` (b h n ·), of positions up to `end`, behind its `old` (b h m ·), of positions `at` (m).

    room   what came with `old` the last time; None: it came from elsewhere
    """
    m, n = old[0].shape[2], new[0].shape[2]
    if not all(map(_may_be_written, old, new)):
        return (
            [torch.cat(pair, 2) for pair in zip(old, new, strict=True)],
            _followed(at, end - n, n),
            None,
        )
    if room is None or not _claimed(old, room, m + n):
        free = max(LEAST, (m + n) // 2)
        old = [_copied(x, m + n + free) for x in old]
        room = np.concatenate(([m + n], _followed(at, end - n, n + free)))
    return [_written(*pair) for pair in zip(old, new, strict=True)], room[1 : m + n + 1], room


def _may_be_written(old: Tensor, new: Tensor) -> bool:
    """A graph may still need what it was given, and so may a compiler; and tensors of inference mode stay there."""
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or type(old) is not Tensor
        or type(new) is not Tensor
    ):
        return False
    alike = (
        old.shape[:2] == new.shape[:2] and old.shape[3] == new.shape[3] and old.dtype == new.dtype
    )
    return (
        alike
        and old.device == new.device
        and (not old.is_inference() or torch.is_inference_mode_enabled())
    )


def _claimed(old: Sequence[Tensor], room: Room, end: int) -> bool:
    """Whether rows up to `end` are now the caller's: they were free, and the next behind those of `old`."""
    size = len(room) - 1
    shapes = [x.shape for x in old]
    own = [x.stride() for x in old] == [
        (h * size * e, size * e, e, 1) for _, h, _, e in shapes
    ]  # no copy, nor a part
    with _one_at_a_time:
        if not own or room[0] != shapes[0][2] or end > size:
            return False
        room[0] = end
    return True


def _copied(x: Tensor, size: int) -> Tensor:
    """x (b h m e), as the first rows of a tensor with `size` of them."""
    b, h, m, e = x.shape
    return x.new_empty(b, h, size, e)[:, :, :m].copy_(x)


def _written(old: Tensor, new: Tensor) -> Tensor:
    """Both, with `new` in the free rows behind `old`."""
    b, h, m, e = old.shape
    both = old.as_strided((b, h, m + new.shape[2], e), old.stride())
    both[:, :, m:] = new
    return both


def _followed(at: NDArray[np.int64], first: int, count: int) -> NDArray[np.int64]:
    return np.concatenate((at, np.arange(first, first + count)))
