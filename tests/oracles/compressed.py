"""Fewer keys and values than tokens."""

import torch

from oracles.loop import linear_layer, project, softmax_loop

CASES = {"linformer": [{"rank": 5, "share": share} for share in ("heads", "none", "kv")]}


def linformer(p, x, *, heads, causal=False, memory=None, mask=None, marks=None, length, rank=256, share="heads"):
    """Wang et al. 2020, equation 7: row r of the memory is Σ_j E[r, j] k_j, and likewise with F for the values."""
    q, k, v = project(p, x, memory, heads)
    e_matrix = p["inner.memory.e"]
    f_matrix = p["inner.memory.f"] if share != "kv" else e_matrix
    b, m = k.shape[:2]
    real, short = [[True] * m] * b if mask is None else mask.tolist(), []
    for t, matrix in ((k, e_matrix), (v, f_matrix)):
        rows = torch.zeros(b, rank, heads, t.shape[-1], dtype=t.dtype)
        for a in range(b):
            for j in range(m):
                if real[a][j]:
                    for h in range(heads):
                        rows[a, :, h] += matrix[h if share == "none" else 0, :, j, None] * t[a, j, h]
        short.append(rows)
    return linear_layer(p, "out", softmax_loop(q, *short, lambda a, h, i, r: True))
