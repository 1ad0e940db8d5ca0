"""Every recipe × every check, compared with the committed table of capabilities.

Run `python tests/test_capabilities.py` to write tests/capabilities.json; its diff shows which
capability changed.
"""

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard import Attention, Can, Mixer, MultiHead, SoftmaxAttention, Unsupported
from regard.recipes import checkpoints
from regard.registry import get_recipe
from regard.testing import CHECKS, check_compile, check_mixer

TABLE = Path(__file__).with_name("capabilities.json")
HEADLESS = ("fnet", "mlp_mixer")


def build(name, causal):
    """A small one."""
    return get_recipe(name).example(causal=causal)


@pytest.mark.parametrize("name", regard.list_recipes())
def test_capabilities_match_the_committed_table(name, executor):
    """Fails if a capability does not hold, an unsupported one does not raise, or the table changed
    unannounced.
    """
    checks = list(CHECKS)
    if executor is not None:  # the last checks ask nothing of a backend
        checks = checks[: checks.index("bfloat16") + 1]
    result = check_mixer(lambda causal: build(name, causal), checks=checks)
    committed = json.loads(TABLE.read_text()).get(name, {})
    assert result == {check: committed.get(check) for check in ("causal", *checks)}, (
        f"the capabilities of {name} differ from tests/capabilities.json.  If that is meant, run "
        "`python tests/test_capabilities.py` and commit the difference."
    )


ONE_SEQUENCE = {"cross", "global_attention_mask"}
WHOLE_IMAGE = ONE_SEQUENCE | {"causal", "causality", "stream", "reorder", "join", "maps"}
WHOLE_IMAGE |= {"attn_mask", "buffer_reuse", "map_in_training"}
UNLISTED = [
    ("bigbird_hf", {}, ONE_SEQUENCE),
    ("reformer_hf", {}, ONE_SEQUENCE | {"attn_mask"}),
    ("xcit_component", {}, WHOLE_IMAGE),
    ("xcit_component", {"component": "patches"}, WHOLE_IMAGE),
    ("xcit_component", {"component": "patches", "norm": "instance"}, WHOLE_IMAGE),
]


@pytest.mark.parametrize(("name", "arguments", "unsupported"), UNLISTED)
def test_unlisted_recipes(name, arguments, unsupported):
    """Fails if a variant for checkpoints does not do what its capabilities say, or they changed."""
    recipe = get_recipe(name)
    kwargs = {**recipe.example_kwargs, **arguments}
    result = check_mixer(lambda causal: recipe.build(8, 2, **kwargs, causal=causal))
    assert {check for check, outcome in result.items() if outcome == "unsupported"} == unsupported


def test_every_unlisted_recipe_is_checked():
    """Fails if a recipe is neither in the table nor among the unlisted ones."""
    functions = inspect.getmembers(checkpoints, inspect.isfunction)
    recipes = {name for name, f in functions if f.__module__ == checkpoints.__name__}
    assert recipes == {name for name, _, _ in UNLISTED}


def test_table_names_every_recipe_and_check():
    """Fails if a recipe or a check is missing from the table, or no longer exists."""
    table = json.loads(TABLE.read_text())
    assert list(table) == regard.list_recipes(), (
        "run `python tests/test_capabilities.py` and commit the difference"
    )
    assert all(list(row) == ["causal", *CHECKS] for row in table.values())


@pytest.mark.parametrize("name", regard.list_recipes())
def test_recipe_can_tells_what_the_checks_found(name):
    """Fails if `Recipe.can` declares something else than what the small example supports."""
    row, can = json.loads(TABLE.read_text())[name], get_recipe(name).can()
    same = {
        "cross": "cross",
        "mask": "padding",
        "length": "length",
        "maps": "maps",
        "global_attention_mask": "global_attention_mask",
    }
    for capability, check in same.items():
        assert getattr(can, capability) == (row[check] == "supported"), capability
    assert can.causal == (row["causal"] == "supported") and can.stream == (
        row["stream"] == "supported"
    )


