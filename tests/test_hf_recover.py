"""`regard.recover`, longer positions, and swapped models in files."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import regard
from hf_models import randomize_weights
from regard import Unsupported, models
from regard.hf import (
    extend_positions,
    load_swapped,
    load_transformers_model,
    restore,
    save_swapped,
    swap,
)
from regard.hf.distillation import relative_error
from regard.hf.model_inputs import max_length
from regard.train import Interrupted

hf = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": 31,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


pytestmark = pytest.mark.usefixtures("seeded")


def bert(kind="BertModel"):
    return randomize_weights(getattr(hf, kind)(hf.BertConfig(**SMALL)), torch.float32)


def texts(count=60):
    """Tokens of several lengths."""
    return [torch.randint(1, 31, (int(n),)) for n in torch.randint(5, 20, (count,))]


@torch.no_grad()
def out(model, tokens):
    more = {"decoder_input_ids": tokens} if isinstance(model, hf.T5ForConditionalGeneration) else {}
    given = model(tokens, **more)
    return given.last_hidden_state if hasattr(given, "last_hidden_state") else given.logits


# ----------------------------------------------------------------------------------------- recovery
def test_recover_reduces_drift_and_restore_undoes_it():
    """Fails if training does not reduce the drift, or `restore` is not exact."""
    model, x = bert(), torch.randint(1, 31, (2, 9))
    want, flags = out(model, x), [p.requires_grad for p in model.parameters()]
    swap(model, "linear")
    found = regard.recover(model, texts(), steps=120, batch_size=8, lr=3e-3)
    assert found.after.output > found.before.output + 0.3 * (1 - found.before.output)
    assert all(found.after.cosine[layer] > was for layer, was in found.before.cosine.items())
    stages = [row["stage"] for row in found.curve]
    assert stages == sorted(stages) and set(stages) == {"layers", "model"} and found.steps == 120
    assert found.curve[-1]["score"] == pytest.approx(found.after.output, abs=1e-4)
    assert "before" in str(found) and found.as_dict()["curve"] == found.curve
    with pytest.raises(ValueError, match=r"call `regard\.restore` before"):
        swap(model, "local")
    moved = out(model, x)
    assert not torch.equal(moved, want)
    again = copy.deepcopy(model)
    assert (
        torch.equal(out(restore(model), x), want)
        and [p.requires_grad for p in model.parameters()] == flags
    )
    regard.recover(
        again, texts(), steps=4, batch_size=8
    )  # the teacher is the first model, not the one that was trained
    assert torch.equal(out(restore(again), x), want)


@pytest.mark.parametrize("kind", ["gpt2", "bigbird", "torch", "masked", "classes", "t5"])
def test_recover_other_models(kind):
    """Fails if a head, a cache or torch's layers prevent training."""
    data = texts(100)
    if kind == "gpt2":
        model = randomize_weights(hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), torch.float32)
    elif kind == "bigbird":
        model = randomize_weights(
            hf.BigBirdModel(hf.BigBirdConfig(**SMALL, attention_type="original_full")),
            torch.float32,
        )
    elif kind == "t5":
        config = hf.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        model = randomize_weights(hf.T5ForConditionalGeneration(config), torch.float32)
    elif kind == "torch":
        model = randomize_weights(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2),
            torch.float32,
        )
        data = list(torch.randn(100, 7, 16))
    else:
        model = bert("BertForMaskedLM" if kind == "masked" else "BertForSequenceClassification")
    x = data[0][None]
    want = model(x) if kind == "torch" else out(model, x)
    swap(model, "linear") if kind != "t5" else swap(model, "local", window=1)
    found = regard.recover(model, data, steps=50, batch_size=8, lr=2e-3)
    assert sum(found.after.cosine.values()) > sum(found.before.cosine.values())
    restore(model)
    assert torch.equal(model(x) if kind == "torch" else out(model, x), want)


