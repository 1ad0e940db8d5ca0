"""The parts and how they compose: promises, heads, memories, prototypes, routes."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import Band, Can, Compressed, MultiHead, Prototype, Routed, SoftmaxAttention
from regard.attend.groups import Indexed
from regard.memory import Memory, Projected
from regard.query import Query
from regard.route import Route
from regard.testing import check_mixer


# ---------------------------------------------------------------------------------------------- Can
def test_both_must_promise():
    """Fails if a refusal is lost when parts are combined, or its reason is."""
    both = Can(causal="a") & Can(cross="b", takes_marks=True)
    assert not both.causal and not both.cross and not both.marks and both.mask and both.stream
    assert both.reason("causal") == "a" and both.reason("cross") == "b" and both.reason("mask") is None
    assert Can(takes_marks=True).marks and not Can().marks
    assert Can(causal="a") == Can(causal="b") != Can()


def test_unknown_promises_are_refused():
    """Fails if a misspelt promise is kept in silence."""
    with pytest.raises(ValueError, match="casual"):
        Can(casual="a")


# ---------------------------------------------------------------------------------------------- heads
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_shared_heads_equal_repeated_ones(kv_heads, causal, rand):
    """Fails if a query head looks at the wrong key head; streaming keeps the few heads only."""
    mixer = MultiHead(8, 4, SoftmaxAttention(), kv_heads=kv_heads, causal=causal).double()
    x = rand(2, 9, 8)
    q, k, v = mixer.project(x, None)
    assert k.shape == v.shape == (2, kv_heads, 9, 2)
    k, v = (t.repeat_interleave(4 // kv_heads, 1) for t in (k, v))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(mixer(x), mixer.out(want.transpose(1, 2).flatten(2)))
    if causal:
        y, state = mixer.stream(x)
        assert state.k.shape == (2, kv_heads, 9, 2)
        torch.testing.assert_close(y, mixer(x))


def test_attention_is_a_dense_layer_whose_weights_depend_on_the_input(rand):
    """Fails if the map of an input, taken as fixed weights, does not give that input's output."""
    mixer = regard.create("vanilla", dim=8, heads=2).double()
    x = rand(1, 7, 8)
    weights = mixer.attention(x)[0]
    dense = torch.einsum("hnm,hme->nhe", weights, mixer.project(x, None)[2][0]).flatten(1)
    torch.testing.assert_close(mixer.out(dense), mixer(x)[0])
    assert not torch.allclose(weights, mixer.attention(x + 1)[0])


def test_the_map_of_longformer_is_what_runs(rand):
    """Fails if the map of marked tokens is not that of their own projections."""
    mixer = regard.create("longformer", dim=8, heads=2, window=2).double()
    x = rand(2, 11, 8)
    marks = torch.zeros(2, 11, dtype=torch.bool)
    marks[0, 3] = marks[1, 7] = True
    weights = mixer.attention(x, marks=marks)
    near, far = (weights @ part.project(x, None)[2] for part in (mixer.local, mixer.everywhere))
    heads = torch.where(marks[:, None, :, None], far, near).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixer.local.out(heads), mixer(x, marks=marks))
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


# ---------------------------------------------------------------------------------------------- memories
@pytest.mark.parametrize(("share", "count"), [("none", 2 * 3 * 5 * 12), ("heads", 2 * 5 * 12), ("kv", 5 * 12)])
def test_linformer_shares_its_projections(share, count):
    """Fails if sharing does not save parameters, or saves the wrong ones."""
    memory = Projected(12, 5, 3, share=share)
    assert sum(p.numel() for p in memory.parameters()) == count


class Pairs(Memory):
    """Two neighbours become one; the last may be alone."""

    can = Can(causal="a toy", stream="a toy", mask="a toy")

    def forward(self, k, v, mask):
        k, v = (F.avg_pool2d(x, (2, 1), ceil_mode=True) for x in (k, v))
        return k, v, None


