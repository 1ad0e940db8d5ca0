"""Linearised attention: what the generic tests cannot see.

Random features, hard gates, long streams, bad input.
"""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import LinearAttention, MultiHead, Unsupported
from regard.attentions.linear import safe_divide
from regard.backends.linear_scan import causal_linear_scan
from regard.feature import (
    CosineFeatures,
    EluFeatures,
    PositiveFeatures,
    RandomFourierFeatures,
    ReluFeatures,
    TrigonometricFeatures,
    orthogonal_rows,
)
from regard.mixers import Recurrence
from regard.mixers.retention import RetentionPosition
from regard.update import add, decay, delta, diagonal_decay

ATTENTIONS = {
    "linear": {},
    "performer": {"features": 20},
    "rfa": {"features": 20},
    "cosformer": {"length": 6000},
}
RECURRENT = {"rfa_gated": {"features": 20}, "retnet": {}, "gated_linear": {}, "delta_rule": {}}
CAUSAL = ATTENTIONS | RECURRENT
DRAWS = 10_000
ALL = CAUSAL | {"efficient": {}}


def make(name, causal=True, dim=16, heads=2, **more):
    torch.manual_seed(0)
    return regard.create(name, dim=dim, heads=heads, causal=causal, **ALL[name], **more)


def normal(*shape, seed=1, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------- random features
def estimates(q, k, feature, rows=8, **more):
    """phi(q)·phi(k) with the first rows of many blocks, each a draw of its own: (draws)."""
    phi = feature(8, 8 * DRAWS, **more).double()
    (a, p), (b, r) = (phi(x[None, None, None], 0, False) for x in (q, k))
    products = 8 * DRAWS * (a * b)[0, 0, 0] * (p + r).exp()[0, 0]  # of each row by itself
    return products.view(-1, DRAWS, 8).sum(0)[:, :rows].mean(1)


def off(found, want):
    """How many standard errors the mean is off."""
    return ((found.mean() - want) / (found.std() / len(found) ** 0.5)).abs().item()


@pytest.mark.parametrize("rows", [1, 3, 8])  # of a block
@pytest.mark.parametrize("feature", [PositiveFeatures, TrigonometricFeatures])
def test_features_are_unbiased(feature, rows):
    """Fails if the mean over draws is not exp(q·k/√e): random rotations need the signs of R."""
    for trial in range(6):
        q, k = 0.5 * normal(2, 8, seed=trial)
        assert off(estimates(q, k, feature, rows, seed=trial), (q @ k / math.sqrt(8)).exp()) < 3.5


def test_a_qr_without_signs_would_be_biased(monkeypatch):
    """Fails if the test above could not tell: rows of Q as LAPACK gives them do not average to
    zero."""
    q = torch.full((8,), 0.7, dtype=torch.float64)

    def unsigned(count, width, make):
        blocks = -(-count // width)
        rows = torch.linalg.qr(
            torch.randn(blocks, width, width, dtype=torch.float64, generator=make)
        )[0].transpose(1, 2)
        return (
            rows.flatten(0, 1)[:count]
            * torch.randn(count, width, dtype=torch.float64, generator=make).norm(dim=1)[:, None]
        )

    make = torch.Generator().manual_seed(0)
    assert (
        orthogonal_rows(80_000, 8, make).mean(0).abs().max()
        < 0.02
        < 0.08
        < unsigned(80_000, 8, make).mean(0).abs().max()
    )
    monkeypatch.setattr("regard.feature.orthogonal_rows", unsigned)
    assert off(estimates(q, q, PositiveFeatures), (q @ q / math.sqrt(8)).exp()) > 10


def test_rows_are_orthogonal_and_as_long_as_normal_ones():
    """Fails if blocks are not at right angles, or lengths are not those of normal vectors."""
    rows = orthogonal_rows(8000, 8, torch.Generator().manual_seed(0))
    products = rows[:8] @ rows[:8].T
    torch.testing.assert_close(products, products.diagonal().diag())
    length = rows.norm(dim=1)
    assert abs(length.square().mean() - 8) < 0.1 and abs(length.square().var() - 16) < 1


def test_right_angles_lower_the_variance():
    """Fails if orthogonal rows are no better than independent ones."""
    q, k = 0.5 * normal(2, 8, seed=5)
    blocks, single = (
        estimates(q, k, PositiveFeatures, orthogonal=kind).var() for kind in (True, False)
    )
    assert blocks < 0.95 * single


@pytest.mark.parametrize("causal", [False, True])
def test_performer_converges_to_softmax(causal):
    """Fails if the error does not fall as 1/√features: a bias would stay (performer-pytorch's
    stays at 8 %)."""
    q, k, v = (0.5 * normal(1, 4, 64, 8, seed=s) for s in range(3))
    want, errors = regard.attend(q, k, v, pattern=regard.Causal() if causal else regard.Full()), []
    for features in (64, 1024, 16384):
        forms = [
            LinearAttention(PositiveFeatures(8, features, seed=seed).double()) for seed in range(4)
        ]
        got = torch.stack([form(q, k, v, causal=causal)[0] for form in forms])
        errors.append(((got - want).norm() / want.norm() / 2).item())
    assert errors[1] < errors[0] / 2.5 and errors[2] < errors[1] / 2.5 and errors[2] < 0.03


def test_rfa_converges_to_its_kernel():
    """Fails if random Fourier features do not estimate the softmax of cosines."""
    q, k, v = (normal(1, 2, 40, 8, seed=s) for s in range(3))
    unit = [torch.nn.functional.normalize(t, dim=-1) for t in (q, k)]
    want = regard.attend(*unit, v, scale=1.0)
    got = LinearAttention(RandomFourierFeatures(8, 20_000, 2).double())(q, k, v)[0]
    assert (got - want).norm() / want.norm() < 0.03


def test_redraw_is_on_a_schedule_and_by_seed():
    """Fails if rows change out of time, in evaluation or in a stream, or if the same seed draws
    others."""
    one, two = (make("performer", redraw=3, seed=7) for _ in range(2))
    x, seen = normal(1, 5, 16, dtype=torch.float32), []
    for _ in range(7):
        one(x)
        seen.append(one.inner.feature.rows.clone())
    assert (
        torch.equal(seen[0], seen[1])
        and torch.equal(seen[2], seen[4])
        and torch.equal(seen[5], seen[6])
    )
    assert not torch.equal(seen[1], seen[2]) and not torch.equal(seen[4], seen[5])
    for _ in range(7):
        two(x)
    assert torch.equal(two.inner.feature.rows, seen[-1])
    two.load_state_dict(one.state_dict())
    for mixer in (one, two):
        mixer(x), mixer(x)
    assert torch.equal(one.inner.feature.rows, two.inner.feature.rows)
    assert not torch.equal(one.inner.feature.rows, seen[-1])
    still = one.inner.feature.rows.clone()
    one.stream(x)
    one.eval()
    for _ in range(4):
        one(x)
    assert torch.equal(one.inner.feature.rows, still)


def test_redraw_of_the_gated_form():
    """Fails if its rows are not drawn anew in time, or are in a stream or in evaluation."""
    mixer, x = make("rfa_gated", redraw=2), normal(1, 5, 16, dtype=torch.float32)
    first = mixer.feature.rows.clone()
    for _ in range(3):
        mixer.stream(x)
    mixer.eval()(x), mixer(x), mixer(x)
    assert torch.equal(first, mixer.feature.rows)
    mixer.train()(x), mixer(x)
    assert not torch.equal(first, mixer.feature.rows)


def test_no_global_generator():
    """Fails if random rows depend on the global generator, or disturb it."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = PositiveFeatures(8, 20, seed=3).rows
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, PositiveFeatures(8, 20, seed=3).rows) and not torch.equal(
        first, PositiveFeatures(8, 20, seed=4).rows
    )


@pytest.mark.parametrize(
    "feature",
    [
        EluFeatures,
        lambda: PositiveFeatures(4, 7),
        lambda: TrigonometricFeatures(4, 7),
        lambda: ReluFeatures(4, 7),
    ],
)
def test_gradients_of_features(feature):
    """Fails if a backward pass by hand is wrong, once or twice."""
    phi, x = feature().double(), normal(1, 2, 3, 4).requires_grad_()

    def full(x):
        found, level = phi(x, 0, False)
        return found if level is None else found * level.exp()[..., None]

    assert torch.autograd.gradgradcheck(full, x)
    if not isinstance(
        phi, PositiveFeatures
    ):  # what it leaves out of one comes back in the other, but not by finite differences
        assert torch.autograd.gradcheck(full, x)


@pytest.mark.parametrize(("n", "chunk"), [(1, 4), (7, 3), (8, 4)])
def test_gradients_of_sums_over_the_past(n, chunk):
    """Fails if the backward pass by hand of causal linear attention is wrong, once or twice, or
    the state has none."""
    q, k, v, state = (
        normal(1, 2, *size, seed=i).requires_grad_()
        for i, size in enumerate(((n, 3), (n, 3), (n, 2), (3, 3)))
    )

    def sums(q, k, v, state):
        return causal_linear_scan(q, k, v, state, chunk)

    assert torch.autograd.gradcheck(sums, (q, k, v, state)) and torch.autograd.gradgradcheck(
        sums, (q, k, v, state)
    )


def test_division_by_hand():
    """Fails if the backward pass of the fraction is wrong, or a sum near zero overflows on the
    way back."""
    top, bottom = (
        normal(2, 5, 3).requires_grad_(),
        (normal(2, 5, 1, seed=1).abs() + 0.5).requires_grad_(),
    )
    for floor in (None, 0.7):
        assert torch.autograd.gradcheck(lambda a, b, f=floor: safe_divide(a, b, f), (top, bottom))
        assert torch.autograd.gradgradcheck(
            lambda a, b, f=floor: safe_divide(a, b, f), (top, bottom)
        )
    tiny = torch.tensor([[1e-30]], requires_grad=True)
    (grad,) = torch.autograd.grad(
        safe_divide(tiny.expand(1, 2).detach() * 3, tiny, None).sum() * 1e-9, tiny
    )
    assert grad.isfinite().all()


def test_training_keeps_only_what_it_is_given():
    """Fails if causal linear attention keeps the scores of its chunks, or a state for each, for
    the backward pass."""
    sizes, n = [], 512
    q, k, v = (normal(1, 2, n, 16, seed=i).requires_grad_() for i in range(3))

    def note(t):
        sizes.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        causal_linear_scan(q, k, v, None, 64)
    assert sum(sizes) == 2 * (3 * n * 16 + 16 * 17)  # of two heads: q, k, v, and the state before


def test_elu_keeps_digits_and_has_a_slope_at_zero():
    """Fails if phi(−30) is 0 in float32, or phi is flat at 0."""
    x = torch.tensor([[[[-30.0, 0.0, 2.0]]]], requires_grad=True)
    y, _ = EluFeatures()(x, 0, False)
    torch.testing.assert_close(y.flatten(), torch.tensor([math.exp(-30), 1.0, 3.0]))
    y.sum().backward()
    torch.testing.assert_close(x.grad.flatten(), torch.tensor([math.exp(-30), 1.0, 1.0]))


# ------------------------------------------------------------------------------------- stabilisers
def test_a_later_maximum_does_not_show():
    """Fails if a causal Performer looks ahead through its maximum, even in the last digit."""
    q, k, v = (normal(1, 2, 200, 8, seed=s, dtype=torch.float32) for s in range(3))
    attention = LinearAttention(PositiveFeatures(8, 32))
    base = attention(q, k, v, causal=True)[0]
    for at in (70, 150, 199):
        other = k.clone()
        other[:, :, at:] *= 30
        assert torch.equal(attention(q, other, v, causal=True)[0][:, :, :at], base[:, :, :at])


def test_pads_are_not_in_the_denominator():
    """Fails if a left-out key keeps a weight."""
    q, k, v = (normal(1, 2, 20, 8, seed=s) for s in range(3))
    mask = torch.arange(20)[None] < 12
    for feature in (
        PositiveFeatures(8, 32).double(),
        TrigonometricFeatures(8, 200).double(),
        ReluFeatures(8, 32).double(),
    ):
        attention = LinearAttention(feature)
        for causal in (False, True):
            got = attention(
                q, 50 * k * ~mask[..., None] + k * mask[..., None], v, causal=causal, mask=mask
            )[0]
            torch.testing.assert_close(
                got[:, :, :12],
                attention(q[:, :, :12], k[:, :, :12], v[:, :, :12], causal=causal)[0],
            )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 10, 100, 1e4])
def test_performer_gives_means_of_values_at_any_scale(scale, dtype, causal):
    """Fails if huge scores overflow, or vanish so that the result is zero and no mean at all."""
    q, k = (scale * normal(1, 2, 90, 8, seed=s).to(dtype) for s in range(2))
    v = torch.rand(1, 2, 90, 8, generator=torch.Generator().manual_seed(3)).to(dtype) + 1
    got = LinearAttention(PositiveFeatures(8, 32))(q, k, v, causal=causal)[0]
    assert got.dtype == dtype and got.min() >= 0.99 and got.max() <= 2.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("name", [*ALL, "trigonometric", "relu"])
def test_huge_and_tiny_tokens(name, scale, dtype):
    """Fails if something overflows, forward or backward."""
    mixer = (
        make(name, causal=name != "efficient") if name in ALL else make("performer", kernel=name)
    ).to(dtype)
    x = (scale * normal(2, 90, 16)).to(dtype).requires_grad_()
    y = mixer(x)
    y.float().sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "cosformer",
        "efficient",
        "rfa",
        "gated_linear",
        "delta_rule",
        "retnet",
        "rfa_gated",
    ],
)
def test_float32_is_right_at_any_scale(name, scale):
    """Fails if float32 gives something else than float64."""
    mixer, x = make(name, causal=name != "efficient").double(), scale * normal(1, 150, 16)
    want = mixer(x)
    got = mixer.float()(x.float())
    assert (got - want).abs().max() <= 2e-4 * want.abs().max()


@pytest.mark.parametrize("features", [1, 2, 4])
def test_sums_near_zero_stay_finite(features):
    """Fails if sines and cosines that cancel divide by nothing."""
    for seed in range(20):
        q, k, v = (
            normal(1, 2, 50, 4, seed=3 * seed + s, dtype=torch.float32).requires_grad_()
            for s in range(3)
        )
        for feature in (
            RandomFourierFeatures(4, features, 2, seed=seed),
            TrigonometricFeatures(4, features, seed=seed),
        ):
            for causal in (False, True):
                y = LinearAttention(feature)(q, k, v, causal=causal)[0]
                grads = torch.autograd.grad(y.sum(), (q, k, v))
                assert y.isfinite().all() and all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", ["linear", "performer", "rfa", "cosformer", "efficient"])
def test_a_query_that_sees_nothing_gives_zero(name):
    """Fails if nothing but padding gives something."""
    for causal in (False, True) if name != "efficient" else (False,):
        mixer = make(name, causal=causal)
        x = normal(2, 9, 16, dtype=torch.float32).requires_grad_()
        y = mixer(x, mask=torch.zeros(2, 9, dtype=torch.bool))
        assert y.abs().max() == 0
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


# ----------------------------------------------------------------------------------------- updates
def naive(update, q, k, v, gate, state):
    """Token by token."""
    now = (
        torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=k.dtype) if state is None else state
    )
    out = []
    for i in range(q.shape[2]):
        key, value = k[:, :, i, :, None], v[:, :, i, None]
        if update is add:
            now = now + key * value
        elif update is decay:
            now = gate[:, :, i, None, None].exp() * now + key * value
        elif update is diagonal_decay:
            now = gate[:, :, i, :, None].exp() * now + key * value
        else:
            now = now + gate[:, :, i, None, None] * key * (value - key.transpose(-1, -2) @ now)
        out.append((q[:, :, i, None] @ now)[:, :, 0])
    return torch.stack(out, 2), now


def gates(update, b, h, n, r, hard):
    """Some that keep everything, some that forget nearly all, and some of all."""
    shape = (b, h, n, r) if update is diagonal_decay else (b, h, n)
    gate = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    if update is delta:
        return gate
    gate = -gate * 0.3
    gate[:, :, ::7] = 0
    gate[:, :, 5::11] = -hard
    return gate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("hard", [1.0, 80.0, 1e4])
@pytest.mark.parametrize("n", [1, 2, 37, 130])
@pytest.mark.parametrize("update", [add, decay, diagonal_decay, delta])
def test_updates_are_their_recurrences(update, n, hard, dtype):
    """Fails if chunks of some size, a start in the middle, or a gate near zero gives something
    else than token by token."""
    q, k = (torch.nn.functional.normalize(normal(2, 3, n, 5, seed=s), dim=-1) for s in range(2))
    v, gate, start = (
        normal(2, 3, n, 4, seed=3),
        gates(update, 2, 3, n, 5, hard),
        normal(2, 3, 5, 4, seed=4),
    )
    for state in (None, start):
        want, last = naive(update, q, k, v, gate, state)
        for chunk in (1, 4, 7, 16, 64, 1000):
            parts = [t if t is None else t.to(dtype) for t in (q, k, v, gate, state)]
            got, after = update(*parts, chunk)
            tolerance = (
                1e-10 if dtype == torch.float64 else 2e-5 if hard < 2 else 2e-4
            )  # sums of hard gates lose digits
            torch.testing.assert_close(
                got.double(), want, rtol=0, atol=tolerance * max(1.0, want.abs().max().item())
            )
            torch.testing.assert_close(
                after.double(), last, rtol=0, atol=tolerance * max(1.0, last.abs().max().item())
            )


# --------------------------------------------------------------------------- recurrences as mixers
@pytest.mark.parametrize("name", RECURRENT)
def test_left_out_tokens_are_as_if_cut_out(name):
    """Fails if a token that is left out moves the state, the positions or the convolution of the
    others: on either side
    and in between, for the output and for the map."""
    mixer, x = make(name).double(), normal(3, 40, 16)
    mask = torch.stack((torch.arange(40) >= 9, torch.arange(40) < 31, torch.arange(40) % 4 != 2))
    y, maps = mixer(x, mask=mask), mixer.attention_map(x, mask=mask)
    for a in range(3):
        real = mask[a].nonzero()[:, 0]
        torch.testing.assert_close(y[a, real], mixer(x[a : a + 1, real])[0])
        torch.testing.assert_close(
            maps[a][:, real][:, :, real], mixer.attention_map(x[a : a + 1, real])[0]
        )
        assert maps[a][:, real][:, :, (~mask[a]).nonzero()[:, 0]].abs().max() == 0


@pytest.mark.parametrize("name", RECURRENT)
def test_the_map_is_what_heads_read(name):
    """Fails if the map times the values, normalised, gated and projected, is not the output."""
    mixer, x = make(name).double(), normal(2, 23, 16)
    found, _ = mixer.project_inputs(x, None)
    torch.testing.assert_close(mixer.project_output(mixer.attention_map(x) @ found.v, x), mixer(x))


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrences_refuse_what_they_cannot(name):
    """Fails if a recurrence may be built not causal, or looks at another sequence, or does not
    say why not."""
    with pytest.raises(
        Unsupported, match=f"{name}: a recurrence only sees earlier tokens: use causal=True"
    ):
        make(name, causal=False)
    with pytest.raises(Unsupported, match="along one sequence"):
        make(name)(torch.zeros(1, 3, 16), torch.zeros(1, 3, 16))
    assert isinstance(make(name), Recurrence) and make(name).can.causal


def test_retention_fades_at_its_rates():
    """Fails if a head does not fade by 1 − 2^(−5−h), or that is rounded to 1 in bfloat16."""
    mixer, x = make("retnet").double(), torch.ones(1, 5, 16, dtype=torch.float64)
    want = torch.tensor([1 - 2**-5, 1 - 2**-6], dtype=torch.float64)
    torch.testing.assert_close(mixer.project_inputs(x, None)[0].gate[0, :, 0].exp(), want)
    low = mixer.bfloat16().project_inputs(x.bfloat16(), None)[0].gate[0, :, 0].exp()
    torch.testing.assert_close(low.double(), want, rtol=0, atol=1e-6)


def test_retention_depends_on_distance_alone():
    """Fails if positions far from the start lose their digits in float32."""
    mixer, x = make("retnet"), normal(1, 50, 16, dtype=torch.float32)
    near, _ = mixer.stream(x)
    start = mixer.initial_state()
    far, _ = mixer.stream(x, start._replace(past=RetentionPosition(1_000_000)))
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------- long sequences
def tensors(state):
    return [t for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_stream_costs_the_same_at_any_position(name):
    """Fails if the work for a token or the size of the state grows with what has been read."""
    mixer, state, costs = make(name), None, []
    for at in range(0, 5200, 400):
        with torch.no_grad():
            _, state = mixer.stream(normal(1, 399, 16, seed=at, dtype=torch.float32), state)
            with FlopCounterMode(display=False) as counter:
                _, state = mixer.stream(normal(1, 1, 16, seed=at, dtype=torch.float32), state)
        costs.append((counter.get_total_flops(), sum(t.numel() for t in tensors(state))))
    assert len(set(costs)) == 1 and costs[0][0] > 0


def kept(mixer, n):
    """The bytes that a training call keeps for its backward pass."""
    sizes, x = {}, normal(1, n, mixer.dim, dtype=torch.float32).requires_grad_()

    def note(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = mixer(x)  # held, so that no two tensors had one place
    return sum(sizes.values()) if out.requires_grad else 0


@pytest.mark.parametrize("name", CAUSAL)
def test_training_memory_grows_with_the_length(name):
    """Fails if anything of n² is kept for the backward pass, or a state for each token."""
    arguments = {**CAUSAL[name], **({"features": 128} if "features" in CAUSAL[name] else {})}
    mixer = regard.create(name, dim=128, heads=1, causal=True, **arguments)
    small, large = kept(mixer, 512), kept(mixer, 2048)
    _, state = mixer.stream(normal(1, 1, 128, dtype=torch.float32))
    one = sum(t.numel() * t.element_size() for t in tensors(state) if t.dim() == 4)
    assert large < 4.3 * small and 0 < large < 0.6 * 2048 * one


@pytest.mark.parametrize("name", ALL)
def test_products_grow_with_the_length(name):
    """Fails if twice the tokens are more than about twice the products."""
    mixer, counts = make(name, causal=name != "efficient"), []
    for n in (1024, 2048):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            mixer(normal(1, n, 16, dtype=torch.float32))
        counts.append(counter.get_total_flops())
    assert 0 < counts[1] < 2.1 * counts[0]


# ---------------------------------------------------------------------------------------- the rest
def test_efficient_attention_takes_means():
    """Fails if the weights of a query do not add up to one, over the keys that are there."""
    mixer, x = make("efficient", causal=False).double(), normal(2, 20, 16)
    mask = torch.arange(20).expand(2, 20) % 3 != 0
    for weights in (mixer.attention_map(x), mixer.attention_map(x, mask=mask)):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 20, dtype=torch.float64))
        assert weights.min() >= 0


def test_efficient_attention_says_why_it_is_not_causal():
    """Fails if it does not."""
    with pytest.raises(Unsupported, match="softmax over positions includes later keys"):
        make("efficient", causal=True)


def test_cosformer_prefers_near_tokens_and_keeps_its_length():
    """Fails if equal tokens are not weighed by the cosine of their distance, or a stream runs
    past its length."""
    attention = LinearAttention(CosineFeatures(10))
    q = torch.ones(1, 1, 10, 2, dtype=torch.float64)
    weights = attention(q, q, torch.eye(10, dtype=torch.float64)[None, None])[0][0, 0]
    near = torch.tensor(
        [[math.cos(math.pi / 2 * (i - j) / 10) for j in range(10)] for i in range(10)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(weights, near / near.sum(-1, keepdim=True))
    mixer = regard.create("cosformer", dim=8, heads=2, length=10, causal=True)
    _, state = mixer.stream(torch.zeros(1, 8, 8))
    with pytest.raises(ValueError, match=r"stream has 11 tokens.*length=10"):
        mixer.stream(torch.zeros(1, 3, 8), state)


@pytest.mark.parametrize("name", CAUSAL)
def test_states_keep_their_digits_in_low_precision(name):
    """Fails if a bfloat16 stream sums in bfloat16, alone or by autocast."""
    mixer = make(name)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = mixer.stream(normal(1, 9, 16, dtype=torch.float32))
    assert all(t.dtype == torch.float32 for t in tensors(state) if t.dim() == 4)
    mixer.bfloat16()
    _, state = mixer.stream(normal(1, 9, 16).bfloat16())
    y, state = mixer.stream(normal(1, 9, 16).bfloat16(), state)
    assert (
        all(t.dtype == torch.float32 for t in tensors(state) if t.dim() == 4)
        and y.dtype == torch.bfloat16
    )


@pytest.mark.parametrize("name", CAUSAL)
def test_a_stream_stays_with_its_examples(name):
    """Fails if a stream goes on with another number of examples."""
    mixer = make(name)
    _, state = mixer.stream(torch.ones(2, 4, 16))
    with pytest.raises(ValueError, match="the state has 2 examples"):
        mixer.stream(torch.ones(3, 4, 16), state)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("performer", {"kernel": "positiv"}, "kernel must be .*'positiv'.*did you mean 'positive'"),
        ("performer", {"features": 0}, "features must be an integer >= 1"),
        ("performer", {"seed": -1}, "seed must be an integer >= 0"),
        ("performer", {"redraw": 0}, "redraw must be an integer >= 1"),
        ("performer", {"heads": 3}, "divisible by heads"),
        ("rfa", {"features": 2.5}, "features must be an integer"),
        ("rfa_gated", {"features": 0}, "features must be an integer >= 1"),
        ("rfa_gated", {"heads": 3}, "divisible by heads"),
        ("cosformer", {"length": 0}, "length must be an integer >= 1"),
        ("retnet", {"expand": 0}, "expand must be an integer >= 1"),
        ("retnet", {"dim": 6, "heads": 2}, "width of a head must be even, not 3"),
        ("gated_linear", {"key": 0}, "key must be an integer >= 1"),
        ("gated_linear", {"rank": 0}, "rank must be an integer >= 1"),
        ("delta_rule", {"convolution": -1}, "convolution must be an integer >= 0"),
        *((name, {"chunk": 0}, "chunk must be an integer >= 1") for name in CAUSAL),
    ],
)
def test_bad_arguments_are_named(name, arguments, words):
    """Fails if a wrong argument does not say which and why."""
    needed = {"length": 10} if name == "cosformer" else {}
    with pytest.raises(ValueError, match=words):
        regard.create(name, **{"dim": 8, "heads": 2, **needed, **arguments})


def test_features_for_other_heads_are_refused():
    """Fails if rows of four heads serve two."""
    with pytest.raises(ValueError, match="built for 4 heads, not 2"):
        MultiHead(8, 2, LinearAttention(RandomFourierFeatures(4, 8, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "rfa_gated", "delta_rule", "gated_linear"])
def test_compiles(name):
    """Fails if a causal form does not compile, in one piece where none is listed in
    graph_breaks.json, or gives something else then."""
    mixer, x = make(name).double(), normal(2, 20, 16).requires_grad_()
    (want,) = torch.autograd.grad(mixer(x).square().sum(), x)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=name != "gated_linear")
    (got,) = torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(got, want)


def test_a_masked_beginning_of_large_tokens():
    """Fails if the level of a key is compared with that of none."""
    mixer = regard.create("performer", dim=64, heads=4, causal=True)
    mask = torch.arange(32)[None] >= 3
    assert (
        mixer(torch.randn(1, 32, 64, generator=torch.Generator().manual_seed(0)) * 30, mask=mask)
        .isfinite()
        .all()
    )


@pytest.mark.parametrize(
    "arguments", [{"kernel": "trigonometric"}, {"kernel": "trigonometric", "causal": True}]
)
def test_a_sum_below_zero_keeps_its_sign(arguments):
    """Fails if a negative sum is made positive: then a row of weights is many times too large,
    and of the wrong sign."""
    mixer = regard.create("performer", dim=64, heads=4, **arguments).double()
    x = torch.randn(1, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = mixer.attention_map(2 * x).sum(-1)
    assert (
        (rows > -1e-9).all()
        and (rows < 1 + 1e-9).all()
        and ((rows - 1).abs() < 1e-9).double().mean() > 0.9
    )


def test_the_first_token_of_a_strong_gate_is_itself():
    """Fails if the floor of the sum is taken for the sum where little has entered."""
    mixer = regard.create("rfa_gated", dim=64, heads=4).double()
    mixer.gate.bias.data.fill_(6)
    x = torch.randn(1, 8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixer(x)[:, :1], mixer.out(mixer.v(x[:, :1])))


def test_rows_drawn_anew_leave_older_graphs_alone():
    """Fails if drawing writes over what a backward pass still needs."""
    mixer = regard.create("performer", dim=16, heads=2, redraw=1).train()
    x = torch.randn(1, 8, 16, requires_grad=True)
    (mixer(x) + mixer(x)).sum().backward()
    assert x.grad.isfinite().all()