def test_interrupted_runs_resume_exactly(tmp_path):
    """Fails if an interrupted and resumed run ends with other weights."""
    data, model = texts(), bert()
    swap(model, "linear")
    twin, third = copy.deepcopy(model), copy.deepcopy(model)
    whole = regard.recover(model, data, steps=40, batch_size=8)

    def stop(stage, fraction, loss):
        if stage == "model" and fraction > 0.3:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="saved to"):
        regard.recover(twin, data, steps=40, batch_size=8, folder=tmp_path, callback=stop)
    rest = regard.recover(third, data, steps=40, batch_size=8, folder=tmp_path)
    assert rest.after.output == whole.after.output and rest.steps == 40
    for a, b in zip(model.parameters(), third.parameters(), strict=True):
        assert torch.equal(a, b)
    swap(restore(third), "local")
    with pytest.raises(ValueError, match="other layers"):
        regard.recover(third, data, steps=40, batch_size=8, folder=tmp_path)
    swap(third, "linear")
    with pytest.raises(ValueError, match="other texts"):
        regard.recover(third, [*data[1:], data[0]], steps=40, batch_size=8, folder=tmp_path)
    other = bert()
    swap(other, "linear")
    with pytest.raises(ValueError, match="other weights"):
        regard.recover(other, data, steps=40, batch_size=8, folder=tmp_path)


def test_relative_error_ignores_padding():
    """Fails if padding counts."""
    want, mask = torch.randn(2, 3, 4), torch.tensor([[True] * 3, [True, True, False]])
    got = want.clone()
    got[1, 2] = float(9)
    assert (
        relative_error(got, want, mask).abs().max() == 0 and relative_error(got, want, None)[1] > 0
    )
    assert relative_error(torch.zeros_like(want), want, mask).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": []}, "too few"),
        ({"data": "text"}, "in a list"),
        ({"data": ["text"] * 9}, "tokenizer"),
        ({"steps": None}, "either seconds or steps"),
        ({"seconds": 3.0}, "either seconds or steps"),
        ({"objective": "mask"}, "objective"),
        ({"lr": 0}, "lr"),
        ({"steps": 0}, "steps"),
        ({"steps": None, "seconds": -1.0}, "seconds"),
        ({"length": 99}, "extend_positions"),
        ({"objective": "masked"}, "mask token"),
        ({"data": [torch.full((3, 16), float("nan"))] * 9}, "NaN"),
    ],
)
def test_wrong_calls_raise(arguments, message):
    """Fails if a wrong call trains."""
    model = bert()
    swap(model, "local")
    with pytest.raises((ValueError, TypeError), match=message):
        regard.recover(model, **{"data": texts(), "steps": 3, **arguments})
    swap(model, "performer")  # nothing was trained, so that it may be swapped anew
    with pytest.raises(ValueError, match="No layer of this model was swapped"):
        regard.recover(restore(model), texts(), steps=3)


# ------------------------------------------------------------------------------------ longer inputs
class Words:
    """What `recover` asks of a tokenizer where it is given tokens."""

    mask_token_id, all_special_ids = 30, [0, 30]


@pytest.mark.parametrize(
    "kind", ["BertForMaskedLM", "RobertaForMaskedLM", "GPT2Model", "DistilBertModel"]
)
def test_extend_positions(kind):
    """Fails if short texts change, copies are shifted, or longer texts are not accepted."""
    config = {
        "BertForMaskedLM": lambda: hf.BertConfig(**SMALL),
        "RobertaForMaskedLM": lambda: hf.RobertaConfig(
            **{**SMALL, "pad_token_id": 1, "max_position_embeddings": 26}
        ),
        "GPT2Model": lambda: hf.GPT2Config(**GPT2),
        "DistilBertModel": lambda: hf.DistilBertConfig(
            vocab_size=31, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=24
        ),
    }[kind]()
    model, x = (
        randomize_weights(getattr(hf, kind)(config), torch.float32),
        torch.randint(2, 30, (2, 24)),
    )
    want = out(model, x)
    assert max_length(model) == 24
    extend_positions(model, 60)
    assert max_length(model) == 60 and torch.equal(out(model, x), want)
    assert out(model, torch.cat((x, x, x), 1)[:, :60]).shape[1] == 60
    with pytest.raises(ValueError, match="already has"):
        extend_positions(model, 24)
    swap(model, "local", window=3)
    with pytest.raises(ValueError, match="Extend positions before swapping"):
        extend_positions(model, 90)
    with pytest.raises(Unsupported, match="no learned position embeddings"):
        extend_positions(nn.Linear(3, 3), 9)


