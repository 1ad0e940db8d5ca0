"""What a mechanism promises, and why it does not promise the rest."""

from __future__ import annotations

PROMISES = {
    "causal": "may be built causal: no token depends on later ones",
    "cross": "queries and keys may come from two sequences",
    "mask": "tokens may be left out, and then have no influence",
    "stream": "chunk by chunk gives what the whole gives",
    "length": "any length; else at most the length it was built for",
    "maps": "has an attention map: it is linear in its values",
    "marks": "tokens may be marked at run time",
    "export": "its forward is one graph for any batch and length",
    "onnx": "that graph can be written as an ONNX file",
}

NO_MARKS = "no part of it asks for marked tokens"


class Can:
    """What a mechanism promises.  Everything that is not refused: `Can(cross="positions are not comparable")`.

    `can.cross` tells whether; `can.reason("cross")` why not; `a & b` can what both can.  Marked tokens are the exception:
    few mechanisms know them, so they are refused unless `takes_marks`.
    """

    def __init__(self, *, takes_marks: bool = False, **refused: str) -> None:
        unknown = set(refused) - set(PROMISES)
        if unknown:
            raise ValueError(f"no such promise: {sorted(unknown)}; there are {list(PROMISES)}")
        for promise, reason in refused.items():
            if not isinstance(reason, str) or not reason:
                raise ValueError(f"a refusal says why, in words: {promise}={reason!r} does not")
        if "export" in refused:  # without a graph there is nothing to write
            refused = {"onnx": refused["export"], **refused}
        self.refused = dict(refused) if takes_marks else {"marks": NO_MARKS, **refused}

    def reason(self, promise: str) -> str | None:
        """Why a promise is not made; None: it is."""
        return self.refused.get(promise)

    causal = property(lambda self: "causal" not in self.refused)
    cross = property(lambda self: "cross" not in self.refused)
    mask = property(lambda self: "mask" not in self.refused)
    stream = property(lambda self: "stream" not in self.refused)
    length = property(lambda self: "length" not in self.refused)
    maps = property(lambda self: "maps" not in self.refused)
    marks = property(lambda self: "marks" not in self.refused)
    export = property(lambda self: "export" not in self.refused)
    onnx = property(lambda self: "onnx" not in self.refused)

    def __and__(self, other: Can) -> Can:
        return Can(takes_marks=True, **{**other.refused, **self.refused})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Can) and self.refused.keys() == other.refused.keys()

    def __hash__(self) -> int:
        return hash(frozenset(self.refused))

    def __repr__(self) -> str:
        return f"Can({', '.join(p for p in PROMISES if p not in self.refused)})"
