"""Sparse by position, on images: the rule of each paper, pair by pair."""

import torch

from oracles.loop import by_rule, linear_layer, project, softmax_loop

CASES = {
    "image_local_1d": [
        {"block": 4, "memory": 3},
        {"block": 7, "memory": 0},
        {"block": 3, "memory": 20},
    ],
    "image_local_2d": [
        {"width": 6, "block": (2, 3), "memory": (2, 1)},
        {"width": 20, "block": (3, 4), "memory": (1, 2)},
        {"width": 6, "block": (2, 4), "memory": (1, 2), "order": "block"},
        {"width": 20, "block": (3, 4), "order": "block"},
    ],
    "axial": [
        {"width": 5},
        {"width": 10},
        *({"width": 7, "form": form} for form in ("row", "column")),
    ],
    "axial_passes": [{"width": 7}],
    "neighbourhood": [
        {"size": 5},
        {"size": 12},
        {"size": (3, 4), "width": 6},
        {"size": 7, "width": 5},
        {"size": 5, "position_bias": True},
        {"size": (3, 4), "width": 6, "position_bias": True},
    ],
    "swin": [
        {"width": 6, "window": 3, "layer": 1},
        {"width": 20, "window": (3, 4), "layer": 0},
        {"width": 7, "window": (4, 5), "layer": 3, "position_bias": False},
    ],
}


def image_local_1d(
    p, x, *, heads, causal, mask=None, global_attention_mask=None, block=256, memory=256
):
    """Parmar et al. 2018, section 3.3.1: the query block and what stands before it, or around it
    where not causal.
    """

    def see(h, i, j):
        first = i - i % block
        return first - memory <= j < first + block + (0 if causal else memory) and (
            j <= i or not causal
        )

    return by_rule(p, x, heads, see, mask=mask)


