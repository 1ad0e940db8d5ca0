"""Few-shot prompts: likelihoods, calibration, intervals, tables, and the command."""

from __future__ import annotations

import csv
import json
import math
import random

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hf_models
from regard import Unsupported
from regard.cli import app
from regard.hf import few_shot, load_transformers_model, save_swapped, swap, table_prompts
from regard.hf.few_shot import (
    ClassificationPrompts,
    ending_likelihoods,
    evaluate_prompts,
    fitting_texts,
    label_likelihoods,
    majority_baseline,
    tfidf_baseline,
    wilson_interval,
)
from regard.hf.table_prompts import (
    GOOCRUX,
    TablePrompts,
    bootstrap_interval,
    dictionary_baseline,
    evaluate_tables,
    parse_table,
    score_table,
)
from regard.tasks.text_classification import LabelledText
from regard.topics import load_embedder

hf = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


def tiny_model(vocab_size, **changes):
    torch.manual_seed(0)
    config = {**hf_models.GROUPED, "vocab_size": vocab_size, "max_position_embeddings": 800}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**config, **changes}))
    return hf_models.randomize_weights(model, torch.float32)


def byte_tokenizer():
    """A token for each byte, so that labels have several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", bos_token="<s>"
    )


def reviews(count, seed=0):
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        word = "good" if i % 3 else "bad"
        rows.append(LabelledText(f"a {word} film {rng.randrange(1000)}", word))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama of bytes with its tokenizer."""
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    tiny_model(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def loaded(folder):
    return load_transformers_model(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "reviews.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["body", "stars"])
        writer.writerows((row.text, row.label) for row in reviews(200))
    return str(path)


# -------------------------------------------------------------------------------------- likelihoods
@torch.no_grad()
def naive_likelihood(model, start, ending):
    """Sum of log p of each token, by whole rows."""
    total = 0.0
    for i, token in enumerate(ending):
        row = torch.tensor([[*start, *ending[:i]]])
        total += model(input_ids=row, use_cache=False).logits[0, -1].log_softmax(-1)[token].item()
    return total


@pytest.mark.parametrize("mixer", [None, "local", "linear"])
def test_likelihoods_equal_a_loop(mixer, monkeypatch):
    """Fails if the shared prefix, padding on the right or batches change a likelihood."""
    monkeypatch.setattr(few_shot, "BATCH_TOKENS", 12)
    model = tiny_model(60)
    if mixer is not None:
        swap(model, mixer, **({"window": 4} if mixer == "local" else {}))
    shared = [3, 4, 5, 6, 7]
    pairs = [
        ([*shared, 9, 10], [11]),
        ([*shared, 9, 10], [12]),
        ([*shared, 9, 10], [12, 13, 14]),
        ([*shared, 8], [11, 12]),
        ([*shared, 8, 8, 8, 8], [4]),
    ]
    got = ending_likelihoods(model, pairs)
    want = [naive_likelihood(model, *pair) for pair in pairs]
    assert got.tolist() == pytest.approx(want, abs=1e-3)
    one = ending_likelihoods(model, [([5], [6])])  # no shared prefix
    assert one.item() == pytest.approx(naive_likelihood(model, [5], [6]), abs=1e-3)


def test_normalized_and_calibrated_answers(loaded):
    """Fails if normalization or calibration differ from their formulas."""
    model, tokenizer = loaded
    prompts = ClassificationPrompts(reviews(30), reviews(9, 1), label_words={"bad": "terrible"})
    texts = [row.text for row in prompts.test]

    def likelihoods(text):
        prompt = prompts.prompt(text, 2)
        start = tokenizer(prompt)["input_ids"]
        words = [prompts.label_words[label] for label in prompts.labels]
        return [naive_likelihood(model, start, tokenizer(" " + w)["input_ids"]) for w in words]

    want = np.array([likelihoods(text) for text in texts])
    plain = label_likelihoods(model, tokenizer, prompts, texts, 2).numpy()
    assert plain == pytest.approx(want, abs=1e-2)
    counts = [len(" terrible"), len(" good")]
    normalized = label_likelihoods(model, tokenizer, prompts, texts, 2, normalize=True)
    assert normalized.numpy() == pytest.approx(want / counts, abs=1e-3)

    free = np.exp([likelihoods(text) for text in ("N/A", "", "[MASK]")])
    free = (free / free.sum(1, keepdims=True)).mean(0)
    probabilities = np.exp(want) / np.exp(want).sum(1, keepdims=True) / free
    labels = [prompts.labels[i] for i in probabilities.argmax(1)]
    right = np.mean([answer == row.label for answer, row in zip(labels, prompts.test, strict=True)])
    (score,) = evaluate_prompts(model, tokenizer, prompts, [2], calibrate=True)
    assert score.accuracy == pytest.approx(right) and score.examples == 9


def test_wilson_intervals_equal_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for correct, count in ((0, 5), (5, 5), (37, 100), (1, 1)):
        want = stats.binomtest(correct, count).proportion_ci(0.95, "wilson")
        assert wilson_interval(correct, count) == pytest.approx((want.low, want.high))


# ------------------------------------------------------------------------------------------ prompts
def test_prompts_show_balanced_nested_examples():
    prompts = ClassificationPrompts(
        reviews(30), reviews(10, 1), template="Q: {text}\nA: {label}", instruction="Judge."
    )
    assert prompts.examples(2) == prompts.examples(6)[:2]
    assert [sum(row.label == "bad" for row in prompts.examples(k)) for k in (2, 4, 6)] == [1, 2, 3]
    first, second = prompts.examples(2)
    assert prompts.prompt(" x \n y", 2) == (
        f"Judge.\n\nQ: {first.text}\nA: {first.label}\n\nQ: {second.text}\nA: {second.label}"
        "\n\nQ: x y\nA:"
    )
    other = ClassificationPrompts(reviews(30), reviews(10, 1), seed=1)
    assert other.examples(6) != prompts.examples(6)
    sampled = ClassificationPrompts(reviews(30), reviews(300, 1), examples=30)
    assert 9 <= sum(row.label == "bad" for row in sampled.test) <= 11


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"template": "{text}"}, r"ends with \{label\}"),
        ({"template": "{label}: {text}"}, r"ends with \{label\}"),
        ({"label_words": {"god": "x"}}, "'god', which is no label"),
        ({"label_words": {"good": "bad"}}, "a word of its own"),
        ({"train": [LabelledText("a", "good")]}, "one label"),
        ({"test": [LabelledText("a", "new")]}, "No training text has the label 'new'"),
        ({"examples": 0}, "examples must be an integer >= 1"),
    ],
)
def test_invalid_prompts(change, words):
    with pytest.raises(ValueError, match=words):
        ClassificationPrompts(**{"train": reviews(9), "test": reviews(6, 1), **change})


