"""Formulas for configurations and stacks against counted runs: feed-forward layers, norms,
residuals, positions, heads.
"""

from functools import partial

import pytest
import torch
from torch import nn

import pairwise_backend
import regard
from regard.block import Block
from regard.ffn import FEED_FORWARDS, MLP
from regard.measure.cost import cost
from regard.measure.count import FlopCounter, count
from regard.measure.model import example_batch
from regard.models import ModelConfig, build
from regard.models.heads import POOLINGS
from regard.norm import NORMS
from regard.residual import RESIDUALS
from regard.stack import (
    CompressiveMemory,
    EarlyExitStack,
    FeedbackStack,
    FunnelStack,
    Halting,
    HiddenStateMemory,
    RealFormerStack,
    ReversibleStack,
    SegmentStack,
    SharedStack,
    UniversalStack,
    build_sublayers,
)

N, DIM = 70, 64
BASE = {
    "kind": "encoder",
    "input": {"kind": "tokens", "vocab_size": 100},
    "dim": DIM,
    "heads": 4,
    "layers": 2,
    "length": N,
    "mixer": "vanilla",
    "head": {"kind": "lm"},
}
SIZED = {
    "switch": {"num_experts": 4, "capacity": 0.5},
    "top_k": {"num_experts": 4, "capacity": 0.5, "noisy": True},
    "product_keys": {"keys": 16, "top_k": 4},
}
IMAGE = {"kind": "patches", "height": 32, "width": 32, "patch_size": 4}
PLACES = (
    "none",
    "sinusoid",
    "learned",
    "fourier",
    "rope",
    "alibi",
    "distance",
    "t5",
    "shaw",
    "xl",
    "tupe",
)
CASES = [
    *({"ffn": {"name": name, "arguments": SIZED.get(name, {})}} for name in FEED_FORWARDS),
    {"ffn": None},
    *({"norm": name} for name in NORMS),
    *({"residual": name} for name in RESIDUALS),
    *({"position": name} for name in PLACES),
    *({"head": {"kind": "pooling", "pooling": name}} for name in POOLINGS),
    {"head": None},
    {"head": {"kind": "masked_lm"}},
    {"head": {"kind": "sequence_classification", "num_classes": 5, "hidden_layer": True}},
    {"head": {"kind": "token_classification", "num_classes": 7}},
    {"head": {"kind": "regression", "pooling": "none"}},
    {"input": {"kind": "vectors", "width": 9}, "head": None},
    {"input": IMAGE, "length": None, "head": {"kind": "sequence_classification", "num_classes": 5}},
    {
        "input": {**IMAGE, "class_token": False},
        "length": None,
        "position": "fourier_2d",
        "head": {"kind": "pooling"},
    },
    {"kind": "seq2seq"},
    {"kind": "seq2seq", "encoder": {"layers": 1, "mixer": "fnet"}, "target": {"vocab_size": 50}},
    {"kind": "decoder", "mixer": ["linear", "local"]},
]


@pytest.mark.parametrize("change", CASES, ids=str)
def test_configuration_agrees_with_counted_run(change, monkeypatch):
    """Fails if the formula of a configuration is off by more than 2 % of the FLOPs that are
    counted, forward, or by more than 6 % backward, where scores may be made again.
    """
    pairwise_backend.install(monkeypatch)
    torch.manual_seed(0)
    config = ModelConfig(**{**BASE, **change})
    length = config.input.length if config.input.kind == "patches" else N
    model = build(config)
    with FlopCounter() as ahead:
        y = model(*example_batch(config, length, 2))
    with FlopCounter() as back:
        y.square().mean().backward()
    found = cost(model, length, batch=2)
    assert found.forward_flops == pytest.approx(ahead.total, rel=0.02)
    needed = found.backward_flops - found.recomputed_flops
    assert 0.94 * needed <= back.total <= 1.06 * found.backward_flops
    assert found.parameters == sum(p.numel() for p in model.parameters())


def test_parameters_that_a_token_uses():
    """Fails if experts that are not asked, or slots that are not read, count as used."""
    config = ModelConfig(
        **{
            **BASE,
            "layers": 1,
            "ffn": {"name": "top_k", "arguments": {"num_experts": 8, "hidden": 10}},
        }
    )
    found = cost(build(config), N)
    assert found.parameters - found.active_parameters == 6 * 2 * 10 * DIM
    memory = ModelConfig(
        **{
            **BASE,
            "layers": 1,
            "ffn": {"name": "product_keys", "arguments": {"keys": 16, "top_k": 4, "heads": 2}},
        }
    )
    found = cost(build(memory), N)
    assert found.parameters - found.active_parameters == (16 * 16 - 8) * DIM


