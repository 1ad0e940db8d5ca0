"""Long Range Arena: labels are what another reader of the tokens finds, and real data are read or
refused with a reason."""

import gzip
import json
import lzma
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.models import load
from regard.tasks import create_task
from regard.tasks.dataset_files import read_array
from regard.tasks.listops import WORDS
from regard.tasks.pathfinder import PRESETS, paint_scene
from regard.tasks.pathfinder_paths import PathGeometry, PathScene
from regard.tasks.pixels import tokens_to_image
from regard.tasks.shapes import NAMES
from regard.train.run import RunSpec, run_training
from token_examples import tokens_and_labels

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))
real = pytest.mark.skipif(not DATA.is_dir(), reason="no real data: REGARD_DATA names no folder")


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setenv("REGARD_DATA", str(DATA))


# ------------------------------------------------------------------------------------------ ListOps
def evaluated(text):
    """The value of a bracketed expression, its depth, and the greatest number of arguments, by
    rewriting innermost lists."""
    depth, most = 1, 0
    while "[" in text:
        most = max(most, *(len(each.split()) for each in re.findall(r"\[\w+ ([\d ]+)\]", text)))
        text, depth = re.sub(r"\[(\w+) ([\d ]+)\]", lambda m: reduced(m[1], m[2]), text), depth + 1
    return int(text), depth, most


def reduced(name, text):
    values = [int(word) for word in text.split()]
    functions = {
        "MAX": max,
        "MIN": min,
        "SM": lambda v: sum(v) % 10,
        "MED": lambda v: int(np.median(v)),
    }
    return str(functions[name](values))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"length": 2000}, {"length": 60, "min_length": 20, "depth": 3, "args": 5, "seed": 3}],
)
def test_listops_labels_are_the_values_of_the_text(arguments):
    """Fails if a label is not what the brackets say, or depth, arguments or lengths leave their
    bounds."""
    made, deepest, most = create_task("listops", **arguments), 0, 0
    for index in range(30):
        tokens, target = tokens_and_labels(made.example("train", index))
        assert made.min_length < len(tokens) < made.length
        text = " ".join(WORDS[token] for token in tokens.tolist())
        assert text.count("[") == text.count("]") > 0 and made.render(
            made.example("train", index)
        ).to_text().startswith(text[:40])
        value, depth, arguments_ = evaluated(text)
        assert value == int(target) and depth <= made.depth and 2 <= arguments_ <= made.args
        deepest, most = max(deepest, depth), max(most, arguments_)
    assert deepest == made.depth and most == made.args


def test_listops_has_the_shares_of_its_rules():
    """Fails if operators, digits or the ends of lists are not drawn as often as the rules say."""
    made = create_task("listops", length=2000)
    found = Counter(
        int(t) for index in range(100) for t in made.example("train", index).inputs["x"]
    )
    operators = [found[WORDS.index(word)] for word in ("[MAX", "[MIN", "[MED", "[SM")]
    digits = [found[WORDS.index(str(digit))] for digit in range(10)]
    assert found[WORDS.index("]")] == sum(operators) and len(found) == 15
    assert max(operators) / min(operators) < 1.1 and max(digits) / min(digits) < 1.1
    assert (
        4.7 < sum(digits) / sum(operators) < 5.3
    )  # a list has 6 arguments in the mean, and is one itself


def test_listops_labels_are_those_of_the_published_rules():
    """Fails if the ends 0 and 9 are not about twice as frequent as the rest, as MIN and MAX make
    them."""
    made = create_task("listops", length=100)
    counts = np.bincount(
        [int(made.example("train", index).targets["labels"]) for index in range(1000)], minlength=10
    )
    assert all(130 <= counts[i] <= 240 for i in (0, 9)) and all(
        45 <= counts[i] <= 130 for i in range(1, 9)
    )


