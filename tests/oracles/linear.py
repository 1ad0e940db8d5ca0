"""Linear attention, term by term."""

import torch
from oracles.loop import linear_layer, project


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
                weights = [(q[a, i, head] * k[a, j, head]).sum() for j in seen] if n < 30 else k[a, seen, head] @ q[a, i, head]
                top = sum((w * v[a, j, head] for w, j in zip(weights, seen, strict=True)), q.new_zeros(e))
                out.append(top / sum(weights) if seen else top)
    return linear_layer(p, "out", torch.stack(out).reshape(b, n, h * e))
