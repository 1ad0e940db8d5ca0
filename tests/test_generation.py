"""Generation: streams equal whole forward passes, for all prompts, strategies and stops."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import regard
from regard.block import Block
from regard.ffn import MLP
from regard.models import build, generate, gpt, sampling, stream_tokens, transformer
from regard.models.beam import BeamSearchConfig, beam_search
from regard.models.sampling import (
    GreedySearch,
    MinPFilter,
    NoRepeatNGram,
    RepetitionPenalty,
    Sampling,
    Temperature,
    TopKFilter,
    TopPFilter,
    TypicalFilter,
)
from regard.models.stopping_criteria import StoppingCriteria
from regard.registry import get_recipe
from regard.stack import SequentialStack

VOCAB = 11
PROMPTS = [[3, 1, 4, 1, 5], [2], [7, 1, 8, 2, 8, 1, 8], [6, 6]]


class TinyModel(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, *names, vocab_size=VOCAB, dim=8):
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(vocab_size, dim),
            nn.Linear(dim, vocab_size, bias=False),
        )
        self.layers = SequentialStack(
            [Block(get_recipe(name).example(dim, causal=True), MLP(dim)) for name in names]
        )
        self.calls = []

    def step(self, tokens, state):
        self.calls.append(tuple(tokens.shape))
        y, state = self.layers.stream(self.embed(tokens), state)
        return 3 * self.head(y), state

    def logits(self, row):
        """After a whole row, without any state."""
        with torch.no_grad():
            return 3 * self.head(self.layers(self.embed(torch.tensor([row]))))[0, -1]


def model(*names, **more):
    torch.manual_seed(0)
    return TinyModel(*names, **more).double().eval()


def greedy(tiny, prompt, length):
    """New tokens and their log-probabilities, by recomputing the whole sequence per token."""
    row, logp = list(prompt), []
    for _ in range(length):
        values = tiny.logits(row).log_softmax(-1)
        row.append(max(range(len(values)), key=lambda i: values[i]))
        logp.append(values[row[-1]].item())
    return row[len(prompt) :], logp


# ---------------------------------------------------------------------------------------- streaming
@pytest.mark.parametrize("name", regard.list_recipes(can=["causal", "stream"]))
def test_greedy_matches_recomputation(name):
    """Every recipe generates from its state what whole sequences give, in any batch."""
    tiny = model(name)
    found = generate(tiny.step, PROMPTS, max_new_tokens=6)
    for prompt, result in zip(PROMPTS, found, strict=True):
        tokens, logp = greedy(tiny, prompt, 6)
        assert result.tokens == tokens and result.finish_reason == "length" and result.text is None
        assert result.logprobs == pytest.approx(
            logp, abs=1e-9
        ) and result.total_logprob == pytest.approx(sum(logp))


@pytest.mark.parametrize(
    "strategy",
    [
        GreedySearch(),
        GreedySearch(RepetitionPenalty(1.4)),
        Sampling(Temperature(1.3), TopKFilter(6), TopPFilter(0.9), seed=3),
    ],
)
def test_other_prompts_have_no_influence(strategy):
    """Neither states nor random numbers depend on the other prompts of the batch."""
    tiny = model("vanilla", "linear", "local", "retnet")
    found = generate(tiny.step, PROMPTS, max_new_tokens=9, strategy=strategy)
    other = generate(
        tiny.step, [PROMPTS[0], [9], PROMPTS[2], [5] * 12], max_new_tokens=9, strategy=strategy
    )
    alone = generate(tiny.step, PROMPTS[:1], max_new_tokens=9, strategy=strategy)
    for a, b in ((found[0], other[0]), (found[2], other[2]), (found[0], alone[0])):
        assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-9)


@pytest.mark.parametrize("name", ["vanilla", "local", "linear", "retnet", "sinks"])
def test_each_prompt_with_its_own_seed_continues_as_alone(name):
    """Fails if a sample depends on the place in the batch, for any processor."""
    tiny, seeds = model(name), [3, 3, 0, 8]
    shapes = (
        RepetitionPenalty(1.3),
        NoRepeatNGram(3),
        Temperature(1.2),
        TopKFilter(8),
        TopPFilter(0.95),
        MinPFilter(0.01),
        TypicalFilter(0.9),
    )
    together = generate(
        tiny.step, PROMPTS, max_new_tokens=9, strategy=Sampling(*shapes, seed=seeds)
    )
    for prompt, seed, found in zip(PROMPTS, seeds, together, strict=True):
        strategy = Sampling(*shapes, seed=seed)
        (alone,) = generate(tiny.step, [prompt], max_new_tokens=9, strategy=strategy)
        assert found.tokens == alone.tokens
    with pytest.raises(ValueError, match="2 seeds, but there is a prompt 3"):
        generate(tiny.step, PROMPTS, max_new_tokens=2, strategy=Sampling(seed=[1, 2]))


def test_forms_of_prompts():
    """Tensors, lists and a bos_token_id are equivalent."""
    tiny = model("local")
    want = generate(tiny.step, [[4, 2], [4, 7]], max_new_tokens=3)
    assert generate(tiny.step, torch.tensor([[4, 2], [4, 7]]), max_new_tokens=3) == want
    assert (
        generate(
            tiny.step, [torch.tensor([2]), torch.tensor([7])], max_new_tokens=3, bos_token_id=4
        )
        == want
    )
    assert generate(tiny.step, [[]], max_new_tokens=3, bos_token_id=4) == generate(
        tiny.step, [[4]], max_new_tokens=3
    )
    assert generate(tiny.step, [], max_new_tokens=3) == []


def test_prompts_are_fed_in_chunks():
    """Known tokens are fed in chunks, and finished examples are not computed."""
    tiny = model("vanilla")
    generate(tiny.step, [[1] * 4, [2] * 6, [3] * 20], max_new_tokens=3)
    # Four tokens of each. The first ends after 7, when the second has generated two tokens; then
    # the rest of the third is fed at once.
    assert tiny.calls == [(3, 4), (3, 1), (3, 1), (2, 1), (2, 1), (1, 12), (1, 1), (1, 1)]


def test_initial_state(rand):
    """The initial state is used, and reordered with the examples."""
    torch.manual_seed(0)
    ask = regard.create("vanilla", dim=8, heads=2)
    layers = (
        SequentialStack([Block(get_recipe("vanilla").example(8, causal=True), MLP(8), cross=ask)])
        .double()
        .eval()
    )
    embed, seen = nn.Embedding(VOCAB, 8).double(), rand(3, 5, 8)

    def step(tokens, state):
        context, inner = state
        y, inner = layers.stream(embed(tokens), inner, context=context)
        return 5 * y @ embed.weight.T, (context, inner)

    prompts = [[1], [2, 3, 4], [5, 6]]
    together = generate(step, prompts, max_new_tokens=5, state=(seen, layers.initial_state()))
    for i, prompt in enumerate(prompts):
        alone = generate(
            step, [prompt], max_new_tokens=5, state=(seen[i : i + 1], layers.initial_state())
        )
        assert alone[0].tokens == together[i].tokens


def test_generate_from_decoder():
    """A built decoder generates, and its positions continue."""
    torch.manual_seed(0)
    ours = (
        build(gpt(2, 8, 2, vocab_size=VOCAB, length=32, mixer=["vanilla", "linear"]))
        .double()
        .eval()
    )
    for prompt, result in zip(
        PROMPTS, generate(ours.stream, PROMPTS, max_new_tokens=5), strict=True
    ):
        row = list(prompt)
        with torch.no_grad():
            for _ in range(5):
                row.append(int(ours(torch.tensor([row]))[0, -1].argmax()))
        assert result.tokens == row[len(prompt) :]


def test_generate_from_seq2seq():
    """The encoded source follows its examples when some end and when beams repeat."""
    torch.manual_seed(0)
    ours = build(transformer(1, 8, 2, vocab_size=VOCAB)).double().eval()
    source, real = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0], [8, 9, 0, 0]]), [4, 3, 2]
    mask = torch.arange(4) < torch.tensor(real)[:, None]
    prompts, step = [[1], [2, 3, 4], [5, 6]], ours.decoding_step(source, mask)
    together, beams = (
        generate(step, prompts, max_new_tokens=4),
        beam_search(step, prompts, BeamSearchConfig(3, num_return_sequences=3), max_new_tokens=4),
    )
    for i, prompt in enumerate(prompts):
        alone = ours.decoding_step(source[i : i + 1, : real[i]])
        assert generate(alone, [prompt], max_new_tokens=4)[0].tokens == together[i].tokens
        (found,) = beam_search(
            alone, [prompt], BeamSearchConfig(3, num_return_sequences=3), max_new_tokens=4
        )
        assert [r.tokens for r in found] == [r.tokens for r in beams[i]]


def test_generation_builds_no_graph():
    """Generation builds no graph, and does not change the caller's gradient mode."""
    tiny = model("vanilla")
    pieces = stream_tokens(tiny.step, [[1]], max_new_tokens=2)
    next(pieces)
    assert torch.is_grad_enabled()
    seen = []

    def step(tokens, state):
        logits, state = tiny.step(tokens, state)
        seen.append(logits.requires_grad)
        return logits, state

    list(stream_tokens(step, [[1]], max_new_tokens=3))
    assert seen == [False] * 3


