"""Regression on rows: numbers, texts, what is missing, baselines, and predictions."""

import csv
import json
import math

import numpy as np
import pytest
import torch

from regard.tasks import create_task
from regard.tasks.base import SPLITS
from regard.tasks.regression import RowProcessor


def write_houses(path, count=300, **changed):
    """price = 3 rooms + 2 area + 10; `changed` maps a row number to values that replace its own."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        rooms, area = int(rng.integers(1, 7)), round(float(rng.random() * 100), 3)
        row = {"rooms": rooms, "area": area, "city": f"city {number % 3}"}
        row["price"] = 3 * rooms + 2 * area + 10
        rows.append({**row, **changed.get(f"row{number}", {})})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_inputs_are_standardised_columns_and_targets_come_back_in_their_units(tmp_path):
    task = create_task("regress", data=write_houses(tmp_path / "a.csv"), target="price")
    assert task.processor.numbers == ("rooms", "area") and sum(map(task.size, SPLITS)) == 300
    batch = task.batch("train", range(task.size("train")))
    assert batch.inputs["x"].shape[1:] == (2, 3)
    assert batch.inputs["x"][:, :, 0].mean(0).abs().max() < 1e-5
    assert torch.equal(batch.inputs["x"][0, :, 1:], torch.eye(2))
    assert abs(float(batch.targets["labels"].std(correction=0)) - 1) < 1e-5
    row = {"rooms": "3", "area": "50"}
    decoded = task.processor.decode(torch.zeros(1, 1), {})[0]["price"]
    prices = task.rows["train"].targets
    assert math.isclose(decoded, prices.mean(), rel_tol=1e-6)
    expected = (50 - task.rows["train"].numbers[:, 1].mean()) / task.rows["train"].numbers[
        :, 1
    ].std()
    assert math.isclose(float(task.processor.encode(row)["x"][1, 0]), expected, rel_tol=1e-4)


def test_metrics_are_in_the_units_of_the_data(tmp_path):
    task = create_task("regress", data=write_houses(tmp_path / "a.csv"), target="price")
    indices = list(range(task.size("test")))
    batch = task.batch("test", indices)
    output = batch.targets["labels"] + 1  # one standard deviation too high
    values = {m.name: m.compute(m.update(output, batch, [])) for m in task.metrics}
    std = float(task.rows["train"].targets.std())
    assert math.isclose(values["rmse"], std, rel_tol=1e-4)
    assert math.isclose(values["mae"], std, rel_tol=1e-4)
    true = task.rows["test"].targets
    assert math.isclose(values["r2"], 1 - std**2 / float(true.var()), rel_tol=1e-3)


def test_ridge_finds_a_linear_function_and_the_mean_does_not(tmp_path):
    pytest.importorskip("sklearn")
    task = create_task("regress", data=write_houses(tmp_path / "a.csv"), target="price")
    indices = task.sample("test", 20).tolist()
    scores = {n: task.metric.compute(b(indices)) for n, b in task.baselines().items()}
    assert list(scores) == ["mean", "ridge"] and scores["ridge"] < 0.5 < 20 < scores["mean"]


def test_texts_with_several_targets_and_numbers(tmp_path):
    pytest.importorskip("sklearn")
    data = write_houses(tmp_path / "a.csv")
    task = create_task(
        "regress", data=data, target="price,rooms", text="city", columns="area", tokenizer="byte"
    )
    example = task.example("train", 0)
    decoded = task.processor.texts.tokenizer.decode(example.inputs["x"].tolist())
    assert decoded.startswith("area: ") and decoded.endswith("\ncity 0")
    assert example.targets["labels"].shape == (2,)
    assert set(task.baselines()) == {"mean", "TF-IDF + ridge"}
    scores = {n: task.metric.compute(b(range(20))) for n, b in task.baselines().items()}
    assert scores["TF-IDF + ridge"] < scores["mean"]
    prediction = task.processor.decode(torch.zeros(1, 2), {})[0]
    assert set(prediction) == {"price", "rooms"}


def test_texts_are_read_as_for_classify(tmp_path):
    """Fails if the tokenizer or the length are fixed, a number is an unknown word, a saved model
    reads rows in another way, or texts are truncated without a word."""
    path = tmp_path / "a.jsonl"

    def write(text):
        rows = [{"text": text(i), "y": i, "area": 1000.5 + i, "price": i % 7} for i in range(80)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(lambda i: f"the house has {'few' if i % 2 else 'many'} rooms " * (1 + i % 3))
    task = create_task("regress", data=path, target="price", text="text")
    same = create_task("classify", data=path, text="text", label="price")
    assert task.processor.texts.tokenizer.name == same.processor.tokenizer.name == "word"
    assert task.length == same.length == 16 and task.notes()[0].startswith("8 of 8 rows")
    task = create_task("regress", data=path, target="price", text="text", columns="y,area")
    raw = {"text": "many rooms", "y": 12, "area": -34.25}
    assert task.processor.join(raw["text"], [12, -34.25]) == "y: 1 2\narea: - 3 4 . 2 5\nmany rooms"
    x = task.processor.encode(raw)["x"]
    assert task.processor.texts.tokenizer.decode(x[:4].tolist()) == "y: 1 2"
    loaded = RowProcessor.from_dict(json.loads(json.dumps(task.processor.to_dict())))
    assert torch.equal(loaded.encode(raw)["x"], x)
    write(lambda i: f"{i:064b}" * 3)
    task = create_task("regress", data=path, target="price", text="text", length=100)
    assert task.processor.texts.tokenizer.name == "byte"
    assert "80 of 80 texts have more than 100 tokens (byte) and are truncated." in task.notes()


def test_rows_without_numbers_are_counted_or_refused(tmp_path):
    bad = {
        "row3": {"area": "nan"},
        "row14": {"area": "inf"},
        "row25": {"price": "dear"},
        "row36": {"rooms": ""},
    }
    data = write_houses(tmp_path / "a.csv", **bad)
    task = create_task("regress", data=data, target="price", columns="rooms,area")
    assert sum(map(task.size, SPLITS)) == 296
    assert all(np.isfinite(rows.numbers).all() for rows in task.rows.values())
    (note,) = task.notes()
    assert note.startswith("4 rows") and "'area' is 'nan', not a finite number" in note
    assert "'price' is 'dear', not a number" in note
    for target in ("price",):
        with pytest.raises(ValueError, match=r"line 5 of \S+: 'area' is 'nan'.*missing='error'"):
            create_task("regress", data=data, target=target, columns="rooms,area", missing="error")


def test_a_file_without_rows_is_named_as_such(tmp_path):
    """Fails if the error is about columns, which the file may have."""
    (tmp_path / "a.csv").write_text("area,price\n")
    with pytest.raises(ValueError, match=r"a\.csv has no rows with values"):
        create_task("regress", data=tmp_path / "a.csv", target="price")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"target": "prize"}, "no column 'prize': did you mean 'price'"),
        ({"target": "city"}, "No row of the train split can be used.*'city 0', not a number"),
        ({"target": "price", "columns": "price"}, "'price' is the target"),
        ({"target": "price", "columns": "area,area"}, "different columns"),
        ({"target": "price", "length": 9}, "also give text"),
        ({"target": "rooms,area,price"}, "no numeric column beside the target"),
    ],
)
def test_bad_columns_are_named(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        create_task("regress", data=write_houses(tmp_path / "a.csv"), **arguments)


def test_a_constant_target_is_refused_and_a_constant_column_is_not(tmp_path):
    rows = {f"row{i}": {"price": 7, "rooms": 2} for i in range(300)}
    data = write_houses(tmp_path / "a.csv", **rows)
    with pytest.raises(ValueError, match="target 'price' is 7 in all training rows"):
        create_task("regress", data=data, target="price")
    task = create_task("regress", data=data, target="area")
    assert torch.isfinite(task.batch("train", range(9)).inputs["x"]).all()


def test_copies_of_training_rows_are_counted(tmp_path):
    rows = [{"a": i % 5, "y": i % 5} for i in range(100)]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(rows))
    task = create_task("regress", data=path, target="y")
    assert any("rows of the test split are also in the train split" in n for n in task.notes())
