"""Layers written out in loops, for stacks to be checked against. Nothing here may import the
library.

p holds parameters by name, as plain tensors.
"""

import math

import torch


def under(p, prefix):
    """The parameters below a prefix."""
    return {
        name.removeprefix(prefix + "."): t for name, t in p.items() if name.startswith(prefix + ".")
    }


def linear(p, name, x):
    """W x, and + b where there is one."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def norm(p, x):
    """Layer normalisation of (... d)."""
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["weight"] + p["bias"]
    )


def attention(p, x, seen, heads, *, causal=False, mask=None, before=None):
    """x (n d) asks seen (m d): (n d), and the scores (h n m), to which `before` was added."""
    q, k, v = linear(p, "q", x), linear(p, "k", seen), linear(p, "v", seen)
    e = x.shape[1] // heads
    rows, scores = [], torch.zeros(heads, len(x), len(seen), dtype=x.dtype)
    for i in range(len(x)):
        parts = []
        for h in range(heads):
            at = slice(h * e, (h + 1) * e)
            row = (k[:, at] @ q[i, at]) / math.sqrt(e)
            row = row if before is None else row + before[h, i]
            scores = scores.index_put((torch.tensor(h), torch.tensor(i)), row)
            keep = [
                j for j in range(len(seen)) if (not causal or j <= i) and (mask is None or mask[j])
            ]
            weights = (row[keep] - row[keep].max()).exp()
            parts.append(weights @ v[keep][:, at] / weights.sum())
        rows.append(torch.cat(parts))
    return linear(p, "out", torch.stack(rows)), scores


def mlp(p, x):
    """Two layers with GELU between."""
    up = linear(p, "up", x)
    return linear(p, "down", up * (1 + torch.erf(up / math.sqrt(2))) / 2)


def block(p, x, heads, *, causal=False, mask=None, context=None, context_mask=None):
    """A pre-norm block over one example (n d)."""
    y = norm(under(p, "mixer_residual.norm"), x)
    x = x + attention(under(p, "mixer"), y, y, heads, causal=causal, mask=mask)[0]
    if context is not None:
        y = norm(under(p, "cross_residual.norm"), x)
        x = x + attention(under(p, "cross"), y, context, heads, mask=context_mask)[0]
    return x + mlp(under(p, "ffn"), norm(under(p, "ffn_residual.norm"), x))
