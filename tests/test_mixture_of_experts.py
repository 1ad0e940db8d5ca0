"""Mixture of experts: loops, capacity, padding, streams, and Hugging Face."""

import pytest
import torch
import torch.nn.functional as F

import regard
from peers import agree, copied
from regard.block import Block
from regard.ffn import (
    GLU,
    MLP,
    ExpertBank,
    MixtureOfExperts,
    ProductKeyMemory,
    Router,
    build_feed_forward,
    switch_experts,
    top_k_experts,
)
from regard.ffn.dispatch import dispatch_tokens, rank_equal
from regard.registry import get_recipe
from regard.stack import SequentialStack


def layer(kind=MLP, experts=4, top=1, dim=6, **more):
    torch.manual_seed(0)
    bank = ExpertBank(lambda: kind(dim, 5, bias=True), experts)
    return MixtureOfExperts(bank, Router(dim, experts), top_k=top, **more).double()


def one(expert, e, x):
    """Expert e of the stacked weights, for one token."""
    p = {name: value[e] for name, value in expert.named_parameters()}
    up = p["up.weight"] @ x + p["up.bias"]
    gated = "gate.weight" in p
    inside = torch.sigmoid(p["gate.weight"] @ x + p["gate.bias"]) * up if gated else F.gelu(up)
    return p["down.weight"] @ inside + p["down.bias"]


def loop(experts, x, mask=None, factor=None):
    """Token by token, with a capacity per example; also the dropped choices and the load."""
    rows, dropped, load = [], [], [0] * experts.num_experts
    for a in range(len(x)):
        real = [i for i in range(x.shape[1]) if mask is None or mask[a, i]]
        limit = (
            len(x[a]) * 9
            if factor is None
            else max(1, int(factor * experts.top_k * len(real) / experts.num_experts))
        )
        room = [limit] * experts.num_experts
        for i in range(x.shape[1]):
            y = torch.zeros(x.shape[2], dtype=x.dtype)
            if i in real:
                p = (experts.router.weight @ x[a, i]).softmax(0)
                best = sorted(range(experts.num_experts), key=lambda e: -p[e].item())[
                    : experts.top_k
                ]
                total = sum(p[e] for e in best) if experts.top_k > 1 else 1
                for e in best:
                    if room[e]:
                        room[e], load[e] = room[e] - 1, load[e] + 1
                        y = y + p[e] / total * one(experts.bank.expert, e, x[a, i])
                    else:
                        dropped.append((a, i, e))
            rows.append(y)
    return torch.stack(rows).view_as(x), dropped, load


def holes(n):
    at = torch.arange(n)
    return torch.stack((at >= 0, at < n - 4, at % 3 != 1))


def compare(experts, x, mask, factor):
    """Outputs, all gradients and statistics agree with the loop."""
    x, weight = (
        x.requires_grad_(),
        torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)),
    )
    leaves = [x, *experts.parameters()]
    with regard.collect_aux() as aux:
        got = experts(x, mask)
    want, dropped, load = loop(experts, x, mask, factor)
    torch.testing.assert_close(got, want)
    mine, other = (torch.autograd.grad((y * weight).sum(), leaves) for y in (got, want))
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a, b)
    assert aux.all("load")[0].tolist() == load and aux.all("dropped")[0].item() == len(dropped)
    return dropped


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("factor", [None, 0.5, 1.0, 1.25])
@pytest.mark.parametrize("top", [1, 2, 3])
@pytest.mark.parametrize("kind", [MLP, GLU])
def test_matches_loop(kind, top, factor, masked, rand):
    """Experts, weights and dropped tokens equal those of a loop."""
    experts = layer(kind, top=top, capacity=factor).train()
    dropped = compare(experts, rand(3, 23, 6), holes(23) if masked else None, factor)
    assert bool(dropped) == (factor in (0.5, 1.0)) or factor == 1.25


@pytest.mark.parametrize("n", [1, 2, 7])
def test_short_sequences(n, rand):
    """The capacity is at least one token."""
    compare(layer(top=2, capacity=0.1).train(), rand(2, n, 6), None, 0.1)


