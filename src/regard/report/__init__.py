"""The report of a comparison: one HTML page with recommendation, tables, plots and maps.

The page is a single file that needs no network.
"""

from regard.report.data import ComparisonReport, build_report, load_report, report_to_json
from regard.report.page import render_page, write_page

__all__ = [
    "ComparisonReport",
    "build_report",
    "load_report",
    "render_page",
    "report_to_json",
    "write_page",
]
