"""Few-shot prompts that ask for a table of what a text says.

    There are many fruits on the planet Goocrux. There are neoskizzles, which are purple ...

    Please make a table summarizing the fruits from Goocrux
    | Fruit | Color | Flavor |

The fruits do not exist, so no model has read about them. The model writes the rows, and the table
is read and compared with the expected one, cell by cell.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from regard.deep_init import evaluation_mode
from regard.hf.decoding import check_causal_lm, decoding_step
from regard.hf.few_shot import BLOCK_END, FewShotScore, context_limit, read_common_prefix
from regard.models.generation import generate
from regard.models.stopping_criteria import StoppingCriteria
from regard.state import take

COLUMNS = ("Fruit", "Color", "Flavor")
COLORS = (
    "purple", "grayish blue", "bright green", "neon pink", "pale orange", "dark red", "golden",
    "silver", "snow white", "deep blue", "brown", "black",
)  # fmt: skip
FLAVORS = (
    "sweet", "tart", "savory", "sour", "bitter", "salty", "spicy", "smoky", "nutty", "minty",
    "buttery", "like cotton candy",
)  # fmt: skip
SENTENCES = (
    "There are {name}, which are {color} and taste {flavor}.",
    "{Name} have a {color} skin, and they are {flavor}.",
    "You also find {name}: their color is {color} and their flavor is {flavor}.",
    "Another fruit there, the {name}, tastes {flavor} and is {color}.",
)
SYLLABLES = ("lo", "hek", "pou", "nit", "glo", "skiz", "dra", "mup", "fin", "quo", "zel", "bra")
TRAIN, FRUITS = 64, 3  # passages to draw examples from, fruits of a passage
RESAMPLES = 2000


class Passage(NamedTuple):
    """A text about fruits, and the rows of its table."""

    planet: str
    text: str
    rows: list[tuple[str, str, str]]

    def question(self) -> str:
        """The prompt up to the first row of the table."""
        header = f"| {' | '.join(COLUMNS)} |"
        return (
            f"{self.text}\n\nPlease make a table summarizing the fruits from {self.planet}\n"
            f"{header}\n"
        )

    def table(self) -> str:
        """The rows of the table."""
        return "\n".join(f"| {' | '.join(row)} |" for row in self.rows)


GOOCRUX = Passage(
    "Goocrux",
    "Many fruits grow on the planet Goocrux. There are neoskizzles, which are purple and taste "
    "sweet. Loheckles have a grayish blue skin, and they are tart. Then there are pounits: their "
    "color is bright green and their flavor is savory. Loopnovas are neon pink and taste like "
    "cotton candy. The last fruit, the glowls, tastes sour and is pale orange.",
    [
        ("Neoskizzles", "Purple", "Sweet"),
        ("Loheckles", "Grayish blue", "Tart"),
        ("Pounits", "Bright green", "Savory"),
        ("Loopnovas", "Neon pink", "Cotton candy"),
        ("Glowls", "Pale orange", "Sour"),
    ],
)


class TablePrompts:
    """Prompts of k passages with their tables and a passage whose table is asked for.

    Args:
        examples: Number of test passages; the first is about the planet Goocrux.
        seed: Seed of the passages.
    """

    def __init__(self, examples: int = 16, seed: int = 0) -> None:
        self.train = [make_passage(random.Random(f"{seed} train {i}")) for i in range(TRAIN)]
        others = [make_passage(random.Random(f"{seed} test {i}")) for i in range(examples - 1)]
        self.test = [GOOCRUX, *others]

    def examples(self, shots: int) -> list[Passage]:
        """The k passages of a prompt."""
        if shots > TRAIN:
            raise ValueError(f"{shots} examples, but there are {TRAIN} training passages.")
        return self.train[:shots]

    def prompt(self, passage: Passage, shots: int) -> str:
        """The prompt for a passage, up to the first row of its table."""
        blocks = [each.question() + each.table() for each in self.examples(shots)]
        return BLOCK_END.join([*blocks, passage.question()])


def make_passage(rng: random.Random) -> Passage:
    """A passage about invented fruits of an invented planet."""
    words: list[str] = []
    while len(words) < FRUITS + 1:
        word = "".join(rng.sample(SYLLABLES, 2))
        if word not in words:
            words.append(word)
    planet, names = words[0].capitalize(), [f"{word}s" for word in words[1:]]
    colors, flavors = rng.sample(COLORS, FRUITS), rng.sample(FLAVORS, FRUITS)
    patterns = rng.sample(SENTENCES, FRUITS)
    sentences = [f"Many fruits grow on the planet {planet}."]
    rows = []
    for pattern, name, color, flavor in zip(patterns, names, colors, flavors, strict=True):
        sentences.append(
            pattern.format(name=name, Name=name.capitalize(), color=color, flavor=flavor)
        )
        cell = flavor.removeprefix("like ")
        rows.append((name.capitalize(), color.capitalize(), cell.capitalize()))
    return Passage(planet, " ".join(sentences), rows)


# ---------------------------------------------------------------------------------------- judging
def parse_table(text: str) -> list[tuple[str, ...]]:
    """The rows of a table in Markdown, up to the first line that is no row; rules are left out."""
    rows = []
    for line in text.strip().splitlines():
        if "|" not in line:
            break
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            rows.append(cells)
    return rows


def score_table(rows: Sequence[tuple[str, ...]], expected: Sequence[tuple[str, ...]]) -> float:
    """Share of right cells: those of rows with the same first cell, without regard to case, over
    the cells of the larger table, so that invented rows count as errors."""
    found = {row[0].casefold(): row for row in reversed(rows)}
    right = sum(
        cell.casefold() == other.casefold()
        for row in expected
        if row[0].casefold() in found
        for cell, other in zip(row, found[row[0].casefold()], strict=False)
    )
    return right / (len(COLUMNS) * max(len(rows), len(expected)))


def bootstrap_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap: 95 % of the means of resampled passages. Cells of one table are not
    independent, so that Wilson's interval does not apply."""
    rng = np.random.default_rng(0)
    values = np.asarray(scores)
    means = values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def evaluate_tables(
    model: nn.Module,
    tokenizer: Any,
    prompts: TablePrompts,
    shots: Sequence[int],
    *,
    context: int | None = None,
) -> list[FewShotScore]:
    """Share of right cells in the tables that a model writes, by greedy search."""
    check_causal_lm(model)
    step = decoding_step(model, logits_to_keep=1)
    longest = max(len(tokenizer(passage.table())["input_ids"]) for passage in prompts.test)
    max_new_tokens = longest + longest // 4
    limit = context_limit(model, context)
    stop = StoppingCriteria(
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        strings=[BLOCK_END],
        decode=lambda new: str(tokenizer.decode(new)),
    )
    device = next(model.parameters()).device
    results = []
    for k in shots:
        texts = [prompts.prompt(passage, k) for passage in prompts.test]
        tokens: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
        needed = max(map(len, tokens)) + max_new_tokens
        if limit is not None and needed > limit:
            raise ValueError(
                f"Prompts with {k} examples need {needed} tokens with the answer; the context has "
                f"{limit}: use fewer examples."
            )
        with evaluation_mode(model):
            shared, state = read_common_prefix(model, tokens)
            outputs = generate(
                step,
                [row[shared:] for row in tokens],
                max_new_tokens=max_new_tokens,
                stop=stop,
                state=None if state is None else take(state, [0] * len(tokens)),
                device=device,
            )
        results.append(
            _table_score(k, [parse_table(output.text or "") for output in outputs], prompts.test)
        )
    return results