# ----------------------------------------------------------------- logits processors and strategies
def naive_top_p(p, probabilities):
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    kept, total = [], 0.0
    for i in order:
        kept.append(i)
        total += probabilities[i]
        if total >= p:
            break
    return set(kept)


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.75, 0.999])
def test_filters_match_loops(p, rand):
    """Filters keep the same tokens as loops, also with ties."""
    logits = (rand(40, 9) * 2).round()  # many equals
    for row in logits:
        probabilities = row.softmax(-1).tolist()
        order = sorted(range(9), key=lambda i: (-row[i].item(), i))
        kept = {
            "top p": (TopPFilter(p), naive_top_p(p, probabilities)),
            "min p": (
                MinPFilter(p),
                {i for i in range(9) if probabilities[i] >= p * max(probabilities) * (1 - 1e-9)},
            ),
            "top k": (TopKFilter(3), set(order[:3])),
        }
        for name, (shape, want) in kept.items():
            got = shape(row[None])[0]
            assert set(got.isfinite().nonzero()[:, 0].tolist()) == want, name
            assert all(got[i] == row[i] for i in want)


def test_processors_equal_those_of_transformers(rand):
    """Fails if a processor keeps other tokens or changes other logits than the one of
    transformers, also after another processor has excluded tokens."""
    theirs = pytest.importorskip("transformers.generation.logits_process")
    rows = torch.randint(12, (30, 25), generator=torch.Generator().manual_seed(0))
    pairs = [
        (Temperature(0.7), theirs.TemperatureLogitsWarper(0.7)),
        *((TopKFilter(k), theirs.TopKLogitsWarper(k)) for k in (1, 5, 40)),
        *((TopPFilter(p), theirs.TopPLogitsWarper(p)) for p in (0.1, 0.5, 0.95)),
        *((MinPFilter(p), theirs.MinPLogitsWarper(p)) for p in (0.01, 0.3)),
        *((TypicalFilter(p), theirs.TypicalLogitsWarper(p)) for p in (0.1, 0.5, 0.95)),
        *(
            (RepetitionPenalty(c), theirs.RepetitionPenaltyLogitsProcessor(c))
            for c in (0.8, 1.0, 1.5)
        ),
        *((NoRepeatNGram(n), theirs.NoRepeatNGramLogitsProcessor(n)) for n in (1, 2, 3)),
    ]
    for scale in (0.5, 4.0):
        plain = scale * rand(30, 40)
        for logits in (plain, TopKFilter(20)(plain)):
            for ours, other in pairs:
                got = ours(logits, rows.tolist())
                torch.testing.assert_close(got, other(rows, logits.clone()), rtol=1e-6, atol=1e-9)