# --------------------------------------------------------------------------------------- Pathfinder
def reached(scene, side, geometry, fine=8):
    """Whether the second dot can be reached from the first one over dashes that are grown by half a
    gap, pixel by pixel."""
    near, radius = np.zeros((side * fine, side * fine), bool), 0.52 * geometry.gap
    reach = int(fine * radius) + 1
    for y0, x0, y1, x1 in np.concatenate(scene.paths):
        for share in np.linspace(0, 1, 4 * fine):
            y, x = y0 + share * (y1 - y0), x0 + share * (x1 - x0)
            rows, columns = (
                np.arange(
                    max(0, int(c * fine) - reach), min(side * fine, int(c * fine) + reach + 1)
                )
                for c in (y, x)
            )
            within = ((rows + 0.5) / fine - y)[:, None] ** 2 + (
                (columns + 0.5) / fine - x
            ) ** 2 <= radius**2
            near[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] |= within
    start, end = (tuple(int(c * fine) for c in dot) for dot in scene.dots)
    open_, seen = [start], {start}
    while open_:
        y, x = open_.pop()
        for place in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            if min(place) >= 0 and max(place) < side * fine and near[place] and place not in seen:
                seen.add(place)
                open_.append(place)
    return end in seen


@pytest.mark.parametrize(("side", "contour"), [(32, 6), (32, 9), (32, 14), (16, 3), (64, 6)])
def test_pathfinder_labels_are_true(side, contour):
    """Fails if dots on one path are not connected, or dots on two paths are: then some paths
    touch."""
    made, labels = create_task("pathfinder", side=side, contour=contour), []
    for index in range(6):
        scene = made.draw_scene(np.random.default_rng(index))
        assert reached(scene, side, made.geometry) == bool(scene.label)
        labels.append(scene.label)
    assert len(set(labels)) == 2


@pytest.mark.parametrize("contour", [6, 14])
def test_pathfinder_geometry(contour):
    """Fails if dashes, gaps, turns, dots or distractors are not as the rules say."""
    made = create_task("pathfinder", contour=contour)
    dash, gap, apart, radius, *_ = made.geometry
    for index in range(8):
        scene = made.draw_scene(np.random.default_rng(index))
        assert [len(path) for path in scene.paths[:2]] == [contour] * 2
        assert {len(path) for path in scene.paths[2:]} <= {contour // 3} and len(
            scene.paths
        ) - 2 <= 5
        for path in scene.paths:
            steps = path[:, 2:] - path[:, :2]
            np.testing.assert_allclose(np.hypot(*steps.T), dash)
            turns = np.diff(np.unwrap(np.arctan2(*steps.T)))
            assert (np.abs(turns) <= np.pi / 2 + 1e-9).all()
            between = np.hypot(*(path[1:, :2] - path[:-1, 2:]).T)
            np.testing.assert_allclose(between, gap * np.cos(turns / 2), atol=1e-9)
        starts = [
            path[0, :2] - gap / 2 * (path[0, 2:] - path[0, :2]) / dash for path in scene.paths[:2]
        ]
        np.testing.assert_allclose(np.hypot(*(starts[0] - starts[1])), apart)
        one, two = scene.paths[0], scene.paths[0 if scene.label else 1]
        np.testing.assert_array_equal(scene.dots, [one[0, :2], two[-1, 2:]])
        assert np.hypot(*(scene.dots[0] - scene.dots[1])) > 2 * radius + 1


def test_pathfinder_classes_are_balanced_and_distractors_there():
    """Fails if a class is more frequent, or hardly any distractor finds its place."""
    made = create_task("pathfinder", contour=6)
    scenes = [made.draw_scene(np.random.default_rng(index)) for index in range(400)]
    assert 0.43 < np.mean([scene.label for scene in scenes]) < 0.57
    assert np.mean([len(scene.paths) - 2 for scene in scenes]) > 4.8
    assert all(
        len(made.draw_scene(np.random.default_rng(i)).paths) == 2
        for made in [create_task("pathfinder", distractors=0)]
        for i in (0, 1)
    )


