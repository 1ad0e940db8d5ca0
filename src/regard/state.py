"""What a stream carries from chunk to chunk, as a value: reorder it, cut it from the graph, weigh it.

A state is made of tuples, named tuples, lists and dicts, one in the other.  Their leaves keep one rule:

    every tensor has the examples as its first dimension;
    what is the same for all examples is no tensor: a number, a numpy array, None.

So what happens to the examples of a batch can be done to any state, of any mechanism, without knowing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = Any  # see above

RULE = "a state is made of tuples, lists and dicts of tensors, numbers, numpy arrays and None"
Leaf = Tensor | np.ndarray | np.generic | int | float | None


def take(state: State, index: Tensor | Sequence[int]) -> State:
    """The state of examples `index` (whole numbers, in any order, repeated or not): `take(state, [1, 1, 0])`.

    Streaming on with it is what streaming those examples from the start would have come to.
    """
    rows = torch.as_tensor(index)
    if rows.dim() != 1 or (
        len(rows) and (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
    ):
        raise ValueError(
            f"index must be a row of whole numbers, not {tuple(rows.shape)} {rows.dtype}"
        )
    count = state_batch_size(state)
    if count is not None and len(rows) and not (rows.min() >= 0 and rows.max() < count):
        raise ValueError(
            f"the state is of {count} examples, and index asks for {int(rows.min())} to {int(rows.max())}"
        )
    return map_tensors(lambda t: t.index_select(0, rows.to(t.device, torch.long)), state)


def detach(state: State) -> State:
    """The same state, cut from the graph: no gradient goes further back."""
    return map_tensors(Tensor.detach, state)


def state_bytes(state: State) -> int:
    """The memory that a state keeps alive.  Parts that share it count once; a view holds all that it is a view of."""
    found = list(leaves(state))
    storages = [leaf.untyped_storage() for leaf in found if isinstance(leaf, Tensor)]
    arrays = sum(leaf.nbytes for leaf in found if isinstance(leaf, np.ndarray))
    return arrays + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_batch_size(state: State) -> int | None:
    """How many examples a state is of; None: it holds no tensor yet."""
    sizes = {
        leaf.shape[0] if leaf.dim() else None for leaf in leaves(state) if isinstance(leaf, Tensor)
    }
    if len(sizes) > 1 or None in sizes:
        raise ValueError(
            "every tensor of a state must have the examples as its first dimension, and these differ"
        )
    return next(iter(sizes), None)


def check_state(state: State, start: State, count: int) -> None:
    """A stream of `count` examples that began as `start` may go on with this."""
    if not _alike(state, start):
        raise TypeError(
            f"this is no state of this mixer: it must be made like {_shown(start)}, not like {_shown(state)}"
        )
    had = state_batch_size(state)
    if had not in (None, count):
        raise ValueError(
            f"the stream began with {had} examples, and goes on with {count}: see regard.state.take"
        )


def map_tensors(f: Callable[[Tensor], Tensor], state: State) -> State:
    """The state with `f` done to each of its tensors."""
    if isinstance(state, Tensor):
        return f(state)
    if isinstance(state, dict):
        return {key: map_tensors(f, part) for key, part in state.items()}
    if isinstance(state, tuple | list):
        parts = [map_tensors(f, part) for part in state]
        return type(state)(*parts) if _is_named(state) else type(state)(parts)
    if isinstance(state, Leaf):
        return state
    raise TypeError(f"{RULE}, and not of {type(state).__name__}")


def leaves(state: State) -> Iterator[Leaf]:
    """Its tensors, numbers and arrays, from left to right."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, tuple | list):
        for part in state:
            yield from leaves(part)
    elif isinstance(state, Leaf):
        yield state
    else:
        raise TypeError(f"{RULE}, and not of {type(state).__name__}")


def _is_named(state: State) -> bool:
    """Named tuples take their parts one by one."""
    return type(state) not in (tuple, list) and isinstance(state, tuple)


def _alike(state: State, start: State) -> bool:
    """Whether a state may have come of that start: None and () stand for what is still to come."""
    if start is None:
        return isinstance(state, Leaf | tuple | list | dict)
    if type(start) is tuple and not start:
        return isinstance(state, tuple) and all(isinstance(part, Tensor | tuple) for part in state)
    if isinstance(start, tuple | list):
        same = type(state) is type(start) and len(state) == len(start)
        return same and all(_alike(part, first) for part, first in zip(state, start, strict=True))
    if isinstance(start, dict):
        return (
            isinstance(state, dict)
            and state.keys() >= start.keys()
            and all(_alike(state[k], start[k]) for k in start)
        )
    return type(state) is type(start)


def _shown(state: State) -> str:
    """The build of a state, for messages."""
    if isinstance(state, Tensor):
        return f"a tensor {tuple(state.shape)}"
    if isinstance(state, tuple | list):
        name = "" if type(state) is tuple else type(state).__name__
        return f"{name}({', '.join(map(_shown, state))})"
    return "None" if state is None else type(state).__name__