def test_typical_sampling_excludes_what_is_too_probable():
    """Fails if tokens are ordered by probability: 0.2 is nearest to the entropy, then 0.6."""
    logits = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log()  # entropy 1.09, information 0.51 1.61 2.3
    assert TypicalFilter(0.15)(logits).isfinite().tolist() == [[False, True, False, False]]
    assert TypicalFilter(0.7)(logits).isfinite().tolist() == [[True, True, False, False]]
    assert torch.equal(TypicalFilter(1)(logits), logits)


def test_ngrams_leave_something():
    """Fails if all tokens are excluded, or an n-gram of the prompt may come again."""
    logits = torch.zeros(2, 3)
    got = NoRepeatNGram(1)(logits, [[0, 1, 2], [0, 2]])
    assert got.isfinite().tolist() == [[True] * 3, [False, True, False]]
    got = NoRepeatNGram(3)(logits, [[0, 1, 2, 0, 1], [0]])
    assert got.isfinite().tolist() == [[True, True, False], [True] * 3]
    tiny = model("local")
    (found,) = generate(
        tiny.step, [[1, 2, 3]], max_new_tokens=30, strategy=GreedySearch(NoRepeatNGram(2))
    )
    row = [1, 2, 3, *found.tokens]
    pairs = list(itertools.pairwise(row))
    assert len(set(pairs)) == len(pairs)


