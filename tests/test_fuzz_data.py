"""A seeded fuzz of data files: reading raises a ValueError that names the file, or succeeds."""

import gzip
import json
import lzma
import random
import signal
from contextlib import contextmanager

import pytest

from fuzzing import examples
from regard.tasks.language_modeling import LanguageModeling
from regard.tasks.text_classification import TextClassification

SECONDS = 30  # for one file; most take milliseconds
SUFFIXES = (
    ".csv",
    ".tsv",
    ".jsonl",
    ".json",
    ".txt",
    ".parquet",
    ".csv.gz",
    ".jsonl.xz",
    ".md",
    "",
)

WORDS = ["a", "the dog", "été", "汉字", "🏳️‍🌈", 'say "no"', "x,y", "a;b", "tab\there", "two\nlines"]
ODD = ["", " ", "\0", "\r", "\ufeff", "\u2028", "\x1b[31m", "NaN", "null", "-1", "1e999", "=1+1"]
ODD += ["[/x]", "../..", "x" * 5000, "\u202e", "'", '"', '""', "\\", "\\ud800", "%s", "{0}"]


# ------------------------------------------------------------------------------------ valid files
def draw_rows(rng):
    """Rows with a text and a label, and sometimes other columns."""
    names = ["text", "label", *rng.sample(["id", "été", "[/x]", "", "Text"], rng.randrange(3))]
    rng.shuffle(names)
    count = rng.choice([0, 1, 2, 12, 60, 60, 60])
    rows = []
    for number in range(count):
        row = {name: f"{rng.choice(WORDS)} {number}" for name in names}
        row["label"] = rng.choice(["good", "bad", "[red]b"])
        rows.append(row)
    return names, rows


def as_csv(rng, names, rows):
    """CSV with a random delimiter, line ending and quoting; not always correctly quoted."""
    delimiter, ending = rng.choice(",;\t|"), rng.choice(["\n", "\r\n", "\r", "\n\r"])
    quote = rng.random() < 0.8

    def field(value):
        value = str(value)
        return '"' + value.replace('"', '""') + '"' if quote else value

    table = [names, *([row[name] for name in names] for row in rows)]
    return ending.join(delimiter.join(map(field, row)) for row in table)


def as_json_lines(rng, names, rows):
    """JSON lines."""
    return "\n".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows)


def as_json(rng, names, rows):
    """A JSON array, or something else that is JSON."""
    value = rng.choice([rows, rows, rows, {"rows": rows}, rows[:1], "text", 7, None])
    return json.dumps(value)


def as_text(rng, names, rows):
    """Lines of text."""
    return "\n".join(str(row["text"]) for row in rows) * rng.choice([1, 1, 20])


FORMATS = [as_csv, as_json_lines, as_json, as_text]


# ----------------------------------------------------------------------------------------- damage
def replace_values(rng, rows):
    """Values of the wrong type, missing values and odd strings in place of some of the values."""
    values = [None, True, 0, -1.5, float("nan"), float("inf"), 10**40, [], ["a"], {}, {"a": 1}]
    values += ["\ud800", "b\udfff", *ODD]
    for row in rows:
        for name in row:
            if rng.random() < 0.03:
                row[name] = rng.choice(values)
    if rows and rng.random() < 0.2:
        rng.choice(rows).pop(rng.choice(["text", "label"]), None)
    if rng.random() < 0.1:
        for row in rows:
            row["label"] = "one class"


def damage_text(rng, text):
    """The text with a part that is missing, repeated or replaced."""
    at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return rng.choice(
        [
            lambda: text[:at],
            lambda: text[at:],
            lambda: text[:at] + rng.choice(ODD) * rng.choice([1, 3]) + text[at:],
            lambda: text[:to] + text[at:],
            lambda: text.replace('"', "", 1),
            lambda: text.replace("\n", "\n\n\n"),
            lambda: text.replace('"label"', '"text"'),  # the same key or column twice
            lambda: text.replace("label", "text"),
            lambda: "[" * 50_000 + text,
            lambda: text[:at] + '{"a":' * 30_000 + text[at:],
            lambda: text[:at] + "y" * 1_000_000 + text[at:],
            lambda: ",".join(f"c{i}" for i in range(100_000)) + "\n" + text,
            lambda: text[:at] + "9" * 6000 + text[at:],
            lambda: "",
        ]
    )()


