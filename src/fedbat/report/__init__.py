"""Any runs as one page that needs nothing but a browser: `fedbat report`."""

from fedbat.report.page import render
from fedbat.report.runs import Run, find_runs

__all__ = ["Run", "find_runs", "render"]
