"""`regard.load`, and `regard predict` for texts, rows and paths."""

import csv
import io
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import regard
from regard.cli import app
from regard.cli.prediction_output import TextOutput
from regard.cli.raw_inputs import RawInput, read_inputs
from regard.models import ModuleSpec, build, transformer
from regard.models.config import RegressionHeadConfig, VectorInput
from regard.tasks import TASKS, Example, ModelNeeds, Processor, Task, create_task
from regard.tasks.metrics import MeanAbsoluteError
from regard.tasks.processors import TextProcessor
from regard.tasks.rendering import RenderedText
from regard.tasks.tokenizers import ByteTokenizer
from regard.train import TrainSettings
from regard.train.inference import TrainedRun
from regard.train.run import RunSpec, run_training


class NumberProcessor(Processor):
    """Rows with two columns of numbers."""

    columns = ("a", "b")

    def encode(self, raw):
        return {"x": torch.tensor([[float(raw["a"])], [float(raw["b"])]])}

    def decode(self, output, inputs):
        return [{"a": round(value, 6), "list": [1, 2]} for value in output[:, 0].tolist()]

    def to_dict(self):
        return {"columns": list(self.columns)}


class SizeProcessor(NumberProcessor):
    """Files: their first byte and their number of bytes."""

    columns = ()
    suffixes = (".bin",)

    def encode(self, raw):
        content = raw.read_bytes()
        if not content:
            raise ValueError(f"{raw} is empty.")
        return {"x": torch.tensor([[float(content[0])], [float(len(content))]])}


class Sums(Task):
    """The sum of two numbers."""

    processor = NumberProcessor()
    metrics = (MeanAbsoluteError(torch.ones(1)),)

    @property
    def needs(self):
        return ModelNeeds(
            kind="encoder", input=VectorInput(width=1), head=RegressionHeadConfig(), length=2
        )

    def size(self, split):
        return 40

    def example(self, split, index):
        x = torch.tensor(np.random.default_rng([len(split), index]).random((2, 1))).float()
        return Example({"x": x}, {"labels": x.sum(0)})

    def render(self, example, prediction=None):
        return RenderedText(str(example))

    @classmethod
    def load_processor(cls, content):
        return cls.processor


class Sizes(Sums):
    """The same, of files."""

    processor = SizeProcessor()


def run(*arguments, code=0, **more):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"}, **more)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def refused(*arguments, code=1, **more):
    result = run(*arguments, code=code, **more)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


