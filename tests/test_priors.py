"""What the generic tests cannot see of priors and heads: chains, tasks, costs, spans that save
work, shared projections."""

import math

import pytest
import torch
from torch.nn import functional as F

import regard
from regard import Band, MultiHead, SoftmaxAttention, Unsupported
from regard.attentions import AdaptiveSpanAttention
from regard.layout import build_layout
from regard.mixers import TaskAttention, collaborate, for_task
from regard.models import ModelConfig, TokenInput, build, module_spec
from regard.prior import Gaussian


def mixer_of(name, causal=False, **arguments):
    torch.manual_seed(0)
    return regard.create(name, dim=8, heads=2, causal=causal, **arguments).double()


# ------------------------------------------------------------------------------------------ priors
def test_a_filter_on_the_weights_is_a_bias_on_the_scores(rand):
    """Fails if multiplying the weights by a Gaussian density and normalising again were not the
    same as the prior."""
    q, k, v = rand(1, 2, 9, 4), rand(1, 2, 9, 4), rand(1, 2, 9, 4)
    gap = torch.arange(9)[:, None] - torch.arange(9)
    density = (-(gap.double() ** 2) / (2 * 2.5**2)).exp()
    weights = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) * density
    want = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(regard.attend(q, k, v, prior=Gaussian(2, 2.5).double()), want)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "sparse"])
def test_a_prior_that_rules_everything_out_gives_zero(rand, backend):
    """Fails if minus infinity from a prior becomes NaN."""

    class Never(regard.Prior):
        def forward(self, q_pos, k_pos, q, k):
            return torch.where(q_pos > 2, -torch.inf, 0.0) + 0 * k_pos

    x = rand(1, 1, 6, 4).requires_grad_()
    y = regard.attend(x, x, x, prior=Never(), backend=backend)
    assert (y[:, :, 3:] == 0).all() and y.isfinite().all()
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_predicted_gaussians_refuse_to_be_causal_and_say_why():
    with pytest.raises(Unsupported, match="whole length"):
        mixer_of("gaussian_prior", causal=True, sigma=None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"sigma": 0}, "sigma must be a finite number above 0"),
        ({"sigma": None, "centre": "left"}, "centre must be one of"),
        ({"sigma": None, "window": 3}, "window must be a string"),
        ({"sigma": 3.0, "window": "layer"}, "sigma=None"),
        ({"sigma": None, "learn": False}, "learn=False"),
        ({"sigma": float("nan")}, "finite number"),
    ],
)
def test_gaussian_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        mixer_of("gaussian_prior", **arguments)


def test_each_example_has_its_own_task(rand):
    """Fails if `of` ignores the task, mixes examples up, or copies the parameters."""
    mixer, x = mixer_of("conditional_prior", length=12, blocks=3, tasks=4), rand(3, 10, 8)
    every = [mixer.for_task(task)(x) for task in range(4)]
    assert not torch.allclose(every[0], every[1])
    torch.testing.assert_close(mixer(x), every[0])
    mixed = mixer.for_task(torch.tensor([3, 0, 2]))(x)
    for row, task in enumerate((3, 0, 2)):
        torch.testing.assert_close(mixed[row], every[task][row])
    mixer.for_task(2)(x).sum().backward()
    assert (
        mixer.vectors.weight.grad[2].abs().max() > 0
        and (mixer.vectors.weight.grad[[0, 1, 3]] == 0).all()
    )
    for bad in (4, -1, 0.5, torch.tensor([[0]])):
        with pytest.raises(ValueError, match="from 0 to 3"):
            mixer.for_task(bad)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_model_is_told_its_task(kind):
    """Fails if a built model serves task 0 whatever it is told, or the copy has its own weights."""
    torch.manual_seed(0)
    config = ModelConfig(
        input=TokenInput(vocab_size=11),
        kind=kind,
        mixer=module_spec("conditional_prior", tasks=4),
        dim=8,
        heads=2,
        layers=2,
        length=12,
    )
    model = build(config).double().eval()
    tokens = torch.randint(11, (3, 9))
    every = [for_task(model, task)(tokens) for task in range(4)]
    torch.testing.assert_close(every[0], model(tokens))
    assert all(not torch.allclose(every[0], other) for other in every[1:])
    other = for_task(model, torch.tensor([3, 0, 2]))
    mixed = other(tokens)
    for row, task in enumerate((3, 0, 2)):
        torch.testing.assert_close(mixed[row], every[task][row])
    mixed.square().sum().backward()
    grads = [m.vectors.weight.grad for m in model.modules() if isinstance(m, TaskAttention)]
    assert len(grads) == 2
    assert all(g[[0, 2, 3]].abs().amax(1).gt(0).all() and g[1].eq(0).all() for g in grads)
    if kind == "decoder":
        first, state = other.stream(tokens[:, :4])
        rest, _ = other.stream(tokens[:, 4:], state)
        torch.testing.assert_close(torch.cat((first, rest), 1), mixed)
    with pytest.raises(ValueError, match="from 0 to 3"):
        for_task(model, 4)
    with pytest.raises(ValueError, match="no layer with a task"):
        for_task(torch.nn.Linear(3, 3), 0)