def test_temperature_and_penalty(rand):
    """Temperature, penalty and neutral filters change nothing else."""
    logits = rand(2, 5)
    assert torch.equal(Temperature(0.5)(logits), logits * 2)
    assert torch.equal(TopKFilter(9)(logits), logits) and torch.equal(TopPFilter(1)(logits), logits)
    assert torch.equal(MinPFilter(1)(logits).isfinite().sum(-1), torch.ones(2))
    got = RepetitionPenalty(2.0)(logits, [[0, 0, 3], [1]])
    for i, came in enumerate(([0, 3], [1])):
        for j in range(5):
            x = logits[i, j].item()
            assert got[i, j] == (x if j not in came else x * 2 if x < 0 else x / 2)
    assert TopPFilter(0.5)(torch.zeros(1, 4)).isfinite().sum() == 2


@pytest.mark.parametrize(
    ("shapes", "weights"),
    [
        ((), [0.5, 0.25, 0.125, 0.125]),
        ((Temperature(0.5),), [0.25, 0.0625, 0.015625, 0.015625]),
        ((TopKFilter(2),), [2, 1, 0, 0]),
        ((Temperature(0.5), TopPFilter(0.8)), [4, 1, 0, 0]),  # after the temperature: 0.727 + 0.182
        ((TopPFilter(0.8), Temperature(0.5)), [16, 4, 1, 0]),  # before it, three are needed
        ((MinPFilter(0.4),), [2, 1, 0, 0]),
    ],
)
def test_sampling_frequencies(shapes, weights):
    """Tokens are drawn with their probabilities, and processors run in order."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    count = 20000
    picked = Sampling(*shapes, seed=5).select(logits.expand(count, 4), [[0]] * count, range(count))
    found = picked.bincount(minlength=4) / count
    for got, weight in zip(found.tolist(), weights, strict=True):
        p = weight / sum(weights)
        assert abs(got - p) <= 4 * math.sqrt(p * (1 - p) / count)


def test_draws_differ_by_seed_example_and_position():
    """Draws that should be independent differ."""
    logits = torch.zeros(1, 1 << 20)
    draws = {
        Sampling(seed=seed).select(logits, [[0] * length], [example]).item()
        for seed, example, length in itertools.product(range(4), range(4), range(1, 5))
    }
    assert len(draws) == 64
    same = [Sampling(seed=1).select(logits, [[0]], [2]).item() for _ in range(2)]
    assert same[0] == same[1]


def test_sampling_does_not_use_global_generator():
    """Sampling does not use the global generator."""
    tiny, before = model("vanilla"), torch.random.get_rng_state()
    generate(tiny.step, [[1]], max_new_tokens=4, strategy=Sampling(seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_infinite_logits_are_never_drawn():
    """A token with logit −∞ is never drawn."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2000, 5)
    assert set(Sampling().select(logits, [[0]] * 2000, range(2000)).tolist()) == {1, 3}


@pytest.mark.parametrize(("drawn", "want"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
def test_extreme_draws(drawn, want, monkeypatch):
    """Extreme random numbers never select a token of zero probability."""
    monkeypatch.setattr(sampling, "uniform", lambda *key: drawn)
    assert Sampling().select(
        torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]), [[0]], [0]
    ).tolist() == [want]


