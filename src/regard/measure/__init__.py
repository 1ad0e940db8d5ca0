"""Measuring: what a module costs, by formula (`cost`), by counting (`count`) and on a machine (`plan`)."""
