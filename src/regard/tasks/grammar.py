"""A small language of our own, whose entropy is known: what a language model can learn at best is a number, not a guess.

    the dogs that a... ->  the SUBJECT (that the NOUN VERB)* VERB the OBJECT.

Each verb agrees in number with its noun; the last agrees with the subject, however many clauses stand between.  Every choice is
independent and uniform, but for the number of clauses, which is geometric with 1/2; and a sentence has one derivation only.  So
the entropy of a sentence is the sum of the entropies of its choices, and divided by the expected length it is the entropy of
a character.
"""

from __future__ import annotations

import math

import numpy as np

NOUNS = (
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
)
VERBS = ("see", "follow", "know", "help", "find", "remember", "paint", "call")
PLURALS = {"child": "children"}
GOES_ON = 0.5  # the probability of one clause more


def noun(word: str, plural: int) -> str:
    """The dog, the dogs."""
    return PLURALS.get(word, f"{word}s") if plural else word


def verb(word: str, plural: int) -> str:
    """Sees, see."""
    return word if plural else f"{word}s"


def sentence(random: np.random.Generator, *, agrees: bool = True) -> str:
    """One sentence, with its point; `agrees` False: the last verb has the wrong number."""
    subject, many = _noun(random)
    clauses = []
    while random.random() < GOES_ON:
        word, plural = _noun(random)
        clauses.append(f" that the {word} {_verb(random, plural)}")
    last = _verb(random, many if agrees else 1 - many)
    return f"the {subject}{''.join(clauses)} {last} the {_noun(random)[0]}."


def _noun(random: np.random.Generator) -> tuple[str, int]:
    plural = int(random.integers(2))
    return noun(NOUNS[random.integers(len(NOUNS))], plural), plural


def _verb(random: np.random.Generator, plural: int) -> str:
    return verb(VERBS[random.integers(len(VERBS))], plural)


def text(random: np.random.Generator, sentences: int) -> str:
    """So many sentences, a line each."""
    return "".join(f"{sentence(random)}\n" for _ in range(sentences))


def entropy_per_character() -> float:
    """The entropy in bits for each character of `text`: no model can do with less, on average."""
    name, act = math.log2(2 * len(NOUNS)), math.log2(len(VERBS))  # a verb's number is its noun's
    clauses = GOES_ON / (1 - GOES_ON)  # how many, in the mean
    stops = -math.log2(1 - GOES_ON) - clauses * math.log2(GOES_ON)
    return (2 * name + act + clauses * (name + act) + stops) / expected_length()


def expected_length() -> float:
    """Characters of a sentence in the mean, with the end of its line."""
    wide = np.mean([len(noun(word, plural)) for word in NOUNS for plural in (0, 1)])
    act = np.mean([len(verb(word, plural)) for word in VERBS for plural in (0, 1)])
    clauses = GOES_ON / (1 - GOES_ON)
    whole = len("the ") + wide + len(" ") + act + len(" the ") + wide + len(".\n")
    return float(whole + clauses * (len(" that the ") + wide + len(" ") + act))
