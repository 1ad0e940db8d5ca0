"""On accelerators: every recipe and model runs on a fake one, and what waits for one is listed.

There is no accelerator here. `fake_device` has tensors without numbers on a device of its own:
whatever mixes devices raises there. What such a run does not reach is read: every call that could
wait for a device stands in a list, with the reason, or is an error.
"""

import ast
import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
)

import regard
from fake_device import NAME, UnsupportedDtype, fake_device
from regard import registry
from regard.backends import flex
from regard.block import Block
from regard.ffn import MLP
from regard.models import ModelConfig, TokenInput, build, module_spec
from regard.models.generation import BatchDecoder
from regard.models.stacks import STACKS
from regard.models.stopping_criteria import StoppingCriteria
from regard.norm import NORMS
from regard.residual import RESIDUALS
from regard.tasks import create_task
from regard.train import Trainer, TrainSettings
from regard.train.loss_module import LossModule
from regard.train.run import RunSpec, model_config
from test_model_stacks import ARGUMENTS, MIXERS

ROOT = Path(__file__).parents[1] / "src/regard"
ROOMS = (
    "backends",
    "attentions",
    "cells",
    "ffn",
    "mixers",
    "pattern",
    "position",
    "route",
    "stack",
)
FILES = (
    "auxiliary",
    "autograd",
    "block",
    "compression",
    "feature",
    "head_mixing",
    "mixer",
    "norm",
    "numerics",
    "prior",
    "query_prototypes",
    "residual",
    "update",
)

WAITS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "masked_select",
    "unique",
    "is_nonzero",
    "equal",
    "allclose",
}
CASTS = {"bool", "int", "float"}
MAKES = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}

HOST = "positions and plans live on the host, whatever the device of the tokens"
CPU = "this executor refuses every other device"
NUMBER = "a number of Python, no tensor"
CHECK = "a check that authors of backends run, not a forward"
COUNTER = "a generator is seeded by how often it drew, while training only"
JOINED = "only for streams that stand at different positions, when they are joined or reach a limit"

