"""Pairs of short papers, made up: do they cite a work in common?"""

from __future__ import annotations

import numpy as np

SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
TOPICS = (
    ("rivers", ("flow", "delta", "bank", "flood", "silt")),
    ("birds", ("wing", "nest", "song", "egg", "flight")),
    ("bridges", ("span", "arch", "pier", "cable", "load")),
    ("bread", ("dough", "crust", "yeast", "oven", "flour")),
    ("clocks", ("gear", "hand", "spring", "chime", "dial")),
    ("glass", ("lens", "pane", "bead", "kiln", "mould")),
)
SAYS = (
    "The {a} depends on the {b} ({work}).",
    "As {work} showed, no {a} goes without {b}.",
    "We follow {work} and measure each {a}.",
    "Others doubt that the {a} changes the {b} ({work}).",
    "The {a} of {work} was found again.",
)
ASIDES = (
    "We looked at every {a} twice.",
    "The {b} was kept as it was.",
    "A larger {a} gave the same result.",
    "It is not known why the {b} differs.",
    "The method was the usual one.",
    "We thank those who lent us their {a}.",
)
WORKS = 4  # that a paper cites
SHARED = 2  # of them, by both papers of a pair that matches
YEARS = (1900, 2000)
SHORTEST = 320  # bytes that always hold the title and the sentences that cite


def papers(random: np.random.Generator, length: int) -> tuple[str, str, int]:
    """Two texts of at most so many bytes, and 1 if they cite works in common.  Topics tell nothing: they are the same as often
    with and without; and in both cases, one name stands in both with another year."""
    match = int(random.integers(2))
    works = _works(random, 2 * WORKS)
    mine, theirs = works[:WORKS], works[WORKS:]
    if match:
        theirs[:SHARED] = mine[:SHARED]
    theirs[-1] = _another_year(random, mine[-1], {*mine, *theirs})
    topics = random.permutation(len(TOPICS))[:2]
    topics[1] = topics[int(random.integers(2))]
    one, two = (
        _paper(random, int(topic), cited, length)
        for topic, cited in zip(topics, (mine, theirs), strict=True)
    )
    return one, two, match


def _works(random: np.random.Generator, count: int) -> list[str]:
    """Names, no two alike, and years."""
    found: set[str] = set()
    while len(found) < count:
        found.add("".join(random.choice(SYLLABLES, 3)).capitalize())
    return [f"{name} {random.integers(*YEARS)}" for name in random.permutation(sorted(found))]


def _another_year(random: np.random.Generator, work: str, taken: set[str]) -> str:
    while True:
        other = f"{work.split()[0]} {random.integers(*YEARS)}"
        if other not in taken:
            return other


def _paper(random: np.random.Generator, topic: int, works: list[str], length: int) -> str:
    """A title, a sentence for each work, and others among them as far as there is room."""
    title, words = TOPICS[topic]
    sentences = [
        _filled(random, SAYS, words).replace("{work}", work) for work in random.permutation(works)
    ]
    room = length - len(f"On {title}.") - sum(len(sentence) + 1 for sentence in sentences)
    while True:
        sentence = _filled(random, ASIDES, words)
        room -= len(sentence) + 1
        if room < 0 or random.random() < 0.02:  # so that not all are of the same length
            return " ".join((f"On {title}.", *sentences))
        sentences.insert(int(random.integers(len(sentences) + 1)), sentence)


def _filled(random: np.random.Generator, forms: tuple[str, ...], words: tuple[str, ...]) -> str:
    a, b = random.permutation(len(words))[:2]
    return forms[int(random.integers(len(forms)))].replace("{a}", words[a]).replace("{b}", words[b])
