"""Summarisation: a short text for a long one, such as the summary of a dialogue."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.config import LMHeadConfig, TokenInput
from regard.tasks.base import (
    LABELS,
    SPLITS,
    Example,
    ModelNeeds,
    Task,
    check_index,
    to_int64,
)
from regard.tasks.baselines import Baseline
from regard.tasks.metrics import Bits
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered, RenderedTable
from regard.tasks.rouge import REFERENCES, ROUGE_TYPES, Rouge
from regard.tasks.row_splits import (
    MISSING,
    SplitRows,
    check_not_empty,
    copy_notes,
    hash_bytes,
    is_blank,
    to_text,
)
from regard.tasks.rows import RowIterator, Rows, read_rows
from regard.tasks.text_codes import codes_of_texts, texts_of_codes
from regard.tasks.tokenizers import EMPTY, Tokenizer, tokenizer_from_dict, train_tokenizer
from regard.tasks.translation import TEXT, TextToTextProcessor

LONGEST = "longest line"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class Document(NamedTuple):
    """A text and its summaries; the first is the one to learn."""

    text: str
    summaries: list[str]


class EncodedDocument(NamedTuple):
    """The tokens of a text and of its first summary, truncated, all summaries, and a hash."""

    source: np.ndarray
    target: np.ndarray
    summaries: list[str]
    hash: int


class SummaryProcessor(TextToTextProcessor):
    """Long texts for an encoder, and their summaries from a decoder; see `TextToTextProcessor`.

    Args:
        tokenizer: Converts texts and summaries to tokens.
        source_length: Maximum number of tokens of a text; longer ones are truncated.
        target_length: Maximum number of tokens of a summary, with its end.
        beams: Hypotheses of beam search; 1 is greedy search.
    """

    def __init__(
        self, tokenizer: Tokenizer, source_length: int, target_length: int, beams: int = 1
    ) -> None:
        check_int(1, source_length=source_length)
        check_int(2, target_length=target_length)
        super().__init__(tokenizer, target_length, beams)
        self.source_length = source_length

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        return {
            "tokenizer": self.tokenizer.to_dict(),
            "source_length": self.source_length,
            "target_length": self.length,
            "beams": self.beams,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SummaryProcessor:
        """The processor that `to_dict` described."""
        try:
            tokenizer = tokenizer_from_dict(content["tokenizer"])
            lengths = content["source_length"], content["target_length"]
            return cls(tokenizer, *lengths, content["beams"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of summaries: {error!r}") from None


class Summarisation(Task):
    """Write a summary of each text.

    The metrics are ROUGE-1, -2 and -L of the summaries that the model writes, and the cross-entropy
    of the first reference in bits per byte. Of several references the scores are averaged.

    Splits are files named train, valid (or dev) and test. Missing splits get one of ten training
    rows, chosen by a hash.

    Args:
        data: CSV, JSON lines, a JSON array or Parquet, or hf:name; or a folder of them.
        source: The column of the text.
        target: The column of the summary, or of a list of summaries. A row without it may have
            several in numbered columns: summary1, summary2, ...
        source_length: Maximum number of tokens of a text; longer ones are truncated.
        target_length: Maximum number of tokens of a summary, with its end.
        tokenizer: "byte", "char" or "bpe", learned from texts and summaries of the training split.
        vocab_size: Number of tokens for "bpe".
        references: Of several references, the "mean" score or that of the "best".
        lead: Number of lines, or of sentences if a text has one line, of the baseline that copies
            the start of the text.
        beams: Hypotheses of beam search; 1 is greedy search.
        missing: What to do with rows without text or summary: "drop" or "error".
        encoding: Encoding of the files.
        seed: Seed of the splits.
    """

    processor: SummaryProcessor

    def __init__(
        self,
        data: str | Path,
        *,
        source: str = "dialogue",
        target: str = "summary",
        source_length: int = 512,
        target_length: int = 64,
        tokenizer: str = "bpe",
        vocab_size: int | None = None,
        references: str = "mean",
        lead: int = 3,
        beams: int = 1,
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_int(0, seed=seed)
        check_int(1, lead=lead)
        if source == target:
            raise ValueError(f"source and target are both {source!r}: name two columns.")
        rows = read_rows(data, encoding)
        self.lead = lead
        self.source = SplitRows(
            {
                split: Rows(partial(collect_references, each, target))
                for split, each in rows.items()
            },
            (source, target),
            lambda where, values: Document(
                to_text(where, source, values[0]),
                [to_text(where, target, each) for each in values[1]],
            ),
            drop=missing == "drop",
            seed=seed,
        )
        trained = train_tokenizer(
            tokenizer,
            lambda: (
                text
                for _, document in self.source.walk("train")
                for text in (document.text, document.summaries[0])
            ),
            vocab_size,
        )
        self.processor = SummaryProcessor(trained, source_length, target_length, beams)
        units = torch.as_tensor([*trained.token_units().tolist(), 0, 0])
        self.metrics = (
            *(Rouge(name, references) for name in ROUGE_TYPES),
            Bits(trained.unit, units),
        )
        self.truncated = {"texts": 0, "summaries": 0}
        self.unknown = 0
        self.documents = {split: self._encode_split(split) for split in SPLITS}
        self.lengths = {
            split: np.array([(len(each.source), len(each.target)) for each in found])
            for split, found in self.documents.items()
        }

    def _encode_split(self, split: str) -> list[EncodedDocument]:
        """The tokens of a split."""
        processor, found = self.processor, []
        dtype = processor.tokenizer.dtype
        for _, document in self.source.walk(split):
            source = processor.tokenizer.encode(document.text)
            target = processor.tokenizer.encode(document.summaries[0])
            if processor.tokenizer.unit == "character":
                self.unknown += EMPTY in source
                self.unknown += EMPTY in target
            self.truncated["texts"] += len(source) > processor.source_length
            self.truncated["summaries"] += len(target) >= processor.length
            content = "\0".join((document.text, document.summaries[0]))
            found.append(
                EncodedDocument(
                    source[: processor.source_length].astype(dtype),
                    target[: processor.length].astype(dtype),
                    document.summaries,
                    hash_bytes(content.encode("utf-8", "surrogatepass")),
                )
            )
        check_not_empty(split, len(found))
        return found

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder and a decoder that share the token embeddings."""
        return ModelNeeds(
            kind="seq2seq",
            input=TokenInput(vocab_size=self.processor.vocab_size),
            head=LMHeadConfig(),
            length=max(self.processor.source_length, self.processor.length),
        )

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.documents[split])

    def lengths_of(self, split: str) -> np.ndarray:
        """See `Task`: of the text and of the summary."""
        return self.lengths[split]

    def example(self, split: str, index: int) -> Example:
        """See `Task`: the decoder reads the start token and the summary, one token behind it."""
        check_index(split, index, self.size(split))
        document, length = self.documents[split][index], self.processor.length
        target = document.target.tolist()
        read = [self.processor.start, *target][:length]
        write = [*target, self.processor.end][:length]
        return Example(
            {"source": to_int64(document.source), "target": to_int64(read)},
            {LABELS: to_int64(write), REFERENCES: codes_of_texts(document.summaries)},
        )

    # --------------------------------------------------------------------------------- baselines
    def baselines(self) -> Mapping[str, Baseline]:
        """See `Task`: the start of the text, and its longest line or sentence."""
        lead, longest = self.lead, partial(max, key=len)
        return {
            f"lead-{lead}": lambda test: self._score_lines(test, lambda lines: lines[:lead]),
            LONGEST: lambda test: self._score_lines(test, lambda lines: [longest(lines)]),
        }

    def _score_lines(self, test: Sequence[int], choose: Callable[[list[str]], list[str]]) -> Tensor:
        """Statistics of the first metric for some lines of each text."""
        assert isinstance(self.metric, Rouge)
        documents = dict.fromkeys(test, Document("", []))
        for index, (_, document) in enumerate(self.source.walk("test")):
            if index in documents:
                documents[index] = document
        texts = ["\n".join(choose(split_lines(each.text))) for each in documents.values()]
        return self.metric.score_texts(texts, [each.summaries for each in documents.values()])

    # ----------------------------------------------------------------------------- for people
    def notes(self) -> list[str]:
        """See `Task`."""
        hashes = {
            split: np.array([each.hash for each in found], dtype=np.uint64)
            for split, found in self.documents.items()
        }
        notes = [*self.source.notes(), *copy_notes(hashes, "texts")]
        total = sum(map(self.size, SPLITS))
        lengths = self.processor.source_length, self.processor.length
        for (name, count), length in zip(self.truncated.items(), lengths, strict=True):
            if count:
                notes.append(
                    f"{count:,} of {total:,} {name} have more than {length:,} tokens and are "
                    "truncated."
                )
        if self.unknown:
            notes.append(
                f"{self.unknown:,} texts and summaries have characters that do not occur in the "
                "training split."
            )
        return notes

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The text, its summaries, and what the model wrote."""
        text = self.processor.decode_text(example.inputs["source"].tolist())
        rows = [("text", text)]
        rows += [("summary", each) for each in texts_of_codes(example.targets[REFERENCES])]
        if prediction is not None:
            rows.append(("predicted", prediction[TEXT]))
        return RenderedTable(("", "text"), rows)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> SummaryProcessor:
        """See `Task`."""
        return SummaryProcessor.from_dict(content)


def collect_references(rows: Rows, target: str) -> RowIterator:
    """Rows with a list of summaries in the column `target`, from one text, a list, or numbered
    columns such as summary1 and summary2."""
    numbered = re.compile(rf"{re.escape(target)}_?(\d+)")
    for where, row in rows:
        found = row.get(target)
        if target not in row:
            columns = sorted(
                (int(match[1]), name) for name in row if (match := numbered.fullmatch(str(name)))
            )
            if not columns:
                yield where, row  # without the column, which is told to the user
                continue
            found = [row[name] for _, name in columns]
        summaries = found if isinstance(found, list) else [found]
        yield where, {**row, target: [each for each in summaries if not is_blank(each)] or None}


def split_lines(text: str) -> list[str]:
    """The lines of a text, such as the utterances of a dialogue; of one line, its sentences."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines if len(lines) > 1 else SENTENCE_END.split(text.strip())