@pytest.mark.parametrize(("experts", "top", "n"), [(19, 3, 95), (23, 2, 276), (49, 1, 49)])
def test_integer_capacity_is_exact(experts, top, n):
    """An integer n · k / E loses no token to rounding."""
    layer = top_k_experts(4, experts, top_k=top, capacity=1.0).train()
    assert layer._example_capacity(torch.zeros(1, n, 4), None).tolist() == [n * top // experts]


def test_evaluation_has_its_own_capacity(rand):
    """Evaluation drops tokens only if eval_capacity is given; training drops them."""
    x = rand(2, 30, 6)
    for experts, training in (
        (layer(capacity=0.5), True),
        (layer(capacity=None, eval_capacity=0.5), False),
    ):
        compare(experts.train(training), x, None, 0.5)
        compare(experts.train(not training), x, None, None)


def test_assignment_order():
    """Earlier tokens come first, and examples do not share capacity."""
    chosen = torch.tensor([[[0], [0], [1], [0]], [[0], [1], [1], [1]]])
    work = dispatch_tokens(chosen, 3, capacity=torch.tensor([2, 1]))
    assert work.load.tolist() == [3, 2, 0]
    assert work.token.tolist() == [[0, 1, 4], [2, 5, 8], [8, 8, 8]]
    assert work.slot.tolist() == [[0], [1], [3], [9], [2], [4], [9], [9]]
    assert rank_equal(torch.tensor([5, 3, 5, 5, 3])).tolist() == [0, 0, 1, 2, 1]


def test_capacity_is_causal(rand):
    """With a small capacity, a token does not change earlier ones, also for k = 2."""
    for top in (1, 2):
        experts, x = layer(top=top, capacity=0.5).train(), rand(2, 20, 6)
        base, other = experts(x), x.clone()
        other[:, 12:] = 3 * rand(2, 8, 6)
        torch.testing.assert_close(experts(other)[:, :12], base[:, :12])
        assert not torch.equal(experts(other)[:, 12:], base[:, 12:])


def test_examples_and_padding_are_independent(rand):
    """Other examples and padding, even NaN, use no capacity and change nothing."""
    experts, x = layer(top=2, capacity=0.5).train(), rand(3, 20, 6)
    torch.testing.assert_close(experts(x)[1:2], experts(x[1:2]))
    mask = torch.arange(20).expand(3, 20) < 14
    with regard.collect_aux() as aux:
        padded = experts(x.masked_fill(~mask[..., None], torch.nan), mask)
    with regard.collect_aux() as cut_aux:
        cut = experts(x[:, :14])
    torch.testing.assert_close(padded[:, :14], cut)
    assert not padded[:, 14:].any()
    for mine, other in zip(aux.entries, cut_aux.entries, strict=True):
        torch.testing.assert_close(mine.value, other.value)
    x.requires_grad_()
    with regard.collect_aux() as aux:
        y = experts(x, mask)
    (grad,) = torch.autograd.grad(y.sum() + aux.loss(), x)
    assert not grad[:, 14:].any()


def test_only_padding(rand):
    """Without real tokens, outputs, losses and gradients are zero."""
    experts, x = layer().train(), rand(2, 5, 6).requires_grad_()
    with regard.collect_aux() as aux:
        y = experts(x, torch.zeros(2, 5, dtype=torch.bool))
    (y.sum() + aux.loss()).backward()
    assert not y.any() and aux.loss() == 0
    assert all(p.grad is None or not p.grad.any() for p in (x, *experts.parameters()))


def test_unused_expert(rand):
    """An expert without tokens has zero gradients."""
    experts, x = layer(), rand(1, 9, 6).abs()
    with torch.no_grad():
        experts.router.weight[2] = -100
    experts(x).square().sum().backward()
    for name, p in experts.bank.named_parameters():
        assert p.grad.isfinite().all() and not p.grad[2].any() and p.grad.any(), name


@pytest.mark.parametrize("kind", ["switch", "top_k"])
def test_stream_matches_whole(kind, rand):
    """Without a limit, as in evaluation, chunks give the result of the whole sequence."""
    torch.manual_seed(0)
    blocks = [
        Block(
            get_recipe("vanilla").example(8, causal=True),
            build_feed_forward(kind, 8, num_experts=3),
        )
        for _ in range(2)
    ]
    layers, x = SequentialStack(blocks).double().eval(), rand(2, 20, 8)
    state, parts = None, []
    for chunk in x.split((1, 7, 1, 11), 1):
        y, state = layers.stream(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), layers(x))


