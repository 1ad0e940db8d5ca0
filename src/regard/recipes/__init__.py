"""The recipes, one function a paper; importing this package registers them all."""

from regard.recipes import compressed, free, linear, routed, sparse, vanilla

__all__ = ["compressed", "free", "linear", "routed", "sparse", "vanilla"]
