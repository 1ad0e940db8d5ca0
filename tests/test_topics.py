"""Topics: words, coherence, clusters, baselines, the command and its page."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from typer.testing import CliRunner

from regard.cli import app
from regard.cli.topics import _read_stop_words
from regard.tasks.processors import TextProcessor
from regard.tasks.tokenizers import ByteTokenizer
from regard.topics import (
    BASELINES,
    TopicModel,
    c_tf_idf,
    count_words,
    fit_baseline,
    label_agreement,
    npmi,
    read_documents,
    topic_diversity,
)
from regard.topics.documents import split_text

pytest.importorskip("sklearn")

SUBJECTS = {
    "sport": ("goal", "team", "match", "coach", "league", "player"),
    "money": ("bank", "profit", "market", "shares", "trade", "price"),
    "music": ("song", "album", "singer", "guitar", "concert", "band"),
}


def corpus(count=90, seed=0):
    """Documents about one of three subjects, with words that all have in common."""
    rng = random.Random(seed)
    documents, labels = [], []
    for number in range(count):
        label = list(SUBJECTS)[number % 3]
        words = [*rng.sample(SUBJECTS[label], 4), *rng.sample(("year", "people", "city"), 2)]
        rng.shuffle(words)
        documents.append("The " + " ".join(words) + ".")
        labels.append(label)
    return documents, labels


def vectors(labels, seed=0):
    """Noisy points around a centre for each label, far from the origin."""
    rng = np.random.default_rng(seed)
    centres = {label: rng.normal(size=8) for label in sorted(set(labels))}
    return 10 + np.stack([centres[label] + 0.2 * rng.normal(size=8) for label in labels])


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


# ------------------------------------------------------------------------------------------- words
def test_c_tf_idf_is_the_formula_of_the_paper():
    """The oracle is a loop over words and classes, from equation 2."""
    documents, labels = corpus(30)
    classes = np.array([list(SUBJECTS).index(label) for label in labels])
    classes[4] = -1  # in no topic
    counts = count_words(documents, max_df=1)
    assert "the" not in counts.words and {"goal", "year"} <= set(counts.words)
    found = c_tf_idf(counts.counts, classes, 3)
    reduced = c_tf_idf(counts.counts, classes, 3, reduce_frequent_words=True)
    joined = [[] for _ in range(3)]
    for text, label in zip(counts.texts, classes, strict=True):
        if label >= 0:
            joined[label] += text
    mean = sum(map(len, joined)) / 3
    for topic, number in itertools.product(range(3), range(len(counts.words))):
        word = counts.words[number]
        total = sum(words.count(word) for words in joined)
        expected = joined[topic].count(word) * math.log(1 + mean / total)
        assert abs(found[topic, number] - expected) < 1e-12
        share = joined[topic].count(word) / len(joined[topic])
        expected = math.sqrt(share) * math.log(1 + mean / total)
        assert abs(reduced[topic, number] - expected) < 1e-12


# --------------------------------------------------------------------------------------- coherence
def naive_npmi(topic, texts, window):
    """Every window as a set, every pair in a loop."""
    windows = []
    for text in texts:
        size = len(text) if window is None else window
        windows += [set(text[i : i + size]) for i in range(max(1, len(text) - size + 1))]
    values = []
    for a, b in itertools.combinations(topic, 2):
        pa, pb, both = (
            sum(words <= seen for seen in windows) / len(windows) for words in ({a}, {b}, {a, b})
        )
        values.append(math.log((both + 1e-12) / (pa * pb)) / -math.log(both + 1e-12))
    return sum(values) / len(values)


@pytest.mark.parametrize("window", [10, 3, None])
def test_npmi_equals_its_definition(window):
    """Repeated words, empty and short texts, pairs that never meet."""
    rng = random.Random(1)
    texts = [[rng.choice("abcdefghij") for _ in range(rng.randrange(30))] for _ in range(40)] + [[]]
    topics = [["a", "b", "c"], ["d", "j", "a", "h"]]
    expected = [naive_npmi(topic, texts, window) for topic in topics]
    np.testing.assert_allclose(npmi(topics, texts, window=window), expected, atol=1e-12)


def test_npmi_equals_gensim():
    """In texts where no word is twice in a window; gensim loses such a word when it first leaves.
    The test is at the tolerance that both promise, 1e-9."""
    gensim = pytest.importorskip("gensim")
    from gensim.models import CoherenceModel

    rng = random.Random(2)
    words = [f"w{i}" for i in range(60)]
    texts = [rng.sample(words, rng.randrange(1, 30)) for _ in range(80)]
    topics = [rng.sample(words, 6) for _ in range(4)]
    dictionary = gensim.corpora.Dictionary(texts)
    for window in (10, 5):
        model = CoherenceModel(
            topics=topics,
            texts=texts,
            dictionary=dictionary,
            coherence="c_npmi",
            window_size=window,
            processes=1,
        )
        expected = model.get_coherence_per_topic()
        np.testing.assert_allclose(npmi(topics, texts, window=window), expected, rtol=0, atol=1e-9)


def test_npmi_and_diversity_at_their_limits():
    assert npmi([["a", "b"]], [["a", "b"]] * 3).tolist() == [1.0]  # always together
    assert npmi([["a", "b"]], [["a", "b"], ["c"]]).round(9).tolist() == [1.0]
    assert np.isnan(npmi([["a"]], [["a"]])).all()
    with pytest.raises(ValueError, match="No document has the word 'z'"):
        npmi([["a", "z"]], [["a", "b"]])
    assert topic_diversity([["a", "b"], ["a", "c"]]) == 0.75 and math.isnan(topic_diversity([]))


def test_agreement_with_labels():
    """Purity by hand; NMI and adjusted Rand are scikit-learn's."""
    assert label_agreement(list("aabb"), np.array([1, 1, 0, 0])) == pytest.approx(
        {"purity": 1, "nmi": 1, "ari": 1}
    )
    assert label_agreement(list("aabbc"), np.array([0, 0, 0, 1, 1]))["purity"] == pytest.approx(0.6)


