"""The recipes, one function a paper; importing this package registers them all."""

from regard.recipes import compressed, early, free, linear, sparse, vanilla

__all__ = ["compressed", "early", "free", "linear", "sparse", "vanilla"]