WAITING = {
    "backends/tiled_flash.py:_GroupCall.store_queries": CPU,
    "backends/sparse.py:_attend": CPU,
    "backends/token_groups.py:_expand_groups": CPU,
    "backends/split.py:global_mask_pairs": CPU,
    "backends/sdpa.py:_pattern_mask": "asked of masks on the host only",
    "backends/call.py:check_positions": "asked of positions on the host only",
    "backends/calibration.py:accelerator_seconds": NUMBER,
    "backends/check.py:_compare": CHECK,
    "backends/check.py:_compare.assert_close": CHECK,
    "pattern/segments.py:Segments.from_ids": HOST,
    "pattern/segments.py:lengths_from_cu_seqlens": HOST,
    "attentions/kv_cache.py:KVCache.visible": HOST,
    "attentions/kv_cache.py:KVCache.evict": HOST,
    "attentions/kv_cache.py:KVCache._select_keys": JOINED,
    "attentions/kv_cache.py:KVCache.share_positions": JOINED,
    "attentions/kv_cache.py:KVCache.join_key": JOINED,
    "backends/per_example.py:PositionGrid.check_length": JOINED,
    "position/embedding.py:PositionEmbedding.forward": JOINED,
    "attentions/lsh.py:LSHAttention._stream_chunk": (
        "only a stream forgets: which keys nobody meets any more decides how many are kept"
    ),
    "attentions/adaptive_span.py:AdaptiveSpanAttention.__init__": NUMBER,
    "attentions/adaptive_span.py:AdaptiveSpanAttention.windows": (
        "the learned spans decide how many keys are computed: that is the mechanism"
    ),
    "cells/show_attend.py:CaptionCell.step": (
        "a draw from weights that are all zero is an error, and must be said"
    ),
    "feature.py:RandomFeatures.advance": COUNTER,
    "ffn/expert_bank.py:ShardedExpertBank.forward": (
        "all processes must agree in a size before they exchange"
    ),
    "ffn/dispatch.py:dispatch_tokens": ("the fullest expert decides the size of the buffers"),
    "ffn/router.py:Router.forward": COUNTER,
    "mixers/bp_spans.py:_distinct": HOST,
    "mixers/bp_spans.py:visible_nodes": HOST,
    "norm.py:PowerNorm._normalize_training": (
        "what it does depends on how many steps it has trained"
    ),
    "norm.py:ScaleNorm.__init__": NUMBER,
    "norm.py:check_fraction": NUMBER,
    "auxiliary.py:is_collecting": NUMBER,
    "pattern/algebra.py:Pattern.density": HOST,
    "pattern/algebra.py:Pattern.keys_per_query": HOST,
    "position/bias.py:TransformerXLBias.forward": (
        "the farthest distance decides how many waves there are"
    ),
    "position/rotary.py:RotaryEmbedding.rotary_dim": NUMBER,
    "prior.py:Gaussian.__init__": NUMBER,
    "prior.py:Sinks.__init__": NUMBER,
    "prior.py:SoftCap.__init__": NUMBER,
    "residual.py:LayerScale.__init__": NUMBER,
    "route/kmeans.py:KMeans.__init__": NUMBER,
    "route/lsh.py:chunk_by_bucket_rank": (
        "the fullest row decides how many chunks there are; a bound would double the work"
    ),
    "route/sort.py:BlockSort.__init__": NUMBER,
    "route/sort.py:BlockSort._gumbel_noise": COUNTER,
    "stack/early_exit.py:EarlyExitStack.__init__": NUMBER,
    "stack/early_exit.py:EarlyExitStack._run_example_exits": (
        "once nobody needs another layer none is run: that is the mechanism"
    ),
    "stack/early_exit.py:EarlyExitStack._run_token_exits": (
        "once nobody needs another layer none is run: that is the mechanism"
    ),
    "stack/replay.py:RngState.equals": "states of generators, which are on the host",
    "stack/replay.py:ReplayRecorder.changes": (
        "which buffers a call changed must be known before it is made again, while training only"
    ),
    "stack/universal.py:Halting.__init__": NUMBER,
    "stack/universal.py:UniversalStack._run_halting": (
        "once every token has halted no step is run: that is the mechanism"
    ),
}

SEEDED = "drawn on the host by a generator of its own, then moved: the same numbers on every device"
BUILT = "when a mixer is built or its weights are taken over, not in a forward"
MAKING = {
    "backends/calibration.py:_time_calls": "measures the CPU",
    "mixer.py:MultiHead.mix_packed": HOST,
    "backends/check.py:_cases.draw": CHECK,
    "backends/check.py:_random_like": CHECK,
    "backends/check.py:_softmax_cases": CHECK,
    "backends/flex.py:block_mask": HOST,
    "backends/sdpa.py:_pattern_mask": HOST,
    "backends/tiled_flash.py:_TiledFlash.backward": CPU,
    "backends/tiled_flash.py:_GroupCall._add": CPU,
    "backends/tiled_flash.py:backward_part": CPU,
    "backends/tiled_flash.py:layout_addends": CPU,
    "backends/token_groups.py:_FusedGroups.backward": CPU,
    "backends/split.py:run_by_head": CPU,
    "backends/sparse.py:part_groups": CPU,
    "attentions/kv_cache.py:KVCache.evict": HOST,
    "attentions/persistent.py:PersistentMemoryAttention.attend": HOST,
    "attentions/prob_sparse.py:_uniform": SEEDED,
    "attentions/adaptive_span.py:AdaptiveSpanAttention.attend": HOST,
    "feature.py:normal_rows": SEEDED,
    "feature.py:orthogonal_rows": SEEDED,
    "ffn/router.py:Router.forward": SEEDED,
    "mixers/collaborative.py:_common_factors": BUILT,
    "mixers/conditional.py:TaskAttention.for_task": (
        "the number of a task, which is moved where it is used"
    ),
    "mixers/collaborative.py:_main_directions": BUILT,
    "mixers/positional.py:_example_tensor": BUILT,
    "mixers/bp_spans.py:_group_by_tile": HOST,
    "mixers/bp_spans.py:visible_nodes": HOST,
    "auxiliary.py:AuxOutputs.loss": "nothing was recorded: a zero that fits every device",
    "pattern/algebra.py:Pattern.dense": HOST,
    "pattern/algebra.py:position_tiles": HOST,
    "pattern/grid.py:block_order": HOST,
    "query_prototypes.py:_lloyd_cpp": CPU,
    "route/sort.py:BlockSort._gumbel_noise": SEEDED,
}


