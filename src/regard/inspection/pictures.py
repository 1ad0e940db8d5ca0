"""Pixels as images inside a page: data URIs of PNG files."""

from __future__ import annotations

import base64
import io

import torch
from torch import Tensor


def data_uri(pixels: Tensor) -> str:
    """The pixels (c, height, width) that a model reads, scaled to their range, as a PNG file."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Pictures need Pillow: pip install 'regard[image]'") from error
    pixels = pixels.detach().float().cpu()
    low, high = pixels.min(), pixels.max()
    scaled = ((pixels - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    array = scaled[0].numpy() if len(scaled) != 3 else scaled.permute(1, 2, 0).contiguous().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return png_uri(file.getvalue())


def png_uri(content: bytes) -> str:
    """A PNG file as a data URI."""
    return "data:image/png;base64," + base64.b64encode(content).decode()
