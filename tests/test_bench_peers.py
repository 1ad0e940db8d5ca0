"""Adapters of peer packages: they run with the right shapes and do the work they are timed for."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from regard.backends.flex import block_mask
from regard.bench.cell import DENSE, BenchCell, prepare_call
from regard.bench.contenders import RecipeContender, build_mixer
from regard.bench.peers import (
    PEERS,
    MatchedContender,
    PeerContender,
    ProductKeysContender,
    peer_groups,
)
from regard.cli.parsing import parse_spec
from regard.errors import Unsupported
from regard.show.build import pattern_of

LENGTH = {"transformers BigBird": 1024, "transformers Longformer": 512}  # that they take
COMPILED = [name for name in PEERS if name.startswith("FlexAttention")]


def build_peer(name, mode="forward", causal=False, length=None):
    """Return the call of a peer at a length it supports; skip if it is not installed."""
    found = PEERS[name]
    pytest.importorskip(found.module)
    cell = BenchCell(
        found.scope, mode, length or LENGTH.get(name, 256), heads=2, head_dim=8, causal=causal
    )
    return PeerContender(name).build(cell), cell


@pytest.mark.parametrize("name", [name for name in PEERS if name not in COMPILED])
def test_runs(name):
    """Fails if a peer gives another shape than ours, something that is not finite, or no
    gradients although it says so."""
    torch.manual_seed(0)
    theirs, cell = build_peer(name, "training")
    mine = next(
        group[0] for group in peer_groups([PEERS[name].recipe]) if PeerContender(name) in group
    )
    y, want = theirs.call(), mine.build(cell).call()
    assert y.numel() == want.numel() and y.shape[0] == want.shape[0] and y.isfinite().all()
    y.sum().backward()
    assert theirs.leaves[0].grad is not None and theirs.leaves[0].grad.isfinite().all()


@pytest.mark.parametrize(
    "name",
    [name for name in PEERS if name not in COMPILED and "causal" not in PEERS[name].limitations],
)
def test_runs_causal(name):
    """Fails if a peer is said to have a causal form and has none."""
    theirs, _ = build_peer(name, causal=True)
    with torch.no_grad():
        assert theirs.call().isfinite().all()


def test_flex_is_our_pattern():
    """Fails if FlexAttention, here not compiled, is given another pattern than ours."""
    cell = BenchCell("kernel", "forward", 300, heads=2, head_dim=8)
    mixer = build_mixer(parse_spec("local:window=128"), cell)
    q, k, v = torch.randn(3, 1, 2, 300, 8).unbind(0)
    want = mixer.inner(q, k, v)[0]
    blocks = block_mask(pattern_of(mixer), 300, 300)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("causal", "length", "same"), [(False, 384, True), (True, 300, True), (False, 300, False)]
)
def test_local_attention_is_ours_with_its_weights(causal, length, same):
    """Fails if the windows that are measured beside each other are not the same, or no longer
    differ where a note says so."""
    torch.manual_seed(0)
    theirs, cell = build_peer("local-attention LocalMHA", length=length, causal=causal)
    ours = MatchedContender("local", "local-attention LocalMHA").build(cell)
    layer, mixer = (run.call.__closure__[0].cell_contents for run in (theirs, ours))
    with torch.no_grad():
        for mine, other in zip(
            (mixer.q, mixer.k, mixer.v), layer.to_qkv.weight.chunk(3), strict=True
        ):
            mine.weight.copy_(other)
        mixer.out.weight.copy_(layer.to_out.weight)
        x = torch.randn(1, length, cell.dim)
        assert torch.allclose(mixer(x), layer(x), rtol=0, atol=1e-5) == same


@pytest.mark.parametrize("causal", [False, True])
def test_fast_transformers_is_our_linear_attention(causal):
    """Fails if the linear attention that is the bar for ours computes something else."""
    theirs, cell = build_peer("pytorch-fast-transformers linear, kernel", "training", causal)
    q, k, v = theirs.leaves
    want = theirs.call().transpose(1, 2)
    mixer = MatchedContender("linear", "pytorch-fast-transformers linear, kernel").recipe(cell)
    inner = build_mixer(mixer.part, cell).inner
    got = inner(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_fnet_is_ours():
    """Fails if the transforms differ."""
    theirs, cell = build_peer("transformers FNet")
    ours = MatchedContender("fnet", "transformers FNet").build(cell)
    layer, mixer = theirs.call.__closure__[0].cell_contents, ours.call.__closure__[0].cell_contents
    x = torch.randn(1, 256, cell.dim)
    torch.testing.assert_close(mixer(x), layer(x), rtol=1e-4, atol=1e-3)


def test_what_a_peer_cannot_do_is_said():
    """Fails if a peer is run where it has no answer: no causal form, no gradients, another
    level, no stream, not installed."""
    layer = BenchCell("layer", "forward", 512, causal=True)
    for name, cell, words in (
        ("transformers Longformer", layer, "no causal form"),
        (
            "FlexAttention window",
            BenchCell("kernel", "training", 256),
            "no backward pass on the CPU",
        ),
        (
            "FlexAttention window",
            BenchCell("layer", "forward", 256),
            "measured with --scope kernel",
        ),
        ("local-attention LocalMHA", BenchCell("layer", "decode", 256), "no state"),
        ("transformers BigBird", BenchCell("layer", "forward", 100), "multiples of 64"),
    ):
        pytest.importorskip(PEERS[name].module)
        with pytest.raises(Unsupported, match=words):
            PeerContender(name).build(cell)


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    """Fails if a peer that is not there is a traceback."""
    monkeypatch.setitem(
        PEERS, "gone", replace(PEERS["linformer LinformerSelfAttention"], module="no_such_package")
    )
    with pytest.raises(ImportError, match="pip install linformer"):
        PeerContender("gone").build(BenchCell("layer", "forward", 64))


def test_groups():
    """Fails if ours does not stand first, or a recipe's peers of two levels share a group."""
    found = peer_groups()
    assert len(found) == len({(each[0].label, each[1].scopes) for each in found})
    assert all(
        not group[0].is_peer and all(other.is_peer for other in group[1:]) for group in found
    )
    assert {other.label for group in found for other in group[1:]} == set(PEERS)
    assert [group[0].label for group in peer_groups(["local"])] == ["local", "local"]
    assert DENSE not in {group[0].label for group in found}
    for group in found:  # times are kept by label: two alike would be one
        assert len({each.label for each in group}) == len(group)


def test_sizes_follow_the_length():
    """Fails if ours has other buckets or clusters than the peer at another length."""
    for n in (1024, 4096):
        cell = BenchCell("layer", "forward", n)
        assert (
            MatchedContender("reformer", "reformer-pytorch").recipe(cell).label
            == f"reformer:buckets={n // 64}:chunk=64:rounds=4"
        )
        assert (
            MatchedContender("routing", "routing-transformer").recipe(cell).label
            == f"routing:clusters={n // 128}"
        )
    assert isinstance(
        MatchedContender("local", "local-attention LocalMHA").recipe(cell), RecipeContender
    )


def test_product_keys_is_a_layer():
    """Fails if the one that is no mixer cannot be timed."""
    assert (
        prepare_call(
            ProductKeysContender(), BenchCell("layer", "forward", 8, heads=1, head_dim=8)
        )()
        is not None
    )
