"""Few-shot prompting: how well a causal language model classifies from k examples in its prompt
(Brown et al. 2020, arXiv 2005.14165).

    prompts = ClassificationPrompts(train, test, template="Review: {text}\\nSentiment: {label}")
    for score in evaluate_prompts(model, tokenizer, prompts, shots=(0, 2, 8)):
        print(score)

Nothing is trained. The prompt shows k texts with their labels and then a text without; the answer
is the label with the largest log-likelihood. All prompts with the same examples share a prefix,
which the model reads once.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.deep_init import evaluation_mode
from regard.errors import check_choice, check_int, did_you_mean
from regard.hf.decoding import check_causal_lm, decoding_step
from regard.hf.model_inputs import max_length
from regard.state import State, take
from regard.tasks.baselines import MAX_TEXTS, tfidf_linear
from regard.tasks.text_classification import LabelledText
from regard.tasks.tokenizers import replace_surrogates

BLOCK_END = "\n\n"  # between the examples of a prompt
BATCH_TOKENS = 1024  # of the batches in which prompts are read
CONTENT_FREE = ("N/A", "", "[MASK]")  # inputs of Zhao et al. 2021
Z = 1.959963984540054  # of an interval of 95 %
TOO_LONG = ("error", "drop")


class FewShotScore(NamedTuple):
    """Accuracy with k examples in the prompt.

    Attributes:
        shots: k.
        accuracy: Share of right answers.
        low, high: Interval of 95 %, over test examples.
        examples: Number of test examples.
    """

    shots: int
    accuracy: float
    low: float
    high: float
    examples: int

    def __str__(self) -> str:
        return f"{self.accuracy:.2f} [{self.low:.2f}, {self.high:.2f}]"


def wilson_interval(correct: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (Wilson 1927): it stays within 0 and 1, and is not empty
    when all answers are right."""
    share, spread = correct / count, Z**2 / count
    centre = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


class ClassificationPrompts:
    """Prompts of k labelled texts and a text whose label is asked for.

    The examples of a prompt are a random, balanced draw from the training texts: each label once,
    in random order, then each a second time, and so on. The first k of a draw are the draw of k.

    Args:
        train: Labelled texts to draw examples from.
        test: Labelled texts to ask for.
        template: How a text with its label is written; it ends with {label}.
        instruction: Text before the examples.
        label_words: What stands for a label, by label. Default: the label itself.
        examples: Number of test texts, a random sample with the shares of the labels. None: all.
        seed: Seed of the draw of examples and of the sample.
    """

    def __init__(
        self,
        train: Sequence[LabelledText],
        test: Sequence[LabelledText],
        *,
        template: str = "Text: {text}\nLabel: {label}",
        instruction: str = "",
        label_words: Mapping[str, str] | None = None,
        examples: int | None = None,
        seed: int = 0,
    ) -> None:
        check_int(0, seed=seed)
        if examples is not None:
            check_int(1, examples=examples)
        if template.count("{text}") != 1 or not re.search(r"\{label\}$", template):
            raise ValueError(
                "The template contains {text} once and ends with {label}, such as "
                f"'Review: {{text}}\\nSentiment: {{label}}', not {template!r}."
            )
        self.train, self.instruction, self.seed = list(train), instruction, seed
        self.question, self.space = split_template(template)
        self.labels = sorted({row.label for row in self.train})
        if len(self.labels) < 2:
            raise ValueError("The training texts have one label: there is nothing to choose.")
        unknown = {row.label for row in test} - set(self.labels)
        if unknown:
            raise ValueError(f"No training text has the label {min(unknown)!r} of a test text.")
        self.label_words = self._check_words(label_words or {})
        rng = np.random.default_rng([seed, 1])
        self.test = stratified_sample(list(test), examples or len(test), rng)

    def _check_words(self, given: Mapping[str, str]) -> dict[str, str]:
        for label in given:
            if label not in self.labels:
                hint = did_you_mean(label, self.labels)
                raise ValueError(f"A word is given for {label!r}, which is no label: {hint}")
        words = {label: given.get(label, label).strip() for label in self.labels}
        if len(set(words.values())) < len(words) or not all(words.values()):
            raise ValueError(f"Each label needs a word of its own, not {words}.")
        return words

    @cached_property
    def draw(self) -> list[LabelledText]:
        """All training texts in the order in which they become examples."""
        rng = np.random.default_rng([self.seed, 0])
        by_label = defaultdict(list)
        for index in rng.permutation(len(self.train)):
            by_label[self.train[index].label].append(self.train[index])
        drawn = []
        while any(by_label.values()):
            for number in rng.permutation(len(self.labels)):
                rows = by_label[self.labels[number]]
                if rows:
                    drawn.append(rows.pop())
        return drawn

    def examples(self, shots: int) -> list[LabelledText]:
        """The k labelled texts of a prompt."""
        if shots > len(self.draw):
            raise ValueError(f"{shots} examples, but there are {len(self.draw)} training texts.")
        return self.draw[:shots]

    def prompt(self, text: str, shots: int) -> str:
        """The prompt for a text, up to the label."""
        blocks = [self.instruction] if self.instruction else []
        for row in self.examples(shots):
            blocks.append(self.ask(row.text) + self.answer(row.label))
        return BLOCK_END.join([*blocks, self.ask(text)])

    def ask(self, text: str) -> str:
        """A text in the template, up to the label; white space becomes single spaces."""
        return self.question.replace("{text}", " ".join(replace_surrogates(text).split()))

    def answer(self, label: str) -> str:
        """What follows the prompt if the answer is this label."""
        return self.space + self.label_words[label]