# ---------------------------------------------------------------------------- the checks can fail
def fails(f, words=None):
    with pytest.raises(AssertionError, match=words):
        check_mixer(f)


class Plain(Mixer):
    """Softmax attention over the past, or over all, in a few lines; the broken ones below change
    one thing each.
    """

    can_do = Can(cross="a toy", attn_mask="a toy", stream="a toy", maps="a toy", length="a toy")

    def __init__(self, causal=False, dim=4, can=None):
        super().__init__(dim, can=can or self.can_do, causal=causal, length=40)
        self.w = nn.Linear(dim, dim, bias=False)

    def scores(self, x, mask):
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        keep = (keep.tril() if self.causal else keep).expand(len(x), -1, -1)
        keep = keep if mask is None else keep & mask[:, None]
        return (0.1 * x @ x.transpose(1, 2)).masked_fill(~keep, torch.finfo(x.dtype).min)

    def mix(self, x, context, mask, state):
        return self.scores(x, mask).softmax(-1) @ self.w(x), None


def test_a_sound_toy_passes():
    """Fails if the toy that is broken below was broken to begin with."""
    result = check_mixer(Plain)
    assert (
        result["causality"] == result["padding"] == "supported"
        and result["cross"] == result["stream"] == "unsupported"
    )


class SortedChunks(Plain):
    """Sorts tokens by a score and lets chunks of the sorted order attend inside: causal masks hide
    every gradient of the future, but a later token shifts the borders of the chunks.
    """

    def mix(self, x, context, mask, state):
        if not self.causal or x.shape[1] < 2:
            return super().mix(x, context, mask, state)
        rank = x[..., 0].argsort(1).argsort(1) // 4
        alike = rank[:, :, None] == rank[:, None]
        return self.scores(x, mask).masked_fill(~alike, -1e9).softmax(-1) @ self.w(x), None


def test_a_leak_that_no_gradient_shows_is_found():
    """Fails if causality is checked by gradients alone."""
    fails(SortedChunks, "when replaced")


class Peeks(Plain):
    def mix(self, x, context, mask, state):
        y, state = super().mix(x, context, mask, state)
        return y + 1e-6 * x.sum(1, keepdim=True), state


def test_a_leak_by_gradient_is_found():
    """Fails if a little of the future goes unnoticed."""
    fails(lambda causal: Peeks(causal) if causal else Plain(), "gradient")


class NeverAhead(Plain):
    def scores(self, x, mask):
        n = x.shape[1]
        return super().scores(x, mask).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -1e9)


def test_a_plain_form_that_is_causal_is_found():
    """Fails if a form that is not causal may ignore the future all the same."""
    fails(NeverAhead, "no later token has influence")


class IgnoresMask(Plain):
    def scores(self, x, mask):
        return super().scores(x, None)


def test_an_ignored_mask_is_found():
    """Fails if a mask may be accepted and ignored.  (What is left out was blanked, yet its place
    still counts.)
    """
    fails(IgnoresMask)


class CountsPadding(Plain):
    def mix(self, x, context, mask, state):
        y, state = super().mix(x, context, mask, state)
        return y / x.shape[1], state


def test_a_mean_over_padding_is_found():
    """Fails if padded need not equal cut."""
    fails(CountsPadding)


class Forgets(MultiHead):
    """Streams, but forgets the state at every chunk."""

    def mix(self, x, context, mask, state, **more):
        return super().mix(
            x, context, mask, None if state is None else self.initial_state(), **more
        )


class IgnoresPairs(MultiHead):
    """Accepts a pair mask and ignores it."""

    def mix(self, x, context, mask, state, global_attention_mask=None, attn_mask=None):
        return super().mix(x, context, mask, state)


def test_an_ignored_pair_mask_is_found():
    """Fails if a pair mask may be accepted and ignored."""
    fails(lambda causal: IgnoresPairs(4, 2, SoftmaxAttention(), causal=causal), "hidden pair")


class MixesPacked(Plain):
    """Takes packed sequences for one sequence."""

    def mix_packed(self, x, lengths, mask):
        return self.mix(x, None, mask, None)[0]


