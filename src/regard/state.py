"""Stream states as values: select, join and split examples, detach from the graph, measure memory.

A stream state is a nested structure of tuples, named tuples, lists and dicts. Its leaves follow one
rule:

    every tensor has the batch as its first dimension;
    anything shared by all examples is not a tensor but a number, a numpy array or None.

Therefore the functions below work on the state of any mixer without knowing its structure.

States of sequences that stand at different positions differ in what their examples share. `join`
puts them into one state nevertheless, in one of three ways:

- A tuple or list whose parts are all tuples, lists or dicts holds the states of other modules, such
  as the layers of a stack, which are read by their `stream`. Each part is joined by itself. So the
  state that a mixer keeps for itself is a named tuple, or has a number, tensor or None among its
  parts.
- A named tuple class decorated with `per_example("position")` says that the code that reads it also
  accepts an int64 tensor (b) in that field, and one tensor holds the positions of all examples.
- Any other state becomes a `JoinedState`: groups of examples, each with a state of its own.
  `Mixer.stream`, the attention inside `MultiHead`, layers and models run these group by group with
  `run_by_group`, so a mixer needs no code for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_int

State = Any  # see the module docstring

Leaf = Tensor | np.ndarray | np.generic | int | float | None
Container: Any = (tuple, list, dict)

_T = TypeVar("_T", bound=type)


class JoinedState(NamedTuple):
    """Examples whose states cannot share one structure, in groups that can.

    Attributes:
        groups: The state of each group. One without tensors has not read a token yet.
        rows: Indices in the batch of the examples of each group.
    """

    groups: tuple[State, ...]
    rows: tuple[tuple[int, ...], ...]


class _PerExampleFields(NamedTuple):
    positions: tuple[str, ...]
    states: tuple[str, ...]


_per_example_fields: dict[type, _PerExampleFields] = {}


def per_example(*positions: str, states: Sequence[str] = ()) -> Callable[[_T], _T]:
    """Class decorator for a named tuple whose examples may stand at different positions.

    Args:
        positions: Fields that are an int if all examples agree and else an int64 tensor (b).
        states: Fields that are passed on to another module's `stream` or to an `Attention`, which
            may find a `JoinedState` there.

    A class that needs more than that has the classmethod `join_states(states, sizes)`, and the
    methods `share_positions()`, the state with ints where all examples agree, `join_key()`, equal
    for states whose examples share everything, and `join_mismatch(other)`, the reason why a state
    cannot be joined to it, or None.
    """

    def register(cls: _T) -> _T:
        _per_example_fields[cls] = _PerExampleFields(positions, tuple(states))
        return cls

    return register


def take(state: State, index: Tensor | Sequence[int]) -> State:
    """The state of the examples `index`, integers in any order with repeats: `take(state, [1, 1,
    0])`.

    Streaming on from it equals streaming those examples from the start. Beam search uses it to
    reorder beams.
    """
    try:
        rows = torch.as_tensor(index)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"index must be a list or 1-D tensor of integers, not {index!r:.80}"
        ) from None
    integers = not (rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool)
    if rows.dim() != 1 or (len(rows) and not integers):
        raise ValueError(
            f"index must be a list or 1-D tensor of integers, not {tuple(rows.shape)} {rows.dtype}"
        )
    count = state_batch_size(state)
    if count is not None and len(rows) and not (rows.min() >= 0 and rows.max() < count):
        low, high = int(rows.min()), int(rows.max())
        raise ValueError(f"the state has {count} examples, but index ranges from {low} to {high}")
    return _take(state, rows)


def join(states: Sequence[State]) -> State:
    """One state with the examples of several states of the same mixer, layer or model, in order.

    The sequences may stand at different positions. Streaming on from the joined state equals
    streaming each of them alone:

        state = join([state_of_a, state_of_b])
        y, state = mixer.stream(torch.cat((next_of_a, next_of_b)), state)

    States of another structure, such as those of another mixer, raise an error. States of two
    mixers with the same structure are not told apart: joining them is up to the caller.

    Args:
        states: The states, which may be joined states themselves. A state that has not read a token
            (`None` or `initial_state()`) counts as one example.
    """
    if isinstance(states, Tensor | dict) or not isinstance(states, Sequence) or _is_named(states):
        raise TypeError(f"join takes a list of states, not {_describe(states)}")
    if not states:
        raise ValueError("join needs at least one state, but the list is empty")
    for i, state in enumerate(states):
        if not isinstance(state, (Tensor, *Container)) and state is not None:
            raise TypeError(f"states[{i}] is not a state, but {type(state).__name__}")
        reason = _mismatch(states[0], state)
        if reason is not None:
            raise ValueError(f"states 0 and {i} cannot be joined: {reason}")
    sizes = [state_batch_size(state) for state in states]
    known = [1 if size is None else size for size in sizes]
    if all(size is None for size in sizes):  # a plain state would not know its batch size
        return _join_groups(states, known)
    return _join(states, known)


def split(state: State, sizes: Iterable[int] | Tensor | None = None) -> list[State]:
    """The inverse of `join`: states of the first `sizes[0]` examples, of the next, and so on.

    Args:
        state: The state.
        sizes: Number of examples of each part. Defaults to one state for each example.
    """
    count = state_batch_size(state)
    if sizes is None:
        if count is None:
            raise ValueError(
                "the state has not read a token, so its number of examples is unknown: give sizes"
            )
        sizes = [1] * count
    sizes = _list_of_sizes(sizes)
    if count is None:
        return [state for _ in sizes]
    if sum(sizes) != count:
        raise ValueError(
            f"sizes must sum to the {count} examples of the state, but {sizes} sums to {sum(sizes)}"
        )
    ends = np.cumsum(sizes).tolist()
    return [
        _take(state, torch.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)
    ]


def _list_of_sizes(sizes: Iterable[int] | Tensor) -> list[int]:
    is_scalar = isinstance(sizes, Tensor | np.ndarray) and sizes.ndim == 0
    if is_scalar or isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise TypeError(f"sizes must be a list of integers, not {sizes!r:.80}")
    found = sizes.tolist() if isinstance(sizes, Tensor | np.ndarray) else list(sizes)
    for i, size in enumerate(found):
        found[i] = size.item() if isinstance(size, Tensor | np.generic) else size
        check_int(1, **{f"sizes[{i}]": found[i]})
    return found


def run_by_group(
    run: Callable[..., tuple[Tensor, State]], state: JoinedState, *inputs: Tensor | None
) -> tuple[Tensor, State]:
    """Call `run(state, *inputs)` for each group of a joined state, and join the results.

    Args:
        run: Returns an output with the batch as first dimension and the next state.
        state: The joined state.
        inputs: Tensors with the batch as first dimension, or None. `run` gets the rows of a group.
    """
    order = [row for rows in state.rows for row in rows]
    if len(state.groups) == 1 and order == list(range(len(order))):
        return run(state.groups[0], *inputs)
    outputs, states = [], []
    for group, rows in zip(state.groups, state.rows, strict=True):
        selected = [None if x is None else x[torch.tensor(rows, device=x.device)] for x in inputs]
        output, next_state = run(group, *selected)
        outputs.append(output)
        states.append(next_state)
    output, joined = torch.cat(outputs), _join(states, [len(rows) for rows in state.rows])
    if order == sorted(order):
        return output, joined
    inverse = torch.tensor(order).argsort()
    return output[inverse.to(output.device)], _take(joined, inverse)


def start_groups(state: JoinedState, start: State) -> State:
    """The joined state with `start` for groups that are None, as they begin a stream."""
    if all(group is not None for group in state.groups):
        return state
    groups = [start if group is None else group for group in state.groups]
    sizes = [len(rows) for rows in state.rows]
    if all(state_batch_size(group) is None for group in groups):
        return _join_groups(groups, sizes)
    order = [row for rows in state.rows for row in rows]
    return _take(_join(groups, sizes), torch.tensor(order).argsort())


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
    sizes = set(_batch_sizes(state))
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
    check_batch_size(state, batch_size)


def check_batch_size(state: State, batch_size: int) -> None:
    """Raise ValueError unless a state has `batch_size` examples, or holds no tensor yet."""
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
    if isinstance(state, Container):
        return _map_parts(lambda part: map_tensors(f, part), state)
    if isinstance(state, Leaf):
        return state
    raise _invalid_leaf(state)


def leaves(state: State) -> Iterator[Leaf]:
    """The tensors, numbers and arrays of a state, from left to right."""
    if isinstance(state, Container):
        for part in _parts(state):
            yield from leaves(part)
    elif isinstance(state, Leaf):
        yield state
    else:
        raise _invalid_leaf(state)


# ------------------------------------------------------------------------------------- containers
def _parts(state: State) -> list[State]:
    return list(state.values() if isinstance(state, dict) else state)


def _map_parts(f: Callable[..., State], state: State, *others: State) -> State:
    """The container with f(part, *parts of the others) in place of each part."""
    if isinstance(state, dict):
        return {key: f(part, *(o[key] for o in others)) for key, part in state.items()}
    parts = [f(*parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*parts) if _is_named(state) else type(state)(parts)


def _is_named(state: State) -> bool:
    return isinstance(state, tuple) and type(state) is not tuple


def _holds_states(state: State) -> bool:
    """Whether it is a tuple or list of states of other modules. See the module docstring."""
    return (
        type(state) in (tuple, list)
        and len(state) > 0
        and all(isinstance(part, Container) for part in state)
    )


def _batch_sizes(state: State) -> Iterator[int | None]:
    if isinstance(state, JoinedState):
        yield sum(map(len, state.rows))
        for group, rows in zip(state.groups, state.rows, strict=True):
            if state_batch_size(group) not in (None, len(rows)):
                yield None
    elif isinstance(state, Tensor):
        yield state.shape[0] if state.dim() else None
    elif isinstance(state, Container):
        for part in _parts(state):
            yield from _batch_sizes(part)
    elif not isinstance(state, Leaf):
        raise _invalid_leaf(state)


# ---------------------------------------------------------------------------------- take and join
def _take(state: State, rows: Tensor) -> State:
    """The examples `rows` (k), a valid index."""
    if isinstance(state, JoinedState):
        return _take_groups(state, rows.tolist())
    if isinstance(state, Tensor):
        return state.index_select(0, rows.to(state.device, torch.long))
    if not isinstance(state, Container):
        return state
    taken = _map_parts(lambda part: _take(part, rows), state)
    fields = _per_example_fields.get(type(state))
    if fields is None or not any(isinstance(getattr(taken, f), Tensor) for f in fields.positions):
        return taken
    if hasattr(taken, "share_positions"):
        return taken.share_positions()
    return taken._replace(
        **{field: share_position(getattr(taken, field)) for field in fields.positions}
    )


def _take_groups(state: JoinedState, index: list[int]) -> State:
    place = {row: (group, i) for group, rows in enumerate(state.rows) for i, row in enumerate(rows)}
    local: list[list[int]] = [[] for _ in state.groups]
    new_rows: list[list[int]] = [[] for _ in state.groups]
    for new_row, old_row in enumerate(index):
        group, i = place[old_row]
        local[group].append(i)
        new_rows[group].append(new_row)
    groups: list[State] = []
    rows: list[tuple[int, ...]] = []
    for part, old_rows, own, new in zip(state.groups, state.rows, local, new_rows, strict=True):
        if own:
            unchanged = own == list(range(len(old_rows)))
            groups.append(part if unchanged else _take(part, torch.tensor(own)))
            rows.append(tuple(new))
    if len(groups) == 1 and state_batch_size(groups[0]) is not None:
        return groups[0]
    return JoinedState(tuple(groups), tuple(rows))


def _join(states: Sequence[State], sizes: Sequence[int]) -> State:
    """Join states of known sizes, at least one of which holds a tensor somewhere."""
    if len(states) == 1:
        return states[0]
    first = states[0]
    if all(_holds_states(state) and len(state) == len(first) for state in states):
        return type(first)(_join(parts, sizes) for parts in zip(*states, strict=True))
    if not any(map(_contains_joined, states)) and len(set(map(_join_key, states))) == 1:
        return _concatenate(states, sizes)
    return _join_groups(states, sizes)


def _join_groups(states: Sequence[State], sizes: Sequence[int]) -> State:
    """Join states as a `JoinedState`, with as few groups as possible."""
    members: dict[Any, list[tuple[State, tuple[int, ...]]]] = {}
    start = 0
    for state, size in zip(states, sizes, strict=True):
        joined = state if isinstance(state, JoinedState) else None
        groups = [state] if joined is None else joined.groups
        rows = [tuple(range(size))] if joined is None else joined.rows
        for group, own in zip(groups, rows, strict=True):
            shifted = tuple(start + row for row in own)
            members.setdefault(_join_key(group), []).append((group, shifted))
        start += size
    merged, all_rows = [], []
    for group in members.values():
        merged.append(_join([state for state, _ in group], [len(rows) for _, rows in group]))
        all_rows.append(tuple(row for _, rows in group for row in rows))
    if len(merged) == 1 and state_batch_size(merged[0]) is not None:
        return _take(merged[0], torch.tensor(all_rows[0]).argsort())
    if len(merged) == 1:
        all_rows = [tuple(range(start))]
    return JoinedState(tuple(merged), tuple(all_rows))


def _join_key(state: State, *, strict: bool = False) -> Any:
    """States with the same key have the same structure, shapes and shared values, apart from what
    their classes allow to differ between examples. So they can be joined without groups.

    Args:
        state: The state.
        strict: Whether nothing may differ, because it is part of a state without `per_example`.
    """
    if isinstance(state, Tensor):
        return state.dtype, state.device, state.shape[1:]
    if isinstance(state, np.ndarray):
        return state.dtype.str, state.shape, state.tobytes()
    if isinstance(state, dict):
        return dict, tuple((key, _join_key(part, strict=True)) for key, part in state.items())
    if not isinstance(state, tuple | list):
        return type(state), state
    if not strict and _holds_states(state):
        return type(state), len(state)
    if hasattr(state, "join_key"):
        return type(state), state.join_key() if strict else None
    fields = _per_example_fields.get(type(state))
    if strict or fields is None:
        return type(state), tuple(_join_key(part, strict=True) for part in state)
    anything = fields.positions + fields.states
    named = zip(state._fields, state, strict=True)  # type: ignore[union-attr]
    return type(state), tuple(None if name in anything else _join_key(part) for name, part in named)


def _concatenate(states: Sequence[State], sizes: Sequence[int]) -> State:
    """Join states with the same key."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(tuple(states))
    if not isinstance(first, Container):
        return first
    if hasattr(type(first), "join_states"):
        return type(first).join_states(states, sizes)
    fields = _per_example_fields.get(type(first))
    if fields is None:
        return _map_parts(lambda *parts: _concatenate(parts, sizes), *states)
    device = next((t.device for s in states for t in leaves(s) if isinstance(t, Tensor)), None)
    joined = []
    for name, *parts in zip(first._fields, *states, strict=True):
        if name in fields.positions:
            joined.append(join_positions(parts, sizes, device))
        elif name in fields.states:
            joined.append(_join(parts, sizes))
        else:
            joined.append(_concatenate(parts, sizes))
    return type(first)(*joined)


