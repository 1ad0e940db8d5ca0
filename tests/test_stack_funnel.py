"""Funnel: groups of layers at decreasing length, and a decoder."""

import pytest
import torch
from torch import nn

import regard
from oracles import stacks
from peers import agree, copied
from regard import SoftmaxAttention
from regard.block import Block
from regard.ffn import MLP
from regard.mixer import MultiHead
from regard.registry import get_recipe
from regard.residual import PostNorm, PreNorm
from regard.stack import FunnelStack, SequentialStack

DIM, HEADS = 8, 2
SIZES, DECODER = (1, 2, 1), 2


def block(residual=PreNorm, bias=False, causal=False, **more):
    return Block(
        MultiHead(DIM, HEADS, SoftmaxAttention(), bias=bias, causal=causal),
        MLP(DIM),
        residual=residual,
        **more,
    )


def funnel(sizes=SIZES, decoder=DECODER, *, cls=False, stride=2, ask_all=True, **more):
    torch.manual_seed(0)
    groups = [[block(**more) for _ in range(size)] for size in sizes]
    return FunnelStack(
        groups,
        [block(**more) for _ in range(decoder)],
        separate_cls=cls,
        stride=stride,
        pool_q_only=ask_all,
    ).double()


# --------------------------------------------------------------------------------------- the oracle
def every(layer, tokens, seen, keep, pre):
    """Apply a block to tokens that attend to all real tokens of `visible_keys`."""
    real = [t for t, k in zip(seen, keep, strict=True) if k]
    return [stacks.token(layer, t, real, [0] * len(real), [0] * HEADS, pre) for t in tokens]


def naive(stack, x, mask, pre):
    """Example by example; `group_rows` are the input tokens of each pooled token."""
    results = []
    for row, real in zip(x, mask, strict=True):
        tokens, keep, places = list(row), real.tolist(), [[i] for i in range(len(row))]
        for layer in stack.groups[0]:
            tokens = every(layer, tokens, tokens, keep, pre)
        first = tokens
        for group in list(stack.groups)[1:]:
            cuts = list(range(1 if stack.separate_cls else 0, len(tokens), stack.stride))
            runs = [range(c, min(c + stack.stride, len(tokens))) for c in cuts]
            runs = [range(1), *runs] if stack.separate_cls else runs
            means = [[tokens[i] for i in run if keep[i]] for run in runs]
            short = [sum(mean) / len(mean) if mean else tokens[0] * 0 for mean in means]
            held = [bool(mean) for mean in means]
            places = [[p for i in run for p in places[i]] for run in runs]
            long, long_keep = (tokens, keep) if stack.pool_q_only else (short, held)
            tokens, keep = every(group[0], short, long, long_keep, pre), held
            for layer in list(group)[1:]:
                tokens = every(layer, tokens, tokens, keep, pre)
        out = list(first)
        for token, stands in zip(tokens, places, strict=True):
            for p in stands:
                out[p] = first[p] + token
        for layer in stack.decoder:
            out = every(layer, out, out, real.tolist(), pre)
        results.append(torch.stack(out))
    return torch.stack(results)


@pytest.mark.parametrize("residual", [PreNorm, PostNorm])
@pytest.mark.parametrize("ask_all", [True, False])
@pytest.mark.parametrize(
    ("n", "cls", "stride"),
    [(1, False, 2), (2, True, 2), (9, False, 2), (11, True, 2), (10, True, 3)],
)
def test_matches_loops(n, cls, stride, ask_all, residual, rand):
    """Outputs and gradients equal those of loops."""
    stack = funnel(cls=cls, stride=stride, ask_all=ask_all, residual=residual)
    x, weight, mask = rand(2, n, DIM), rand(2, n, DIM), torch.ones(2, n, dtype=torch.bool)
    mask[1, 2:4], mask[1, 7:] = False, False
    found = []
    for f in (lambda t: stack(t, mask=mask), lambda t: naive(stack, t, mask, residual is PreNorm)):
        t = x.clone().requires_grad_()
        y = f(t) * mask[..., None]
        found.append([y, *torch.autograd.grad((y * weight).sum(), [t, *stack.parameters()])])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


