"""What single choices of the protocol change: a section of RESULTS.md.

In a file of differences, the last key of a grid is what differs: its first value is ours, and the others are compared
with it, all else being equal, by differences between runs of the same seed.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from fedbat.reproduce import markdown
from fedbat.reproduce.estimates import LEVEL, Estimate
from fedbat.reproduce.kinds import Case, Column, Shelf, combine
from fedbat.reproduce.measure import estimate, paired_runs
from fedbat.reproduce.metrics import METRICS
from fedbat.reproduce.results import MeanStd, Results
from fedbat.reproduce.tables import Book, Grid, Row, Table
from fedbat.reproduce.verdicts import show_interval

_MEASURED = {"best": "best", "last ten": "last-ten"}  # metrics, by their names on the page
_WORDS = ("data set", "split", "method", "switched to", "spread from")
_INTERVAL = f"{1 - LEVEL:.0%} interval"
_COLUMNS = (
    *_WORDS[:-1],
    *(f"{name}{part}" for name in _MEASURED for part in (", ours", ", switched", ", difference", f", {_INTERVAL}")),
    "n",
    _WORDS[-1],
)


class Switch(NamedTuple):
    """Two rows that differ in one choice, and what that changes, by metric; None if one has not been run yet."""

    ours: Row
    switched: Row
    axis: str
    cases: Mapping[str, Case]
    changes: Mapping[str, Estimate | None]

    @property
    def choice(self) -> str:
        """The setting that is switched to."""
        return _choice(self.switched, self.axis)

    @property
    def method(self) -> str:
        """The method, and what else is varied, without the setting that is switched."""
        return self.ours.point["method"].split()[0] if self.axis == "method" else self.ours.name(self.axis)

    @property
    def place(self) -> str:
        """The data set and the split."""
        return f"{self.ours.point['dataset']} {self.ours.point['split']}"


def section(table: Table, book: Book, results: Results) -> Iterator[str]:
    """For each choice, a sentence derived from the numbers, and the numbers themselves."""
    yield from [
        "Each choice by itself, everything else as in the tables above. Differences are between runs of the same seed,",
        "in points, with the interval of their mean; where the interval contains zero, we say *no",
        "measurable change*. *spread from* says where their standard deviation is from, as for the claims.",
        "",
    ]
    shelf = Shelf(book)
    for grid in table.grids:
        switches = switches_of(grid, shelf, results)
        measured = [switch for switch in switches if switch.changes["best"]]
        yield from [f"### {grid.about or grid.keys[-1]}", ""]
        if measured:
            yield from [sentence(measured), ""]
            yield from markdown.table(_COLUMNS, [_row(switch, results) for switch in measured], _WORDS)
        left = [switch for switch in switches if not switch.changes["best"]]
        yield from markdown.not_run((f"{s.method} {s.choice}", s.place) for s in left)


def switches_of(grid: Grid, shelf: Shelf, results: Results) -> list[Switch]:
    """Every row of a grid that is compared with ours."""
    axis, pairs = grid.keys[-1], list[tuple[Row, Row]]()
    for _, rows in groupby(grid.rows, lambda row: [row.point[key] for key in grid.keys[:-1]]):
        ours, *others = rows
        pairs += [(ours, other) for other in others]
    cases = {name: [[_case(ours, other, name, shelf)] for ours, other in pairs] for name in _MEASURED.values()}
    changes = {name: estimate(found, results) for name, found in cases.items()}
    return [
        Switch(
            *pair,
            axis,
            {name: found[place][0] for name, found in cases.items()},
            {name: found[place][0] for name, found in changes.items()},
        )
        for place, pair in enumerate(pairs)
    ]


def sentence(switches: list[Switch]) -> str:
    """What the choice changes in the best round, as a sentence about those that were measured."""
    changed = [(switch, switch.changes["best"]) for switch in switches]
    clauses = [f"{_effect(change)} on {s.place} with {s.method}" for s, change in changed if change is not None]
    choices = " or ".join(dict.fromkeys(f"`{switch.choice}`" for switch in switches))
    return f"{choices} instead of `{_choice(switches[0].ours, switches[0].axis)}`: {'; '.join(clauses)}."


def _effect(change: Estimate) -> str:
    low, high = change.interval()
    if not math.isfinite(high - low):
        return "cannot be judged yet"
    if low <= 0 <= high:
        return f"no measurable change (the interval reaches {max(-low, high):.2f} points)"
    return f"{'gains' if low > 0 else 'costs'} {abs(change.value):.2f} points"


def _choice(row: Row, axis: str) -> str:
    if axis == "method":
        return " ".join(row.point["method"].split()[1:])
    return f"{axis}={row.point[axis]}"


def _case(ours: Row, other: Row, metric: str, shelf: Shelf) -> Case:
    column = Column(shelf, *(ours.point[key] for key in ("dataset", "clients", "split")))
    return combine(column, "switched − ours", metric, (1, other), (-1, ours))


def _row(switch: Switch, results: Results) -> list[str]:
    point = switch.ours.point
    cells = [point["dataset"], point["split"], f"`{switch.method}`", f"`{switch.choice}`"]
    for metric in _MEASURED.values():
        case, change = switch.cases[metric], switch.changes[metric]
        assert change is not None  # its runs are those of the best round, which was measured
        switched, ours = zip(*paired_runs(case, results).values(), strict=True)
        levels = [MeanStd.of([METRICS[metric].of(record) for record in records]) for records in (ours, switched)]
        cells += [*map(markdown.mean_std, levels), f"{change.value:{case.style}}", show_interval(change, case.style)]
    best = switch.changes["best"]
    assert best is not None
    return [*cells, str(best.seeds), best.spread.source]