def _contains_joined(state: State) -> bool:
    """Whether a `JoinedState` is at the root, or in a part that no other module reads."""
    if isinstance(state, JoinedState):
        return True
    if not isinstance(state, Container):
        return False
    fields = _per_example_fields.get(type(state))
    if fields is None:
        return any(map(_contains_joined, _parts(state)))
    named = zip(state._fields, state, strict=True)
    return any(_contains_joined(part) for name, part in named if name not in fields.states)


def join_positions(
    positions: Sequence[int | Tensor], sizes: Sequence[int], device: torch.device | None
) -> int | Tensor:
    """Positions of several states, each an int or a tensor (b): an int if all agree, else (b)."""
    first = positions[0]
    if isinstance(first, int) and all(type(p) is int and p == first for p in positions):
        return first
    parts = [
        p if isinstance(p, Tensor) else torch.full((size,), p, device=device)
        for p, size in zip(positions, sizes, strict=True)
    ]
    return share_position(torch.cat(parts))


def share_position(position: int | Tensor) -> int | Tensor:
    """The position as an int if all examples agree."""
    if isinstance(position, Tensor) and len(position) and bool((position == position[0]).all()):
        return int(position[0])
    return position


# ----------------------------------------------------------------------------------------- checks
def _invalid_leaf(leaf: object) -> TypeError:
    return TypeError(
        "a state consists of tuples, lists and dicts of tensors, numbers, numpy arrays and None, "
        f"not {type(leaf).__name__}"
    )


