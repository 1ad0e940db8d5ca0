"""Named entities: the spans of a text that name a person, a place, a product, ..."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import check_choice, check_int, did_you_mean
from regard.tasks.base import SPLITS
from regard.tasks.baselines import Baseline
from regard.tasks.conll import LABELS as LABEL_COLUMN, TOKENS, read_sentences
from regard.tasks.entities import OUTSIDE, SAME_AS, TAG, Entity, EntityF1, find_entities
from regard.tasks.metrics import Accuracy
from regard.tasks.row_splits import (
    MISSING,
    SplitRows,
    UnusableRow,
    check_not_empty,
    to_label,
    to_text,
)
from regard.tasks.rows import Row, RowIterator, Rows, get_column
from regard.tasks.tagging import parse_sentence
from regard.tasks.tokenizers import replace_surrogates
from regard.tasks.word_encoders import FEATURES, split_text, word_shape
from regard.tasks.word_labels import OVERFLOWS, Sentence, WordLabelling

TEXT_COLUMN = "text"
ENTITY_COLUMNS = ("entities", "spans", "label", "labels")  # of spaCy, Prodigy and doccano
SPAN_KEYS = (("start", "start_offset"), ("end", "end_offset"), ("label", "type"))
GAZETTEER, CRF = "gazetteer", "CRF"
MAX_TYPES = 500
NEIGHBOURS = (-2, -1, 1, 2)  # whose features the CRF sees
CRF_ITERATIONS = 100


class Span(NamedTuple):
    """Characters start .. end - 1 of a text name an entity of this type."""

    start: int
    end: int
    kind: str


class NamedEntities(WordLabelling):
    """Find the names in a text: entities of the types that the data marks.

    The first metric is the F1 of entities with exactly the right words and type. Whatever the data
    has, the model predicts IOB2 tags: B-type at the first word of an entity, I-type inside, else O.

    Splits are files named train, valid (or dev) and test. Missing splits get one of ten training
    sentences, chosen by a hash.

    Args:
        data: A CoNLL file (a word and its tag in each line, a blank line after each sentence);
            JSON lines, a JSON array, Parquet or hf:name, with texts and the offsets of their
            entities, or with lists of words and tags; or a folder of them.
        text: Column of the text, if entities have offsets.
        entities: Column of the entities: [{"start": 4, "end": 9, "label": "place"}, ...], or
            [[4, 9, "place"], ...]. None: the first of entities, spans, label, labels.
        tokens: Column with the list of words, in rows with tags.
        labels: Column with the list of tags, in rows with tags.
        length: Maximum number of tokens that the model reads at once.
        tokenizer: "features" for one token per word, made of the word, its shape and its affixes;
            or "bpe", "char" or "byte" for word pieces.
        overflow: Longer sentences: "stride" reads them in windows that overlap, "truncate" leaves
            the words after the first `length` tokens out.
        missing: What to do with rows that cannot be used, such as those with offsets outside of the
            text: "drop" or "error".
        encoding: Encoding of the files.
        seed: Seed of the splits.
    """

    def __init__(
        self,
        data: str | Path,
        *,
        text: str = TEXT_COLUMN,
        entities: str | None = None,
        tokens: str = TOKENS,
        labels: str = LABEL_COLUMN,
        length: int = 128,
        tokenizer: str = FEATURES,
        overflow: str = "stride",
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_choice("overflow", overflow, OVERFLOWS)
        check_int(0, seed=seed)
        check_int(1, length=length)
        rows = read_sentences(data, encoding, tokens, labels)
        first = next(chain.from_iterable(rows.values()), None)
        if first is None:
            raise ValueError(f"{data} has no sentence.")
        names = {labels, *(ENTITY_COLUMNS if entities is None else [entities])}
        marked = (each for each in chain.from_iterable(rows.values()) if names & each[1].keys())
        first = next(marked, first)  # the first rows may have no entity, nor the column
        # the places of sentences with a peculiarity, as sets: the data is read several times
        self.rejected: set[str] = set()
        self.irregular: dict[str, str] = {}
        self.widened: set[str] = set()
        self.overlapping: set[str] = set()
        columns = find_columns(*first, text, entities, tokens, labels)
        has_spans = columns[0] == text and columns != (tokens, labels)
        source: SplitRows[Sentence] = SplitRows(
            {split: Rows(partial(self._accepted_rows, each)) for split, each in rows.items()},
            columns,
            partial(self._parse_spans if has_spans else self._parse_tags, *columns),
            drop=missing == "drop",
            seed=seed,
        )
        kinds = {split: _collect_types(source, split) for split in SPLITS}
        if not kinds["train"]:
            raise ValueError(
                f"No training sentence has an entity: is the tag in the last column of {data}?"
            )
        types = sorted(set().union(*kinds.values()))
        if len(types) > MAX_TYPES:
            raise ValueError(
                f"There are {len(types):,} types of entities, such as {types[0]!r}: expected at "
                f"most {MAX_TYPES}."
            )
        tags = [OUTSIDE, *(f"{prefix}-{kind}" for kind in types for prefix in "BI")]
        super().__init__(source, tags, tokenizer=tokenizer, length=length, overflow=overflow)
        self.metrics = (EntityF1(tags), Accuracy())

    # ----------------------------------------------------------------------------------- reading
    def _accepted_rows(self, rows: Rows) -> RowIterator:
        """The rows, without those that an annotator rejected or skipped in Prodigy."""
        for where, row in rows:
            if row.get("answer", "accept") == "accept":
                yield where, row
            else:
                self.rejected.add(where)

    def _parse_tags(self, tokens: str, labels: str, where: str, values: list[Any]) -> Sentence:
        """A sentence from words and tags."""
        words, tags = parse_sentence(where, tokens, labels, values)
        before = OUTSIDE
        for number, (word, tag) in enumerate(zip(words, tags, strict=True), 1):
            place = f"{where}: word {number}, {word!r:.40},"
            if tag != OUTSIDE and not TAG.fullmatch(tag):
                raise ValueError(
                    f"{place} has the label {tag!r:.40}, which is no tag of an entity: expected O, "
                    "B-type or I-type (or E-, S-, L- or U-type). For other labels of words, use "
                    "the task tag."
                )
            continues = SAME_AS.get(tag[0], tag[0]) in "IE" and tag != OUTSIDE
            if continues and (before[0] not in "BI" or before[2:] != tag[2:]):
                self.irregular.setdefault(where, f"{place} has {tag} after {before}")
            before = tag
        return Sentence(words, iob2_tags(len(words), find_entities(tags)))

    def _parse_spans(self, text: str, entities: str, where: str, values: list[Any]) -> Sentence:
        """A sentence from a text and the offsets of its entities."""
        content = to_text(where, text, values[0])
        if not isinstance(values[1], list):
            raise ValueError(
                f"{where}: {entities!r} must be a list of entities with start, end and label, not "
                f"{type(values[1]).__name__}."
            )
        spans = [parse_span(where, entities, content, each) for each in values[1]]
        found = split_text(content)
        if not found.spans:
            raise UnusableRow(f"{text!r} has no word.")
        chosen: list[Entity] = []
        free = [True] * len(found.spans)
        for span in sorted(spans, key=lambda each: (each.start - each.end, each.start)):
            inside = [
                number
                for number, (start, end) in enumerate(found.spans)
                if start < span.end and end > span.start
            ]
            if not inside or not all(free[number] for number in inside):
                self.overlapping.add(where)
                continue
            first, last = inside[0], inside[-1] + 1
            if (found.spans[first][0], found.spans[last - 1][1]) != (span.start, span.end):
                self.widened.add(where)
            free[first:last] = [False] * (last - first)
            chosen.append(Entity(first, last, span.kind))
        return Sentence(found.words, iob2_tags(len(found.spans), chosen))

    def notes(self) -> list[str]:
        """See `Task`."""
        notes = super().notes()
        if self.rejected:
            notes.append(
                f"{len(self.rejected):,} rows with another answer than accept were left out."
            )
        if self.irregular:
            example = next(iter(self.irregular.values()))
            notes.append(
                f"{len(self.irregular):,} sentences have tags that continue no entity, for example "
                f"{example}: an entity begins there, as in IOB1 and in conlleval."
            )
        if self.widened:
            notes.append(
                f"{len(self.widened):,} texts have entities that begin or end inside a word: they "
                "are extended to the whole word."
            )
        if self.overlapping:
            notes.append(
                f"{len(self.overlapping):,} texts have entities that overlap: the longest is kept."
            )
        return notes

    # --------------------------------------------------------------------------------- baselines
    def baselines(self) -> Mapping[str, Baseline]:
        """See `Task`: also the names of the training split, and a conditional random field."""
        return {**super().baselines(), GAZETTEER: self._gazetteer_score, CRF: self._crf_score}

    def _gazetteer_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of the longest matches of training entities, with their usual type."""
        counts: dict[tuple[str, ...], Counter[str]] = {}
        for _, (words, tags) in self.source.walk("train"):
            for start, end, kind in find_entities(tags):
                counts.setdefault(tuple(words[start:end]), Counter())[kind] += 1
        usual = {name: count.most_common(1)[0][0] for name, count in counts.items()}
        longest = max(map(len, usual))

        def label(words: Sequence[str]) -> list[str]:
            found, start = [], 0
            while start < len(words):
                ends = range(min(len(words), start + longest), start, -1)
                end = next((each for each in ends if tuple(words[start:each]) in usual), None)
                if end is not None:
                    found.append(Entity(start, end, usual[tuple(words[start:end])]))
                start = end or start + 1
            return iob2_tags(len(words), found)

        return self.score_labels(test, label)

    def _crf_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of a linear-chain conditional random field (Lafferty et al. 2001)."""
        try:
            import sklearn_crfsuite
        except ImportError:
            raise ImportError(
                f"{CRF} needs the package sklearn-crfsuite: pip install 'regard[text]'"
            ) from None
        model = sklearn_crfsuite.CRF(
            c1=0.1, c2=0.1, max_iterations=CRF_ITERATIONS, all_possible_transitions=True
        )
        train = [row for _, row in self.source.walk("train")]
        model.fit([crf_features(row.words) for row in train], [row.labels for row in train])
        return self.score_labels(test, lambda words: model.predict_single(crf_features(words)))


def find_columns(
    where: str, row: Row, text: str, entities: str | None, tokens: str, labels: str
) -> tuple[str, str]:
    """The two columns that mark entities, by a row: words and tags, or text and spans."""
    if tokens not in row and text not in row:
        raise ValueError(
            f"{where} has neither a column {text!r} with a text nor a column {tokens!r} with "
            f"words: {did_you_mean(text, map(str, row))}"
        )
    words = row.get(tokens)
    has_words = isinstance(words, list) and not any(isinstance(word, dict) for word in words)
    if entities is None and (has_words or text not in row):
        get_column(row, labels, where)
        return tokens, labels
    get_column(row, text, where)
    if entities is not None:
        get_column(row, entities, where)
        return text, entities
    for name in ENTITY_COLUMNS:
        if name in row:
            return text, name
    raise ValueError(
        f"{where} has no column of entities: expected one of {', '.join(ENTITY_COLUMNS)}, or "
        "name it with entities=..."
    )


def parse_span(where: str, name: str, text: str, entry: Any) -> Span:
    """An entity of a text from JSON, without white space around it."""
    values: list[Any] = list(entry) if isinstance(entry, list | tuple) else []
    if isinstance(entry, dict):
        values = [next((entry[key] for key in keys if key in entry), None) for keys in SPAN_KEYS]
    if len(values) != 3 or any(type(each) is not int for each in values[:2]) or not values[2]:
        raise UnusableRow(
            f"{entry!r:.60} in {name!r} is no entity: expected start, end and label, such as "
            '{"start": 4, "end": 9, "label": "place"}.'
        )
    start, end = values[:2]
    if not 0 <= start < end <= len(text) or not text[start:end].strip():
        raise UnusableRow(
            f"the entity from {start} to {end} is not in the text of {len(text)} characters."
        )
    start += len(text[start:end]) - len(text[start:end].lstrip())
    end -= len(text[start:end]) - len(text[start:end].rstrip())
    return Span(start, end, to_label(where, name, values[2]))


def iob2_tags(count: int, entities: Sequence[Entity]) -> list[str]:
    """The tags of `count` words with these entities."""
    tags = [OUTSIDE] * count
    for start, end, kind in entities:
        tags[start:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - start - 1)]
    return tags


def crf_features(words: Sequence[str]) -> list[dict[str, str | bool]]:
    """The features of each word for the CRF: its letters and shape, and those of its neighbours."""
    words = [replace_surrogates(word) for word in words]
    own: list[dict[str, str | bool]] = []
    for word in words:
        lower = word.lower()
        features: dict[str, str | bool] = {"word": lower, "shape": word_shape(word)}
        for size in (1, 2, 3):
            features |= {f"prefix{size}": lower[:size], f"suffix{size}": lower[-size:]}
        own.append(features)
    rows = []
    for place, (word, features) in enumerate(zip(words, own, strict=True)):
        row = features | {
            "bias": True,
            "upper": word.isupper(),
            "title": word.istitle(),
            "digit": word.isdigit(),
            "first": place == 0,
            "last": place == len(words) - 1,
        }
        for offset in NEIGHBOURS:
            if 0 <= place + offset < len(words):
                other = own[place + offset]
                row |= {f"{offset}:word": other["word"], f"{offset}:shape": other["shape"]}
        rows.append(row)
    return rows


def _collect_types(source: SplitRows[Sentence], split: str) -> set[str]:
    """The types of the entities of a split; a split without sentences is a ValueError."""
    found: set[str] = set()
    count = 0
    for _, row in source.walk(split):
        found.update(tag[2:] for tag in row.labels if tag != OUTSIDE)
        count += 1
    check_not_empty(split, count)
    return found