def test_masked_lm_after_extending_positions():
    """Fails if a longer, swapped model does not learn masked language modelling."""
    model = extend_positions(bert("BertForMaskedLM"), 40)
    swap(model, "local", window=4)
    data = [
        torch.full((36,), int(i)) for i in torch.randint(1, 29, (120,))
    ]  # masked tokens are easy to guess
    found = regard.recover(
        model, data, objective="masked", tokenizer=Words(), steps=90, batch_size=16, lr=5e-3
    )
    assert found.before is None and found.curve[-1]["score"] > found.curve[0]["score"] + 0.2


# -------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize(
    "save", [save_swapped, lambda model, folder: model.save_pretrained(folder)]
)
def test_save_and_load_swapped(tmp_path, save):
    """Fails if a loaded model differs, or can be restored without its old weights."""
    model, x = bert(), torch.randint(1, 31, (2, 9))
    swap(model, layers={0: "linformer", 1: regard.models.module_spec("local", window=2)})
    save(model, tmp_path)
    again = load_swapped(tmp_path)
    assert torch.equal(out(again, x), out(model, x))
    with pytest.raises(ValueError, match="without the weights of its old attention"):
        restore(again)
    save(again, tmp_path / "again")
    assert torch.equal(out(load_swapped(tmp_path / "again"), x), out(model, x))
    (tmp_path / "swap.json").write_text("{}")
    with pytest.raises(ValueError, match="does not list the mixers"):
        load_swapped(tmp_path)
    with pytest.raises(ValueError, match="that were swapped"):
        save_swapped(restore(model), tmp_path)
    whole = bert("BertForMaskedLM")
    swap(whole, "local", window=2)
    whole.bert.save_pretrained(tmp_path / "part")
    assert (tmp_path / "part" / "swap.json").exists()
    model.save_pretrained(tmp_path / "plain")  # as ever
    assert not (tmp_path / "plain" / "swap.json").exists()


@pytest.mark.parametrize(
    "kind", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration", "ViTModel"]
)
def test_tied_and_renamed_weights_survive_saving(kind, tmp_path):
    """Fails if tied weights, or those that transformers renames in files, are lost."""
    images = {
        k: v
        for k, v in SMALL.items()
        if k not in ("vocab_size", "max_position_embeddings", "pad_token_id")
    }
    config = {
        "BertForMaskedLM": lambda: hf.BertConfig(**SMALL),
        "GPT2LMHeadModel": lambda: hf.GPT2Config(**GPT2),
        "T5ForConditionalGeneration": lambda: hf.T5Config(
            vocab_size=31, d_model=16, d_kv=8, num_layers=2, num_heads=2
        ),
        "ViTModel": lambda: hf.ViTConfig(**images, image_size=8, patch_size=2),
    }[kind]()
    model = randomize_weights(getattr(hf, kind)(config), torch.float32)
    swap(model, "local", window=2)
    save_swapped(model, tmp_path)
    again = load_swapped(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_wrong_model_files_raise(tmp_path, monkeypatch):
    """Fails if a pickle is read, or a wrong name or folder has no clear error."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"No model\.safetensors"):
        load_transformers_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pickle.*weights_only=True"):
        load_transformers_model(str(tmp_path))
    config = models.ModelConfig(
        kind="encoder", input=models.TokenInput(vocab_size=3), dim=4, heads=1, layers=1, length=4
    )
    models.save(models.build(config), tmp_path / "ours")
    with pytest.raises(ValueError, match="Swap a Regard model in Python"):
        load_transformers_model(str(tmp_path / "ours"))
    with pytest.raises(ValueError, match="is a file"):
        load_transformers_model(str(tmp_path / "config.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="not a folder, not a package"):
        load_transformers_model("no-such/model-at-all")


def test_missing_transformers_names_the_extra(monkeypatch):
    """Fails if the error does not name the extra."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[hf\]'"):
        load_transformers_model("anything")