def test_prompts_that_are_too_long(loaded):
    """Fails if a text is cut without a word."""
    model, tokenizer = loaded
    long = LabelledText("a film " * 140, "good")
    prompts = ClassificationPrompts(reviews(30), [*reviews(6, 1), long])
    with pytest.raises(ValueError, match=r"1 of 7 prompts with 0 examples have more than 800 tok"):
        evaluate_prompts(model, tokenizer, prompts, [0])
    (score,) = evaluate_prompts(model, tokenizer, prompts, [0], too_long="drop")
    assert score.examples == 6
    with pytest.raises(ValueError, match="No prompt with 0 examples fits into 5 tokens"):
        fitting_texts(model, tokenizer, prompts, 0, 5, "drop")
    with pytest.raises(ValueError, match="model has 800 positions"):
        fitting_texts(model, tokenizer, prompts, 0, 900)
    with pytest.raises(ValueError, match="31 examples, but there are 30"):
        prompts.examples(31)
    with pytest.raises(Unsupported, match="no causal language model"):
        evaluate_prompts(hf_models.build("bert"), tokenizer, prompts, [0])


def test_baselines():
    prompts = ClassificationPrompts(reviews(60), reviews(30, 1))
    assert majority_baseline(prompts, prompts.test).accuracy == pytest.approx(2 / 3)
    assert tfidf_baseline(prompts, prompts.test, 0) is None
    one = tfidf_baseline(prompts, prompts.test, 1)
    share = np.mean([row.label == prompts.examples(1)[0].label for row in prompts.test])
    assert one.accuracy == pytest.approx(share)
    pytest.importorskip("sklearn")
    assert tfidf_baseline(prompts, prompts.test, None).accuracy == 1