# --------------------------------------------------------------------------------- losses and noise
def test_auxiliary_losses(rand):
    """Losses are N Σ f P and the mean squared log-sum-exp over real tokens, with gradients."""
    experts, x, mask = (
        layer(top=2, balance_loss_weight=0.3, z_loss_weight=0.2),
        rand(3, 11, 6),
        holes(11),
    )
    with regard.collect_aux() as aux:
        experts(x, mask)
    first, mean, z = [0.0] * 4, torch.zeros(4, dtype=torch.float64), 0.0
    tokens = [x[a, i] for a in range(3) for i in range(11) if mask[a, i]]
    for token in tokens:
        scores = experts.router.weight @ token
        first[int(scores.argmax())] += 1 / len(tokens)
        mean = mean + scores.softmax(0) / len(tokens)
        z = z + scores.exp().sum().log() ** 2 / len(tokens)
    balance = 0.3 * 4 * sum(f * p for f, p in zip(first, mean, strict=True))
    torch.testing.assert_close(aux.all("balance_loss")[0], balance)
    torch.testing.assert_close(aux.all("router_z_loss")[0], 0.2 * z)
    (got,) = torch.autograd.grad(aux.loss(), experts.router.weight)
    (want,) = torch.autograd.grad(balance + 0.2 * z, experts.router.weight)
    torch.testing.assert_close(got, want)


def test_losses_of_zero_weight_are_not_recorded(rand):
    """A loss with weight zero is not recorded."""
    with regard.collect_aux() as aux:
        layer(balance_loss_weight=0, z_loss_weight=0)(rand(1, 3, 6))
    assert aux.names() == ["load", "dropped"]


def test_balanced_router_loss():
    """The balance loss of a perfectly balanced router is its minimum, α."""
    x = torch.eye(4, dtype=torch.float64)[None]
    experts = MixtureOfExperts(
        ExpertBank(lambda: MLP(4), 4), Router(4, 4), balance_loss_weight=0.5, z_loss_weight=0
    ).double()
    with torch.no_grad():
        experts.router.weight.copy_(torch.eye(4))
    with regard.collect_aux() as aux:
        experts(x)
    torch.testing.assert_close(aux.loss(), torch.tensor(0.5, dtype=torch.float64))


def test_noise_in_training_only(rand):
    """Noise is repeatable, independent of other generators, and off in evaluation."""
    for more in ({"jitter": 0.5}, {"noisy": True}):
        torch.manual_seed(0)
        router, x = Router(6, 4, **more), rand(2, 5, 6, dtype=torch.float32)
        still = x @ router.weight.T
        torch.testing.assert_close(router.eval()(x), still)
        state = torch.random.get_rng_state()
        first, second = router.train()(x), router(x)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not torch.allclose(first, still) and not torch.equal(first, second)
        router.num_draws.zero_()
        assert torch.equal(router(x), first)


def test_noise_scale():
    """Jitter stays in its bounds, and noise has the scale softplus(W x)."""
    router, x = Router(1, 1, jitter=0.1), torch.ones(1, 4000, 1)
    u = (router(x) / router.weight).flatten()
    assert 0.9 <= u.min() < 0.91 and 1.09 < u.max() <= 1.1
    router = Router(1, 1, noisy=True)
    with torch.no_grad():
        router.noise.fill_(3.0)
    spread = (router(x) - router.weight).std()
    assert abs(spread / F.softplus(torch.tensor(3.0)) - 1) < 0.05


