"""Documents from a file, and their embeddings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.device import resolve_device
from regard.tasks.corpus import TEXT_SUFFIXES
from regard.tasks.files import existing_path, file_type, open_text
from regard.tasks.processors import TextProcessor
from regard.tasks.row_splits import is_blank, to_label, to_text
from regard.tasks.rows import HUGGING_FACE, get_column, read_rows
from regard.tasks.tokenizers import replace_surrogates
from regard.train.inference import TrainedRun, load_run, mean_tokens

Embedder = Callable[[Sequence[str]], Tensor]  # documents -> (n, d)
SPEC_FILE = "spec.json"  # of a run
MAX_TOKENS = 256  # of a document that a Hugging Face model reads
WORDS = re.compile(r"\S+\s*")


class Documents(NamedTuple):
    """Documents, the label of each or None, and sentences about what was left out."""

    texts: list[str]
    labels: list[str] | None
    notes: list[str]


def read_documents(
    data: str | Path, *, text: str = "text", label: str | None = None, encoding: str = "utf-8"
) -> Documents:
    """Read all documents of rows, or the lines of a text file.

    Empty documents are left out, as are rows without a label if there are labels; both and copies
    are counted in the notes.

    Args:
        data: Rows (CSV, JSON, Parquet, hf:name), a folder of them, or a text file.
        text: The column of the text.
        label: The column of the label. None: there are no labels.
        encoding: Encoding of the files.
    """
    texts, labels, empty = list[str](), list[str](), 0
    for where, value, name in _iterate_values(data, text, label, encoding):
        if is_blank(value) or (label is not None and is_blank(name)):
            empty += 1
            continue
        texts.append(to_text(where, text, value))
        if label is not None:
            labels.append(to_label(where, label, name))
    if not texts:
        raise ValueError(f"{data} has no document: every text is empty.")
    notes = []
    if empty:
        missing = "text" if label is None else "text or label"
        notes.append(f"{empty:,} rows without {missing} were left out.")
    if copies := len(texts) - len(set(texts)):
        notes.append(f"{copies:,} of {len(texts):,} documents are copies of others; they are kept.")
    return Documents(texts, labels if label is not None else None, notes)


def _iterate_values(
    data: str | Path, text: str, label: str | None, encoding: str
) -> Iterator[tuple[str, Any, Any]]:
    """Where a document is, its text and its label: of the rows of all splits, or the lines of a
    text file."""
    if not str(data).startswith(HUGGING_FACE):
        path = existing_path(data)
        if path.is_file() and file_type(path) in TEXT_SUFFIXES:
            if label is not None:
                raise ValueError(f"{path} has lines of text, which have no label: give rows.")
            with open_text(path, encoding) as file:
                for number, line in enumerate(file, 1):
                    yield f"line {number} of {path}", line.rstrip("\r\n"), None
            return
    for rows in read_rows(data, encoding).values():
        for where, row in rows:
            name = None if label is None else get_column(row, label, where)
            yield where, get_column(row, text, where), name


def embed_documents(run: TrainedRun, documents: Sequence[str], *, batch_size: int = 32) -> Tensor:
    """The embedding of each document, (n, d).

    A document with more tokens than the model was trained with is cut into pieces of as many words
    each that fit; its embedding is the mean of theirs.
    """
    if not isinstance(run.processor, TextProcessor):
        raise ValueError(
            f"Topics need a run that reads texts, such as one of the task mlm, lm or classify; the "
            f"task of {run.folder} is {run.spec.task.name!r}."
        )
    pieces = [split_text(text, run.processor) for text in documents]
    vectors = run.embed([piece for each in pieces for piece in each], batch_size=batch_size)
    parts = vectors.split([len(each) for each in pieces])
    return torch.stack([part.mean(0) for part in parts])


def split_text(text: str, processor: TextProcessor) -> list[str]:
    """A text in pieces of as many words each, of at most `processor.length` tokens."""
    words = WORDS.findall(text)
    count = -(-len(processor.tokenizer.encode(text)) // processor.length)
    while 1 < count <= len(words):
        ends = [len(words) * i // count for i in range(count + 1)]
        pieces = ["".join(words[i:j]) for i, j in itertools.pairwise(ends)]
        if max(len(processor.tokenizer.encode(piece)) for piece in pieces) <= processor.length:
            return pieces
        count += 1
    return [text]


def load_embedder(
    source: str,
    *,
    device: str | torch.device = "auto",
    plugins: Iterable[str | Path] = (),
    batch_size: int = 32,
) -> Embedder:
    """A function that embeds documents.

    Args:
        source: Folder of a finished run, or a Hugging Face encoder: a folder, a Python package that
            contains a model, or a name on the Hub. Of such a model, a document is the mean of its
            first 256 tokens.
    """
    folder = Path(source).expanduser()
    if folder.is_dir() and ((folder / SPEC_FILE).exists() or not (folder / "config.json").exists()):
        run = load_run(folder, device=device, plugins=plugins)
        return lambda documents: embed_documents(run, documents, batch_size=batch_size)
    from regard.hf import load_transformers_model

    where = resolve_device(device)
    model, tokenizer = load_transformers_model(source)
    if tokenizer is None:
        raise ValueError(f"{source} has no tokenizer: it cannot read documents.")
    encoder: Any = getattr(model, "base_model", model).to(where)
    most = min(MAX_TOKENS, getattr(encoder.config, "max_position_embeddings", MAX_TOKENS))

    @torch.no_grad()
    def embed(documents: Sequence[str]) -> Tensor:
        order = sorted(range(len(documents)), key=lambda i: len(documents[i]))
        vectors: dict[int, Tensor] = {}
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            encoded = tokenizer(
                [replace_surrogates(documents[i]) for i in chosen],
                padding=True,
                truncation=True,
                max_length=most,
                return_tensors="pt",
            ).to(where)
            hidden = encoder(**encoded).last_hidden_state
            means = mean_tokens(hidden, encoded["attention_mask"].bool())
            vectors.update(zip(chosen, means, strict=True))
        return torch.stack([vectors[i] for i in range(len(documents))])

    return embed