def test_longer_than_its_positions():
    """Fails if a model is said to cost something at a length that its embeddings do not know."""
    with pytest.raises(ValueError, match="built for at most 70 tokens, but the length is 71"):
        cost(build(ModelConfig(**BASE)), N + 1)


def test_state_of_an_encoder_decoder():
    """Fails if a stream does not keep what was read, or keeps something of the encoder."""
    model = build(ModelConfig(**{**BASE, "kind": "seq2seq"}))
    found = cost(model, 50, context=30, batch=2)
    assert found.state_bytes == 4 * 2 * (30 * DIM + 2 * 2 * 50 * DIM)
    assert found.state_bytes_per_token == 4 * 2 * 2 * 2 * DIM


# ------------------------------------------------------------------------------------------- stacks
def block(name="vanilla", causal=True, **more):
    return Block(regard.create(name, dim=32, heads=2, causal=causal, **more), MLP(32))


def heads():
    return {at: nn.Linear(32, 5) for at in (1, 2)}


both = partial(block, causal=False)
squeeze = partial(CompressiveMemory, memory_length=16, compressed_length=8, compression_rate=4)
STACKS = {
    "shared": lambda: SharedStack([block(), block("linear")], 5),
    "universal": lambda: UniversalStack(block(), 4),
    "halting": lambda: UniversalStack(
        block(), 3, halting=Halting(32, bias=-9.0)
    ),  # so that nothing halts early
    "reversible": lambda: ReversibleStack(
        [*build_sublayers(block().mixer, MLP(32)), *build_sublayers(block().mixer, MLP(32))]
    ),
    "early exit": lambda: EarlyExitStack([block(), block()], heads(), threshold=0.5),
    "segments": lambda: SegmentStack([block(), block()], segment_length=16, memory=24),
    "segments, own state": lambda: SegmentStack(
        [block(), block("linear")], segment_length=16, memory=16
    ),
    "segments, window": lambda: SegmentStack(
        [block("local", window=8)], segment_length=16, memory=16
    ),
    "compressive": lambda: SegmentStack([block(), block()], segment_length=16, memory=squeeze),
    "feedback": lambda: FeedbackStack([block(), block()]),
    "feedback, span": lambda: FeedbackStack([block(), block()], span=20, share_kv=False),
    "funnel": lambda: FunnelStack([[both()], [both(), both()]], [both()]),
    "funnel, alone": lambda: FunnelStack(
        [[both()], [both()]], separate_cls=True, pool_q_only=False
    ),
    "carry": lambda: RealFormerStack([block("realformer"), block("realformer")]),
}


@pytest.mark.parametrize("name", STACKS)
def test_stack_agrees_with_counted_run(name, monkeypatch):
    """Fails if the formula of a stack is off by more than 2 % forward, or backward leaves the band
    of what is made again.
    """
    pairwise_backend.install(monkeypatch)
    torch.manual_seed(0)
    stack = STACKS[name]()
    done, found = count(stack, torch.randn(2, N, 32)), cost(stack, N, batch=2)
    assert found.forward_flops == pytest.approx(done.forward_flops, rel=0.02)
    needed = found.backward_flops - found.recomputed_flops
    assert 0.92 * needed <= done.backward_flops <= 1.06 * found.backward_flops
    assert found.parameters == sum(p.numel() for p in stack.parameters())


def test_reversible_keeps_the_same_at_any_depth():
    """Fails if activations of a reversible stack are said to grow with its layers."""
    deep = [
        cost(ReversibleStack(build_sublayers(block().mixer, MLP(32)) * layers), N).activation_bytes
        for layers in (1, 8)
    ]
    assert deep[0] == deep[1] == 4 * 2 * N * 32


@pytest.mark.parametrize(
    ("memory", "held"),
    [(HiddenStateMemory, [16, 24, 24]), (squeeze, [16, 20, 24, 24])],
    ids=["hidden states", "compressive"],
)
def test_state_of_segment_memories(memory, held):
    """Fails if the state after each segment has not as many hidden states as the memory keeps."""
    memory = partial(memory, 24) if memory is HiddenStateMemory else memory
    stack = SegmentStack([block()], segment_length=16, memory=memory if memory is squeeze else 24)
    states = [cost(stack, 16 * (i + 1)).state_bytes for i in range(len(held))]
    assert states == [4 * 32 * tokens for tokens in held]
