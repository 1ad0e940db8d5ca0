"""What the parity tests share: ours and a peer, with the same weights, on the same input."""

import torch


def results(f, x, parameters, rows):
    """The outputs that count, and the gradients of x and of the parameters; `rows` (b n) tells
    which outputs count."""
    x = x.clone().requires_grad_()
    y = f(x)
    weight = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
    weight = weight if rows is None else weight * rows[..., None]
    return [y * (weight != 0), *torch.autograd.grad((y * weight).sum(), [x, *parameters])]


def agree(ours, theirs, x, pairs, *, rows=None, atol=1e-9, nan_gradients=False):
    """Outputs, and gradients of x and of the paired parameters, agree; returns the largest
    difference.

    nan_gradients   the peer's gradients are NaN in places, which are left out; ours must be finite
                    all the same
    """
    mine, others = (
        results(f, x, [pair[i] for pair in pairs], rows) for i, f in enumerate((ours, theirs))
    )
    assert all(t.isfinite().all() for t in mine) and others[0].isfinite().all()
    if nan_gradients:
        others = [
            torch.where(want.isnan(), got, want) for got, want in zip(mine, others, strict=True)
        ]
    for got, want in zip(mine, others, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=atol)
    return max((a - b).abs().max().item() for a, b in zip(mine, others, strict=True))


def copied(pairs):
    """The weights of the peer, put into ours: the same pairs."""
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other)
    return pairs
