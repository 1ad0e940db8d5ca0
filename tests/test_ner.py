"""Named entities: formats, offsets in the original text, windows, F1 by type, baselines."""

import json
import random
from functools import partial

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import regard
from real import real
from regard.cli import app, prediction_output
from regard.cli.raw_inputs import RawInput
from regard.models import ModelConfig, build
from regard.models.losses import IGNORE_INDEX
from regard.tasks import create_task
from regard.tasks.base import SPLITS, Example, collate
from regard.tasks.entities import EntityF1, find_entities
from regard.tasks.rendering import RenderedText
from regard.tasks.word_encoders import split_text, split_windows, word_features
from regard.tasks.word_labels import WordTagger
from regard.testing import check_task
from regard.train import TrainSettings
from regard.train.run import RunSpec, run_training

NAMES = ["Ada Lovelace", "Alan Turing", "Grace Hopper", "Paris", "Rome"]


def rows(count=60):
    """Texts with the offsets of a person and a place."""
    found = []
    for number in range(count):
        person, place = NAMES[number % 3], NAMES[3 + number % 2]
        text = f"{person} saw  nr{number} in\t{place}."
        start = text.index(place)
        entities = [
            {"start": 0, "end": len(person), "label": "per"},
            {"start": start, "end": start + len(place), "label": "loc"},
        ]
        found.append({"text": text, "entities": entities})
    return found


def write(path, content):
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    return str(path)


def write_entities(path):
    return write(path, rows())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_entities(tmp_path_factory.mktemp("ner") / "x.jsonl")


def tags_of(task, split, index):
    """The tags that count in an example."""
    labels = task.example(split, index).targets["labels"]
    return [task.processor.labels[i] for i in labels.tolist() if i != IGNORE_INDEX]


# ------------------------------------------------------------------------------------------ formats
def as_prodigy(row):
    return {"text": row["text"], "spans": row["entities"], "tokens": [{"text": "x", "id": 0}]}


def as_doccano(row):
    return {"text": row["text"], "label": [list(each.values()) for each in row["entities"]]}


def as_doccano_relation(row):
    keys = {"start": "start_offset", "end": "end_offset", "label": "label"}
    found = [{keys[k]: v for k, v in each.items()} for each in row["entities"]]
    return {"text": row["text"], "entities": found}


def as_lists(row):
    words = split_text(row["text"]).words
    return {"tokens": words, "labels": ["B-per", "I-per", "O", "O", "O", "B-loc", "O"]}


@pytest.mark.parametrize("form", [as_prodigy, as_doccano, as_doccano_relation, as_lists])
def test_all_formats_give_the_same_examples(tmp_path, data, form):
    task, other = (
        create_task("ner", data=path)
        for path in (data, write(tmp_path / "y.jsonl", map(form, rows())))
    )
    assert task.processor.labels == ("O", "B-loc", "I-loc", "B-per", "I-per")
    for index in range(3):
        assert tags_of(task, "train", index) == tags_of(other, "train", index)
        assert tags_of(task, "train", index) == ["B-per", "I-per", "O", "O", "O", "B-loc", "O"]
    first, second = (each.example("train", 5) for each in (task, other))
    assert all(torch.equal(first.targets[name], second.targets[name]) for name in first.targets)


def test_prodigy_answers_that_are_not_accepted_are_left_out(tmp_path):
    content = [
        row | {"answer": "reject" if i % 6 == 0 else "accept"} for i, row in enumerate(rows())
    ]
    task = create_task("ner", data=write(tmp_path / "x.jsonl", content))
    assert sum(map(task.size, SPLITS)) == 50
    assert any("10 rows with another answer than accept" in note for note in task.notes())


