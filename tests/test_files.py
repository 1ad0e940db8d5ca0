"""Files as users have them: whole, packed, torn, empty, in the wrong encoding, too large."""

import csv
import gzip
import io
import json
import lzma
import random
import sys
import types

import numpy as np
import pytest

from regard.tasks import files, rows, tokenizers
from regard.tasks.files import (
    ArrayBuilder,
    decode_chunks,
    existing_path,
    files_by_split,
    load_bytes,
    open_text,
    split_from_name,
)
from regard.tasks.processors import TextProcessor
from regard.tasks.rows import SAMPLE, detect_dialect, get_column, is_missing, read_lines, read_rows
from regard.tasks.text_classification import TextClassification
from regard.tasks.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    tokenizer_from_dict,
    train_tokenizer,
)

ROWS = [
    {"body": 'say "no", or; yes', "topic": "a"},
    {"body": "two\nlines\tand ünïcode", "topic": "b"},
]


def read(path, **given):
    return [row for _, row in read_rows(path, **given)["all"]]


def put(path, content):
    """Write bytes, packed as the name says."""
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content if isinstance(content, bytes) else content.encode()))
    return path


def as_csv(found, **dialect):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), **dialect)
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


# --------------------------------------------------------------------------------------------- rows
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_csv_in_many_dialects(tmp_path, delimiter, quoting, end):
    """Fails if a separator, quotes, or a line's end within a field is misread, with or without a
    byte-order mark."""
    text = as_csv(ROWS * 3, delimiter=delimiter, quoting=quoting, lineterminator=end)
    assert read(put(tmp_path / "x.csv", text)) == ROWS * 3
    assert read(put(tmp_path / "y.csv", b"\xef\xbb\xbf" + text.encode())) == ROWS * 3


def test_csv_with_single_quotes_is_what_the_csv_module_says(tmp_path):
    """Fails if the guess of the csv module is not taken where it alone fits."""
    text = as_csv([{"body": "a, b", "topic": "x"}] * 9, quotechar="'", quoting=csv.QUOTE_ALL)
    assert read(put(tmp_path / "x.csv", text)) == [{"body": "a, b", "topic": "x"}] * 9


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_json_lines_and_arrays_packed_or_not(tmp_path, suffix):
    """Fails if a kind of file or a packing is read differently from the others."""
    lines = "\n\n".join(map(json.dumps, ROWS))
    assert read(put(tmp_path / f"x.jsonl{suffix}", lines)) == ROWS
    assert read(put(tmp_path / f"x.json{suffix}", json.dumps(ROWS))) == ROWS
    assert read(put(tmp_path / f"x.csv{suffix}", as_csv(ROWS))) == ROWS


def test_a_file_beyond_the_sample_is_read_like_the_csv_module_reads_it(tmp_path):
    """Fails if a line is lost, doubled or joined where the sample for the dialect ends, wherever
    that falls."""
    drawn = random.Random(0)
    for ends, more in (("\n", 0), ("\r\n", 0), ("\r\n", 1), ("\r\n", 2)):
        found = [
            {"body": "x" * drawn.randrange(40) + drawn.choice(["", "\n", ends]) + "y", "topic": "a"}
            for _ in range(4000)
        ]
        text = as_csv([{"body": "z" * (100 + more), "topic": "b"}, *found], lineterminator=ends)
        assert len(text) > SAMPLE
        assert read(put(tmp_path / "x.csv", text))[1:] == found
    for cut in range(12):
        text = "a,b\r\nc,d\r\ne"
        assert "".join(read_lines(text[:cut], io.StringIO(text[cut:], newline=""))) == text
        assert [x for x in read_lines(text[:cut], io.StringIO(text[cut:], newline="")) if x] == [
            "a,b\r\n",
            "c,d\r\n",
            "e",
        ]


