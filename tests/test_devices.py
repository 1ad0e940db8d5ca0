"""Nothing in a forward waits for a device, and nothing is made on another one than the tokens.

There is no accelerator here. Tensors on the meta device have shapes and no numbers: whatever reads
a number back, or mixes devices, raises there. What the meta device does not reach is read: every
call that could wait stands in a list, with the reason, or is an error.
"""

import ast
from pathlib import Path

import pytest
import torch

from regard import registry

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
COUNTER = "a generator is seeded by how often it drew, while training only"
JOINED = "only for streams that stand at different positions, when they are joined or reach a limit"

WAITING = {
    "backends/flex.py:refuses": NUMBER,
    "backends/tiled_flash.py:_GroupCall.store_queries": CPU,
    "backends/sparse.py:_attend": CPU,
    "backends/token_groups.py:_expand_groups": CPU,
    "backends/split.py:global_mask_pairs": CPU,
    "backends/sdpa.py:_pattern_mask": "asked of masks on the host only",
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
    "ffn/dispatch.py:dispatch_tokens": (
        "without a capacity the fullest expert decides the size of the buffers"
    ),
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
    "backends/flex.py:block_mask": HOST,
    "backends/sdpa.py:_pattern_mask": HOST,
    "backends/calibration.py:_shortest_times": "measures the CPU",
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
    "mixers/pool.py:_kernel": BUILT,
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

NO_NUMBERS = {
    ("reformer", True): "route/lsh.py:chunk_by_bucket_rank",
    ("sinkhorn", "training"): "route/sort.py:BlockSort._gumbel_noise",
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


FORMS = [
    (name, causal)
    for name in registry.list_recipes()
    for causal in registry.get_recipe(name).causal_options()
]


@pytest.mark.parametrize(
    ("name", "causal"), FORMS, ids=[f"{name}{'-causal' * causal}" for name, causal in FORMS]
)
@pytest.mark.parametrize("training", [False, True], ids=["used", "training"])
def test_every_recipe_runs_on_the_meta_device(name, causal, training):
    """Fails if a forward reads a number back, or makes a tensor where the tokens are not; with a
    mask and without.
    """
    mixer = registry.get_recipe(name).example(causal=causal).to("meta").train(training)
    for n in (19, 210):
        n = n if mixer.length is None else min(n, mixer.length)
        x, mask = (
            torch.empty(2, n, mixer.dim, device="meta"),
            torch.empty(2, n, device="meta", dtype=torch.bool),
        )
        for given in ({}, {"mask": mask})[: 1 + mixer.can.mask]:
            if (name, causal) in NO_NUMBERS or (training and (name, "training") in NO_NUMBERS):
                with pytest.raises(RuntimeError, match="meta tensors"):
                    mixer(x, **given)
            else:
                y = mixer(x, **given)
                assert y.shape == x.shape and y.is_meta and y.dtype == x.dtype


def test_what_has_no_meta_form_is_listed_as_waiting():
    """Fails if a recipe is let off without a reason."""
    assert set(NO_NUMBERS.values()) <= WAITING.keys()
