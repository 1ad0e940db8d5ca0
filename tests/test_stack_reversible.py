"""Reversible layers: gradients of the ordinary computation, and memory independent of depth."""

import pytest
import torch

import naive
import regard
from regard.block import LayerInputs
from regard.ffn import MLP
from regard.registry import get_recipe
from regard.stack import ReversibleStack, build_sublayers
from stacks import chunks, inside, same_gradients, twin

MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


def reversible(depth=2, *, name="vanilla", causal=False, cross=False, dropout=0.0, width=8):
    torch.manual_seed(0)
    parts = []
    for _ in range(depth):
        ask = {"cross": regard.create("vanilla", dim=width, heads=2)} if cross else {}
        parts += build_sublayers(
            get_recipe(name).example(width, causal=causal), MLP(width), dropout=dropout, **ask
        )
    return ReversibleStack(parts).double().eval()


def run_with_graph(stack, x, inputs=LayerInputs()):
    """The same output from an ordinary graph."""
    a, b, _ = stack._run_plain(x, inputs, None)
    return (a + b) / 2


@pytest.mark.parametrize("causal", [False, True])
def test_matches_formula(causal, rand):
    """Outputs and gradients equal y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁), with padding."""
    stack, x, weight = (
        reversible(3, causal=causal),
        rand(2, 5, 8).requires_grad_(),
        rand(2, 5, 8) * MASK[..., None],
    )
    p, rows = inside(stack), []
    for one, real in zip(x, MASK, strict=True):
        x1 = x2 = one
        for i in range(0, 6, 2):
            f, g = naive.under(p, f"sublayers.{i}"), naive.under(p, f"sublayers.{i + 1}")
            y = naive.norm(naive.under(f, "norm"), x2)
            x1 = x1 + naive.attention(naive.under(f, "mixer"), y, y, 2, causal=causal, mask=real)[0]
            x2 = x2 + naive.mlp(naive.under(g, "ffn"), naive.norm(naive.under(g, "norm"), x1))
        rows.append((x1 + x2) / 2)
    wanted, found = torch.stack(rows), stack(x, mask=MASK)
    torch.testing.assert_close(found[MASK], wanted[MASK])
    same_gradients((found * weight).sum(), (wanted * weight).sum(), [x, *p.values()])


@pytest.mark.parametrize("name", regard.list_recipes())
def test_every_mixer_in_training(name, rand):
    """The second run repeats dropout, centroids and features, and records no loss twice."""
    stack = reversible(name=name, causal=get_recipe(name).causal_options()[-1], dropout=0.2).train()
    other, x, weight = twin(stack), rand(2, 20, 8), rand(2, 20, 8)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.manual_seed(5)
    with regard.collect_aux() as aux:
        (
            (stack(one) * weight).sum() + aux.loss()
        ).backward()  # still collecting: a second record would show
    torch.manual_seed(5)
    with regard.collect_aux() as plain:
        ((run_with_graph(other, two) * weight).sum() + plain.loss()).backward()
    torch.testing.assert_close(one.grad, two.grad, atol=1e-10, rtol=1e-9)
    for (label, p), q in zip(stack.named_parameters(), other.parameters(), strict=True):
        none = torch.zeros_like(p)
        mine, wanted = none if p.grad is None else p.grad, none if q.grad is None else q.grad
        torch.testing.assert_close(
            mine, wanted, atol=1e-10, rtol=1e-9, msg=lambda text, label=label: f"{label}: {text}"
        )
    for p, q in zip(stack.buffers(), other.buffers(), strict=True):
        assert torch.equal(p, q), "the backward pass moved a buffer"
    assert [(entry.name, entry.is_loss) for entry in aux.entries] == [
        (entry.name, entry.is_loss) for entry in plain.entries
    ]


def test_gradients_of_context(rand):
    """The context gets the gradients of all layers, and its mask is respected."""
    stack, x, context = (
        reversible(3, causal=True, cross=True),
        rand(2, 4, 8).requires_grad_(),
        rand(2, 5, 8).requires_grad_(),
    )
    found = stack(x, context, context_mask=MASK)
    wanted, weight = (
        run_with_graph(stack, x, LayerInputs(context=context, context_mask=MASK)),
        rand(2, 4, 8),
    )
    torch.testing.assert_close(found, wanted)
    same_gradients(
        (found * weight).sum(), (wanted * weight).sum(), [x, context, *stack.parameters()]
    )


def test_frozen_and_shared_parameters(rand):
    """A shared parameter gets the sum of its gradients, a frozen one none."""
    stack, x, weight = reversible(3), rand(2, 5, 8), rand(2, 5, 8)
    stack.sublayers[4].mixer = stack.sublayers[0].mixer
    stack.sublayers[1].requires_grad_(False)
    learning = [p for p in stack.parameters() if p.requires_grad]
    same_gradients((stack(x) * weight).sum(), (run_with_graph(stack, x) * weight).sum(), learning)
    (stack(x) * weight).sum().backward()
    assert all(p.grad is None for p in stack.sublayers[1].parameters())