def test_packed_sequences_that_touch_are_found():
    """Fails if one packed sequence may change another."""
    fails(MixesPacked)


def test_a_stream_that_differs_is_found():
    """Fails if chunk by chunk may give something else than the whole."""
    fails(lambda causal: Forgets(4, 2, SoftmaxAttention(), causal=causal))


def test_what_is_accepted_though_refused_is_found():
    """Fails if a mixer may take a mask, a memory, marks or a map that it says it refuses."""

    class Lax(Plain):
        def _require(self, capability):
            """Refuses nothing."""

        def mix(self, x, context, mask, state, global_attention_mask=None, attn_mask=None):
            return super().mix(x, None, mask if context is None else None, state)

    for capability in ("cross", "mask", "attn_mask", "global_attention_mask"):
        fails(
            lambda causal, p=capability: Lax(causal, can=Plain.can_do & Can(**{p: "no"})),
            "Unsupported",
        )


def test_a_dead_parameter_is_found():
    """Fails if a parameter may be there for nothing."""

    class Dead(Plain):
        def __init__(self, causal=False):
            super().__init__(causal)
            self.unused = nn.Parameter(torch.ones(3))

    fails(Dead, "unused")

    class Cut(Plain):
        def mix(self, x, context, mask, state):
            return self.scores(x, mask).softmax(-1) @ (self.w(x).detach() + x), None

    fails(Cut, "no finite gradient")


def test_a_map_that_is_not_the_map_is_found():
    """Fails if an attention that is not linear in its values may capability a map."""

    class Squares(Attention):
        can = Can(stream="a toy", attn_mask="a toy")

        def forward(self, q, k, v, *, causal=False, mask=None, state=None):
            return regard.attend(
                q, k, v**2, pattern=regard.Causal() if causal else regard.Full(), mask=mask
            ), None

    fails(lambda causal: MultiHead(4, 2, Squares(), causal=causal))


def test_examples_that_touch_are_found():
    """Fails if one example of a batch may change another."""

    class Batch(Plain):
        def mix(self, x, context, mask, state):
            y, state = super().mix(x, context, mask, state)
            return y - x.mean(0, keepdim=True), state

    fails(
        lambda causal: (
            Batch(causal, can=Plain.can_do & Can(causal="a toy", mask="a toy"))
            if not causal
            else refuse()
        )
    )


def refuse():
    raise Unsupported("a toy")


def test_marks_that_do_nothing_are_found():
    """Fails if marks may be accepted and ignored."""

    class Unmoved(Plain):
        def mix(self, x, context, mask, state, global_attention_mask=None):
            return super().mix(x, context, mask, state)

    can = Can(
        "global_attention_mask",
        cross="a toy",
        attn_mask="a toy",
        stream="a toy",
        maps="a toy",
        length="a toy",
    )
    fails(lambda causal: Unmoved(causal, can=can), "a global token changes nothing")


def test_a_length_that_is_not_held_is_found():
    """Fails if a limit may be promised that is not kept, or kept that is not promised."""
    any_length = Can(cross="a toy", attn_mask="a toy", stream="a toy", maps="a toy")
    fails(lambda causal: Plain(causal, can=any_length))  # says any, takes 40

    class CutsOff(Plain):
        def forward(self, x, *args, **more):
            y = super().forward(x[:, : self.length], *args, **more)
            return nn.functional.pad(y, (0, 0, 0, x.shape[1] - y.shape[1]))

    fails(CutsOff, "must raise")


def test_a_state_that_is_not_saved_is_found():
    """Fails if something that changes the output may be missing from what is saved."""

    class Hidden(Plain):
        def __init__(self, causal=False):
            super().__init__(causal)
            self.register_buffer("gain", torch.ones(()), persistent=False)

        def mix(self, x, context, mask, state):
            y, state = super().mix(x, context, mask, state)
            return y * self.gain, state

    fails(Hidden)  # a model built on the meta device and then loaded would have another gain

    class Drifts(Hidden):
        def mix(self, x, context, mask, state):
            self.gain += 1
            return super().mix(x, context, mask, state)

    fails(Drifts)


