"""Capabilities of mixers."""

from __future__ import annotations

CAPABILITIES = {
    "causal": "can be built with causal=True: no position depends on later ones",
    "cross": "cross-attention: keys and values may come from another sequence",
    "mask": "takes a padding mask; masked tokens have no influence",
    "attn_mask": "takes a pair mask: which query may attend to which key",
    "stream": "incremental decoding: chunk by chunk gives the same result as the whole sequence",
    "length": "takes sequences of any length, not only up to the length it was built for",
    "maps": "has an attention map: the output is linear in the values",
    "global_attention_mask": "takes a global_attention_mask at run time",
    "export": "forward can be exported as one graph for any batch size and length",
    "onnx": "the exported graph can be written as an ONNX file",
}


class Can:
    """Capabilities of a mixer: everything in `CAPABILITIES` except what is listed as unsupported.

    `can.cross` is a bool, `can.reason("cross")` says why not, and `a & b` has the capabilities
    that both have.

    Args:
        supports_global_mask: Whether it takes a `global_attention_mask`. Off by default, because
            few mixers do.
        **unsupported: Reason for each missing capability: `Can(cross="positions differ")`.
    """

    causal: bool
    cross: bool
    mask: bool
    attn_mask: bool
    stream: bool
    length: bool
    maps: bool
    global_attention_mask: bool
    export: bool
    onnx: bool

    def __init__(self, *, supports_global_mask: bool = False, **unsupported: str) -> None:
        for capability, reason in unsupported.items():
            if capability not in CAPABILITIES:
                known = ", ".join(CAPABILITIES)
                raise ValueError(f"No such capability: {capability!r}. Choose from: {known}.")
            if not isinstance(reason, str) or not reason:
                raise ValueError(f"{capability}= must be the reason as a string, not {reason!r}")
        if "export" in unsupported:
            unsupported.setdefault("onnx", unsupported["export"])
        if not supports_global_mask:
            unsupported.setdefault("global_attention_mask", "it has no global tokens")
        self.unsupported = unsupported

    def __getattr__(self, capability: str) -> bool:
        if capability not in CAPABILITIES:
            raise AttributeError(f"Can has no capability {capability!r}")
        return capability not in self.unsupported

    def reason(self, capability: str) -> str | None:
        """Why a capability is missing, or None if it is there."""
        return self.unsupported.get(capability)

    def __and__(self, other: Can) -> Can:
        return Can(supports_global_mask=True, **{**other.unsupported, **self.unsupported})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Can) and self.unsupported.keys() == other.unsupported.keys()

    def __hash__(self) -> int:
        return hash(frozenset(self.unsupported))

    def __repr__(self) -> str:
        return f"Can({', '.join(name for name in CAPABILITIES if name not in self.unsupported)})"
