"""Pixels as a PNG data URI, without an imaging package."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from torch import Tensor

from regard.show.style import FAINT, Colour

INK: Colour = (46, 110, 216)


def png_data_uri(pixels: np.ndarray) -> str:
    """Encode RGBA pixels (rows, columns, 4) of uint8 as data:image/png;base64,…"""
    rows, columns, _ = pixels.shape
    no_filter = np.zeros((rows, 1), np.uint8)  # every line starts with the number of its filter
    lines = np.concatenate((no_filter, pixels.reshape(rows, -1)), 1)
    file = b"\x89PNG\r\n\x1a\n"
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ):
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        file += struct.pack(">I", len(data)) + kind + data + checksum
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def weight_pixels(weights: Tensor, colour: Colour = INK) -> np.ndarray:
    """Draw weights (n, m) in one colour whose opacity is the square root of the weight.

    With plain weights a single large one would hide all others of its row.
    """
    magnitude = weights.abs().double()
    opacity = (magnitude / magnitude.max().clamp(min=1e-30)).sqrt().cpu().numpy()
    channels = [np.broadcast_to(np.uint8(value), opacity.shape) for value in colour]
    return np.dstack([*channels, np.uint8(np.rint(255 * opacity))])


def pattern_pixels(part: Tensor, shade: Tensor, colours: list[Colour]) -> np.ndarray:
    """Draw part (c, c), an index into colours or -1, with shade (c, c) from 0 to 1."""
    index = part.cpu().numpy()
    opacity = FAINT + (1 - FAINT) * shade.double().sqrt().cpu().numpy()
    table = np.array([*colours, (0, 0, 0)], np.uint8)  # -1 is the last, and transparent
    return np.dstack((table[index], np.uint8(np.rint(255 * np.where(index < 0, 0, opacity)))))
