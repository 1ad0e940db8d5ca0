"""Stacks: layers made of layers."""

from regard.stack.plain import Plain

__all__ = ["Plain"]
