"""What oracles on a grid share: neighbours cell by cell."""

import math

import torch


def gelu(z):
    return z * (1 + torch.erf(z / math.sqrt(2))) / 2


def neighbourhood(i, n, width, reach):
    """(row step, column step, position) of each of n cells in rows of `width` that is at most
    `reach` from cell i each way.
    """
    for j in range(n):
        down, right = j // width - i // width, j % width - i % width
        if abs(down) <= reach and abs(right) <= reach:
            yield down, right, j


def convolve(p, name, x, width, real):
    """A depth-wise 3 x 3 convolution of x (n d) over the real cells of the grid."""
    out = []
    for i in range(len(x)):
        y = p[f"{name}.bias"]
        for down, right, j in neighbourhood(i, len(x), width, 1):
            if j in real:
                y = y + p[f"{name}.weight"][:, 0, down + 1, right + 1] * x[j]
        out.append(y)
    return torch.stack(out)


def patches(p, x, width, real):
    """XCiT's local patch interaction: convolve, gelu, normalise each channel over the real tokens,
    convolve.
    """
    y = gelu(convolve(p, "patches.first", x, width, real))
    if real:
        mean = y[real].mean(0)
        deviation = ((y[real] - mean) ** 2).mean(0)
        y = (y - mean) / (deviation + 1e-5).sqrt()
    return convolve(
        p, "patches.second", y * p["patches.norm.weight"] + p["patches.norm.bias"], width, real
    )
