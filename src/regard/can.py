"""Capabilities of mixers."""

from __future__ import annotations

CAPABILITIES = {
    "causal": "can be built with causal=True: no position depends on later ones",
    "cross": "cross-attention: keys and values may come from another sequence",
    "independent_queries": "in cross-attention, each output depends on its own query only",
    "mask": "takes a padding mask; masked tokens have no influence",
    "attn_mask": "takes a pair mask: which query may attend to which key",
    "stream": "incremental decoding: chunk by chunk gives the same result as the whole sequence",
    "length": "takes sequences of any length, not only up to the length it was built for",
    "maps": "has an attention map: the output is linear in the values",
    "global_attention_mask": "takes a global_attention_mask at run time",
    "export": "forward can be exported as one graph for any batch size and length",
    "onnx": "the exported graph can be written as an ONNX file",
    "heads": "has heads; otherwise `heads` changes nothing",
    "gqa": "query heads can share key and value heads (kv_heads) without copies of them",
    "rotary": "a rotary embedding can be applied to its queries and keys",
    "dropout": "attention weights can be dropped in training (dropout)",
}

NO_HEADS = "it has no heads"

# Capabilities that must be declared, with the reason why others lack them.
DECLARED = {
    "global_attention_mask": "it has no global tokens",
    "gqa": "it needs a key and a value for each query head",
    "rotary": "it does not take rotated queries and keys",
    "dropout": "it has no dropout of attention weights",
}


class Can:
    """Capabilities of a mixer or attention: everything in `CAPABILITIES` except what is listed as
    unsupported, and except those in `DECLARED` that are not named.

    `can.cross` is a bool, `can.reason("cross")` says why not, and `a & b` has the capabilities
    that both have.

    Args:
        *declared: Capabilities of `DECLARED` that it has: `Can("rotary", "gqa")`.
        **unsupported: Reason for each missing capability: `Can(cross="positions differ")`.
    """

    causal: bool
    cross: bool
    independent_queries: bool
    mask: bool
    attn_mask: bool
    stream: bool
    length: bool
    maps: bool
    global_attention_mask: bool
    export: bool
    onnx: bool
    heads: bool
    gqa: bool
    rotary: bool
    dropout: bool

    def __init__(self, *declared: str, **unsupported: str) -> None:
        for capability in declared:
            if capability not in DECLARED:
                known = ", ".join(DECLARED)
                raise ValueError(f"{capability!r} cannot be declared. Choose from: {known}.")
        for capability, reason in unsupported.items():
            if capability not in CAPABILITIES:
                known = ", ".join(CAPABILITIES)
                raise ValueError(f"No such capability: {capability!r}. Choose from: {known}.")
            if not isinstance(reason, str) or not reason:
                raise ValueError(f"{capability}= must be the reason as a string, not {reason!r}")
        for capability, needed in (("onnx", "export"), ("independent_queries", "cross")):
            if needed in unsupported:
                unsupported.setdefault(capability, unsupported[needed])
        for capability, reason in DECLARED.items():
            if capability not in declared:
                unsupported.setdefault(capability, reason)
        self.unsupported = unsupported

    def __getattr__(self, capability: str) -> bool:
        if capability not in CAPABILITIES:
            raise AttributeError(f"Can has no capability {capability!r}")
        return capability not in self.unsupported

    def reason(self, capability: str) -> str | None:
        """Why a capability is missing, or None if it is there."""
        return self.unsupported.get(capability)

    def without(self, **unsupported: str) -> Can:
        """The same capabilities without some, with the reason for each."""
        return self & Can(*DECLARED, **unsupported)

    def __and__(self, other: Can) -> Can:
        # the first reason counts, but any is better than the one that stands for no declaration
        first = {k: v for k, v in self.unsupported.items() if v != DECLARED.get(k)}
        return Can(*DECLARED, **{**self.unsupported, **other.unsupported, **first})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Can) and self.unsupported.keys() == other.unsupported.keys()

    def __hash__(self) -> int:
        return hash(frozenset(self.unsupported))

    def __repr__(self) -> str:
        return f"Can({', '.join(name for name in CAPABILITIES if name not in self.unsupported)})"
