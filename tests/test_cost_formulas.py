"""Costs of every recipe against counted runs; patterns counted against their masks; a published
table of one block.
"""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pairwise_backend
import regard
from regard.block import Block
from regard.errors import Unsupported
from regard.ffn import MLP, FeedForward
from regard.measure import formulas
from regard.measure.cost import cost
from regard.measure.count import FlopCounter, count
from regard.measure.model import build_on_meta, simple_config
from regard.measure.module_cost import CallShape, ModuleCost, formula, matmul_cost, module_cost
from regard.measure.pairs import count_pairs
from regard.mixer import Can, Mixer, MultiHead
from regard.pattern import Band, BlockTable, Causal, Chunks, Full, Keys, PerHead, Queries
from regard.registry import get_recipe, list_recipes
from regard.residual import PostNorm
from regard.stack import SequentialStack
from regard.state import leaves

N, DIM = 70, 64  # more than a chunk of 64, and no multiple of anything
assert formulas
SLACK = {"block_local"}  # at the end of a block no key is needed, and the cache still has some
ROUTED = {"reformer"}  # the state depends on the data


def build(name, causal):
    recipe = get_recipe(name)
    try:
        return recipe.build(**pairwise_backend.arguments(recipe, N, DIM, causal))
    except Unsupported:
        pytest.skip("not available in this form")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", list_recipes())
def test_cost_agrees_with_counted_run(name, causal, monkeypatch):
    """Fails if forward FLOPs differ by more than 2 % from a run that computes only visible pairs,
    or backward FLOPs by more than 6 %, with or without the recomputed part.
    """
    pairwise_backend.install(monkeypatch)
    torch.manual_seed(0)
    mixer = build(name, causal)
    found, done = module_cost(mixer, CallShape(2, N, N)), count(mixer, torch.randn(2, N, DIM))
    assert done.forward_flops > 0
    assert found.forward == pytest.approx(done.forward_flops, rel=0.02)
    needed = found.backward - found.recomputed
    assert 0.94 * needed <= done.backward_flops <= 1.06 * found.backward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", list_recipes())
def test_cost_is_the_same_on_the_meta_device(name, causal):
    """Fails if a recipe cannot be built on the meta device, or its cost differs there."""
    recipe = get_recipe(name)
    plain = build(name, causal)
    with torch.device("meta"):
        empty = recipe.build(**pairwise_backend.arguments(recipe, N, DIM, causal))
    assert all(p.is_meta for p in empty.parameters())
    assert module_cost(empty, CallShape(2, N, N)) == module_cost(plain, CallShape(2, N, N))


@pytest.mark.parametrize("name", list_recipes(can=("stream",)))
def test_state_agrees_with_stream(name):
    """Fails if the predicted state has another size than that of a real stream."""
    mixer = build(name, True).eval()
    state = None
    with torch.no_grad():
        for chunk in torch.randn(2, N, DIM).split(10, 1):
            _, state = mixer.stream(chunk, state)
    held = sum(t.numel() for t in leaves(state) if isinstance(t, torch.Tensor))
    found = module_cost(mixer, CallShape(2, N, N)).state
    if name in ROUTED:
        assert held <= found <= 2 * held
    elif name not in SLACK:
        assert found == pytest.approx(held, rel=0.02, abs=2 * N)


# -------------------------------------------------------------------------------------- the counter
def test_counter_knows_what_torch_does_not():
    """Fails if fused attention, transforms, triangular systems or summed products count nothing, or
    something else.
    """
    q = torch.randn(2, 3, 5, 8, requires_grad=True)
    with FlopCounter() as seen:
        y = nn.functional.scaled_dot_product_attention(q, q, q)
    assert seen.total == 2 * 2 * 3 * 5 * 5 * 16
    with FlopCounter() as back:
        y.sum().backward()
    assert back.total == 2.5 * seen.total
    with FlopCounter() as seen:
        torch.fft.fft(torch.randn(4, 32))
    assert seen.total == 5 * 4 * 32 * 5
    with FlopCounter() as seen:
        (torch.randn(3, 4) * torch.randn(3, 4)).sum(-1)
    assert seen.total == 2 * 12
    with FlopCounter() as seen:
        torch.linalg.solve_triangular(torch.eye(4), torch.randn(4, 7), upper=False)
    assert seen.total == 4 * 4 * 7