def test_pathfinder_picture():
    """Fails if a dash, a dot or the dark is not where the scene has it."""
    made = create_task("pathfinder")
    for index in range(10):
        scene = made.draw_scene(np.random.default_rng(index))
        image = paint_scene(scene, 32, made.geometry)
        for y, x in scene.dots:
            assert image[int(y), int(x)] == 1
        middles = np.concatenate([(path[:, :2] + path[:, 2:]) / 2 for path in scene.paths])
        assert all(
            image[int(y - 0.5) : int(y + 1.5), int(x - 0.5) : int(x + 1.5)].max() > 0.25
            for y, x in middles
        )
        places = np.stack(
            np.meshgrid(np.arange(32) + 0.5, np.arange(32) + 0.5, indexing="ij"), -1
        ).reshape(-1, 1, 2)
        ink = np.concatenate(
            [
                path[:, :2] + s * (path[:, 2:] - path[:, :2])
                for path in scene.paths
                for s in np.linspace(0, 1, 21)
            ]
        )
        distance = np.sqrt(((places - ink) ** 2).sum(-1)).min(1)
        dots = np.sqrt(((places - scene.dots) ** 2).sum(-1)).min(1)
        dark = (distance > 0.8) & (dots > 2.05)
        assert (image.reshape(-1)[dark] == 0).all() and (image.reshape(-1)[dots < 1] == 1).all()
        lit = (distance < 0.6) & (dots > 2.05)
        np.testing.assert_allclose(image.reshape(-1)[lit], 0.75 - distance[lit], atol=0.05)


def test_pathfinder_settings_fit():
    """Fails if the smaller sizes have no room for what they have by default."""
    for side in PRESETS:
        if side <= 128:
            made = create_task("pathfinder", side=side, contour=4 if side == 16 else 9)
            assert made.example("train", 0).inputs["x"].shape == (side * side,)
    scene = PathScene([np.array([[4.0, 4.0, 4.0, 8.0]])], np.array([[4.0, 4.0], [4.0, 8.0]]), 1)
    assert paint_scene(scene, 16, PathGeometry(4, 2, 5, 1.0, 1.0, 1.0)).shape == (16, 16)


# ------------------------------------------------------------------------------------------- images
def test_shapes_are_all_there_and_differ():
    """Fails if a kind is missing, its share of the picture is not that of the shape, or there is no
    contrast."""
    made, seen = create_task("image", noise=0.0), Counter()
    for index in range(300):
        tokens, target = tokens_and_labels(made.example("train", index))
        seen[int(target)] += 1
        values = tokens.numpy()
        assert tokens.shape == (1024,) and values.max() - values.min() > 40
    assert set(seen) == set(range(10)) == set(range(len(NAMES))) and min(seen.values()) > 12


def test_shapes_have_their_areas():
    """Fails if a shape is drawn with another form: the areas within the unit disc are known."""
    from regard.tasks.shapes import SHAPES

    at = np.linspace(-1.3, 1.3, 1301)
    y, x = (each.reshape(-1) for each in np.meshgrid(at, at, indexing="ij"))
    area = {name: inside(y, x).mean() * 2.6**2 for name, inside in SHAPES.items()}
    expected = {
        "disc": np.pi * 0.81,
        "ring": np.pi * (0.97**2 - 0.53**2),
        "triangle": 3 * 3**0.5 / 4,
        "square": 2.0,
        "cross": 2 * 1.9 * 0.56 - 0.56**2,
        "bar": 1.9 * 0.56,
        "stripes": 2 * 0.48 * 1.7,
    }
    for name, value in expected.items():
        assert area[name] == pytest.approx(value, rel=0.02), name


def write_images(folder, side=16, count=40, **changed):
    random = np.random.default_rng(0)
    arrays = {}
    for split in ("train", "test"):
        arrays[f"{split}_x"] = random.integers(0, 256, (count, side, side)).astype(np.uint8)
        arrays[f"{split}_y"] = np.arange(count) % 3
    for name, array in (arrays | changed).items():
        np.save(folder / f"{name}.npy", array)
    return arrays