# ----------------------------------------------------------------------------------- stops and text
def decode(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def scripted(*texts):
    """A model that generates these texts, a byte per token; prompts have one token."""
    script = [list(text.encode()) for text in texts]
    longest = max(map(len, script))
    text_ids = torch.tensor([row + [0] * (longest - len(row)) for row in script])

    def step(tokens, state):
        text_ids, start = state
        logits = nn.functional.one_hot(text_ids[:, start : start + tokens.shape[1]], 256).double()
        return 50 * logits, (text_ids, start + tokens.shape[1])

    return {
        "step": step,
        "prompts": [[1]] * len(texts),
        "state": (text_ids, 0),
        "max_new_tokens": longest,
    }


def test_stop_tokens():
    """A stop token is the last token, not in the text, and stops only its example."""
    found = generate(**scripted("ab.cd", "xyz.w"), stop=StoppingCriteria([ord(".")], decode=decode))
    assert [(decode(r.tokens), r.text, r.finish_reason) for r in found] == [
        ("ab.", "ab", "stop_token"),
        ("xyz.", "xyz", "stop_token"),
    ]


def test_stop_strings_across_tokens():
    """Stop strings across tokens are found, and the text ends before them."""
    stop = StoppingCriteria(strings=["END", "\n\n"], decode=decode)
    found = generate(**scripted("say ENDed", "a\n\nbEND", "EN EN enough"), stop=stop)
    assert [(r.text, r.finish_reason) for r in found] == [
        ("say ", "stop_string"),
        ("a", "stop_string"),
        ("EN EN enough", "length"),
    ]
    assert decode(found[0].tokens) == "say END"


def two_bytes(tokens):
    """Each token stands for two letters."""
    return "".join("ab" if token == 1 else "cd" for token in tokens)


def test_stop_string_ends_within_a_token():
    """A stop string may end within a token."""
    stop = StoppingCriteria(strings=["bc"], decode=two_bytes)
    assert (
        stop.finish_reason([1]) is None
        and stop.finish_reason([1, 2]) == "stop_string"
        and stop.text([1, 2]) == "a"
    )


def test_streamed_text_is_final():
    """Pieces hold no partial character or stop string, and join to the text."""
    texts = ["añ€😀 E EN!", "xENEND y", "END", "é€"]
    kwargs = scripted(*texts)
    stop = StoppingCriteria(strings=["END"], decode=decode)
    streamed = dict.fromkeys(range(4), "")
    expected_texts = ["añ€😀 E EN!", "xEN", "", "é€" + "\0" * 11]
    for piece in stream_tokens(**kwargs, stop=stop):
        streamed[piece.prompt_index] += piece.text
        assert "\N{REPLACEMENT CHARACTER}" not in piece.text
        assert expected_texts[piece.prompt_index].startswith(streamed[piece.prompt_index])
    assert list(streamed.values()) == expected_texts
    assert [r.text for r in generate(**kwargs, stop=stop)] == expected_texts


def test_text_is_streamed_without_delay():
    """Text is streamed as soon as it is final."""
    pieces = [
        p.text
        for p in stream_tokens(
            **scripted("aé EN EN€"), stop=StoppingCriteria(strings=["END"], decode=decode)
        )
    ]
    assert pieces == ["a", "", "é", " ", "", "", "EN ", "", "", "", "", "EN€"]


def test_incomplete_character_at_the_end():
    """An incomplete character at the end is shown."""
    kwargs = scripted("a€") | {"max_new_tokens": 2}
    assert (
        generate(**kwargs, stop=StoppingCriteria(decode=decode))[0].text
        == "a\N{REPLACEMENT CHARACTER}"
    )


def test_order_of_streamed_tokens():
    """Tokens of a step come in the order of the prompts, and each end is reported once."""
    tiny = model("local")
    pieces = list(stream_tokens(tiny.step, [[1, 2, 3], [4], [5, 6]], max_new_tokens=2))
    assert [(p.prompt_index, p.finish_reason) for p in pieces] == [
        (1, None),
        (1, "length"),
        (2, None),
        (0, None),
        (2, "length"),
        (0, "length"),
    ]
    found = generate(tiny.step, [[1, 2, 3], [4], [5, 6]], max_new_tokens=2)
    for i, result in enumerate(found):
        assert result.tokens == [p.token for p in pieces if p.prompt_index == i]


# -------------------------------------------------------------------------------------------- beams
def every_text(tiny, prompt, length, stop, vocab_size):
    """All texts that end by the stop token or with `length` tokens, and their scores."""
    found, under_way = [], [((), 0.0)]
    for n in range(1, length + 1):
        longer = []
        for text, total in under_way:
            values = tiny.logits([*prompt, *text]).log_softmax(-1).tolist()
            longer += [((*text, token), total + values[token]) for token in range(vocab_size)]
        found += [one for one in longer if one[0][-1] == stop or n == length]
        under_way = [one for one in longer if one[0][-1] != stop]
    return found


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.5, -0.5])
def test_beam_search_is_exhaustive_with_enough_beams(penalty):
    """With enough beams, the results are those of trying all texts."""
    tiny, prompts = model("vanilla", "linear", vocab_size=3), [[1, 2], [0], [2, 2, 1, 1]]
    found = beam_search(
        tiny.step,
        prompts,
        BeamSearchConfig(81, num_return_sequences=7, length_penalty=penalty),
        max_new_tokens=4,
        stop=StoppingCriteria([0]),
    )
    for prompt, results in zip(prompts, found, strict=True):
        texts = every_text(tiny, prompt, 4, 0, 3)
        want = sorted(
            ((total / len(text) ** penalty, text) for text, total in texts), reverse=True
        )[:7]
        assert [tuple(r.tokens) for r in results] == [text for _, text in want]
        assert [r.total_logprob / len(r.tokens) ** penalty for r in results] == pytest.approx(
            [score for score, _ in want]
        )
        assert all(
            r.finish_reason == ("stop_token" if r.tokens[-1] == 0 else "length") for r in results
        )


