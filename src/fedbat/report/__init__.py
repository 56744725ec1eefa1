"""Any runs as one page that needs nothing but a browser: `fedbat report`."""

from fedbat.report.page import render
from fedbat.report.prices import PricedGroup, price_group
from fedbat.report.runs import Run, find_runs, group_runs, title_of

__all__ = ["PricedGroup", "Run", "find_runs", "group_runs", "price_group", "render", "title_of"]
