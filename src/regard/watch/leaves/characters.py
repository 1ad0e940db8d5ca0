"""How unusual the characters of a string are for its path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from regard.watch.leaves.count_sketch import Keys, combine_keys, mix_keys

START, END = 2, 3  # bytes of control characters stand for the ends of a string
WINDOW = 8  # characters in a row that a string is judged by
MOST_USED = 1 / 8  # of the cells
_DIGITS = np.arange(256, dtype=np.uint8)
_DIGITS[ord("0") : ord("9") + 1] = ord("0")  # identifiers and times differ in digits alone


class CharacterModel:
    """A character 3-gram model for each path, with Witten-Bell back-off to 2-grams, to 1-grams, to
    the characters of all paths and to the 256 bytes (Witten and Bell 1991).

    Digits count as one character. The counts are in one hashed table for all paths, so memory is
    constant; when an eighth of the table is used, the counts are halved, so that few grams that
    never occurred meet the cell of another one.

    Args:
        size: Cells of the table, a power of two.
    """

    def __init__(self, size: int = 1 << 22) -> None:
        self.table = np.zeros(size, np.uint32)

    def add(self, paths: Keys, strings: Sequence[str]) -> None:
        """Learn strings.

        Args:
            paths: A key of the path of each string.
        """
        if not strings:
            return
        symbols, owners, _ = _read_symbols(strings)
        for key, context, escape in self._grams(paths[owners], symbols):
            different, first, amounts = np.unique(key, return_index=True, return_counts=True)
            fresh = first[self.table[self._cell(different)] == 0]
            np.add.at(self.table, self._cell(different), amounts.astype(np.uint32))
            np.add.at(self.table, self._cell(context), 1)  # occurrences of the context
            np.add.at(self.table, self._cell(escape[fresh]), 1)  # different continuations of it
        if np.count_nonzero(self.table[::64]) > len(self.table) // 64 * MOST_USED:
            self.table >>= np.uint32(1)

    def bits(self, paths: Keys, strings: Sequence[str]) -> npt.NDArray[np.float64]:
        """Mean bits of the `WINDOW` characters in a row that are most surprising, for each
        string."""
        if not strings:
            return np.zeros(0)
        symbols, owners, starts = _read_symbols(strings)
        each = self._symbol_bits(paths[owners], symbols)
        total = np.concatenate([[0.0], np.cumsum(each)])
        ends = np.append(starts[1:], len(each))
        first = np.maximum(np.arange(len(each)) + 1 - WINDOW, starts[owners])
        length = np.minimum(ends - starts, WINDOW)[owners]
        sums = (total[1:] - total[first]) / length
        return np.maximum.reduceat(sums, starts)

    def unusual_fragment(self, path: np.uint64, string: str) -> str:
        """The characters of a string that are most surprising."""
        symbols, owners, _ = _read_symbols([string])
        each = self._symbol_bits(np.array([path], np.uint64)[owners], symbols)
        total = np.concatenate([[0.0], np.cumsum(each)])
        size = min(WINDOW, len(each))
        first = int(np.argmax(total[size:] - total[:-size]))
        content = string.encode("utf-8", "surrogatepass")
        return content[first : first + size].decode("utf-8", "ignore")

    def _symbol_bits(self, paths: Keys, symbols: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
        """-log2 of the probability of each symbol but the start symbols."""
        probability: npt.NDArray[np.float64] | float = 1 / 256
        for key, context, escape in self._grams(paths, symbols):
            count, total, types = (
                self.table[self._cell(each)].astype(np.float64) for each in (key, context, escape)
            )
            total = np.maximum(total, count)  # cells are shared now and then
            types = np.maximum(types, 1)  # also if its first continuation met a used cell
            probability = (count + types * probability) / (total + types)
        return -np.log2(probability)

    def _grams(self, paths: Keys, symbols: npt.NDArray[np.uint8]) -> list[tuple[Keys, Keys, Keys]]:
        """For each order, from the characters of all paths to 3-grams: keys of the gram, of its
        context, and of the number of different symbols after the context."""
        old, last, now = (symbols[i : len(symbols) - 2 + i].astype(np.uint64) for i in range(3))
        inside = now != START
        old, last, now = old[inside], last[inside], now[inside]
        everywhere = np.zeros(len(now), np.uint64)
        contexts = [
            everywhere,
            paths + np.uint64(1),
            combine_keys(paths + np.uint64(2), last),
            combine_keys(paths + np.uint64(3), last | old << np.uint64(8)),
        ]
        return [
            (
                combine_keys(context, now + np.uint64(16)),
                mix_keys(context + np.uint64(5)),
                mix_keys(context + np.uint64(7)),
            )
            for context in contexts
        ]

    def _cell(self, keys: Keys) -> npt.NDArray[np.int64]:
        return (keys & np.uint64(len(self.table) - 1)).astype(np.int64)


def _read_symbols(
    strings: Sequence[str],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The bytes of strings one after the other, each between two start symbols and an end symbol;
    then, without the start symbols, the number of the string of each symbol, and where each string
    starts."""
    head, tail = bytes((START, START)), bytes((END,))
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    if any(START in each for each in encoded):
        encoded = [each.replace(head[:1], tail) for each in encoded]
    symbols = np.frombuffer(b"".join(head + each + tail for each in encoded), np.uint8)
    lengths = np.array([len(each) + 1 for each in encoded])
    owners = np.repeat(np.arange(len(strings)), lengths)
    return _DIGITS[symbols], owners, np.concatenate([[0], np.cumsum(lengths[:-1])])
