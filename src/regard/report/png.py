"""Pixels as a PNG in a data URI: small, without a file, and without a package for it."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from torch import Tensor

from regard.show.style import FAINT, Colour

INK: Colour = (46, 110, 216)


def png_data_uri(pixels: np.ndarray) -> str:
    """pixels (rows columns 4) of uint8, red green blue and how opaque -> data:image/png;base64,…"""
    rows, columns, _ = pixels.shape
    lines = np.concatenate(
        (np.zeros((rows, 1), np.uint8), pixels.reshape(rows, -1)), 1
    )  # each begins with its filter: none
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    file = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def weight_pixels(weights: Tensor, colour: Colour = INK) -> np.ndarray:
    """weights (n m) -> pixels of one colour, the more opaque the greater; so the ground of the page shows through.

    Roots are drawn, as everywhere in pictures: else a row with one large weight would hide all others.
    """
    share = (weights.abs().double() / weights.abs().max().clamp(min=1e-30)).sqrt().cpu().numpy()
    return np.dstack(
        [np.broadcast_to(np.uint8(c), share.shape) for c in colour]
        + [np.uint8(np.rint(255 * share))]
    )


def pattern_pixels(part: Tensor, shade: Tensor, colours: list[Colour]) -> np.ndarray:
    """part (c c), an index into colours or -1, and shade (c c) in [0, 1] -> pixels."""
    index, strength = part.cpu().numpy(), FAINT + (1 - FAINT) * shade.double().sqrt().cpu().numpy()
    table = np.array([*colours, (0, 0, 0)], np.uint8)  # -1 is the last, and is not seen
    return np.dstack((table[index], np.uint8(np.rint(255 * np.where(index < 0, 0, strength)))))
