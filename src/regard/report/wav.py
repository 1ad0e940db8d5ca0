"""A wave as a WAV data URI, without an audio package."""

from __future__ import annotations

import base64
import struct

import numpy as np


def wav_data_uri(wave: np.ndarray, rate: int) -> str:
    """Encode a wave (n) between -1 and 1 as data:audio/wav;base64,… of 16 bits, one channel."""
    samples = np.nan_to_num(np.asarray(wave, dtype=np.float64)).clip(-1, 1)
    data = np.rint(samples * 32767).astype("<i2").tobytes()
    layout = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)  # PCM, mono
    chunks = b"fmt " + struct.pack("<I", len(layout)) + layout
    chunks += b"data" + struct.pack("<I", len(data)) + data
    file = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    return f"data:audio/wav;base64,{base64.b64encode(file).decode()}"
