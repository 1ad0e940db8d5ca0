"""A small language with known entropy, so that the best possible language model is known.

    the SUBJECT (that the NOUN VERB)* VERB the OBJECT.

Each verb agrees in number with its noun; the last verb agrees with the subject, after any number of
clauses. All choices are independent and uniform, except the number of clauses, which is geometric
with probability 1/2, and every sentence has one derivation. So the entropy of a sentence is the sum
of the entropies of its choices; divided by the expected length, it is the entropy per character.
"""

from __future__ import annotations

import math

import numpy as np

NOUNS = [
    "dog",
    "cat",
    "bird",
    "horse",
    "child",
    "farmer",
    "sailor",
    "painter",
    "teacher",
    "river",
    "tower",
    "garden",
    "letter",
    "winter",
    "lantern",
    "road",
]
VERBS = ["see", "follow", "know", "help", "find", "remember", "paint", "call"]
PLURALS = {"child": "children"}
CLAUSE_PROBABILITY = 0.5


def inflect_noun(word: str, plural: int) -> str:
    """The singular or plural of a noun: "dog", "dogs"."""
    return PLURALS.get(word, f"{word}s") if plural else word


def inflect_verb(word: str, plural: int) -> str:
    """The singular or plural of a verb: "sees", "see"."""
    return word if plural else f"{word}s"


def generate_sentence(rng: np.random.Generator, *, agree: bool = True) -> str:
    """A random sentence; with agree=False, the last verb has the wrong number."""

    def draw_noun() -> tuple[str, int]:
        plural = int(rng.integers(2))
        return inflect_noun(NOUNS[rng.integers(len(NOUNS))], plural), plural

    def draw_verb(plural: int) -> str:
        return inflect_verb(VERBS[rng.integers(len(VERBS))], plural)

    subject, subject_plural = draw_noun()
    clauses = ""
    while rng.random() < CLAUSE_PROBABILITY:
        noun, plural = draw_noun()
        clauses += f" that the {noun} {draw_verb(plural)}"
    verb = draw_verb(subject_plural if agree else 1 - subject_plural)
    return f"the {subject}{clauses} {verb} the {draw_noun()[0]}."


def generate_text(rng: np.random.Generator, sentences: int) -> str:
    """Random sentences, one per line."""
    return "".join(f"{generate_sentence(rng)}\n" for _ in range(sentences))


def entropy_per_character() -> float:
    """Entropy of the language in bits per character: a lower bound for any model, on average."""
    noun_bits, verb_bits = math.log2(2 * len(NOUNS)), math.log2(len(VERBS))
    p = CLAUSE_PROBABILITY
    clauses = p / (1 - p)  # expected number
    count_bits = -math.log2(1 - p) - clauses * math.log2(p)
    sentence_bits = 2 * noun_bits + verb_bits + clauses * (noun_bits + verb_bits) + count_bits
    return sentence_bits / expected_length()


def expected_length() -> float:
    """Expected number of characters of a sentence, including the newline."""
    noun = np.mean([len(inflect_noun(word, plural)) for word in NOUNS for plural in (0, 1)])
    verb = np.mean([len(inflect_verb(word, plural)) for word in VERBS for plural in (0, 1)])
    clauses = CLAUSE_PROBABILITY / (1 - CLAUSE_PROBABILITY)
    main = len("the ") + noun + len(" ") + verb + len(" the ") + noun + len(".\n")
    return float(main + clauses * (len(" that the ") + noun + len(" ") + verb))
