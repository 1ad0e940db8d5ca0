"""Stacks: layers made of layers."""

from regard.stack.look import detached
from regard.stack.plain import Plain
from regard.stack.segments import Carried, Memory, Recent, Segments

__all__ = ["Carried", "Memory", "Plain", "Recent", "Segments", "detached"]
