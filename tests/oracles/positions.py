"""Positions: each scheme number by number, pair by pair."""

import cmath
import math

import torch

from oracles.loop import linear_layer, project


def sinusoid(p, d, base=10000.0):
    """The d numbers of place p."""
    return [(math.cos if c % 2 else math.sin)(p / base ** ((c - c % 2) / d)) for c in range(d)]


def embedded(x, at, vector):
    """x (b n d) with vector(place), d numbers or a tensor of them, added to each token."""
    rows = [torch.as_tensor(vector(at + i), dtype=x.dtype) for i in range(x.shape[1])]
    return torch.stack(
        [torch.stack([x[a, i] + rows[i] for i in range(x.shape[1])]) for a in range(x.shape[0])]
    )


def fourier(places, sizes, resolutions, bands):
    """Numbers beside a token that stands at these places, one an axis."""
    t = [2 * place / (size - 1) - 1 for place, size in zip(places, sizes, strict=True)]
    waves = []
    for at, most in zip(t, resolutions, strict=True):
        steps = [1 + k * (most / 2 - 1) / max(bands - 1, 1) for k in range(bands)]
        waves += [math.pi * f * at for f in steps]
    return [*t, *map(math.sin, waves), *map(math.cos, waves)]


def complex_word(r, omega, theta, place):
    """Real parts, then imaginary parts, of r exp(i (ω p + θ)), number by number."""
    each = [
        a * cmath.exp(1j * (w * place + s))
        for a, w, s in zip(r.tolist(), omega.tolist(), theta.tolist(), strict=True)
    ]
    return [z.real for z in each] + [z.imag for z in each]


def turned(vector, angles, layout):
    """A vector (e) whose pairs are turned, one angle each."""
    out, r = list(vector), len(angles)
    for i, angle in enumerate(angles):
        one, two = (2 * i, 2 * i + 1) if layout == "pairs" else (i, i + r)
        out[one] = vector[one] * math.cos(angle) - vector[two] * math.sin(angle)
        out[two] = vector[two] * math.cos(angle) + vector[one] * math.sin(angle)
    return torch.stack(out)


def rope_angles(place, width, base=10000.0, linear=1.0, ntk=1.0):
    """One for each of width / 2 pairs."""
    base = base * ntk ** (width / (width - 2)) if width > 2 else base
    return [place / linear / base ** (2 * r / width) for r in range(width // 2)]


def attended(p, x, heads, score, *, causal, mask=None):
    """softmax_j score(q, k, h, i, j) over the values, with q and k the vectors of head h at i and
    j.
    """
    q, k, v = project(p, x, None, heads)
    share = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(share, 2) for t in (k, v))
    b, n, h, _ = q.shape
    rows = []
    for a in range(b):
        for i in range(n):
            for head in range(h):
                seen = [
                    j for j in range(n) if (mask is None or mask[a, j]) and (j <= i or not causal)
                ]
                scores = [score(q[a, i, head], k[a, j, head], head, i, j) for j in seen]
                rows.append(
                    torch.softmax(torch.stack(scores), 0) @ v[a, seen, head]
                    if seen
                    else v.new_zeros(v.shape[-1])
                )
    return linear_layer(p, "out", torch.stack(rows).reshape(b, n, -1))


def bucket(gap, buckets, max_distance, causal):
    """T5's, of j - i."""
    first = 0
    if causal:
        gap = max(0, -gap)
    else:
        buckets //= 2
        first, gap = buckets if gap > 0 else 0, abs(gap)
    exact = buckets // 2
    if gap < exact:
        return first + gap
    return first + min(
        buckets - 1,
        exact
        + math.floor(math.log(gap / exact) / math.log(max_distance / exact) * (buckets - exact)),
    )


def plain(q, k):
    """q · k / √e."""
    return q @ k / math.sqrt(len(q))


def t5(p, *, buckets, max_distance, causal):
    """Raffel et al. 2020, section 2.1."""
    return lambda q, k, h, i, j: (
        plain(q, k) + p["inner.prior.table"][h, bucket(j - i, buckets, max_distance, causal)]
    )


def distance(p, *, max_distance):
    """A number for each distance."""
    return lambda q, k, h, i, j: (
        plain(q, k)
        + p["inner.prior.table"][h, max(-max_distance, min(max_distance, j - i)) + max_distance]
    )


def alibi(p, *, heads):
    """Press et al. 2022, with `get_slopes` of the authors' code."""

    def slopes(n):
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return slopes(closest) + slopes(2 * closest)[0::2][: n - closest]

    return lambda q, k, h, i, j: plain(q, k) - abs(i - j) * slopes(heads)[h]


def shaw(p, *, clip):
    """Shaw et al. 2018, equation 4."""
    return lambda q, k, h, i, j: plain(
        q, k + p["inner.prior.vectors"][max(-clip, min(clip, j - i)) + clip]
    )


def xl(p, *, dim):
    """Dai et al. 2019, section 3.3."""

    def score(q, k, h, i, j):
        place = p["inner.prior.w"][h] @ torch.tensor(sinusoid(i - j, dim), dtype=q.dtype)
        return ((q + p["inner.prior.u"][h]) @ k + (q + p["inner.prior.v"][h]) @ place) / math.sqrt(
            len(q)
        )

    return score


def tupe(p, *, heads, first=True, buckets=None, max_distance=128, causal=False):
    """Ke et al. 2021, equations 8 to 10; θ of the first query left at 0."""

    def score(q, k, h, i, j):
        e = p["inner.prior.q.weight"].shape[0] // heads
        rows = slice(h * e, (h + 1) * e)
        ask = p["inner.prior.q.weight"][rows] @ p["inner.prior.positions"][i]
        answer = p["inner.prior.k.weight"][rows] @ p["inner.prior.positions"][j]
        place = ask @ answer / math.sqrt(2 * e)
        if buckets is not None:
            place = (
                place + p["inner.prior.t5.table"][h, bucket(j - i, buckets, max_distance, causal)]
            )
        if first and i == 0:
            place = 0
        elif first and j == 0:
            place = p["inner.prior.to_first"][h]
        return q @ k / math.sqrt(2 * len(q)) + place

    return score
