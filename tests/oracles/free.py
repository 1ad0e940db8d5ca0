"""Without attention."""

import math

import torch

CASES = {"fnet": [{}], "mlp_mixer": [{"hidden": 6}, {}]}


def fnet(p, x, *, heads, causal=False, mask=None, marks=None):
    """Lee-Thorp et al. 2021, equation 3: the real part of Σ_s Σ_c x[s, c] exp(-2πi (s t / n + c u / d))."""
    n, d = x.shape[1:]
    s, c = torch.arange(n, dtype=x.dtype)[:, None], torch.arange(d, dtype=x.dtype)
    out = torch.zeros_like(x)
    for t in range(n):
        for u in range(d):
            out[:, t, u] = (x * torch.cos(2 * math.pi * (s * t / n + c * u / d))).sum((1, 2))
    return out


def mlp_mixer(p, x, *, heads, causal=False, mask=None, marks=None, length, hidden=None):
    """Tolstikhin et al. 2021, equation 1: W₂ gelu(W₁ x + b₁) + b₂ over the tokens of one channel after the other."""
    b, n, d = x.shape
    up, up_bias, down, down_bias = (p[name] for name in ("up.weight", "up.bias", "down.weight", "down.bias"))
    out = torch.zeros_like(x)
    for a in range(b):
        for c in range(d):
            inner = torch.stack([up[r, :n] @ x[a, :, c] + up_bias[r] for r in range(len(up))])
            inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
            out[a, :, c] = (down @ inner + down_bias)[:n]
    return out
