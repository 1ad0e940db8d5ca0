"""Files: saving and loading, interrupted saves, and broken files."""

from __future__ import annotations

import json
import os
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from regard import models
from regard.models import build, load, module_spec, save
from regard.models.config import ModelConfig

MODELS = {
    "gpt": models.gpt(2, 8, 2, vocab_size=11, length=16),
    "bert": models.bert(1, 8, 2, vocab_size=11, length=16, mixer="fnet"),
    "vit": models.vit(
        1,
        8,
        2,
        image_size=8,
        patch_size=4,
        head=models.SequenceClassificationHeadConfig(num_classes=3),
    ),
    "transformer": models.transformer(1, 8, 2, vocab_size=11),
    "features": ModelConfig(
        kind="encoder",
        input=models.VectorInput(width=8),
        dim=8,
        heads=2,
        layers=2,
        position="none",
        mixer=[module_spec("performer", features=6), module_spec("gaussian_prior", sigma=2.0)],
    ),
}


def model(name="gpt", seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(MODELS[name]).eval()


def inputs(m):
    x = torch.arange(12).view(2, 6) % 11
    kinds = {
        "tokens": x,
        "patches": torch.ones(2, 3, 8, 8),
        "vectors": torch.linspace(0, 1, 96).view(2, 6, 8),
    }
    one = kinds[m.config.input.kind]
    one = one.to(next(m.parameters()).dtype) if one.is_floating_point() else one
    return (one, x[:, :4]) if m.config.kind == "seq2seq" else (one,)


def same(a, b):
    return a.config == b.config and torch.equal(a(*inputs(a)), b(*inputs(b)))


def strict_load(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load(folder)


# ------------------------------------------------------------------------------------ save and load
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(name, dtype, tmp_path):
    """A loaded model has the same outputs, dtypes and tied weights."""
    before = model(name).to(dtype)
    save(before, tmp_path / "new" / "folder")
    after = strict_load(tmp_path / "new" / "folder")
    assert same(before, after) and not after.training
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["config.json", "model.safetensors"]
    for (key, a), b in zip(before.state_dict().items(), after.state_dict().values(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), key
    assert len(list(after.parameters())) == len(
        list(before.parameters())
    )  # shared ones are counted once


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    """A tied table is stored once, and trained as one."""
    save(model("gpt"), tmp_path)
    assert "head.proj.weight" not in load_file(tmp_path / "model.safetensors")
    after = load(tmp_path)
    assert after.head.proj.weight is after.backbone.embed.tokens.weight
    after(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    assert after.head.proj.weight.grad is not None


def test_second_save_replaces_first(tmp_path):
    """A second save leaves nothing of the first."""
    save(model("bert"), tmp_path)
    save(model("gpt", seed=1), tmp_path)
    assert same(strict_load(tmp_path), model("gpt", seed=1))


def test_config_file(tmp_path):
    """config.json is the configuration, with ordinary file permissions."""
    save(model(), tmp_path)
    assert ModelConfig(**json.loads((tmp_path / "config.json").read_text())) == MODELS["gpt"]
    (tmp_path / "usual").write_text("")
    modes = {
        (tmp_path / name).stat().st_mode for name in ("usual", "config.json", "model.safetensors")
    }
    assert len(modes) == 1


def test_manually_built_model_cannot_be_saved(tmp_path):
    """A model without a configuration cannot be saved."""
    built = model()
    with pytest.raises(ValueError, match="this model has no configuration"):
        save(models.Decoder(built.backbone, built.head), tmp_path)


# -------------------------------------------------------------------------------------- interrupted
@pytest.mark.parametrize("call", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_failed_save(call, number, tmp_path, monkeypatch):
    """An error at any write leaves the old or the new model, and no other files."""
    old, new = model("bert"), model("gpt", seed=1)
    save(old, tmp_path)
    usual, calls = getattr(os, call), []

    def failing(*args):
        calls.append(args)
        if len(calls) == number:
            raise OSError("no space left on device")
        return usual(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        try:
            save(new, tmp_path)
        except OSError:
            pass
        else:
            assert (
                len(calls) < number or call == "fsync"
            )  # a folder that cannot be flushed is no error
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load(tmp_path)
    assert same(found, old) or same(found, new)
    assert same(found, old) == (number == 1)


@pytest.mark.skipif(sys.platform == "win32", reason="processes do not fork there")
@pytest.mark.parametrize("number", [1, 2])
def test_killed_save(number, tmp_path):
    """A process that dies before a rename leaves the old or the new model."""
    old, new = model("bert"), model("gpt", seed=1)
    save(old, tmp_path)
    usual, calls = os.replace, []

    def dying(*args):
        calls.append(args)
        if len(calls) == number:
            os._exit(9)
        usual(*args)

    child = os.fork()
    if not child:
        os.replace = dying
        save(new, tmp_path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    if number == 1:
        assert same(strict_load(tmp_path), old)
    else:
        with pytest.warns(UserWarning, match="a save was interrupted, or the file was edited"):
            assert same(load(tmp_path), new)
    save(new, tmp_path)
    assert same(strict_load(tmp_path), new)


# ------------------------------------------------------------------------------------------- broken
def rewritten(folder, change, *, keep=True):
    """Save a model, then rewrite its changed weights, with its configuration if `write_record`."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    save(model(), folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    metadata = (
        {"format": "pt", "regard": (folder / "config.json").read_text()}
        if keep
        else {"format": "pt"}
    )
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("keep", [True, False])
def test_mismatched_weights(keep, tmp_path):
    """Missing, unexpected and misshapen tensors are errors with name and shapes."""
    rewritten(tmp_path, lambda t: t.pop("backbone.norm.weight"), keep=keep)
    with pytest.raises(
        ValueError,
        match=r"model.safetensors does not fit the model: it lacks backbone.norm.weight$",
    ):
        load(tmp_path)
    rewritten(tmp_path, lambda t: t.update(extra=torch.zeros(1)), keep=keep)
    with pytest.raises(ValueError, match="the model has no extra"):
        load(tmp_path)
    rewritten(tmp_path, lambda t: t.update({"backbone.norm.weight": torch.zeros(9)}), keep=keep)
    with pytest.raises(
        ValueError, match=r"backbone.norm.weight has shape \(9,\), the model needs \(8,\)"
    ):
        load(tmp_path)
    rewritten(tmp_path, lambda t: t.clear(), keep=keep)
    with pytest.raises(ValueError, match=r"it lacks backbone.embed.tokens.weight, .* and 31 more"):
        load(tmp_path)
    rewritten(tmp_path, lambda t: None, keep=keep)
    assert same(strict_load(tmp_path), model())


def test_integer_weights(tmp_path):
    """Integer weights raise a clear error."""
    rewritten(
        tmp_path, lambda t: t.update({"backbone.norm.weight": t["backbone.norm.weight"].long()})
    )
    with pytest.raises(
        ValueError,
        match=r"backbone.norm.weight has dtype torch.int64, the model needs torch.float32",
    ):
        load(tmp_path)


def test_pickle_is_not_loaded(tmp_path):
    """A pickle with the name of a weights file is an error."""
    save(model(), tmp_path)
    torch.save({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        load(tmp_path)


def test_concurrent_saves(tmp_path):
    """Two concurrent saves leave one of the models, and no other files."""
    from concurrent.futures import ThreadPoolExecutor

    both = [model("bert"), model("gpt", seed=1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: save(both[i % 2], tmp_path), range(20)))
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load(tmp_path)
    assert same(found, both[0]) or same(found, both[1])


def test_broken_weights_file(tmp_path):
    """A truncated, empty or foreign file raises a clear error."""
    save(model(), tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:4],
        b"",
        b"\xff" * 64,
        whole + b"x",
    ):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"is not a complete safetensors file \({len(content)} bytes\)"
        ):
            load(tmp_path)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"a saved model is a folder with config.json and model.safetensors"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON"),
        ("{", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON: recursion limit"),
        ("[]", "should be an object"),
        ("null", "not a model configuration"),
        ('{"kind": "decoder"}', "another version of Regard, or edited: no 'input'; no 'dim'"),
        ('{"dims": 8}', "Config has no 'dims': did you mean 'dim'"),
        ('{"dim": NaN}', "not a model configuration"),
        ('{"dim": ' + "9" * 5000 + "}", "not a model configuration"),
        (" " * (1 << 21), "has 2097152 bytes"),
    ],
)
def test_hostile_configuration(text, message, tmp_path):
    """An invalid configuration is an error, with and without one in the weights."""
    rewritten(tmp_path, lambda t: None, keep=False)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path)
    assert len(str(caught.value)) < 1000 and "config.json" in str(caught.value)


def test_missing_file_and_binary_config(tmp_path):
    """A missing file, or bytes that are not text, raise a clear error."""
    rewritten(tmp_path, lambda t: None, keep=False)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        load(tmp_path)


def test_no_allocation_beyond_the_file(tmp_path):
    """No memory is allocated for weights missing in the file: here, terabytes."""
    save(model(), tmp_path)
    huge = MODELS["gpt"].replace(dim=1 << 20, input=models.TokenInput(vocab_size=1 << 24))
    rewritten(tmp_path, lambda t: None, keep=False)
    (tmp_path / "config.json").write_text(huge.model_dump_json())
    with pytest.raises(
        ValueError,
        match=r"backbone.embed.tokens.weight has shape \(11, 8\), "
        r"the model needs \(16777216, 1048576\)",
    ):
        load(tmp_path)


def test_edited_configuration(tmp_path):
    """A config.json that differs from the weights' configuration is an error."""
    save(model(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("gelu_tanh", "relu"))
    with pytest.warns(UserWarning, match="differs from the configuration in model.safetensors"):
        assert same(load(tmp_path), model())
    for content in ("{", " " * (1 << 21), "\udcff"):
        path.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.warns(UserWarning, match="differs from the configuration"):
            assert same(load(tmp_path), model())
    path.unlink()
    with pytest.warns(UserWarning, match="differs from the configuration"):
        assert same(load(tmp_path), model())