def nodes():
    """Every call and every condition in the rooms of a forward: the place "file:Class.function",
    and the node.
    """

    def walk(node, scope, name):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope = [*scope, node.name]
        if isinstance(node, ast.Call | ast.If | ast.IfExp | ast.While):
            yield f"{name}:{'.'.join(scope)}", node
        for child in ast.iter_child_nodes(node):
            yield from walk(child, scope, name)

    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    for path in [*paths, *(ROOT / f"{name}.py" for name in FILES)]:
        yield from walk(
            ast.parse(path.read_text(encoding="utf-8")), [], path.relative_to(ROOT).as_posix()
        )


def waits(node):
    """Whether it may read a number of a tensor: a method such as .item(), int() of no constant, a
    condition on .any().
    """
    if not isinstance(node, ast.Call):
        asked = (call.func for call in ast.walk(node.test) if isinstance(call, ast.Call))
        return any(
            isinstance(func, ast.Attribute) and func.attr in ("any", "all") for func in asked
        )
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in WAITS
    simple = not node.args or isinstance(node.args[0], ast.Constant)
    return isinstance(node.func, ast.Name) and node.func.id in CASTS and not simple


def makes(node):
    """Whether it makes a tensor and leaves open where."""
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or ast.unparse(node.func.value) != "torch"
    ):
        return False
    return node.func.attr in MAKES and not any(key.arg == "device" for key in node.keywords)


@pytest.mark.parametrize(
    ("asks", "listed"), [(waits, WAITING), (makes, MAKING)], ids=["waiting", "making"]
)
def test_what_waits_or_leaves_the_device_open_is_listed(asks, listed):
    """Fails if a forward begins to wait for the device, or to make tensors on another; or if the
    list is out of date.
    """
    found = {place for place, node in nodes() if asks(node)}
    if asks is makes:  # modules are built anywhere, and moved
        found = {place for place in found if "__init__" not in place.split(":")[1]}
    assert found - listed.keys() == set(), (
        "give the device, do without the wait, or say why it must be"
    )
    assert listed.keys() - found == set(), "these are gone: take them off the list"


# --------------------------------------------------------------------------- the fake accelerator
def test_the_fake_device_finds_faults():
    """Fails if the helper lets a stray CPU tensor pass, misses a read, or fakes the host."""
    with fake_device(float64=False) as gpu:
        x = torch.randn(2, 3, device=gpu.device)
        assert (x @ x.T + 1).device.type == x.new_tensor([1.0, 2.0]).device.type == NAME
        assert torch.tensor([1, 2], device=gpu.device).device.type == NAME
        for stray in (
            lambda: x + torch.ones(3),
            lambda: torch.where(x > 0, x, torch.zeros(3)),
            lambda: nn.Linear(3, 3)(x),
            lambda: nn.functional.embedding(torch.zeros(2, dtype=torch.long), x),
        ):
            with pytest.raises(FakeTensorDeviceMismatchError):
                stray()
        with pytest.raises(DynamicOutputShapeException):
            x.nonzero()
        with pytest.raises(UnsupportedDtype, match="float64"):
            x.double()
        assert torch.arange(3).tolist() == [0, 1, 2] and torch.ones(2).double().sum() == 2
        assert gpu.reads == 0
        assert float(x.sum()) == 1.0 and bool(x.any()) and gpu.reads == 2


