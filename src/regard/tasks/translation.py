"""Text to text: a target text for each source text, such as its translation."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.errors import check_choice, check_int, did_you_mean
from regard.models.beam import BeamSearchConfig, beam_search
from regard.models.config import LMHeadConfig, TokenInput
from regard.models.generation import generate
from regard.models.model import DecodingStep, EncoderDecoder, outer_mixers
from regard.models.stopping_criteria import StoppingCriteria
from regard.tasks.alignment import WordAlignment, merge_pieces, word_spans
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
from regard.tasks.files import (
    COMPRESSED,
    ArrayBuilder,
    existing_path,
    file_type,
    files_by_split,
    open_text,
)
from regard.tasks.metrics import Accuracy, Bits, MeanMetric, Metric
from regard.tasks.processors import Prediction, Processor
from regard.tasks.rendering import Rendered, RenderedParts, RenderedTable
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

TEXT, ALIGNMENT = "text", "alignment"  # in predictions
REFERENCE = "reference"  # the target with the UTF-8 bytes of the target text
VOCABULARIES = ("shared", "separate")
COPY = "source as it is"
GREEDY = BeamSearchConfig(1)


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
        tokenizer: Converts sources to tokens, and targets too unless they have their own.
        length: Maximum number of tokens of each.
        beams: Hypotheses of beam search; 1 is greedy search.
        length_penalty: Exponent α of the length that the log-probability of a hypothesis is divided
            by; 0 favours short texts.
        lowercase: Whether sources are lower-cased, as the model was trained on such texts.
        target_tokenizer: Converts targets to tokens. None: the vocabulary is shared.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        length: int,
        beams: int = 1,
        *,
        length_penalty: float = 1.0,
        lowercase: bool = False,
        target_tokenizer: Tokenizer | None = None,
    ) -> None:
        check_int(2, length=length)
        check_int(1, beams=beams)
        self.search = BeamSearchConfig(beams, length_penalty=length_penalty)
        self.tokenizer, self.length, self.beams = tokenizer, length, beams
        self.source_length = length
        self.lowercase, self.own_target_tokenizer = lowercase, target_tokenizer
        self.target_tokenizer = tokenizer if target_tokenizer is None else target_tokenizer
        self.start = self.target_tokenizer.vocab_size
        self.end, self.vocab_size = self.start + 1, self.start + 2

    def encode_text(self, text: str) -> np.ndarray:
        """The first tokens (n) of a source, at least one."""
        if self.lowercase:
            text = text.lower()
        return first_tokens(self.tokenizer, text, self.source_length)[0]

    def truncates(self, text: str) -> bool:
        """Whether a source has more tokens than the model reads."""
        return first_tokens(self.tokenizer, text, self.source_length)[1]

    def has_unknown(self, text: str) -> bool:
        """Whether the model reads a character that does not occur in the training split."""
        if self.tokenizer.unit != "character" or not text.strip():
            return False
        return EMPTY in self.encode_text(text)

    def encode(self, raw: Any) -> dict[str, Tensor]:
        """See `Processor`: the tokens of a source text, and the start of the target."""
        if not isinstance(raw, str):
            raise TypeError(f"Expected a text, not {type(raw).__name__}.")
        return {"source": to_int64(self.encode_text(raw)), "target": torch.tensor([self.start])}

    def decode_text(self, tokens: Sequence[int]) -> str:
        """The text of target tokens, up to the end token."""
        plain = [token for token in tokens if token != self.start]
        end = plain.index(self.end) if self.end in plain else len(plain)
        return self.target_tokenizer.decode(plain[:end])

    def decode(self, output: Tensor, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the most probable token at each place of the given target."""
        return [{TEXT: self.decode_text(row)} for row in output.argmax(-1).tolist()]

    def predict(self, model: Model, inputs: Mapping[str, Tensor | None]) -> list[Prediction]:
        """See `Processor`: the texts that the model writes; a given target is not read. An empty
        source has an empty target."""
        return self.write(model, inputs, self.search)

    @torch.no_grad()
    def write(
        self, model: Model, inputs: Mapping[str, Tensor | None], search: BeamSearchConfig
    ) -> list[Prediction]:
        """The texts that the model writes with another search than that of the processor."""
        source, mask = inputs["source"], inputs.get("mask")
        assert source is not None
        counts = torch.full((len(source),), source.shape[1]) if mask is None else mask.sum(1)
        is_empty = (source[:, 0] == EMPTY) & (counts.to(source.device) == 1)
        rows = (~is_empty).nonzero()[:, 0]
        texts = [""] * len(source)
        if len(rows):
            kept_mask = None if mask is None else mask[rows]
            step = self._decoding_step(cast("EncoderDecoder", model), source[rows], kept_mask)
            arguments: dict[str, Any] = {
                "max_new_tokens": self.length,
                "stop": StoppingCriteria([self.end]),
                "bos_token_id": self.start,
                "device": source.device,
            }
            prompts: list[list[int]] = [[] for _ in rows]
            if search.num_beams == 1:
                outputs = generate(step, prompts, **arguments)
            else:
                outputs = [best[0] for best in beam_search(step, prompts, search, **arguments)]
            for row, output in zip(rows.tolist(), outputs, strict=True):
                texts[row] = self.decode_text(output.tokens)
        return [{TEXT: text} for text in texts]

    def _decoding_step(
        self, model: EncoderDecoder, source: Tensor, mask: Tensor | None
    ) -> DecodingStep:
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
            logits = model.decode(state.tokens, state.context, context_mask=state.context_mask)
            return logits[:, -1:].index_fill(-1, excluded, -math.inf), state

        return whole_step

    def align(
        self,
        model: EncoderDecoder,
        source: str,
        target: str,
        *,
        layer: int = -1,
        head: int | None = None,
    ) -> WordAlignment:
        """Which source word moved which word of a target: the weights of the cross-attention.

        Args:
            layer: Layer of the decoder.
            head: Number of the head. None: the mean of all heads.
        """
        tokens = self.encode_text(source)
        written = first_tokens(self.target_tokenizer, target, self.length)[0]
        device = next(model.parameters()).device
        read = torch.tensor([[self.start, *written.tolist()[:-1]]], device=device)
        with torch.no_grad():
            maps = model.attention_maps(to_int64(tokens)[None].to(device), read).cross
        weights = maps[layer]
        if weights is None:
            raise ValueError("This model has no cross-attention map to align words with.")
        pieces = weights[0].mean(0) if head is None else weights[0, head]
        return merge_pieces(
            pieces.double().cpu().numpy(),
            word_spans(self.tokenizer, tokens.tolist()),
            word_spans(self.target_tokenizer, written.tolist()),
        )

    def to_dict(self) -> dict[str, Any]:
        """See `Processor`."""
        own = self.own_target_tokenizer
        return {
            "tokenizer": self.tokenizer.to_dict(),
            "target_tokenizer": None if own is None else own.to_dict(),
            "length": self.length,
            "beams": self.beams,
            "length_penalty": self.search.length_penalty,
            "lowercase": self.lowercase,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TextToTextProcessor:
        """The processor that `to_dict` described."""
        try:
            own = content["target_tokenizer"]
            return cls(
                tokenizer_from_dict(content["tokenizer"]),
                content["length"],
                content["beams"],
                length_penalty=content["length_penalty"],
                lowercase=content["lowercase"],
                target_tokenizer=None if own is None else tokenizer_from_dict(own),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"Not a saved processor of text pairs: {error!r}") from None


def first_tokens(tokenizer: Tokenizer, text: str, length: int) -> tuple[np.ndarray, bool]:
    """The first tokens of a text, at least one, and whether there are more."""
    tokens = tokenizer.encode(text) if text.strip() else np.array([EMPTY], dtype=np.int64)
    return tokens[:length], len(tokens) > length


class ExactMatch(MeanMetric):
    """Share of the predicted texts that equal the target."""

    name, needs_predictions = "exact_match", True

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        pairs = zip(predictions, target_texts(batch), strict=True)
        return torch.tensor([(each[TEXT] == text, 1) for each, text in pairs], dtype=torch.float64)


class CharacterFScore(Metric):
    """chrF2 of the predicted texts, from 0 to 100 (Popović 2015), computed by sacrebleu.

    The statistics of an example are its counts of matching n-grams, so that the value is that of
    the corpus.
    """

    name, format, needs_predictions = "chrf", ".1f", True

    def __init__(self) -> None:
        self.score = _import_sacrebleu("chrF").CHRF()
        self.score.corpus_score(["a"], [["a"]])
        self.signature = str(self.score.get_signature())

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        texts = [each[TEXT] for each in predictions]
        references = [target_texts(batch)]
        # the counts of each segment that CHRF.corpus_score adds up
        statistics = self.score._extract_corpus_statistics(texts, references)
        return torch.tensor(statistics, dtype=torch.float64)

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        return float(self.score._aggregate_and_compute(statistics.long().tolist()).score)


class BLEU(Metric):
    """BLEU of the predicted texts, from 0 to 100 (Papineni et al. 2002), computed by sacrebleu
    (Post 2018, arXiv 1804.08771).

    The statistics of an example are the lengths of the prediction and of the target, the matching
    n-grams and all n-grams of the prediction for n from 1 to 4: their sums give the value of the
    corpus. `signature` says how texts are split into tokens, and the version of sacrebleu.
    """

    name, format, needs_predictions, margin = "bleu", ".1f", True, 0.5

    def __init__(self, *, lowercase: bool = False) -> None:
        self.score = _import_sacrebleu("BLEU").BLEU(lowercase=lowercase)
        self.score.corpus_score(["a"], [["a"]])  # a signature has the number of references
        self.signature = str(self.score.get_signature())

    def update(self, output: Any, batch: Batch, predictions: Sequence[Any]) -> Tensor:
        """See `Metric`."""
        texts = [each[TEXT] for each in predictions]
        # the counts of each segment that BLEU.corpus_score adds up
        statistics = self.score._extract_corpus_statistics(texts, [target_texts(batch)])
        return torch.tensor(statistics, dtype=torch.float64)

    def compute(self, statistics: Tensor) -> float:
        """See `Metric`."""
        return float(self.score._aggregate_and_compute(statistics.long().tolist()).score)


def _import_sacrebleu(metric: str) -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise ImportError(
            f"{metric} needs the package sacrebleu: pip install 'regard[text]'"
        ) from None
    return metrics


def target_texts(batch: Batch) -> list[str]:
    """The targets of a batch, whole."""
    rows = batch.targets[REFERENCE].tolist()
    encoded = (bytes(byte for byte in row if byte >= 0) for row in rows)
    return [each.decode("utf-8", "surrogatepass") for each in encoded]


class EncodedPairs(NamedTuple):
    """Concatenated tokens of the sources and the targets; pair i is ends[i] .. ends[i + 1] of each,
    with hash hashes[i] of both. `texts` are the bytes of the targets, which are not truncated."""

    sources: np.ndarray
    source_ends: np.ndarray
    targets: np.ndarray
    target_ends: np.ndarray
    texts: np.ndarray
    text_ends: np.ndarray
    hashes: np.ndarray


class TextToText(Task):
    """Write a target text for each source text: summaries, corrections, translation.

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
        test: Start of the name of the test file, if there are several: "test_2016". None: all.
        length: Maximum number of tokens of each text; longer ones are truncated.
        tokenizer: "byte", "char" or "bpe", learned from the training split.
        vocab_size: Number of tokens for "bpe", of each vocabulary.
        vocabulary: "shared" by sources and targets, whose embeddings the model then shares, or
            "separate".
        lowercase: Lower-case all texts.
        generate: Also measure chrF and exact match of generated texts.
        beams: Hypotheses of beam search for predictions; 1 is greedy search. While a model trains,
            evaluations use greedy search.
        length_penalty: Exponent of the length in the score of a hypothesis.
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
        test: str | None = None,
        length: int = 128,
        tokenizer: str = "bpe",
        vocab_size: int | None = None,
        vocabulary: str = "shared",
        lowercase: bool = False,
        generate: bool = False,
        beams: int = 1,
        length_penalty: float = 1.0,
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        check_choice("missing", missing, MISSING)
        check_choice("vocabulary", vocabulary, VOCABULARIES)
        for name, value in (("generate", generate), ("lowercase", lowercase)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, not {value!r}")
        check_int(0, seed=seed)
        check_int(2, length=length)
        if source == target:
            raise ValueError(f"source and target are both {source!r}: name two columns.")

        def parse(where: str, values: Sequence[Any]) -> TextPair:
            texts = (
                to_text(where, name, value)
                for name, value in zip((source, target), values, strict=True)
            )
            return TextPair(*(text.lower() if lowercase else text for text in texts))

        rows, self.test_files = _read_pairs(data, source, target, test, encoding)
        self.source = SplitRows(rows, (source, target), parse, drop=missing == "drop", seed=seed)

        def train(sides: Sequence[int]) -> Tokenizer:
            def texts() -> Iterator[str]:
                for _, pair in self.source.walk("train"):
                    yield from (pair[side] for side in sides)

            return train_tokenizer(tokenizer, texts, vocab_size)

        shared = vocabulary == "shared"
        self.processor = TextToTextProcessor(
            train((0, 1) if shared else (0,)),
            length,
            beams,
            length_penalty=length_penalty,
            lowercase=lowercase,
            target_tokenizer=None if shared else train((1,)),
        )
        written = self.processor.target_tokenizer
        self.units = torch.as_tensor([*written.token_units().tolist(), 0, 0])
        self.metrics: tuple[Metric, ...] = (Bits(written.unit, self.units), Accuracy())
        if generate:
            self.metrics = (*self.metrics, CharacterFScore(), ExactMatch())
        self.truncated = self.unknown = 0
        self.pairs = {split: self._encode_split(split) for split in SPLITS}
        self.lengths = {
            split: np.stack((np.diff(each.source_ends), np.diff(each.target_ends)), 1)
            for split, each in self.pairs.items()
        }

    def _encode_split(self, split: str) -> EncodedPairs:
        """The tokens of a split."""
        processor = self.processor
        tokenizers = processor.tokenizer, processor.target_tokenizer
        builders = *(ArrayBuilder(each.dtype) for each in tokenizers), ArrayBuilder(np.uint8)
        ends, hashes = tuple(array("q", [0]) for _ in builders), array("Q")
        for _, pair in self.source.walk(split):
            encoded = pair.target.encode("utf-8", "surrogatepass")
            parts = [np.frombuffer(encoded, np.uint8)]
            for tokenizer, text in zip(tokenizers, pair, strict=True):
                tokens, is_longer = first_tokens(tokenizer, text, processor.length)
                self.truncated += is_longer
                self.unknown += tokenizer.unit == "character" and EMPTY in tokens
                parts.insert(-1, tokens)
            for builder, end, part in zip(builders, ends, parts, strict=True):
                builder.append(part)
                end.append(end[-1] + len(part))
            hashes.append(hash_bytes("\0".join(pair).encode("utf-8", "surrogatepass")))
        check_not_empty(split, len(hashes))
        sources, targets, texts = (builder.finish() for builder in builders)
        source_ends, target_ends, text_ends = map(np.array, ends)
        return EncodedPairs(
            sources, source_ends, targets, target_ends, texts, text_ends, np.array(hashes)
        )

    @property
    def needs(self) -> ModelNeeds:
        """See `Task`: an encoder and a decoder, which share the embeddings of a shared
        vocabulary."""
        processor, own = self.processor, None
        tokens = TokenInput(vocab_size=processor.vocab_size)
        if processor.own_target_tokenizer is not None:
            tokens, own = TokenInput(vocab_size=processor.tokenizer.vocab_size), tokens
        return ModelNeeds(
            kind="seq2seq",
            input=tokens,
            target=own,
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
        text = pairs.texts[pairs.text_ends[index] : pairs.text_ends[index + 1]]
        read = [self.processor.start, *target][:length]
        write = [*target, self.processor.end][:length]
        return Example(
            {"source": to_int64(source), "target": to_int64(read)},
            {LABELS: to_int64(write), REFERENCE: to_int64(text)},
        )

    def predict_in_training(self, model: Model, batch: Batch) -> list[Prediction]:
        """See `Task`: by greedy search."""
        return self.processor.write(model, batch.inputs, GREEDY)

    def lengths_of(self, split: str) -> np.ndarray | None:
        """See `Task`: of the source and of the target."""
        return self.lengths[split]

    def baselines(self) -> dict[str, Baseline]:
        """See `Task`: the frequencies of target tokens, and n-grams of the targets, which do not
        see the source."""
        if self.metric.needs_predictions:
            return {COPY: self._copy_score}
        return {**super().baselines(), NGRAM: self._ngram_score}

    def _copy_score(self, test: Sequence[int]) -> Tensor:
        """Statistics of the first metric of sources that are left as they are."""
        parts = []
        for index in test:
            batch = self.batch("test", [index])
            source = batch.inputs["source"]
            assert source is not None
            text = self.processor.tokenizer.decode(source[0].tolist())
            parts.append(self.metric.update(None, batch, [{TEXT: text}]))
        return self.metric.merge(parts)

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
        if self.unknown:
            notes.append(
                f"{self.unknown:,} texts have characters that do not occur in the training split."
            )
        if len(self.test_files) > 1:
            notes.append(
                f"The test split is {len(self.test_files)} files: {', '.join(self.test_files)}. "
                "Choose one with test=..."
            )
        return notes

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The source, the target and what the model wrote; if the prediction has an alignment, also
        which source word moved which word."""
        source = self.processor.tokenizer.decode(example.inputs["source"].tolist())
        target = self.processor.decode_text(example.targets[LABELS].tolist())
        rows = [("source", source), ("target", target)]
        if prediction is None:
            return RenderedTable(("", "text"), rows)
        table = RenderedTable(("", "text"), [*rows, ("predicted", prediction[TEXT])])
        if ALIGNMENT not in prediction:
            return table
        return RenderedParts([table, WordAlignment(**prediction[ALIGNMENT]).render()])

    @classmethod
    def load_processor(cls, content: Mapping[str, Any]) -> TextToTextProcessor:
        """See `Task`."""
        return TextToTextProcessor.from_dict(content)


class Translation(TextToText):
    """Translate texts: the first metric, which decides, is BLEU of the texts that the model writes.

    Evaluations while a model trains use greedy search, and all others beam search. Data, splits and
    options are those of `TextToText`.

    Args:
        data: CSV, JSON lines, a JSON array or Parquet, or hf:name; or a folder of them or of text
            files with the same number of lines, such as train.de and train.en.
        source: The column of the source; for text files the end of their names, such as "de".
        target: The column of the target; for text files the end of their names.
        test: Start of the name of the test file, if there are several: "test_2016". None: all.
        length: Maximum number of tokens of each text; longer ones are truncated.
        tokenizer: "byte", "char" or "bpe", learned from the training split.
        vocab_size: Number of tokens for "bpe", of each vocabulary.
        vocabulary: "shared" by sources and targets, whose embeddings the model then shares, or
            "separate".
        lowercase: Lower-case all texts, and measure BLEU on them.
        beams: Hypotheses of beam search; 1 is greedy search.
        length_penalty: Exponent of the length in the score of a hypothesis.
        missing: What to do with rows without source or target: "drop" or "error".
        encoding: Encoding of the files.
        seed: Seed of the splits.
    """

    def __init__(
        self,
        data: str | Path,
        *,
        source: str = "source",
        target: str = "target",
        test: str | None = None,
        length: int = 128,
        tokenizer: str = "bpe",
        vocab_size: int | None = None,
        vocabulary: str = "shared",
        lowercase: bool = False,
        beams: int = 4,
        length_penalty: float = 1.0,
        missing: str = "drop",
        encoding: str = "utf-8",
        seed: int = 0,
    ) -> None:
        bleu, chrf = BLEU(lowercase=lowercase), CharacterFScore()
        super().__init__(
            data,
            source=source,
            target=target,
            test=test,
            length=length,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            vocabulary=vocabulary,
            lowercase=lowercase,
            beams=beams,
            length_penalty=length_penalty,
            missing=missing,
            encoding=encoding,
            seed=seed,
        )
        self.metrics = (bleu, chrf, *self.metrics)


def _read_pairs(
    data: str | Path, source: str, target: str, test: str | None, encoding: str
) -> tuple[Mapping[str, Rows], list[str]]:
    """Rows with the columns `source` and `target`, from rows or from files with aligned lines, and
    the names of the test files that are aligned."""
    folder = None
    if not str(data).startswith(HUGGING_FACE) and existing_path(data).is_dir():
        folder = existing_path(data)
        types = {file_type(file).removeprefix(".") for file in folder.iterdir() if file.is_file()}
        if source.lower() not in types and {f".{each}" for each in types} & set(READERS):
            folder = None
    if folder is None:
        if test is not None:
            raise ValueError("test is the name of one of several aligned test files in a folder.")
        return read_rows(data, encoding), []

    pairs: dict[str, list[tuple[Path, Path]]] = {}
    sides = [
        {split: {_stem(file): file for file in files} for split, files in found.items()}
        for found in (files_by_split(folder, [f".{name.lower()}"]) for name in (source, target))
    ]
    for split in sides[0].keys() | sides[1].keys():
        first, second = (side.get(split, {}) for side in sides)
        if split == "test" and test is not None:
            names = sorted(first.keys() | second.keys())
            if not any(name.startswith(test) for name in names):
                raise ValueError(f"No test file {test!r}: {did_you_mean(test, names)}")
            first, second = (
                {name: file for name, file in side.items() if name.startswith(test)}
                for side in (first, second)
            )
        for name in sorted(first.keys() ^ second.keys()):
            there, missing = (source, target) if name in first else (target, source)
            raise ValueError(
                f"{folder} has {name}.{there} but no {name}.{missing}: each file needs its partner."
            )
        pairs[split] = [(first[name], second[name]) for name in sorted(first)]
    if test is not None and "test" not in pairs:
        raise ValueError(f"test={test!r}, but {folder} has no test files.")

    def read_files(pairs: list[tuple[Path, Path]]) -> RowIterator:
        for first, second in pairs:
            # a carriage return inside a sentence ends no line
            with (
                open_text(first, encoding, newline="\n") as lines,
                open_text(second, encoding, newline="\n") as others,
            ):
                for number, (line, other) in enumerate(zip_longest(lines, others), 1):
                    if line is None or other is None:
                        longer, shorter = (second, first) if line is None else (first, second)
                        raise ValueError(
                            f"{longer} has more lines than {shorter}, which has {number - 1}: "
                            "they do not belong together."
                        )
                    row = {source: line.rstrip("\r\n"), target: other.rstrip("\r\n")}
                    yield f"line {number} of {first}", row

    rows = {split: Rows(partial(read_files, files)) for split, files in pairs.items()}
    return rows, [_stem(first) for first, _ in pairs.get("test", [])]


def _stem(file: Path) -> str:
    """The name of a file without its language and compression."""
    stem = file.with_suffix("") if file.suffix.lower() in COMPRESSED else file
    return stem.with_suffix("").name
