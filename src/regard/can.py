"""What a mechanism promises, and why it does not promise the rest."""

from __future__ import annotations

CAPABILITIES = {
    "causal": "may be built causal: no token depends on later ones",
    "cross": "queries and keys may come from two sequences",
    "mask": "tokens may be left out, and then have no influence",
    "stream": "chunk by chunk gives what the whole gives",
    "length": "any length; else at most the length it was built for",
    "maps": "has an attention map: it is linear in its values",
    "global_attention_mask": "tokens may be marked at run time",
    "export": "its forward is one graph for any batch and length",
    "onnx": "that graph can be written as an ONNX file",
}

NO_MARKS = "no part of it asks for marked tokens"


class Can:
    """What a mechanism promises.  Everything that is not refused: `Can(cross="positions are not comparable")`.

    `can.cross` tells whether; `can.reason("cross")` why not; `a & b` can what both can.  Marked tokens are the exception:
    few mechanisms know them, so they are refused unless `takes_marks`.
    """

    def __init__(self, *, supports_global_mask: bool = False, **unsupported: str) -> None:
        unknown = set(unsupported) - set(CAPABILITIES)
        if unknown:
            raise ValueError(f"no such promise: {sorted(unknown)}; there are {list(CAPABILITIES)}")
        for promise, reason in unsupported.items():
            if not isinstance(reason, str) or not reason:
                raise ValueError(f"a refusal says why, in words: {promise}={reason!r} does not")
        if "export" in unsupported:  # without a graph there is nothing to write
            unsupported = {"onnx": unsupported["export"], **unsupported}
        self.unsupported = (
            dict(unsupported)
            if supports_global_mask
            else {"global_attention_mask": NO_MARKS, **unsupported}
        )

    def reason(self, promise: str) -> str | None:
        """Why a promise is not made; None: it is."""
        return self.unsupported.get(promise)

    causal = property(lambda self: "causal" not in self.unsupported)
    cross = property(lambda self: "cross" not in self.unsupported)
    mask = property(lambda self: "mask" not in self.unsupported)
    stream = property(lambda self: "stream" not in self.unsupported)
    length = property(lambda self: "length" not in self.unsupported)
    maps = property(lambda self: "maps" not in self.unsupported)
    global_attention_mask = property(lambda self: "global_attention_mask" not in self.unsupported)
    export = property(lambda self: "export" not in self.unsupported)
    onnx = property(lambda self: "onnx" not in self.unsupported)

    def __and__(self, other: Can) -> Can:
        return Can(supports_global_mask=True, **{**other.unsupported, **self.unsupported})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Can) and self.unsupported.keys() == other.unsupported.keys()

    def __hash__(self) -> int:
        return hash(frozenset(self.unsupported))

    def __repr__(self) -> str:
        return f"Can({', '.join(p for p in CAPABILITIES if p not in self.unsupported)})"