def test_not_finite_is_found():
    """Fails if NaN for a single token may pass."""

    class Lonely(Plain):
        def mix(self, x, context, mask, state):
            y, state = super().mix(x, context, mask, state)
            return y * (torch.nan if x.shape[1] == 1 else 1), state

    fails(Lonely)


def test_ties_broken_by_the_length_are_found():
    """Fails if equal tokens may be treated differently with and without padding."""

    class CountsTies(Plain):
        def mix(self, x, context, mask, state):
            y, state = super().mix(x, context, mask, state)
            ties = (x[:, :1] == x).all(-1).sum(1) - 1  # no random token has an equal
            return (y if self.causal else y + ties[:, None, None] * (x.shape[1] % 2)), state

    fails(CountsTies, "padded differs from cut")


def test_a_state_that_is_a_view_is_found():
    """Fails if a stream may keep a view of a tensor that belongs to the caller."""

    class RunningSum(Mixer):
        def __init__(self, causal, copy=False):
            super().__init__(4, can=can, causal=causal)
            self.copy = copy

        def initial_state(self):
            return ()

        def mix(self, x, context, mask, state):
            if not self.causal:
                return x.sum(1, keepdim=True) + x, None
            y = x.cumsum(1)
            if state is None:
                return y, None
            y = y + state[0] if state else y
            return y, (y[:, -1:].clone() if self.copy else y[:, -1:],)

    can = Can(mask="a toy", cross="a toy", attn_mask="a toy", maps="a toy")
    check_mixer(lambda causal: RunningSum(causal, copy=True))
    fails(RunningSum, "overwriting a chunk")


def test_an_overflow_is_found():
    """Fails if a softmax without its maximum may pass."""

    class Overflows(Plain):
        def mix(self, x, context, mask, state):
            weights = self.scores(x, mask).exp()
            return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ self.w(x), None

    fails(Overflows, "not finite")


def test_a_map_that_counts_as_training_is_found():
    """Fails if `attention_map` may change a mixer."""

    class Counts(MultiHead):
        def __init__(self, causal):
            super().__init__(4, 2, SoftmaxAttention(), causal=causal)
            self.calls = 0

        def project(self, *args, **kwargs):
            self.calls += 1
            return super().project(*args, **kwargs)

    fails(Counts, "attention_map changes .calls")


def test_what_torch_func_cannot_transform_is_found():
    """Fails if a mixer may hold on to its parameters, or read numbers, without a refusal."""

    class HoldsWeight(Plain):
        def __init__(self, causal=False):
            super().__init__(causal)
            self.held = [self.w.weight]

        def mix(self, x, context, mask, state):
            return self.scores(x, mask).softmax(-1) @ (x @ self.held[0].T), None

    fails(HoldsWeight)

    class ReadsNumber(Plain):
        def mix(self, x, context, mask, state):
            scale = max(1.0, float(x.detach().abs().max()) * 1e-9)
            y, state = super().mix(x, context, mask, state)
            return y * scale, state

    with pytest.raises(RuntimeError, match="vmap"):
        check_mixer(ReadsNumber)


@pytest.mark.slow
def test_an_unrolled_loop_is_found():
    """Fails if compiled graphs may grow with the number of tokens."""

    class Loops(Plain):
        def mix(self, x, context, mask, state):
            y, state = super().mix(x, context, mask, state)
            for token in x.unbind(1):
                y = y + 1e-3 * token[:, None].tanh()
            return y, state

    check_compile(Plain().double(), max_nodes=100)
    with pytest.raises(AssertionError, match="nodes were compiled"):
        check_compile(Loops().double(), max_nodes=100)


def test_what_says_another_causality_is_found():
    """Fails if `causal` may be a no-op."""
    fails(lambda causal: Plain(False), "causal")


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = {
        name: check_mixer(lambda causal, name=name: build(name, causal))
        for name in regard.list_recipes()
    }
    TABLE.write_text(json.dumps(table, indent=2) + "\n")