def test_images_from_a_folder(tmp_path):
    """Fails if pixels, labels or splits are not those of the files, or shrinking is not the
    mean."""
    arrays = write_images(tmp_path)
    made = create_task("image", data=str(tmp_path))
    assert (
        made.size("train"),
        made.size("valid"),
        made.size("test"),
        made.classes,
        made.length,
    ) == (36, 4, 40, 3, 256)
    seen = {
        (tokens_to_image(t.numpy()).tobytes(), int(y))
        for s in ("train", "valid")
        for t, y in map(lambda i, s=s: tokens_and_labels(made.example(s, i)), range(made.size(s)))
    }
    assert seen == {
        (x.astype(np.int64).tobytes(), int(y))
        for x, y in zip(arrays["train_x"], arrays["train_y"], strict=True)
    }
    held = {
        tokens_to_image(made.example("valid", i).inputs["x"].numpy()).tobytes() for i in range(4)
    }
    assert held == {x.astype(np.int64).tobytes() for x in arrays["train_x"][36:]}
    small = create_task("image", side=8, data=str(tmp_path))
    whole, half = (
        tokens_to_image(each.example("test", 5).inputs["x"].numpy()) for each in (made, small)
    )
    assert half[1, 2] == np.rint(whole[2:4, 4:6].mean()) and half.shape == (8, 8)
    with pytest.raises(IndexError, match="has 40 examples"):
        made.example("test", 40)


@real
@pytest.mark.usefixtures("data")
def test_real_images():
    """Fails if MNIST is not read as it is: so many, and with the published mean."""
    images = read_array(DATA / "mnist" / "t10k-images-idx3-ubyte.xz")
    assert images.shape == (10_000, 28, 28) and images.mean() / 255 == pytest.approx(
        0.1325, abs=1e-3
    )
    made = create_task("image", side=14, data="mnist")
    assert (made.size("train"), made.size("valid"), made.size("test"), made.classes) == (
        54_000,
        6_000,
        10_000,
        10,
    )


# -------------------------------------------------------------------------------------------- texts
def liked(text):
    """Another reader of reviews: what is cared for, and what is said of it."""
    good = [
        "lovely",
        "clever",
        "fresh",
        "moving",
        "bright",
        "honest",
        "rich",
        "splendid",
        "graceful",
        "sharp",
    ]
    (thing,) = {
        m[1]
        for m in re.finditer(
            r"(?:with its|film is the|but its|only the) ([a-z ]+?)(?:\.|, and nothing| matters)",
            text,
        )
    }
    (said,) = [
        s
        for s in re.findall(r"[^.]+\.", text)
        if thing in s and not re.search(r"stands or falls|look for|forgive|matters", s)
    ]
    turned = bool(re.search(r"was not|Nobody|wrong", said))
    return int(any(re.search(rf"\b{word}\b", said) for word in good)) ^ turned


def text_of(tokens):
    return bytes((tokens[tokens > 0] - 1).tolist()).decode()


def test_reviews_are_liked_where_the_text_says_so():
    """Fails if a label is not what a reader finds, or a class is more frequent."""
    made, labels = create_task("text"), []
    for index in range(300):
        tokens, target = tokens_and_labels(made.example("train", index))
        assert liked(text_of(tokens)) == int(target)
        labels.append(int(target))
    assert 0.42 < np.mean(labels) < 0.58


def test_words_alone_do_not_tell_whether_a_review_is_kind():
    """Fails if counting good and bad words is enough."""
    made, right = create_task("text"), 0
    good, bad = (
        "lovely clever fresh moving bright honest rich splendid graceful sharp",
        "dull clumsy stale hollow drab false thin dreadful stiff blunt",
    )
    for index in range(400):
        tokens, target = tokens_and_labels(made.example("valid", index))
        words = re.findall("[a-z]+", text_of(tokens))
        right += (
            sum(w in good.split() for w in words) > sum(w in bad.split() for w in words)
        ) == bool(target)
    assert right < 240


ROWS = [{"text": f"é number {i}", "label": ("no", "yes")[i % 2]} for i in range(40)]