def _matches(state: State, start: State) -> bool:
    """Whether `state` has the structure of `start`, in which None and () stand for anything not
    created yet.
    """
    if isinstance(state, JoinedState):
        return all(group is None or _matches(group, start) for group in state.groups)
    if start is None:
        return isinstance(state, (Leaf, *Container))
    if type(start) is tuple and not start:
        return isinstance(state, tuple) and all(isinstance(part, Tensor | tuple) for part in state)
    if isinstance(start, tuple | list):
        if type(state) is not type(start) or len(state) != len(start):
            return False
        fields = _per_example_fields.get(type(start))
        if fields is None:
            return all(map(_matches, state, start))
        return all(
            _matches(part, first) or (name in fields.positions and isinstance(part, Tensor))
            for name, part, first in zip(start._fields, state, start, strict=True)  # type: ignore[union-attr]
        )
    if isinstance(start, dict):
        return (
            isinstance(state, dict)
            and state.keys() >= start.keys()
            and all(_matches(state[k], start[k]) for k in start)
        )
    return type(state) is type(start)


def _mismatch(a: State, b: State, path: str = "state", *, own: bool = False) -> str | None:
    """Why two states cannot belong to the same mixer, or None if they can.

    None and () stand for anything not created yet. With `own` they are parts of what a module keeps
    for itself, where plain tuples and lists may grow.
    """
    if isinstance(a, JoinedState) or isinstance(b, JoinedState):
        groups = [s.groups if isinstance(s, JoinedState) else (s,) for s in (a, b)]
        reasons = (_mismatch(x, y, path, own=own) for x in groups[0] for y in groups[1])
        return next((reason for reason in reasons if reason is not None), None)
    for state in (a, b):
        if not isinstance(state, (Leaf, *Container)):
            raise _invalid_leaf(state)
    is_empty = [state is None or (type(state) is tuple and not state) for state in (a, b)]
    if any(is_empty):
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_mismatch(a, b, path)
    fields = _per_example_fields.get(type(a))
    if not isinstance(a, Container):
        same = type(a) is type(b) or not isinstance(b, Container)
        return None if same else f"{path} is {_describe(a)} and {_describe(b)}"
    own = own or not (_holds_states(a) and _holds_states(b))
    grows = own and type(a) in (tuple, list)
    if type(a) is not type(b) or (len(a) != len(b) and not grows):
        return f"{path} is {_describe(a)} and {_describe(b)}, so they are of different modules"
    if hasattr(a, "join_mismatch"):
        reason: str | None = a.join_mismatch(b)
        return None if reason is None else f"{path}: {reason}"
    if isinstance(a, dict):
        names, parts = list(a), [(a[key], b.get(key)) for key in a]
    else:
        names = list(getattr(a, "_fields", range(len(a))))
        parts = list(zip(a, b, strict=False))
    for name, (x, y) in zip(names, parts, strict=False):
        if fields is not None and name in fields.positions:
            continue
        where = f"{path}.{name}" if _is_named(a) else f"{path}[{name!r}]"
        reason = _mismatch(x, y, where, own=own and (fields is None or name not in fields.states))
        both_tensors = isinstance(x, Tensor) and isinstance(y, Tensor)
        if fields is not None and both_tensors and x.shape[1:] != y.shape[1:]:  # of fixed size
            reason = f"{where} has shapes {tuple(x.shape)} and {tuple(y.shape)}"
        if reason is not None:
            return reason
    return None


def _tensor_mismatch(a: Tensor, b: Tensor, path: str) -> str | None:
    if a.dtype != b.dtype:
        return f"{path} is {a.dtype} and {b.dtype}"
    if a.device != b.device:
        return f"{path} is on {a.device} and on {b.device}"
    differ = sum(x != y for x, y in zip(a.shape[1:], b.shape[1:], strict=False))
    if a.dim() != b.dim() or differ > 1:  # one dimension may be the number of tokens
        return f"{path} has shapes {tuple(a.shape)} and {tuple(b.shape)}"
    return None


def _describe(state: State) -> str:
    """The structure of a state, for error messages."""
    if isinstance(state, Tensor):
        return f"a tensor {tuple(state.shape)}"
    if isinstance(state, JoinedState):
        return f"JoinedState({', '.join(map(_describe, state.groups))})"
    if isinstance(state, tuple | list):
        name = "" if type(state) is tuple else type(state).__name__
        return f"{name}({', '.join(map(_describe, state))})"
    return "None" if state is None else type(state).__name__