def damage_bytes(rng, content):
    """The bytes with some that are cut off, flipped, or added."""
    at = rng.randrange(len(content) + 1)
    return rng.choice(
        [
            lambda: content[:at],
            lambda: content[at:],
            lambda: content[:at] + rng.randbytes(rng.choice([1, 20])) + content[at:],
            lambda: content[:at] + b"\0" * rng.choice([1, 5000]) + content[at:],
            lambda: b"\xef\xbb\xbf" * rng.choice([1, 2]) + content,
            lambda: b"\xff\xfe" + content,
            lambda: rng.randbytes(3000),
            lambda: b"PAR1" + content + b"PAR1",
            lambda: content.replace(b"\n", b"\r"),
        ]
    )()


def write_file(rng, folder):
    """A data file and its encoding: of any format, under any name, with up to three faults."""
    names, rows = draw_rows(rng)
    faults = rng.choices(["values", "text", "bytes", "name", "encoding"], k=rng.randrange(4))
    if "values" in faults:
        replace_values(rng, rows)
    form = rng.choice(FORMATS)
    text = form(rng, names, [{**dict.fromkeys(names, ""), **row} for row in rows])
    if "text" in faults:
        text = damage_text(rng, text)
    encoding = rng.choice(["utf-8"] * 9 + ["utf-8-sig", "utf-16", "utf-16-le", "latin-1", "utf-32"])
    content = text.encode(encoding, "surrogatepass" if "utf" in encoding else "replace")
    if "bytes" in faults:
        content = damage_bytes(rng, content)
    usual = {as_csv: ".csv", as_json_lines: ".jsonl", as_json: ".json", as_text: ".txt"}[form]
    suffix = rng.choice(SUFFIXES) if "name" in faults else usual
    compressed = {".gz": gzip.compress, ".xz": lzma.compress}.get(suffix[-3:])
    if compressed is not None and rng.random() < 0.8:
        content = compressed(content)
        content = damage_bytes(rng, content) if rng.random() < 0.4 else content
    path = folder / f"{rng.choice(['rows', 'train', '[red]', 'a b'])}{suffix}"
    path.write_bytes(content)
    return path, None if "encoding" in faults else encoding


# ------------------------------------------------------------------------------------------ tasks
def draw_task(rng, path, encoding):
    """A function that reads the file as a task."""
    if encoding is None:
        encoding = rng.choice(["utf-8", "latin-1", "utf-16", "ascii", "cp1252", "gb18030", "idna"])
    tokenizer = rng.choice(["byte", "char", "char", "bpe"])
    data = path if rng.random() < 0.9 else path.parent  # a file, or the folder with only this file
    is_text = path.suffix in (".txt", ".md", "")
    if rng.random() < (0.1 if is_text else 0.8):
        given = {"missing": rng.choice(["error", "drop"]), "length": rng.choice([1, 16])}
        given |= {"text": rng.choice(["text"] * 5 + ["Text", "", "[/x]"])}
        return lambda: TextClassification(data, tokenizer=tokenizer, encoding=encoding, **given)
    column = None if is_text or rng.random() < 0.3 else rng.choice(["text", "label"])
    return lambda: LanguageModeling(
        data, tokenizer=tokenizer, encoding=encoding, text=column, length=4
    )


@contextmanager
def time_limit():
    """Fail a test that hangs, where the system has timers."""

    def stop(*_):
        raise TimeoutError(f"not read in {SECONDS} seconds")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_clean(build, path):
    """Read a task and its first examples; returns the error message, or None if it succeeds."""
    with time_limit():
        task, error = None, None
        try:
            task = build()
        except ValueError as raised:
            error = raised
        if error is not None:
            message = str(error)
            assert type(error) is ValueError, repr(error)  # not one of a codec
            assert str(path.parent) in message or "split" in message or "class" in message, message
            return message
        for split in ("train", "valid", "test"):
            task.render(task.example(split, 0)).to_text()
        return None


CHUNK = 50  # files of one test


@pytest.mark.parametrize("start", range(0, examples(300, 15_000), CHUNK))
def test_damaged_files(start, tmp_path):
    """Fails if a file ends in anything but a clean error, or if reading it hangs."""
    pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    for seed in range(start, start + CHUNK):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        path, encoding = write_file(rng, folder)
        build = draw_task(rng, path, encoding)
        try:
            read_clean(build, path)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {path.name}: {error!r}"[:500]) from error


def test_fuzz_reaches_both_ends(tmp_path):
    """Fails if the fuzz draws only files that are refused, or only files that can be read."""
    outcomes = []
    for seed in range(60):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        path, encoding = write_file(rng, folder)
        outcomes.append(read_clean(draw_task(rng, path, encoding), path))
    assert 8 < outcomes.count(None) < 52
    assert len({message[-20:] for message in outcomes if message is not None}) > 8