def split_template(template: str) -> tuple[str, str]:
    """The template up to the label, and the white space before the label, which most tokenizers
    make part of the next token."""
    question = template.removesuffix("{label}")
    stripped = question.rstrip(" ")
    return stripped, question[len(stripped) :]


def stratified_sample(
    rows: list[LabelledText], count: int, rng: np.random.Generator
) -> list[LabelledText]:
    """A random sample in which each label has its share."""
    by_label = defaultdict(list)
    for index in rng.permutation(len(rows)):
        by_label[rows[index].label].append(rows[index])
    places = [
        ((rank + rng.random()) / len(each), row)
        for each in by_label.values()
        for rank, row in enumerate(each)
    ]
    places.sort(key=lambda place: place[0])
    return [row for _, row in places[:count]]


# ------------------------------------------------------------------------------------- evaluation
def evaluate_prompts(
    model: nn.Module,
    tokenizer: Any,
    prompts: ClassificationPrompts,
    shots: Sequence[int],
    *,
    normalize: bool = False,
    calibrate: bool = False,
    context: int | None = None,
    too_long: str = "error",
) -> list[FewShotScore]:
    """Accuracy of a causal language model for each number of examples in the prompt.

    Args:
        model: A causal language model of transformers, swapped or not.
        shots: Numbers of examples in the prompt.
        normalize: Divide the log-likelihood of a label by its number of tokens.
        calibrate: Divide the probabilities of the labels by those for texts without content
            ("N/A", "" and "[MASK]"), which shows what the model answers anyway
            (Zhao et al. 2021, arXiv 2102.09690).
        context: Maximum number of tokens of a prompt. Default: that of the model.
        too_long: What to do with prompts that are longer: "error", or "drop" to leave the test
            text out, for all numbers of examples.
    """
    check_causal_lm(model)
    kept = fitting_texts(model, tokenizer, prompts, max(shots), context, too_long)
    scores = []
    for k in shots:
        likelihoods = label_likelihoods(
            model, tokenizer, prompts, [row.text for row in kept], k, normalize=normalize
        )
        if calibrate:
            free = label_likelihoods(
                model, tokenizer, prompts, CONTENT_FREE, k, normalize=normalize
            )
            likelihoods = likelihoods - free.softmax(-1).mean(0).log()
        answers = [prompts.labels[i] for i in likelihoods.argmax(-1).tolist()]
        correct = sum(answer == row.label for answer, row in zip(answers, kept, strict=True))
        interval = wilson_interval(correct, len(kept))
        scores.append(FewShotScore(k, correct / len(kept), *interval, len(kept)))
    return scores


def fitting_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: ClassificationPrompts,
    shots: int,
    context: int | None = None,
    too_long: str = "error",
) -> list[LabelledText]:
    """The test texts whose prompts with so many examples fit into the context."""
    check_choice("too_long", too_long, TOO_LONG)
    limit = context_limit(model, context)
    if limit is None:
        return prompts.test
    lengths = [
        max(len(_encode(tokenizer, prompt + prompts.answer(label))) for label in prompts.labels)
        for prompt in (prompts.prompt(row.text, shots) for row in prompts.test)
    ]
    kept = [row for row, n in zip(prompts.test, lengths, strict=True) if n <= limit]
    if len(kept) < len(lengths) and too_long == "error":
        raise ValueError(
            f"{len(lengths) - len(kept)} of {len(lengths)} prompts with {shots} examples have more "
            f"than {limit} tokens (the longest {max(lengths)}): use fewer examples or shorter "
            'texts, or too_long="drop" to leave these out.'
        )
    if not kept:
        raise ValueError(
            f"No prompt with {shots} examples fits into {limit} tokens: the shortest has "
            f"{min(lengths)}."
        )
    return kept


def context_limit(model: nn.Module, context: int | None) -> int | None:
    """Maximum number of tokens: that of the model, or a smaller one."""
    limit = max_length(model)
    if context is None:
        return limit
    check_int(1, context=context)
    if limit is not None and context > limit:
        raise ValueError(f"context={context}, but the model has {limit} positions.")
    return context


