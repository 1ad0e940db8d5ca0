"""The report of a comparison: one HTML page with the recommendation, all numbers, plots and maps, that opens offline."""

from regard.report.data import ComparisonReport, load_report, report_to_json
from regard.report.page import render_page, write_page

__all__ = ["ComparisonReport", "load_report", "render_page", "report_to_json", "write_page"]
