"""torch.export and ONNX: the same numbers at sizes that were not traced, refusals with their
reasons, and bad input.

Every form of every recipe is measured by benchmarks/export.py, which takes minutes; here stands one
of each kind, and that what was measured is what the recipes promise.
"""

import builtins
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import regard
from regard import export
from regard.cli import app
from regard.deep_init import evaluation_mode
from regard.errors import Unsupported
from regard.export import onnx_file
from regard.export.inputs import BatchShape, ragged_mask
from regard.export.tracing import other_sizes, trace
from regard.mixer import Can, Mixer
from regard.models import (
    LMHeadConfig,
    SequenceClassificationHeadConfig,
    bert,
    build,
    gpt,
    module_spec,
    save,
    transformer,
    vit,
)
from regard.registry import get_recipe, list_recipes

ROOT = Path(__file__).parents[1]
ROWS = {
    (row["recipe"], row["causal"]): row
    for row in json.loads((ROOT / "benchmarks/results/export.json").read_text())["rows"]
}
FORMS = [(name, causal) for name in list_recipes() for causal in get_recipe(name).causal_options()]

onnx = pytest.mark.skipif(
    any(not __import__("importlib.util").util.find_spec(name) for name in onnx_file.PACKAGES),
    reason="needs the extra export",
)


def example(name, causal=None):
    torch.manual_seed(0)
    mixer = get_recipe(name).example(causal=causal)
    mixer.name = name
    return mixer


# --------------------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("vanilla", False),
        ("local", True),
        ("linear", True),
        ("linformer", False),
        ("fnet", False),
        ("draw_read", False),
    ],
)
def test_a_program_gives_what_eager_gives(name, causal):
    """Fails if the graph is for the traced sizes only: ragged padding, holes, an example of nothing
    but padding.
    """
    mixer = example(name, causal)
    graph = export.to_program(mixer, mask=mixer.can.mask).module(check_guards=False)
    n = 17 if mixer.length is None else mixer.length
    x = torch.randn(4, n, mixer.dim)
    given = {"mask": ragged_mask(4, n, x.device)} if mixer.can.mask else {}
    with torch.no_grad():
        torch.testing.assert_close(
            graph(x=x, **given), mixer.eval()(x, **given), rtol=1e-5, atol=1e-5
        )


@onnx
@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("vanilla", True),
        ("bigbird", False),
        ("performer", True),
        ("reformer", False),
        ("xcit", False),
    ],
)
def test_onnxruntime_gives_what_eager_gives(name, causal, tmp_path):
    """Fails if the file is for the traced sizes only, or its inputs have other names."""
    mixer = example(name, causal)
    done = export.to_onnx(mixer, tmp_path / "m.onnx", mask=mixer.can.mask)
    assert done.bytes == done.path.stat().st_size
    assert done.inputs == (("x", "mask") if mixer.can.mask else ("x",))
    assert done.max_difference < 1e-5
    assert len({(check.batch, check.length) for check in done.checks}) >= 2
    run = onnx_file.onnx_runner(onnx_file.import_onnxruntime(), done.path.read_bytes())
    n = 15 if mixer.length is None else mixer.length
    x = torch.randn(5, n, mixer.dim)
    given = {"mask": ragged_mask(5, n, x.device)} if mixer.can.mask else {}
    with torch.no_grad():
        torch.testing.assert_close(
            run({"x": x, **given}), mixer.eval()(x, **given), rtol=1e-4, atol=1e-5
        )


@onnx
def test_context_of_another_length(tmp_path):
    """Fails if x and the context must have one length, or the mask is over x."""
    mixer = example("vanilla")
    done = export.to_onnx(mixer, tmp_path / "m.onnx", mask=True, context=True)
    run = onnx_file.onnx_runner(onnx_file.import_onnxruntime(), done.path.read_bytes())
    x, context, mask = (
        torch.randn(3, 7, mixer.dim),
        torch.randn(3, 40, mixer.dim),
        ragged_mask(3, 40, torch.device("cpu")),
    )
    with torch.no_grad():
        want = mixer(x, context, mask=mask)
    torch.testing.assert_close(
        run({"x": x, "context": context, "mask": mask}), want, rtol=1e-4, atol=1e-5
    )


