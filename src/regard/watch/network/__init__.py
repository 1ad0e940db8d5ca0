"""Networks of `regard watch`: any mixer, on top of the levels that need none."""
