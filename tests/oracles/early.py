"""Before 2017."""

import torch

from oracles.loop import linear_layer

CASES = {
    "bahdanau": [{}],
    "graves_window": [{"mixtures": 3}, {}],
    "draw_read": [
        {"width": 5, "patch": 3},
        {"width": 7},
        {"width": 1, "patch": 1},
        {"width": 30, "patch": 2},
    ],
    "draw_write": [{"width": 5, "patch": 3}, {"width": 7}, {"width": 1, "patch": 1}],
    "show_attend": [{"hidden": 5}, {}],
}


def look(v, q, k, values, seen):
    """Σ_j softmax_j(v · tanh(q + k_j)) value_j, over the places that are seen."""
    if not seen:
        return torch.zeros_like(values[0])
    weights = torch.stack([v @ torch.tanh(q + k[j]) for j in seen]).exp()
    return weights @ values[seen] / weights.sum()


def places(a, i, m, mask, causal):
    return [j for j in range(m) if (mask is None or mask[a, j]) and (j <= i or not causal)]


def bahdanau(p, x, *, heads, causal, context=None, mask=None, global_attention_mask=None):
    """Bahdanau et al. 2015, equations 5 and 6, and the alignment network of section A.1.2."""
    source = x if context is None else context
    q, k = linear_layer(p, "q", x), linear_layer(p, "k", source)
    out = []
    for a in range(len(x)):
        for i in range(x.shape[1]):
            seen = places(a, i, source.shape[1], mask, causal)
            out.append(look(p["inner.v"][0], q[a, i], k[a], source[a], seen))
    return torch.stack(out).view_as(x)


def graves_window(
    p, x, *, heads, causal, mixtures=10, context=None, mask=None, global_attention_mask=None
):
    """Graves 2013, equations 46 to 51: κ moves forward, step by step; a token that is left out
    moves nothing.
    """
    source = x if context is None else context
    out = []
    for a in range(len(x)):
        kappa = x.new_zeros(mixtures)
        for i in range(x.shape[1]):
            alpha, beta, step = linear_layer(p, "shape.shape", x[a, i]).exp().view(3, mixtures)
            if context is not None or mask is None or mask[a, i]:
                kappa = kappa + step
            window = torch.zeros_like(x[a, i])
            for u in places(a, i, source.shape[1], mask, causal):
                window = (
                    window
                    + (alpha * torch.exp(-beta * (kappa - (u + 1)) ** 2)).sum() * source[a, u]
                )
            out.append(window)
    return torch.stack(out).view_as(x)


def filters(p, state, rows, columns, patch):
    """Gregor et al. 2015, equations 19 to 26: F_Y (patch rows), F_X (patch columns) and γ."""
    x, y, log_variance, log_stride, log_gamma = linear_layer(p, "bank.place", state)
    stride = (max(rows, columns) - 1) / max(patch - 1, 1) * log_stride.exp()
    both = []
    for g, size in (((rows + 1) / 2 * (y + 1), rows), ((columns + 1) / 2 * (x + 1), columns)):
        bank = []
        for i in range(1, patch + 1):
            mu = g + (i - patch / 2 - 0.5) * stride
            bell = torch.stack(
                [torch.exp(-((a - mu) ** 2) / (2 * log_variance.exp())) for a in range(1, size + 1)]
            )
            bank.append(bell / bell.sum())
        both.append(torch.stack(bank))
    return *both, log_gamma.exp()


def height(tokens, width):
    return -(-tokens // width)


def real(x, a, mask):
    return [i for i in range(x.shape[1]) if mask is None or mask[a, i]]


def draw_read(
    p,
    x,
    *,
    heads,
    causal=False,
    width,
    patch=5,
    context=None,
    mask=None,
    global_attention_mask=None,
):
    """Equation 27, and the transposes of equation 29: each pixel through all filters into the
    patch, and back.
    """
    source, out = x if context is None else context, []
    for a in range(len(x)):
        seen, n = real(source, a, mask), x.shape[1]
        own = seen if context is None else list(range(n))
        state = x[a, own].sum(0) / max(len(own), 1)
        rows, columns, gamma = filters(
            p, state, height(max(seen, default=0) + 1, width), width, patch
        )
        glimpse = sum(
            rows[:, j // width][:, None, None] * columns[:, j % width][:, None] * source[a, j]
            for j in seen
        )
        rows, columns, _ = filters(p, state, height(max(own, default=0) + 1, width), width, patch)
        for i in range(n):
            if not seen or i // width >= rows.shape[1]:
                out.append(torch.zeros_like(x[a, i]))
            else:
                weight = rows[:, i // width][:, None, None] * columns[:, i % width][:, None]
                out.append(gamma * (weight * glimpse).sum((0, 1)))
    return torch.stack(out).view_as(x)


def draw_write(
    p,
    x,
    *,
    heads,
    causal=False,
    width,
    patch=5,
    context=None,
    mask=None,
    global_attention_mask=None,
):
    """Equations 28 and 29, with the mean of the tokens for the state of the decoder."""
    source, out = x if context is None else context, []
    for a in range(len(x)):
        seen, n = real(source, a, mask), x.shape[1]
        state = source[a, seen].sum(0) / max(len(seen), 1)
        last = max(seen, default=0) + 1 if context is None else n
        rows, columns, gamma = filters(p, state, height(last, width), width, patch)
        drawn = linear_layer(p, "draw", state).view(-1, patch, patch)
        for i in range(n):
            inside = i // width < rows.shape[1]
            out.append(
                rows[:, i // width] @ drawn @ columns[:, i % width] / gamma
                if inside
                else torch.zeros_like(x[a, i])
            )
    return torch.stack(out).view_as(x)


def show_attend(
    p, x, *, heads, causal, hidden=None, context=None, mask=None, global_attention_mask=None
):
    """Xu et al. 2015, equations 4, 5 and 13, with the gate β of section 4.2.1."""
    source = x if context is None else context
    q, k, gate = (
        linear_layer(p, "query", x),
        linear_layer(p, "key", source),
        linear_layer(p, "gate", x),
    )
    out = []
    for a in range(len(x)):
        for i in range(x.shape[1]):
            seen = places(a, i, source.shape[1], mask, causal)
            out.append(
                look(p["score"], q[a, i], k[a], source[a], seen) / (1 + torch.exp(-gate[a, i]))
            )
    return torch.stack(out).view_as(x)
