"""A sequence on two and on four real processes: what one process gives, forward and backward; and
no byte more than needed."""

from datetime import timedelta
from itertools import accumulate, pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
from regard import parallel, registry
from regard.parallel.exchange_plan import exchange_plan, gather_keys_pattern, visible_keys
from regard.pattern import Band, Causal, Chunks, Full, Global, KeyPhase, PerHead, RandomBlocks
from sequence_parallel_cases import BIG, DIM, FORMS, HEADS, built, outcome, padding, stack, tokens

N = 37  # tokens: no number of processes divides them
SIZES = (5, 0, 25, 7)  # of slices, by hand, for four processes
FOUR = (
    "window",
    "dense-causal",
    "big-sparse",
    "shared-keys-causal",
    "alibi",
    "rope-causal",
    "linear",
    "performer",
    "performer-causal",
    "efficient",
    "retnet",
)
COUNTED = {
    "window": Band(12, 12),
    "causal window": Band(12, 0),
    "bigbird": BIG,
    "dense": Full(),
    "causal": Causal(),
}
LONG = 200
pytestmark = pytest.mark.slow


def recipes():
    """Every recipe, in each form, that may run on slices: tiny, and as it is used and not
    trained."""
    for name in registry.list_recipes():
        for causal in registry.get_recipe(name).causal_options():
            torch.manual_seed(0)
            mixer = registry.get_recipe(name).example(causal=causal).double().eval()
            yield f"{name}{'-causal' if causal else ''}", mixer


def run(rank, world, path):
    """All cases, in one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    found = {}

    def case(name, module, sizes=None, n=N, **given):
        cut = parallel.local_slice if sizes is None else lambda t: t.split(sizes, 1)[rank]
        found[name] = outcome(
            module, *map(cut, tokens(n)), **{key: cut(t) for key, t in given.items()}
        )
        parallel.all_reduce_gradients(module)
        found[name]["parameters"] = [p.grad for p in module.parameters()]

    for name in FORMS if world == 2 else FOUR:
        spread = spread_again(name)
        case(name, spread)
        if spread.can.mask:
            case(f"{name}-mask", spread_again(name), mask=padding(N))
        if world == 4:
            case(f"{name}-sizes", spread_again(name), SIZES)
            case(f"{name}-short", spread_again(name), n=3)
    for causal in (False, True):
        case(f"stack-{causal}", stack(causal, parallel.sequence_parallel))
    if world == 2:
        for name, mixer in recipes():
            try:
                spread = parallel.sequence_parallel(mixer)
            except regard.Unsupported as refusal:
                found[f"refused-{name}"] = str(refusal)
            else:
                case(f"recipe-{name}", spread, n=19)
        found["group"] = in_a_group(rank)
    found["errors"] = errors(rank)
    found["alone"] = alone(rank)
    found["bytes"] = {name: traffic(pattern) for name, pattern in COUNTED.items()}
    torch.save(found, f"{path}/{rank}")
    dist.destroy_process_group()


def spread_again(name):
    return parallel.sequence_parallel(built(name))


def in_a_group(rank):
    """A group of one process is one process; all make it."""
    groups = [dist.new_group([r]) for r in range(2)]
    x, weight = tokens(N)
    return outcome(parallel.sequence_parallel(built("window"), groups[rank]), x, weight)


def errors(rank):
    """What was raised, in each process, where the processes do not fit together."""
    spread, said = spread_again("window"), []
    calls = [
        lambda: spread(tokens(6)[0][: 2 - rank % 2]),
        lambda: spread(tokens(6)[0]) if rank else torch.no_grad()(spread)(tokens(6)[0]),
        lambda: spread_again("cosine")(tokens(35)[0]),
        lambda: parallel.sequence_parallel(spread),
        lambda: spread(tokens(6)[0], global_attention_mask=torch.ones(2, 6, dtype=torch.bool)),
    ]
    for call in calls:
        with pytest.raises((ValueError, regard.Unsupported)) as caught:
            call()
        said.append(str(caught.value))
    return said


def alone(rank):
    """What was raised where one process alone is given something wrong; and that all go on after
    that."""
    spread, said, (x, weight) = spread_again("window"), [], tokens(6)
    one = rank == 1
    for call in (
        lambda: spread(x[..., :4] if one else x),
        lambda: spread(x, mask=torch.ones(1, 6, dtype=torch.bool) if one else None),
        lambda: spread(
            x, global_attention_mask=torch.ones(2, 6, dtype=torch.bool) if one else None
        ),
        lambda: spread_again("dense" if one else "window")(x),
        lambda: spread_again("window").to(torch.half if one else torch.bfloat16)(
            x.to(torch.half if one else torch.bfloat16)
        ),
    ):
        with pytest.raises((ValueError, RuntimeError, regard.Unsupported)) as caught:
            call()
        said.append(str(caught.value))
    outcome(spread, x, weight)
    return said


def traffic(pattern):
    """Bytes sent and got, forward and backward, in float32; and the most that came at once."""
    mixer = parallel.sequence_parallel(
        regard.MultiHead(DIM, HEADS, regard.SoftmaxAttention(pattern))
    )
    x = parallel.local_slice(tokens(LONG)[0].float()).requires_grad_()
    with parallel.count_traffic() as ahead:
        y = mixer(x)
    with parallel.count_traffic() as back:
        y.sum().backward()
    return ahead.sent, ahead.received, back.sent, back.received, ahead.largest, back.largest


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    """What each of so many processes found."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(run, (request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(request.param)]


