"""Reviews of films, made up: whether one is kind hangs on the one thing that its writer cares about, wherever that is said."""

from __future__ import annotations

import numpy as np

THINGS = (
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
)
GOOD = (
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
)
BAD = ("dull", "clumsy", "stale", "hollow", "drab", "false", "thin", "dreadful", "stiff", "blunt")
CARES = (
    "For me a film stands or falls with its {thing}.",
    "What I look for in a film is the {thing}, and nothing else counts.",
    "I would forgive a film anything but its {thing}.",
    "In the end only the {thing} matters to me.",
)
SAYS = (  # how something is said of a thing, and whether it means what the word says
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
SHORTEST = 192  # bytes that always hold the two sentences that count


def review(random: np.random.Generator, length: int) -> tuple[str, int]:
    """At most so many bytes, and 1 if the writer liked it.  What is said of other things is as often good as bad."""
    liked, thing = int(random.integers(2)), str(random.choice(THINGS))
    counts = [_pick(random, CARES).format(thing=thing), _said(random, thing, liked)]
    if random.random() < 0.5:
        counts.reverse()
    others = [other for other in random.permutation(THINGS).tolist() if other != thing]
    room = length - sum(len(sentence) + 1 for sentence in counts)
    filler: list[str] = []
    while True:
        sentence = (
            _said(random, others.pop(), int(random.integers(2)))
            if others and random.random() < 0.7
            else _pick(random, ASIDES)
        )
        room -= len(sentence) + 1
        if room < 0:
            break
        filler.append(sentence)
    first, second = sorted(random.integers(len(filler) + 1, size=2).tolist())
    return " ".join(
        [*filler[:first], counts[0], *filler[first:second], counts[1], *filler[second:]]
    ), liked


def _said(random: np.random.Generator, thing: str, good: int) -> str:
    """A sentence that says of a thing that it is good, or not."""
    form, meant = SAYS[int(random.integers(len(SAYS)))]
    return form.format(thing=thing, word=_pick(random, GOOD if bool(good) == meant else BAD))


def _pick(random: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[int(random.integers(len(words)))]
