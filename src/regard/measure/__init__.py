"""Measuring: what mechanisms cost, and how hard stacks are to train."""