# ------------------------------------------------------------------------------------------- tables
def test_tables_are_read_and_judged():
    text = "| --- | :-: |---|\n|Loheckles| grayish blue|Tart |\nPounits | Red | Savory\n\nEnd | x"
    rows = parse_table(text)
    assert rows == [("Loheckles", "grayish blue", "Tart"), ("Pounits", "Red", "Savory")]
    assert score_table(rows, GOOCRUX.rows) == pytest.approx(5 / 15)
    assert score_table(parse_table(GOOCRUX.table()), GOOCRUX.rows) == 1
    invented = [*GOOCRUX.rows, *[("X", "Y", "Z")] * 5]
    assert score_table(invented, GOOCRUX.rows) == 0.5
    assert score_table([], GOOCRUX.rows) == 0 and score_table([("Pounits",)], GOOCRUX.rows) > 0
    assert parse_table("No table.") == []
    for passage in TablePrompts(20).test:
        for row in passage.rows:
            assert all(cell.casefold() in passage.text.casefold() for cell in row)


def test_bootstrap_is_near_the_normal_interval():
    scores = np.random.default_rng(1).random(400)
    low, high = bootstrap_interval(scores)
    half = 1.96 * scores.std() / math.sqrt(400)
    assert low == pytest.approx(scores.mean() - half, abs=0.005)
    assert high == pytest.approx(scores.mean() + half, abs=0.005)
    assert bootstrap_interval([1.0] * 5) == (1, 1)


def test_a_dictionary_of_known_cells():
    prompts = TablePrompts(12)
    none, some, most = (dictionary_baseline(prompts, k).accuracy for k in (0, 1, None))
    assert none == 0 < some < most


def test_tables_that_a_model_writes(loaded, monkeypatch):
    """Fails if the answer is cut, or judged with the prompt."""
    model, tokenizer = loaded
    prompts = TablePrompts(3)
    passages = prompts.test = [each._replace(text="x", planet="y") for each in prompts.test]
    answers = [tokenizer(f"{each.table()}\n\n")["input_ids"] for each in passages]

    def scripted_step(model, **options):
        """Writes the table of each passage; the state is its number and the tokens written."""

        def step(tokens, state):
            state = torch.tensor([[row, 0] for row in range(3)]) if state is None else state
            chosen = torch.tensor([answers[row][written] for row, written in state.tolist()])
            logits = 9.0 * torch.nn.functional.one_hot(chosen, len(tokenizer))
            return logits[:, None], state + torch.tensor([0, 1])

        return step

    with monkeypatch.context() as patch:
        patch.setattr(table_prompts, "decoding_step", scripted_step)
        patch.setattr(table_prompts, "read_common_prefix", lambda model, rows: (0, None))
        (score,) = evaluate_tables(model, tokenizer, prompts, [0])
    assert score.accuracy == 1 and score.examples == 3
    (score,) = evaluate_tables(model, tokenizer, prompts, [0])
    assert score.accuracy == 0  # random weights
    with pytest.raises(ValueError, match="the context has 800"):
        evaluate_tables(model, tokenizer, prompts, [8])