SETTINGS = TrainSettings(steps=2, batch_size=4, eval_examples=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run for each kind of input."""
    root = tmp_path_factory.mktemp("runs")
    TASKS.update(sums=Sums, sizes=Sizes)
    lines = [f"{'xy'[i % 2] * 5} {i},{'ab'[i % 2]}" for i in range(60)]
    (root / "rows.csv").write_text("\n".join(["body,topic", *lines]) + "\n")
    arguments = {"data": str(root / "rows.csv"), "text": "body", "label": "topic", "length": 16}
    tasks = {
        "classify": ModuleSpec(name="classify", arguments={**arguments, "tokenizer": "byte"}),
        "sums": ModuleSpec(name="sums"),
        "sizes": ModuleSpec(name="sizes"),
        "lm": ModuleSpec(name="lm", arguments={"length": 16, "tokenizer": "char"}),
        "parity": ModuleSpec(name="parity", arguments={"length": 8}),
    }
    for name, task in tasks.items():
        spec = RunSpec(task=task, dim=8, heads=2, layers=1, threads=1, settings=SETTINGS)
        run_training(spec, root / name)
    yield root
    del TASKS["sums"], TASKS["sizes"]


# ----------------------------------------------------------------------------------------- Python
def test_load_predict_and_embed(runs):
    """Fails if predictions depend on the batch, or an embedding is not the mean of the tokens
    before the head over the mask."""
    trained = regard.load(runs / "classify", device="cpu")
    texts = ["xxxxx 7", "yy", "a longer text than the others", ""]
    whole = trained.predict(texts)
    assert [each["label"] in "ab" for each in whole] == [True] * 4
    for one, each in zip(trained.predict(texts, batch_size=1), whole, strict=True):
        assert one["probability"] == pytest.approx(each["probability"], rel=1e-5)
    vectors = trained.embed(texts, batch_size=3)
    assert vectors.shape == (4, 8) and vectors.dtype == torch.float32 and not vectors.requires_grad
    for text, vector in zip(texts, vectors, strict=True):
        hidden, _ = trained.model.backbone(trained.processor.encode(text)["x"][None])
        torch.testing.assert_close(vector, hidden[0].mean(0).detach(), atol=1e-5, rtol=1e-4)
    logits = trained.model.head(vectors[:, None]).softmax(-1).detach()
    assert float(logits[0].max()) == pytest.approx(
        whole[0]["probability"], rel=1e-4
    )  # mean pooling
    assert trained.embed([]).shape == (0, 8) and trained.predict([]) == []


def test_rows_and_paths_in_python(runs, tmp_path):
    """Fails if a task of another kind than texts cannot be used."""
    sums = regard.load(runs / "sums")
    assert len(sums.predict([{"a": 1, "b": 2}, {"a": 3, "b": 4}], batch_size=1)) == 2
    assert sums.embed([{"a": 1, "b": 2}]).shape == (1, 8)
    path = tmp_path / "x.bin"
    path.write_bytes(b"abc")
    assert regard.load(runs / "sizes").predict([path])[0]["list"] == [1, 2]


def test_embed_takes_the_encoder_of_a_seq2seq(runs):
    """Fails if the decoder is asked, or padding is part of the mean."""

    class Pairs(TextProcessor):
        def encode(self, raw):
            return {"source": super().encode(raw)["x"]}

    model = build(transformer(dim=8, heads=2, layers=1, vocab_size=257, length=16)).eval()
    processor = Pairs(ByteTokenizer(), 16)
    trained = regard.load(runs / "classify")
    trained = TrainedRun(
        trained.folder, trained.spec, model, processor, torch.device("cpu"), torch.float32
    )
    vectors = trained.embed(["abcdef", "ab"])
    for text, vector in zip(["abcdef", "ab"], vectors, strict=True):
        tokens = processor.encode(text)["source"][None]
        want = model.encode(tokens)[0][0].mean(0).detach()
        torch.testing.assert_close(vector, want, atol=1e-5, rtol=1e-4)


def test_what_cannot_be_predicted_is_named(runs):
    """Fails if a wrong input is a traceback from the inside."""
    trained = regard.load(runs / "classify")
    with pytest.raises(TypeError, match=r"not one str: write \[...\] around it"):
        trained.predict("a text")
    with pytest.raises(ValueError, match="Input 2: Expected a text, not int"):
        trained.embed(["a", 3])
    for method in ("predict", "embed"):
        with pytest.raises(ValueError, match="its examples are generated"):
            getattr(regard.load(runs / "parity"), method)(["a"])
    with pytest.raises(ValueError, match="batch_size"):
        trained.predict(["a"], batch_size=0)
    with pytest.raises(AttributeError):
        trained.model = None


# ---------------------------------------------------------------------------------------- command
def read_csv(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_texts_from_everywhere(runs, tmp_path):
    """Fails if a source of texts is not read, or their order changes."""
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    (tmp_path / "rows.jsonl").write_text('{"body": "three"}\n{"body": null}\n')
    words = ("--text", "zero", tmp_path / "lines.txt", tmp_path / "rows.jsonl", "-")
    shown = run("predict", runs / "classify", *words, "--csv", input="four\n{five\n")
    rows = read_csv(shown.stdout)
    assert [row["text"] for row in rows] == ["zero", "one", "two", "three", "", "four", "{five"]
    assert list(rows[0]) == ["text", "label", "probability", "error"]
    assert {row["label"] for row in rows} <= {"a", "b"} and not any(row["error"] for row in rows)
    assert shown.stderr == (
        "note: only some inputs have 'body', which CSV leaves out because the first input has not: "
        "use --json.\n"
        "note: 1 of 7 texts are empty; the model saw a single token that stands for no text.\n"
    )
    shown = run("predict", runs / "classify", "-", "--column", "body", input='{"body": "a"}\n')
    assert shown.stdout.split()[0] in "ab" and shown.stdout.rstrip().endswith("  a")
    shown = run("predict", runs / "classify", "-", "--column", "x", "--json", input="x,y\nq,r\n")
    (found,) = json.loads(shown.stdout)
    assert found["x"] == "q" and found["predicted_probabilities"].keys() == {"a", "b"}


def test_rows_from_everywhere(runs, tmp_path):
    """Fails if rows need other columns than the task, or an input hides a prediction."""
    path = tmp_path / "rows.csv"
    path.write_text("b,more,a\n2,x,1\n4,y,3\n")
    words = ("predict", runs / "sums")
    (first, second) = json.loads(run(*words, path, "--json").stdout)
    assert first | {"predicted_a": 0} == {
        **{"b": "2", "more": "x", "a": "1"},
        **{"predicted_a": 0, "predicted_list": [1, 2]},
    }
    shown = read_csv(run(*words, "--data", path, "--csv").stdout)
    assert list(shown[0]) == ["b", "more", "a", "predicted_a", "predicted_list", "error"]
    assert [(row["a"], row["b"]) for row in shown] == [("1", "2"), ("3", "4")]
    assert float(shown[1]["predicted_a"]) == second["predicted_a"]
    assert shown[0]["predicted_list"] == "[1, 2]" and shown[0]["more"] == "x"
    for text in ('{"a": 1, "b": 2}\n\n', "a,b\n1,2\n", "\ufeffa;b;c,d\r\n1;2;x\r\n"):
        (found,) = json.loads(run(*words, "-", "--json", input=text).stdout)
        assert found["predicted_a"] == first["predicted_a"]
    assert "a=1, b=2" in run(*words, path).stdout
    assert "has no column 'b'" in refused(*words, "-", input="a\n1\n2\n")
    assert "this task reads rows with the columns a, b" in refused(*words, "--text", "x")
    assert "this task reads rows" in refused(*words, path, "--column", "a")
    assert "there are no inputs" in run(*words, "-", input="a,b\n").stderr


def test_columns_of_the_input_are_kept(runs, tmp_path):
    """Fails if a label in the data is replaced by the prediction, or another column is dropped."""
    path = tmp_path / "labelled.csv"
    path.write_text("id,body,label,error,predicted_label\n7,xxxxx 1,gold,no,old\n")
    words = ("predict", runs / "classify", path)
    text = run(*words, "--csv").stdout
    assert text.splitlines()[0] == (
        "id,body,label,error,predicted_label,predicted_label_2,predicted_probability,"
        "predicted_error"
    )
    (line,), (found,) = read_csv(text), json.loads(run(*words, "--json").stdout)
    given = {"id": "7", "body": "xxxxx 1", "label": "gold", "error": "no", "predicted_label": "old"}
    for each in (line, found):
        assert {name: each[name] for name in given} == given
        assert each["predicted_label_2"] in ("a", "b")
    assert line["predicted_error"] == "" and "predicted_error" not in found
    assert float(line["predicted_probability"]) == found["predicted_probability"]
    assert sorted(found["predicted_probabilities"]) == ["a", "b"]
    # objects may differ: JSON keeps their columns and values, CSV those of the first and says so
    nested = '{"body": "a", "when": [1, {"x": null}]}\n{"body": "b", "more": NaN}\n'
    words = ("predict", runs / "classify", "-", "--column", "body")
    one, two = json.loads(run(*words, "--json", input=nested).stdout)
    assert one["when"] == [1, {"x": None}] and two["more"] is None
    shown = run(*words, "--csv", input=nested)
    assert read_csv(shown.stdout)[0]["when"] == '[1, {"x": null}]'
    assert "only some inputs have 'more'" in shown.stderr


def test_one_bad_input_does_not_end_the_others(runs, tmp_path):
    """Fails if what could be predicted is lost, or a bad input is not named with its place."""
    rows = '{"a": 1, "b": 2}\n{broken\n{"a": 1}\n{"a": "x", "b": 2}\n[1]\n{"a": 3, "b": 4}\n'
    words = ("predict", runs / "sums", "-")
    shown = run(*words, "--json", input=rows, code=1)
    found = json.loads(shown.stdout)
    assert ["error" in each for each in found] == [False, True, True, True, True, False]
    assert found[3]["a"] == "x" and "predicted_a" not in found[3] and found[5]["a"] == 3
    lines = shown.stderr.splitlines()
    assert lines[:4] == [f"error: {each['error']}" for each in found[1:5]]
    for line, place in zip(lines, (2, 3, 4, 5), strict=False):
        assert line.startswith(f"error: line {place} of standard input")
    assert lines[4] == "error: 4 of 6 inputs could not be predicted"
    bad_first = "a,b,c\nx,2,0\n1\n1,2,0\n"
    shown = run(*words, "--csv", "--batch-size", 1, input=bad_first, code=1)
    table = read_csv(shown.stdout)
    assert [bool(row["error"]) for row in table] == [True, True, False]
    assert [row["c"] for row in table] == ["0", "", "0"] and table[2]["predicted_a"]
    assert table[0]["predicted_a"] == "" and "has 1 fields" in table[1]["error"]
    shown = run(*words, input=bad_first, code=1)
    assert shown.stdout.count("\n") == 1 and "a=1, b=2" in shown.stdout
    # of files: missing, damaged, and a source that ends early
    (tmp_path / "good.bin").write_bytes(b"x")
    (tmp_path / "empty.bin").touch()
    paths = "\n".join(str(tmp_path / name) for name in ("godo.bin", "empty.bin", "good.bin"))
    shown = run("predict", runs / "sizes", "-", "--json", input=paths, code=1)
    missing, damaged, good = json.loads(shown.stdout)
    assert "did you mean 'good.bin'" in missing["error"] and missing["path"].endswith("godo.bin")
    assert damaged["error"] == f"{tmp_path / 'empty.bin'} is empty." and good["a"]
    (tmp_path / "broken.csv").write_bytes(b"body\nab\n\xff\xfe\n")
    sources = (tmp_path / "none.txt", tmp_path / "broken.csv", "--text", "z")
    shown = run("predict", runs / "classify", *sources, "--json", code=1)
    text, first, second = json.loads(shown.stdout)[:3]
    assert text["text"] == "z" and "does not exist" in first["error"] and "not utf-8" in str(second)


def test_folders_of_files(runs, tmp_path):
    """Fails if a file is left out, another kind is read, or paths on standard input are not."""
    for name, content in (("b.bin", b"b"), ("sub/a.BIN", b"aa"), ("c.txt", b"c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    words = ("predict", runs / "sizes")
    found = json.loads(run(*words, "--data", tmp_path, "--json").stdout)
    assert [each["path"] for each in found] == [
        str(tmp_path / name) for name in ("b.bin", "sub/a.BIN")
    ]
    shown = run(*words, "-", "--csv", input=f"{tmp_path / 'b.bin'}\n")
    assert read_csv(shown.stdout)[0]["path"] == str(tmp_path / "b.bin")
    (tmp_path / "empty").mkdir()
    assert "no file in" in refused(*words, tmp_path / "empty")
    assert "did you mean 'b.bin'" in refused(*words, tmp_path / "bb.bin")


def test_what_predict_refuses(runs):
    """Fails if a language model or a generated task answers, or an option is ignored."""
    said = refused("predict", runs / "lm", "--text", "x")
    assert f"regard generate {runs / 'lm'}" in said
    assert "its examples are generated" in refused("predict", runs / "parity", "--text", "x")
    assert "Give inputs: --text, --data, files, or -" in refused("predict", runs / "classify")
    assert "give one of them" in refused(
        "predict", runs / "classify", "--text", "x", "--json", "--csv"
    )
    assert "did you mean 'body'" in refused(
        "predict", runs / "classify", runs / "rows.csv", "--column", "bdy"
    )


def test_read_inputs_reads_as_it_goes(tmp_path):
    """Fails if a large file is read before the first prediction."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\nbroken\n')
    inputs = read_inputs(TextProcessor(ByteTokenizer(), 4), sources=[str(path)])
    assert next(inputs).raw == "a"
    assert "line 2" in next(inputs).error


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "latin-1"])
def test_standard_input_is_read_as_a_file(tmp_path, monkeypatch, encoding):
    """Fails if the two differ: in lines, the byte-order mark, or the encoding of the task."""
    text = "é one\r\n\r\ntwo\rthree\nfour"
    content = text.encode("utf-8-sig" if encoding == "utf-8" else encoding)
    (tmp_path / "x.txt").write_bytes(content)
    found = []
    for source in (str(tmp_path / "x.txt"), "-"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
        processor = TextProcessor(ByteTokenizer(), 4)
        inputs = read_inputs(processor, sources=[source], encoding=encoding)
        found.append([each.raw for each in inputs])
    assert found == [["é one", "", "two\rthree", "four"]] * 2


def test_standard_input_in_another_encoding_is_named(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ein h\xfcnd\n"), "utf-8"))
    (found,) = read_inputs(TextProcessor(ByteTokenizer(), 4), sources=["-"])
    assert found.error.startswith("standard input is not utf-8")


def test_json_lines_of_standard_input_may_have_any_characters(monkeypatch):
    content = json.dumps({"x": "a\u2028b"}, ensure_ascii=False).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
    (found,) = read_inputs(TextProcessor(ByteTokenizer(), 4), sources=["-"], column="x")
    assert found.raw == "a\u2028b"


def test_values_that_are_no_text_are_errors_of_their_rows(tmp_path):
    """Fails if a list is predicted as its Python notation, or NaN as a word."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": ["a"]}\n{"text": NaN}\n{"text": 5}\n{"text": {"a": 1}}\n')
    found = list(read_inputs(TextProcessor(ByteTokenizer(), 4), sources=[str(path)]))
    assert [each.raw for each in found] == [None, "", "5", None]
    assert found[0].error == f"line 1 of {path}: 'text' must be text or a number, not list."
    assert "line 4" in found[3].error


def test_texts_are_written_to_a_file_as_they_are(capsys):
    """Fails if control characters of a text are escaped where no terminal shows them."""
    TextOutput(TextProcessor(ByteTokenizer(), 4)).write(RawInput("", "a"), {"text": "b\x01 \nc"})
    assert capsys.readouterr().out == "b\x01 c\n"


def test_inputs_of_which_the_model_sees_a_part_are_counted(runs, tmp_path):
    """Fails if the end of a long input is left out without a word."""
    words = ("predict", runs / "classify", "--text", "short", "--text", "x" * 17)
    assert "note: 1 of 2 texts have more than 16 tokens" in run(*words).stderr
    assert "more than" not in run(*words[:4]).stderr

    (tmp_path / "a.csv").write_text("first,second,label\n" + "a,b,x\na,a,y\n" * 30)
    (tmp_path / "a.conll").write_text("Ada\tB-per\nsaw\tO\n\n" * 60)
    (tmp_path / "a.txt").write_text("the dog sees a cat " * 50)
    names = {"data": tmp_path / "a.conll", "length": 4, "overflow": "truncate"}
    tasks = {
        "pair": {"data": tmp_path / "a.csv", "length": 9, "tokenizer": "byte"},
        "ner": names,
        "mlm": {"data": tmp_path / "a.txt", "length": 4, "tokenizer": "byte"},
    }
    inputs = {
        "pair": ({"first": "aaa", "second": "bbb"}, {"first": "aaa", "second": "bbbb"}),
        "ner": ("Ada saw a cat", "Ada saw a cat."),
        "mlm": ("[MASK]the", "[MASK]them"),
    }
    for name, arguments in tasks.items():
        processor = create_task(name, **arguments).processor
        assert [processor.truncates(raw) for raw in inputs[name]] == [False, True]
    windows = create_task("ner", **{**names, "overflow": "stride"}).processor
    assert not windows.truncates("Ada saw a cat.")