MODELS = {
    "encoder": bert(1, 16, 2, vocab_size=30, length=40),
    "decoder": gpt(1, 16, 2, vocab_size=30, length=40, mixer=module_spec("local", window=4)),
    "seq2seq": transformer(1, 16, 2, vocab_size=30),
    "images": vit(
        1, 16, 2, image_size=16, patch_size=4, head=SequenceClassificationHeadConfig(num_classes=3)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    """Fails if a model has no graph for any batch and length."""
    torch.manual_seed(0)
    model = build(MODELS[name])
    found = trace(model, mask=name != "images", context=False, length=None)
    assert ("token_type_ids" in found.inputs.axes) == (name == "encoder")
    graph = found.program.module(check_guards=False)
    for sizes in other_sizes(found)[:2]:
        given = found.inputs.example(sizes)
        with torch.no_grad(), evaluation_mode(model):
            torch.testing.assert_close(graph(**given), model(**given), rtol=1e-5, atol=1e-5)
    assert (found.min_length, found.max_length) == {"seq2seq": (1, None), "images": (1, 1)}.get(
        name, (1, 40)
    )


# --------------------------------------------------------------------------------- what is promised
def test_measured_results_match_capabilities():
    """Fails if a recipe or a form of it was never measured, or can other things than it says."""
    assert set(ROWS) == set(FORMS), "run python benchmarks/export.py"
    for (name, causal), row in ROWS.items():
        can = get_recipe(name).example(causal=causal).can
        for promise in ("export", "onnx"):
            assert isinstance(row[promise], float) == getattr(can, promise), (name, causal, promise)
            assert row[promise] == can.reason(promise) or row[promise] < 1e-4


@pytest.mark.parametrize(
    "name", [name for name in list_recipes() if not get_recipe(name).example().can.export]
)
def test_refused_exports_really_fail(name, monkeypatch):
    """Fails if a refusal has outlived its reason."""
    mixer = example(name)
    with pytest.raises(Unsupported, match=r"cannot be exported: .{20}"):
        export.to_program(mixer)
    for part_ in mixer.modules():
        if getattr(part_, "can", None) is not None:
            monkeypatch.setattr(part_, "can", Can(), raising=False)
    with pytest.raises((Unsupported, RuntimeError)):
        export.to_program(mixer)


@onnx
def test_refused_onnx_exports_really_fail(tmp_path, monkeypatch):
    """Fails if ONNX has learned to solve triangular systems, or the refusal is no clear one."""
    mixer, path = example("delta_rule"), tmp_path / "m.onnx"
    export.to_program(mixer, mask=True)
    with pytest.raises(
        Unsupported, match="delta_rule cannot be written as ONNX: ONNX has no triangular solve"
    ):
        export.to_onnx(mixer, path)
    monkeypatch.setattr(mixer, "can", Can())
    with pytest.raises(Unsupported, match=r"ONNX cannot express the graph: .*solve_triangular"):
        export.to_onnx(mixer, path)
    assert not path.exists()


def test_a_model_names_the_part_that_refuses():
    """Fails if the reason is lost in the stack."""
    model = build(gpt(1, 16, 2, vocab_size=30, length=40, mixer=module_spec("bp_transformer")))
    with pytest.raises(Unsupported, match="the number of tree levels depends on the length"):
        export.to_program(model)


def test_no_export_means_no_onnx():
    """Fails if the one can be refused without the other."""
    can = Can(export="because")
    assert can.reason("onnx") == "because"
    assert not (Can() & can).onnx
    assert Can(onnx="because").export


# ---------------------------------------------------------------------------------------- bad input
def test_a_named_backend_is_not_replaced():
    """Fails if an exported graph quietly runs on another backend than the one that was named."""
    mixer = regard.MultiHead(8, 2, regard.SoftmaxAttention(regard.Band(2, 2), backend="sparse"))
    with pytest.raises(
        Unsupported, match="'sparse' cannot be exported: its plan depends on the length"
    ):
        export.to_program(mixer)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"tolerance": 0}, ValueError, "tolerance must be"),
        ({"tolerance": float("nan")}, ValueError, "tolerance must be"),
        ({"length": 1}, ValueError, "length must be an integer >= 2"),
        ({"length": 99}, ValueError, "built for at most 32"),
        ({"context": True}, Unsupported, "does not support cross-attention"),
    ],
)
def test_bad_arguments(given, kind, words):
    """Fails if one is not said clearly."""
    with pytest.raises(kind, match=words):
        export.to_program(
            example("bigbird")
            if "length" not in given
            else regard.create("linformer", dim=8, heads=2, length=32, rank=4),
            **given,
        )


def test_what_is_no_mixer():
    """Fails if any module is let in."""
    with pytest.raises(TypeError, match="Only a Mixer or a Model can be exported, not Linear"):
        export.to_program(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="meta device"):
        export.to_program(example("vanilla").to("meta"))
    with pytest.raises(Unsupported, match="does not support a padding mask"):
        export.to_program(example("fnet"), mask=True)
    with pytest.raises(ValueError, match="context=True is for mixers only"):
        export.to_program(build(MODELS["encoder"]), context=True)


