"""The same numbers as other people's code: weights copied, outputs and gradients compared.

`python tests/test_peers_sparse.py` prints how large the differences are.
"""

import numpy as np
import pytest
import torch

import regard
from peers import agree
from regard import Band, BlockTable, Chunks, Keys, MultiHead, PerHead, Queries, SoftmaxAttention

B, N, D, H = 2, 64, 16, 4
measured = {}


def rand(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def copy(ours, theirs):
    """Weights, and biases where there are any."""
    with torch.no_grad():
        ours.weight.copy_(theirs.weight)
        if ours.bias is not None:
            ours.bias.copy_(theirs.bias)


def compare(name, ours, theirs, pairs, x, **more):
    """They agree, and by how much is kept."""
    measured[name] = agree(ours, theirs, x, pairs, **more)


# ----------------------------------------------------------------------------------- Hugging Face
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_longformer(padded, marked):
    """Fails if window, marked tokens, their own projections or padding differ from transformers'
    Longformer.
    """
    module = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    config = pytest.importorskip("transformers").LongformerConfig(
        hidden_size=D,
        num_attention_heads=H,
        num_hidden_layers=1,
        attention_window=[8],
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    peer = module.LongformerSelfAttention(config, 0).double()
    mixer = regard.create("longformer", dim=D, heads=H, window=4, bias=True).double()
    names = {"q": "query", "k": "key", "v": "value"}
    parts = [(getattr(mixer.local, ours), getattr(peer, theirs)) for ours, theirs in names.items()]
    if marked:
        parts += [
            (getattr(mixer.global_heads, ours), getattr(peer, f"{theirs}_global"))
            for ours, theirs in names.items()
        ]
    for ours, theirs in parts:
        copy(ours, theirs)
    mixer.local.out = torch.nn.Identity()  # theirs is in another module
    mask = (
        torch.arange(N) < torch.tensor([[N], [N - 13]])
        if padded
        else torch.ones(B, N, dtype=torch.bool)
    )
    global_attention_mask = torch.zeros(B, N, dtype=torch.bool)
    if marked:
        global_attention_mask[0, [0, 20]] = global_attention_mask[1, 3] = True
    told = (
        torch.zeros(B, N, dtype=torch.float64)
        .masked_fill(global_attention_mask, 10000)
        .masked_fill(~mask, -10000)
    )

    def theirs(x):
        return peer(
            x, told, is_index_masked=told < 0, is_index_global_attn=told > 0, is_global_attn=marked
        )[0]

    pairs = [(a.weight, b.weight) for a, b in parts]
    given = {
        "mask": mask if padded else None,
        "global_attention_mask": global_attention_mask if marked else None,
    }
    name = f"Longformer{' padded' * padded}{' marked' * marked}"
    more = {"rows": mask, "atol": 3e-6, "nan_gradients": padded or marked}  # they round to float32
    compare(name, lambda x: mixer(x, **given), theirs, pairs, rand(B, N, D), **more)


@pytest.mark.parametrize("padded", [False, True])
def test_bigbird(padded):
    """Fails if the block-sparse attention of transformers' BigBird, with its own random plan, is
    not this pattern.
    """
    module = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    block, blocks, random = 4, N // 4, 2
    config = pytest.importorskip("transformers").BigBirdConfig(
        hidden_size=D,
        num_attention_heads=H,
        block_size=block,
        num_random_blocks=random,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    peer = (
        module.BigBirdBlockSparseAttention(config, seed=3).double().train()
    )  # without training its plan is block 0 only
    lengths, counts = peer._get_rand_attn_plan(N, block, random)
    np.random.seed(3)
    plan = np.stack(
        peer._bigbird_block_rand_mask_with_head(N, N, block, block, H, lengths, counts)
    )  # (h blocks-2 random)
    ends = Queries(0, block) | Keys(0, block) | Queries(N - block, N) | Keys(N - block, N)
    drawn = [BlockTable(block, ((), *(tuple(row) for row in head), ())) for head in plan.tolist()]
    pattern = PerHead(tuple(Chunks(block, 1, 1) | ends | table for table in drawn))
    mixer = MultiHead(D, H, SoftmaxAttention(pattern), bias=True).double()
    mixer.out = torch.nn.Identity()
    parts = [(mixer.q, peer.query), (mixer.k, peer.key), (mixer.v, peer.value)]
    for ours, theirs in parts:
        copy(ours, theirs)
    mask = (
        torch.arange(N) < torch.tensor([[N], [N - 13]])
        if padded
        else torch.ones(B, N, dtype=torch.bool)
    )
    real = mask.double()
    cut = real.view(B, blocks, block)
    near = torch.cat((cut[:, 1:-3], cut[:, 2:-2], cut[:, 3:-1]), 2)
    band = torch.einsum("blq,blk->blqk", cut[:, 2:-2], near)[:, None]

    def theirs(x):
        return peer(x, band, real[:, None, :, None], real[:, None, None, :], cut, cut)[0]

    pairs = [(a.weight, b.weight) for a, b in parts]
    more = {"mask": mask} if padded else {}
    compare(
        f"BigBird{' padded' * padded}",
        lambda x: mixer(x, **more),
        theirs,
        pairs,
        rand(B, N, D),
        rows=mask,
        atol=1e-12,
    )


@pytest.mark.parametrize("shifted", [False, True])
def test_swin(shifted):
    """Fails if windows, their shift or their bias differ from transformers' Swin, which rolls the
    image and masks.
    """
    module = pytest.importorskip("transformers.models.swin.modeling_swin")
    config = pytest.importorskip("transformers").SwinConfig(
        window_size=4, qkv_bias=False, attention_probs_dropout_prob=0.0
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = module.SwinLayer(config, D, (8, 12), H, shift_size=2 * shifted).double()
    peer = layer.attention
    mixer = regard.create("swin", dim=D, heads=H, width=12, window=4, layer=int(shifted)).double()
    table = peer.relative_position_bias.relative_position_bias_table
    parts = list(
        zip(
            (mixer.q, mixer.k, mixer.v, mixer.out),
            (peer.q_proj, peer.k_proj, peer.v_proj, peer.o_proj),
            strict=True,
        )
    )
    with torch.no_grad():
        table.normal_()
        peer.o_proj.bias.zero_()
        mixer.inner.prior.table.copy_(table.T.unflatten(1, (7, 7)))
        for ours, theirs in parts:
            copy(ours, theirs)

    def theirs(x):
        rolled = layer.cyclic_shift(x.unflatten(1, (8, 12)))
        windows = module.window_partition(rolled, 4).flatten(1, 2)
        y, _ = peer(windows, layer.get_attn_mask(8, 12, x.dtype, x.device))
        return layer.cyclic_shift(
            module.window_reverse(y.view(-1, 4, 4, D), 4, 8, 12), reverse=True
        ).flatten(1, 2)

    pairs = [(a.weight, b.weight) for a, b in parts]
    compare(f"Swin{' shifted' * shifted}", mixer, theirs, pairs, rand(B, 96, D), atol=1e-12)


# -------------------------------------------------------------------------------- local-attention
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_local_attention(causal, exact):
    """Fails if its windows are not what they are said to be: blocks and their neighbours, or
    exactly a band.
    """
    peer = pytest.importorskip("local_attention").LocalMHA(
        dim=D,
        window_size=8,
        heads=H,
        dim_head=D // H,
        causal=causal,
        exact_windowsize=exact,
        use_rotary_pos_emb=False,
    )
    peer = peer.double()
    pattern = Band(8, 8) if exact else Chunks(8, 1, 1)
    mixer = MultiHead(D, H, SoftmaxAttention(pattern), causal=causal).double()
    with torch.no_grad():
        for ours, theirs in zip(
            (mixer.q, mixer.k, mixer.v), peer.to_qkv.weight.chunk(3), strict=True
        ):
            ours.weight.copy_(theirs)
        copy(mixer.out, peer.to_out)
    mask = torch.arange(N) < torch.tensor([[N], [N - 13]])
    pairs = [(mixer.out.weight, peer.to_out.weight)]
    name = f"local-attention{' exact' * exact}{' causal' * causal}"
    for given, rows in (({}, None), ({"mask": mask}, mask)):
        compare(
            name,
            lambda x, g=given: mixer(x, **g),
            lambda x, g=given: peer(x, **g),
            pairs,
            rand(B, N, D),
            rows=rows,
            atol=1e-12,
        )


# -------------------------------------------------------------------------------- axial-attention
def test_axial_attention():
    """Fails if two passes are not its two attentions one after the other, along the rows first."""
    peer = (
        pytest.importorskip("axial_attention")
        .AxialAttention(dim=D, heads=H, num_dimensions=2, sum_axial_out=False)
        .double()
    )
    mixer = regard.create("axial_passes", dim=D, heads=H, width=8).double()
    pairs = []
    for ours, theirs in zip(
        (mixer.rows, mixer.columns), (a.fn for a in peer.axial_attentions), strict=True
    ):
        with torch.no_grad():
            theirs.to_out.bias.zero_()
            ours.q.weight.copy_(theirs.to_q.weight)
            for part, weight in zip((ours.k, ours.v), theirs.to_kv.weight.chunk(2), strict=True):
                part.weight.copy_(weight)
            copy(ours.out, theirs.to_out)
        pairs += [(ours.q.weight, theirs.to_q.weight), (ours.out.weight, theirs.to_out.weight)]

    def theirs_of(x):  # it attends along the first axis first
        return peer(x.unflatten(1, (-1, 8)).transpose(1, 2)).transpose(1, 2).flatten(1, 2)

    compare("axial-attention", mixer, theirs_of, pairs, rand(B, 48, D), atol=1e-12)


if __name__ == "__main__":
    for padded in (False, True):
        test_bigbird(padded)
        test_swin(padded)
        for other in (False, True):
            test_longformer(padded, other)
            test_local_attention(padded, other)
    test_axial_attention()
    for name, worst in measured.items():
        print(f"{name:32} {worst:.1e}")