def plain_scores(layer, x):
    q, k, v = layer.heads.project(x, None)
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_realformer_adds_the_scores_of_the_layer_before(rand, causal, masked):
    """Fails if the second layer does not see the first layer's scores, or masks them into the
    sum."""
    layers, x = [mixer_of("realformer", causal) for _ in range(3)], rand(2, 7, 8)
    mask = torch.arange(7).expand(2, 7) < torch.tensor([[7], [4]]) if masked else None
    keep = (
        torch.ones(7, 7, dtype=torch.bool).tril() if causal else torch.ones(7, 7, dtype=torch.bool)
    )
    keep = keep if mask is None else keep & mask[:, None, None, :]
    want, total, got, scores = x, 0, x, None
    for layer in layers:
        source = want if mask is None else want.masked_fill(~mask[..., None], 0)
        mine, v = plain_scores(layer, source)
        total = total + mine
        weights = torch.softmax(total.masked_fill(~keep, -torch.inf), -1)
        want = layer.heads.out((weights @ v).transpose(1, 2).flatten(2))
        got, scores, _ = layer.chain(got, scores, mask=mask)
        rows = slice(None) if mask is None else mask
        torch.testing.assert_close(got[rows], want[rows])


def test_realformer_chains_stream(rand):
    """Fails if chunk by chunk the handed-on scores are others."""
    layers, x = [mixer_of("realformer", True) for _ in range(2)], rand(2, 11, 8)
    whole, scores, _ = layers[0].chain(x)
    whole, _, _ = layers[1].chain(whole, scores)
    states, got = [layer.initial_state() for layer in layers], []
    for part in x.split([1, 4, 1, 5], 1):
        y, scores = part, None
        for i, layer in enumerate(layers):
            y, scores, states[i] = layer.chain(y, scores, state=states[i])
        got.append(y)
    torch.testing.assert_close(torch.cat(got, 1), whole)
    with pytest.raises(ValueError, match="before must have shape"):
        layers[1].chain(x, scores[:, :1])


def test_hard_gaussian_has_no_weights_for_queries_and_keys():
    mixer = mixer_of("hard_gaussian")
    assert {name for name, _ in mixer.named_parameters()} == {"v.weight", "out.weight"}
    rows = mixer.attention_map(torch.zeros(1, 41, 8).double())[0, :, 20].sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-6, rtol=0)


def test_hard_gaussian_keeps_as_many_values_as_it_reaches(rand):
    mixer = mixer_of("hard_gaussian", True, sigma=0.5)
    _, state = mixer.stream(rand(1, 300, 8))
    assert state.values.shape[2] == mixer.inner.reach == 6


# ------------------------------------------------------------------------------------------- spans
def span(share, *, longest=1024, ramp=32, heads=2):
    attention = AdaptiveSpanAttention(heads, longest=longest, ramp=ramp, start=0, penalty=0.5)
    attention.share.data = torch.tensor(share)
    return attention


def test_shorter_spans_compute_fewer_scores():
    """Fails if a head computes keys at which its mask is zero by more than the rounding."""
    attention = span([0.1, 0.9])
    assert attention.windows() == [160, 960]
    scores = [build_layout(part, 4096, 4096).scores() for part in attention.pattern.parts]
    assert scores[0] < 0.25 * scores[1]
    assert span([0.0, 1.0]).windows() == [32, 1056]
    assert span([-3.0, 7.0]).windows() == [32, 1056], "a share outside of [0, 1] counts as its end"


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_span_beyond_its_bounds_comes_back(rand, share):
    """Fails if a share that a step of the optimiser took out of [0, 1] has no gradient any more."""
    mixer = MultiHead(8, 2, span([share, share], longest=20, ramp=4)).double().train()
    (mixer(rand(1, 30, 8)).sum() + mixer.inner.spans().sum()).backward()
    assert (
        mixer.inner.share.min() >= 0
        and mixer.inner.share.max() <= 1
        and mixer.inner.share.grad.abs().min() > 0
    )


def test_spans_tell_their_cost(rand):
    """Fails if the l1 cost is not the mean span times the penalty, or has no gradient."""
    mixer = MultiHead(8, 2, span([0.25, 0.5])).double()
    with regard.collect_aux() as notes:
        mixer(rand(1, 9, 8))
    torch.testing.assert_close(
        notes.loss(), torch.tensor(0.5 * 1024 * 0.375).double(), check_dtype=False
    )
    assert notes.all("spans")[0].tolist() == [256, 512]
    notes.loss().backward()
    assert mixer.inner.share.grad.tolist() == [256, 256]


