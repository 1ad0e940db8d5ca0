"""A cache that grows in place is a value all the same: branches, beams, copies and graphs find
what they left."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import regard
from regard import Band, Causal, Chunks, Full, Keys, MultiHead, Queries, SoftmaxAttention
from regard.attentions.kv_cache import KVCache, append_rows
from regard.state import detach, map_tensors, state_bytes, take

N = 300
PATTERNS = {
    "dense": Full(),
    "window": Band(20, 0),
    "sinks": Band(20, 0) | Keys(0, 3),
    "chunks": Chunks(30),
}


@pytest.fixture(params=PATTERNS)
def mixer(request):
    """A stream in float64 for each way that a cache grows and forgets."""
    torch.manual_seed(0)
    return MultiHead(8, 2, SoftmaxAttention(PATTERNS[request.param]), causal=True).double()


def run(mixer, x, state=None, sizes=(1,)):
    """The outputs and the state after x, in chunks of these sizes, again and again."""
    parts, at, turn = [], 0, 0
    while at < x.shape[1]:
        y, state = mixer.stream(x[:, at : at + sizes[turn % len(sizes)]], state)
        parts.append(y)
        at, turn = at + y.shape[1], turn + 1
    return torch.cat(parts, 1), state


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(1,), (70, 1, 1, 1), (3, 1, 64, 1, 65)])
def test_the_whole_again(mixer, sizes, rand):
    """Fails if a row is lost or written over, in chunks of any size."""
    x = rand(2, N, 8)
    with torch.no_grad():
        same(run(mixer, x, sizes=sizes)[0], mixer(x))


@pytest.mark.parametrize("start", [1, 64, 101])
def test_branches_do_not_see_each_other(mixer, start, rand):
    """Fails if one continuation of a state writes into what another reads: both as if they were
    alone, in turns, and back."""
    x, a, b = rand(2, start, 8), rand(2, 90, 8), rand(2, 90, 8)
    with torch.no_grad():
        _, state = run(mixer, x)
        wants = [mixer(torch.cat((x, more), 1))[:, start:] for more in (a, b)]
        here = [state, state]
        for i in range(90):
            for which, more in enumerate((a, b)):
                y, here[which] = mixer.stream(more[:, i : i + 1], here[which])
                same(y, wants[which][:, i : i + 1])
        same(run(mixer, a, state)[0], wants[0])  # long after


def test_beams(mixer, rand):
    """Fails if reordered, dropped and repeated examples go on with the rows of others."""
    x, rows = rand(3, N, 8), torch.tensor([2, 0, 0])
    with torch.no_grad():
        whole, state = x[:, :1], None
        for i in range(N - 1):
            y, state = mixer.stream(whole[:, -1:], state)
            if i % 7 == 3:
                whole, state = whole[rows], take(state, rows)
            whole = torch.cat((whole, x[:, i + 1 : i + 2]), 1)
        y, _ = mixer.stream(whole[:, -1:], state)
        same(y, mixer(whole)[:, -1:])


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:1],
        lambda t: t[:1].expand(3, *t.shape[1:]),
        lambda t: t[1:],
        torch.Tensor.clone,
        torch.Tensor.detach,
    ],
)
def test_views_of_a_state(mixer, view, rand):
    """Fails if a view of some examples is written where the others still go on, or an expanded
    one where examples are one."""
    x, more = rand(2, 80, 8), rand(2, 30, 8)
    with torch.no_grad():
        _, state = run(mixer, x)
        other, mine = map_tensors(view, state), view(torch.cat((x, more), 1))
        got, _ = run(mixer, mine[:, 80:], other)
        same(got, mixer(mine)[:, 80:])
        same(run(mixer, more, state)[0], mixer(torch.cat((x, more), 1))[:, 80:])


def test_gradients_through_a_stream(mixer, rand):
    """Fails if a graph finds rows that were written since, or a gradient stops at a chunk."""
    x = rand(1, 90, 8).requires_grad_()
    with torch.no_grad():
        _, begun = run(mixer, x[:, :50])
    y, state = run(mixer, x[:, 50:], begun)
    with torch.no_grad():
        run(mixer, x[:, 50:], begun)  # would write into what the graph holds
        run(mixer, x[:, 50:], state)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    z, state = run(mixer, x, sizes=(50, 1, 1))
    same(y, z[:, 50:])
    cut = x.detach().requires_grad_()
    (want,) = torch.autograd.grad(
        mixer(torch.cat((x[:, :50].detach(), cut[:, 50:]), 1))[:, 50:].square().sum(), cut
    )
    # keys and values of the first 50 were made without a graph, and so are constants in both
    same(got[:, 50:], want[:, 50:])
    (got,) = torch.autograd.grad(z.square().sum(), x)
    whole = x.detach().requires_grad_()
    (want,) = torch.autograd.grad(mixer(whole).square().sum(), whole)
    same(got, want)


def test_modes(mixer, rand):
    """Fails if what inference mode made cannot be gone on with outside, or the other way round."""
    x = rand(1, 90, 8)
    with torch.no_grad():
        want = mixer(x)
        with torch.inference_mode():
            a, state = run(mixer, x[:, :30])
        b, state = run(mixer, x[:, 30:60], state)
        with torch.inference_mode():
            c, state = run(mixer, x[:, 60:], detach(state))
    same(torch.cat((a, b, c), 1), want)


def test_copies(mixer, rand):
    """Fails if a copied, or a saved and loaded state, shares rows with the first."""
    x, more = rand(1, 80, 8), rand(1, 40, 8)
    with torch.no_grad():
        _, state = run(mixer, x)
        file = io.BytesIO()
        torch.save(tuple(state), file)
        file.seek(0)
        loaded = KVCache(*torch.load(file, weights_only=False))
        plain = KVCache(
            *(
                torch.from_numpy(t.numpy().copy()) if isinstance(t, torch.Tensor) else t
                for t in state
            )
        )
        want = mixer(torch.cat((x, more), 1))[:, 80:]
        for each in (copy.deepcopy(state), loaded, plain, state, copy.copy(state)):
            run(mixer, rand(1, 40, 8), each)
            same(run(mixer, more, each)[0], want)


def test_threads(mixer, rand):
    """Fails if two threads that go on from one state both take its free rows."""
    x, parts = rand(1, 80, 8), rand(8, 40, 8)
    with torch.no_grad():
        _, state = run(mixer, x)
        want = [mixer(torch.cat((x, part[None]), 1))[:, 80:] for part in parts]

    def go(part):
        with torch.no_grad():
            return run(mixer, part[None], state)[0]

    with ThreadPoolExecutor(8) as pool:
        for got, expected in zip(pool.map(go, parts), want, strict=True):
            same(got, expected)


def test_a_token_is_written_and_the_rest_is_not_copied():
    """Fails if the cache moves at every token, or grows to more than about half again of what it
    holds."""
    mixer = regard.create("vanilla", dim=8, heads=2, causal=True)
    moved, last = 0, None
    with torch.no_grad():
        _, state = mixer.stream(torch.randn(1, 500, 8))
        for _ in range(1000):
            _, state = mixer.stream(torch.randn(1, 1, 8), state)
            moved, last = moved + (state.k.data_ptr() != last), state.k.data_ptr()
    assert moved <= 5 and len(state.positions) == 1500 and state.positions[-1] == 1499
    assert state_bytes(state) < 1.6 * (2 * state.k.nbytes + 2 * state.positions.nbytes)


def test_a_graph_is_never_written_into():
    """Fails if rows are written in place where gradients may follow, or types and sizes differ."""
    old, new, at = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 1, 4), np.arange(3)
    with torch.no_grad():
        (mine,), at, room = append_rows([old], [new], at, 4, None)
    assert room is not None and mine.shape[2] == 4
    (other,), _, none = append_rows([mine], [new], at, 5, room)
    assert none is None and other.data_ptr() != mine.data_ptr() and room[0] == 4
    with torch.no_grad():
        (again,), at, _ = append_rows([mine], [new], at, 5, room)
        assert (
            again.data_ptr() == mine.data_ptr() and room[0] == 5 and at.tolist() == [0, 1, 2, 3, 4]
        )
        assert append_rows([again], [new.double()], at, 6, room)[2] is None
        with pytest.raises(RuntimeError, match="Sizes of tensors"):
            append_rows([again], [new[:, :1]], at, 6, room)


@pytest.mark.parametrize(
    "pattern",
    [
        Full(),
        Causal(),
        Band(5, 0),
        Band(5, 9) & Causal(),
        Chunks(4, back=1),
        Band(9) & Chunks(7),
        Band(0, 0),
    ],
)
def test_since_is_what_is_allowed(pattern):
    """Fails if a query is given keys that it does not see, or not all that it does."""
    for q in (0, 1, 5, 6, 27, 28, 40):
        seen = pattern.allows(torch.tensor(q), torch.arange(q + 1))
        assert seen.tolist() == [k >= pattern.first_visible_key(q) for k in range(q + 1)]


@pytest.mark.parametrize(
    "pattern",
    [Band(5, 0, 2), Band(5, 0) | Keys(0, 1), ~Band(5, 0), Queries(0, 4), Band(5, 0) & Keys(0, 9)],
)
def test_since_is_not_claimed(pattern):
    """Fails if a pattern with gaps is taken for one without."""
    assert pattern.first_visible_key(7) is None
