"""Early exits: exit depths, computed layers, and what other tokens see."""

import pytest
import torch
from torch import nn

import naive
import regard
from regard.stack import EarlyExitStack
from stacks import block, chunks, inside, same_gradients

MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


def early(
    depth=4, exits=(1, 2, 4), *, names=("vanilla",), threshold=0.6, one_head=False, loud=4.0, **more
):
    """Build a stack whose heads have large logits, so that tokens exit at different depths."""
    options = {key: more.pop(key) for key in ("confidence", "per", "weights") if key in more}
    layers = [block(names[i % len(names)], seed=i, **more) for i in range(depth)]
    torch.manual_seed(9)
    heads = [nn.Linear(8, 3) for _ in exits]
    heads = [heads[0]] * len(exits) if one_head else heads
    for head in set(heads):
        head.weight.data *= loud
    return (
        EarlyExitStack(layers, dict(zip(exits, heads, strict=True)), threshold=threshold, **options)
        .double()
        .eval()
    )


def count_layers(stack):
    """A list that grows with each layer that runs on a whole sequence."""
    ran = []
    for i, layer in enumerate(stack.layers):
        layer.mixer.register_forward_hook(lambda *_, i=i: ran.append(i + 1))
    return ran


def is_sure(logits, threshold, entropy):
    p = (logits.exp() / logits.exp().sum()).tolist()
    if entropy:
        return -sum(v * torch.tensor(v).log().item() for v in p) < threshold
    return max(p) > threshold


def by_hand(stack, x, real, *, causal, threshold, entropy=False):
    """One example (n, d), token by token: states, logits and depths."""
    p, h = inside(stack), x * real[:, None]
    gone, depth, logits = [not r for r in real], [0] * len(x), [None] * len(x)
    for i in range(len(stack.layers)):
        if all(gone):
            break
        new = naive.block(naive.under(p, f"layers.{i}"), h, 2, causal=causal, mask=real)
        h = torch.stack(
            [old if left else fresh for old, fresh, left in zip(h, new, gone, strict=True)]
        )
        for j in range(len(x)):
            if gone[j]:
                continue
            depth[j] += 1
            if i + 1 in stack.exits:
                logits[j] = naive.linear(p, f"heads.{stack.exits.index(i + 1)}", h[j])
                gone[j] = is_sure(logits[j], threshold, entropy)
    return h, logits, depth


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("confidence", "threshold"), [("probability", 0.6), ("entropy", 0.9)])
def test_token_exits_match_loops(causal, confidence, threshold, rand):
    """Depths, logits and states of exited tokens equal those of loops, with padding."""
    stack, x = early(causal=causal, confidence=confidence, threshold=threshold), rand(2, 6, 8)
    found = stack.predict(x, mask=MASK)
    assert len(found.depth[MASK].unique()) > 1
    for a in range(2):
        h, logits, depth = by_hand(
            stack,
            x[a],
            MASK[a],
            causal=causal,
            threshold=threshold,
            entropy=confidence == "entropy",
        )
        assert found.depth[a].tolist() == depth
        real = MASK[a]
        torch.testing.assert_close(found.tokens[a][real], h[real])
        torch.testing.assert_close(
            found.logits[a][real], torch.stack([row for row in logits if row is not None])
        )
    torch.testing.assert_close(stack(x, mask=MASK), found.tokens)


def test_example_exits_match_single_examples(rand):
    """An example exits as it would alone, and stays at its index."""
    stack, x, mask = (
        early(per="example", threshold=0.5, loud=6.0),
        rand(7, 6, 8),
        torch.arange(6) < torch.arange(1, 8)[:, None],
    )
    found = stack.predict(x, mask=mask)
    assert len(found.depth.unique()) > 1
    for a in range(7):
        h, p = x[a : a + 1, : mask[a].sum()], inside(stack)
        for i, layer in enumerate(stack.layers):
            h = layer(h)
            if i + 1 in stack.exits:
                logits = naive.linear(p, f"heads.{stack.exits.index(i + 1)}", h[0].mean(0))
                if is_sure(logits, 0.5, False):
                    break
        assert found.depth[a] == i + 1
        torch.testing.assert_close(found.logits[a], logits)
        torch.testing.assert_close(found.tokens[a, : h.shape[1]], h[0])


@pytest.mark.parametrize("per", ["token", "example"])
def test_unneeded_layers_do_not_run(per, rand):
    """In evaluation, layers that no token needs do not run. In training all run."""
    stack, x = early(per=per), rand(3, 6, 8)
    ran = count_layers(stack)
    for threshold, layers in ((1e-6, [1]), (1.0, [1, 2, 3, 4])):
        ran.clear()
        stack.threshold = threshold
        stack(x)
        assert ran == layers
    stack.threshold = 1e-6
    ran.clear()
    trained = stack.train()(x)
    assert ran == [1, 2, 3, 4]
    stack.eval().threshold = 1.0
    torch.testing.assert_close(stack(x), trained)