def graph_bytes(stack, x):
    """Bytes that the graph stores, without parameters and inputs."""
    own, found = {p.untyped_storage().data_ptr() for p in (x, *stack.parameters())}, {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = stack(x)
    before = sum(getattr(part, "nbytes", 0) for part in _rng(stack, y))
    return sum(found.values()) + before


def _rng(stack, y):
    """States of random number generators, which the call stores in addition to tensors."""
    node = y.grad_fn
    while node is not None and "_ReversibleFunction" not in type(node).__name__:
        node = node.next_functions[0][0]
    return (
        [before.rng.cpu for before in node.call.before if before.rng is not None]
        if node is not None
        else []
    )


def test_memory_does_not_grow_with_depth(rand):
    """A deeper stack stores no more; an ordinary graph stores far more."""
    x = rand(1, 64, 8)
    stored = {depth: graph_bytes(reversible(depth), x) for depth in (1, 4, 16)}
    assert stored[1] == stored[4] == stored[16] == 2 * x.nbytes
    stack = reversible(16)
    stack.run = lambda x, inputs, state: (run_with_graph(stack, x, inputs), None)
    assert graph_bytes(stack, x) > 100 * stored[16]


def test_dropout_stores_generator_states_only(rand):
    """Dropout masks are not stored; the states of the generator are."""
    x = rand(1, 64, 8)
    state = torch.get_rng_state().nbytes
    assert graph_bytes(reversible(4, dropout=0.1).train(), x) == 2 * x.nbytes + 8 * state


def test_backward_leaves_global_generator_alone(rand):
    """The backward pass neither draws from the global generator nor resets it."""
    stack, x = reversible(dropout=0.3).train(), rand(2, 5, 8)
    y = stack(x)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_aux_is_recorded_by_the_forward_pass_only(rand):
    """Auxiliary outputs are computed only if the forward pass collects them."""
    stack, x = reversible(name="adaptive_span").train(), rand(2, 5, 8)
    y = stack(x)
    with regard.collect_aux() as late:
        y.sum().backward()
    assert not late.entries
    with regard.collect_aux() as aux:
        y = stack(x)
    assert aux.names() == ["span", "spans"] and len(aux.all("span")) == 2
    stack.zero_grad()
    aux.loss().backward()
    assert all(half.mixer.inner.share.grad is not None for half in stack.sublayers[::2])


@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_stream_matches_whole(name, rand):
    """The two streams of tokens are kept apart from chunk to chunk."""
    stack, x = reversible(name=name, causal=True), rand(2, 13, 8)
    torch.testing.assert_close(chunks(stack, x, (1, 7, 1, 4)), stack(x))


def test_decoder_streams(rand):
    """Every chunk sees the context."""
    stack, x, context = reversible(causal=True, cross=True), rand(2, 9, 8), rand(2, 5, 8)
    found = chunks(stack, x, (4, 5), context=context, context_mask=MASK)
    torch.testing.assert_close(found, stack(x, context, context_mask=MASK))


def test_without_gradients(rand):
    """Without gradients the output is the same, and nothing is stored."""
    stack, x = reversible(), rand(2, 5, 8)
    with torch.no_grad():
        plain = stack(x)
    assert not plain.requires_grad
    assert torch.equal(plain, stack(x))


def test_padding_has_no_influence(rand):
    """NaN in padding reaches no real token."""
    stack, x = reversible(), rand(2, 5, 8)
    poisoned = x.masked_fill(~MASK[..., None], torch.nan)
    torch.testing.assert_close(stack(poisoned, mask=MASK)[MASK], stack(x, mask=MASK)[MASK])


@pytest.mark.parametrize("within", [True, False])
def test_autocast(within, rand):
    """The second run has the same precision, and does not use cached weights without a graph."""
    stack, x, weight = reversible().float(), rand(2, 5, 8).float(), rand(2, 5, 8).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = (stack(x).float() * weight).sum()
        grads = torch.autograd.grad(found, list(stack.parameters())) if within else None
    grads = torch.autograd.grad(found, list(stack.parameters())) if grads is None else grads
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        wanted = torch.autograd.grad(
            (run_with_graph(stack, x).float() * weight).sum(), list(stack.parameters())
        )
    for g, w in zip(grads, wanted, strict=True):
        assert (g - w).norm() <= 0.02 * w.norm()


def test_changed_parameter_is_an_error(rand):
    """The backward pass does not run with changed weights."""
    stack, x = reversible(), rand(2, 5, 8)
    y = stack(x)
    with torch.no_grad():
        stack.sublayers[0].mixer.q.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_invalid_arguments(rand):
    """Invalid arguments raise an error."""
    with pytest.raises(ValueError, match="at least one layer"):
        ReversibleStack([])
    with pytest.raises(ValueError, match="the same dim"):
        ReversibleStack(build_sublayers(get_recipe("vanilla").example(8), MLP(4)))
    with pytest.raises(regard.Unsupported, match="does not support cross-attention"):
        build_sublayers(get_recipe("vanilla").example(8), cross=get_recipe("fnet").example(8))
    with pytest.raises(
        regard.Unsupported, match="does not support context: it has no cross-attention"
    ):
        reversible()(rand(1, 3, 8), rand(1, 3, 8))
    x = rand(1, 3, 8).requires_grad_()
    first = torch.autograd.grad(reversible()(x).square().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
