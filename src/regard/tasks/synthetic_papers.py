"""Generated pairs of short papers, with or without citations in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
TOPICS = {
    "rivers": "flow delta bank flood silt",
    "birds": "wing nest song egg flight",
    "bridges": "span arch pier cable load",
    "bread": "dough crust yeast oven flour",
    "clocks": "gear hand spring chime dial",
    "glass": "lens pane bead kiln mould",
}
CITING = (
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
CITATIONS = 4  # of a paper
SHARED = 2  # citations that two matching papers have in common
YEARS = (1900, 2000)
MIN_BYTES = 320  # always enough for the title and the citations


def generate_papers(rng: np.random.Generator, length: int) -> tuple[str, str, int]:
    """Two papers of at most `length` bytes, and 1 if they have citations in common.

    Neither topics nor names reveal the class: topics agree equally often in both classes, and the
    papers always cite the same author with two different years.
    """
    match = int(rng.integers(2))
    names: set[str] = set()
    while len(names) < 2 * CITATIONS:
        names.add("".join(rng.choice(SYLLABLES, 3)).capitalize())
    works = [f"{name} {rng.integers(*YEARS)}" for name in rng.permutation(sorted(names))]
    first, second = works[:CITATIONS], works[CITATIONS:]
    if match:
        second[:SHARED] = first[:SHARED]
    other_year, used = first[-1], {*first, *second}
    while other_year in used:
        other_year = f"{first[-1].split()[0]} {rng.integers(*YEARS)}"
    second[-1] = other_year
    topics = rng.permutation(len(TOPICS))[:2]
    topics[1] = topics[int(rng.integers(2))]
    one = _generate_paper(rng, int(topics[0]), first, length)
    return one, _generate_paper(rng, int(topics[1]), second, length), match


def _generate_paper(rng: np.random.Generator, topic: int, works: list[str], length: int) -> str:
    """A title, a sentence for each citation, and other sentences between them."""
    title, words = list(TOPICS)[topic], list(TOPICS.values())[topic].split()

    def fill(forms: Sequence[str]) -> str:
        a, b = rng.permutation(len(words))[:2]
        form = forms[int(rng.integers(len(forms)))]
        return form.replace("{a}", words[a]).replace("{b}", words[b])

    sentences = [fill(CITING).replace("{work}", work) for work in rng.permutation(works)]
    room = length - len(f"On {title}.") - sum(len(sentence) + 1 for sentence in sentences)
    while True:
        sentence = fill(ASIDES)
        room -= len(sentence) + 1
        if room < 0 or rng.random() < 0.02:  # so that the lengths vary
            return " ".join((f"On {title}.", *sentences))
        sentences.insert(int(rng.integers(len(sentences) + 1)), sentence)
