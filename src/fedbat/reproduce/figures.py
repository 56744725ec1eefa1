"""The paper's convergence figures from records, and two more: against the bytes sent, and the error of what is sent."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedbat.plots import Line, Panel, draw_panels
from fedbat.reproduce.record import Record, Records
from fedbat.reproduce.results import Results
from fedbat.reproduce.tables import Book, Row, Table

FORMATS = ("png", "svg")


@dataclass(frozen=True)
class Kind:
    """What is drawn of every record."""

    title: str
    ylabel: str
    y: Callable[[Record], Sequence[float]]
    by_bytes: bool = False
    log: bool = False


def _percent(record: Record) -> Sequence[float]:
    return [100 * value for value in record.accuracy]


KINDS = {
    "rounds": Kind("accuracy by round", "test accuracy, %", _percent),
    "bytes": Kind("accuracy by bytes sent", "test accuracy, %", _percent, by_bytes=True),
    "error": Kind(
        "error of what is sent", "||sent − m|| / ||m||, mean of layers", lambda record: record.relative_error, log=True
    ),
}


def groups(table: Table) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """The rows of a table by data set and number of clients."""
    for key, rows in itertools.groupby(table.rows, lambda row: (row.point["dataset"], row.point["clients"])):
        yield key, list(rows)


def picture_name(dataset: str, clients: str, kind: str) -> str:
    """Of the picture of a group, without its ending."""
    return f"{dataset}-n{clients}-{kind}"


def draw_figures(book: Book, records: Records, folder: Path) -> list[Path]:
    """Draw every figure of which something has been run."""
    results, written = Results(book, records), []
    for table in book.tables.values():
        for (dataset, clients), rows in groups(table) if table.curves else ():
            for name, kind in KINDS.items():
                if panels := _panels(rows, results, kind):
                    folder.mkdir(parents=True, exist_ok=True)
                    stem = picture_name(dataset, clients, name)
                    paths = [folder / f"{stem}.{ending}" for ending in FORMATS]
                    draw_panels(panels, kind.ylabel, paths, by_bytes=kind.by_bytes, log=kind.log)
                    written += paths
    return written


def _panels(rows: Sequence[Row], results: Results, kind: Kind) -> list[Panel]:
    """One for each split of which something has been run."""
    panels = []
    for split, found in itertools.groupby(rows, lambda row: row.point["split"]):
        lines = {}
        for row in found:
            result = results.of(row)
            # On a logarithmic axis there is no place for methods that send everything as it is.
            if result is not None and not (kind.log and min(kind.y(result.records[0])) <= 0):
                lines[row.point["method"]] = _line(result.records, kind)
        if lines:
            panels.append(Panel(f"{rows[0].point['dataset']}, {split}, {rows[0].point['clients']} clients", lines))
    return panels


def _line(records: Sequence[Record], kind: Kind) -> Line:
    """The mean over seeds, from the lowest to the highest of them."""
    columns = list(zip(*(kind.y(record) for record in records), strict=True))
    x = itertools.accumulate(records[0].uplink_bytes) if kind.by_bytes else range(1, len(columns) + 1)
    band = ([min(column) for column in columns], [max(column) for column in columns])
    return Line(list(x), [statistics.fmean(column) for column in columns], band if len(records) > 1 else None)