def test_peculiar_spans_are_counted_or_refused(tmp_path):
    content = rows()
    content[0]["entities"] = [{"start": 1, "end": 3, "label": "per"}]  # inside of "Ada"
    content[1]["entities"].append({"start": 0, "end": 4, "label": "loc"})  # inside of another
    content[2]["entities"] = [{"start": 0, "end": 4, "label": "per"}]  # "Grace Hopper": "Grac"
    content[3]["entities"][0]["end"] = 900
    content[4]["entities"][0] = {"begin": 3, "label": "per"}
    content[5]["entities"][0]["end"] = 13  # with the space after it
    path = write(tmp_path / "x.jsonl", content)
    task = create_task("ner", data=path)
    notes = " ".join(task.notes())
    assert sum(map(task.size, SPLITS)) == 58
    assert "the entity from 0 to 900 is not in the text of" in notes
    assert "is no entity: expected start, end and label" in notes
    assert "2 texts have entities that begin or end inside a word" in notes
    assert "1 texts have entities that overlap" in notes
    with pytest.raises(ValueError, match=r"line 4 of \S+: the entity from 0 to 900 .* Correct it"):
        create_task("ner", data=path, missing="error")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Ada\tB-per\nb\n", r"line 2 of \S+ has one column, 'b'"),
        ("Ada\tB-per\nin\tX-loc\n", r"line 1 of \S+: word 2, 'in', has the label 'X-loc'"),
        ("Ada\tNOUN\n", "use the task tag"),
        ("a O\n\n" * 60, "No training sentence has an entity"),
        ("", "has no sentence"),
        ("\n\n", "has no sentence"),
        ("a B-x\n\n", "The valid split has no rows"),
    ],
)
def test_bad_files_name_the_line(tmp_path, content, words):
    (tmp_path / "a.conll").write_text(content)
    with pytest.raises(ValueError, match=words):
        create_task("ner", data=tmp_path / "a.conll")


@pytest.mark.parametrize(
    ("row", "arguments", "words"),
    [
        ({"text": "a"}, {}, "has no column of entities: expected one of entities, spans"),
        (
            {"txt": "a", "spans": []},
            {},
            "neither a column 'text' with a text nor a column 'tokens'.*did you mean 'txt'",
        ),
        ({"text": "a", "spans": []}, {"entities": "span"}, "'span': did you mean 'spans'"),
        ({"text": "a", "spans": {}}, {}, "'spans' must be a list of entities"),
        ({"text": "a", "spans": []}, {"overflow": "cut"}, "overflow"),
    ],
)
def test_bad_columns_are_named(tmp_path, row, arguments, words):
    path = write(tmp_path / "x.jsonl", [row] * 30)
    with pytest.raises(ValueError, match=words):
        create_task("ner", data=path, **arguments)


def test_all_schemes_are_read_as_iob2_and_odd_tags_are_counted(tmp_path):
    bioes = "Ada\tB-per\nLove\tI-per\nLace\tE-per\nsaw\tO\nRome\tS-loc\n\n"
    odd = "Ada\tB-per\nRome\tI-loc\nLace\tO\nsaw\tI-per\nRome\tB-loc\n\n"
    (tmp_path / "a.conll").write_text(odd + bioes * 59)
    task = create_task("ner", data=tmp_path / "a.conll")
    assert tags_of(task, "train", 1) == ["B-per", "I-per", "I-per", "O", "B-loc"]
    assert tags_of(task, "train", 0) == ["B-per", "B-loc", "O", "B-per", "B-loc"]
    (note,) = [each for each in task.notes() if "continue no entity" in each]
    assert note.startswith("1 sentences") and "word 2, 'Rome', has I-loc after B-per" in note


def test_first_rows_may_lack_the_column_of_entities(tmp_path):
    content = [{"text": "nothing here"}, *rows()]
    path = write(tmp_path / "x.jsonl", content)
    for given in ({}, {"entities": "entities"}):
        task = create_task("ner", data=path, **given)
        assert sum(map(task.size, SPLITS)) == 60 and len(task.processor.labels) == 5
        assert any("1 rows without 'text' or 'entities'" in note for note in task.notes())


def test_a_split_of_another_file_type_is_refused(tmp_path):
    """Fails if the test split is drawn from the training sentences although there is a file."""
    for name in ("train.conll", "dev.conll", "x.test.annotated"):
        (tmp_path / name).write_text("Ada\tB-per\nsaw\tO\n\n" * 50)
    with pytest.raises(ValueError, match=r"x\.test\.annotated would not be read.* test split"):
        create_task("ner", data=tmp_path)
    (tmp_path / "x.test.annotated").rename(tmp_path / "test.conll")
    assert create_task("ner", data=tmp_path).size("test") == 50


