"""Product keys: the same slots as a look at every key, and never a tensor of that size."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from peers import agree, copied
from regard.ffn import ProductKeyMemory


def made(dim=6, keys=7, **more):
    torch.manual_seed(0)
    layer = ProductKeyMemory(dim, keys, **{"heads": 3, "top_k": 4, "query_dim": 8, **more}).double()
    with torch.no_grad():
        for p in (layer.norm.running_mean, layer.norm.running_var) if layer.norm else ():
            p.uniform_(0.5, 1.5)
    return layer


def scan(layer, x):
    """Every head of every token looks at all pairs of half-keys: output, and the best slots."""
    heads, _, keys, half = layer.keys.shape
    out, slots = [], []
    for token in x.flatten(0, 1):
        q = layer.query.weight @ token + layer.query.bias
        if layer.norm is not None:
            scale = layer.norm.weight / (layer.norm.running_var + 1e-5).sqrt()
            q = (q - layer.norm.running_mean) * scale + layer.norm.bias
        y = 0
        for h in range(heads):
            mine = q[h * 2 * half : (h + 1) * 2 * half]
            left, right = layer.keys[h]
            full = torch.stack(
                [torch.cat((left[i], right[j])) for i in range(keys) for j in range(keys)]
            )
            scores = full @ mine
            best = sorted(range(keys**2), key=lambda s: -scores[s].item())[: layer.top_k]
            y = y + scores[best].softmax(0) @ layer.values[best]
            slots.append(best)
        out.append(y)
    return torch.stack(out).view_as(x), torch.tensor(slots).view(*x.shape[:2], heads, layer.top_k)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("top", [1, 4, 7])
@pytest.mark.parametrize("n", [1, 9])
def test_against_a_full_scan(n, top, normalise, rand):
    """Fails if the two stages find other slots than a look at all of them, or output or
    gradients are others."""
    layer, x = made(top_k=top, query_batch_norm=normalise).eval(), rand(2, n, 6).requires_grad_()
    want, slots = scan(layer, x)
    assert torch.equal(layer.select_slots(x)[0], slots)
    weight, leaves = rand(2, n, 6), [x, *layer.parameters()]
    got = layer(x)
    torch.testing.assert_close(got, want)
    mine, other = (torch.autograd.grad((y * weight).sum(), leaves) for y in (got, want))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)


class Largest(TorchDispatchMode):
    """Remembers the most numbers that any new tensor has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.most = max(
                    self.most, t._nnz() * t.shape[-1] if t.layout == torch.sparse_coo else t.numel()
                )
        return out


def test_no_tensor_has_a_number_for_each_token_and_slot():
    """Fails if the scores of all keys, or a gradient of all values, are ever made: 64 tokens,
    4,096 slots."""
    torch.manual_seed(0)
    layer, x = ProductKeyMemory(16, 64, heads=2, top_k=8, sparse_grad=True), torch.randn(1, 64, 16)
    assert layer.values.shape[0] == 4096
    with Largest() as seen:
        layer(x).sum().backward()
    assert seen.most < 64 * 4096 / 8
    assert layer.values.grad.layout == torch.sparse_coo and layer.values.grad._nnz() <= 64 * 2 * 8


def test_sparse_gradients_are_the_dense_ones(rand):
    """Fails if asking for sparse gradients changes them."""
    grads = []
    for sparse in (False, True):
        layer = made(sparse_grad=sparse).eval()
        layer(rand(2, 5, 6) * 0 + 1).square().sum().backward()
        grads.append(layer.values.grad.to_dense())
    torch.testing.assert_close(*grads)


# ----------------------------------------------------------------------- batch norm of the queries
def test_padding_while_training(rand):
    """Fails if padding, even NaN, changes the statistics, or a batch of nothing else breaks
    them."""
    x, mask = rand(2, 8, 6), torch.arange(8).expand(2, 8) < 5
    padded, cut = made().train(), made().train()
    got = padded(x.masked_fill(~mask[..., None], torch.nan), mask)
    torch.testing.assert_close(got[:, :5], cut(x[:, :5]))
    torch.testing.assert_close(padded.norm.running_mean, cut.norm.running_mean)
    got[:, :5].sum().backward()
    assert all(p.grad.isfinite().all() for p in padded.parameters())
    before = padded.norm.running_mean.clone()
    assert padded(x, torch.zeros_like(mask)).isfinite().all() and torch.equal(
        padded.norm.running_mean, before
    )


def test_in_evaluation_tokens_are_alone(rand):
    """Fails if chunks, or single examples, give another result than the whole."""
    layer, x = made().eval(), rand(2, 9, 6)
    torch.testing.assert_close(
        torch.cat([layer(part) for part in x.split((1, 5, 3), 1)], 1), layer(x)
    )
    torch.testing.assert_close(layer(x[1:]), layer(x)[1:])


def test_low_precision(rand):
    """Fails if bfloat16 chooses by bfloat16 scores, or is far from float64."""
    layer, x = made().eval(), rand(2, 9, 6)
    want, got = layer(x), layer.bfloat16()(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().mean() < 0.1 * want.abs().mean()


def test_what_does_not_fit_is_said():
    """Fails if sizes that make no sense are taken."""
    with pytest.raises(ValueError, match="query_dim must be even, not 7"):
        ProductKeyMemory(6, query_dim=7)
    with pytest.raises(ValueError, match=r"top_k must be at most keys \(8\), not 9"):
        ProductKeyMemory(6, 8, top_k=9)
    assert ProductKeyMemory(5, 4, top_k=2).keys.shape[-1] == 3


def test_pkm_of_product_key_memory(rand):
    """Fails if the peer, whose norm is another and therefore taken out, reads other slots."""
    module = pytest.importorskip("product_key_memory")
    torch.manual_seed(0)
    theirs = module.PKM(dim=6, heads=3, num_keys=7, topk=4, dim_head=4).double()
    theirs.norm = nn.Identity()
    ours = made(query_batch_norm=False)
    with torch.no_grad():
        ours.query.bias.zero_()
        ours.query.weight.copy_(
            theirs.to_queries.weight.view(2, 3, 4, 6).transpose(0, 1).reshape(24, 6)
        )
        ours.keys.copy_(theirs.keys.transpose(1, 2))
    pairs = copied([(ours.values, theirs.values.weight)])
    agree(ours, theirs, rand(2, 9, 6), pairs)
