"""Traffic of a small shop API: customers, staff, partners, drift, and attacks with labels."""

from regard.watch.demo.attacks import ATTACKS, Label
from regard.watch.demo.traffic import generate_labelled_traffic, generate_traffic

__all__ = ["ATTACKS", "Label", "generate_labelled_traffic", "generate_traffic"]