def test_words_that_are_cut_are_counted(tmp_path):
    (tmp_path / "a.conll").write_text(f"Ada\tB-per\n{'x' * 9}\tO\n\n" * 50)
    make = partial(create_task, "ner", data=tmp_path / "a.conll", tokenizer="byte")
    assert any("50 words have more than 9 tokens" in note for note in make(length=9).notes())
    assert not any("words have more" in note for note in make(length=10).notes())


# ------------------------------------------------------------------------------------------ metric
@pytest.mark.parametrize("scheme", ["IOB2", "IOBES"])
def test_f1_by_type_equals_that_of_seqeval_and_nervaluate(scheme):
    """On random tags as they are, and on strict ones that follow the scheme."""
    seqeval = pytest.importorskip("seqeval.metrics")
    schemes = pytest.importorskip("seqeval.scheme")
    nervaluate = pytest.importorskip("nervaluate")
    rng = random.Random(0)
    prefixes = "BI" if scheme == "IOB2" else "BIES"
    names = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in "xyz")]

    def repaired(tags):
        """The tags of the same entities, which follow the scheme."""
        clean = ["O"] * len(tags)
        for start, end, kind in find_entities(tags):
            clean[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
            if scheme == "IOBES":
                clean[end - 1] = f"{'S' if end - start == 1 else 'E'}-{kind}"
        return clean

    gold = [[rng.choice(["O", "O", *names]) for _ in range(9)] for _ in range(300)]
    found = [[rng.choice((tag, tag, rng.choice(names))) for tag in row] for row in gold]
    metric = EntityF1(names)
    for strict in (False, True):
        if strict:
            gold, found = [[repaired(row) for row in each] for each in (gold, found)]
        statistics = torch.stack([metric.count(*pair) for pair in zip(gold, found, strict=True)])
        options = {"mode": "strict", "scheme": getattr(schemes, scheme)} if strict else {}
        report = seqeval.classification_report(gold, found, output_dict=True, **options)
        table = metric.breakdown(statistics)
        for kind, row in [*((k, table[k]) for k in "xyz"), ("micro avg", table["all types"])]:
            expected = report[kind]
            wanted = {n.removesuffix("-score"): expected[n] for n in expected}
            assert row == pytest.approx({n: wanted[n] for n in row})
        assert metric.compute(statistics) == pytest.approx(table["all types"]["f1"])

    spans = [
        [
            [{"label": e.kind, "start": e.start, "end": e.end - 1} for e in find_entities(row)]
            for row in each
        ]
        for each in (gold, found)
    ]
    result = nervaluate.Evaluator(*spans, tags=["x", "y", "z"], loader="dict").evaluate()
    assert metric.compute(statistics) == pytest.approx(result["overall"]["strict"].f1)
    for kind in "xyz":
        assert table[kind]["f1"] == pytest.approx(result["entities"][kind]["strict"].f1)


# ------------------------------------------------------------------------------------------ windows
def test_windows_label_each_word_once_and_never_cut_an_entity():
    rng = random.Random(1)
    for _ in range(200):
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 60))]
        length, inside = rng.randint(6, 30), {rng.randrange(60) for _ in range(12)}
        windows = split_windows(sizes, length, lambda place, inside=inside: place not in inside)
        owned = [place for each in windows for place in range(each.first, each.last)]
        assert owned == list(range(len(sizes)))
        for window in windows:
            assert window.start <= window.first < window.last <= window.end
            assert sum(sizes[window.start : window.end]) <= length
    free = split_windows([1] * 40, 16)
    assert free[0] == (0, 16, 0, 14) and free[1].start == 12  # a quarter is read twice


@pytest.mark.parametrize("tokenizer", ["features", "byte"])
def test_long_sentences_have_windows_or_are_cut(tmp_path, tokenizer):
    sentence = "".join(
        f"w{i}\t{'B-a' if i % 5 == 0 else 'I-a' if i % 5 == 1 else 'O'}\n" for i in range(30)
    )
    (tmp_path / "a.conll").write_text((sentence + "\n") * 30)
    make = partial(create_task, "ner", data=tmp_path / "a.conll", tokenizer=tokenizer, length=16)
    task = make()
    count = task.size("train") // 24
    tags = [tag for index in range(count) for tag in tags_of(task, "train", index)]
    assert count > 2 and tags == [("B-a", "I-a", "O", "O", "O")[i % 5] for i in range(30)]
    assert len(find_entities(tags)) == sum(
        len(find_entities(tags_of(task, "train", index))) for index in range(count)
    )
    assert any("30 sentences have more than 16 tokens: they are read in" in n for n in task.notes())
    assert len(task.baselines()["gazetteer"](range(task.size("test")))) == task.size("test")
    cut = make(overflow="truncate")
    assert cut.size("train") == 24 and len(tags_of(cut, "train", 0)) < 20
    assert any("the words after them are left out" in note for note in cut.notes())


