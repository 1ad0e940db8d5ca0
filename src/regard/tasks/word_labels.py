"""What `tag` and `ner` share: sentences of words with a label each, and the processor for them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.losses import IGNORE_INDEX
from regard.tasks.base import (
    LABELS,
    SPLITS,
    Batch,
    Example,
    ModelNeeds,
    TokenTask,
    check_index,
    pad_sequences,
    to_int64,
)
from regard.tasks.baselines import Baseline
from regard.tasks.entities import OUTSIDE, are_tags, find_entities
from regard.tasks.files import ArrayBuilder
from regard.tasks.processors import Prediction, Processor
from regard.tasks.rendering import Rendered, RenderedParts, RenderedText
from regard.tasks.row_splits import SplitRows, copy_notes, hash_bytes
from regard.tasks.text_codes import codes_of_texts, texts_of_codes
from regard.tasks.tokenizers import unknown_notes
from regard.tasks.word_encoders import (
    SplitText,
    Window,
    WordEncoder,
    WordPieces,
    join_words,
    split_text,
    split_windows,
    train_word_encoder,
    word_encoder_from_dict,
)

if TYPE_CHECKING:
    from regard.models import Model

WORD_LABEL = "most frequent label of the word"
OVERFLOWS = ("stride", "truncate")
WINDOWS_PER_BATCH = 32
WORDS = "words"  # target: the words of an example
TEXT, WORD_STARTS, WORD_ENDS = "text", "word_starts", "word_ends"  # inputs: a raw text, its words


class Sentence(NamedTuple):
    """Words (n) and their labels (n)."""

    words: list[str]
    labels: list[str]


class WordTagger(Processor):
    """Words for a model that labels the first token of each.

    Args:
        encoder: Converts words to tokens.
        length: Maximum number of tokens that the model reads at once.
        labels: Names of the classes.
        overflow: Longer texts: "stride" reads them in windows that overlap, "truncate" leaves the
            words after the first `length` tokens out.
    """

    def __init__(
        self, encoder: WordEncoder, length: int, labels: Sequence[str], overflow: str
    ) -> None:
        check_choice("overflow", overflow, OVERFLOWS)
        self.encoder, self.length, self.labels = encoder, length, tuple(labels)
        self.overflow = overflow
        self.has_entities = are_tags(self.labels)

    # --------------------------------------------------------------------------------- encoding
    def encode_words(self, words: Sequence[str]) -> list[np.ndarray]:
        """The tokens (p, rows) of each word."""
        return [self.encoder.encode(word)[: self.length] for word in words]

    def windows(
        self, sizes: Sequence[int], can_cut: Callable[[int], bool] = lambda place: True
    ) -> list[Window]:
        """The windows that are read of words with so many tokens; one to truncate."""
        windows = split_windows(sizes, self.length, can_cut)
        if self.overflow == "truncate" and len(windows) > 1:
            end = windows[0].end
            return [Window(0, end, 0, end)]
        return windows

    def to_input(self, pieces: Sequence[np.ndarray]) -> Tensor:
        """The tokens of words as an input of the model: (n), or (rows, n)."""
        tokens = to_int64(np.concatenate(pieces))
        return tokens[:, 0] if self.encoder.rows == 1 else tokens.T

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: a text to split into words and punctuation, or a list of words.

        The text and the places of its words come with the tokens, for the offsets of predictions.
        """
        found = self._split(raw)
        spans = found.spans or [(0, 0)]  # the model needs a token, of which nothing is told
        pieces = self.encode_words(found.words or ["."])
        if self.overflow == "truncate":
            pieces = pieces[: self.windows([len(each) for each in pieces])[0].end]
        return {
            "x": self.to_input(pieces),
            TEXT: codes_of_texts([found.text]),
            WORD_STARTS: torch.tensor([start for start, _ in spans]),
            WORD_ENDS: torch.tensor([end for _, end in spans]),
        }

    def _split(self, raw: Any) -> SplitText:
        """The words of a text, or of a list of words."""
        if isinstance(raw, str):
            return split_text(raw)
        if isinstance(raw, Sequence) and all(isinstance(word, str) for word in raw):
            return join_words(raw)
        raise TypeError(f"Expected a text or a list of words, not {raw!r:.60}.")

    def truncates(self, raw: Any, /) -> bool:
        """See `Processor`."""
        sizes = [len(each) for each in self.encode_words(self._split(raw).words)]
        return self.overflow == "truncate" and self.windows(sizes)[0].end < len(sizes)

    # ------------------------------------------------------------------------------- predicting
    def predict(self, model: Model, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`; texts of more than `length` tokens are read in windows."""
        x, mask = inputs["x"], inputs.get("mask")
        assert x is not None
        if x.shape[-1] <= self.length:
            return self.decode(model(x=x, mask=mask), inputs)
        return self.decode(self._read_windows(model, x, mask), inputs)

    def _read_windows(self, model: Model, x: Tensor, mask: Tensor | None) -> Tensor:
        """The output (b, n, c) of a model for inputs of any length."""
        parts = []  # the row, the tokens that are read, and those whose output is kept
        for row, length in enumerate(_lengths(x, mask)):
            places = [*self.encoder.starts(x[row, ..., :length]), length]
            for window in split_windows(np.diff(places).tolist(), self.length):
                parts.append((row, *(places[each] for each in window)))
        output = torch.zeros(len(x), x.shape[-1], len(self.labels), device=x.device)
        for first in range(0, len(parts), WINDOWS_PER_BATCH):
            chunk = parts[first : first + WINDOWS_PER_BATCH]
            tokens, read = pad_sequences("x", [x[row, ..., i:j] for row, i, j, _, _ in chunk])
            read = None if read is None else read.to(x.device)
            logits = model(x=tokens, mask=read)
            for number, (row, start, _, begin, end) in enumerate(chunk):
                output[row, begin:end] = logits[number, begin - start : end - start]
        return output

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the words, their labels, and the spans of entities in the text."""
        x, codes = inputs["x"], inputs.get(TEXT)
        starts, ends = inputs.get(WORD_STARTS), inputs.get(WORD_ENDS)
        assert x is not None
        texts = []
        for row, length in enumerate(_lengths(x, inputs.get("mask"))):
            tokens = x[row, ..., :length]
            if codes is None or starts is None or ends is None:
                texts.append(join_words(self.encoder.decode(tokens)))
                continue
            count = len(self.encoder.starts(tokens))
            spans = zip(starts[row, :count].tolist(), ends[row, :count].tolist(), strict=True)
            texts.append(SplitText(texts_of_codes(codes[row])[0], list(spans)))
        return self.label_texts(output, inputs, texts)

    def label_texts(
        self, output: Tensor, inputs: Mapping[str, Tensor | None], texts: Sequence[SplitText]
    ) -> list[Prediction]:
        """The predictions for texts, from the output (b, n, c) for their words."""
        x = inputs["x"]
        assert x is not None
        probabilities, classes = output.float().softmax(-1).max(-1)
        predictions = []
        for row, length in enumerate(_lengths(x, inputs.get("mask"))):
            starts = self.encoder.starts(x[row, ..., :length])
            labels = [self.labels[each] for each in classes[row, starts].tolist()]
            scores = probabilities[row, starts].tolist()
            predictions.append(self.describe(texts[row], labels, scores))
        return predictions

    def describe(
        self, text: SplitText, labels: Sequence[str], scores: Sequence[float] | None = None
    ) -> Prediction:
        """A text with its words, their labels, and the spans of entities with offsets in it.

        The score of a span is the mean probability of the labels of its words.
        """
        if not any(end for _, end in text.spans):  # there is no word
            text, labels = SplitText(text.text, []), []
        spans = []
        for first, last, name in self.find_spans(labels):
            start, end = text.spans[first][0], text.spans[last - 1][1]
            span = {"start": start, "end": end, "label": name, "text": text.text[start:end]}
            if scores is not None:
                span["score"] = sum(scores[first:last]) / (last - first)
            spans.append(span)
        return {"text": text.text, "words": text.words, "labels": list(labels), "spans": spans}

    def find_spans(self, labels: Sequence[str]) -> list[tuple[int, int, str]]:
        """The entities; or every word that has a label, if the labels mark no entities."""
        if self.has_entities:
            return [(each.start, each.end, each.kind) for each in find_entities(labels)]
        return [(i, i + 1, label) for i, label in enumerate(labels) if label != OUTSIDE]

    def render(self, prediction: Prediction) -> Rendered:
        """See `Processor`: the text with its spans."""
        spans = [(span["start"], span["end"], span["label"]) for span in prediction["spans"]]
        return RenderedText(prediction[TEXT], spans)

    # ----------------------------------------------------------------------------------- saving
    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        return {
            "tokenizer": self.encoder.to_dict(),
            "length": self.length,
            "labels": list(self.labels),
            "overflow": self.overflow,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> WordTagger:
        """The processor that `to_dict` described."""
        try:
            encoder = word_encoder_from_dict(content["tokenizer"])
            labels = list(map(str, content["labels"]))
            return cls(encoder, content["length"], labels, content["overflow"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"Not a saved processor of words: {error!r}") from None


def _lengths(x: Tensor, mask: Tensor | None) -> list[int]:
    """The number of tokens of each row, without padding."""
    return [x.shape[-1]] * len(x) if mask is None else mask.sum(1).tolist()


class EncodedSentences(NamedTuple):
    """Concatenated tokens (m, rows), the class of the first token of each word that counts,
    elsewhere IGNORE_INDEX (m), and the words as codes; example i is ends[i] .. ends[i + 1], and
    word_ends[i] .. word_ends[i + 1] of the words. For each example its hash, whether it has a label
    but "O", and the number of the sentence with the first and last word that count (n, 3)."""

    tokens: np.ndarray
    labels: np.ndarray
    ends: np.ndarray
    words: np.ndarray
    word_ends: np.ndarray
    hashes: np.ndarray
    is_labelled: np.ndarray
    counted: np.ndarray


class WordLabelling(TokenTask):
    """Base class of tasks that label each word of a sentence.

    An example is a sentence; or, if the sentence is longer than `length` and overflow is "stride",
    one of the windows that read it. Each word has a label in one window, and no window ends the
    words that count inside an entity.

    Args:
        source: The sentences of each split.
        labels: The labels of the words; class i is labels[i].
        tokenizer: See `train_word_encoder`.
        length: Maximum number of tokens of an example.
        overflow: See `WordTagger`.
    """

    output = "token"
    processor: WordTagger

    def __init__(
        self,
        source: SplitRows[Sentence],
        labels: Sequence[str],
        *,
        tokenizer: str,
        length: int,
        overflow: str,
    ) -> None:
        check_choice("overflow", overflow, OVERFLOWS)
        check_int(1, length=length)
        self.source = source
        encoder = train_word_encoder(
            tokenizer, lambda: (row.words for _, row in source.walk("train"))
        )
        super().__init__(vocab_size=encoder.vocab_size, classes=len(labels), length=length)
        self.processor = WordTagger(encoder, length, labels, overflow)
        self.long_sentences = self.long_words = 0
        self.sentences = {split: self._encode_split(split) for split in SPLITS}

    def _encode_split(self, split: str) -> EncodedSentences:
        """The examples of a split."""
        encoder = self.processor.encoder
        numbers = {label: number for number, label in enumerate(self.processor.labels)}
        tokens, classes = (
            ArrayBuilder(np.min_scalar_type(encoder.vocab_size)),
            ArrayBuilder(np.int32),
        )
        words, ends, word_ends = ArrayBuilder(np.int32), array("q", [0]), array("q", [0])
        hashes, is_labelled, counted = array("Q"), array("b"), []
        for number, (_, row) in enumerate(self.source.walk(split)):
            pieces = self.processor.encode_words(row.words)
            sizes = [len(each) for each in pieces]
            if max(sizes) == self.length:
                whole = (len(encoder.encode(word)) for word in row.words)
                self.long_words += sum(count > self.length for count in whole)
            entities = find_entities(row.labels) if self.processor.has_entities else []
            inside = {i for each in entities for i in range(each.start + 1, each.end)}
            windows = self.processor.windows(sizes, lambda place: place not in inside)  # noqa: B023
            is_long = len(windows) > 1 or windows[0].end < len(row.words)
            self.long_sentences += is_long
            for window in windows:
                read = slice(window.start, window.end)
                target = np.full(sum(sizes[read]), IGNORE_INDEX)
                starts = np.cumsum([0, *sizes[read]])[:-1]
                own = slice(window.first, window.last)
                target[starts[window.first - window.start : window.last - window.start]] = [
                    numbers[label] for label in row.labels[own]
                ]
                tokens.append(np.concatenate(pieces[read]).reshape(-1))
                classes.append(target)
                ends.append(ends[-1] + len(target))
                codes = codes_of_texts(row.words[read]).numpy()
                words.append(codes)
                word_ends.append(word_ends[-1] + len(codes))
                text = " ".join(row.words[own])
                hashes.append(hash_bytes(text.encode("utf-8", "surrogatepass")))
                is_labelled.append(any(label != OUTSIDE for label in row.labels[own]))
                counted.append((number, window.first, window.last))
        return EncodedSentences(
            tokens.finish().reshape(-1, encoder.rows),
            classes.finish(),
            np.array(ends),
            words.finish(),
            np.array(word_ends),
            np.array(hashes),
            np.array(is_labelled),
            np.array(counted),
        )

    # -------------------------------------------------------------------------------- examples
    @property
    def needs(self) -> ModelNeeds:
        """See `Task`."""
        return super().needs.model_copy(update={"input": self.processor.encoder.input})

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.sentences[split].hashes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`: a label at the first token of each word, and the words."""
        check_index(split, index, self.size(split))
        sentences = self.sentences[split]
        place = slice(sentences.ends[index], sentences.ends[index + 1])
        words = sentences.words[sentences.word_ends[index] : sentences.word_ends[index + 1]]
        return Example(
            {"x": self.processor.to_input([sentences.tokens[place]])},
            {LABELS: to_int64(sentences.labels[place]), WORDS: to_int64(words)},
        )

    def classes_of(self, split: str) -> np.ndarray:
        """See `Task`: whether an example has a label but "O"."""
        return self.sentences[split].is_labelled

    def predict(self, model: Model, batch: Batch) -> list[Prediction]:
        """See `Task`; the text is the words with spaces between them."""
        texts = [join_words(texts_of_codes(row)) for row in batch.targets[WORDS]]
        return self.processor.label_texts(model(**batch.inputs), batch.inputs, texts)

    # ------------------------------------------------------------------------------- baselines
    def baselines(self) -> Mapping[str, Baseline]:
        """See `Task`."""
        return {**super().baselines(), WORD_LABEL: self._word_label_score}

    def _word_label_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of the most frequent label of each word in the training split; for new words,
        the most frequent of all."""
        counts: dict[str, Counter[str]] = {}
        total: Counter[str] = Counter()
        for _, row in self.source.walk("train"):
            for word, label in zip(row.words, row.labels, strict=True):
                counts.setdefault(word, Counter())[label] += 1
                total[label] += 1
        usual = total.most_common(1)[0][0]
        best = {word: count.most_common(1)[0][0] for word, count in counts.items()}
        return self.score_labels(test, lambda words: [best.get(word, usual) for word in words])

    def score_labels(
        self, test: Sequence[int], label: Callable[[Sequence[str]], Sequence[str]]
    ) -> Tensor:
        """Statistics of the first metric for a function that labels the words of a sentence."""
        numbers = {name: number for number, name in enumerate(self.processor.labels)}
        counted = self.sentences["test"].counted
        wanted = {int(counted[index, 0]) for index in test}
        labelled = {
            number: label(row.words)
            for number, (_, row) in enumerate(self.source.walk("test"))
            if number in wanted
        }
        parts = []
        for index in test:
            sentence, first, last = counted[index].tolist()
            batch = self.batch("test", [index])
            targets = batch.targets[LABELS]
            chosen = torch.zeros_like(targets)
            chosen[targets != IGNORE_INDEX] = torch.tensor(
                [numbers[name] for name in labelled[sentence][first:last]]
            )
            output = torch.nn.functional.one_hot(chosen, self.classes).float()
            parts.append(self.metric.update(output, batch, []))
        return self.metric.merge(parts)

    # ----------------------------------------------------------------------------- for people
    def notes(self) -> list[str]:
        """See `Task`."""
        hashes = {split: each.hashes for split, each in self.sentences.items()}
        notes = [*self.source.notes(), *copy_notes(hashes, "sentences")]
        encoder = self.processor.encoder
        if isinstance(encoder, WordPieces):
            tokens = {split: each.tokens for split, each in self.sentences.items()}
            notes += unknown_notes(encoder.tokenizer, tokens)
        if self.long_sentences:
            done = "the words after them are left out, and do not count."
            if self.processor.overflow == "stride":
                done = "they are read in windows that overlap."
            notes.append(
                f"{self.long_sentences:,} sentences have more than {self.length} tokens: {done}"
            )
        if self.long_words:
            notes.append(
                f"{self.long_words:,} words have more than {self.length} tokens: the model does "
                "not see their ends."
            )
        return notes

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The text with the spans of its labels, and with those that are predicted."""
        words = texts_of_codes(example.targets[WORDS])
        starts = self.processor.encoder.starts(example.inputs["x"])
        classes = example.targets[LABELS][starts].tolist()
        labels = [OUTSIDE if i == IGNORE_INDEX else self.processor.labels[i] for i in classes]
        gold = self.processor.describe(join_words(words), labels)
        parts: list[Rendered] = [self.processor.render(gold)]
        if prediction is not None:
            parts += [RenderedText("predicted:"), self.processor.render(prediction)]
        return RenderedParts(parts)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> WordTagger:
        """See `Task`."""
        return WordTagger.from_dict(content)