def test_a_stream_keeps_what_the_longest_span_reaches(rand):
    mixer = MultiHead(8, 2, span([0.1, 0.2], longest=100, ramp=10), causal=True).double()
    state, sizes = None, []
    for part in rand(1, 2000, 8).split(50, 1):
        _, state = mixer.stream(part, state)
        sizes.append(state.k.shape[2])
    assert max(sizes) <= 2 * 32 + 64 + 50


def test_spans_longer_than_the_sequence(rand):
    """Fails if a span of 10,000 tokens on 9 is more than plain attention."""
    mixer = MultiHead(8, 2, span([1.0, 1.0], longest=10_000)).double()
    plain = MultiHead(8, 2, SoftmaxAttention()).double()
    plain.load_state_dict({k: v for k, v in mixer.state_dict().items() if "inner" not in k})
    x = rand(1, 9, 8)
    torch.testing.assert_close(mixer(x), plain(x))
    with pytest.raises(ValueError, match="start must be a fraction"):
        regard.create("adaptive_span", dim=8, heads=2, start=2.0)


# ------------------------------------------------------------------------------------------- heads
@pytest.mark.parametrize("width", [8, 11])
def test_collaborating_heads_can_say_all_that_apart_ones_can(rand, width):
    """Fails if a layer with room enough for all heads is not the layer that it was made from."""
    x = 3 * rand(2, 9, 8)
    for inner in (SoftmaxAttention(), SoftmaxAttention(scale=0.3), SoftmaxAttention(Band(2, 2))):
        plain = MultiHead(8, 2, inner).double()
        new = collaborate(plain, width)
        torch.testing.assert_close(new(x), plain(x))
        assert not {id(p) for p in new.parameters()} & {id(p) for p in plain.parameters()}, (
            "they would train together"
        )


def test_collaborating_heads_find_what_heads_have_in_common(rand):
    """Fails if heads that share three dimensions are not found to."""
    left, right = rand(3, 8), rand(3, 8)
    plain = MultiHead(8, 2, SoftmaxAttention(scale=0.5)).double()
    for w, base in ((plain.q.weight, left), (plain.k.weight, right)):
        w.data = torch.cat(
            [F.pad(base * torch.tensor([[1.0], [s], [2.0]]), (0, 0, 0, 1)) for s in (0.5, 3.0)]
        ).double()
    x = rand(2, 9, 8)
    torch.testing.assert_close(collaborate(plain, 3, rounds=300)(x), plain(x), atol=1e-5, rtol=0)
    rough = [
        (collaborate(mixer, w)(x) - mixer(x)).norm()
        for mixer in [MultiHead(8, 2, SoftmaxAttention(scale=0.5)).double()]
        for w in (2, 5, 8)
    ]
    assert rough[2] < 1e-9 < rough[1] < rough[0]


def test_what_cannot_collaborate():
    with pytest.raises(Unsupported, match="bias"):
        collaborate(MultiHead(8, 2, SoftmaxAttention(), bias=True), 4)
    with pytest.raises(Unsupported, match="without kv_heads"):
        collaborate(MultiHead(8, 2, SoftmaxAttention(), kv_heads=1), 4)
    with pytest.raises(Unsupported, match="linear projections"):
        collaborate(mixer_of("collaborative"), 4)
    with pytest.raises(Unsupported, match="needs softmax attention"):
        collaborate(mixer_of("linear"), 4)


@pytest.mark.parametrize("kind", ["subspace", "positions", "outputs"])
def test_heads_that_are_alike_pay(rand, kind):
    """Fails if the cost is not the mean over all pairs of heads, with padding left out."""
    mixer, x = mixer_of("disagreement", kind=kind, penalty=2.0), rand(2, 6, 8)
    mask = torch.arange(6).expand(2, 6) < torch.tensor([[6], [3]])
    with regard.collect_aux() as notes:
        mixer(x, mask=mask)
    _, _, v = mixer.project(x.masked_fill(~mask[..., None], 0), None)
    a = mixer.attention_map(x, mask=mask)
    of = {"subspace": v, "positions": a, "outputs": a @ v}[kind]
    total = 0.0
    for row, i in mask.nonzero().tolist():
        for g in range(2):
            for h in range(2):
                one, other = of[row, g, i], of[row, h, i]
                total += (
                    (one * other).abs().sum()
                    if kind == "positions"
                    else torch.cosine_similarity(one, other, dim=0)
                )
    torch.testing.assert_close(notes.loss(), 2.0 * total / 4 / mask.sum(), check_dtype=False)
    notes.loss().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in mixer.parameters())
    with pytest.raises(ValueError, match="kind must be one of"):
        mixer_of("disagreement", kind="values")