def test_what_is_not_finite():
    """Fails if NaN counts as equal to NaN."""
    mixer = example("vanilla")
    mixer.q.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        export.to_program(mixer)


def test_a_difference_is_an_error():
    """Fails if a graph that is wrong elsewhere is handed out."""

    class Drifting(Mixer):
        calls = 0

        def mix(self, x, context, mask, state):
            self.calls += 1
            return x * self.calls, None

    with pytest.raises(RuntimeError, match=r"differs from eager by .*the tolerance is"):
        export.to_program(Drifting(4, can=Can()))


def test_training_goes_on_as_before():
    """Fails if exporting leaves a module in evaluation, or exports what is for training."""
    mixer = example("vanilla").train()
    mixer.q.eval()
    with evaluation_mode(mixer):
        assert not mixer.training
    assert mixer.training
    assert not mixer.q.training


@onnx
def test_bad_places(tmp_path):
    """Fails if a folder is taken for a file, or what stands there is lost when the export fails."""
    mixer = example("vanilla")
    with pytest.raises(ValueError, match="is a folder"):
        export.to_onnx(mixer, tmp_path)
    with pytest.raises(FileNotFoundError):
        export.to_onnx(mixer, tmp_path / "no" / "m.onnx")
    old = tmp_path / "old.onnx"
    old.write_text("old")
    with pytest.raises(Unsupported):
        export.to_onnx(example("prob_sparse"), old)
    with pytest.raises(ValueError, match="convert them first"):
        export.to_onnx(mixer.bfloat16(), old)
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.parametrize("name", onnx_file.PACKAGES)
def test_a_missing_package_is_named(name, monkeypatch, tmp_path):
    """Fails if the user does not learn what to install."""
    usual = onnx_file.import_module
    monkeypatch.setattr(
        onnx_file, "import_module", lambda n: usual("no_such_package") if n == name else builtins
    )
    with pytest.raises(ImportError, match=rf"needs {name}: pip install 'regard\[export\]'"):
        export.to_onnx(example("vanilla"), tmp_path / "m.onnx")


# -------------------------------------------------------------------------------------- the command
def command(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


@onnx
def test_command(tmp_path):
    """Fails if a recipe or a saved model is not written, or the numbers are not shown."""
    path = tmp_path / "m.onnx"
    found = command(
        "local",
        path,
        "--dim",
        16,
        "--heads",
        2,
        "--set",
        "window=4",
        "--causal",
        "--mask",
        "--json",
    )
    assert found.exit_code == 0, found.output
    value = json.loads(found.stdout)
    assert value["max_difference"] < 1e-5
    assert value["bytes"] == path.stat().st_size
    save(build(gpt(1, 16, 2, vocab_size=30, length=40, head=LMHeadConfig())), tmp_path / "model")
    found = command(tmp_path / "model", path)
    assert found.exit_code == 0, found.output
    assert "difference from eager" in found.output
    assert "1 to 40 tokens" in found.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nosuch", "x.onnx"), "no recipe 'nosuch'"),
        (("lokal", "x.onnx"), "did you mean 'local'"),
        (("linear", "x.onnx", "--length", 5), "linear has no maximum length"),
        (("vanilla", "x.onnx", "--set", "window=4"), "takes no argument 'window'"),
        (("linformer", "x.onnx", "--causal"), "does not support causal=True"),
        (("bp_transformer", "x.onnx"), "the number of tree levels depends on the length"),
        (("vanilla", "/"), "is a folder"),
        (("vanilla", "/no/such/x.onnx"), "no such folder"),
        (("no/folder", "x.onnx"), "is neither the folder of a saved model nor a recipe"),
    ],
)
def test_command_refuses(words, said, monkeypatch, tmp_path):
    """Fails if a mistake ends in a traceback, or leaves a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(onnx_file, "import_onnxruntime", lambda: None)
    found = command(*words)
    assert found.exit_code == 1
    assert said in " ".join(found.output.split())
    assert not isinstance(found.exception, Exception) or isinstance(found.exception, SystemExit)
    assert list(tmp_path.iterdir()) == []


def test_masks_are_ragged():
    """Fails if the comparisons meet no padding, no hole, and no example without a token."""
    mask = ragged_mask(3, 20, torch.device("cpu"))
    assert mask[0].all()
    assert not mask[2].any()
    assert 0 < mask[1].sum() < 20
    assert mask[1, 3] < mask[1, 4]
    assert BatchShape(3, 20) == (3, 20)
