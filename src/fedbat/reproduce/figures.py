"""The paper's convergence figures from records, and more: against bytes, errors of what is sent, and traffic."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedbat.plots import Line, Panel, RatePanel, Spot, SpotPanel, draw_panels, draw_rates, draw_spots
from fedbat.records import file_name
from fedbat.reproduce.metrics import running_mean, weighted_error
from fedbat.reproduce.record import Record, Records
from fedbat.reproduce.results import Result, Results
from fedbat.reproduce.tables import Book, Row, Table
from fedbat.reproduce.theory import section as theory

FORMATS = ("png", "svg")
WINDOW = 5  # rounds of a running mean
_TITLES = {  # as the paper has them
    "fmnist": "FMNIST",
    "svhn": "SVHN",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "iid": "IID",
    "non-iid-1": "Non-IID-1",
    "non-iid-2": "Non-IID-2",
}

Draw = Callable[[Sequence[Path]], None]


@dataclass(frozen=True)
class Curves:
    """A line for each row, round by round."""

    title: str
    ylabel: str
    y: Callable[[Record], Sequence[float]]
    window: int = 1  # rounds of a running mean
    by_bytes: bool = False
    log: bool = False

    def panels(self, rows: Sequence[Row], results: Results) -> list[Panel]:
        """A panel for each split for which there is something to draw."""
        panels = []
        for title, found in _splits(rows, results.of):
            lines = {
                row.spelled(): self._line(result.records)
                for row, result in found
                # On a logarithmic axis there is no place for methods that send everything as it is.
                if not self.log or any(0 < value < math.inf for value in self.y(result.records[0]))
            }
            if lines:
                panels.append(Panel(title, lines))
        return panels

    def _line(self, records: Sequence[Record]) -> Line:
        """The mean over seeds, with a band from the lowest to the highest."""
        columns = list(zip(*(running_mean(self.y(record), self.window) for record in records), strict=True))
        x = itertools.accumulate(records[0].uplink_bytes) if self.by_bytes else range(1, len(columns) + 1)
        return Line(
            list(x),
            [statistics.fmean(column) for column in columns],
            ([min(column) for column in columns], [max(column) for column in columns]) if len(records) > 1 else None,
        )


@dataclass(frozen=True)
class Spots:
    """A spot for each row: what it reaches against what it sends, up and down.

    The spots of a panel are means over the same seeds, those that all of them have.
    """

    title: str
    measures: Mapping[str, Callable[[Record], float | None]]  # by label; the first that all records have is drawn

    def panels(self, rows: Sequence[Row], results: Results) -> list[SpotPanel]:
        """A panel for each split with something to draw; none before some method has two ways down to be compared."""
        panels, measure = [], self.measures[self.measure(rows, results)]
        for title, found in self._shared(rows, results):
            series: dict[str, list[Spot]] = {}
            for row, result in found:
                reached = [value for record in result.records if (value := measure(record)) is not None]
                spot = Spot(result.traffic, statistics.fmean(reached), row.point["down"])
                series.setdefault(row.spelled("down"), []).append(spot)
            panels.append(SpotPanel(title, series))
        return panels if any(len(spots) > 1 for panel in panels for spots in panel.series.values()) else []

    def measure(self, rows: Sequence[Row], results: Results) -> str:
        """The label of the measure that is drawn."""
        drawn = [r for _, found in self._shared(rows, results) for _, result in found for r in result.records]
        return next(
            label for label, measure in self.measures.items() if all(measure(record) is not None for record in drawn)
        )

    def _shared(self, rows: Sequence[Row], results: Results) -> Iterator[tuple[str, list[tuple[Row, Result]]]]:
        """The splits with the rows that were run, as far as their seeds are shared by all rows of the split."""
        for title, found in _splits(rows, results.training):
            seeds = set.intersection(*(set(result.by_seed) for _, result in found))
            if seeds:
                yield title, [(row, result.only(seeds)) for row, result in found]


def _percent(record: Record) -> Sequence[float]:
    return [100 * value for value in record.accuracy]


class Picture(NamedTuple):
    """A picture to be drawn."""

    name: str  # without its ending
    title: str
    panels: Sequence[Panel | SpotPanel | RatePanel]  # what it shows
    draw: Draw


def _curves(table: Table, results: Results) -> Iterator[Picture]:
    for (dataset, clients), rows in results.groups(table):
        for kind, curves in _CURVES.items():
            if panels := curves.panels(rows, results):
                draw = partial(draw_panels, panels, curves.ylabel, by_bytes=curves.by_bytes, log=curves.log)
                yield Picture(*_named(dataset, clients, kind, curves.title), panels, draw)


def _traffic(table: Table, results: Results) -> Iterator[Picture]:
    for (dataset, clients), rows in results.groups(table):
        if panels := TRAFFIC.panels(rows, results):
            ylabel = f"{TRAFFIC.measure(rows, results)}, %"
            draw = partial(draw_spots, panels, "up and down, of a client in a round", ylabel)
            yield Picture(*_named(dataset, clients, "traffic", TRAFFIC.title), panels, draw)


def _of_trials(table: Table, results: Results) -> Iterator[Picture]:
    if panels := theory.panels(theory.records_of(table, results)):
        yield Picture(table.name, table.title, panels, partial(draw_rates, panels))


def _named(dataset: str, clients: str, kind: str, title: str) -> tuple[str, str]:
    return file_name(f"{dataset}-n{clients}-{kind}"), f"{dataset}, {clients} clients: {title}"


_ACCURACY = f"test accuracy, %, mean of {WINDOW} rounds"
_CURVES = {
    "rounds": Curves("accuracy by round", _ACCURACY, _percent, WINDOW),
    "bytes": Curves("accuracy by bytes sent up", _ACCURACY, _percent, WINDOW, by_bytes=True),
    "error": Curves("error of what is sent", "relative error, weighted by parameters", weighted_error, log=True),
}
TRAFFIC = Spots(
    "accuracy against total traffic",
    {
        "averaged model, last ten rounds": lambda record: record.last10_of("averaged"),
        "last ten rounds": lambda record: record.last10,
    },
)
PICTURES: Mapping[str, Callable[[Table, Results], Iterator[Picture]]] = {  # by view
    "curves": _curves,
    "traffic": _traffic,
    "theory": _of_trials,
}


def pictures(table: Table, results: Results) -> Iterator[Picture]:
    """The pictures of a table for which something has been run."""
    if table.view in PICTURES:
        yield from PICTURES[table.view](table, results)


def draw_figures(book: Book, records: Records, folder: Path) -> list[Path]:
    """Draw every picture for which something has been run."""
    results, written = Results(book, records), []
    folder.mkdir(parents=True, exist_ok=True)
    for table in book.tables.values():
        for picture in pictures(table, results):
            paths = [folder / f"{picture.name}.{ending}" for ending in FORMATS]
            picture.draw(paths)
            written += paths
    return written


def _splits(
    rows: Sequence[Row], result_of: Callable[[Row], Result | None]
) -> Iterator[tuple[str, list[tuple[Row, Result]]]]:
    """The splits with at least one run: a title, and the rows that were run with their results."""
    for split, members in itertools.groupby(rows, lambda row: row.point["split"]):
        found = [(row, result) for row in members if (result := result_of(row)) is not None]
        if found:
            yield ", ".join(_TITLES.get(name, name) for name in (rows[0].point["dataset"], split)), found
