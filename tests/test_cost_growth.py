"""What claims to be cheaper than n² is: growth of the work from n to 2n, never seconds."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.layout import build_layout

N = 4096
BANDED = {
    "global_tokens": {"tokens": 64},
    "local": {"window": 64},
    "dilated": {"window": 32, "dilation": 4},
    "block_local": {"block": 128},
    "longformer": {"window": 64},
    "random_blocks": {"block": 64},
    "bigbird": {"block": 64},
    "image_local_2d": {"width": 64},
    "image_local_1d": {"block": 64, "memory": 64},
    "neighbourhood": {"size": 63},
    "swin": {"width": 64, "layer": 1},
    "sinks": {"sinks": 4, "window": 64},
    "etc": {"globals": 32, "radius": 32},
    "per_head": {"patterns": (regard.Band(32, 32), regard.Band(64, 64))},
}
ROOTED = {
    "sparse_strided": "stride",
    "sparse_fixed": "stride",
    "axial": "width",
}  # n √n, with a stride of √n


def scores(name, n, **arguments):
    """How many scores the executor computes, for all heads together."""
    if "length" in regard.registry.get_recipe(name).parameters:
        arguments["length"] = n
    mixer = regard.create(name, dim=8, heads=2, **arguments)
    attention = {"longformer": "local", "etc": "long"}.get(name)
    attention = (getattr(mixer, attention) if attention else mixer).inner
    pattern = attention.pattern.resolve_global_mask(False, False)
    return sum(
        build_layout(p, n, n).scores() for p in (pattern.parts if pattern.heads else [pattern])
    )


@pytest.mark.parametrize("name", BANDED)
def test_work_grows_with_the_length(name):
    """Fails if twice the tokens are more than about twice the scores."""
    small, large = (scores(name, n, **BANDED[name]) for n in (N, 2 * N))
    assert large < 2.3 * small
    assert large < 0.3 * 2 * (2 * N) ** 2


@pytest.mark.parametrize("name", ROOTED)
def test_work_grows_with_the_length_and_its_root(name):
    """Fails if four times the tokens are more than about eight times the scores."""
    small, large = (scores(name, n, **{ROOTED[name]: int(n**0.5)}) for n in (N, 4 * N))
    assert large < 9.5 * small


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("linear", {}), ("linformer", {"length": 2 * N, "rank": 64}), ("star", {})],
)
@pytest.mark.parametrize("causal", [False, True])
def test_products_grow_with_the_length(name, arguments, causal):
    """Fails if linear or projected attention multiplies matrices of n x n somewhere."""
    if causal and name in ("linformer", "star"):
        pytest.skip("it has no causal form")
    counts = []
    for n in (N, 2 * N):
        mixer = regard.create(name, dim=16, heads=2, causal=causal, **arguments)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            mixer(torch.randn(1, n, 16, generator=torch.Generator().manual_seed(0)))
        counts.append(counter.get_total_flops())
    assert counts[0] > 0
    assert counts[1] < 2.1 * counts[0]


def saved_bytes(n):
    """What a sparse call keeps for its backward pass."""
    sizes = []
    q = torch.randn(1, 2, n, 16, requires_grad=True, generator=torch.Generator().manual_seed(0))

    def note(tensor):
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        regard.attend(q, q, q, pattern=regard.Band(64, 64), backend="sparse")
    return sum(sizes)


def test_training_keeps_nothing_of_the_size_of_the_scores():
    """Fails if the sparse executor keeps its weights: they would be n times 129 numbers a head, and
    more.
    """
    small, large = saved_bytes(2048), saved_bytes(4096)
    assert 0 < large <= 2.2 * small
    assert large < 4096 * 129 * 2 * 4  # the weights of the window alone


def test_the_state_of_linear_attention_does_not_grow():
    """Fails if streaming keeps anything for each token."""
    mixer = regard.create("linear", dim=8, heads=2, causal=True)
    state, sizes = None, set()
    for _ in range(5):
        _, state = mixer.stream(
            torch.randn(1, 10, 8, generator=torch.Generator().manual_seed(0)), state
        )
        sizes.add(state.kv.numel())
    assert (
        sizes == {2 * 4 * (4 + 1)} and state.next_position == 50
    )  # and a number, the next position
