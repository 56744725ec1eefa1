"""Any runs as one page that needs nothing but a browser: `fedbat report`."""

from fedbat.report.page import render
from fedbat.report.prices import Priced, PricedGroup, misses, price_group
from fedbat.report.runs import Run, find_runs, group_runs, title_of

__all__ = ["Priced", "PricedGroup", "Run", "find_runs", "group_runs", "misses", "price_group", "render", "title_of"]
