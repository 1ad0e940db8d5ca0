"""Routes: who may look at whom, decided by what the tokens say."""

from regard.route.base import Route
from regard.route.kmeans import KMeans
from regard.route.lsh import AngularHash
from regard.route.sort import BlockSort

__all__ = ["AngularHash", "BlockSort", "KMeans", "Route"]