def dictionary_baseline(prompts: TablePrompts, shots: int | None) -> FewShotScore:
    """Tables without a network: unknown words are fruits, and the next known color and flavor are
    theirs.

    Args:
        shots: Number of passages that it knows; None: all.
    """
    known = prompts.train if shots is None else prompts.examples(shots)
    names = {row[0].casefold() for passage in known for row in passage.rows}
    names |= {passage.planet.casefold() for passage in known}
    words = {word.casefold() for passage in known for word in re.findall(r"\w+", passage.text)}
    words -= names
    columns = [{row[i].casefold() for passage in known for row in passage.rows} for i in (1, 2)]

    def table(text: str) -> list[tuple[str, ...]]:
        unknown = [m for m in re.finditer(r"\w+", text) if m[0].casefold() not in words]
        rows = []
        for match in unknown:
            rest = text[match.end() :].casefold()
            firsts = [[(rest.find(value), value) for value in column] for column in columns]
            nearest = [min((at for at in each if at[0] >= 0), default=None) for each in firsts]
            if all(nearest):
                rows.append((match[0], *(at[1] for at in nearest if at is not None)))
        return rows

    tables = [table(passage.text) if known else [] for passage in prompts.test]
    return _table_score(len(known), tables, prompts.test)


def _table_score(
    shots: int, tables: Sequence[list[tuple[str, ...]]], passages: Sequence[Passage]
) -> FewShotScore:
    scores = [
        score_table(rows, passage.rows) for rows, passage in zip(tables, passages, strict=True)
    ]
    return FewShotScore(shots, float(np.mean(scores)), *bootstrap_interval(scores), len(scores))
