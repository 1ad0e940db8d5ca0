"""Linear attention, term by term."""

import torch

from oracles.loop import linear_layer, project

MOST = 10  # queries

CASES = {"linear": [{}, {"chunk": 7}]}


def linear(p, x, *, heads, causal, memory=None, mask=None, marks=None, chunk=64):
    """Katharopoulos et al. 2020, equations 4 and 9: Σ φ(q_i)·φ(k_j) v_j / Σ φ(q_i)·φ(k_j), with φ = elu + 1."""
    q, k, v = project(p, x, memory, heads)
    q, k = (torch.where(t > 0, t + 1, t.clamp(max=0).exp()) for t in (q, k))
    b, n, h, e = q.shape
    out = []
    for a in range(b):
        real = [j for j in range(k.shape[1]) if mask is None or bool(mask[a, j])]
        for i in range(n):
            seen = [j for j in real if j <= i or not causal]
            for head in range(h):
                top, bottom = q.new_zeros(e), q.new_zeros(())
                for j in seen if n <= MOST else []:
                    weight = q[a, i, head] @ k[a, j, head]
                    top, bottom = top + weight * v[a, j, head], bottom + weight
                if n > MOST:  # the same sums, by products of matrices, to save time
                    weights = k[a, seen, head] @ q[a, i, head]
                    top, bottom = weights @ v[a, seen, head], weights.sum()
                out.append(top / bottom if seen else top)
    return linear_layer(p, "out", torch.stack(out).reshape(b, n, h * e))
