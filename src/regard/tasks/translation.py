"""Sequence to sequence: a target text for each source text, such as its translation."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_choice, check_int
from regard.models.beam import BeamSearchConfig, beam_search
from regard.models.config import LMHeadConfig, TokenInput
from regard.models.generation import generate
from regard.models.model import DecodingStep, Seq2Seq, outer_mixers
from regard.models.stopping_criteria import StoppingCriteria
from regard.tasks.base import (
    LABELS,
    SPLITS,
    Batch,
    Example,
    ModelNeeds,
    Task,
    check_index,
    to_int64,
)
from regard.tasks.baselines import MAX_TOKENS, NGRAM, Baseline, NGramModel
from regard.tasks.files import ArrayBuilder, existing_path, file_type, files_by_split, open_text
from regard.tasks.metrics import Accuracy, Bits, MeanMetric, Metric
from regard.tasks.processors import Prediction, Processor
from regard.tasks.rendering import Rendered, RenderedTable
from regard.tasks.row_splits import (
    MISSING,
    SplitRows,
    check_not_empty,
    copy_notes,
    hash_bytes,
    to_text,
)
from regard.tasks.rows import HUGGING_FACE, READERS, RowIterator, Rows, read_rows
from regard.tasks.tokenizers import EMPTY, Tokenizer, tokenizer_from_dict, train_tokenizer

if TYPE_CHECKING:
    from regard.models import Model

TEXT = "text"  # in predictions


class TextPair(NamedTuple):
    """A source text and its target."""

    source: str
    target: str


class TargetState(NamedTuple):
    """The encoded source (b, m, d), its mask (b, m), and the target tokens (b, n) so far."""

    context: Tensor
    context_mask: Tensor | None
    tokens: Tensor


class TextToTextProcessor(Processor):
    """Source texts for an encoder and decoder, which writes the target.

    The decoder reads a start token and the target so far; after the last token it writes an end
    token. Both come after the tokens of the tokenizer.

    Args:
        tokenizer: Converts source and target to tokens.
        length: Maximum number of tokens of each.
        beams: Hypotheses of beam search; 1 is greedy search.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, beams: int = 1) -> None:
        check_int(2, length=length)
        check_int(1, beams=beams)
        self.tokenizer, self.length, self.beams = tokenizer, length, beams
        self.start, self.end = tokenizer.vocab_size, tokenizer.vocab_size + 1
        self.vocab_size = tokenizer.vocab_size + 2

    def encode_text(self, text: str) -> np.ndarray:
        """The first tokens (n) of a text, at least one."""
        tokens = self.tokenizer.encode(text)[: self.length]
        return tokens if len(tokens) else np.array([EMPTY], dtype=np.int64)

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: the tokens of a source text, and the start of the target."""
        if not isinstance(raw, str):
            raise TypeError(f"Expected a text, not {type(raw).__name__}.")
        return {"source": to_int64(self.encode_text(raw)), "target": torch.tensor([self.start])}

    def decode_text(self, tokens: Sequence[int]) -> str:
        """The text of target tokens, up to the end token."""
        plain = [token for token in tokens if token != self.start]
        end = plain.index(self.end) if self.end in plain else len(plain)
        return self.tokenizer.decode(plain[:end])

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the most probable token at each place of the given target."""
        return [{TEXT: self.decode_text(row)} for row in output.argmax(-1).tolist()]

    @torch.no_grad()
    def predict(self, model: Model, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the texts that the model writes; a given target is not read."""
        source = inputs["source"]
        mask, decoder = inputs.get("mask"), cast("Seq2Seq", model)
        assert source is not None
        stop = StoppingCriteria([self.end])
        arguments: dict[str, Any] = {
            "max_new_tokens": self.length,
            "stop": stop,
            "bos_token_id": self.start,
            "device": source.device,
        }
        if self.beams == 1:
            step = self._decoding_step(decoder, source, mask)
            outputs = generate(step, [[]] * len(source), **arguments)
            return [{TEXT: self.decode_text(each.tokens)} for each in outputs]
        texts = []
        for number in range(len(source)):
            row = slice(number, number + 1)
            step = self._decoding_step(decoder, source[row], None if mask is None else mask[row])
            (best,) = beam_search(step, [[]], BeamSearchConfig(self.beams), **arguments)
            texts.append({TEXT: self.decode_text(best[0].tokens)})
        return texts

    def _decoding_step(self, model: Seq2Seq, source: Tensor, mask: Tensor | None) -> DecodingStep:
        """A step that never writes padding or a start; models that cannot stream read the whole
        target for each token."""
        excluded = torch.tensor([0, self.start], device=source.device)
        if all(mixer.can.stream for mixer in outer_mixers(model.decoder)):
            stream = model.decoding_step(source, mask)

            def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
                logits, state = stream(tokens, state)
                return logits[:, -1:].index_fill(-1, excluded, -math.inf), state

            return step

        context = model.encode(source, mask)

        def whole_step(tokens: Tensor, state: TargetState | None) -> tuple[Tensor, TargetState]:
            if state is None:
                state = TargetState(*context, tokens[:, :0])
            state = state._replace(tokens=torch.cat((state.tokens, tokens), 1))
            y, _ = model.decoder(
                state.tokens, context=state.context, context_mask=state.context_mask
            )
            logits = y[:, -1:] if model.head is None else model.head(y)[:, -1:]
            return logits.index_fill(-1, excluded, -math.inf), state

        return whole_step

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        tokenizer = self.tokenizer.to_dict()
        return {"tokenizer": tokenizer, "length": self.length, "beams": self.beams}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TextToTextProcessor:
        """The processor that `to_dict` described."""
        try:
            tokenizer = tokenizer_from_dict(content["tokenizer"])
            return cls(tokenizer, content["length"], content["beams"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of text pairs: {error!r}") from None


class ExactMatch(MeanMetric):
    """Share of the predicted texts that equal the target."""

    name, needs_predictions = "exact_match", True

    def __init__(self, processor: TextToTextProcessor) -> None:
        self.processor = processor

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        pairs = zip(predictions, _target_texts(batch, self.processor), strict=True)
        return torch.tensor([(each[TEXT] == text, 1) for each, text in pairs], dtype=torch.float64)


class CharacterFScore(Metric):
    """chrF2 of the predicted texts, from 0 to 100 (Popović 2015), computed by sacrebleu.

    The statistics of an example are its counts of matching n-grams, so that the value is that of
    the corpus.
    """

    name, format, needs_predictions = "chrf", ".1f", True

    def __init__(self, processor: TextToTextProcessor) -> None:
        try:
            from sacrebleu.metrics.chrf import CHRF
        except ImportError:
            raise ImportError(
                "chrF needs the package sacrebleu: pip install 'regard[text]'"
            ) from None
        self.processor, self.score = processor, CHRF()

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        texts = [each[TEXT] for each in predictions]
        references = [_target_texts(batch, self.processor)]
        # the counts of each segment that CHRF.corpus_score adds up
        statistics = self.score._extract_corpus_statistics(texts, references)
        return torch.tensor(statistics, dtype=torch.float64)

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        return float(self.score._aggregate_and_compute(statistics.long().tolist()).score)


def _target_texts(batch: Batch, processor: TextToTextProcessor) -> list[str]:
    """The targets of a batch."""
    rows = batch.targets[LABELS].tolist()
    return [processor.decode_text([token for token in row if token >= 0]) for row in rows]


class EncodedPairs(NamedTuple):
    """Concatenated tokens of the sources and the targets; pair i is ends[i] .. ends[i + 1] of each,
    with hash hashes[i] of both."""

    sources: np.ndarray
    source_ends: np.ndarray
    targets: np.ndarray
    target_ends: np.ndarray
    hashes: np.ndarray


class Translation(Task):
    """Write a target text for each source text: translation, summaries, corrections.

    The first metric is the cross-entropy of the target in bits per byte, where the decoder reads
    the true target before each token. With `generate`, the texts that the model writes are scored
    as well, which takes one step of the decoder per token.

    Splits are files named train, valid and test. Missing splits get one of ten training pairs,
    chosen by a hash.

    Args:
        data: CSV, JSON lines, a JSON array or Parquet, or hf:name; or a folder of them or of text
            files with the same number of lines, such as train.de and train.en.
        source: The column of the source; for text files the end of their names, such as "de".
        target: The column of the target; for text files the end of their names.
        length: Maximum number of tokens of each text; longer ones are truncated.
        tokenizer: "byte", "char" or "bpe", learned from sources and targets of the training split.
        vocab_size: Number of tokens for "bpe".
        generate: Also measure chrF and exact match of generated texts.
        beams: Hypotheses of beam search for predictions; 1 is greedy search.
        missing: What to do with rows without source or target: "drop" or "error".
        encoding: Encoding of the files.
        seed: Seed of the splits.
    """

    processor: TextToTextProcessor

    def __init__(
        self,
        data: str | Path,
        *,
        source: str = "source",
        target: str = "target",
        length: int = 128,
        tokenizer: str = "bpe",
        vocab_size: int | None = None,
        generate: bool = False,
        beams: int = 1,
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        if not isinstance(generate, bool):
            raise ValueError(f"generate must be True or False, not {generate!r}")
        check_int(0, seed=seed)
        check_int(2, length=length)
        if source == target:
            raise ValueError(f"source and target are both {source!r}: name two columns.")
        self.source = SplitRows(
            _read_pairs(data, source, target, encoding),
            (source, target),
            lambda where, values: TextPair(
                to_text(where, source, values[0]), to_text(where, target, values[1])
            ),
            drop=missing == "drop",
            seed=seed,
        )
        trained = train_tokenizer(
            tokenizer,
            lambda: (text for _, pair in self.source.walk("train") for text in pair),
            vocab_size,
        )
        self.processor = TextToTextProcessor(trained, length, beams)
        units = torch.as_tensor([*trained.token_units().tolist(), 0, 0])
        self.metrics: tuple[Metric, ...] = (Bits(trained.unit, units), Accuracy())
        if generate:
            generated = CharacterFScore(self.processor), ExactMatch(self.processor)
            self.metrics = (*self.metrics, *generated)
        self.units, self.truncated = units, 0
        self.pairs = {split: self._encode_split(split) for split in SPLITS}
        self.lengths = {
            split: np.stack((np.diff(each.source_ends), np.diff(each.target_ends)), 1)
            for split, each in self.pairs.items()
        }

    def _encode_split(self, split: str) -> EncodedPairs:
        """The tokens of a split."""
        tokenizer = self.processor.tokenizer
        builders = ArrayBuilder(tokenizer.dtype), ArrayBuilder(tokenizer.dtype)
        ends, hashes = (array("q", [0]), array("q", [0])), array("Q")
        for _, pair in self.source.walk(split):
            for builder, end, text in zip(builders, ends, pair, strict=True):
                tokens = tokenizer.encode(text)
                self.truncated += len(tokens) > self.processor.length
                builder.append(self.processor.encode_text(text))
                end.append(end[-1] + min(len(tokens) or 1, self.processor.length))
            hashes.append(hash_bytes("\0".join(pair).encode("utf-8", "surrogatepass")))
        check_not_empty(split, len(hashes))
        return EncodedPairs(
            builders[0].finish(),
            np.array(ends[0]),
            builders[1].finish(),
            np.array(ends[1]),
            np.array(hashes),
        )

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder and a decoder that share the token embeddings."""
        return ModelNeeds(
            kind="seq2seq",
            input=TokenInput(vocab_size=self.processor.vocab_size),
            head=LMHeadConfig(),
            length=self.processor.length,
        )

    def size(self, split: str) -> int:
        """See `Task`."""
        return len(self.pairs[split].hashes)

    def example(self, split: str, index: int) -> Example:
        """See `Task`: the decoder reads the start token and the target, one token behind it."""
        check_index(split, index, self.size(split))
        pairs, length = self.pairs[split], self.processor.length
        source = pairs.sources[pairs.source_ends[index] : pairs.source_ends[index + 1]]
        target = pairs.targets[pairs.target_ends[index] : pairs.target_ends[index + 1]].tolist()
        read = [self.processor.start, *target][:length]
        write = [*target, self.processor.end][:length]
        return Example(
            {"source": to_int64(source), "target": to_int64(read)}, {LABELS: to_int64(write)}
        )

    def lengths_of(self, split: str) -> np.ndarray:
        """See `Task`: of the source and of the target."""
        return self.lengths[split]

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: the frequencies of target tokens, and n-grams of the targets, which do not
        see the source."""
        return {**super().baselines(), NGRAM: self._ngram_score}

    def _ngram_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of `Bits` of n-grams."""
        model, count = NGramModel([], self.processor.vocab_size), 0
        for index in self.sample("train", self.size("train")).tolist():
            example = self.example("train", index)
            read, write = example.inputs["target"].tolist(), example.targets[LABELS].tolist()
            for place, token in enumerate(write):
                model.add(read[max(0, place + 1 - model.order) : place + 1], token)
            count += len(write)
            if count > MAX_TOKENS:
                break
        statistics = []
        for index in test:
            example = self.example("test", index)
            read, write = example.inputs["target"].tolist(), example.targets[LABELS].tolist()
            bits = -sum(
                math.log2(
                    model.probability(read[max(0, place + 1 - model.order) : place + 1], token)
                )
                for place, token in enumerate(write)
            )
            statistics.append((bits, float(self.units[write].sum())))
        return torch.tensor(statistics, dtype=torch.float64)

    def notes(self) -> list[str]:
        """See `Task`."""
        hashes = {split: each.hashes for split, each in self.pairs.items()}
        notes = [*self.source.notes(), *copy_notes(hashes, "pairs")]
        if self.truncated:
            notes.append(
                f"{self.truncated:,} texts have more than {self.processor.length} tokens and are "
                "truncated."
            )
        return notes

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The source, the target, and what the model wrote."""
        decode = self.processor.decode_text
        rows = [
            ("source", decode(example.inputs["source"].tolist())),
            ("target", decode(example.targets[LABELS].tolist())),
        ]
        if prediction is not None:
            rows.append(("predicted", prediction[TEXT]))
        return RenderedTable(("", "text"), rows)

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> TextToTextProcessor:
        """See `Task`."""
        return TextToTextProcessor.from_dict(content)


def _read_pairs(data: str | Path, source: str, target: str, encoding: str) -> Mapping[str, Rows]:
    """Rows with the columns `source` and `target`, from rows or from files with aligned lines."""
    if str(data).startswith(HUGGING_FACE) or not existing_path(data).is_dir():
        return read_rows(data, encoding)
    folder = existing_path(data)
    types = {file_type(file).removeprefix(".") for file in folder.iterdir() if file.is_file()}
    if source not in types and {f".{each}" for each in types} & set(READERS):
        return read_rows(data, encoding)
    sources, targets = (files_by_split(folder, [f".{name}"]) for name in (source, target))
    for split in sources.keys() | targets.keys():
        counts = [len(files.get(split, [])) for files in (sources, targets)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"{folder} has {counts[0]} files .{source} and {counts[1]} files .{target} for "
                f"{split}: expected as many."
            )

    def read(pairs: list[tuple[Path, Path]]) -> RowIterator:
        for first, second in pairs:
            with open_text(first, encoding) as lines, open_text(second, encoding) as others:
                for number, (line, other) in enumerate(zip_longest(lines, others), 1):
                    if line is None or other is None:
                        longer, shorter = (second, first) if line is None else (first, second)
                        raise ValueError(
                            f"{longer} has more lines than {shorter}, which has {number - 1}: "
                            "they do not belong together."
                        )
                    row = {source: line.rstrip("\r\n"), target: other.rstrip("\r\n")}
                    yield f"line {number} of {first}", row

    return {
        split: Rows(partial(read, list(zip(files, targets[split], strict=True))))
        for split, files in sources.items()
    }
