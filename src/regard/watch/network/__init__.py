"""Networks of `regard watch`: any mixer, on top of the levels that need none."""

from regard.watch.network.fitting import (
    LevelReport,
    fit_network_levels,
    load_network_level,
    parse_mixers,
)
from regard.watch.network.settings import NetworkSettings

__all__ = [
    "LevelReport",
    "NetworkSettings",
    "fit_network_levels",
    "load_network_level",
    "parse_mixers",
]
