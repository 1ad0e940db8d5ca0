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
from regard.testing import CHECKS, check_mixer

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
    result = check_mixer(lambda causal: build(name, causal))
    committed = json.loads(TABLE.read_text()).get(name)
    assert result == committed, (
        f"the capabilities of {name} differ from tests/capabilities.json.  If that is meant, run "
        "`python tests/test_capabilities.py` and commit the difference."
    )


ONE_SEQUENCE = {"cross", "global_attention_mask"}
WHOLE_IMAGE = ONE_SEQUENCE | {"causal", "causality", "stream", "reorder", "join", "maps"}
WHOLE_IMAGE |= {"attn_mask"}
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
        return (x @ x.transpose(1, 2)).masked_fill(~keep, -1e9)

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

    check_mixer(Hidden)  # a constant need not be saved

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
