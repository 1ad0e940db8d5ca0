"""Measuring: what a module costs, by formula (`cost`), by counting (`count`) and on a machine (`plan`), and how hard a stack
is to train (`probe`)."""