# ------------------------------------------------------------------------------------------ models
def test_topics_are_found_chosen_and_named():
    """Fails if clusters, their number or their words are others than those of the corpus."""
    documents, labels = corpus()
    embeddings = vectors(labels)
    given = TopicModel(3).fit(documents, embeddings)
    chosen = TopicModel().fit(documents, embeddings)
    assert np.array_equal(given.labels_, chosen.labels_)
    assert max(chosen.silhouettes_, key=chosen.silhouettes_.get) == 3
    assert label_agreement(labels, given.labels_)["ari"] == pytest.approx(1)
    assert {frozenset(words[:6]) for words in given.topic_words_} == {
        frozenset(words) for words in SUBJECTS.values()
    }
    assert all(row == sorted(row, reverse=True) for row in given.topic_weights_)
    noisy = np.concatenate([embeddings, 10 + np.random.default_rng(3).normal(size=(3, 8)) * 4])
    dense = TopicModel(clustering="hdbscan", min_cluster_size=10)
    found = dense.fit_transform([*documents, *documents[:3]], noisy)
    assert len(dense.topic_words_) == 3 and label_agreement(labels, found[:90])["ari"] > 0.9


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_find_the_topics_of_separate_words(name):
    documents, labels = corpus(300)
    counts = count_words(documents)
    found = fit_baseline(name, counts, 3)
    assert label_agreement(labels, found.labels)["ari"] > 0.5
    for words in found.words:  # most words of a topic are of one subject
        assert max(len(set(words[:6]) & set(subject)) for subject in SUBJECTS.values()) >= 3


def test_more_topics_than_words():
    """Fails if a baseline cannot start."""
    counts = count_words(["red car", "red bus", "blue car", "blue bus"] * 3, max_df=1)
    for name in BASELINES:
        assert len(fit_baseline(name, counts, 6).words) == 6


