"""Sparse by content: what the generic tests cannot see."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing import spawn

import regard
from regard import MultiHead, Unsupported
from regard.attentions import LSHAttention
from regard.measure.count import FlopCounter
from regard.mixers import Sinkhorn
from regard.route import AngularHash, BlockSort, KMeans
from regard.route.lsh import chunk_by_bucket_rank, chunk_by_sorted_bucket
from regard.route.sort import sinkhorn
from regard.testing import max_change


def build(name, dim=8, heads=2, **arguments):
    torch.manual_seed(0)
    return regard.create(name, dim=dim, heads=heads, **arguments).double()


# ---------------------------------------------------------------------------------------- Reformer
def test_reformer_has_no_keys_of_its_own():
    """Fails if there is a projection to keys, or the rotations are not saved."""
    assert set(build("reformer").state_dict()) == {
        "q.weight",
        "v.weight",
        "out.weight",
        "inner.hashing.rotations",
    }
    with pytest.raises(ValueError, match="kv_heads"):
        MultiHead(8, 2, LSHAttention(AngularHash(2, 4, buckets=4, rounds=1)), kv_heads=1)


def test_hash_is_of_the_direction(rand):
    """Fails if buckets depend on the length of a vector, or opposite vectors share one."""
    hashing, x = AngularHash(2, 4, buckets=6, rounds=3).double(), rand(1, 2, 50, 4)
    assert hashing(x).shape == (1, 2, 3, 50) and len(hashing(x).unique()) == 6
    torch.testing.assert_close(hashing(x), hashing(3 * x))
    torch.testing.assert_close(hashing(-x), (hashing(x) + 3) % 6)


def test_rotations_come_from_their_seed():
    """Fails if they depend on, or disturb, the global generator."""
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a = AngularHash(2, 4, buckets=6, rounds=3, seed=5).rotations
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(a, AngularHash(2, 4, buckets=6, rounds=3, seed=5).rotations)
    assert not torch.equal(a, AngularHash(2, 4, buckets=6, rounds=3, seed=6).rotations)


@pytest.mark.parametrize("causal", [False, True])
def test_all_tokens_in_one_bucket(causal, rand):
    """Fails if a bucket of many chunks sees other tokens than its chunk and the one before, or
    itself."""
    mixer = build("reformer", chunk=4, buckets=4, rounds=2, causal=causal)
    x = rand(8) * 5 + 0.01 * rand(1, 19, 8)
    a = mixer.attention_map(x)
    at = torch.arange(19)
    reach = at[:, None] // 4 - at // 4
    seen = (reach >= 0) & (reach <= 1) & ((at[:, None] > at) if causal else (at[:, None] != at))
    seen[0, 0] |= causal  # the first token has nobody but itself
    assert torch.equal(a[0, 0] > 0, seen)


def test_a_token_sees_itself_only_where_there_is_no_other(rand):
    """Fails if a lonely token gives anything but its own value, in any precision, or others look
    at themselves."""
    x = torch.tensor([[1.0, 0], [-1, 0], [0.9, 0.1]], dtype=torch.float64)[None]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mixer = MultiHead(
            2, 1, LSHAttention(AngularHash(1, 2, buckets=2, rounds=1), chunk=8), project=False
        ).to(dtype)
        mixer.inner.hashing.rotations.copy_(torch.tensor([1.0, 0]).view(1, 1, 2, 1))
        want = torch.tensor([[0, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=dtype)
        assert torch.equal(mixer.attention_map(x.to(dtype))[0, 0], want)


@pytest.mark.parametrize("rounds", [1, 3])
def test_causal_reformer_on_longer_inputs(rounds, rand):
    """Fails if a later token moves the border of a chunk, for any cut."""
    mixer = build("reformer", chunk=4, buckets=4, rounds=rounds, causal=True)
    x = rand(1, 90, 8)
    for cut in (1, 17, 60, 89):
        assert max_change(mixer, x, slice(cut, 90), slice(0, cut)) == 0


def test_sorted_chunks_would_leak(rand):
    """Fails if the departure from the paper's causal form is for nothing: there, later tokens do
    move borders."""
    bucket = torch.randint(0, 4, (1, 1, 1, 40), generator=torch.Generator().manual_seed(0))
    later = bucket.clone()
    later[..., 30:] = 0
    sizes = {"buckets": 4, "chunk": 4}
    sorted_code, rank_code = (
        [f(x).code[..., :30] for x in (bucket, later)]
        for f in (
            lambda x: chunk_by_sorted_bucket(x, None, same_bucket=True, **sizes),
            lambda x: chunk_by_bucket_rank(x, None, **sizes),
        )
    )
    assert torch.equal(*rank_code) and not torch.equal(*sorted_code)


def test_the_stream_of_reformer_stays_small(rand):
    """Fails if keys that nobody can meet any more are kept."""
    mixer = build("reformer", chunk=4, buckets=4, rounds=2, causal=True)
    x, state, sizes = rand(2, 900, 8), None, []
    whole, parts = mixer(x), []
    for piece in x.split([300, 1, 1, 298, 7, 293], 1):
        y, state = mixer.stream(piece, state)
        parts.append(y)
        sizes.append(state.k.shape[2])
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    needed = 2 * 4 * 2 * 4  # rounds, buckets, chunks, tokens in each
    assert max(sizes) <= 2 * needed + 4


def test_more_rounds_find_more(rand):
    """Fails if rounds do not add up: the true nearest tokens are found more often."""
    x, found = rand(1, 128, 16), []
    near = (x[0] @ F.normalize(x[0], dim=-1).T).fill_diagonal_(-torch.inf).topk(4, -1).indices
    for rounds in (1, 4, 16):
        attention = LSHAttention(AngularHash(1, 16, buckets=8, rounds=rounds), chunk=16)
        a = MultiHead(16, 1, attention, project=False).double().attention_map(x)[0, 0]
        found.append((a.gather(-1, near) > 0).double().mean().item())
    assert found[0] < found[1] < found[2] and found[2] > 0.9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"buckets": 5}, "even"),
        ({"buckets": 0}, "buckets"),
        ({"rounds": 0}, "rounds"),
        ({"chunk": 0}, "chunk"),
        ({"seed": -1}, "seed"),
        ({"buckets": 4.0}, "buckets"),
    ],
)
def test_wrong_arguments_of_reformer(arguments, words):
    """Fails if nonsense is built, or the message does not name it."""
    with pytest.raises(ValueError, match=words):
        build("reformer", **arguments)


def test_reformer_refuses_what_would_leak():
    """Fails if chunks that see other buckets may be called causal."""
    with pytest.raises(Unsupported, match="same_bucket"):
        build("reformer", same_bucket=False, causal=True)


# ----------------------------------------------------------------------------- Routing Transformer
def test_centroids_move_in_training_only(rand):
    """Fails if evaluation changes them, training does not, or their length is not one."""
    mixer, x = build("routing", clusters=4, decay=0.5), rand(3, 20, 8)
    before = mixer.inner.route.centroids.clone()
    mixer.eval()(x)
    assert torch.equal(before, mixer.inner.route.centroids)
    mixer.train()(x)
    after = mixer.inner.route.centroids
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.norm(dim=-1), torch.ones(2, 4, dtype=torch.float64))
    assert not list(mixer.inner.route.parameters())


def test_centroids_follow_their_tokens():
    """Fails if a centroid does not go where its tokens are, or one without tokens moves."""
    route = KMeans(1, 2, clusters=3, decay=0.9, shared=True).double()
    route.centroids.copy_(torch.tensor([[[1.0, 0], [0, 1], [-1, 0]]]))
    x = torch.tensor([[2.0, 0.2], [3, 0.3], [0.1, 5]], dtype=torch.float64)[None, None]
    for _ in range(200):
        route(x, x, None)
    want = F.normalize(
        torch.stack((x[0, 0, 0], x[0, 0, 2], torch.tensor([-1.0, 0], dtype=torch.float64))), dim=-1
    )
    torch.testing.assert_close(route.centroids[0], want)


def test_padding_does_not_move_centroids(rand):
    """Fails if left-out tokens are averaged in."""
    mask = torch.arange(20).expand(2, 20) < torch.tensor([[13], [20]])
    x, moved_to = rand(2, 20, 8), []
    for other in (x, torch.where(mask[..., None], x, rand(2, 20, 8))):
        mixer = build("routing", clusters=4, decay=0.5)
        mixer(other, mask=mask)
        moved_to.append(mixer.inner.route.centroids)
    assert torch.equal(*moved_to)


def one_process(rank, folder, world):
    """Train on a part of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    mixer = build("routing", clusters=4, decay=0.5)
    for x in torch.load(f"{folder}/batches"):
        mixer(x.chunk(world)[rank])
    torch.save(mixer.inner.route.centroids, f"{folder}/centroids{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_move_centroids_as_one_does(rand, tmp_path):
    """Fails if processes drift apart, or each follows its own part of the batch only."""
    batches = [rand(4, 20, 8) for _ in range(3)]
    torch.save(batches, tmp_path / "batches")
    spawn(one_process, (str(tmp_path), 2), nprocs=2)
    alone = build("routing", clusters=4, decay=0.5)
    for x in batches:
        alone(x)
    for rank in (0, 1):
        torch.testing.assert_close(
            torch.load(tmp_path / f"centroids{rank}"),
            alone.inner.route.centroids,
            rtol=0,
            atol=1e-12,
        )


@pytest.mark.parametrize("clusters", [1, 7, 50])
def test_every_cluster_takes_its_share(clusters, rand):
    """Fails if clusters are not of one size, w = ⌈n / clusters⌉ of the real tokens of each
    example."""
    mask = torch.arange(20).expand(2, 20) < torch.tensor([[9], [20]])
    group = (
        KMeans(1, 4, clusters=clusters)
        .double()
        .eval()(rand(2, 1, 20, 4), rand(2, 1, 20, 4), mask)[0]
    )
    for side in (group.q, group.k):
        assert side.shape[2] == clusters
        for example, real in enumerate((9, 20)):
            assert ((side[example] >= 0).sum(-1) == -(-real // clusters)).all()
            assert side[example].max() < real


def test_one_cluster_is_full_attention(rand):
    """Fails if what all see is not softmax attention over layer-normed queries and keys."""
    mixer, x = build("routing", clusters=1), rand(2, 9, 8)
    q, k, v = mixer.project(x, None)
    q, k = (F.layer_norm(t, (4,)) for t in (q, k))
    want = mixer.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(mixer(x), want)


def test_routing_tells_how_full_its_clusters_are(rand):
    """Fails if the load or the tokens that nobody took are miscounted, or a head of such a token
    is not zero."""
    mixer, x = build("routing", clusters=5).eval(), rand(2, 20, 8)
    with regard.collect_aux() as notes:
        mixer(x)
    a = mixer.attention_map(x)
    (load,), (left_over,) = notes.all("cluster_load"), notes.all("in_no_cluster")
    assert load.shape == (2, 5)
    torch.testing.assert_close(load.sum(-1), torch.ones(2))
    assert left_over > 0
    torch.testing.assert_close(left_over, (a.sum(-1) == 0).float().mean())
    assert notes.loss() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clusters": 0}, "clusters"),
        ({"decay": 1.5}, "decay"),
        ({"decay": True}, "decay"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_arguments_of_routing(arguments, words):
    """Fails if nonsense is built, or the message does not name it."""
    with pytest.raises(ValueError, match=words):
        build("routing", **arguments)


def test_routing_says_why_it_is_not_causal():
    """Fails if the refusal has lost its reason."""
    with pytest.raises(Unsupported, match="nearest tokens of all"):
        build("routing", causal=True)


# ---------------------------------------------------------------------------------------- Sinkhorn
def test_sinkhorn_balances(rand):
    """Fails if many rounds do not make rows and columns sum to one, over what is kept."""
    keep = torch.ones(6, 6, dtype=torch.bool)
    keep[4] = keep[:, 4] = False
    s = sinkhorn(3 * rand(6, 6), keep, 200)
    want = (torch.arange(6) != 4).double()
    for dim in (0, 1):
        torch.testing.assert_close(s.sum(dim), want)
    assert torch.equal(s > 0, keep)


def test_causal_balancing_looks_at_no_later_row(rand):
    """Fails if the column sums of a causal S count rows to come."""
    keep, logits = torch.ones(8, 8, dtype=torch.bool).tril(-1), rand(8, 8)
    s = sinkhorn(logits, keep, 5, causal=True)
    assert not s.triu().any() and (s.tril(-1)[1:].sum(-1) > 0).all()
    later = torch.cat((logits[:5], 9 * rand(3, 8)))
    assert torch.equal(sinkhorn(later, keep, 5, causal=True)[:5], s[:5])
    assert not torch.equal(sinkhorn(later, keep, 5)[:5], sinkhorn(logits, keep, 5)[:5])


@pytest.mark.parametrize("causal", [False, True])
def test_extreme_logits_have_finite_gradients(causal, rand):
    """Fails if a large sum of tokens, or float32, breaks the logarithms."""
    logits = (1e4 * rand(2, 1, 9, 9)).float().requires_grad_()
    keep = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    keep = keep.tril(-1) if causal else keep
    s = sinkhorn(logits, keep, 6, causal=causal)
    (grad,) = torch.autograd.grad((s * rand(2, 1, 9, 9).float()).sum(), logits)
    assert s.isfinite().all() and grad.isfinite().all()


def test_a_hard_order_moves_whole_blocks(rand):
    """Fails if a sharp sorting does not show each block one other block, with the tokens that it
    has."""
    mixer = build("sinkhorn", heads=1, length=12, block=4, temperature=0.01, iterations=20).eval()
    with torch.no_grad():
        for p in mixer.sort.parameters():
            p.zero_()
        mixer.sort.up.weight.copy_(torch.eye(8))
        mixer.sort.down.weight[[2, 0, 1], [0, 1, 2]] = (
            1.0  # the first width asks for block 2, and so on
        )
    x = rand(1, 10, 8) * 0.01
    for block in range(3):
        x[0, 4 * block, block] += 5
    seen = mixer.attention_map(x)[0, 0] > 1e-6
    blocks = torch.arange(10) // 4
    want = (blocks[:, None] == blocks) | ((blocks[:, None] + 2) % 3 == blocks)
    assert torch.equal(seen, want)


def test_noise_is_drawn_in_training_only(rand):
    """Fails if evaluation is noisy, the noise is always the same, or it touches the global
    generator."""
    mixer, x = build("sinkhorn", length=20, block=4, seed=3), rand(2, 20, 8)
    calm = mixer.eval()(x)
    assert torch.equal(calm, mixer(x))
    before = torch.random.get_rng_state()
    first, second = mixer.train()(x), mixer(x)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(first, second) and not torch.equal(first, calm)
    again = build("sinkhorn", length=20, block=4, seed=3)
    assert torch.equal(again(x), first)
    resumed = build("sinkhorn", length=20, block=4, seed=3)
    resumed.load_state_dict(again.state_dict())
    assert torch.equal(resumed(x), second)
    assert not torch.equal(build("sinkhorn", length=20, block=4, seed=4)(x), first)


def test_causal_sinkhorn_does_not_look_ahead(rand):
    """Fails if the sorting or a sorted block lets a later token through, for any cut."""
    mixer, x = build("sinkhorn", length=50, block=6, causal=True).eval(), rand(1, 45, 8)
    for cut in (1, 6, 7, 23, 44):
        assert max_change(mixer, x, slice(cut, 45), slice(0, cut)) == 0


def test_the_first_block_has_no_past(rand):
    """Fails if causal tokens of the first block see more than their own block."""
    a = build("sinkhorn", length=20, block=5, causal=True).eval().attention_map(rand(1, 18, 8))
    assert (
        torch.equal(a[0, 0, :5, :5] > 0, torch.ones(5, 5).tril() > 0) and not a[0, 0, :5, 5:].any()
    )
    assert (a[0, 0, 10, :11] > 0).all() and not a[0, 0, 10, 11:].any()


def test_a_stream_longer_than_the_sort_network_raises(rand):
    """Fails if tokens beyond the last block are taken without a word."""
    mixer = build("sinkhorn", length=8, block=4, causal=True).eval()
    _, state = mixer.stream(rand(1, 7, 8))
    with pytest.raises(ValueError, match="8 tokens"):
        mixer.stream(rand(1, 2, 8), state)


def test_sortcut_shows_the_first_sorted_blocks_only(rand):
    """Fails if SortCut sees its own block, or more than it was given."""
    x = rand(1, 12, 8)
    mixer = build("sinkhorn", length=12, block=4, cut=1).eval()
    a = mixer.attention_map(x)
    s = mixer.sort(x.unflatten(1, (3, 4)).sum(2), torch.ones(1, 3, dtype=torch.bool))
    slots = a.unflatten(-1, (3, 4)).sum(-2)  # the weight of a slot, times the sum of its row of S
    torch.testing.assert_close(slots.sum(-1), s[:, :, :1].sum(-1).expand(1, 2, 12))
    assert (a > 0).all()
    more, all_of_it = (build("sinkhorn", length=12, block=4, cut=cut).eval()(x) for cut in (9, 3))
    torch.testing.assert_close(more, all_of_it)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 0}, "length"),
        ({"block": 0}, "block"),
        ({"cut": 0}, "cut"),
        ({"temperature": 0}, "temperature"),
        ({"iterations": -1}, "iterations"),
        ({"seed": 1.5}, "seed"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_wrong_arguments_of_sinkhorn(arguments, words):
    """Fails if nonsense is built, or the message does not name it."""
    with pytest.raises(ValueError, match=words):
        build("sinkhorn", **{"length": 16, **arguments})


def test_sinkhorn_refuses_what_does_not_fit():
    """Fails if SortCut may be causal, or a sort network for something else is taken."""
    with pytest.raises(Unsupported, match="SortCut"):
        build("sinkhorn", length=16, block=4, cut=2, causal=True)
    with pytest.raises(ValueError, match="causal"):
        Sinkhorn(8, 2, BlockSort(8, 2, blocks=4), causal=True)


# -------------------------------------------------------------------------------------------- cost
@pytest.mark.parametrize(
    ("name", "arguments", "most"),
    [
        ("reformer", lambda n: {}, 2.1),
        ("reformer", lambda n: {"causal": True}, 2.3),
        ("routing", lambda n: {"clusters": int(n**0.5)}, 3.0),
        ("sinkhorn", lambda n: {"length": n, "block": int(n**0.5)}, 3.0),
        ("sinkhorn", lambda n: {"length": n, "cut": 2}, 2.6),
    ],
    ids=["reformer", "reformer-causal", "routing", "sinkhorn", "sortcut"],
)
def test_products_grow_as_promised(name, arguments, most):
    """Fails if twice the tokens are more than so many times the products: n for Reformer, n √n
    for the others."""
    counts = []
    for n in (4096, 8192):
        mixer = regard.create(name, dim=16, heads=2, **arguments(n)).eval()
        with FlopCounter() as counter, torch.no_grad():
            mixer(torch.randn(1, n, 16, generator=torch.Generator().manual_seed(0)))
        counts.append(counter.total)
    assert counts[0] > 0
    assert counts[1] < most * counts[0]


@pytest.mark.parametrize("causal", [False, True])
def test_whole_blocks_are_what_a_mask_of_all_gives(causal, rand):
    """Fails if the fused way of whole blocks, outputs or gradients, is another than that with
    shares."""
    mixer, given, found = (
        build("sinkhorn", length=24, block=4, causal=causal).eval(),
        rand(2, 24, 8),
        [],
    )
    for mask in (None, torch.ones(2, 24, dtype=torch.bool)):
        x = given.clone().requires_grad_()
        y = mixer(x, mask=mask)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