def naive_beams(tiny, prompt, count, length, stop, penalty):
    """Beam search without states or early ends: runs to the last token, then sorts."""
    under_way, ended = [((), 0.0)], []
    for n in range(1, length + 1):
        longer = []
        for text, total in under_way:
            values = tiny.logits([*prompt, *text]).log_softmax(-1).tolist()
            longer += [((*text, token), total + value) for token, value in enumerate(values)]
        longer.sort(key=lambda one: -one[1])
        going = [one for one in longer if one[0][-1] != stop and n < length][:count]
        best = longer[: 2 * count]
        ended += [one for one in best if one[0][-1] == stop or n == length]
        under_way = going
    return sorted(((total / len(text) ** penalty, text) for text, total in ended), reverse=True)


@pytest.mark.parametrize("names", [("vanilla",), ("local", "retnet"), ("linear",)])
@pytest.mark.parametrize(("count", "penalty"), [(1, 1.0), (2, 1.0), (3, 0.0), (4, 2.0)])
def test_beam_search_matches_naive_search(names, count, penalty):
    """States follow their hypotheses, for prompts of any length."""
    tiny = model(*names)
    found = beam_search(
        tiny.step,
        PROMPTS,
        BeamSearchConfig(count, num_return_sequences=count, length_penalty=penalty),
        max_new_tokens=6,
        stop=StoppingCriteria([5]),
    )
    for prompt, results in zip(PROMPTS, found, strict=True):
        want = naive_beams(tiny, prompt, count, 6, 5, penalty)[:count]
        assert [tuple(r.tokens) for r in results] == [text for _, text in want]


def test_one_beam_is_greedy():
    """One beam follows the most probable token."""
    tiny = model("vanilla", "local")
    found = beam_search(tiny.step, PROMPTS, BeamSearchConfig(1), max_new_tokens=6)
    assert [r[0].tokens for r in found] == [
        r.tokens for r in generate(tiny.step, PROMPTS, max_new_tokens=6)
    ]


def test_early_stopping():
    """Early stopping saves steps; otherwise a search ends once it is decided."""
    steps = []
    for beams in (
        BeamSearchConfig(2, early_stopping=True),
        BeamSearchConfig(2, length_penalty=0.0),
        BeamSearchConfig(2, length_penalty=4.0),
    ):
        tiny = model("vanilla", vocab_size=3)
        beam_search(tiny.step, [[1, 2]], beams, max_new_tokens=20, stop=StoppingCriteria([0]))
        steps.append(len(tiny.calls))
    assert steps[0] <= steps[1] < steps[2] == 20


@pytest.mark.parametrize(
    ("stops", "penalty", "length"),
    [
        ([0.7, 0.0], 0.0, 1),
        ([0.7, 0.0], 0.2, 1),
        ([0.7, 0.0], 1.0, 20),
        ([0.3, 1.0], -0.5, 2),
        ([0.3, 1.0], 0.0, 2),
    ],
)
def test_search_continues_while_a_longer_text_may_win(stops, penalty, length):
    """A search does not end while an active hypothesis can win, soon or much later."""
    first, later = (torch.tensor([p, 1 - p]).log() for p in stops)  # token 0 stops

    def step(tokens, state):
        return (first if state is None else later).expand(len(tokens), 1, 2), (state or 0) + 1

    ((best,),) = beam_search(
        step,
        [[1]],
        BeamSearchConfig(1, length_penalty=penalty),
        max_new_tokens=20,
        stop=StoppingCriteria([0]),
    )
    assert len(best.tokens) == length


def test_beams_with_stop_strings():
    """A hypothesis ends at its stop string."""
    stop = StoppingCriteria(strings=["b"], decode=lambda tokens: "".join("abc"[t] for t in tokens))
    tiny = model("vanilla", vocab_size=3)
    (found,) = beam_search(
        tiny.step,
        [[1, 2]],
        BeamSearchConfig(40, num_return_sequences=30),
        max_new_tokens=3,
        stop=stop,
    )
    want = {text for text, _ in every_text(tiny, [1, 2], 3, 1, 3)}
    assert {tuple(r.tokens) for r in found} == want and all("b" not in r.text for r in found)
    assert {r.finish_reason for r in found} == {"stop_string", "length"}