def same(got, want):
    for key in ("y", "x"):
        torch.testing.assert_close(torch.cat([part[key] for part in got], 1), want[key])
    for part in got:
        for a, b in zip(part["parameters"], want["parameters"], strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("name", FORMS)
def test_slices_are_the_whole(found, name):
    """Fails if a key that a query sees stays away, if positions begin anew in a slice, if a state
    is not passed on, or if the gradients of what was sent do not come back; with padding over
    several slices, and with slices of any size."""
    if len(found) == 4 and name not in FOUR:
        pytest.skip("two processes are enough for this one")
    cases = [
        key for key in found[0] if key in (name, f"{name}-mask", f"{name}-sizes", f"{name}-short")
    ]
    assert len(cases) >= (3 if len(found) == 4 else 1)
    for case in cases:
        n = 3 if case.endswith("-short") else N
        mask = padding(N) if case.endswith("-mask") else None
        same([part[case] for part in found], outcome(built(name), *tokens(n), mask))


@pytest.mark.parametrize("causal", [False, True])
def test_a_stack_of_blocks_is_the_whole(found, causal):
    """Fails if a second layer meets the first one's messages, going on or going back."""
    same([part[f"stack-{causal}"] for part in found], outcome(stack(causal), *tokens(N)))


def test_every_recipe_runs_on_slices_or_says_why(found):
    """Fails if a recipe gives something else on slices than on the whole, or is refused without a
    reason."""
    if len(found) != 2:
        pytest.skip("two processes are enough for all recipes")
    ran = 0
    for name, mixer in recipes():
        refusal = found[0].get(f"refused-{name}")
        if refusal is None:
            same([part[f"recipe-{name}"] for part in found], outcome(mixer, *tokens(19)))
            ran += 1
        else:
            assert (
                "does not support sequence parallelism" in refusal
                and len(refusal.split(": ", 1)[1]) > 20
            )
    assert ran > 60
    for part in found:
        same([part["group"]], outcome(built("window"), *tokens(N)))


def test_what_does_not_fit_raises_in_all_processes(found):
    """Fails if one process raises and the others wait for it, or if the message does not name what
    was wrong."""
    said = found[0]["errors"]
    assert all(part["errors"] == said for part in found)
    for text, word in zip(
        said,
        ("batch size", "record gradients", "length=40", "already", "global_attention_mask"),
        strict=True,
    ):
        assert word in text


def test_what_one_process_refuses_ends_the_others_too(found):
    """Fails if the others wait for a process that was given something wrong, or are not told which
    one it was."""
    for text, word in zip(
        found[1]["alone"],
        ("width 8", "shape (2, 6)", "global_attention_mask", "built differently", "the dtype of"),
        strict=True,
    ):
        assert word in text
    for rank, part in enumerate(found):
        if rank != 1:
            assert all("Ranks [1]" in text and "refused" in text for text in part["alone"][:3])
            assert part["alone"][3:] == found[1]["alone"][3:]


@pytest.mark.parametrize("name", COUNTED)
def test_only_the_keys_that_are_seen_travel(found, name):
    """Fails if a byte more is sent than the keys that the dense mask names, with their values: once
    going on; going back once more, and their gradients."""
    world, mask = len(found), COUNTED[name].dense(LONG)
    cuts = [slice(a, b) for a, b in _cuts(world)]
    needed = torch.tensor(
        [
            [0 if r == s else int(mask[cuts[r], cuts[s]].any(0).sum()) for s in range(world)]
            for r in range(world)
        ]
    )
    needed *= 2 * 2 * DIM * 4  # keys and values, of two examples, DIM numbers of four bytes
    for rank, part in enumerate(found):
        sent, got = int(needed[:, rank].sum()), int(needed[rank].sum())
        assert part["bytes"][name][:4] == (sent, got, sent + got, sent + got)


@pytest.mark.parametrize("name", COUNTED)
def test_keys_come_from_one_process_at_a_time(found, name):
    """Fails if more is held at once than the keys of one other process, or the gradients for
    one."""
    world, mask = len(found), COUNTED[name].dense(LONG)
    cuts = [slice(a, b) for a, b in _cuts(world)]
    for rank, part in enumerate(found):
        others = [r for r in range(world) if r != rank]
        keys, given = (
            max(int(mask[cuts[a], cuts[b]].any(0).sum()) for a, b in pairs)
            for pairs in ([(rank, r) for r in others], [(r, rank) for r in others])
        )
        assert part["bytes"][name][4:] == tuple(
            2 * 2 * DIM * 4 * n for n in (keys, max(keys, given))
        )


def _cuts(world):
    ends = list(
        accumulate((len(part) for part in torch.arange(LONG).tensor_split(world)), initial=0)
    )
    return list(pairwise(ends))


PATTERNS = [
    Band(3, 9),
    Band(4, 4, 7),
    Chunks(16, back=1),
    Global(5) | Band(2, 0),
    KeyPhase(8, 6),
    RandomBlocks(8, 2, 40),
    ~Band(60, 60),
    BIG & Causal(),
    PerHead((Band(2, 2), KeyPhase(5, 3))),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("ends", [(0, 70, 200, 200, 233), (0, 1, 2), (0, 128, 256)], ids=str)
def test_which_keys_are_seen_is_exact(pattern, ends):
    """Fails if a key is missed or asked for in vain, if what one process gives is not what the
    other takes, or if the moved pattern allows other pairs, or calls a rectangle empty or full that
    is not."""
    mask = pattern.dense(ends[-1])
    cuts = [slice(a, b) for a, b in pairwise(ends)]
    plans = [exchange_plan(pattern, ends, rank, HEADS) for rank in range(len(cuts))]
    for r, mine in enumerate(cuts):
        for s, theirs in enumerate(cuts):
            want = mask[..., mine, theirs].any(-2)
            assert torch.equal(visible_keys(pattern, ends[r : r + 2], ends[s : s + 2]), want)
            assert (
                r == s
                or plans[s].send_counts[r]
                == plans[r].receive_counts[s]
                == want.expand(HEADS, -1).sum()
            )
        at = plans[r].positions
        moved = gather_keys_pattern(pattern, mine.start, at)
        n, m = mine.stop - mine.start, len(at)
        dense = moved.dense(n, m)
        assert torch.equal(dense, mask[..., mine, at])
        if n and m:
            edges = [torch.tensor([0, n // 2, 0]), torch.tensor([n - 1, n - 1, n // 3])]
            edges += [torch.tensor([0, m // 2, m // 3]), torch.tensor([m - 1, m - 1, m // 2])]
            some, every = moved.block(*edges)
            for i, (a, b, c, d) in enumerate(zip(*(e.tolist() for e in edges), strict=True)):
                part = dense[..., a : b + 1, c : d + 1]
                assert (some[..., i] | ~part.flatten(-2).any(-1)).all() and (
                    ~every[..., i] | part.flatten(-2).all(-1)
                ).all()


def test_without_processes_it_says_how_to_start_them():
    """Fails if a traceback of torch is all that one gets."""
    with pytest.raises(RuntimeError, match="torchrun"):
        parallel.sequence_parallel(built("window"))
