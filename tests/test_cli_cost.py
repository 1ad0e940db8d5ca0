"""regard cost: what it prints, what it says in JSON, and how it refuses."""

import json
import resource

import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.measure.cost import cost
from regard.measure.model import build_on_meta, simple_config
from regard.registry import get_recipe

SMALL = ["--dim", "32", "--heads", "2", "--layers", "2", "--vocab-size", "50", "--length", "64"]


def run(*arguments):
    return CliRunner().invoke(app, ["cost", *map(str, arguments)])


def test_table():
    """Fails if a part is not shown, or layers that are alike are shown one by one."""
    found = run("vanilla", "--causal", *SMALL)
    assert found.exit_code == 0, found.output
    for word in (
        "embedding",
        "layer 0 .. 1, each",
        "mixer: MultiHead",
        "ffn: MLP",
        "head",
        "total",
        "peak memory",
    ):
        assert word in found.output
    assert "layer 1" not in found.output.replace("layer 0 .. 1", "")


def test_json_says_what_the_function_says():
    """Fails if the numbers on the command line are others than those of `cost`."""
    found = run("linear", *SMALL, "--batch-size", 3, "--dtype", "bfloat16", "--json")
    value = json.loads(found.stdout)
    direct = cost(
        build_on_meta(
            simple_config(get_recipe("linear"), {"heads": 2}, dim=32, layers=2, vocab_size=50)
        ),
        64,
        batch=3,
        itemsize=2,
    )
    assert value["cost"] == json.loads(json.dumps(direct.as_json()))
    assert value["measured"] is None and value["plans"] == []


def test_measured_step():
    """Fails if --measure runs nothing, or the counts differ from the prediction."""
    value = json.loads(run("vanilla", *SMALL, "--measure", "--json").stdout)
    measured, predicted = value["measured"], value["cost"]
    assert measured["forward_flops"] == pytest.approx(predicted["forward_flops"], rel=0.02)
    assert measured["activation_bytes"] == pytest.approx(predicted["activation_bytes"], rel=0.1)
    assert measured["seconds"] > 0
    assert "ratio" in run("vanilla", *SMALL, "--measure").output


def test_what_does_not_fit_is_not_run():
    """Fails if a model of billions is built for real."""
    found = run("vanilla", "--dim", 8192, "--heads", 64, "--layers", 80, "--measure")
    assert found.exit_code == 0
    assert "not measured: the model needs" in found.output


def test_plan():
    """Fails if a plan lacks its ways, its bytes or its days."""
    found = run(
        "vanilla", "--causal", *SMALL, "--dtype", "bfloat16", "--plan", "h100", "--tokens", 10**9
    )
    assert found.exit_code == 0, found.output
    for word in (
        "devices",
        "1 x 1 x 1",
        "device memory: activations",
        "step: compute",
        "tokens per second",
        "recompute layers",
    ):
        assert word in found.output
    value = json.loads(
        run(
            "vanilla", *SMALL, "--dtype", "bfloat16", "--plan", "h100", "--tokens", 10**9, "--json"
        ).stdout
    )
    kept, _, recomputed = value["plans"]
    assert (
        kept["days"] > 0
        and recomputed["recompute"] == "layers"
        and kept["step_seconds"] >= kept["compute_seconds"]
    )


LARGE = {
    "kind": "decoder",
    "input": {"kind": "tokens", "vocab_size": 128256},
    "head": {"kind": "lm", "tie_weights": False},
    "dim": 8192,
    "heads": 64,
    "layers": 80,
    "mixer": {"name": "grouped_query", "arguments": {"group_size": 8}},
    "position": "rope",
    "ffn": {"name": "swiglu", "arguments": {"hidden": 28672}},
    "norm": "rms",
}


