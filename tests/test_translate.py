"""Translation: BLEU, vocabularies, test files, recurrent models, alignment, batches by length."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from real import real
from regard.cli import app
from regard.cli.alignment_figure import plot_alignments
from regard.compare.record import notes_of_task
from regard.errors import Unsupported
from regard.models import ModelConfig, build, load, save
from regard.models.losses import cross_entropy_loss
from regard.tasks import create_task
from regard.tasks.alignment import WordAlignment
from regard.tasks.base import SPLITS
from regard.train import TrainSettings
from regard.train.inference import load_run
from regard.train.run import RunSpec, model_config, run_training
from regard.train.sampler import batch_indices

WORDS = ["red", "green", "blue", "dog", "cat", "house", "tree", "sea"]


def write_pairs(folder, count=60, seed=0):
    """Each target is the source in capitals, with its words reversed."""
    rng = np.random.default_rng(seed)
    for name, lines in (("train", count), ("val", 8), ("test_2016", 8), ("test_2017", 8)):
        sources = [" ".join(rng.permutation(WORDS)[: rng.integers(2, 5)]) for _ in range(lines)]
        targets = [" ".join(text.upper().split()[::-1]) for text in sources]
        (folder / f"{name}.de").write_text("".join(f"{text}\n" for text in sources))
        (folder / f"{name}.en").write_text("".join(f"{text}\n" for text in targets))
    return folder


ARGUMENTS = {"source": "de", "target": "en", "tokenizer": "char", "length": 32, "beams": 2}


def make(folder, **arguments):
    return create_task("translate", data=folder, **ARGUMENTS | arguments)


@pytest.fixture
def folder(tmp_path):
    return write_pairs(tmp_path)


def tiny_model(task, **parts):
    torch.manual_seed(0)
    options = {"dim": 16} | ({} if "rnn" in parts else {"heads": 2, "layers": 1})
    return build(model_config(RunSpec(task={"name": "translate"}, **options | parts), task)).eval()


# ------------------------------------------------------------ data and metrics
def test_bleu_decides(folder):
    task = make(folder, test="test_2016")
    assert [task.size(split) for split in SPLITS] == [60, 8, 8]
    assert [metric.name for metric in task.metrics[:2]] == ["bleu", "chrf"]


def test_a_comparison_says_how_bleu_is_computed(folder):
    task = make(folder, test="test_2016")
    assert notes_of_task(task) == [*task.notes(), f"bleu: {task.metric.signature}."]
    assert notes_of_task(create_task("copy")) == []


def test_test_files_are_chosen_by_name_or_named(folder):
    both = make(folder)
    assert both.size("test") == 16
    assert any("2 files: test_2016, test_2017" in note for note in both.notes())
    with pytest.raises(ValueError, match="No test file 'test_2015': did you mean 'test_201"):
        make(folder, test="test_2015")
    (folder / "test_2016.en").rename(folder / "test_x.en")
    with pytest.raises(ValueError, match=r"has test_2016.de but no test_2016.en"):
        make(folder)


def test_empty_and_unknown_texts_are_counted(folder):
    with (folder / "train.de").open("a") as de, (folder / "train.en").open("a") as en:
        de.write("\nred\n")
        en.write("RED\n \n")
    with (folder / "val.de").open("a") as de, (folder / "val.en").open("a") as en:
        de.write("ж\n")
        en.write("RED\n")
    task = make(folder)
    assert task.size("train") == 60 and task.size("valid") == 9
    notes = " ".join(task.notes())
    assert "2 rows without 'de' or 'en' were left out" in notes
    assert "1 texts have characters that do not occur in the training split" in notes


@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_is_that_of_sacrebleu_and_of_whole_targets(folder, lowercase):
    sacrebleu = pytest.importorskip("sacrebleu")
    task = make(folder, test="test_2016", lowercase=lowercase, length=6)
    references = (folder / "test_2016.en").read_text().splitlines()
    texts = [references[0].lower(), *references[1:4], "BLUE", "", *references[5:7]]
    bleu, chrf = task.metrics[:2]
    predictions = [{"text": text} for text in texts]
    parts = [bleu.update(None, task.batch("test", [i]), predictions[i : i + 1]) for i in range(8)]
    shown = [each.lower() for each in references] if lowercase else references
    expected = sacrebleu.corpus_bleu(texts, [shown], lowercase=lowercase)
    assert bleu.compute(bleu.merge(parts)) == pytest.approx(expected.score, abs=1e-9)
    assert (
        f"case:{'lc' if lowercase else 'mixed'}" in bleu.signature and "tok:13a" in bleu.signature
    )
    statistics = chrf.update(None, task.batch("test", range(8)), predictions)
    assert chrf.compute(statistics) == pytest.approx(sacrebleu.corpus_chrf(texts, [shown]).score)


def test_separate_vocabularies_are_not_mixed(folder):
    pytest.importorskip("tokenizers")
    task = make(folder, vocabulary="separate", tokenizer="bpe", vocab_size=280)
    processor = task.load_processor(json.loads(json.dumps(task.processor.to_dict())))
    assert processor.tokenizer.to_dict() != processor.target_tokenizer.to_dict()
    model = tiny_model(task)
    assert model.encoder.embed is not model.decoder.embed
    batch = task.batch("test", range(3))
    assert processor.predict(model, batch.inputs) == task.predict(model, batch)
    rnn = tiny_model(task, rnn={"attention": True})
    assert rnn(**batch.inputs).shape[-1] == processor.vocab_size


def test_empty_lines_stay_empty(folder):
    processor, model = (task := make(folder)).processor, tiny_model(task)
    inputs = [processor.encode(text) for text in ("red dog", "", "  ")]
    rows = [each["source"] for each in inputs]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([[len(row)] for row in rows])
    texts = [each["text"] for each in processor.predict(model, {"source": padded, "mask": mask})]
    assert texts[1:] == ["", ""]
    alone = processor.predict(model, {"source": rows[0][None]})
    assert alone[0]["text"] == texts[0]


# ------------------------------------------------------------ recurrent models
def rnn_config(attention):
    return ModelConfig(
        kind="seq2seq",
        input={"kind": "tokens", "vocab_size": 11},
        head={"kind": "lm", "tie_weights": False},
        dim=6,
        heads=1,
        layers=1,
        rnn={"attention": attention},
    )


def gated_unit(p, x, h, c):
    """Cho et al. 2014 and Bahdanau et al. 2015, appendix A, for one example."""
    d = len(h)
    wx = p["x.weight"] @ x + p["x.bias"] + (0 if c is None else p["context.weight"] @ c)
    gates = p["gates.weight"] @ h
    z, r = torch.sigmoid(wx[:d] + gates[:d]), torch.sigmoid(wx[d : 2 * d] + gates[d:])
    return (1 - z) * h + z * torch.tanh(wx[2 * d :] + p["candidate.weight"] @ (r * h))


def naive_rnn(model, source, target, attention):
    """Logits (n, words) of one example, token by token."""

    def part(prefix):
        state = model.state_dict()
        return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}

    embedding, d = model.source.tokens.weight, 6
    notes = {}
    for name, order in (("forwards", source), ("backwards", source[::-1])):
        h, states = torch.zeros(d).double(), []
        for token in order:
            h = gated_unit(part(f"encoder.{name}."), embedding[token], h, None)
            states.append(h)
        notes[name] = states if name == "forwards" else states[::-1]
    annotations = torch.stack([torch.cat(pair) for pair in zip(*notes.values(), strict=True)])
    fixed = torch.cat((notes["forwards"][-1], notes["backwards"][0]))
    p, out = part("decoder."), part("output.")
    first = notes["backwards"][0] if attention else fixed
    s = torch.tanh(p["first.weight"] @ first + p["first.bias"])
    logits = []
    for token in target:
        c, y = fixed, embedding[token]
        if attention:
            scores = [
                p["align.v"]
                @ torch.tanh(
                    p["align.query.weight"] @ s + p["align.key.weight"] @ h + p["align.key.bias"]
                )
                for h in annotations
            ]
            c = torch.softmax(torch.stack(scores), 0) @ annotations
        t = out["s.weight"] @ s + out["s.bias"] + out["y.weight"] @ y + out["c.weight"] @ c
        logits.append(out["out.weight"] @ t.view(-1, 2).amax(1) + out["out.bias"])
        s = gated_unit(part("decoder.unit."), y, s, c)
    return torch.stack(logits)


@pytest.mark.parametrize("attention", [True, False])
def test_recurrent_models_are_those_of_the_papers(tmp_path, attention):
    torch.manual_seed(0)
    model = build(rnn_config(attention)).double().eval()
    source, target = torch.randint(1, 11, (2, 7)), torch.randint(1, 11, (2, 5))
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    logits = model(source, target, mask=mask)
    rows = [source[0].tolist(), source[1, :4].tolist()]
    for i, row in enumerate(rows):
        expected = naive_rnn(model, row, target[i].tolist(), attention)
        assert torch.allclose(logits[i], expected, rtol=1e-10, atol=1e-10)
    context, context_mask = model.encode(source, mask)
    state, parts = None, []
    for chunk in target.split((2, 1, 2), 1):
        part, state = model.stream(chunk, state, context=context, context_mask=context_mask)
        parts.append(part)
    assert torch.allclose(torch.cat(parts, 1), logits, rtol=1e-12)
    cross = model.attention_maps(source, target, mask=mask).cross[-1]
    assert (cross is None) == (not attention)
    if attention:
        assert torch.allclose(cross.sum(-1), torch.ones(2, 1, 5).double())
        assert not cross[1, ..., 4:].any()
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model")(source, target, mask=mask), logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mixer": "local"}, "rnn has no mixer"),
        ({"layers": 2}, "rnn has layers 1, not 2"),
        ({"kind": "decoder"}, "rnn is for kind 'seq2seq'"),
        ({"head": None}, "head 'lm'"),
    ],
)
def test_recurrent_models_refuse_parts_of_attention_layers(change, words):
    with pytest.raises(ValueError, match=words):
        rnn_config(True).replace(**change)


@pytest.mark.parametrize("option", ["layers", "mixer", "position"])
def test_options_of_attention_layers_are_refused_with_their_defaults_too(folder, tmp_path, option):
    config = tmp_path / "rnn.json"
    config.write_text('{"rnn": {"attention": true}, "dim": 8}')
    value = {"layers": "2", "mixer": "vanilla", "position": "learned"}[option]
    task = "translate:source=de:target=en:tokenizer=char"
    words = ["train", "--task", task, "--data", str(folder), "--config", str(config)]
    out = ["--steps", "1", "--out", str(tmp_path / "run")]
    found = CliRunner().invoke(app, [*words, f"--{option}", value, *out])
    assert found.exit_code == 1 and f"(rnn) has no {option}" in found.stderr


def test_the_encoder_may_have_a_mixer_of_its_own(folder):
    task = make(folder)
    model = tiny_model(task, encoder_mixer="fnet", encoder_layers=2)
    assert [len(each.stack.layers) for each in (model.encoder, model.decoder)] == [2, 1]
    with pytest.raises(Unsupported, match=r"causal.*--encoder-mixer"):
        tiny_model(task, mixer="linformer")
    with pytest.raises(ValueError, match=r"A recurrent model \(rnn\) has no heads"):
        tiny_model(task, rnn={}, heads=2)


def test_a_mixer_without_padding_mask_is_refused_before_training(folder, tmp_path):
    arguments = {**ARGUMENTS, "data": str(folder), "test": "test_2016"}
    spec = RunSpec(
        task={"name": "translate", "arguments": arguments},
        encoder_mixer="fnet",
        dim=8,
        heads=2,
        settings=TrainSettings(steps=1, device="cpu"),
    )
    with pytest.raises(Unsupported, match="differ in length and fnet does not support a padding"):
        run_training(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------ the picture
def test_weights_of_tokens_are_summed_over_source_words_and_averaged_over_target_words(folder):
    task = make(folder, tokenizer="byte")
    model, processor = tiny_model(task), task.processor
    source, target = "red dog, sea", "SEA DOG"
    alignment = processor.align(model, source, target, head=1)
    assert alignment.source == ["red", "dog", ",", "sea"] and alignment.target == ["SEA", "DOG"]
    read = [processor.start, *processor.target_tokenizer.encode(target).tolist()[:-1]]
    tokens = processor.tokenizer.encode(source)[None]
    maps = model.attention_maps(torch.tensor(tokens), torch.tensor([read])).cross[-1][0, 1]
    starts, rows = [0, 3, 7, 8, 12], [0, 3, 7]  # a space belongs to the word after it
    for i, j in np.ndindex(2, 4):
        part = maps[rows[i] : rows[i + 1], starts[j] : starts[j + 1]]
        assert alignment.weights[i][j] == pytest.approx(part.sum(1).mean().item(), rel=1e-5)
    drawn = alignment.render().to_text().splitlines()
    assert drawn[0].split() == ["1", "2", "3", "4"] and drawn[-2] == "1 red, 2 dog, 3 ,, 4 sea"
    prediction = {"text": target, "alignment": alignment._asdict()}
    assert "1 red" in task.render(task.example("test", 0), prediction).to_text()


def test_the_alignment_of_reversed_words_runs_from_right_to_left(tmp_path):
    pytest.importorskip("tokenizers")
    rng, folder = np.random.default_rng(0), tmp_path / "data"
    folder.mkdir()
    for name, count in (("train", 600), ("val", 8), ("test", 8)):
        rows = [rng.permutation(WORDS)[: rng.integers(3, 6)] for _ in range(count)]
        (folder / f"{name}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        reversed_rows = (" ".join(row[::-1]).upper() for row in rows)
        (folder / f"{name}.en").write_text("".join(f"{text}\n" for text in reversed_rows))
    arguments = {"data": str(folder), "source": "de", "target": "en", "vocab_size": 400}
    settings = {"steps": 200, "lr": 5e-3, "batch_size": 64, "eval_every": 200, "eval_examples": 8}
    spec = RunSpec(
        task={"name": "translate", "arguments": arguments | {"length": 8}},
        rnn={"attention": True},
        dim=48,
        settings=TrainSettings(**settings, device="cpu"),
    )
    with pytest.warns(UserWarning, match="also in the train split"):
        result = run_training(spec, tmp_path / "run")
    assert "tok:13a" in result["signatures"]["bleu"] and result["test"] > 90
    run = load_run(tmp_path / "run", device="cpu")
    alignment = run.processor.align(run.model, "dog red tree", "TREE RED DOG")
    assert alignment.source == ["dog", "red", "tree"]
    assert alignment.target == ["TREE", "RED", "DOG"]
    places = np.array(alignment.weights) @ np.arange(3)
    assert (np.diff(places) < -0.2).all() and places[0] > 1.5 and places[-1] < 1

    runner = CliRunner()
    words = ["eval", str(tmp_path / "run"), "--max-examples", "2"]
    signature = result["signatures"]["bleu"]
    assert f"bleu: {signature}\n" in runner.invoke(app, words).stdout
    shown = json.loads(runner.invoke(app, [*words, "--json"]).stdout)
    assert shown["signatures"]["bleu"] == signature

    texts = tmp_path / "in.txt"
    texts.write_text("dog red tree\n\nsea blue cat\n")
    page = tmp_path / "out.html"
    words = ["predict", str(tmp_path / "run"), str(texts), "--alignment", str(page)]
    found = runner.invoke(app, words)
    assert found.exit_code == 0, found.output
    lines = found.stdout.split("\n")
    assert len(lines) == 4 and lines[1] == "" and lines[0] == "TREE RED DOG"
    assert page.read_text().count("<table") == 2
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert runner.invoke(app, [*words[:-1], str(picture)]).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    wrong = runner.invoke(app, [*words[:-1], "out.gif"])
    assert wrong.exit_code == 1 and "Cannot draw to out.gif" in wrong.stderr
    wrong = runner.invoke(app, [*words[:-1], "none/out.png"])
    assert "there is no folder none" in wrong.stderr and not wrong.stdout


def test_models_without_an_alignment_are_refused_before_they_predict(folder, tmp_path):
    spec = RunSpec(
        task={"name": "translate", "arguments": {**ARGUMENTS, "data": str(folder)}},
        rnn={"attention": False},
        dim=8,
        settings=TrainSettings(steps=1, batch_size=4, eval_examples=2, device="cpu"),
    )
    run_training(spec, tmp_path / "run")
    words = ["predict", str(tmp_path / "run"), "--text", "red dog", "--alignment", "x.html"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 1 and "no cross-attention map" in found.stderr and not found.stdout


def test_words_of_a_figure_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib")
    alignment = WordAlignment(["$$", "$x_$"], ["$\\none$"], [[0.5, 0.5]])
    plot_alignments([alignment], tmp_path / "x.png")


# ------------------------------------------------------------ batches and loss
def test_batches_of_similar_lengths_have_every_example_once_per_epoch():
    rng = np.random.default_rng(0)
    lengths, size, batch = rng.integers(3, 40, (1003, 2)), 1003, 16
    steps = -(-2 * size // batch)
    drawn = [batch_indices(size, batch, step, seed=1, lengths=lengths) for step in range(steps)]
    flat = [index for each in drawn for index in each]
    assert sorted(flat[:size]) == sorted(flat[size : 2 * size]) == list(range(size))
    assert flat[:size] != flat[size : 2 * size]
    spread = [np.ptp(lengths[each, 1]) for each in drawn]
    assert np.median(spread) <= 2
    parts = [
        batch_indices(size, batch, 3, seed=1, lengths=lengths, rank=rank, world_size=2)
        for rank in range(2)
    ]
    assert parts[0] + parts[1] == drawn[3]
    few = [
        index
        for step in range(5)
        for index in batch_indices(5, batch, step, seed=1, lengths=lengths[:5])
    ]
    assert all(sorted(few[5 * i : 5 * i + 5]) == list(range(5)) for i in range(16))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_chunked_loss_is_that_of_pytorch(smoothing, dtype):
    torch.manual_seed(0)
    logits = torch.randn(130, 3000, dtype=torch.float64).mul(3).to(dtype).requires_grad_()
    targets = torch.randint(3000, (130,))
    targets[::7] = -100
    loss = cross_entropy_loss(logits, targets, label_smoothing=smoothing)
    (3 * loss).backward()
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact, targets, label_smoothing=smoothing)
    (3 * expected).backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert loss.item() == pytest.approx(
        expected.item(), rel=max(1e-5 * (dtype != torch.float64), 1e-12)
    )
    error = (logits.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < tolerance
    assert not logits.grad[::7].any()


def test_multi30k():
    folder = real("multi30k") / "multi30k"
    task = create_task(
        "translate",
        data=folder,
        source="de",
        target="en",
        test="test_2016",
        lowercase=True,
        length=64,
    )
    assert [task.size(split) for split in SPLITS] == [29000, 1014, 1000]
    batch = task.batch("test", [0])
    perfect = [{"text": bytes(batch.targets["reference"][0].tolist()).decode()}]
    assert task.metric.compute(task.metric.update(None, batch, perfect)) == pytest.approx(100)
