"""The paper's convergence figures from records, and more: against bytes, errors of what is sent, and traffic."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedbat.plots import Line, Panel, Spot, SpotPanel, draw_panels, draw_spots
from fedbat.records import file_name
from fedbat.reproduce.metrics import running_mean, weighted_error
from fedbat.reproduce.record import Record, Records
from fedbat.reproduce.results import Result, Results
from fedbat.reproduce.tables import Book, Row, Table
from fedbat.reproduce.theory import section as theory

FORMATS = ("png", "svg")
WINDOW = 5  # rounds of a running mean


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
                row.name(): self._line(result.records)
                for row, result in found
                # On a logarithmic axis there is no place for methods that send everything as it is.
                if not self.log or any(0 < value < math.inf for value in self.y(result.records[0]))
            }
            if lines:
                panels.append(Panel(title, lines))
        return panels

    def draw(self, rows: Sequence[Row], results: Results, paths: Sequence[Path]) -> None:
        """Draw the panels side by side."""
        draw_panels(self.panels(rows, results), self.ylabel, paths, by_bytes=self.by_bytes, log=self.log)

    def _line(self, records: Sequence[Record]) -> Line:
        """The mean over seeds, with a band from the lowest to the highest."""
        raw = [self.y(record) for record in records]
        columns = list(zip(*(running_mean(values, self.window) for values in raw), strict=True))
        x = itertools.accumulate(records[0].uplink_bytes) if self.by_bytes else range(1, len(columns) + 1)
        return Line(
            list(x),
            [statistics.fmean(column) for column in columns],
            ([min(column) for column in columns], [max(column) for column in columns]) if len(records) > 1 else None,
            [statistics.fmean(column) for column in zip(*raw, strict=True)] if self.window > 1 else None,
        )


@dataclass(frozen=True)
class Spots:
    """A spot for each row: what it reaches against what it sends, up and down.

    The spots of a panel are means over the same seeds, those that all of them have.
    """

    title: str
    measures: Mapping[str, Callable[[Record], float | None]]  # by label; the first that all records have is drawn

    def panels(self, rows: Sequence[Row], results: Results) -> list[SpotPanel]:
        """A panel for each split for which there is something to draw."""
        panels, measure = [], self.measures[self.measure(rows, results)]
        for title, found in self._shared(rows, results):
            series: dict[str, list[Spot]] = {}
            for row, result in found:
                reached = [value for record in result.records if (value := measure(record)) is not None]
                spot = Spot(result.traffic, statistics.fmean(reached), row.point["down"])
                series.setdefault(row.name("down"), []).append(spot)
            panels.append(SpotPanel(title, series))
        return panels

    def draw(self, rows: Sequence[Row], results: Results, paths: Sequence[Path]) -> None:
        """Draw the panels side by side."""
        ylabel = f"{self.measure(rows, results)}, %"
        draw_spots(self.panels(rows, results), "up and down, of a client in a round", ylabel, paths)

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
    draw: Callable[[Sequence[Path]], None]


def _by_group(kinds: Mapping[str, Curves | Spots], table: Table, results: Results) -> Iterator[Picture]:
    """Pictures of some kinds for each data set and number of clients with at least one run."""
    for (dataset, clients), rows in results.groups(table):
        for kind, plot in kinds.items():
            if plot.panels(rows, results):
                title = f"{dataset}, {clients} clients: {plot.title}"
                yield Picture(file_name(f"{dataset}-n{clients}-{kind}"), title, partial(plot.draw, rows, results))


def _of_trials(table: Table, results: Results) -> Iterator[Picture]:
    if found := theory.records_of(table, results):
        yield Picture(table.name, table.title, partial(theory.draw, found))


_ACCURACY = f"test accuracy, %, mean of {WINDOW} rounds"
_CURVES = {
    "rounds": Curves("accuracy by round", _ACCURACY, _percent, WINDOW),
    "bytes": Curves("accuracy by bytes sent up", _ACCURACY, _percent, WINDOW, by_bytes=True),
    "error": Curves("error of what is sent", "relative error, weighted by parameters", weighted_error, log=True),
}
TRAFFIC = Spots(
    "accuracy against total traffic",
    {
        "averaged model, last ten rounds": lambda record: record.averaged_last10,
        "last ten rounds": lambda record: record.last10,
    },
)
PICTURES: Mapping[str, Callable[[Table, Results], Iterator[Picture]]] = {  # by view
    "curves": partial(_by_group, _CURVES),
    "traffic": partial(_by_group, {"traffic": TRAFFIC}),
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
            yield f"{rows[0].point['dataset']}, {split}, {rows[0].point['clients']} clients", found