def test_config_of_seventy_billion_at_a_million_tokens(tmp_path):
    """Fails if a large configuration takes memory to ask about, or comes out with other parameters,
    products or cache.
    """
    path = tmp_path / "model.json"
    path.write_text(json.dumps(LARGE))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = run("--config", path, "--length", 1_000_000, "--dtype", "bfloat16", "--json")
    assert found.exit_code == 0, found.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
    value = json.loads(found.stdout)["cost"]
    each = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert value["parameters"] == 80 * (each + 2 * 8192) + 8192 + 2 * 128256 * 8192
    tokens = 10**6
    assert (
        value["forward_flops"]
        == 2 * tokens * (80 * each + 128256 * 8192) + 80 * 4 * (tokens * (tokens + 1) // 2) * 8192
    )
    assert value["state_bytes_per_token"] == 80 * 2 * 1024 * 2


def test_config_of_experts(tmp_path):
    """Fails if a token is said to use all experts, or the plan leaves them all on one device."""
    path = tmp_path / "config.json"
    experts = {"name": "top_k", "arguments": {"num_experts": 8}}
    path.write_text(
        json.dumps(
            {**LARGE, "dim": 512, "heads": 8, "layers": 2, "mixer": "vanilla", "ffn": experts}
        )
    )
    plan = ["--plan", "L4", "--batch-size", 64, "--accumulation-steps", 2]
    found = run("--config", tmp_path, "--length", 8192, "--dtype", "bfloat16", *plan)
    assert found.exit_code == 0, found.output
    for word in ("active parameters per token", "expert parallel", "recompute ffn"):
        assert word in found.output


def test_own_accelerators(tmp_path):
    """Fails if a table of one's own is not used, or a wrong one is taken."""
    path, good = (
        tmp_path / "mine.json",
        {"flops": {"bfloat16": 1e15}, "bandwidth": 1e12, "memory": 10**11, "link": 1e11},
    )
    path.write_text(json.dumps({"mine": good}))
    arguments = [*SMALL, "--dtype", "bfloat16", "--accelerators", path]
    assert run("vanilla", *arguments, "--plan", "mine").exit_code == 0
    assert "did you mean 'mine'" in run("vanilla", *arguments, "--plan", "min").stderr
    for wrong, message in (
        ({"memory": -1}, "mine.memory"),
        ({"flop": {}}, "did you mean 'flops'"),
        ({"link": "x"}, "mine.link"),
    ):
        path.write_text(json.dumps({"mine": {**good, **wrong}}))
        assert message in run("vanilla", *arguments, "--plan", "mine").stderr


def test_a_million_tokens():
    """Fails if recipes of each kind cannot be asked about at a million tokens."""
    for name in (
        "vanilla",
        "longformer",
        "linear",
        "linformer",
        "reformer",
        "bp_transformer",
        "gmlp",
        "fnet",
    ):
        found = run(name, "--length", 1_000_000, "--layers", 2, "--json")
        assert found.exit_code == 0, f"{name}: {found.output}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vanila"], "no recipe 'vanila': did you mean 'vanilla'?"),
        (["vanilla", "--length", "-3"], "--length must be between 1 and"),
        (["vanilla", "--length", "99999999999"], "--length must be between 1 and"),
        (["vanilla", "--dim", "0"], "--dim must be between 1 and"),
        (["vanilla", "--layers", "-1"], "layers: Input should be greater than or equal to 1"),
        (
            ["vanilla", "--vocab-size", "0"],
            "vocab_size: Input should be greater than or equal to 1",
        ),
        (["vanilla", "--ffn-dim", "0"], "hidden must be an integer >= 1"),
        (
            ["vanilla", "--dim", "99999999999", "--heads", "1"],
            "dim: Input should be less than or equal to",
        ),
        (["vanilla", "--heads", "7"], "must be divisible by heads"),
        (["vanilla", "--dtype", "int8"], "--dtype must be one of float32"),
        (["vanilla", "--plan", "H10"], "no accelerator 'H10': did you mean 'H100'?"),
        (["vanilla", "--plan", "TPU-v5e"], "TPU-v5e has no peak for float32"),
        (["vanilla", "--tokens", "5"], "--tokens needs --plan"),
        (["local", "--set", "widow=5"], "local takes no argument 'widow': did you mean 'window'?"),
        (["fnet", "--causal"], "does not support causal=True"),
        (["bigbird", "--length", "1000000"], "use blocks of at least block=245 tokens"),
        (
            ["synthesizer_random", "--length", "16777216", "--dim", "65536", "--heads", "65536"],
            "larger than torch can describe",
        ),
        (["--config", "nowhere.json"], "error: nowhere.json does not exist"),
        (["vanilla", "--config", "nowhere.json"], "remove vanilla"),
        (["vanilla", "--accumulation-steps", "2"], "--accumulation-steps needs --plan"),
        (
            ["vanilla", "--plan", "H100", "--accelerators", "nowhere.json"],
            "nowhere.json cannot be read",
        ),
    ],
)
def test_refusals(arguments, message):
    """Fails if bad input is taken, or is answered by more than one line."""
    found = run(*arguments)
    assert found.exit_code != 0
    assert message in found.stderr
    assert found.stderr.count("\n") == 1 and "Traceback" not in found.stderr


def test_help_has_an_example():
    """Fails if the help shows no example."""
    assert "Example: regard cost" in " ".join(run("--help").output.split())
