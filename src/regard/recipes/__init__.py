"""The recipes, one function a paper; importing this package registers them all."""

from regard.recipes import compressed, free, grid, linear, sparse, vanilla

__all__ = ["compressed", "free", "grid", "linear", "sparse", "vanilla"]