def test_talking_heads_start_apart(rand):
    """Fails if untrained talking heads were not plain heads."""
    mixer, plain, x = mixer_of("talking_heads"), mixer_of("vanilla"), rand(2, 9, 8)
    plain.load_state_dict({k: v for k, v in mixer.state_dict().items() if "inner" not in k})
    torch.testing.assert_close(mixer(x), plain(x))


def test_top_k_keeps_ties_and_no_more(rand):
    """Fails if a row has more keys than k, or a tie is broken by position."""
    mixer, x = mixer_of("top_k", k=3), rand(1, 20, 8)
    assert ((mixer.attention_map(x) > 0).sum(-1) == 3).all()
    assert ((mixer.attention_map(torch.zeros_like(x)) > 0).sum(-1) == 20).all()


def test_grouped_queries_keep_fewer_keys(rand):
    mixer = regard.create("grouped_query", dim=8, heads=4, group_size=2, causal=True).double()
    _, state = mixer.stream(rand(1, 5, 8))
    assert state.k.shape[1] == 2
    _, state = (
        regard.create("multi_query", dim=8, heads=4, causal=True).double().stream(rand(1, 5, 8))
    )
    assert state.k.shape[1] == 1
    with pytest.raises(ValueError, match="divisible by group_size"):
        regard.create("grouped_query", dim=8, heads=4, group_size=3)


def test_fixed_spans_of_one_length_are_one_band():
    assert regard.create("fixed_span", dim=8, heads=2, spans=(5,)).inner.pattern == Band(5, 5)
    for bad, says in (((), "at least one"), ((1.5,), "integer"), ((-1,), "integer")):
        with pytest.raises(ValueError, match=says):
            regard.create("fixed_span", dim=8, heads=2, spans=bad)


def test_a_mask_over_a_memory_leaves_out_keys_not_queries(rand):
    """Fails if the mask of another sequence of the same length is taken for one over the
    queries."""
    for kind in ("subspace", "positions", "outputs"):
        mixer, x, context = mixer_of("disagreement", kind=kind), rand(1, 6, 8), rand(1, 6, 8)
        costs = []
        for inputs in (
            {"mask": torch.arange(6)[None] < 3, "context": context},
            {"context": context[:, :3]},
        ):
            with regard.collect_aux() as notes:
                mixer(x, **inputs)
            costs.append(notes.loss())
        torch.testing.assert_close(*costs)


def test_disagreement_leaves_out_padded_queries_of_cross_attention(rand):
    """Fails if padding among the queries is part of the loss, inside `Block` too."""
    for kind in ("subspace", "positions", "outputs"):
        mixer, x, context = mixer_of("disagreement", kind=kind), rand(2, 6, 8), rand(2, 5, 8)
        costs = []
        for inputs in (
            {"x": x, "query_mask": torch.arange(6)[None].expand(2, -1) < 4},
            {"x": x[:, :4]},
        ):
            with regard.collect_aux() as notes:
                mixer(context=context, **inputs)
            costs.append(notes.loss())
        torch.testing.assert_close(*costs)


def test_few_heads_between_talk_to_all(rand):
    """Fails if a head is silent at the start because there are fewer between."""
    rows = (
        regard.create("talking_heads", dim=16, heads=4, inner=2)
        .attention_map(torch.randn(1, 5, 16))
        .sum(-1)
    )
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_left_padding_moves_a_predicted_centre(rand):
    """Fails if the centre is counted from the padding."""
    mixer, x = mixer_of("gaussian_prior", sigma=None, centre="predicted"), rand(1, 9, 8)
    padded = torch.cat((rand(1, 5, 8), x), 1)
    mask = torch.arange(14)[None] >= 5
    torch.testing.assert_close(mixer(padded, mask=mask)[:, 5:], mixer(x))


@pytest.mark.parametrize(
    "arguments", [{"sigma": 200.0}, {"sigma": None}, {"sigma": None, "centre": "predicted"}]
)
def test_long_distances_in_half_precision(arguments):
    """Fails if the square of a distance overflows."""
    mixer = regard.create("gaussian_prior", dim=8, heads=2, **arguments).half()
    assert mixer(torch.randn(1, 1500, 8).half()).isfinite().all()


@pytest.mark.parametrize("name", ["vanilla", "collaborative", "gaussian_prior", "local"])
def test_maps_under_autocast(name):
    """Fails if the map is asked of values of another type than the keys."""
    mixer, x = regard.create(name, dim=8, heads=2), torch.randn(1, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mixer.attention_map(x).isfinite().all() and mixer(x).isfinite().all()