def test_depthwise_convolution_backward():
    """Fails if groups are forgotten in the backward pass, as in torch's own counter."""
    layer = nn.Conv1d(6, 6, 3, groups=6, bias=False)
    done = count(layer, torch.randn(2, 6, 10))
    flops = 2 * 2 * 6 * 8 * 3
    assert (done.forward_flops, done.backward_flops) == (flops, 2 * flops)


# ----------------------------------------------------------------------------------------- patterns
PATTERNS = [
    Full(),
    Causal(),
    Band(3, 5),
    Band(2, 0, 3),
    Band(None, 4, 2),
    Chunks(10, back=1),
    Keys(0, 7) | Queries(3, 5) | Band(2, 2),
    ~Band(4, 4) & Causal(),
    PerHead((Band(1, 1), Causal(), Band(1, 1))),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 200])
def test_pairs_are_those_of_the_mask(pattern, n):
    """Fails if a pair is counted twice or not at all."""
    heads = pattern.heads or 3
    dense = pattern.dense(n)
    assert count_pairs(pattern, n, n, heads) == int(dense.sum()) * (1 if pattern.heads else heads)


def test_pairs_of_a_million_tokens():
    """Fails if a long sequence takes long, or if a sample is off by more than 2 %."""
    n, start = 1_000_000, time.process_time()
    assert count_pairs(Keys(0, 64) | Queries(0, 64) | Band(128, 128), n, n, 1) == pytest.approx(
        n * (257 + 128), rel=1e-3
    )
    strided = count_pairs((Band(127, 0) | Band(None, 0, 128)) & Causal(), n, n, 1)
    assert strided == pytest.approx(128 * n + n * n / 256, rel=0.02)
    assert time.process_time() - start < 20


def test_tables_are_real_where_all_else_is_not():
    """Fails if a pattern that is given as a table loses it on the meta device."""
    with torch.device("meta"):
        table = BlockTable(2, ((0, 2), (1,), (0, 1, 2)))
    assert count_pairs(table, 6, 6, 1) == 2 * (4 + 2 + 6)


@pytest.mark.parametrize(
    ("pattern", "keys"), [(Band(5, 0), 5), (Full(), 100), (Keys(0, 3) | Band(5, 0), 8)]
)
def test_state_of_a_pattern(pattern, keys):
    """Fails if a stream is said to keep keys that no later query sees, or to drop others."""
    mixer = MultiHead(8, 2, regard.SoftmaxAttention(pattern), causal=True)
    found = module_cost(mixer, CallShape(1, 100, 100))
    assert found.state == found.parts["attend"].state == keys * 2 * 8


# ------------------------------------------------------------------------------------------- models
def wide_block(dim, heads, hidden):
    """A block with biases whose heads are each as wide as a token, as in Keras."""
    mixer = MultiHead(dim, heads, regard.SoftmaxAttention())
    mixer.q, mixer.k, mixer.v = (nn.Linear(dim, heads * dim) for _ in range(3))
    mixer.out = nn.Linear(heads * dim, dim)
    return Block(mixer, MLP(dim, hidden, activation=F.relu), residual=PostNorm)


def test_published_table_to_the_unit():
    """Fails if the parameters of a block of width 32 with 2 heads, or the multiplications of x_i W
    x_j for one query and for all 600, differ from the published table.
    """
    block = wide_block(32, 2, 32)

    def parameters(*parts):
        return sum(p.numel() for part in parts for p in part.parameters())

    assert parameters(block.mixer.q, block.mixer.k, block.mixer.v) == 6_336
    assert parameters(block.mixer.out) == 2_080
    assert parameters(block.ffn) == 2 * 1_056
    assert parameters(block.mixer_residual, block.ffn_residual) == 2 * 64
    assert parameters(block) == cost(block, 600).parameters == 10_656
    one, every = (
        matmul_cost(count_pairs(Full(), n, 600, 1), 1, 32, 32).forward // 2 for n in (1, 600)
    )
    assert (one, every) == (614_400, 368_640_000)
    assert block(torch.randn(1, 600, 32)).shape == (1, 600, 32)