@pytest.mark.parametrize(
    ("ending", "pack"), [("", lambda b: b), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_texts_from_files(tmp_path, ending, pack):
    """Fails if a text, a label or a split is lost, or one is in two splits."""
    path = tmp_path / f"reviews.jsonl{ending}"
    path.write_bytes(pack("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()))
    made = create_task("text", length=9, data=str(path))
    assert [made.size(s) for s in ("train", "valid", "test")] == [32, 4, 4] and made.names == (
        "no",
        "yes",
    )
    whole = create_task("text", length=64, data=str(path))
    found = [
        (text_of(t), whole.names[y])
        for s in ("train", "valid", "test")
        for t, y in (tokens_and_labels(whole.example(s, i)) for i in range(whole.size(s)))
    ]
    assert sorted(found) == sorted((row["text"], row["label"]) for row in ROWS)
    assert (made.example("train", 0).inputs["x"] - 1).tolist() == list(
        text_of(whole.example("train", 0).inputs["x"]).encode()[:9]
    )
    assert f"text of {path}" in whole.render(whole.example("train", 0)).to_text()


def test_splits_from_a_folder_are_shuffled(tmp_path):
    """Fails if files of splits are not taken as they are, or an evaluation would see but one class
    of a sorted file."""
    for split in ("train", "dev", "test"):
        lines = [json.dumps({"text": f"{split} {i}", "label": i // 50}) for i in range(100)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    made = create_task("text", data=str(tmp_path))
    assert [made.size(s) for s in ("train", "valid", "test")] == [100] * 3
    assert text_of(made.example("valid", 0).inputs["x"]).startswith("dev")
    assert 2 <= sum(int(made.example("test", i).targets["labels"]) for i in range(10)) <= 8


def test_text_splits_are_found_by_prefix(tmp_path):
    """Fails if a split must be a whole word of its file name, or is found inside a name."""
    for name in ("trainset", "Validation1", "testing-data"):
        lines = [json.dumps({"text": f"{name} {i}", "label": i % 2}) for i in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "more_train.jsonl").write_text("not read")
    task = create_task("text", data=str(tmp_path))
    for split, name in (("train", "trainset"), ("valid", "Validation1"), ("test", "testing-data")):
        texts = {text_of(task.example(split, i).inputs["x"]) for i in range(task.size(split))}
        assert texts == {f"{name} {i}" for i in range(20)}
    (tmp_path / "trainset.jsonl").rename(tmp_path / "old_train.jsonl")
    with pytest.raises(ValueError, match=r"has no train\.jsonl, nor \.gz or \.xz: did you mean"):
        create_task("text", data=str(tmp_path))


@real
@pytest.mark.usefixtures("data")
def test_imdb():
    """Fails if a review or a label is lost."""
    made = create_task("text", length=1000, data="imdb")
    assert (made.size("train"), made.size("valid"), made.size("test"), made.classes) == (
        22_500,
        2_500,
        25_000,
        2,
    )
    assert 0.4 < np.mean([int(made.example("test", i).targets["labels"]) for i in range(300)]) < 0.6


# ---------------------------------------------------------------------------------------- retrieval
def test_papers_match_where_they_cite_the_same():
    """Fails if a label is not what the citations say, or names alone or topics tell it."""
    made, labels, names, topics = create_task("retrieval"), [], [], []
    for index in range(300):
        tokens, target = tokens_and_labels(made.example("train", index))
        one, two = (text_of(each) for each in tokens)
        works = [set(re.findall(r"[A-Z][a-z]{5} \d{4}", text)) for text in (one, two)]
        assert [len(each) for each in works] == [4, 4] and len(works[0] & works[1]) == 2 * int(
            target
        )
        assert max(len(one), len(two)) <= made.length
        labels.append(int(target))
        names.append(bool({w.split()[0] for w in works[0]} & {w.split()[0] for w in works[1]}))
        topics.append(one.split(".")[0] == two.split(".")[0])
    assert 0.42 < np.mean(labels) < 0.58 and all(names)
    assert abs(np.corrcoef(labels, topics)[0, 1]) < 0.15 and 0.35 < np.mean(topics) < 0.65


def test_passages_of_real_text(tmp_path):
    """Fails if passages of one article overlap, are of another one, or an article is in two
    splits."""
    letters = [chr(ord("a") + i) for i in range(26)]
    text = "".join(
        f" = {a} = \n\n = = part = = \n" + "".join(f"{a}{i:04d} " for i in range(100)) + "\n"
        for a in letters
    )
    (tmp_path / "text.txt").write_text(text)
    made, seen = create_task("retrieval", length=60, data=str(tmp_path / "text.txt")), {}
    for split in ("train", "valid", "test"):
        for index in range(40):
            tokens, target = tokens_and_labels(made.example(split, index))
            assert tokens.shape == (2, 60)
            found = [re.findall(r"([a-z])(\d{4})", text_of(each)) for each in tokens]
            one, two = ({letter for letter, _ in each} for each in found)
            assert len(one) == len(two) == 1 and (one == two) == bool(target)
            assert not (set(found[0]) & set(found[1]))
            seen.setdefault(split, set()).update(one | two)
    assert not (
        seen["train"] & seen["valid"]
        or seen["train"] & seen["test"]
        or seen["valid"] & seen["test"]
    )
    plain = tmp_path / "folder"
    plain.mkdir()
    for a in letters:
        (plain / f"{a}.txt").write_text(a * 200)
    tokens, target = tokens_and_labels(
        create_task("retrieval", length=50, data=str(plain)).example("train", 0)
    )
    assert (tokens[0, 0] == tokens[1, 0]) == bool(target)


def test_retrieval_splits_are_found_by_prefix(tmp_path):
    """Fails if articles of "trainset.txt", "dev1.txt" and "t10k.txt" are not those of a split."""
    letters = {"train": "abcd", "valid": "efgh", "test": "ijkl"}
    for split, name in (("train", "trainset"), ("valid", "dev1"), ("test", "t10k")):
        text = "".join(f" = {a} = \n" + a * 200 + "\n" for a in letters[split])
        (tmp_path / f"{name}.txt").write_text(text)
    task = create_task("retrieval", length=50, data=str(tmp_path))
    for split, expected in letters.items():
        tokens = torch.stack([task.example(split, i).inputs["x"] for i in range(40)])
        assert set(text_of(tokens.flatten())) - set(" =\n") == set(expected)


@real
@pytest.mark.usefixtures("data")
def test_wikitext():
    """Fails if articles are not found by their titles."""
    made = create_task("retrieval", length=300, data="wikitext-2")
    labels = [int(made.example("valid", i).targets["labels"]) for i in range(200)]
    assert (
        0.38 < np.mean(labels) < 0.62
        and "passages of wikitext-2" in made.render(made.example("test", 1)).to_text()
    )


# -------------------------------------------------------------------------------------- wrong input
@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("listops", {"depth": 1}, "depth must be"),
        ("listops", {"length": 100, "min_length": 99}, "No length is more than"),
        ("listops", {"depth": 2, "args": 5}, "at most 7 tokens"),
        ("listops", {"examples": 0}, "examples must be"),
        ("pathfinder", {"side": 8}, "side must be"),
        ("pathfinder", {"contour": 90}, "take up"),
        ("pathfinder", {"distractors": -1}, "distractors must be"),
        ("image", {"data": "cifar"}, "did you mean 'cifar10'"),
        ("image", {"side": 4}, "side must be"),
        ("image", {"noise": -1}, "noise must be"),
        ("text", {"data": "imbd"}, "did you mean 'imdb'"),
        ("text", {"length": 10}, "at least 192"),
        ("retrieval", {"length": 100}, "at least 320"),
        ("retrieval", {"data": "wikitext"}, "did you mean 'wikitext-2'"),
        ("text", {"data": "./no/such.jsonl"}, "does not exist"),
    ],
)
def test_wrong_arguments_are_named(name, arguments, words):
    """Fails if a task is made of nonsense."""
    with pytest.raises(ValueError, match=words):
        create_task(name, **arguments)


def test_what_does_not_fit_is_said(monkeypatch):
    """Fails if paths or trees are sought for ever."""
    monkeypatch.setattr("regard.tasks.pathfinder_paths.MAX_TRIES", 2)
    with pytest.raises(ValueError, match="Two paths of 14 dashes do not fit into 16 × 16"):
        create_task("pathfinder", side=16, contour=14).example("train", 0)
    monkeypatch.setattr("regard.tasks.listops.MAX_TRIES", 20)
    with pytest.raises(ValueError, match="None of 20 trees had more than 598"):
        create_task("listops", length=600, min_length=598).example("train", 0)


def test_data_without_a_folder_for_them(monkeypatch):
    """Fails if a known name without REGARD_DATA gives anything but the reason."""
    monkeypatch.delenv("REGARD_DATA", raising=False)
    with pytest.raises(ValueError, match=r"environment variable REGARD_DATA.* not set"):
        create_task("image", data="mnist")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("{", "line 1 of .* is not valid JSON"),
        ("[1]", "must be an object, not list"),
        ('{"txt": "a", "label": 1}', "no column 'text': did you mean 'txt'"),
        ('{"text": "a"}', "no column 'label'"),
        ('{"text": "", "label": 1}', "non-empty"),
        ('{"text": "a", "label": 1}', "too few"),
    ],
)
def test_wrong_text_files_are_named(tmp_path, content, words):
    """Fails if a damaged file is trained on."""
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ValueError, match=words):
        create_task("text", data=str(tmp_path / "a.jsonl"))


def test_wrong_folders_are_named(tmp_path):
    """Fails if a folder without what is needed, or with a damaged file, is taken."""
    with pytest.raises(ValueError, match=r"has no train\.jsonl, nor \.gz or \.xz: it is empty"):
        create_task("text", data=str(tmp_path))
    with pytest.raises(ValueError, match=r"train_x\.npy does not exist"):
        create_task("image", data=str(tmp_path))
    (tmp_path / "train.jsonl.xz").write_bytes(b"no xz")
    with pytest.raises(ValueError, match=r"does not exist: did you mean 'train\.jsonl\.xz'"):
        create_task("text", data=str(tmp_path / "train.json"))
    with pytest.raises(ValueError, match=r"is not a complete \.xz file"):
        create_task("text", data=str(tmp_path))
    write_images(tmp_path, train_y=np.zeros(3, int))
    with pytest.raises(ValueError, match="40 images need as many"):
        create_task("image", data=str(tmp_path))
    write_images(
        tmp_path, train_x=np.zeros((40, 16, 16))
    )  # what was read before is read again: the file has changed
    with pytest.raises(ValueError, match="of uint8, not"):
        create_task("image", data=str(tmp_path))
    (tmp_path / "train_x.npy").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is not a \.npy file"):
        create_task("image", data=str(tmp_path))
    (tmp_path / "few.txt").write_text("a few words")
    with pytest.raises(ValueError, match="too few articles"):
        create_task("retrieval", data=str(tmp_path / "few.txt"))


def test_arguments_that_do_not_apply_raise(tmp_path):
    """Fails if something is accepted and ignored."""
    write_images(tmp_path)
    for given in ({"noise": 0.2}, {"seed": 1}, {"examples": 5}):
        with pytest.raises(ValueError, match="omit it"):
            create_task("image", data=str(tmp_path), **given)
    with pytest.raises(ValueError, match="use one of 8, 16"):
        create_task("image", side=12, data=str(tmp_path))


# ----------------------------------------------------------------------------------------- training
SMALL = {
    "listops": {"length": 64},
    "pathfinder": {"side": 16, "contour": 4},
    "image": {"side": 12},
    "text": {"length": 192},
    "retrieval": {"length": 320},
}


@pytest.mark.parametrize("mixer", ["vanilla", "linear"])
@pytest.mark.parametrize("name", SMALL)
def test_a_short_run_on_each(name, mixer, tmp_path):
    """Fails if a task cannot be trained on, or the saved model says something else."""
    settings = {
        "steps": 30,
        "batch_size": 4,
        "eval_every": 30,
        "eval_examples": 8,
        "warmup_steps": 5,
    }
    spec = RunSpec.model_validate(
        {
            "task": {"name": name, "arguments": SMALL[name]},
            "mixer": mixer,
            "dim": 32,
            "layers": 1,
            "settings": settings,
            "threads": 1,
        }
    )
    result = run_training(spec, tmp_path)
    assert result["steps"] == 30 and np.isfinite(result["loss"]) and 0 <= result["test"] <= 1
    model, batch = (
        load(tmp_path / "model"),
        create_task(name, **SMALL[name]).batch("test", range(4)),
    )
    logits = model(**batch.inputs)
    assert logits.shape == (4, create_task(name).classes) and torch.isfinite(logits).all()
