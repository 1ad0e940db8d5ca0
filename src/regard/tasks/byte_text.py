"""Text classification byte by byte, as in Long Range Arena."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from regard.errors import check_int, did_you_mean
from regard.tasks.base import SPLITS, Example, with_prediction
from regard.tasks.dataset_files import (
    BUILT_IN,
    HELD_OUT,
    find_split_files,
    hold_out,
    read_labelled_texts,
    resolve_dataset,
)
from regard.tasks.example_source import (
    ExampleSource,
    GeneratedExamples,
    SourceTask,
    StoredExamples,
    check_generated_only,
)
from regard.tasks.processors import Prediction
from regard.tasks.rendering import Rendered
from regard.tasks.synthetic_reviews import MIN_BYTES, generate_review

VOCAB_SIZE = 257  # bytes and padding
DATASETS = {"imdb": "imdb"}

LabelledTexts = list[tuple[str, str]]


class ByteTextClassification(SourceTask):
    """Classify a text as a sequence of bytes (Long Range Arena, Tay et al. 2020, arXiv 2011.04006,
    with the texts of IMDb, Maas et al. 2011).

    Args:
        length: Maximum number of bytes; longer texts are truncated.
        data: "built-in": generated reviews, see `regard.tasks.synthetic_reviews`; "imdb" in the
            folder REGARD_DATA; a JSON lines file with "text" and "label", or a folder of such files
            named train, valid and test, also .gz or .xz. Missing splits get a tenth of the training
            texts.
        seed: Seed of the generated or of the held-out texts.
        examples: Size of the training split of generated texts. None: endless.
    """

    def __init__(
        self,
        length: int = 512,
        *,
        data: str = BUILT_IN,
        seed: int = 0,
        examples: int | None = None,
    ) -> None:
        check_int(1, length=length)
        self.data = data
        self.names: tuple[str, ...] = ("bad", "good")
        source: ExampleSource = GeneratedExamples(self.draw, seed=seed, examples=examples)
        if data != BUILT_IN:
            check_generated_only(data, examples=examples)
            splits = _load_splits(resolve_dataset(data, DATASETS), seed)
            self.names = tuple(sorted({label for _, label in splits["train"]}))
            for split, texts in splits.items():
                if unknown := {label for _, label in texts} - set(self.names):
                    raise ValueError(
                        f"The {split} split has the label {min(unknown)!r}, "
                        "which no training text has."
                    )
            source = self._stored_examples(splits, length)
        elif length < MIN_BYTES:
            raise ValueError(
                f"Built-in reviews have at least {MIN_BYTES} bytes: length={length} is too short."
            )
        super().__init__(source, vocab_size=VOCAB_SIZE, classes=len(self.names), length=length)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Generate the bytes of a review and its class."""
        text, label = generate_review(rng, self.length)
        return encode_bytes(text, self.length), label

    def _stored_examples(self, splits: dict[str, LabelledTexts], length: int) -> StoredExamples:
        def get(split: str, index: int) -> tuple[np.ndarray, int]:
            text, label = splits[split][index]
            return encode_bytes(text, length), self.names.index(label)

        return StoredExamples({split: len(texts) for split, texts in splits.items()}, get)

    def render(self, example: Example, prediction: Prediction | None = None) -> Rendered:
        """The text and its class."""
        source = "generated review" if self.data == BUILT_IN else f"text of {self.data}"
        name = self.names[int(example.targets["labels"])]
        text = wrap_bytes(example.inputs["x"].numpy())
        return with_prediction(f"{text}\n{source}: {name}", prediction)


def encode_bytes(text: str, length: int) -> np.ndarray:
    """The first bytes of a text as tokens 1..256; 0 is padding."""
    content = text[:length].encode("utf-8", "surrogatepass")[:length]
    return np.frombuffer(content, np.uint8).astype(np.int64) + 1


def wrap_bytes(tokens: np.ndarray) -> str:
    """Tokens as lines of text."""
    text = bytes((tokens[tokens > 0] - 1).tolist()).decode("utf-8", "replace")
    return "\n".join(textwrap.wrap(text, 100))


def _load_splits(path: Path, seed: int) -> dict[str, LabelledTexts]:
    """The texts of each split; splits without a file get a tenth of the training texts."""
    if path.is_file():
        splits = {"train": read_labelled_texts(path)}
    else:
        files = find_split_files(path, ".jsonl")
        if "train" not in files:
            names = sorted(file.name for file in path.iterdir())
            hint = did_you_mean("train.jsonl", names) if names else "it is empty."
            raise ValueError(f"{path} has no train.jsonl, nor .gz or .xz: {hint}")
        splits = {split: read_labelled_texts(file) for split, file in files.items()}
    missing = [split for split in SPLITS if split not in splits]
    texts = splits["train"]
    count = max(1, len(texts) // HELD_OUT)
    if len(texts) <= count * len(missing):
        raise ValueError(
            f"{len(texts)} texts are too few to hold some out for {' and '.join(missing)}."
        )
    return splits | hold_out(texts, missing, count, seed) if missing else splits
