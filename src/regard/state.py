"""Stream states as values: select examples, detach from the graph, measure memory.

A stream state is a nested structure of tuples, named tuples, lists and dicts. Its leaves follow one
rule:

    every tensor has the batch as its first dimension;
    anything shared by all examples is not a tensor but a number, a numpy array or None.

Therefore the functions below work on the state of any mixer without knowing its structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = Any  # see the module docstring

Leaf = Tensor | np.ndarray | np.generic | int | float | None


def take(state: State, index: Tensor | Sequence[int]) -> State:
    """The state of the examples `index`, integers in any order with repeats: `take(state, [1, 1,
    0])`.

    Streaming on from it equals streaming those examples from the start. Beam search uses it to
    reorder beams.
    """
    rows = torch.as_tensor(index)
    integers = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
    if rows.dim() != 1 or (len(rows) and not integers):
        raise ValueError(
            f"index must be a list or 1-D tensor of integers, not {tuple(rows.shape)} {rows.dtype}"
        )
    count = state_batch_size(state)
    if count is not None and len(rows) and not (rows.min() >= 0 and rows.max() < count):
        low, high = int(rows.min()), int(rows.max())
        raise ValueError(f"the state has {count} examples, but index ranges from {low} to {high}")
    return map_tensors(lambda t: t.index_select(0, rows.to(t.device, torch.long)), state)


def detach(state: State) -> State:
    """The state detached from the autograd graph, for truncated backpropagation through time."""
    return map_tensors(Tensor.detach, state)


def state_bytes(state: State) -> int:
    """Memory that a state keeps alive, in bytes.

    Shared storage counts once, and a view counts as its whole storage.
    """
    found = list(leaves(state))
    storages = [leaf.untyped_storage() for leaf in found if isinstance(leaf, Tensor)]
    arrays = sum(leaf.nbytes for leaf in found if isinstance(leaf, np.ndarray))
    return arrays + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_batch_size(state: State) -> int | None:
    """The number of examples in a state; None if it holds no tensor yet."""
    sizes = {
        leaf.shape[0] if leaf.dim() else None for leaf in leaves(state) if isinstance(leaf, Tensor)
    }
    if len(sizes) > 1 or None in sizes:
        raise ValueError(
            "every tensor of a state must have the batch as its first dimension, "
            "but the sizes differ"
        )
    return next(iter(sizes), None)


def check_state(state: State, start: State, batch_size: int) -> None:
    """Raise unless a stream that begins with `start` can continue from `state` with `batch_size`
    examples.
    """
    if not _matches(state, start):
        raise TypeError(
            f"not a state of this mixer: expected {_describe(start)}, got {_describe(state)}"
        )
    had = state_batch_size(state)
    if had not in (None, batch_size):
        raise ValueError(
            f"the state has {had} examples, but the input has {batch_size}: "
            "select examples with regard.state.take"
        )


def map_tensors(f: Callable[[Tensor], Tensor], state: State) -> State:
    """The state with `f` applied to each tensor."""
    if isinstance(state, Tensor):
        return f(state)
    if isinstance(state, dict):
        return {key: map_tensors(f, part) for key, part in state.items()}
    if isinstance(state, tuple | list):
        parts = [map_tensors(f, part) for part in state]
        is_named = isinstance(state, tuple) and type(state) is not tuple
        return type(state)(*parts) if is_named else type(state)(parts)
    if isinstance(state, Leaf):
        return state
    raise _invalid_leaf(state)


def leaves(state: State) -> Iterator[Leaf]:
    """The tensors, numbers and arrays of a state, from left to right."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, tuple | list):
        for part in state:
            yield from leaves(part)
    elif isinstance(state, Leaf):
        yield state
    else:
        raise _invalid_leaf(state)


def _invalid_leaf(leaf: object) -> TypeError:
    return TypeError(
        "a state consists of tuples, lists and dicts of tensors, numbers, numpy arrays and None, "
        f"not {type(leaf).__name__}"
    )


def _matches(state: State, start: State) -> bool:
    """Whether `state` has the structure of `start`, in which None and () stand for anything not
    created yet.
    """
    if start is None:
        return isinstance(state, Leaf | tuple | list | dict)
    if type(start) is tuple and not start:
        return isinstance(state, tuple) and all(isinstance(part, Tensor | tuple) for part in state)
    if isinstance(start, tuple | list):
        if type(state) is not type(start) or len(state) != len(start):
            return False
        return all(_matches(part, first) for part, first in zip(state, start, strict=True))
    if isinstance(start, dict):
        return (
            isinstance(state, dict)
            and state.keys() >= start.keys()
            and all(_matches(state[k], start[k]) for k in start)
        )
    return type(state) is type(start)


def _describe(state: State) -> str:
    """The structure of a state, for error messages."""
    if isinstance(state, Tensor):
        return f"a tensor {tuple(state.shape)}"
    if isinstance(state, tuple | list):
        name = "" if type(state) is tuple else type(state).__name__
        return f"{name}({', '.join(map(_describe, state))})"
    return "None" if state is None else type(state).__name__