# ---------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Temperature(0), "above 0: use GreedySearch"),
        (lambda: Temperature(-1), "temperature must be a finite number above 0, not -1"),
        (lambda: Temperature(float("nan")), "temperature must be"),
        (lambda: TopKFilter(0), "k must be an integer >= 1, not 0"),
        (lambda: TopPFilter(0), "p must be a number above 0 and at most 1, not 0"),
        (lambda: TopPFilter(1.01), "p must be a number above 0 and at most 1, not 1.01"),
        (lambda: MinPFilter(-0.1), "p must be"),
        (lambda: RepetitionPenalty(0), "penalty must be"),
        (lambda: RepetitionPenalty(1.5)(torch.zeros(1, 3)), "needs the tokens so far"),
        (lambda: TypicalFilter(0), "p must be"),
        (lambda: NoRepeatNGram(0), "n must be an integer >= 1, not 0"),
        (lambda: NoRepeatNGram(2)(torch.zeros(1, 3)), "needs the tokens so far"),
        (lambda: Sampling(seed=-1), "seed must be"),
        (lambda: Sampling(seed=[0, -1]), "seed must be"),
        (lambda: BeamSearchConfig(0), "num_beams must be an integer >= 1, not 0"),
        (
            lambda: BeamSearchConfig(2, num_return_sequences=3),
            r"num_return_sequences must be at most num_beams \(2\), not 3",
        ),
        (
            lambda: BeamSearchConfig(2, length_penalty=float("inf")),
            "length_penalty must be a number from -16 to 16",
        ),
        (
            lambda: BeamSearchConfig(2, length_penalty=1000),
            "length_penalty must be a number from -16 to 16, not 1000",
        ),
        (lambda: StoppingCriteria([-1]), "token must be an integer >= 0, not -1"),
        (lambda: StoppingCriteria(strings=["x"]), "stop strings need decode"),
        (lambda: StoppingCriteria(strings=[""], decode=decode), "must be non-empty strings"),
    ],
)
def test_invalid_settings(make, words):
    """Invalid settings raise an error."""
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("prompts", "more", "error", "words"),
    [
        (
            [[1], []],
            {},
            ValueError,
            "prompt 1 is empty: give at least one token, or a bos_token_id",
        ),
        (
            [1, 2],
            {},
            TypeError,
            "prompt 0 must be a list of tokens, not 1: prompts are a list of lists",
        ),
        (torch.tensor(1), {}, TypeError, r"or a tensor \(b, n\), not a tensor \(\)"),
        (torch.tensor([1, 2]), {}, TypeError, r"or a tensor \(b, n\), not a tensor \(2,\)"),
        ([[1 << 70]], {}, ValueError, f"prompt 0 has token {1 << 70}, which exceeds int64"),
        ("hello", {}, TypeError, "must be a list of lists of tokens, not str"),
        (["hello"], {}, TypeError, "prompt 0 must be a list of tokens"),
        ([[1, -2]], {}, ValueError, "each token of prompt 0 must be an integer >= 0, not -2"),
        ([[1.5]], {}, ValueError, "each token of prompt 0"),
        ([[1]], {"bos_token_id": -1}, ValueError, "bos_token_id must be"),
        ([[1]], {"max_new_tokens": 0}, ValueError, "max_new_tokens must be"),
        (
            [[1]],
            {"stop": StoppingCriteria([VOCAB])},
            ValueError,
            f"logits for {VOCAB} tokens, but token {VOCAB} is in use",
        ),
    ],
)
def test_invalid_prompts(prompts, more, error, words):
    """Malformed prompts raise a clear error."""
    kwargs = {"max_new_tokens": 2} | more
    for run in (generate, lambda *a, **k: beam_search(*a, BeamSearchConfig(2), **k)):
        with pytest.raises(error, match=words):
            run(model("vanilla").step, prompts, **kwargs)


@pytest.mark.parametrize(
    ("value", "words"), [(math.nan, "NaN"), (math.inf, r"\+∞"), (-math.inf, "only −∞")]
)
def test_invalid_logits_name_the_prompt(value, words):
    """Invalid logits raise an error that names the prompt and position."""
    tiny = model("vanilla")

    def step(tokens, state):
        logits, state = tiny.step(tokens, state)
        if len(tiny.calls) == 3:
            logits[1, -1] = value
        return logits, state

    with pytest.raises(ValueError, match=f"the logits of prompt 1 after 4 tokens are {words}"):
        generate(step, [[1, 2], [3, 4], [5, 6]], max_new_tokens=5)
    tiny.calls.clear()
    with pytest.raises(ValueError, match=f"the logits of prompt 1 after 3 tokens are {words}"):
        beam_search(step, [[1], [3]], BeamSearchConfig(1), max_new_tokens=5)


