"""A backend for counting FLOPs: it gathers the visible keys of each query and multiplies with no
others."""

import inspect

import torch

from regard.backends import Backend, softmax_backends
from regard.backends.call import as_function
from regard.registry import Recipe


def run(call):
    """softmax(q_i kᵀ) v query by query; heads with the same mask are computed together."""
    group = call.group_size()
    call = call._replace(k=call.k.repeat_interleave(group, 1), v=call.v.repeat_interleave(group, 1))
    keep = call.dense_mask()[0].expand(call.q.shape[1], call.q.shape[2], call.k.shape[2])
    alike = bool((keep == keep[:1]).all())
    heads = [slice(None)] if alike else [slice(h, h + 1) for h in range(len(keep))]
    addend = _addend(call)
    return torch.cat([_of_heads(call, own, keep[own][0], addend[:, own]) for own in heads], 1)


def _addend(call):
    """The prior of all pairs, (b h n m), computed once."""
    shape = (*call.q.shape[:3], call.k.shape[2])
    if call.prior is None:
        return call.q.new_zeros(()).expand(shape)
    found = call.prior(*call.position_grid(), call.q, call.k)
    return (found if found.dim() == 4 else found[None]).expand(shape)


def _of_heads(call, own, keep, addend):
    rows = []
    for i, seen in enumerate(keep):
        at = seen.nonzero()[:, 0]
        q, k, v = call.q[:, own, i : i + 1], call.k[:, own][:, :, at], call.v[:, own][:, :, at]
        if not len(at):
            rows.append(v.new_zeros(*q.shape[:3], v.shape[3]))
            continue
        scores = q @ k.transpose(-1, -2) * call.scale + addend[:, :, i : i + 1, at]
        rows.append(scores.softmax(-1).nan_to_num() @ v)
    return torch.cat(rows, 2)


class PairwiseBackend(Backend):
    """The backend `pairs`."""

    name = "pairs"
    traceable = True

    def refuses(self, call):
        return None

    def cost(self, call):
        return None

    def prepare(self, call):
        return as_function(call, run)


def install(monkeypatch):
    """Make `auto` use this backend."""
    monkeypatch.setattr(softmax_backends, "_override", PairwiseBackend())
    monkeypatch.setattr(softmax_backends, "version", softmax_backends.version + 1)


def arguments(recipe: Recipe, n: int, dim: int, causal: bool) -> dict:
    """Those of the recipe's small example, for n tokens."""
    heads = recipe.parameters["heads"].default
    found = {
        **recipe.example_kwargs,
        "dim": dim,
        "heads": 2 if heads is inspect.Parameter.empty else heads,
        "causal": causal,
    }
    return found | ({"length": n} if "length" in recipe.parameters else {})