def test_any_memory_composes(rand):
    """Fails if the promises of a memory are not those of the mixer, or the memory is not what is attended to."""
    mixer = MultiHead(8, 2, Compressed(Pairs(), SoftmaxAttention())).double()
    assert not mixer.can.mask and not mixer.can.causal and mixer.can.cross
    x = rand(1, 5, 8)
    q, k, v = mixer.project(x, None)
    k, v = (torch.stack([t[:, :, 0:2].mean(2), t[:, :, 2:4].mean(2), t[:, :, 4]], 2) for t in (k, v))
    want = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(mixer(x), mixer.out(want.transpose(1, 2).flatten(2)))
    check_mixer(lambda causal: MultiHead(8, 2, Compressed(Pairs(), SoftmaxAttention()), causal=causal))


# ---------------------------------------------------------------------------------------------- prototypes and routes
class Halves(Query):
    """The first half of the queries asks once, and so does the second."""

    can = Query.can & Can(mask="a toy")

    def forward(self, q, mask):
        n = q.shape[2]
        cut = (n + 1) // 2
        parts = [q[:, :, :cut].mean(2), q[:, :, cut:].mean(2) if n > 1 else q[:, :, 0]]
        return torch.stack(parts, 2), lambda y: y[:, :, (torch.arange(n) >= cut).long()]


def test_prototypes_ask_for_many(rand):
    """Fails if a query gets the answer of another prototype."""
    mixer = MultiHead(8, 2, Prototype(Halves(), SoftmaxAttention())).double()
    x = rand(1, 5, 8)
    q, k, v = mixer.project(x, None)
    few = F.scaled_dot_product_attention(torch.stack([q[:, :, :3].mean(2), q[:, :, 3:].mean(2)], 2), k, v)
    want = few[:, :, [0, 0, 0, 1, 1]]
    torch.testing.assert_close(mixer(x), mixer.out(want.transpose(1, 2).flatten(2)))
    check_mixer(lambda causal: MultiHead(8, 2, Prototype(Halves(), SoftmaxAttention()), causal=causal))


class Sorted(Route):
    """Tokens sorted by their first number, in groups of four; and everyone with token 0, in a group apart."""

    can = Can(causal="sorting looks ahead", cross="a toy", mask="a toy", stream="a toy")

    def forward(self, q, k, mask):
        n = q.shape[2]
        order = F.pad(torch.argsort(q[..., 0], -1), (0, -n % 4), value=-1).unflatten(-1, (-1, 4))
        not_first = (order[..., None, :] != 0).expand(*order.shape[:-1], 4, 4)
        return [Indexed(order, order, not_first), Indexed(torch.arange(n)[None], torch.zeros(1, 1, dtype=torch.long))]


def test_groups_that_overlap_merge_exactly(rand):
    """Fails if a query in two groups is not given the softmax over both."""
    mixer = MultiHead(8, 2, Routed(Sorted())).double()
    x = rand(1, 10, 8).requires_grad_()
    q, k, v = mixer.project(x, None)
    order = torch.argsort(q[..., 0], -1)
    rank = torch.argsort(order, -1) // 4
    keep = (rank[..., :, None] == rank[..., None, :]) | (torch.arange(10) == 0)
    want = mixer.out(F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer(x), want)
    got = torch.autograd.grad(mixer(x).square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(want.square().sum(), x))
    check_mixer(lambda causal: MultiHead(8, 2, Routed(Sorted()), causal=causal))


def test_a_route_can_be_causal(rand):
    """Fails if a group shows a query what comes after it."""

    class Own(Route):
        can = Can(cross="a toy", stream="a toy", mask="a toy")

        def forward(self, q, k, mask):
            return [Indexed(torch.arange(q.shape[2])[None], torch.arange(q.shape[2])[None])]

    mixer = MultiHead(8, 2, Routed(Own()), causal=True).double()
    same = MultiHead(8, 2, SoftmaxAttention(), causal=True).double()
    same.load_state_dict(mixer.state_dict())
    x = rand(1, 9, 8)
    torch.testing.assert_close(mixer(x), same(x))


def test_printing_shows_the_pattern():
    """Fails if print tells less than what was built."""
    shown = repr(MultiHead(8, 2, SoftmaxAttention(Band(3, 3))))
    assert "Band(3, 3)" in shown and "heads=2" in shown