# -------------------------------------------------------------------------------------- the command
def run(*words, code=0):
    result = CliRunner().invoke(app, ["few-shot", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def test_command(folder, table, tmp_path):
    """Fails if a row is missing, or a swap or recovered model is not what is measured."""
    model, tokenizer = load_transformers_model(folder)
    swap(model, "local", window=3)
    save_swapped(model, tmp_path / "recovered", tokenizer)
    words = (folder, "--data", table, "--text", "body", "--label", "stars", "--shots", "0,2",
             "--examples", "8", "--mixer", "local:window=3,linear",
             "--recovered", tmp_path / "recovered")  # fmt: skip
    found = json.loads(run(*words, "--json").stdout)
    swapped = found["scores"].pop(f"recovered: {tmp_path / 'recovered'}")
    assert list(found["scores"]) == ["original", "local:window=3", "linear"]
    assert swapped == found["scores"]["local:window=3"]
    assert found["test_examples"] == 8 and found["interval"] == "Wilson"
    assert [score["shots"] for score in found["scores"]["original"]] == [0, 2]
    assert set(found["baselines"]) == {"constant", "TF-IDF + linear"}
    shown = run(*words).stdout
    assert "local:window=3" in shown and "8 test examples" in shown and "Wilson" in shown


def test_texts_in_another_encoding_or_with_half_of_a_surrogate_pair(folder, tmp_path):
    """Fails if a file cannot be read, or the tokenizer refuses a text."""
    lines = [f"{'schön' if i % 2 else 'öde'} {i},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *lines]), encoding="latin-1")
    words = ("--shots", "2", "--examples", "4", "--json")
    given = (folder, "--data", tmp_path / "a.csv", *words)
    assert json.loads(run(*given, "--encoding", "latin-1").stdout)["test_examples"] == 4
    assert "is not utf-8" in run(*given, code=1).stderr
    rows = [{"text": f"\ud800 {line[:-2]}", "label": line[-1]} for line in lines]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert json.loads(run(folder, "--data", tmp_path / "a.jsonl", *words).stdout)["dropped"] == 0
    assert load_embedder(folder)(["\ud800 a", "b"]).isfinite().all()


def test_command_with_tables(folder):
    found = json.loads(
        run(folder, "--task", "table", "--shots", 0, "--examples", 2, "--json").stdout
    )
    assert found["interval"].startswith("bootstrap") and list(found["baselines"]) == ["dictionary"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--data reviews.csv, or --task table"),
        (("--task", "tables"), "table"),
        (("--task", "table", "--calibrate"), "--calibrate is for --task classification"),
        (("--task", "table", "--encoding", "latin-1"), "--encoding is for --task classification"),
        (("--data", "{table}"), "'text'"),
        (("--data", "{table}", "--shots", "0,x"), "--shots expects"),
        (("--data", "{table}", "--shots", "999"), "999 examples, but there are"),
        (("--data", "{table}", "--label-words", "good"), "--label-words expects"),
        (("--data", "{table}", "--mixer", "locl"), "local"),
        (("--data", "{table}", "--mixer", "local:windw=3"), "window"),
        (("--data", "{table}", "--recovered", "{folder}"), "has no swap.json"),
        (("--data", "{table}", "--mixer", "nystrom"), "nystrom does not support causal"),
    ],
)
def test_refusals(folder, table, words, said):
    """Fails if an option is ignored, or an error is a traceback."""
    given = [word.format(table=table, folder=folder) for word in words]
    if "--data" in given and said != "'text'":
        given += ["--text", "body", "--label", "stars"]
    result = run(folder, *given, code=1)
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_generate_continues_a_text(folder, tmp_path):
    """Fails if `regard generate` cannot read a model of transformers, swapped or not."""
    words = ["generate", folder, "--prompt", "a film", "--max-new-tokens", "5", "--json"]
    result = CliRunner().invoke(app, [*words, "--temperature", "0"])
    found = json.loads(result.stdout)
    model, tokenizer = load_transformers_model(folder)
    x = torch.tensor([tokenizer("a film")["input_ids"]])
    want = model.generate(x, max_new_tokens=5, do_sample=False)[0, x.shape[1] :].tolist()
    assert found["tokens"] == want
    long = CliRunner().invoke(app, [*words[:-3], "--max-new-tokens", "900"])
    assert long.exit_code == 1 and "the model has 800 positions" in long.stderr