# ------------------------------------------------------------------------------------- Hugging Face
def pairs_of(mine, theirs):
    """Pairs of parameters of a block and of a layer of Hugging Face."""
    attention, feed = theirs.attention, theirs.ffn
    linears = [
        (mine.mixer.k, attention.k_head),
        (mine.mixer.v, attention.v_head),
        (mine.mixer.out, attention.post_proj),
        (mine.ffn.up, feed.linear_1),
        (mine.ffn.down, feed.linear_2),
    ]
    pairs = [(mine.mixer.q.weight, attention.q_head.weight)]
    for a, b in linears:
        pairs += [(a.weight, b.weight), (a.bias, b.bias)]
    for residual, norm in (
        (mine.mixer_residual, attention.layer_norm),
        (mine.ffn_residual, feed.layer_norm),
    ):
        pairs += [(residual.norm.weight, norm.weight), (residual.norm.bias, norm.bias)]
    return pairs


@pytest.mark.parametrize("ask_all", [True, False])
@pytest.mark.parametrize("cls", [True, False])
@pytest.mark.parametrize("n", [2, 8, 13])
def test_hugging_face(n, cls, ask_all, rand):
    """Outputs and gradients equal those of FunnelModel, without its relative positions.

    Those are a separate prior and set to zero. `truncate_seq` is off: it drops the last token of
    each level.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.FunnelConfig(
        vocab_size=5,
        block_sizes=list(SIZES),
        num_decoder_layers=DECODER,
        d_model=DIM,
        n_head=HEADS,
        d_head=DIM // HEADS,
        d_inner=4 * DIM,
        hidden_act="gelu",
        separate_cls=cls,
        truncate_seq=False,
        pool_q_only=ask_all,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        layer_norm_eps=1e-5,
        attention_type="factorized",
    )
    torch.manual_seed(1)
    peer = transformers.FunnelModel(config).double().eval()
    theirs = [*(layer for group in peer.encoder.blocks for layer in group), *peer.decoder.layers]
    for layer in theirs:
        nn.init.zeros_(layer.attention.r_kernel)
        nn.init.zeros_(layer.attention.r_w_bias)
        for p in layer.parameters():
            if p.dim() == 1:
                nn.init.normal_(p)
    stack = funnel(cls=cls, ask_all=ask_all, residual=PostNorm, bias=True)
    mine = [*(layer for group in stack.groups for layer in group), *stack.decoder]
    for layer in mine:
        nn.init.zeros_(layer.mixer.q.bias)
    pairs = copied([pair for a, b in zip(mine, theirs, strict=True) for pair in pairs_of(a, b)])
    ones = torch.ones(2, n)

    def run(t):
        states = peer.encoder(t, attention_mask=ones, output_hidden_states=True, return_dict=True)
        first = states.hidden_states[SIZES[0]]
        return peer.decoder(
            states.last_hidden_state, first, attention_mask=ones, return_dict=True
        ).last_hidden_state

    agree(
        stack, run, rand(2, n, DIM), pairs, atol=2e-5
    )  # they take the softmax of scores in float32


# ---------------------------------------------------------------------------------------- any mixer
@pytest.mark.parametrize("name", regard.list_recipes())
def test_any_mixer(name, rand):
    """Mixers with cross-attention work in a funnel, and padded is the same as cut; others raise an
    error."""
    torch.manual_seed(0)
    recipe = get_recipe(name)
    if False not in recipe.causal_options():
        with pytest.raises(
            regard.Unsupported, match="built causal; use it elsewhere, or set pool_q_only=False"
        ):
            FunnelStack([[block()], [Block(recipe.example(DIM))]])
        return
    layer = Block(recipe.example(DIM, causal=False), MLP(DIM))
    if not layer.mixer.can.cross:
        with pytest.raises(
            regard.Unsupported, match=r"cannot attend to the longer sequence: .*; use it elsewhere"
        ):
            FunnelStack([[block()], [layer]])
    for pool_q_only in (False, True) if layer.mixer.can.cross else (False,):
        stack = FunnelStack([[block()], [layer]], pool_q_only=pool_q_only).double().eval()
        x = rand(2, 30, DIM)
        assert stack(x).isfinite().all()
        if stack.can.mask:
            for real in (5, 19, 20):
                mask = torch.arange(30).expand(2, 30) < real
                poisoned = x.masked_fill(~mask[..., None], torch.nan)
                torch.testing.assert_close(stack(poisoned, mask=mask)[:, :real], stack(x[:, :real]))


# ----------------------------------------------------------------------------------------- the rest
@pytest.mark.parametrize(("cls", "lengths"), [(False, (13, 4)), (True, (13, 4)), (True, (12, 4))])
def test_encode_length(cls, lengths, rand):
    """`encode` returns a quarter of the tokens, with their mask."""
    stack, n = funnel(cls=cls), lengths[0]
    mask = torch.arange(n).expand(2, n) < 5
    short, held = stack.encode(rand(2, n, DIM), mask=mask)
    assert (
        short.shape[1] == lengths[1]
        and held.tolist() == [[True, True] + [False] * (lengths[1] - 2)] * 2
    )
    assert stack.encode(rand(2, n, DIM))[1] is None


def test_context_at_all_lengths(rand):
    """Pooled tokens attend to the context, with its mask."""
    stack = funnel(cross=regard.create("vanilla", dim=DIM, heads=HEADS))
    x, context, real = (
        rand(2, 9, DIM),
        rand(2, 4, DIM),
        torch.tensor([[True] * 4, [True] * 2 + [False] * 2]),
    )
    got = stack(x, context, context_mask=real)
    torch.testing.assert_close(got[1:], stack(x[1:], context[1:, :2]))
    torch.testing.assert_close(
        stack.encode(x, context, context_mask=real)[0][1:], stack.encode(x[1:], context[1:, :2])[0]
    )


def test_empty_sequence_and_decoder(rand):
    """An empty sequence and an empty decoder are valid."""
    stack = funnel(decoder=0)
    assert stack(rand(2, 0, DIM)).shape == (2, 0, DIM)
    assert stack(rand(2, 5, DIM)).shape == (2, 5, DIM)


def test_nested_stacks(rand):
    """Layers other than blocks are valid where no cross-attention is needed."""
    inner = SequentialStack([block(), block()])
    assert (
        FunnelStack([[inner], [block(), inner]], [inner]).double()(rand(1, 6, DIM)).isfinite().all()
    )
    assert (
        FunnelStack([[inner], [inner]], pool_q_only=False)
        .double()(rand(1, 6, DIM))
        .isfinite()
        .all()
    )
    with pytest.raises(regard.Unsupported, match="must be a Block, not SequentialStack"):
        FunnelStack([[inner], [inner]])


def test_bad_input(rand):
    """Invalid arguments raise an error."""
    stack = funnel()
    with pytest.raises(ValueError, match=r"at least two non-empty groups, not sizes \[1\]"):
        FunnelStack([[block()]])
    with pytest.raises(ValueError, match=r"non-empty groups, not sizes \[1, 0\]"):
        FunnelStack([[block()], []])
    with pytest.raises(ValueError, match="stride must be an integer >= 1, not 0"):
        funnel(stride=0)
    with pytest.raises(regard.Unsupported, match="it was built causal; use it elsewhere"):
        FunnelStack([[block()], [block(causal=True)]])
    with pytest.raises(
        regard.Unsupported,
        match="FunnelStack does not support streaming: a pooled query contains later tokens",
    ):
        stack.stream(rand(1, 4, DIM))
    with pytest.raises(
        regard.Unsupported, match="FunnelStack does not support global_attention_mask"
    ):
        stack(rand(1, 3, DIM), global_attention_mask=torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(regard.Unsupported, match="does not support context"):
        stack.encode(rand(1, 3, DIM), rand(1, 3, DIM))
