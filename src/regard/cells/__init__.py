"""Attention cells of recurrent networks from before 2017, with the interfaces of their papers."""

from regard.cells.bahdanau import Alignment, BahdanauDecoder, DeepOutput, FixedContextDecoder
from regard.cells.draw import FilterBank, Reader, Writer
from regard.cells.gated import BiEncoder, GatedUnit
from regard.cells.graves import WindowCell
from regard.cells.show_attend import CaptionCell, CaptionOutput, Reinforce, doubly_stochastic

__all__ = [
    "Alignment",
    "BahdanauDecoder",
    "BiEncoder",
    "CaptionCell",
    "CaptionOutput",
    "DeepOutput",
    "FilterBank",
    "FixedContextDecoder",
    "GatedUnit",
    "Reader",
    "Reinforce",
    "WindowCell",
    "Writer",
    "doubly_stochastic",
]