def test_seventy_billion_parameters_at_a_million_tokens():
    """Fails if the largest models take memory, or more than seconds, to ask about."""
    start = time.process_time()
    model = build_on_meta(
        simple_config(
            get_recipe("vanilla"),
            {"heads": 64, "causal": True},
            dim=8192,
            layers=80,
            vocab_size=128_000,
            hidden=38_000,
        )
    )
    found = cost(model, 1_000_000, itemsize=2)
    assert all(p.is_meta for p in model.parameters())
    assert 6.5e10 < found.parameters < 7.5e10
    tokens, pairs_ = 1_000_000, 1_000_000 * 1_000_001 // 2
    weights = found.parameters - 128_000 * 8192 - 80 * (38_000 + 8192 + 4 * 8192) - 2 * 8192
    assert found.forward_flops == 2 * tokens * weights + 80 * 4 * pairs_ * 8192
    assert found.state_bytes_per_token == 80 * 2 * 8192 * 2
    assert time.process_time() - start < 20


def test_model_is_the_sum_of_its_parts():
    """Fails if a layer is left out of the total."""
    blocks = [
        Block(regard.create("local", dim=16, heads=2), MLP(16)),
        Block(regard.create("fnet", dim=16), MLP(16, 40)),
    ]
    found = cost(SequentialStack(blocks), 50, batch=3)
    assert [part.name for part in found.parts] == ["layer 0", "layer 1"]
    for number in ("parameters", "forward_flops", "backward_flops", "activation_bytes"):
        assert getattr(found, number) == sum(getattr(part, number) for part in found.parts)
    assert found.parameters == sum(p.numel() for block in blocks for p in block.parameters())
    assert found.state_bytes == 0  # it does not stream


def test_backward_is_twice_forward_but_for_what_is_said():
    """Fails if products cost anything else backward: each has two gradients."""
    found = module_cost(regard.create("talking_heads", dim=16, heads=2), CallShape(1, 20, 20))
    assert found.backward == 2 * found.forward
    fused = module_cost(
        regard.create("vanilla", dim=16, heads=2).inner, CallShape(1, 20, 20, 2, 8, 8)
    )
    assert (fused.backward, fused.recomputed) == (2.5 * fused.forward, 0.5 * fused.forward)
    fixed = module_cost(regard.create("fnet", dim=16), CallShape(1, 20, 20))
    assert fixed.backward == fixed.forward


# ------------------------------------------------------------------------- third parties, bad input
class Doubled(FeedForward):
    """Has no formula."""

    def __init__(self, dim):
        super().__init__(dim)
        self.layer = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        return self.layer(self.layer(x))


class Peeking(Mixer):
    """Has no formula, and looks at numbers, which meta tensors have not."""

    def __init__(self, dim):
        super().__init__(dim, can=Can())

    def mix(self, x, memory, mask, state):
        return x * float(x.detach().sum()), None


def test_without_a_formula_it_is_counted_on_meta_tensors():
    """Fails if a class without a formula costs nothing, or is run for real."""
    found = module_cost(Doubled(8), CallShape(2, 5, 5))
    assert (found.forward, found.backward, found.parameters) == (
        2 * 2 * 10 * 64,
        4 * 2 * 10 * 64,
        72,
    )
    block = Block(regard.create("vanilla", dim=8, heads=2), Doubled(8))
    assert cost(block, 5).forward_flops > found.forward // 2


def test_what_cannot_be_counted_raises():
    """Fails if an unknown class is a silent zero."""
    with pytest.raises(Unsupported, match=r"Peeking has no cost formula.*cannot be counted"):
        module_cost(Peeking(8), CallShape(1, 5, 5))
    with pytest.raises(Unsupported, match="GRU has no cost formula: register"):
        module_cost(nn.GRU(4, 4), CallShape(1, 5, 5))


def test_third_parties_register_theirs():
    """Fails if a registered formula is not used, for the class and for what derives from it."""

    class Mine(Peeking):
        pass

    @formula(Mine)
    def _mine(module, call):
        return ModuleCost(7 * call.n, 11)

    class Derived(Mine):
        pass

    assert module_cost(Derived(4), CallShape(1, 5, 5)).forward == 35


@pytest.mark.parametrize(
    "sizes", [{"length": 0}, {"length": -1}, {"length": 5, "batch": 0}, {"length": 2.5}]
)
def test_bad_sizes(sizes):
    """Fails if a size that is none is taken."""
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        cost(regard.create("vanilla", dim=8, heads=2), **sizes)


def test_beyond_the_length_it_was_built_for():
    """Fails if a recipe is said to cost something where it cannot run."""
    with pytest.raises(ValueError, match="built for at most 32 tokens, but the length is 33"):
        cost(regard.create("linformer", dim=8, heads=2, length=32, rank=4), 33)
    with pytest.raises(ValueError, match="length must be at most"):
        cost(regard.create("vanilla", dim=8, heads=2), 1 << 30)
