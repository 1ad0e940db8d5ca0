"""Naive loops for stacks: a block of softmax attention with a linear bias by distance, one example,
one token at a time.
"""

import math

import torch
import torch.nn.functional as F


def normed(t, residual):
    return F.layer_norm(t, t.shape, residual.norm.weight, residual.norm.bias)


def heads(linear, t, count):
    return (linear.weight @ t).reshape(count, -1)


def read(mixer, query, seen, gaps, slopes):
    """What one token reads in others, before the last projection: softmax(q k / √e − slope gap) v,
    head by head.
    """
    h = mixer.heads
    q, k, v = (
        heads(mixer.q, query, h),
        [heads(mixer.k, t, h) for t in seen],
        [heads(mixer.v, t, h) for t in seen],
    )
    out = []
    for i in range(h):
        if not seen:
            out.append(q[i] * 0)
            continue
        scores = [
            q[i] @ key[i] / math.sqrt(len(q[i])) - slopes[i] * gap
            for key, gap in zip(k, gaps, strict=True)
        ]
        weights = torch.stack(scores).softmax(0)
        out.append(sum(w * value[i] for w, value in zip(weights, v, strict=True)))
    return torch.cat(out)


def token(layer, x, seen, gaps, slopes, pre, reader=None):
    """One token x (d) after a block that looks at hidden states, so many positions back; `reader`
    has the norm for those.
    """
    first, second, feed = layer.mixer_residual, layer.ffn_residual, layer.ffn
    other = first if reader is None else reader.mixer_residual
    query, seen = (normed(x, first), [normed(t, other) for t in seen]) if pre else (x, seen)
    x = x + layer.mixer.out.weight @ read(layer.mixer, query, seen, gaps, slopes)
    x = x if pre else normed(x, first)
    inside = feed.up.weight @ (normed(x, second) if pre else x) + feed.up.bias
    x = x + feed.down.weight @ F.gelu(inside) + feed.down.bias
    return x if pre else normed(x, second)


def block(layer, past, now, keep, slopes, pre):
    """One block on the tokens `now` of one example; `past` are tokens before them, `write_record`
    tells which of all are real.
    """
    every, out = [*past, *now], []
    for i in range(len(past), len(every)):
        allowed = [j for j in range(i + 1) if keep[j]]
        out.append(
            token(
                layer, every[i], [every[j] for j in allowed], [i - j for j in allowed], slopes, pre
            )
        )
    return out
