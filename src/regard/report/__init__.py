"""The report of a comparison: one HTML page with the recommendation, all numbers, plots and maps, that opens offline."""

from regard.report.data import Comparison, gather, to_json
from regard.report.page import page, write

__all__ = ["Comparison", "gather", "page", "to_json", "write"]
