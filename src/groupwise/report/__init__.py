"""Reports: one HTML file per run or comparison, and its curves as a picture."""

from groupwise.report.comparison import compare_runs, results_table
from groupwise.report.data import RunData, read_runs
from groupwise.report.page import write_comparison_report, write_run_report
from groupwise.report.png import check_figure, write_png

__all__ = [
    "RunData",
    "check_figure",
    "compare_runs",
    "read_runs",
    "results_table",
    "write_comparison_report",
    "write_png",
    "write_run_report",
]