def test_exited_examples_leave_the_batch(rand):
    """No layer computes examples that exited before."""
    stack, x, sizes = early(per="example", threshold=0.5, loud=6.0), rand(7, 6, 8), []
    for layer in stack.layers:
        layer.mixer.register_forward_hook(lambda module, given, out: sizes.append(len(out)))
    depth = stack.predict(x).depth
    assert sizes == [int((depth > i).sum()) for i in range(len(sizes))] and sizes[-1] < 7


@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_stream_matches_whole(name, rand):
    """Later tokens see tokens that exited early in the layers that these skipped."""
    stack, x = early(names=(name, "vanilla"), causal=True), rand(2, 20, 8)
    whole = stack.predict(x)
    assert len(whole.depth.unique()) > 1
    with regard.collect_aux() as aux:
        found = chunks(stack, x, (1, 7, 1, 11))
    depth = torch.cat(aux.all("depth"), 1)
    torch.testing.assert_close(found, whole.tokens)
    assert torch.equal(depth, whole.depth)
    torch.testing.assert_close(stack.exit_logits(found, depth), whole.logits)


def test_decoder_streams(rand):
    """Layers that run late for earlier tokens see the context."""
    stack, x, context = early(causal=True, cross=True), rand(2, 9, 8), rand(2, 4, 8)
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    whole = stack(x, context, context_mask=mask)
    torch.testing.assert_close(
        chunks(stack, x, (1, 1, 4, 3), context=context, context_mask=mask), whole
    )


def test_stream_in_training(rand):
    """A stream in training mode takes no exits."""
    stack, x = early(causal=True).train(), rand(2, 9, 8)
    torch.testing.assert_close(chunks(stack, x, (2, 7)), stack(x))


@pytest.mark.parametrize("weights", [None, (0.0, 1.0, 3.0)])
def test_weighted_loss(weights, rand):
    """The loss is the weighted mean over exits, and so are its gradients."""
    stack, x, target = (
        early(weights=weights).train(),
        rand(2, 6, 8).requires_grad_(),
        torch.tensor([[0, 1, 2, 2, 1, 0]] * 2),
    )
    with regard.collect_aux() as aux:
        losses = [
            nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            for logits in stack.all_logits(x)
        ]
        loss = stack.weighted_loss(losses)
    p, shares, wanted = inside(stack), (1, 2, 4) if weights is None else weights, 0
    for a in range(2):
        h = x[a]
        for i in range(4):
            h = naive.block(naive.under(p, f"layers.{i}"), h, 2)
            if i + 1 in stack.exits:
                e = stack.exits.index(i + 1)
                logits = naive.linear(p, f"heads.{e}", h)
                each = [
                    row.exp().sum().log() - row[t] for row, t in zip(logits, target[a], strict=True)
                ]
                wanted = wanted + shares[e] * sum(each) / 12 / sum(shares)
    torch.testing.assert_close(loss, wanted)
    assert aux.all("exit_losses")[0].shape == (3,)
    same_gradients(loss, wanted, [x, *p.values()])


def test_padding_has_no_influence(rand):
    """NaN in padding reaches no token, mean or decision."""
    for per in ("token", "example"):
        stack, x = early(per=per), rand(2, 6, 8)
        found = stack.predict(x.masked_fill(~MASK[..., None], torch.nan), mask=MASK)
        want = stack.predict(x, mask=MASK)
        assert torch.equal(found.depth, want.depth)
        real = MASK if per == "token" else slice(None)
        torch.testing.assert_close(found.logits[real], want.logits[real])
        torch.testing.assert_close(found.tokens[MASK], want.tokens[MASK])


def test_shared_head(rand):
    """A shared head is not copied, and gives the logits of the output tokens."""
    stack, x = early(one_head=True), rand(2, 6, 8)
    assert len(list(stack.heads.parameters())) == 2
    found = stack.predict(x)
    torch.testing.assert_close(stack.heads[0](found.tokens), found.logits)


def test_invalid_arguments():
    """Invalid heads, and streams of exits per example, raise an error."""
    with pytest.raises(
        ValueError, match=r"heads must follow layers 1 \.\. 4, including the last, not \[1, 2\]"
    ):
        early(exits=(1, 2))
    with pytest.raises(ValueError, match="heads must follow layers 1"):
        early(exits=(0, 4))
    with pytest.raises(ValueError, match="'probability', 'entropy'"):
        early(confidence="margin")
    with pytest.raises(ValueError, match="per must be one of"):
        early(per="layer")
    with pytest.raises(ValueError, match="threshold must be a finite number above 0"):
        early(threshold=0)
    with pytest.raises(ValueError, match="weights must be 3 numbers"):
        early(weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="expected 3 losses, one per exit, not 1"):
        early().weighted_loss([torch.zeros(())])
    stack = early(per="example", causal=True)
    assert not stack.causal and "exits as a whole" in stack.can.reason("stream")
    with pytest.raises(regard.Unsupported):
        stack.stream(torch.zeros(1, 2, 8).double())
