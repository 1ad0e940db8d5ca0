"""Routing: which tokens attend to each other, decided by their content."""

from regard.route.base import Route
from regard.route.kmeans import KMeans
from regard.route.lsh import AngularHash
from regard.route.sort import BlockSort

__all__ = ["AngularHash", "BlockSort", "KMeans", "Route"]
