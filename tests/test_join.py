"""Streams that stand at different positions, joined into one batch: each as if it were alone."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

import regard
from regard import Band, Can, Chunks, Full, Keys, Mixer, MultiHead, SoftmaxAttention
from regard.block import Block
from regard.ffn import MLP
from regard.mixers import with_position
from regard.models import LMHeadConfig, ModelConfig, TokenInput, VectorInput, build, generate
from regard.models.model import StreamState
from regard.pattern import PerHead
from regard.position import (
    DistanceBias,
    FourierEmbedding,
    LearnedEmbedding2D,
    Rope,
    ShawBias,
    SinusoidalEmbedding,
    T5Bias,
    TransformerXLBias,
    TUPEBias,
)
from regard.prior import ALiBi, Gaussian, Sinks, SoftCap
from regard.registry import get_recipe
from regard.stack import (
    CompressiveMemory,
    EarlyExitStack,
    FeedbackStack,
    Halting,
    PerLayerContextStack,
    RealFormerStack,
    ReversibleStack,
    SegmentStack,
    SequentialStack,
    SharedStack,
    UniversalStack,
    build_sublayers,
)
from regard.state import (
    JoinedState,
    check_state,
    detach,
    join,
    split,
    state_batch_size,
    state_bytes,
    take,
)
from regard.testing import check_mixer, join_streams
from stacks import block

STREAMING = regard.list_recipes(can=["causal", "stream"])


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def alone(streams, x, starts, **more):
    """The states of the first tokens of each sequence, every one in a stream of its own."""
    return [
        streams.stream(row[None, :n], **more)[1] if n else None
        for row, n in zip(x, starts, strict=True)
    ]


def advance(streams, x, whole, state, starts, sizes):
    """Stream on from a joined state, and compare with the whole sequences; the next state."""
    at = list(starts)
    for size in sizes:
        chunk = torch.stack([row[n : n + size] for row, n in zip(x, at, strict=True)])
        want = torch.stack([row[n : n + size] for row, n in zip(whole, at, strict=True)])
        y, state = streams.stream(chunk, state)
        same(y, want)
        at = [n + size for n in at]
    return state, at


@pytest.mark.parametrize("name", STREAMING)
def test_every_recipe(name):
    """Fails if a recipe goes on otherwise in a joined batch than alone."""
    torch.manual_seed(0)
    with torch.no_grad():
        assert join_streams(get_recipe(name).example(causal=True).double().eval(), 23)


PATTERNS = {
    "dense": Full(),
    "window": Band(20, 0),
    "sinks": Band(20, 0) | Keys(0, 4),
    "chunks": Chunks(30),
    "heads": PerHead((Band(3, 0), Chunks(40))),
}


@pytest.mark.parametrize("rotary", [None, Rope()], ids=["", "rope"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_caches_of_any_length(pattern, rotary, rand):
    """Fails if a key of a longer, a shorter or an empty cache is seen wrongly, lost, or kept for
    ever; before and after keys are evicted, with sinks, token by token and in chunks."""
    torch.manual_seed(0)
    inner = SoftmaxAttention(pattern)
    mixer = MultiHead(8, 2, inner, causal=True, rotary=rotary).double()
    x, starts = rand(5, 420, 8), [0, 7, 130, 64, 230]
    with torch.no_grad():
        whole = mixer(x)
        state = join(alone(mixer, x, starts))
        state, at = advance(mixer, x, whole, state, starts, [1] * 40 + [7, 1, 65] + [1] * 30)
        cache = state if rotary is None else state.inner
        if pattern != Full():
            assert cache.k.shape[2] < 220, "keys that nobody sees are kept"
        assert torch.equal(cache.next_position, torch.tensor(at))
        order = [4, 0, 2]
        rest, _ = mixer.stream(
            torch.stack([x[i, at[i] : at[i] + 5] for i in order]), take(state, order)
        )
        same(rest, torch.stack([whole[i, at[i] : at[i] + 5] for i in order]))
        for i, part in enumerate(split(state)):
            own = part if rotary is None else part.inner
            assert isinstance(own.next_position, int) and isinstance(own.positions, np.ndarray)
            y, _ = mixer.stream(x[i : i + 1, at[i] : at[i] + 3], part)
            same(y, whole[i : i + 1, at[i] : at[i] + 3])


PRIORS = {
    "alibi": lambda: ALiBi(2),
    "cap and sinks": lambda: ALiBi(2) + SoftCap(2.0) + Sinks(2, start=0.5),
    "gaussian": lambda: Gaussian(2, 3.0),
    "distance": lambda: DistanceBias(2),
    "t5": lambda: T5Bias(2, causal=True),
    "shaw": lambda: ShawBias(4, clip=5),
    "xl": lambda: TransformerXLBias(2, 4, 8),
    "tupe": lambda: TUPEBias(2, 8, 64, buckets=8, max_distance=16, causal=True),
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_priors(prior, rand):
    """Fails if a bias is taken at the positions of another example."""
    torch.manual_seed(0)
    for options in ({}, {"kv_heads": 1}):
        inner = SoftmaxAttention(Band(9, 0) | Keys(0, 2), prior())
        mixer = MultiHead(8, 2, inner, causal=True, **options).double()
        x, starts = rand(3, 40, 8), [2, 15, 0]
        with torch.no_grad():
            advance(mixer, x, mixer(x), join(alone(mixer, x, starts)), starts, [1, 6, 1])


def test_a_prior_has_an_end(rand):
    """Fails if only the first example is held to the length that a prior was built for."""
    mixer = MultiHead(8, 2, SoftmaxAttention(prior=TUPEBias(2, 8, 64)), causal=True).double()
    with torch.no_grad():
        state = join(alone(mixer, rand(2, 60, 8), [1, 60]))
        with pytest.raises(ValueError, match="prior supports 64 positions"):
            mixer.stream(rand(2, 9, 8), state)


@pytest.mark.parametrize(
    "encoding",
    [
        SinusoidalEmbedding(8),
        LearnedEmbedding2D(8, 6, 8),
        FourierEmbedding(8, 48),
    ],
    ids=lambda encoding: type(encoding).__name__,
)
def test_position_embeddings(encoding, rand):
    """Fails if tokens are embedded at the positions of another example."""
    mixer = with_position(get_recipe("linear").example(8, causal=True), encoding).double()
    x, starts = rand(3, 40, 8), [2, 15, 0]
    with torch.no_grad():
        advance(mixer, x, mixer(x), join(alone(mixer, x, starts)), starts, [1, 6, 1])
        if encoding.length is not None:
            with pytest.raises(ValueError, match="reaches position 48"):
                mixer.stream(rand(2, 4, 8), join(alone(mixer, rand(2, 45, 8), [45, 1])))


def exits(dim=8):
    return {1: torch.nn.Linear(dim, 3), 2: torch.nn.Linear(dim, 3)}


STACKS = {
    "sequential": lambda: SequentialStack(
        [block(name, causal=True) for name in ("vanilla", "retnet", "bp_transformer", "local")]
    ),
    "shared": lambda: SharedStack([block("local", causal=True)], 3),
    "reversible": lambda: ReversibleStack(
        build_sublayers(get_recipe("reformer").example(8, causal=True), MLP(8))
    ),
    "realformer": lambda: RealFormerStack([block("realformer", causal=True) for _ in range(2)]),
    "universal": lambda: UniversalStack(block("vanilla", causal=True), 3),
    "halting": lambda: UniversalStack(block("linear", causal=True), 3, halting=Halting(8)),
    "feedback": lambda: FeedbackStack([block(causal=True), block(causal=True)], span=7),
    "segments": lambda: SegmentStack(
        [block(causal=True), block("linear", causal=True)], segment_length=5, memory=6
    ),
    "compressive": lambda: SegmentStack(
        [block(causal=True)],
        segment_length=4,
        memory=lambda dim: CompressiveMemory(
            dim, memory_length=4, compressed_length=3, compression_rate=2
        ),
    ),
    "early exit": lambda: EarlyExitStack(
        [block(causal=True), block("linear", causal=True)], exits(), threshold=0.45
    ),
    "nested": lambda: SequentialStack(
        [
            UniversalStack(block("local", causal=True), 2),
            SequentialStack([block(causal=True), block("sinkhorn", causal=True)]),
        ]
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks(name, rand):
    """Fails if a stack mixes the memories of examples, or ends a segment for all at once."""
    torch.manual_seed(0)
    stack = STACKS[name]().double().eval()
    x, starts = rand(4, 30, 8), [0, 4, 11, 4]
    with torch.no_grad():
        whole = stack(x)
        state = join(alone(stack, x, starts))
        state, at = advance(stack, x, whole, state, starts, [1, 5, 1, 1])
        order = [2, 0, 3, 1]
        state = join(split(take(state, order), [1, 3]))
        pick = [at[i] for i in order]
        advance(stack, x[order], whole[order], state, pick, [1, 4])


def test_stacks_with_a_context(rand):
    """Fails if an example attends to the context of another, in groups or together."""
    torch.manual_seed(0)
    blocks = [block("bp_transformer", causal=True, cross=True), block(causal=True, cross=True)]
    universal = UniversalStack(blocks[0], 2)
    for stack in (SequentialStack(blocks), PerLayerContextStack(blocks), universal):
        stack = stack.double()
        x, context, starts = rand(3, 20, 8), rand(3, 7, 8), [0, 4, 9]
        batch = 0
        if isinstance(stack, PerLayerContextStack):
            context, batch = rand(2, 3, 7, 8), 1
        mask = torch.arange(7) < torch.tensor([7, 5, 3])[:, None]
        with torch.no_grad():
            whole = stack(x, context, context_mask=mask)
            states = [
                stack.stream(
                    x[i : i + 1, :n],
                    context=context.narrow(batch, i, 1),
                    context_mask=mask[i : i + 1],
                )[1]
                if n
                else None
                for i, n in enumerate(starts)
            ]
            state, at = join(states), starts
            for size in (1, 3, 1):
                chunk = torch.stack([x[i, n : n + size] for i, n in enumerate(at)])
                y, state = stack.stream(chunk, state, context=context, context_mask=mask)
                same(y, torch.stack([whole[i, n : n + size] for i, n in enumerate(at)]))
                at = [n + size for n in at]
            fresh = join([None] * 3)
            y, _ = stack.stream(x, fresh, context=context, context_mask=mask)
            same(y, whole)


def test_only_the_attention_runs_in_groups(rand):
    """Fails if the projections or the feed-forward layer of a mechanism with blocks run once for
    each position."""
    layer = Block(get_recipe("memory_compressed").example(8, causal=True), MLP(8)).double()
    x, starts = rand(3, 20, 8), [3, 5, 10]
    sizes = []
    for module in (layer.mixer.q, layer.ffn):
        module.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    with torch.no_grad():
        state = join(alone(layer, x, starts))
        assert isinstance(state, JoinedState) and len(state.groups) == 3
        sizes.clear()
        layer.stream(x[:, :1], state)
    assert sizes == [3, 3]


def test_examples_that_agree_share_again(rand):
    """Fails if streams that stand at the same position keep a position for each of them: they
    would take the slow path for ever."""
    mixer = get_recipe("local").example(8, causal=True).double()
    x = rand(4, 60, 8)
    with torch.no_grad():
        a, b = mixer.stream(x[:2, :50])[1], mixer.stream(x[2:, :9])[1]
        both = join([a, b])
        again = take(both, [0, 1])
        assert again.next_position == 50 and np.array_equal(again.positions, a.positions)
        assert torch.equal(again.k, a.k) and state_bytes(again) <= state_bytes(a)
        equal = join([a, mixer.stream(x[2:, :50])[1]])
        assert equal.next_position == 50 and isinstance(equal.positions, np.ndarray)
        parts = split(both, [2, 2])
        assert parts[1].k.shape == b.k.shape and torch.equal(parts[1].k, b.k)


def test_a_joined_cache_is_a_value(rand):
    """Fails if the continuation of a joined state writes into what another continuation, or a
    stream alone, still reads."""
    mixer = MultiHead(8, 2, SoftmaxAttention(), causal=True).double()
    x, starts = rand(2, 90, 8), [3, 20]
    with torch.no_grad():
        whole, states = mixer(x), alone(mixer, x, starts)
        state = join(states)
        state, at = advance(mixer, x, whole, state, starts, [1] * 10)
        pointer = state.k.data_ptr()
        mixer.stream(rand(2, 3, 8), state)
        after, _ = advance(mixer, x, whole, state, at, [1] * 20)
        mixer.stream(rand(2, 3, 8), after)
        advance(mixer, x, whole, state, at, [1] * 30)
        y, _ = mixer.stream(x[1:, 20:30], states[1])
        same(y, whole[1:, 20:30])
        moved = {pointer}
        for _ in range(60):
            _, after = mixer.stream(x[:, :1], after)
            moved.add(after.k.data_ptr())
    assert len(moved) <= 4, "the cache is copied at every token"


def test_gradients(rand):
    """Fails if gradients stop at a join, or reach another example."""
    mixer = MultiHead(8, 2, SoftmaxAttention(Band(6, 0)), causal=True, rotary=Rope()).double()
    x = rand(2, 12, 8).requires_grad_()
    state = join([mixer.stream(x[:1, :3])[1], mixer.stream(x[1:, :8])[1]])
    y, state = mixer.stream(torch.cat((x[:1, 3:5], x[1:, 8:10])), state)
    z, _ = mixer.stream(torch.cat((x[:1, 5:6], x[1:, 10:11])), state)
    (got,) = torch.autograd.grad(y.square().sum() + z.square().sum(), x, retain_graph=True)
    whole = mixer(x)
    (want,) = torch.autograd.grad(whole[0, 3:6].square().sum() + whole[1, 8:11].square().sum(), x)
    same(got, want)
    (own,) = torch.autograd.grad(y[0].sum(), x)
    assert own[0].abs().max() > 0 and own[1].abs().max() == 0
    assert not any(t.requires_grad for t in (detach(state).inner.k, detach(state).inner.v))


# ---------------------------------------------------------------------------------------- models
def small_model(kind="decoder", **more):
    usual = {
        "input": TokenInput(vocab_size=11),
        "dim": 8,
        "heads": 2,
        "layers": 2,
        "length": 40,
        "mixer": ["local", "sinkhorn"],
        "head": LMHeadConfig(),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(ModelConfig(kind=kind, **{**usual, **more})).double().eval()


def some_tokens(b, n, seed=0):
    return torch.randint(0, 11, (b, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("position", ["learned", "sinusoid", "rope", "alibi", "none"])
def test_decoders(position):
    """Fails if a model embeds tokens at the position of another example."""
    model = small_model(position=position, mixer=["local", "vanilla"])
    x, starts = some_tokens(4, 30), [0, 3, 20, 3]
    with torch.no_grad():
        whole = model(x)
        state = join(alone(model, x, starts))
        assert isinstance(state, JoinedState)  # the model's own None has no layers yet
        state, at = advance(model, x, whole, state, starts, [1, 4, 1])
        assert isinstance(state, StreamState) and state.position.tolist() == at
        parts = split(state)
        assert [part.position for part in parts] == at
        advance(model, x[[2, 1]], whole[[2, 1]], join([parts[2], parts[1]]), [at[2], at[1]], [1, 2])
    if position == "learned":
        with pytest.raises(ValueError, match="position 42"), torch.no_grad():
            model.stream(some_tokens(2, 8), join(alone(model, some_tokens(2, 35), [35, 3])))


def test_vectors(rand):
    """Fails if a model over vectors does not join."""
    model = small_model(input=VectorInput(width=3), head=None, mixer=["linear", "retnet"])
    x, starts = rand(3, 20, 3), [2, 9, 0]
    with torch.no_grad():
        advance(model, x, model(x), join(alone(model, x, starts)), starts, [1, 4])


def test_sequence_to_sequence():
    """Fails if an example attends to the source of another, or padding of a shorter source is
    read."""
    model = small_model("seq2seq", mixer="local")
    sources = [some_tokens(1, n, seed=n) for n in (5, 9, 5)]
    target, starts = some_tokens(3, 16, seed=1), [2, 6, 4]
    with torch.no_grad():
        steps = [model.decoding_step(source) for source in sources]
        whole = [model(s, target[i : i + 1]) for i, s in enumerate(sources)]
        states = [
            step(target[i : i + 1, :n], None)[1]
            for i, (step, n) in enumerate(zip(steps, starts, strict=True))
        ]
        state, at = join(states), list(starts)
        for size in (1, 3, 1):
            chunk = torch.stack([target[i, n : n + size] for i, n in enumerate(at)])
            logits, state = steps[0](chunk, state)
            same(logits, torch.cat([whole[i][:, n : n + size] for i, n in enumerate(at)]))
            at = [n + size for n in at]


def test_generation_continues_joined_streams():
    """Fails if prompts that were read apart are not continued together as each alone."""
    model = small_model(mixer=["local", "vanilla"])
    prompts = [some_tokens(1, n, seed=n)[0].tolist() for n in (4, 9, 1)]
    apart = [generate(model.stream, [prompt], max_new_tokens=5)[0] for prompt in prompts]
    with torch.no_grad():
        states = [
            model.stream(torch.tensor([prompt[:-1]]))[1] if prompt[:-1] else None
            for prompt in prompts
        ]
    together = generate(
        model.stream, [prompt[-1:] for prompt in prompts], max_new_tokens=5, state=join(states)
    )
    assert [each.tokens for each in together] == [each.tokens for each in apart]


# ---------------------------------------------------------------------------------- other mixers
class CountedSum(NamedTuple):
    total: torch.Tensor | None
    tokens: int


class Mean(Mixer):
    """out_t = mean of x up to t, by a mixer that knows nothing of joined states."""

    def __init__(self, form):
        toy = dict.fromkeys(("cross", "mask", "attn_mask", "maps"), "a toy")
        super().__init__(4, can=Can(**toy), causal=True)
        self.form, self.scale = form, torch.nn.Parameter(torch.ones(()))

    def initial_state(self):
        return CountedSum(None, 0) if self.form == "named" else {"total": None, "tokens": 0}

    def mix(self, x, context, mask, state):
        total, tokens = x.cumsum(1), 0
        if state is not None:
            before, tokens = state if self.form == "named" else state.values()
            assert isinstance(tokens, int)
            total = total if before is None else total + before
        y = total / torch.arange(tokens + 1, tokens + x.shape[1] + 1)[:, None]
        if self.form == "ignores":  # wrong: counts the examples instead of the tokens
            tokens = tokens + len(x) - x.shape[1]
        if self.form == "named":
            return self.scale * y, CountedSum(total[:, -1:], tokens + x.shape[1])
        return self.scale * y, {"total": total[:, -1:], "tokens": tokens + x.shape[1]}


def only_causal(form):
    def built(causal):
        if not causal:
            raise regard.Unsupported("a toy")
        return Mean(form)

    return built


def test_any_mixer_joins():
    """Fails if a mixer from elsewhere needs code for joined states, or the check cannot fail."""
    for form in ("named", "dict"):
        assert check_mixer(only_causal(form))["join"] == "supported"
    with pytest.raises(AssertionError):
        check_mixer(only_causal("ignores"))


# ----------------------------------------------------------------------------------------- states
def test_states_that_have_read_nothing(rand):
    """Fails if streams that have not begun are not counted."""
    mixer = get_recipe("local").example(8, causal=True).double()
    for first in (None, mixer.initial_state()):
        state = join([first, first])
        assert state_batch_size(state) == 2 and state_batch_size(join([state, first])) == 3
        assert [state_batch_size(part) for part in split(state)] == [1, 1]
        check_state(state, mixer.initial_state(), 2)
        x = rand(2, 5, 8)
        with torch.no_grad():
            y, state = mixer.stream(x, state)
            same(y, mixer(x))
        assert not isinstance(state, JoinedState)
        with pytest.raises(ValueError, match="has 3 examples, but the input has 2"):
            mixer.stream(x, join([first, first, first]))
    assert split(None, [1, 2]) == [None, None]
    with pytest.raises(ValueError, match="has not read a token"):
        split(mixer.initial_state())


def test_join_errors(rand):
    """Fails if what cannot be joined ends in a raw error, or is joined."""

    def state(name="local", dim=8, n=3, dtype=torch.float64, **more):
        mixer = regard.create(name, dim=dim, causal=True, **more).to(dtype)
        with torch.no_grad():
            return mixer.stream(rand(1, n, dim).to(dtype))[1]

    local = state(heads=2)
    with pytest.raises(ValueError, match="the list is empty"):
        join([])
    for wrong in (local, torch.zeros(2), {"a": local}, 3):
        with pytest.raises(TypeError, match="join takes a list of states"):
            join(wrong)
    with pytest.raises(TypeError, match="a state consists of"):
        join([(3, "text"), (3, "text")])
    for wrong in ([3, 4], [local, "text"], [None, 1.0]):
        with pytest.raises(TypeError, match=r"states\[\d\] is not a state, but (int|str|float)"):
            join(wrong)
    with pytest.raises(ValueError, match=r"states 0 and 1 .*KVCache.*different modules"):
        join([local, state("linear", heads=2)])
    with pytest.raises(ValueError, match="one has 2 heads, the other 4"):
        join([local, state(heads=4)])
    with pytest.raises(ValueError, match="keys have width 4 and 8"):
        join([local, state(dim=16, heads=2)])
    with pytest.raises(ValueError, match=r"states 0 and 2 .*float64 on cpu and torch.float32"):
        join([local, local, state(heads=2, dtype=torch.float32)])
    with pytest.raises(ValueError, match=r"state.kv has shapes \(1, 2, 4, 5\) and \(1, 4, 2, 3\)"):
        join([state("linear", heads=2), state("linear", heads=4)])
    two, three = (SequentialStack([block(causal=True)] * n).double() for n in (2, 3))
    with torch.no_grad(), pytest.raises(ValueError, match="different modules"):
        join([two.stream(rand(1, 3, 8))[1], three.stream(rand(1, 3, 8))[1]])


def test_split_errors(rand):
    """Fails if sizes that do not fit are accepted."""
    with torch.no_grad():
        state = get_recipe("local").example(8, causal=True).double().stream(rand(3, 4, 8))[1]
    with pytest.raises(ValueError, match=r"3 examples of the state, but \[1, 1\] sums to 2"):
        split(state, [1, 1])
    with pytest.raises(ValueError, match=r"sizes\[1\] must be an integer >= 1, not 0"):
        split(state, [3, 0])
    with pytest.raises(ValueError, match="has 3 examples, but index ranges from 0 to 3"):
        take(join([state]), [0, 3])
    for wrong in (None, "a", [None]):
        with pytest.raises(ValueError, match="index must be a list or 1-D tensor of integers"):
            take(state, wrong)
    for wrong in (3, "21", torch.tensor(3), np.int64(3)):
        with pytest.raises(TypeError, match="sizes must be a list of integers"):
            split(state, wrong)
    with pytest.raises(ValueError, match=r"sizes\[0\] must be an integer >= 1, not 2.0"):
        split(state, torch.tensor([2.0, 1.0]))


def test_sizes_of_split(rand):
    """Fails if sizes of another type than a list of ints are refused or misread."""
    with torch.no_grad():
        state = get_recipe("local").example(8, causal=True).double().stream(rand(3, 4, 8))[1]
    sizes = (
        torch.tensor([2, 1]),
        np.array([2, 1]),
        [np.int64(2), torch.tensor(1)],
        iter([2, 1]),
    )
    for given in sizes:
        assert [state_batch_size(part) for part in split(state, given)] == [2, 1]


def test_batch_size_of_a_joined_model_state():
    """Fails if a wrong number of examples is reported as something else, or none cannot stream."""
    model, x = small_model(position="learned", mixer=["local", "vanilla"]), some_tokens(1, 5)
    with torch.no_grad():
        three, five = model.stream(x[:, :3])[1], model.stream(x)[1]
        for state in (join([three, five]), join([three, None])):
            with pytest.raises(ValueError, match="has 2 examples, but the input has 1: select"):
                model.stream(x[:, :1], state)
        empty = join([take(three, []), take(five, [])])
        assert model.stream(x[:0, :2], empty)[0].shape == (0, 2, 11)


def test_invalid_positions(rand):
    """Fails if positions that differ between examples are taken in another form."""
    q = rand(2, 1, 3, 4)
    with pytest.raises(
        ValueError, match=r"q_start \(b\) and k_positions \(b m\), not \(2,\) and 0"
    ):
        regard.attend(q, q, q, q_start=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"start must be an integer or an int64 tensor"):
        SinusoidalEmbedding(4)(q[:, 0], torch.tensor([0, 1, 2]))
