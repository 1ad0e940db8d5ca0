"""Plot docs/images/listops.png: an expression as a tree, and statistics with the settings of LRA.

Prints the numbers in docs/tasks.md. Everything is parsed from the tokens, not from the generator.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import fmean, median

import matplotlib

from regard.tasks import create_task
from regard.tasks.listops import CLOSE, OPEN, WORDS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COUNT, LENGTH = 600, 2000
PATH = Path(__file__).parent / "images" / "listops.png"
BLUE = "#0072b2"
Tree = tuple[str, list["Tree"]]


def tree(tokens: list[int]) -> Tree:
    """Parse tokens to a tree: an operator or digit, and its arguments."""
    whole: Tree = ("", [])
    open_lists = [whole]
    for token in tokens:
        if token == CLOSE:
            open_lists.pop()
            continue
        node: Tree = (WORDS[token].strip("["), [])
        open_lists[-1][1].append(node)
        if OPEN <= token < CLOSE:
            open_lists.append(node)
    return whole[1][0]


def depth(node: Tree) -> int:
    return 1 + max((depth(child) for child in node[1]), default=0)


def arguments(node: Tree) -> list[int]:
    """Number of arguments of each list."""
    return [len(node[1])] * bool(node[1]) + [
        count for child in node[1] for count in arguments(child)
    ]


def draw(axis: plt.Axes, node: Tree, left: float, level: int) -> tuple[float, float]:
    """Draw a node above its arguments, from `left` on; returns its x position and right end."""
    words, children = node
    right, positions = left, []
    for child in children:
        position, right = draw(axis, child, right, level + 1)
        positions.append(position)
    x = fmean(positions) if positions else left
    for position in positions:
        axis.plot([x, position], [-level, -level - 1], color="#999999", linewidth=0.8, zorder=1)
    axis.text(
        x,
        -level,
        words,
        ha="center",
        va="center",
        fontsize=8,
        color=BLUE if children else "black",
        bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
    )
    return x, max(right, left + 1)


def bars(axis: plt.Axes, values: list[int], title: str) -> None:
    counts = Counter(values)
    axis.bar(list(counts), [100 * count / len(values) for count in counts.values()], color=BLUE)
    axis.set(title=title, ylabel="%", xticks=sorted(counts))


def main() -> None:
    small, large = create_task("listops", length=40), create_task("listops", length=LENGTH)
    examples = [large.example("train", index) for index in range(COUNT)]
    sizes, labels = (
        [len(example.inputs["x"]) for example in examples],
        [int(example.targets["labels"]) for example in examples],
    )
    trees = [tree(example.inputs["x"].tolist()) for example in examples]
    depths, counts = (
        [depth(each) for each in trees],
        [count for each in trees for count in arguments(each)],
    )
    print(
        f"tokens {min(sizes)} to {max(sizes)}, mean {fmean(sizes):.0f}, median {median(sizes):.0f}"
    )
    print(
        "levels",
        dict(sorted(Counter(depths).items())),
        "arguments",
        dict(sorted(Counter(counts).items())),
    )
    print("classes", dict(sorted(Counter(labels).items())))

    figure = plt.figure(figsize=(12, 5.6), layout="constrained")
    top, below = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    first = small.example("train", 0)
    axis = top.subplots()
    draw(axis, tree(first.inputs["x"].tolist()), 0, 0)
    axis.set_title(small.render(first).to_text(), fontsize=9)
    axis.set_axis_off()
    lengths, levels, lists, classes = below.subplots(1, 4)
    lengths.hist(sizes, bins=range(500, LENGTH + 1, 125), color=BLUE)
    lengths.set(title=f"tokens of {COUNT} examples", ylabel="examples")
    bars(levels, depths, "levels of the tree")
    bars(lists, counts, "arguments of a list")
    bars(classes, labels, "class")
    figure.savefig(PATH, dpi=80)


if __name__ == "__main__":
    main()