def test_a_text_with_many_separators_does_not_win():
    """Fails if commas inside of texts make a file with semicolons one with commas."""
    sample = "body;topic\n" + "a, b, c;x\n" * 3 + "a, b;y\n" * 5
    assert detect_dialect(sample).delimiter == ";"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "x.csv",
            "a,b\n1,2\n3\n4,5\n" + "6,7\n" * 20,
            "line 3 of .* has 1 fields, but the header has 2",
        ),
        ("x.csv", "a,b,a\n1,2,3\n", "x.csv has two columns 'a': rename one"),
        ("x.csv", "", "is empty"),
        ("x.jsonl", '{"a": 1}\n{"a": \n', "line 2 of .* is not valid JSON"),
        ("x.jsonl", '{"a": 1}\n[1]\n', "line 2 of .* must be an object, not list"),
        ("x.jsonl", "[" * 100_000 + "\n", "line 1 of .* (nested too deeply|is not valid JSON)"),
        ("x.jsonl", '{"a": ' * 50_000, "line 1 of .* (nested too deeply|is not valid JSON)"),
        ("x.jsonl", '{"a": ' + "9" * 5000 + "}\n", "line 1 of .* is not valid JSON"),
        ("x.json", '{"a": 1}', "array of objects, not dict"),
        ("x.json", "[1]", "row 1 of .* must be an object, not int"),
        ("x.docx", "a", "Cannot read rows from .*supported are .csv"),
        ("x.csv", b"a,b\n1,\xff\n", "byte 0xff at offset 6, line 2"),
        ("x.jsonl", b'{"a": 1}\n{"a": "\xe4"}\n', "byte 0xe4 at offset 16, line 2"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, name, content, words):
    """Fails if a torn row, hostile JSON or a wrong encoding is passed over, or its place not
    told."""
    with pytest.raises(ValueError, match=words):
        read(put(tmp_path / name, content))


def test_huge_values_in_json_do_no_harm(tmp_path):
    """Fails if a number beyond all floats breaks the reader."""
    assert read(put(tmp_path / "x.jsonl", '{"a": 1e999}\n'))[0]["a"] == float("inf")


def test_a_line_without_end_is_not_read_into_memory(tmp_path, monkeypatch):
    """Fails if a file that is one endless line is taken for a row."""
    monkeypatch.setattr(rows, "MAX_LINE", 1000)
    for name in ("x.jsonl", "x.csv"):
        with pytest.raises(ValueError, match=r"line 1 of .* has 1000 characters or more"):
            read(put(tmp_path / name, '{"a": "' + "x" * 100_000))
    monkeypatch.setattr(rows, "MAX_JSON_ARRAY", 10)
    with pytest.raises(ValueError, match="write it as JSON lines"):
        read(put(tmp_path / "x.json", json.dumps(ROWS)))


def test_columns_and_missing_values():
    """Fails if a column is guessed, or nothing is taken for something."""
    with pytest.raises(ValueError, match=r"line 2 has no column 'bdy': did you mean 'body'"):
        get_column(ROWS[0], "bdy", "line 2")
    assert all(map(is_missing, (None, "", float("nan")))) and not any(
        map(is_missing, (0, " ", False, "nan"))
    )


@pytest.mark.parametrize("name", ["x.csv.gz", "x.jsonl.xz"])
def test_packed_files_that_were_cut_off(tmp_path, name):
    """Fails if half a file is taken for all of it."""
    found = [{"a": i, "b": i * i} for i in range(1000)]
    path = put(
        tmp_path / name, as_csv(found) if "csv" in name else "\n".join(map(json.dumps, found))
    )
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=f"is not a complete .{name[-2:]} file"):
        read(path)
    path.write_bytes(b"not packed at all")
    with pytest.raises(ValueError, match=f"is not a complete .{name[-2:]} file"):
        read(path)