def image_local_2d(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    width,
    block=(8, 8),
    memory=(8, 8),
    order="raster",
):
    """Parmar et al. 2018, section 3.3: the memory block is the query block and a margin; below it
    only where not causal.
    """
    cells = [divmod(i, width) for i in range(len(x[0]) + block[0] * width)]
    if order == "block":
        cells.sort(key=lambda cell: (cell[0] // block[0], cell[1] // block[1], cell))

    def see(h, i, j):
        (row, col), (k_row, k_col) = cells[i], cells[j]
        top, left = row - row % block[0], col - col % block[1]
        rows = range(top - memory[0], top + block[0] + (0 if causal else memory[0]))
        cols = range(left - memory[1], left + block[1] + memory[1])
        return k_row in rows and k_col in cols and (j <= i or not causal)

    return by_rule(p, x, heads, see, mask=mask)


def axial(p, x, *, heads, causal, mask=None, global_attention_mask=None, width, form="union"):
    """Ho et al. 2019: the row, the column, or both in one softmax."""

    def see(h, i, j):
        row, column = i // width == j // width, i % width == j % width
        return {"union": row or column, "row": row, "column": column}[form] and (
            j <= i or not causal
        )

    return by_rule(p, x, heads, see, mask=mask)


def axial_passes(p, x, *, heads, causal, mask=None, global_attention_mask=None, width):
    """Ho et al. 2019: rows, then columns.

    Causal, as in the paper's decoder: finished rows are read whole, summed up along the columns,
    and shifted down by a row; then comes masked attention in the own row.
    """

    def one(name, tokens, see):
        q, k, v = project(p, tokens, None, heads, f"{name}.")
        real = None if mask is None else mask[:, : tokens.shape[1]]
        return linear_layer(
            p, f"{name}.out", softmax_loop(q, k, v, lambda a, h, i, j: see(i, j), mask=real)
        )

    if not causal:
        y = one("rows", x, lambda i, j: i // width == j // width)
        return one("columns", y, lambda i, j: i % width == j % width)
    done, shifted = x.shape[1] // width * width, torch.zeros_like(x)
    if done:
        y = one("rows", x[:, :done], lambda i, j: i // width == j // width)
        u = one("columns", y, lambda i, j: i % width == j % width and j <= i)
        u = u if mask is None else u * mask[:, :done, None]
        shifted = torch.cat((torch.zeros_like(x[:, :width]), u), 1)[:, : x.shape[1]]
    return one("inner", x + shifted, lambda i, j: i // width == j // width and j <= i)


def by_biased_rule(p, x, heads, see, bias, mask):
    """Softmax over the j with see(h, i, j), of scores plus bias(h, i, j)."""
    q, k, v = project(p, x, None, heads)
    b, n, _, e = q.shape
    out = torch.zeros_like(q)
    for a, i, h in [(a, i, h) for a in range(b) for i in range(n) for h in range(heads)]:
        seen = [j for j in range(n) if see(h, i, j) and (mask is None or bool(mask[a, j]))]
        if seen:
            biases = torch.stack([bias(h, i, j) for j in seen])
            scores = k[a, seen, h] @ q[a, i, h] / e**0.5 + biases
            out[a, i, h] = torch.softmax(scores, 0) @ v[a, seen, h]
    return linear_layer(p, "out", out.flatten(2))


def neighbourhood(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    length,
    size=7,
    width=None,
    position_bias=False,
):
    """Hassani et al. 2023: along each axis the `size` cells around, moved inward at the border;
    causal, those up to it. The bias B is that of the true offset, also where the window moved.
    """
    rows, cols = (1, length) if width is None else (-(-length // width), width)
    tall, wide = (1, size) if width is None else (size, size) if isinstance(size, int) else size

    def axis(i, j, k, extent):
        window = range(i - k + 1, i + 1) if causal else range(i - k // 2, i - k // 2 + k)
        while not causal and (window.start < 0 or window.stop > max(extent, k)):
            step = 1 if window.start < 0 else -1
            window = range(window.start + step, window.stop + step)
        return j in window

    def see(h, i, j):
        (y, x), (v, u) = divmod(i, cols), divmod(j, cols)
        return axis(y, v, tall, rows) and axis(x, u, wide, cols)

    if not position_bias:
        return by_rule(p, x, heads, see, mask=mask)

    def bias(h, i, j):
        row, col = i // cols - j // cols + tall - 1, i % cols - j % cols + wide - 1
        return p["inner.prior.table"][h, row, col]

    return by_biased_rule(p, x, heads, see, bias, mask)


def swin(
    p,
    x,
    *,
    heads,
    causal,
    mask=None,
    global_attention_mask=None,
    width,
    window=7,
    layer=0,
    position_bias=True,
):
    """Liu et al. 2021: the image is rolled by half a window, cut into windows, and what the roll
    brought together from two sides of the image is kept apart; scores get B[dy, dx].
    """
    rows, cols = (window, window) if isinstance(window, int) else window
    dy, dx = (rows // 2, cols // 2) if layer % 2 else (0, 0)
    q, k, v = project(p, x, None, heads)
    b, n, _, e = q.shape
    tall, wide, out = (
        -(-n // width // rows + 1) * rows + rows,
        -(-width // cols) * cols,
        torch.zeros_like(q),
    )

    def place(i):  # the window after the roll, and whether the roll moved it over the border
        y, x = (i // width - dy) % tall, (i % width - dx) % wide
        return y // rows, x // cols, i // width < dy, i % width < dx

    for a, i, h in [(a, i, h) for a in range(b) for i in range(n) for h in range(heads)]:
        seen = [
            j
            for j in range(n)
            if place(i) == place(j)
            and (j <= i or not causal)
            and (mask is None or bool(mask[a, j]))
        ]
        off = [(i // width - j // width + rows - 1, i % width - j % width + cols - 1) for j in seen]
        if seen:
            scores = k[a, seen, h] @ q[a, i, h] / e**0.5
            more = (
                torch.stack([p["inner.prior.table"][h, y, x] for y, x in off])
                if position_bias
                else 0
            )
            out[a, i, h] = torch.softmax(scores + more, 0) @ v[a, seen, h]
    return linear_layer(p, "out", out.flatten(2))
