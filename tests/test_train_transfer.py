"""Fine-tuning: `regard train --from RUN`."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from regard.cli import app
from regard.models import ModuleSpec, build, save
from regard.tasks import create_task
from regard.tasks.tokenizers import train_tokenizer
from regard.train import TrainSettings
from regard.train.run import RunSpec, model_config, read_spec, run_training
from regard.train.transfer import transfer_weights

EMBEDDING, POSITION = "backbone.embed.tokens.weight", "backbone.embed.position.table"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def model_of(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A language model of a few steps."""
    folder = tmp_path_factory.mktemp("source") / "lm"
    words = ("--task", "lm:tokenizer=char", "--length", 24, "--dim", 16, "--heads", 2)
    more = ("--layers", 2, "--batch-size", 4, "--set", "eval_examples=8", "--dropout", 0.1)
    run("train", *words, *more, "--steps", 3, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    lines = [f"the {'dog' if i % 2 else 'cat'} sees {i},{'xy'[i % 2]}" for i in range(60)]
    path.write_text("\n".join(["text,label", *lines]) + "\n")
    return path


def fine_tune(source, rows, out, *more, steps=1, code=0):
    words = ("train", "--task", "classify", "--data", rows, "--batch-size", 4, "--from", source)
    tiny = ("--lr", "1e-12", "--weight-decay", 0, "--steps", steps, "--out", out)
    return run(*words, *tiny, *more, code=code)


def test_a_classifier_starts_from_a_language_model(source, rows, tmp_path):
    """Fails if weights, sizes or the tokenizer are not those of the source, or the user is not told
    what was new."""
    shown = fine_tune(source, rows, tmp_path / "x", "--length", 32).stderr
    before, after = model_of(source), model_of(tmp_path / "x")
    spec, given = read_spec(tmp_path / "x"), read_spec(source)
    assert (spec.dim, spec.heads, spec.layers, spec.dropout) == (16, 2, 2, 0.1)
    assert spec.pretrained == str(source) and given.pretrained is None
    tokenizer = [
        json.loads((folder / "task.json").read_text())["processor"]["tokenizer"]
        for folder in (source, tmp_path / "x")
    ]
    assert tokenizer[0] == tokenizer[1]
    for name in before.keys() & after.keys() - {POSITION}:
        torch.testing.assert_close(after[name], before[name], atol=1e-9, rtol=0)
    assert before.keys() - after.keys() == set()
    torch.testing.assert_close(after[POSITION][:24], before[POSITION], atol=1e-9, rtol=0)
    assert after[POSITION].shape == (32, 16)
    (line,) = [line for line in shown.splitlines() if line.startswith("from: ")]
    assert f"24 positions of {POSITION}, and 8 new ones" in line
    assert "new: head.out.weight, head.out.bias" in line and "left out" not in line


def test_shorter_and_smaller_say_what_was_left_out(source, rows, tmp_path):
    """Fails if the common part is not taken, or what was dropped is not told."""
    words = ("--length", 16, "--layers", 1)
    shown = fine_tune(source, rows, tmp_path / "x", *words).stderr
    before, after = model_of(source), model_of(tmp_path / "x")
    torch.testing.assert_close(after[POSITION], before[POSITION][:16], atol=1e-9, rtol=0)
    assert f"the first 16 of 24 positions of {POSITION}" in shown
    assert "left out: backbone.stack.layers.1." in shown


def test_another_tokenizer_has_its_own_embeddings(source, rows, tmp_path):
    """Fails if the vectors of other tokens are taken."""
    words = ("--task", "classify:tokenizer=byte", "--length", 24)
    shown = fine_tune(source, rows, tmp_path / "x", *words).stderr
    assert f"new: {EMBEDDING}" in shown and model_of(tmp_path / "x")[EMBEDDING].shape[0] == 257


def test_the_same_task_goes_on_with_its_head(source, tmp_path, rows):
    """Fails if the head is thrown away where it fits, or kept where the classes are others."""
    fine_tune(source, rows, tmp_path / "a", "--length", 24)
    shown = fine_tune(tmp_path / "a", rows, tmp_path / "b", "--length", 24).stderr
    head = "head.out.weight"
    torch.testing.assert_close(
        model_of(tmp_path / "b")[head], model_of(tmp_path / "a")[head], atol=1e-9, rtol=0
    )
    assert "new:" not in shown
    other = tmp_path / "other.csv"
    other.write_text(rows.read_text().replace(",x", ",u").replace(",y", ",v"))
    shown = fine_tune(tmp_path / "a", other, tmp_path / "c", "--length", 24).stderr
    assert "new: head.out.weight" in shown and "left out: head.out" in shown


def test_other_sizes_are_an_error(source, rows, tmp_path):
    """Fails if weights of another width are left out in silence, or anything is written."""
    said = fine_tune(source, rows, tmp_path / "x", "--dim", 32, code=1).stderr
    assert "have other shapes than the new model" in said and "Use the same --dim" in said
    assert not (tmp_path / "x").exists()
    said = fine_tune(tmp_path / "none", rows, tmp_path / "x", code=1).stderr
    assert "is not a run" in said
    shutil.copytree(source, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "model")
    assert "is not finished" in fine_tune(tmp_path / "half", rows, tmp_path / "x", code=1).stderr
    said = run(
        *("train", "--task", "parity:length=8", "--from", source, "--mixer", "fnet"),
        *("--set", "eval_examples=4", "--out", tmp_path / "x"),
        code=1,
    ).stderr
    assert "fnet" in said and not (tmp_path / "x").exists()


def test_a_masked_language_model_starts_any_task_on_texts(rows, tmp_path):
    """Fails if the tokens of its tokenizer are not taken where each task adds others of its own, if
    those are taken for each other, or if it does not embed plain texts."""
    import regard

    words = ("--length", 24, "--dim", 16, "--heads", 2, "--layers", 1, "--batch-size", 4)
    more = ("--set", "eval_examples=8", "--steps", 2, "--out", tmp_path / "mlm")
    run("train", "--task", "mlm:tokenizer=byte", *words, *more)
    before = model_of(tmp_path / "mlm")
    assert before[EMBEDDING].shape[0] == 258  # the mask is the last
    vectors = regard.load(tmp_path / "mlm").embed(["the dog", "the [MASK]"])
    assert vectors.shape == (2, 16) and not torch.equal(*vectors)

    pairs, tags = tmp_path / "pairs.csv", tmp_path / "tags.conll"
    pairs.write_text("first,second,label\n" + "a dog,a cat,x\na dog,a dog,y\n" * 30)
    tags.write_text("the DET\ndog NOUN\n\n" * 60)
    for task, data, said in (
        ("classify", rows, f"the first 257 of 258 tokens of {EMBEDDING}"),
        ("pair", pairs, f"the first 257 of 258 tokens of {EMBEDDING}, and 2 new ones"),
        ("pair:encoder=dual", pairs, f"the first 257 of 258 tokens of {EMBEDDING}, and 2 new"),
        ("tag", tags, f"the first 257 of 258 tokens of {EMBEDDING}"),
    ):
        out = tmp_path / f"tuned-{task.replace(':', '-')}"
        words = ("--task", task, "--data", data, "--length", 32)
        shown = fine_tune(tmp_path / "mlm", rows, out, *words).stderr
        after = model_of(out)
        assert said in shown and "left out: head." in shown
        torch.testing.assert_close(
            after[EMBEDDING][:257], before[EMBEDDING][:257], atol=1e-9, rtol=0
        )
        torch.testing.assert_close(after[POSITION][:24], before[POSITION], atol=1e-9, rtol=0)
        layers = [name for name in before if ".stack." in name]
        assert all(torch.allclose(after[n], before[n], atol=1e-9) for n in layers) and layers
        assert read_spec(out).task.arguments.get("causal") is None
        if task.startswith("pair"):
            assert not torch.allclose(after[EMBEDDING][257], before[EMBEDDING][257])
    shown = fine_tune(
        tmp_path / "tuned-pair", rows, tmp_path / "again", "--task", "pair", "--data", pairs
    ).stderr
    assert "new:" not in shown  # [CLS], [SEP] and the head are the same


def test_a_decoder_stays_one_unless_told_otherwise(source, rows, tmp_path):
    """Fails if a causal language model is fine-tuned as another kind of model than it was."""
    fine_tune(source, rows, tmp_path / "a", "--length", 24)
    config = json.loads((tmp_path / "a" / "model" / "config.json").read_text())
    assert config["kind"] == "decoder" and config["head"]["pooling"] == "last"
    fine_tune(source, rows, tmp_path / "b", "--length", 24, "--task", "classify:causal=false")
    config = json.loads((tmp_path / "b" / "model" / "config.json").read_text())
    assert config["kind"] == "encoder" and config["head"]["pooling"] == "mean"
    run_a = read_spec(tmp_path / "a").task.arguments
    assert run_a["causal"] is True and run_a["tokenizer"] == f"run:{source}"


def test_a_resumed_run_does_not_start_from_its_source_again(source, tmp_path):
    """Fails if the source overwrites what a run has learned, or is needed to go on."""
    copy = tmp_path / "source"
    shutil.copytree(source, copy)
    given = read_spec(source)
    settings = {"batch_size": 4, "eval_examples": 8, "save_every": 2, "eval_every": 2}
    tuned = given.model_copy(
        update={"pretrained": str(copy), "settings": TrainSettings(steps=4, **settings)}
    )
    run_training(tuned, tmp_path / "whole")
    first = tuned.model_copy(update={"settings": TrainSettings(steps=2, **settings)})
    run_training(first, tmp_path / "parts")
    shutil.rmtree(copy)
    more = run_training(
        tuned.model_copy(update={"settings": TrainSettings(steps=4, **settings)}),
        tmp_path / "parts",
        extend=True,
    )
    assert more["steps"] == 4
    start = model_of(source)
    assert not torch.equal(model_of(tmp_path / "parts")[EMBEDDING], start[EMBEDDING])


def test_a_source_without_a_common_tensor_is_refused(tmp_path):
    """Fails if training from scratch is sold as fine-tuning."""
    specs = [
        RunSpec(task=ModuleSpec(name=name), dim=8, heads=2, layers=1) for name in ("parity", "copy")
    ]
    models = [build(model_config(spec, create_task(spec.task.name))) for spec in specs]
    save(models[0], tmp_path)
    for name, _ in list(models[1].named_children()):
        models[1].add_module(f"other_{name}", models[1]._modules.pop(name))
    with pytest.raises(ValueError, match="no weights in common"):
        transfer_weights(models[1], tmp_path, shared_tokens=None, same_targets=False)


def test_labels_of_words_need_tokens_that_show_where_words_start(rows, tmp_path):
    """Fails if predictions of the new run have no words, although its score is computed."""
    words = ("--length", 24, "--dim", 16, "--heads", 2, "--layers", 1, "--set", "eval_examples=8")
    given = ("--data", rows, "--steps", 1, "--out", tmp_path / "words")
    run("train", "--task", "classify:tokenizer=word", *words, *given)
    names = tmp_path / "names.conll"
    names.write_text("Ada\tB-per\nsaw\tO\n\n" * 60)
    for task in ("ner", "tag"):
        given = ("--data", names, "--from", tmp_path / "words", "--steps", 1)
        shown = run("train", "--task", task, *given, "--out", tmp_path / task, code=1).stderr
        assert "no token that shows where words start: use tokenizer=features" in shown
    given = ("--data", names, "--from", tmp_path / "words", "--steps", 1, "--out", tmp_path / "ner")
    run("train", "--task", "ner:tokenizer=features", *given)

    # features of words are for both tasks on words, and for no other
    given = ("--from", tmp_path / "ner", "--steps", 1)
    shown = run("train", "--task", "tag", "--data", names, *given, "--out", tmp_path / "tag").stderr
    assert "new: head.out.weight, head.out.bias; left out: head." in shown
    given = ("--data", rows, *given, "--out", tmp_path / "none")
    shown = run("train", "--task", "classify", *given, code=1).stderr
    assert "reads features of words, which no task on texts does: give tokenizer=..." in shown


def test_the_tokenizer_of_a_run(source, tmp_path):
    """Fails if a folder that has none ends in a KeyError."""
    tokenizer = train_tokenizer(f"run:{source}", lambda: iter(()))
    assert tokenizer.name == "char" and tokenizer.decode(tokenizer.encode("the dog")) == "the dog"
    with pytest.raises(ValueError, match="vocab_size applies to"):
        train_tokenizer(f"run:{source}", lambda: iter(()), 300)
    with pytest.raises(ValueError, match=r"is not a run: it has no task.json"):
        train_tokenizer(f"run:{tmp_path}", lambda: iter(()))
    (tmp_path / "task.json").write_text('{"processor": {}}')
    with pytest.raises(ValueError, match="has no tokenizer"):
        train_tokenizer(f"run:{tmp_path}", lambda: iter(()))
