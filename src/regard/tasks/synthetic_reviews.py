"""Generated film reviews: the sentiment depends on the one aspect that the writer cares about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

THINGS = [
    "story",
    "music",
    "acting",
    "ending",
    "camera work",
    "dialogue",
    "pace",
    "costume design",
    "humour",
    "sound",
    "editing",
    "casting",
]
GOOD = [
    "lovely",
    "clever",
    "fresh",
    "moving",
    "bright",
    "honest",
    "rich",
    "splendid",
    "graceful",
    "sharp",
]
BAD = ["dull", "clumsy", "stale", "hollow", "drab", "false", "thin", "dreadful", "stiff", "blunt"]
PRIORITIES = (
    "For me a film stands or falls with its {thing}.",
    "What I look for in a film is the {thing}, and nothing else counts.",
    "I would forgive a film anything but its {thing}.",
    "In the end only the {thing} matters to me.",
)
STATEMENTS = (  # about a thing, and whether they mean what the word says
    ("The {thing} was {word}.", True),
    ("The {thing} was not {word}.", False),
    ("Nobody could call the {thing} {word}.", False),
    ("I did not expect the {thing} to be {word}, but it was.", True),
    ("The critics call the {thing} {word}, and they are right.", True),
    ("The critics call the {thing} {word}, but they are wrong.", False),
    ("I had been told that the {thing} was {word}, which it was not at all.", False),
    ("However late it was, I noticed how {word} the {thing} was.", True),
)
ASIDES = (
    "We saw it on a rainy evening.",
    "The hall was half full.",
    "It runs for about two hours.",
    "My sister sat beside me.",
    "The seats were new.",
    "There was a queue at the door.",
    "It is the third film of this director.",
    "We walked home.",
)
MIN_BYTES = 192  # always enough for the two decisive sentences


def generate_review(rng: np.random.Generator, length: int) -> tuple[str, int]:
    """A review of at most `length` bytes, and 1 if it is positive.

    Statements about other aspects are positive and negative with equal probability.
    """

    def pick(choices: Sequence[str]) -> str:
        return choices[int(rng.integers(len(choices)))]

    def statement(thing: str, good: int) -> str:
        form, literal = STATEMENTS[int(rng.integers(len(STATEMENTS)))]
        return form.format(thing=thing, word=pick(GOOD if bool(good) == literal else BAD))

    liked, thing = int(rng.integers(2)), str(rng.choice(THINGS))
    decisive = [pick(PRIORITIES).format(thing=thing), statement(thing, liked)]
    if rng.random() < 0.5:
        decisive.reverse()
    others = [other for other in rng.permutation(THINGS).tolist() if other != thing]
    room = length - sum(len(sentence) + 1 for sentence in decisive)
    filler: list[str] = []
    while True:
        if others and rng.random() < 0.7:
            sentence = statement(others.pop(), int(rng.integers(2)))
        else:
            sentence = pick(ASIDES)
        room -= len(sentence) + 1
        if room < 0:
            break
        filler.append(sentence)
    first, second = sorted(rng.integers(len(filler) + 1, size=2).tolist())
    sentences = [
        *filler[:first],
        decisive[0],
        *filler[first:second],
        decisive[1],
        *filler[second:],
    ]
    return " ".join(sentences), liked