# -------------------------------------------------------------------------------------- predictions
class Oracle(torch.nn.Module):
    """Labels capitalised words: B-per after another word, else I-per; knows them by shape."""

    def __init__(self, task):
        super().__init__()
        encoder = task.processor.encoder
        self.labels = task.processor.labels
        self.capitals = [
            encoder.ids[each] for each in encoder.features if each.startswith("shape=X")
        ]

    def forward(self, x, mask=None):
        is_name = torch.isin(x[:, 1], torch.tensor(self.capitals))
        after = torch.nn.functional.pad(is_name, (1, 0))[:, :-1]
        output = torch.zeros(*is_name.shape, len(self.labels))
        for place, tag in (
            (~is_name, "O"),
            (is_name & ~after, "B-per"),
            (is_name & after, "I-per"),
        ):
            output[..., self.labels.index(tag)] += 9.0 * place
        return output


@pytest.mark.parametrize(
    "text",
    [
        "  Ada Lovelace\t saw\n\n Rome ,  didn't she?",
        "\N{GRINNING FACE}\N{GRINNING FACE} Ada Lovelace in\u00a0Rome \U0001d538 Rome",
        "\ud800 Ada\x00 Rome",
        "naïve cafe\u0301 Ada  \u3000Rome\r\n",
        "no name at all",
        "",
        " \t ",
        " ".join(f"saw Ada Lovelace nr{i}  in\tRome ." for i in range(40)),  # several windows
    ],
)
def test_offsets_point_into_the_original_text(data, text):
    task = create_task("ner", data=data, length=32)
    inputs = task.processor.encode(text)
    batch = {name: each[None] for name, each in inputs.items()}
    (prediction,) = task.processor.predict(Oracle(task), batch)
    assert prediction["text"] == text
    names = [text[span["start"] : span["end"]] for span in prediction["spans"]]
    assert names == [span["text"] for span in prediction["spans"]]
    assert [name.split() for name in names] == [each.split() for each in prediction_oracle(text)]
    assert all(span["score"] > 0.99 for span in prediction["spans"])
    assert prediction["words"] == split_text(text).words
    assert len(prediction["labels"]) == len(prediction["words"])


def prediction_oracle(text):
    """The runs of capitalised known words."""
    runs, before = [], False
    for word in split_text(text).words:
        is_name = word in ("Ada", "Lovelace", "Rome")
        runs += [word] if is_name and not before else []
        runs[-1:] = [f"{runs[-1]} {word}"] if is_name and before else runs[-1:]
        before = is_name
    return runs


def test_a_batch_of_texts_of_different_lengths_is_predicted_as_each_alone(data):
    task = create_task("ner", data=data, length=16)
    torch.manual_seed(0)
    model = build(
        ModelConfig(
            kind="encoder",
            input=task.needs.input,
            head=task.needs.head,
            dim=8,
            heads=2,
            layers=1,
            length=16,
        )
    ).eval()
    texts = [" ".join(row["text"] for row in rows(count)) for count in (1, 9, 3)]
    encoded = [task.processor.encode(text) for text in texts]
    together = task.processor.predict(
        model, collate([Example(each, {}) for each in encoded]).inputs
    )
    alone = [
        task.processor.predict(model, collate([Example(each, {})]).inputs)[0] for each in encoded
    ]
    for one, other in zip(together, alone, strict=True):
        assert one["text"] == other["text"] and one["labels"] == other["labels"]
    assert len(alone[1]["labels"]) == 9 * 7  # nothing is lost
    restored = WordTagger.from_dict(json.loads(json.dumps(task.processor.to_dict())))
    assert restored.predict(model, collate([Example(encoded[0], {})]).inputs) == alone[:1]


# -------------------------------------------------------------------------------- task and commands
def test_the_task_keeps_its_promises_with_word_pieces(data):
    assert check_task(create_task("ner", data=data, tokenizer="char"))


