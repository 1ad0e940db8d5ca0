"""Stacks: layers made of layers."""

from regard.stack.carry import Carry
from regard.stack.early_exit import EarlyExit, Exited
from regard.stack.halves import Feeding, Looking, Mixing, halves
from regard.stack.plain import Plain
from regard.stack.reversible import Reversible
from regard.stack.shared import Shared
from regard.stack.transparent import ByLayer, Telling, Transparency
from regard.stack.universal import Halting, Universal

__all__ = [
    "ByLayer", "Carry", "EarlyExit", "Exited", "Feeding", "Halting", "Looking", "Mixing", "Plain", "Reversible", "Shared",
    "Telling", "Transparency", "Universal", "halves",
]  # fmt: skip