def label_likelihoods(
    model: nn.Module,
    tokenizer: Any,
    prompts: ClassificationPrompts,
    texts: Sequence[str],
    shots: int,
    *,
    normalize: bool = False,
) -> Tensor:
    """Log-likelihood (texts, labels) of each label after each prompt."""
    pairs, counts = [], []
    for text in texts:
        prompt = prompts.prompt(text, shots)
        for label in prompts.labels:
            start, ending = _split_tokens(tokenizer, prompt, prompts.answer(label))
            pairs.append((start, ending))
            counts.append(len(ending))
    total = ending_likelihoods(model, pairs).view(len(texts), len(prompts.labels))
    return total / torch.tensor(counts).view_as(total) if normalize else total


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def _split_tokens(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Tokens of prompt and answer together, split where they differ from those of the prompt."""
    alone, both = _encode(tokenizer, prompt), _encode(tokenizer, prompt + answer)
    start = common_length([alone, both])
    return both[:start], both[start:]


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest common prefix."""
    for i, tokens in enumerate(zip(*rows, strict=False)):
        if len(set(tokens)) > 1:
            return i
    return min(map(len, rows))


@torch.no_grad()
def ending_likelihoods(
    model: nn.Module, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Tensor:
    """log p(ending | start) of pairs of token lists, float64 (pairs).

    What all rows begin with is read once, and so are rows that differ in their last token only,
    such as labels of one token after the same prompt.
    """
    for start, ending in pairs:
        if not start or not ending:
            raise ValueError("A prompt or a label has no tokens.")
    rows = sorted({(*start, *ending[:-1]) for start, ending in pairs}, key=len)
    wanted = defaultdict(list)
    for number, (start, ending) in enumerate(pairs):
        wanted[(*start, *ending[:-1])].append((number, len(start), ending))
    device = next(model.parameters()).device
    likelihoods = torch.zeros(len(pairs), dtype=torch.float64)
    with evaluation_mode(model):
        shared, state = read_common_prefix(model, [start for start, _ in pairs])
        for batch in _batches(rows, shared):
            width = len(batch[-1])
            # Padding on the right: no earlier token sees it.
            padded = [[*row[shared:], *[0] * (width - len(row))] for row in batch]
            repeated = None if state is None else take(state, [0] * len(batch))
            first = min(length - 1 for row in batch for _, length, _ in wanted[row])
            step = decoding_step(model, logits_to_keep=width - first)
            logits, _ = step(torch.tensor(padded, device=device), repeated)
            first = width - logits.shape[1]  # some models compute all
            for row, row_logits in zip(batch, logits, strict=True):
                for number, length, ending in wanted[row]:
                    at = length - 1 - first
                    logp = row_logits[at : at + len(ending)].double().log_softmax(-1)
                    chosen = logp.gather(-1, torch.tensor(ending, device=device)[:, None])
                    likelihoods[number] = chosen.sum().cpu()
    return likelihoods


def read_common_prefix(model: nn.Module, rows: Sequence[Sequence[int]]) -> tuple[int, State]:
    """Read what all token lists begin with, at least their last tokens excepted.

    Returns:
        The number of tokens, and the state after them for one example; None for no tokens.
    """
    shared = min(common_length(rows), min(map(len, rows)) - 1)
    if not shared:
        return 0, None
    prefix = torch.tensor([list(rows[0][:shared])], device=next(model.parameters()).device)
    return shared, decoding_step(model, logits_to_keep=1)(prefix, None)[1]


def _batches(rows: Sequence[tuple[int, ...]], shared: int) -> list[list[tuple[int, ...]]]:
    """Rows, sorted by length, in batches of at most BATCH_TOKENS tokens with padding."""
    batches: list[list[tuple[int, ...]]] = [[]]
    for row in rows:
        if batches[-1] and (len(batches[-1]) + 1) * (len(row) - shared) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


# -------------------------------------------------------------------------------------- baselines
def majority_baseline(prompts: ClassificationPrompts, test: Sequence[LabelledText]) -> FewShotScore:
    """Accuracy of the most frequent label of all training texts."""
    labels = [row.label for row in prompts.train]
    answer = max(prompts.labels, key=labels.count)
    return _baseline_score(len(labels), sum(row.label == answer for row in test), len(test))


def tfidf_baseline(
    prompts: ClassificationPrompts, test: Sequence[LabelledText], shots: int | None
) -> FewShotScore | None:
    """Accuracy of a linear classifier on TF-IDF, trained on the examples of a prompt.

    Args:
        shots: Number of examples; None: all training texts, at most 20,000. With examples of one
            label it answers that label; without any there is no score.
    """
    train = prompts.draw[:MAX_TEXTS] if shots is None else prompts.examples(shots)
    if not train:
        return None
    answers = {row.label for row in train}
    if len(answers) == 1:
        correct = sum(row.label in answers for row in test)
    else:
        data = [
            ([row.text for row in rows], np.array([row.label for row in rows]))
            for rows in (train, test)
        ]
        correct = int(tfidf_linear(data[0], data[1])[:, 0].sum())
    return _baseline_score(len(train), correct, len(test))


def _baseline_score(count: int, correct: int, examples: int) -> FewShotScore:
    return FewShotScore(count, correct / examples, *wilson_interval(correct, examples), examples)