def place_of_model(model):
    """The device types of all parameters, gradients and buffers."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return {t.device.type for t in (*tensors, *model.buffers())}


def optimizer_step(model):
    """One step of AdamW with clipped gradients; all weights and gradients are on the device."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters()).step()
    assert place_of_model(model) == {NAME}


class Tagger(nn.Module):
    """Embedding, a block around a mixer, and a linear head."""

    def __init__(self, mixer, task):
        super().__init__()
        self.embed, self.head = (
            nn.Embedding(task.vocab_size, mixer.dim),
            nn.Linear(mixer.dim, task.classes),
        )
        self.block = Block(mixer, MLP(mixer.dim))

    def forward(self, x, mask=None):
        return self.head(self.block(self.embed(x), mask=mask))


def run_recipe(name, causal):
    """What works on a fake device without float64: {"forward": "yes", "stream": "waits", ...}."""
    outcome = {}
    with fake_device(float64=False) as gpu:

        def record(column):
            outcome[column], gpu.reads = "waits" if gpu.reads else "yes", 0

        mixer = registry.get_recipe(name).example(causal=causal).to(gpu.device).eval()
        n = 140 if mixer.length is None else min(140, mixer.length)  # more than a block of flex
        x = torch.randn(2, n, mixer.dim, device=gpu.device)
        mask = torch.ones(2, n, dtype=torch.bool, device=gpu.device)
        y = mixer(x, mask=mask) if mixer.can.mask else mixer(x)
        assert (y.device, y.shape, y.dtype) == (x.device, x.shape, x.dtype)
        record("forward")

        if mixer.can.stream and mixer.causal:
            state, start = None, 0
            for size in (n // 2, 3):
                y, state = mixer.eval().stream(x[:, start : start + size], state)
                assert y.device.type == NAME
                start += size
            record("stream")

        task = create_task("parity", length=n)
        model = Tagger(mixer, task).to(gpu.device).train()
        batch = task.batch("train", range(2)).to(gpu.device)
        loss = LossModule(model, task, torch.float32)(batch)
        loss.backward()
        outcome["backward"] = "waits" if gpu.reads else "yes"
        optimizer_step(model)
        record("training")
    return outcome


FORMS = [
    (name, causal)
    for name in registry.list_recipes()
    for causal in registry.get_recipe(name).causal_options()
]
TABLE = Path(__file__).with_name("fake_device.json")
COLUMNS = ("forward", "backward", "stream", "training")


@pytest.mark.parametrize(
    ("name", "causal"), FORMS, ids=[f"{name}{'-causal' * causal}" for name, causal in FORMS]
)
def test_every_recipe_runs_on_a_fake_accelerator(name, causal):
    """Fails if a CPU tensor strays into a run, if a size depends on data, if float64 is used, or if
    the host reads a number that the table does not know of."""
    found = run_recipe(name, causal)
    assert found == json.loads(TABLE.read_text())[name]["causal" if causal else "plain"]


def test_what_waits_for_the_device_is_listed():
    """Fails if a recipe waits without a reason in the table of the docs."""
    waiting = {
        name
        for name, forms in json.loads(TABLE.read_text()).items()
        if any("waits" in outcome.values() for outcome in forms.values())
    }
    reasons = DOCS.read_text(encoding="utf-8").split("| waits")[1].split("\n\n")[0]
    assert {name for name in waiting if f"`{name}`" not in reasons} == set()


DOCS = Path(__file__).parents[1] / "docs/devices.md"
START, END = "<!-- recipes on a fake device -->\n", "<!-- end -->\n"


def docs_table():
    """The table of docs/devices.md, from the committed results."""

    def cell(forms, column):
        values = {form: outcome[column] for form, outcome in forms.items() if column in outcome}
        if len(set(values.values())) < 2:
            return next(iter(values.values()), "–")
        return ", ".join(f"{form}: {value}" for form, value in sorted(values.items()))

    rows = [
        f"| `{name}` | {' | '.join(cell(forms, column) for column in COLUMNS)} |"
        for name, forms in sorted(json.loads(TABLE.read_text()).items())
    ]
    header = f"| recipe | {' | '.join(COLUMNS)} |\n|{' --- |' * (1 + len(COLUMNS))}\n"
    return header + "\n".join(rows) + "\n"


def test_the_table_in_the_docs_is_that_of_the_tests():
    """Fails if docs/devices.md is out of date: run `python tests/test_devices.py`."""
    text = DOCS.read_text(encoding="utf-8")
    assert text.split(START)[1].split(END)[0] == docs_table()


# ---------------------------------------------------------------------------------------- models
MODELS = {
    "encoder": {"kind": "encoder", "head": {"kind": "masked_lm"}},
    "classifier": {
        "kind": "encoder",
        "head": {"kind": "sequence_classification", "num_classes": 3},
        "position": "rope",
        "mixer": "bigbird",
        "length": 256,
    },
    "patches": {
        "kind": "encoder",
        "input": {"kind": "patches", "height": 8, "width": 8, "patch_size": 2},
        "head": {"kind": "regression"},
        "length": None,
    },
    "dual_encoder": {"kind": "dual_encoder", "head": {"kind": "matching", "num_classes": 2}},
    "seq2seq": {"kind": "seq2seq", "head": {"kind": "lm"}, "position": "t5"},
    **{
        f"decoder {position}": {"kind": "decoder", "head": {"kind": "lm"}, "position": position}
        for position in ("none", "learned", "sinusoid", "rope", "alibi", "t5")
    },
    "decoder experts": {
        "kind": "decoder",
        "head": {"kind": "lm"},
        "ffn": module_spec("top_k", num_experts=4, capacity=1.5),
    },
    **{
        f"stack {name}": {
            "kind": "encoder" if name in ("funnel", "class_attention", "luna") else "decoder",
            "stack": module_spec(name, **ARGUMENTS.get(name, {})),
            "mixer": MIXERS.get(name, "vanilla"),
            "layers": 4,
        }
        for name in STACKS
    },
    **{f"norm {name}": {"kind": "decoder", "norm": module_spec(name)} for name in NORMS},
    **{f"residual {name}": {"kind": "encoder", "residual": name} for name in RESIDUALS},
}
MODELS_THAT_READ = {"stack universal", "decoder experts"}  # halting; the fullest expert


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model_trains_on_a_fake_accelerator(name):
    """Fails if a model of some kind, a stack, a norm or a positional encoding leaves the device."""
    usual = {"input": TokenInput(vocab_size=11), "dim": 8, "heads": 2, "layers": 2, "length": 32}
    config = ModelConfig(**usual | MODELS[name])
    with fake_device() as gpu:
        model = build(config).to(gpu.device).train()
        n = 256 if config.length == 256 else 20
        tokens = torch.zeros(2, n, dtype=torch.long, device=gpu.device)
        mask = torch.ones(2, n, dtype=torch.bool, device=gpu.device)
        if config.kind == "seq2seq":
            y = model(tokens, tokens, mask=mask)
        elif config.kind == "dual_encoder":
            y = model(tokens[:, None].expand(-1, 2, -1), mask=mask[:, None].expand(-1, 2, -1))
        elif config.input.kind == "patches":
            y = model(torch.randn(2, 3, 8, 8, device=gpu.device))
        else:
            y = model(tokens, mask=None if name == "stack class_attention" else mask)
        assert y.device.type == NAME
        y.square().mean().backward()
        optimizer_step(model)
        if config.kind == "decoder":
            y, state = model.eval().stream(tokens[:, :5])
            y, state = model.stream(tokens[:, 5:6], state)
            assert y.device.type == NAME
        assert bool(gpu.reads) == (name in MODELS_THAT_READ)


@pytest.mark.parametrize("name", ["vanilla", "local", "linear", "performer"])
def test_pair_masks_and_packed_sequences_on_a_fake_accelerator(name):
    """Fails if the masks or the plan of a packed batch are made on the CPU and stay there."""
    with fake_device() as gpu:
        mixer = regard.create(name, dim=8, heads=2).to(gpu.device)
        x = torch.randn(1, 150, 8, device=gpu.device, requires_grad=True)
        calls = [{"cu_seqlens": torch.tensor([0, 50, 150])}]
        if mixer.can.attn_mask:
            calls.append({"attn_mask": torch.ones(150, 150, dtype=torch.bool, device=gpu.device)})
        for given in calls:
            mixer(x, **given).sum().backward()
        assert x.grad.device.type == NAME and gpu.reads == 0


def test_a_whole_training_run_and_decoding_on_a_fake_accelerator():
    """Fails if the trainer leaves the model, its average, a batch or a target on the CPU."""
    with fake_device() as gpu:
        task = create_task("lm", length=16)
        spec = RunSpec(task=module_spec("lm", length=16), dim=8, heads=2, layers=1)
        model = build(model_config(spec, task))
        settings = TrainSettings(
            device=NAME, steps=2, batch_size=4, accumulation_steps=2, eval_examples=4, ema_decay=0.9
        )
        trainer = Trainer(model, task, settings)
        result = trainer.run()
        assert result.steps == 2 and place_of_model(model) == {NAME}
        own = {name: t.device.type for name, t in trainer.ema.weights.items() if name != "steps"}
        assert set(own.values()) == {NAME} == {trainer.device.type}
        decoder = BatchDecoder(model.eval().stream, None, gpu.device, StoppingCriteria())
        with torch.no_grad():
            assert decoder.advance([[1, 2, 3]]).device.type == "cpu"  # where tokens are selected
            assert decoder.state is not None


# ------------------------------------------------------------------------------------------- flex
def test_flex_is_the_sparse_path_of_accelerators(monkeypatch):
    """FlexAttention's operator, uncompiled, with the block masks of all pattern recipes.

    Fails if a pattern needs tensors of another device in a kernel, or `auto` chooses something else
    where FlexAttention has a kernel. Compiled kernels cannot be had without a GPU.
    """
    operator = import_module("torch._higher_order_ops.flex_attention").flex_attention
    identity = import_module("torch.nn.attention.flex_attention")._identity
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}
    masks = []

    def uncompiled(q, k, v, *, block_mask, scale, enable_gqa):
        masks.append(block_mask)
        return operator(q, k, v, identity, block_mask.as_tuple(), scale, options)[0]

    monkeypatch.setattr(flex, "DEVICES", (*flex.DEVICES, NAME))
    monkeypatch.setattr(flex, "_flex_attention", lambda device: uncompiled)
    with fake_device() as gpu:
        big = regard.create("bigbird", dim=8, heads=2, block=16, length=400)
        names = ("local", "global_tokens", "per_head", "dilated", "axial")
        for mixer in (big, *(registry.get_recipe(name).example(causal=False) for name in names)):
            mixer.to(gpu.device)
            x = torch.randn(2, 400, mixer.dim, device=gpu.device, requires_grad=True)
            mask = torch.ones(2, 400, dtype=torch.bool, device=gpu.device)
            for given in ({}, {"mask": mask}):
                masks.clear()
                mixer(x, **given).sum().backward()
                assert len(masks) == 1 and masks[0].kv_indices.device.type == NAME
        assert gpu.reads == 0
        dense = regard.create("vanilla", dim=8, heads=2).to(gpu.device)
        masks.clear()
        dense(torch.randn(2, 400, 8, device=gpu.device))
        assert not masks


if __name__ == "__main__":
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, causal in FORMS:
        found.setdefault(name, {})["causal" if causal else "plain"] = run_recipe(name, causal)
    TABLE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    before, rest = DOCS.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    DOCS.write_text(before + START + docs_table() + END + after, encoding="utf-8")
