"""The loop that softmax recipes share: example by example, head by head, query by query, over the
keys that it sees.
"""

import torch


def linear_layer(p, name, x):
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def softmax_loop(q, k, v, see, *, mask=None, scale=None):
    """q (b n h e), k and v (b m g e), see(example, head, i, j) -> bool: (b n h*e); g heads of keys
    serve h of queries.
    """
    b, n, h, e = q.shape
    m, share = k.shape[1], h // k.shape[2]
    real, out = [[True] * m] * b if mask is None else mask.tolist(), []
    for a in range(b):
        for i in range(n):
            for head in range(h):
                seen = [j for j in range(m) if real[a][j] and see(a, head, i, j)]
                if not seen:
                    out.append(q.new_zeros(e))
                    continue
                scores = (
                    k[a, seen, head // share]
                    @ q[a, i, head]
                    * (e**-0.5 if scale is None else scale)
                )
                weights = (scores - scores.max()).exp()
                out.append(weights @ v[a, seen, head // share] / weights.sum())
    return torch.stack(out).reshape(b, n, h * e)


def project(p, x, context, heads, prefix=""):
    """Queries, keys and values, each (b n h e)."""
    source = x if context is None else context
    e = x.shape[2] // heads
    parts = ((prefix + "q", x), (prefix + "k", source), (prefix + "v", source))
    return [linear_layer(p, name, t).unflatten(-1, (-1, e)) for name, t in parts]


def by_rule(p, x, heads, see, *, context=None, mask=None):
    """Multi-head softmax attention in which head h of query i sees key j where see(h, i, j)."""
    q, k, v = project(p, x, context, heads)
    return linear_layer(p, "out", softmax_loop(q, k, v, lambda a, h, i, j: see(h, i, j), mask=mask))