def test_stop_words_are_left_out_in_any_case(tmp_path):
    """Fails if a word in upper case, or the first of a file with a byte-order mark, stays."""
    words = count_words(["Red car", "red bus", "blue car"] * 3, stop_words=["RED"], max_df=1).words
    assert words == ["blue", "bus", "car"]
    (tmp_path / "stop.txt").write_text("Red\nbus\n", encoding="utf-8-sig")
    assert _read_stop_words(str(tmp_path / "stop.txt"), "utf-8") == ["Red", "bus"]


def test_unusable_documents_are_errors_or_notes(tmp_path):
    """Fails if a bad document ends in an error of scikit-learn, or is left out in silence."""
    documents, labels = corpus(12)
    embeddings = vectors(labels)
    model = TopicModel(3)
    for given, words in (
        ((documents[:1], embeddings[:1]), "no 3 topics in 1 document: give at least 3"),
        ((documents, embeddings[:5]), "a row for each of the 12 documents"),
        ((documents, embeddings * np.nan), "NaN or infinity"),
        ((documents, np.ones((12, 4))), "1 different embeddings, fewer than 3 topics"),
        (
            (["a b"] * 12, embeddings),
            "No word is in 2 or more of the 12 documents, and in at most 50 %",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            model.fit(*given)
    with pytest.raises(ValueError, match="no topics in 2 documents: give at least 3"):
        TopicModel().fit(documents[:2], embeddings[:2])
    with pytest.raises(ValueError, match="HDBSCAN finds the number"):
        TopicModel(3, clustering="hdbscan")
    with pytest.raises(ValueError, match="HDBSCAN found no topic"):
        TopicModel(clustering="hdbscan", min_cluster_size=12).fit(documents, embeddings)

    path = tmp_path / "docs.jsonl"
    rows = [{"text": "one two", "label": "a"}, {"text": " ", "label": "a"}, {"text": "one two"}]
    rows += [{"text": None, "label": "b"}, {"text": 17, "label": "b"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    read = read_documents(path)
    assert read.texts == ["one two", "one two", "17"] and read.labels is None
    assert read.notes == [
        "2 rows without text were left out.",
        "1 of 3 documents are copies of others; they are kept.",
    ]
    with pytest.raises(ValueError, match="no column 'label'"):
        read_documents(path, label="label")
    path.write_text('{"text": ["a"]}')
    with pytest.raises(ValueError, match="must be text or a number, not list"):
        read_documents(path)
    path.write_text('{"text": ""}')
    with pytest.raises(ValueError, match="every text is empty"):
        read_documents(path)
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert read_documents(tmp_path / "lines.txt").texts == ["one", "two"]
    with pytest.raises(ValueError, match="which have no label"):
        read_documents(tmp_path / "lines.txt", label="label")


def test_long_documents_are_read_to_the_end():
    """Fails if a piece does not fit, or words are lost."""
    processor = TextProcessor(ByteTokenizer(), 20)
    text = "the quick brown fox jumps over the lazy dog again and again"
    pieces = split_text(text, processor)
    assert "".join(pieces) == text and len(pieces) > 2
    assert all(len(piece) <= 20 for piece in pieces)
    assert split_text("short", processor) == ["short"]
    assert split_text("x" * 50, processor) == ["x" * 50]  # one word, which is truncated


# ----------------------------------------------------------------------------------------- command
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents as rows and as text, and a masked language model of a few steps."""
    folder = tmp_path_factory.mktemp("topics")
    documents, labels = corpus(60)
    rows = [{"body": d, "kind": k} for d, k in zip(documents, labels, strict=True)]
    rows[0]["body"] = "<script>alert(1)</script> goal team match coach"
    rows[1]["body"] = "\ud800 " + rows[1]["body"]  # half of a surrogate pair
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "docs.txt").write_text("\n".join(documents * 10))
    words = ("--dim", 16, "--heads", 2, "--layers", 1, "--batch-size", 8, "--length", 24)
    more = ("--set", "eval_examples=4", "--steps", 3, "--out", folder / "mlm")
    run("train", "--task", "mlm:tokenizer=byte", "--data", folder / "docs.txt", *words, *more)
    return folder


def test_the_command_writes_topics_scores_a_map_and_a_page(folder):
    out = folder / "out"
    words = ("--data", folder / "docs.jsonl", "--text", "body", "--label", "kind", "--topics", 3)
    shown = run("topics", folder / "mlm", *words, "--out", out, "--json").stdout
    result = json.loads(shown)
    assert result["folder"] == str(out) and result["documents"] == 60
    assert list(result["scores"]) == ["embeddings", *BASELINES]
    assert set(result["scores"]["LDA"]) >= {"npmi", "diversity", "purity", "nmi", "ari"}
    assert sum(topic["documents"] for topic in result["topics"]) == 60
    saved = json.loads((out / "topics.json").read_text())
    assert saved == {name: value for name, value in result.items() if name != "folder"}
    rows = [json.loads(line) for line in (out / "documents.jsonl").read_text().splitlines()]
    assert len(rows) == 60 and {"topic", "x", "y", "label", "text"} == set(rows[0])
    page = (out / "topics.html").read_text()
    assert "<script>alert(1)" not in page and "TF-IDF + k-means" in page
    if pytest.importorskip("vl_convert"):
        assert (out / "map.png").read_bytes().startswith(b"\x89PNG")
    again = run("topics", folder / "mlm", *words, "--out", out, "--projection", "pca")
    assert "NPMI" in again.stdout
    assert ("map.png" in again.stdout.split("saved to")[1]) == (out / "map.png").exists()
    plain = run(
        *("topics", folder / "mlm", "--data", folder / "docs.txt", "--min-df", 3),
        *("--no-baselines", "--out", folder / "plain", "--projection", "pca"),
    )
    assert "chosen by the silhouette" in plain.stdout and "purity" not in plain.stdout
    assert "540 of 600 documents are copies" in plain.stderr


def test_the_command_refuses_what_it_cannot_do(folder):
    words = ("--data", folder / "docs.jsonl", "--text", "body")
    run("train", "--task", "parity:length=8", "--steps", 1, "--out", folder / "parity")
    for arguments, said in (
        ((folder / "mlm", *words, "--topics", 99), "no 99 topics in 60 documents"),
        ((folder / "mlm", *words, "--clustering", "kmean"), "did you mean 'kmeans'?"),
        ((folder / "mlm", *words, "--projection", "umap"), "projection must be one of"),
        ((folder / "mlm", *words, "--stop-words", "german"), "english, none or a file"),
        ((folder / "mlm", "--data", folder / "docs.jsonl"), "no column 'text'"),
        ((folder / "mlm", *words, "--out", folder), "is not a result of regard topics"),
        ((folder / "parity", *words), "need a run that reads texts"),
        ((folder / "nothing", *words), "is not a folder"),
    ):
        given = arguments if "--out" in arguments else (*arguments, "--out", folder / "none")
        shown = run("topics", *given, code=1).stderr
        assert said in " ".join(shown.split()) and not (folder / "none").exists()


def test_the_page_opens_offline_in_a_browser(folder, tmp_path):
    from browser import Browser, find_chromium

    chromium = find_chromium()
    if chromium is None or not (folder / "out" / "topics.html").exists():
        pytest.skip("needs Chromium, and the page of the test above")
    pytest.importorskip("vl_convert")
    browser = Browser(chromium, tmp_path)
    try:
        browser.open(folder / "out" / "topics.html", 1000)
        browser.wait_for("document.documentElement.dataset.drawn === 'yes'")
        assert browser.evaluate("document.querySelectorAll('.plot svg path').length") > 60
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1000
        assert browser.messages == []
        assert all(each.startswith(("file:", "data:")) for each in browser.requests)
    finally:
        browser.close()