def test_router_precision():
    """Scores are float32 in a bfloat16 layer and under autocast."""
    torch.manual_seed(0)
    experts, x = layer().bfloat16(), torch.randn(2, 9, 6).bfloat16()
    want = x.float() @ experts.router.weight.float().T
    assert experts.router(x).dtype == torch.float32 and experts(x).dtype == torch.bfloat16
    torch.testing.assert_close(experts.router(x), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(experts.float().router(x.float()), want)


def test_save_and_load(rand):
    """Everything that changes the output is saved."""
    torch.manual_seed(1)
    first, second, x = (
        top_k_experts(6, 4, noisy=True),
        top_k_experts(6, 4, noisy=True),
        rand(1, 5, 6, dtype=torch.float32),
    )
    first.train()(x)
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(x), second(x))


def test_invalid_arguments():
    """Invalid sizes raise an error."""
    with pytest.raises(ValueError, match=r"top_k must be at most num_experts \(4\), not 5"):
        layer(top=5)
    with pytest.raises(ValueError, match="capacity must be a finite number above 0, not 0"):
        layer(capacity=0)
    with pytest.raises(
        ValueError, match="the router has 3 experts of dim 6, but the bank has 4 of dim 6"
    ):
        MixtureOfExperts(ExpertBank(lambda: MLP(6), 4), Router(6, 3))
    with pytest.raises(ValueError, match="jitter must be a number >= 0 and < 1"):
        switch_experts(6, 4, jitter=1.0)
    with pytest.raises(regard.Unsupported, match="ProductKeyMemory cannot be an expert"):
        ExpertBank(lambda: ProductKeyMemory(6, 4, top_k=2), 2)
    with pytest.raises(ValueError, match="num_experts must be an integer"):
        ExpertBank(lambda: MLP(6), 0)


# ------------------------------------------------------------------------------------- Hugging Face
def peer(count, capacity):
    """Hugging Face's layer, and ours with its weights and the same capacity."""
    module = pytest.importorskip(
        "transformers.models.switch_transformers.modeling_switch_transformers"
    )
    config = pytest.importorskip("transformers").SwitchTransformersConfig(
        d_model=6,
        d_ff=10,
        num_experts=count,
        expert_capacity=capacity,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    torch.manual_seed(0)
    theirs = module.SwitchTransformersSparseMLP(config).double().eval()
    theirs.router.dtype = torch.float64
    ours = switch_experts(6, count, 10).double().eval()
    mine = ours.bank.expert
    for e in range(count):
        other = theirs.experts[f"expert_{e}"]
        copied([(mine.up.weight[e], other.wi.weight), (mine.down.weight[e], other.wo.weight)])
    return module, theirs, ours, copied([(ours.router.weight, theirs.router.classifier.weight)])


@pytest.mark.parametrize(("factor", "capacity"), [(None, 1000), (1.0, 8), (0.5, 4), (0.125, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_matches_hugging_face(factor, capacity, masked, rand):
    """Experts, dropped tokens, outputs and gradients equal Hugging Face's.

    It has no mask, but padding at the end uses no capacity there, so real tokens agree.
    """
    _, theirs, ours, pairs = peer(4, capacity)
    ours.eval_capacity = factor
    x, mask = (
        rand(3, 35, 6),
        torch.arange(35) < torch.tensor([[35], [33], [32]]),
    )  # a share of 8 for each of them
    rows = mask if masked else torch.ones_like(mask)
    agree(lambda t: ours(t, mask if masked else None), theirs, x, pairs, rows=rows)
    index = theirs.router(x)[0]
    served = (ours(x, mask if masked else None) != 0).any(-1)
    assert torch.equal(served & rows, index.any(-1) & rows)
    assert factor is None or not served[rows].all()
    assert factor == 0.125 or served[rows].sum() > 30


def test_losses_match_hugging_face(rand):
    """Losses equal Hugging Face's, which treats all tokens as one group."""
    module, theirs, ours, _ = peer(4, 1000)
    x = rand(3, 20, 6)
    with regard.collect_aux() as aux:
        ours(x)
    index, _, logits = theirs.router(x.view(1, 60, 6))
    balance = module.load_balancing_loss_func(logits.softmax(-1), index.argmax(-1))
    torch.testing.assert_close(aux.all("balance_loss")[0], 1e-2 * balance)
    torch.testing.assert_close(
        aux.all("router_z_loss")[0], 1e-3 * module.router_z_loss_func(logits)
    )