def test_invalid_models():
    """Invalid outputs of a model raise an error, and its own errors are passed on."""
    tiny = model("aft")
    limit = tiny.layers.length
    with pytest.raises(
        ValueError,
        match=f"Input has {limit + 1} tokens but the mixer was built with length={limit}",
    ):
        generate(tiny.step, [[1] * (limit + 1)], max_new_tokens=1)
    with pytest.raises(
        ValueError, match=f"the stream has {limit + 1} tokens, but .* built with length={limit}"
    ) as caught:
        generate(tiny.step, [[1] * limit], max_new_tokens=2)
    assert caught.value.__notes__[0].startswith(f"at positions {limit} to {limit}, with tokens")
    with pytest.raises(IndexError) as raw:
        generate(tiny.step, [[1, 99]], max_new_tokens=1)
    assert "with tokens 1 to 99" in raw.value.__notes__[0]
    with pytest.raises(
        ValueError, match=r"the model returned logits \(1, 3, 11\) for tokens \(1, 2\)"
    ):
        generate(lambda t, s: (torch.zeros(1, 3, 11), s), [[1, 2]], max_new_tokens=1)
    with pytest.raises(
        ValueError, match=r"floating-point logits \(b, n, vocab_size\), not \(1, 11\)"
    ):
        generate(lambda t, s: (torch.zeros(1, 11), s), [[1, 2]], max_new_tokens=1)
    with pytest.raises(TypeError, match="strings must be a list of strings"):
        StoppingCriteria(strings="END", decode=decode)


def test_invalid_strategies_and_steps():
    """A number as processor, a class as strategy, or a model as step raise a clear error."""
    for kind in (GreedySearch, Sampling):
        with pytest.raises(
            TypeError, match=r"expected logits processors such as Temperature\(0.7\), not 0.7"
        ):
            kind(0.7)
    for strategy in ("greedy", GreedySearch):
        with pytest.raises(
            TypeError, match=r"strategy must be a DecodingStrategy such as GreedySearch\(\)"
        ):
            generate(model("vanilla").step, [[1]], max_new_tokens=1, strategy=strategy)
    ours = build(gpt(1, 8, 2, vocab_size=VOCAB, length=32)).eval()
    for prompts in ([[1]], [[1], [2]]):
        with pytest.raises(
            TypeError,
            match=r"a step returns logits and a state, not Tensor: for a model, use `model.stream`",
        ):
            generate(ours, prompts, max_new_tokens=1)
    for state in ("x", ((),), (0, None)):
        with pytest.raises(TypeError, match="state must be the StreamState of the last chunk"):
            ours.stream(torch.tensor([[1]]), state)


@pytest.mark.parametrize("shape", [Temperature(1e-320), RepetitionPenalty(1e-320)])
def test_too_extreme_processors(shape):
    """Processed logits that overflow raise an error."""
    for strategy in (GreedySearch(shape), Sampling(shape)):
        with pytest.raises(
            ValueError,
            match=r"gave NaN or \+∞ for prompt 1: a temperature or penalty is too",
        ):
            generate(
                lambda t, s: (t[..., None] / 9.0 * torch.ones(5), s),
                [[0], [3]],
                max_new_tokens=1,
                strategy=strategy,
            )
    low = Sampling(Temperature(1e-6), seed=1).select(
        torch.tensor([[1, 2, 1.5]], dtype=torch.float16), [[0]], [0]
    )
    assert low.tolist() == [1]


def test_model_may_return_last_logits_only():
    """A model may return the last logits only."""
    tiny = model("vanilla")

    def last(tokens, state):
        logits, state = tiny.step(tokens, state)
        return logits[:, -1:], state

    assert generate(last, PROMPTS, max_new_tokens=3) == generate(
        tiny.step, PROMPTS, max_new_tokens=3
    )


def test_all_end_tokens_of_a_transformers_model_end_the_text():
    pytest.importorskip("transformers")
    from regard.hf.decoding import end_tokens

    tokenizer, model = SimpleNamespace(eos_token_id=2), nn.Identity()
    assert end_tokens(model, tokenizer) == (2,)
    for configured, expected in (([7, 2], (2, 7)), (5, (2, 5)), (None, (2,))):
        model.generation_config = SimpleNamespace(eos_token_id=configured)
        assert end_tokens(model, tokenizer) == expected
    assert end_tokens(nn.Identity(), SimpleNamespace(eos_token_id=None)) == ()