def test_parquet(tmp_path):
    """Fails if a Parquet file is read as anything else; without pyarrow, if the package is not
    named."""
    path = tmp_path / "x.parquet"
    path.write_bytes(b"no parquet")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install 'regard\[text\]'"):
            read(path)
        pytest.skip("pyarrow is not installed: only the message was tested")
    with pytest.raises(ValueError, match="not a complete Parquet file"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read(path) == ROWS
    whole = path.read_bytes()
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a complete Parquet file"):
            read(path)
    path.write_bytes(whole[:10] + b"?" * 60 + whole[70:])
    with pytest.raises(ValueError, match="not a complete Parquet file"):
        read(path)


class Features(dict):
    """As `datasets` has them."""


class ClassLabel:
    names = ("neg", "pos")


class Split(list):
    features = Features(text=object(), label=ClassLabel())


def test_hugging_face_by_a_stand_in(monkeypatch):
    """Fails if splits, names of classes or missing labels are misread."""
    part = Split([{"text": "x", "label": 1}, {"text": "y", "label": -1}])
    found = {"train": part, "validation": Split(part[:1]), "unsupervised": part}
    stand_in = types.SimpleNamespace(
        load_dataset=lambda name, *more: found if name == "imdb" else part
    )
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    got = read_rows("hf:imdb")
    assert set(got) == {"train", "valid"}
    assert [row for _, row in got["train"]] == [
        {"text": "x", "label": "pos"},
        {"text": "y", "label": None},
    ]
    assert list(read_rows("hf:one")) == ["all"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'regard\[hf\]'"):
        read_rows("hf:imdb")


def test_hugging_face_from_disk(tmp_path):
    """Fails if a data set that `save_to_disk` wrote is not read."""
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    assert read(f"hf:{tmp_path / 'set'}") == ROWS
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    train = datasets.Dataset.from_list(
        [{"text": "x", "label": 1}, {"text": "y", "label": 0}], features=features
    )
    datasets.DatasetDict({"train": train, "test": train.select([1])}).save_to_disk(
        str(tmp_path / "splits")
    )
    got = read_rows(f"hf:{tmp_path / 'splits'}")
    assert [row["label"] for _, row in got["train"]] == ["pos", "neg"] and set(got) == {
        "train",
        "test",
    }


def test_hugging_face_from_a_folder_of_files(tmp_path, monkeypatch):
    """Fails if a folder that `datasets` builds from files is not read, or what it says of a wrong
    one is a traceback."""
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.csv").write_text("body,topic\na b,one\nc d,two\n")
    got = read_rows(f"hf:{tmp_path / 'files'}")
    assert [row for _, row in got["train"]] == [
        {"body": "a b", "topic": "one"},
        {"body": "c d", "topic": "two"},
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"Cannot read hf:.*empty: "):
        read_rows(f"hf:{tmp_path / 'empty'}")


# -------------------------------------------------------------------------------- names and folders
def test_names_of_splits(tmp_path):
    """Fails if a split is not known by its usual names, or other files are taken along."""
    names = {
        "train.txt": "train",
        "payload_train.csv.xz": "train",
        "wiki.valid.tokens": "valid",
        "dev.jsonl": "valid",
        "validation-00000-of-00001.parquet": "valid",
        "test.csv": "test",
        "latest.csv": None,
    }
    assert {name: split_from_name(tmp_path / name) for name in names} == names
    for name in ("train.txt", "train-2.txt.gz", "valid.txt", "SOURCE.txt", ".hidden.txt", "x.bin"):
        put(tmp_path / name, "x")
    found = files_by_split(tmp_path, (".txt",))
    assert {k: [p.name for p in v] for k, v in found.items()} == {
        "train": ["train-2.txt.gz", "train.txt"],
        "valid": ["valid.txt"],
    }
    with pytest.raises(ValueError, match=r"no file in .* that ends in one of .csv"):
        files_by_split(tmp_path, (".csv",))


def test_a_path_that_is_not_there(tmp_path):
    """Fails if the nearest name is not told."""
    put(tmp_path / "news.csv", "a\n")
    with pytest.raises(ValueError, match=r".*nws.csv does not exist: did you mean 'news.csv'"):
        existing_path(tmp_path / "nws.csv")
    with pytest.raises(ValueError, match="there is no folder"):
        existing_path(tmp_path / "no" / "x.csv")


# ---------------------------------------------------------------------------------------- encodings
def test_the_place_of_a_wrong_byte_whatever_the_chunks():
    """Fails if the offset or the line of a wrong byte depends on where the chunks end, or a mark
    shifts it."""
    for mark in (b"", b"\xef\xbb\xbf"):
        content = mark + "añ\nbö\nc".encode() + b"\xc3(" + b"x\n" * 5
        expected = rf"byte 0xc3 at offset {len(mark) + 9}, line 3"
        for size in range(1, len(content) + 1):
            pieces = (content[i : i + size] for i in range(0, len(content), size))
            with pytest.raises(ValueError, match=expected):
                list(decode_chunks(pieces, "x"))
    marked = b"\xef\xbb\xbfab"
    assert all(
        "".join(decode_chunks((marked[i : i + n] for i in range(0, 5, n)), "x")) == "ab"
        for n in range(1, 6)
    )
    with pytest.raises(ValueError, match="offset 1, line 1"):
        list(decode_chunks([b"a\xc3"], "x"))  # a character that is not finished
    with pytest.raises(ValueError, match="encoding='utf-16'"):
        list(decode_chunks(["hello".encode("utf-16")], "x"))
    with pytest.raises(ValueError, match="No encoding 'latin1x'"):
        list(decode_chunks([b"a"], "x", "latin1x"))


def test_encodings(tmp_path):
    """Fails if an encoding that is given is not used, or a byte-order mark becomes text."""
    text = "añ\nbö\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "latin-1"):
        path = put(tmp_path / "x.txt", text.encode(encoding))
        with open_text(path, "utf-8" if encoding == "utf-8-sig" else encoding) as file:
            assert file.read() == text
        assert (
            load_bytes([path], "utf-8" if encoding == "utf-8-sig" else encoding).tobytes()
            == text.encode()
        )


def test_plain_files_are_mapped_and_others_copied(tmp_path, monkeypatch):
    """Fails if a plain file is read into memory, or one that is unpacked to more than fits is."""
    text = "wörds\n" * 1000
    paths = [put(tmp_path / name, text) for name in ("a.txt", "b.txt.gz", "c.txt.xz")]
    plain = load_bytes(paths[:1], "utf-8")
    assert isinstance(plain, np.memmap) and plain.tobytes() == text.encode()
    assert load_bytes(paths, "utf-8").tobytes() == 3 * text.encode()
    monkeypatch.setattr(files, "MAX_IN_MEMORY", 100)
    assert isinstance(load_bytes(paths[1:], "utf-8"), np.memmap)
    assert len(load_bytes([put(tmp_path / "e.txt", "")], "utf-8")) == 0


def test_a_gigantic_file_costs_no_memory(tmp_path):
    """Fails if all of a file of eight gigabytes is read to take a part of it: it is sparse, and
    reading takes minutes."""
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(8 << 30)
        file.seek((8 << 30) - 5)
        file.write(b"hello")
    found = load_bytes([path], None)
    assert len(found) == 8 << 30 and found[-5:].tobytes() == b"hello"


def test_a_store_holds_what_was_put_in(monkeypatch):
    """Fails if pieces are lost, in memory or in a file."""
    for small in (0, 1 << 20):
        monkeypatch.setattr(files, "MAX_IN_MEMORY", small)
        store = ArrayBuilder(np.uint16)
        for piece in (np.arange(5), np.arange(0), np.arange(300, 310)):
            store.append(piece)
        assert store.finish().tolist() == [*range(5), *range(300, 310)]


# ----------------------------------------------------------------------------------- all_tokenizers
TEXT = "naïve ⟨fill⟩ <unk> 日本\n\x00\n\n  end" * 3


def all_tokenizers():
    found = [ByteTokenizer(), CharTokenizer.train([TEXT])]
    try:
        return [*found, BPETokenizer.train(lambda: [TEXT] * 4, 300)]
    except ImportError:
        return found


def test_tokenizers_keep_every_text():
    """Fails if a text does not come back, a token is out of range, or a unit is counted twice."""
    for tokenizer in all_tokenizers():
        tokens = tokenizer.encode(TEXT)
        assert tokenizer.decode(tokens.tolist()) == TEXT
        assert (
            tokens.min() >= 1
            and tokens.max() < tokenizer.vocab_size
            and len(tokenizer.token_units()) == tokenizer.vocab_size
        )
        units = len(TEXT) if tokenizer.unit == "character" else len(TEXT.encode())
        assert tokenizer.token_units()[tokens].sum() == units
        again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert (again.encode(TEXT) == tokens).all() and again.decode(tokens.tolist()) == TEXT


def test_byte_pairs_are_learned_alike_each_time():
    """Fails if the same text gives another vocabulary, so that a run could not be resumed."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    text = " ".join(f"word{i % 37} {i % 11}" for i in range(2000))
    made = [BPETokenizer.train(lambda: [text[:5000], text[5000:]], 320) for _ in range(3)]
    assert (
        made[0].to_dict() == made[1].to_dict() == made[2].to_dict()
        and 258 < made[0].vocab_size <= 320
    )
    assert len(made[0].encode(text)) < len(text) / 2


def test_byte_pairs_are_learned_once(tmp_path, monkeypatch):
    """Fails if the same texts are learned from again, or others are taken for them."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path))
    learned, usual = [], tokenizers._learn_merges
    monkeypatch.setattr(
        tokenizers, "_learn_merges", lambda *given: learned.append(given[1]) or usual(*given)
    )
    first = BPETokenizer.train(lambda: ["aab aab", "b"], 259)
    again = BPETokenizer.train(lambda: ["aab aab", "b"], 259)
    assert first.to_dict() == again.to_dict() and learned == [259]
    BPETokenizer.train(lambda: ["aab aabb"], 259), BPETokenizer.train(lambda: ["aab aab", "b"], 260)
    assert learned == [259, 259, 260] and len(list(tmp_path.iterdir())) == 3


def test_unknown_characters_and_empty_texts():
    """Fails if a character that training lacked is taken for another, or a text has no token."""
    tokenizer = CharTokenizer.train(["abc"])
    assert (
        tokenizer.encode("axc").tolist() == [2, 1, 4]
        and tokenizer.decode([2, 1, 4, 0]) == "a\ufffdc"
    )
    assert [
        TextProcessor(each, 4).encode_text("").tolist() for each in (tokenizer, ByteTokenizer())
    ] == [
        [1],
        [1],
    ]
    assert TextProcessor(tokenizer, 2).encode("cab")["x"].tolist() == [4, 2]


def test_wrong_tokenizers():
    """Fails if nonsense is accepted."""
    with pytest.raises(ValueError, match="No tokenizer 'chars': did you mean 'char'"):
        train_tokenizer("chars", list)
    with pytest.raises(ValueError, match="vocab_size applies to tokenizer='bpe'"):
        train_tokenizer("char", lambda: ["a"], 300)
    for content in (
        {},
        {"type": "char"},
        {"type": "no"},
        {"type": "char", "characters": "aa"},
        {"type": []},
    ):
        with pytest.raises(ValueError, match="Not a saved tokenizer"):
            tokenizer_from_dict(content)
    with pytest.raises(ValueError, match="Not a saved text processor"):
        TextProcessor.from_dict({"tokenizer": {"type": "byte"}})


# ------------------------------------------------------------------------------- many columns
class CountedName(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        CountedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_many_columns_are_read_in_linear_time(tmp_path, monkeypatch):
    """Fails if each name of a header is searched for in the whole header."""
    path, reader = tmp_path / "wide.csv", csv.reader
    monkeypatch.setattr(csv, "reader", lambda *given: CountingReader(reader(*given)))
    for columns in (100, 10_000):
        names = ["text", "label", *(f"c{i}" for i in range(columns))]
        path.write_text("\n".join(",".join(row) for row in (names, ["1"] * len(names))))
        CountedName.compared = 0
        ((_, row),) = read_rows(path)["all"]
        assert len(row) == columns + 2 and CountedName.compared < 20 * columns


class CountingReader:
    """A CSV reader whose fields count their comparisons."""

    def __init__(self, reader):
        self.reader = reader

    @property
    def line_num(self):
        return self.reader.line_num

    def __iter__(self):
        return self

    def __next__(self):
        return list(map(CountedName, next(self.reader)))


def test_hint_among_many_columns_is_short(tmp_path):
    """Fails if an error lists 100,000 columns."""
    path = tmp_path / "wide.csv"
    names = [f"c{i}" for i in range(100_000)]
    path.write_text("\n".join(",".join(row) for row in (names, ["1"] * len(names))))
    with pytest.raises(ValueError, match=r"has no column 'text': choose from .* more") as caught:
        TextClassification(path)
    assert len(str(caught.value)) < 10_000


def test_byte_pairs_of_halves_of_surrogate_pairs():
    """Fails if a text that JSON can express has no tokens."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    tokenizer = BPETokenizer.train(lambda: ["ab\ud800", "ab"], 259)
    assert tokenizer.decode(tokenizer.encode("a\ud800b").tolist()) == "a?b"


def test_byte_pairs_of_a_very_long_word(monkeypatch):
    """Fails if a field of a million characters without a space takes minutes."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    longest = []
    usual = tokenizers.replace_surrogates
    monkeypatch.setattr(tokenizers, "LONG_WORD", tokenizers.re.compile(r"(\S{100})"))
    monkeypatch.setattr(
        tokenizers, "replace_surrogates", lambda x: longest.append(len(x)) or usual(x)
    )
    tokenizer = BPETokenizer.train(lambda: ["y" * 1000 + " ab"], 300)
    assert longest == [1003] and max(tokenizer.token_units()) <= 101
    assert tokenizer.decode(tokenizer.encode("y" * 300).tolist()) == "y" * 300
