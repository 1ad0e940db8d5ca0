"""torch.compile: how often it breaks the forward of each recipe, counted, and compared with what is
written down.

In tests/graph_breaks.json stand the recipes that break, how often, and why; all others have one
graph. At 210 tokens, with padding, without gradients: from 192 tokens on sparse executors are
tried.
"""

import json
from pathlib import Path

import pytest
import torch
import torch._dynamo as dynamo

import regard
from regard import Band, Causal, Global, MultiHead, SoftmaxAttention
from regard.export.inputs import ragged_mask
from regard.export.tracing import suppress_output
from regard.layout import LRUCache
from regard.mixers import bp_spans
from regard.registry import get_recipe, list_recipes

LISTED = json.loads((Path(__file__).parent / "graph_breaks.json").read_text())
LONG = 210


def breaks(mixer, *, grad=False, n=LONG):
    n = n if mixer.length is None else min(n, mixer.length)
    x = torch.randn(2, n, mixer.dim, requires_grad=grad)
    given = {"mask": ragged_mask(2, n, x.device)} if mixer.can.mask else {}
    dynamo.reset()
    with suppress_output(), torch.set_grad_enabled(grad):
        return dynamo.explain(mixer)(x, **given).graph_break_count


@pytest.mark.parametrize("name", list_recipes())
def test_as_many_as_are_listed(name, monkeypatch):
    """Fails if a forward breaks where it did not, or no longer does: then take it off the list."""
    monkeypatch.setattr(
        bp_spans, "_plans", LRUCache(1 << 20)
    )  # a plan that another test has made would break nothing
    mixer = get_recipe(name).example(causal=get_recipe(name).causal_options()[-1]).eval()
    assert breaks(mixer) == LISTED.get(name, {"breaks": 0})["breaks"]


def test_every_break_has_a_reason():
    """Fails if a recipe is let off without one."""
    assert set(LISTED) <= set(list_recipes())
    assert all(entry["breaks"] > 0 and len(entry["why"]) > 20 for entry in LISTED.values())


def test_training_has_one_graph_where_attention_is_dense():
    """Fails if dense attention is no part of the graph; that of a sparse pattern has a backward
    pass of its own, outside.
    """
    assert breaks(get_recipe("vanilla").example(causal=True), grad=True) == 0
    assert breaks(get_recipe("local").example(), grad=True, n=40) == 0
    assert breaks(get_recipe("local").example(), grad=True) > 0


@pytest.mark.parametrize("pattern", [Band(3, 3), Band(5, 0) | Global(2), Band(2, 2, 3) & Causal()])
def test_the_operator_gives_what_eager_gives(pattern, rand):
    """Fails if the pattern that reaches the operator is another one, for lengths that were not
    compiled as well.
    """
    mixer = MultiHead(8, 2, SoftmaxAttention(pattern), causal=True).double().eval()
    dynamo.reset()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (LONG, 260):
            x, mask = rand(2, n, 8), ragged_mask(2, n, torch.device("cpu"))
            torch.testing.assert_close(compiled(x, mask=mask), mixer(x, mask=mask))


def test_patterns_of_others_are_interned(rand):
    """A subclass with the repr of its parent gets an id of its own, and the operator runs it."""

    class Even(Band):
        def _allows(self, q, k):
            return super()._allows(q, k) & (k % 2 == 0)

    mixer = MultiHead(8, 2, SoftmaxAttention(Even(3, 3))).double().eval()
    band = SoftmaxAttention(Band(3, 3)).pattern
    assert band.graph_id != mixer.inner.pattern.graph_id
    assert band.graph_id == SoftmaxAttention(Band(3, 3)).pattern.graph_id
    dynamo.reset()
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        tokens = rand(1, LONG, 8)
        torch.testing.assert_close(compiled(tokens), mixer(tokens))
        x = rand(1, 1, 4, 4)
        with pytest.raises(ValueError, match="does not exist in this process"):
            torch.ops.regard.attend(x, x, x, None, None, None, "no such id", 1.0, 0, 0)
    x = rand(1, 2, LONG, 4)
    dynamo.reset()
    with torch.no_grad(), suppress_output():
        compiled = torch.compile(
            lambda t: regard.attend(t, t, t, pattern=Even(3, 3)), backend="eager"
        )
        torch.testing.assert_close(compiled(x), regard.attend(x, x, x, pattern=Even(3, 3)))