def test_features_are_those_of_two_training_words(data):
    assert word_features("iPhone")[:3] == ["word=iphone", "shape=xXxxx", "prefix1=i"]
    encoder = create_task("ner", data=data).processor.encoder
    assert "word=ada" in encoder.ids and "word=nr1" not in encoder.ids
    known = [encoder.features[i - 1] for i in encoder.encode("Adab")[0] if i]
    assert "shape=Xxxx" in known and "prefix3=ada" in known and "word=ada" not in known


def test_baselines(data):
    task = create_task("ner", data=data)
    test = range(task.size("test"))
    scores = {}
    for name, baseline in task.baselines().items():
        if name == "CRF":
            pytest.importorskip("sklearn_crfsuite")
        scores[name] = task.metric.compute(baseline(test))
    assert scores["constant"] == 0 and scores["gazetteer"] == 1 and scores["CRF"] == 1


def test_the_crf_reads_half_of_a_surrogate_pair(tmp_path):
    pytest.importorskip("sklearn_crfsuite")
    content = [{"tokens": ["Ada\ud800", f"nr{i}"], "labels": ["B-per", "O"]} for i in range(50)]
    task = create_task("ner", data=write(tmp_path / "x.jsonl", content))
    assert task.metric.compute(task.baselines()["CRF"](range(task.size("test")))) == 1


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "ner"
    spec = RunSpec(
        task={"name": "ner", "arguments": {"data": data, "length": 24}},
        dim=16,
        heads=2,
        layers=1,
        settings=TrainSettings(steps=60, lr=0.02, batch_size=16, eval_examples=6),
    )
    return folder, run_training(spec, folder)


def run(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_eval_and_result_have_a_table_by_type(trained):
    folder, result = trained
    table = result["breakdown"]["entity_f1"]
    assert list(table) == ["loc", "per", "all types"] and table["loc"]["support"] == 6
    assert json.loads((folder / "result.json").read_text())["breakdown"]["entity_f1"] == table
    shown = run("eval", folder).splitlines()
    assert shown[0].split() == ["entity_f1", "precision", "recall", "f1", "support"]
    assert shown[1].split()[0] == "loc" and shown[3].startswith("all types")
    assert json.loads(run("eval", folder, "--json"))["breakdown"]["entity_f1"] == table
    assert result["test"] == 1.0


def test_predict_prints_spans_and_their_offsets(trained, monkeypatch):
    folder, _ = trained
    text = "Ada Lovelace saw  nr7 in\tParis."
    assert run("predict", folder, "--text", text) == (
        "[Ada Lovelace](per) saw  nr7 in\t[Paris](loc).\n"
    )
    (found,) = json.loads(run("predict", folder, "--text", text, "--json"))
    spans = {span["label"]: text[span["start"] : span["end"]] for span in found["spans"]}
    assert spans == {"per": "Ada Lovelace", "loc": "Paris"}

    terminal = Console(force_terminal=True, color_system="standard", width=60)
    monkeypatch.setattr(prediction_output, "console", lambda: terminal)
    monkeypatch.setattr(prediction_output.sys.stdout, "isatty", lambda: True, raising=False)
    processor = regard.load(folder).processor
    output = prediction_output.LineOutput(processor)
    rendered = RenderedText("Ada in Rome", [(0, 3, "p"), (7, 11, "l")])
    monkeypatch.setattr(processor, "render", lambda prediction: rendered)
    with terminal.capture() as shown:
        output.write(RawInput("text 1", "Ada in Rome"), {})
    assert "\x1b[1;36mAda\x1b[0m" in shown.get() and "\x1b[1;35mRome\x1b[0m" in shown.get()


def test_real_tweets(tmp_path):
    folder = real("wnut17") / "wnut17"
    for split, name in (
        ("train", "wnut17train.conll.xz"),
        ("dev", "emerging.dev.conll.xz"),
        ("test", "emerging.test.annotated.xz"),
    ):
        (tmp_path / f"{split}.conll.xz").write_bytes((folder / name).read_bytes())
    task = create_task("ner", data=tmp_path)
    assert [task.size(split) for split in SPLITS] == [3394, 1009, 1287]
    assert len(task.processor.labels) == 13 and not task.notes()
    support = task.metric.breakdown(task.baselines()["constant"](range(1287)))["all types"]
    assert support["support"] == 1079  # as published
