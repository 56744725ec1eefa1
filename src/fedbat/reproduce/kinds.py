"""What claims compare, by kind: each turns a cell of the paper's grid into cases, numbers that records decide.

A case is computed for each seed from runs with that seed, which share initial weights and sampled clients; only
then is the mean taken. Its expected standard deviation is:
- *paper*: for accuracies, what the paper prints, with half a digit added and summed as if runs were not paired, with
  the four degrees of freedom of its five runs; that of the same method and clients if printed, otherwise the largest
  printed for that data set and split. It is that of best rounds and, for others, only used where there is one seed;
- *curves*: for rounds to a target, how far these move when one of the two methods' accuracies moves, by what the paper
  prints (as above) or, if that is more, by how the two runs' difference varies in their second half;
- *rounds*: for a mean over rounds, that of single rounds, as a bound;
- *exact*: for what is not a matter of chance, zero.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from fedbat.errors import ConfigError
from fedbat.reproduce.estimates import Spread
from fedbat.reproduce.metrics import METRICS, running_mean
from fedbat.reproduce.record import Record
from fedbat.reproduce.tables import KEYS, Book, Row

_PAPER_RUNS = 5
_HALF_A_DIGIT = 0.05  # the paper prints one decimal


class Case(NamedTuple):
    """One number of a claim, from one record of each row, all of one seed."""

    cell: str
    what: str
    rows: tuple[Row, ...]
    measure: Callable[[Sequence[Record]], float]
    expected: Callable[[Sequence[Record]], Sequence[Spread]]  # between seeds, by the records of one
    printed: float | None  # the same number from the paper's results
    style: str  # the format of the number


class Shelf:
    """The rows of all experiment files by their points, except those that vary another field of the experiment."""

    def __init__(self, book: Book) -> None:
        self.trials = [trial for table in book.tables.values() for trial in table.trials]
        all_rows = (row for table in book.tables.values() for row in table.rows)
        rows = [row for row in all_rows if len(row.point) == len(KEYS)]  # claims know nothing else
        # Of rows with equal points, the last is that for which the paper prints most: a number, its standard deviation.
        rows.sort(key=lambda row: (row.paper is not None, row.paper is not None and row.paper.std is not None))
        self._rows: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            self._rows.setdefault(tuple(row.point[key] for key in KEYS), []).append(row)

    def row(self, dataset: str, clients: str, split: str, method: str) -> Row:
        """The row of a point; a claim may only name cells that some experiment file has, and all in the same way."""
        point = f"{dataset}, {clients} clients, {split}, {method}"
        found = self._rows.get((dataset, clients, split, method))
        if not found:
            raise ConfigError(f"no experiment file has {point}; add it to one of them or correct the claim")
        if len({row.identity for row in found}) > 1:
            raise ConfigError(
                f"experiment files differ in what they fix for {point}; a claim cannot tell which is meant: "
                "fix the same, or keep one of them in another folder"
            )
        return found[-1]

    def std(self, row: Row) -> float | None:
        """The standard deviation the paper prints for a cell, or the largest printed for the cells nearest to it."""
        dataset, clients, split, method = (row.point[key] for key in KEYS)
        near = [
            (key, known.paper.std)
            for key, (*_, known) in self._rows.items()
            if known.paper is not None and known.paper.std is not None and (key[0], key[2]) == (dataset, split)
        ]
        for place, wanted in ((3, method.split()[0]), (1, clients)):
            near = [(key, std) for key, std in near if key[place] == wanted] or near
        return max((std for _, std in near), default=None)


@dataclass(frozen=True)
class Column:
    """A data set, a number of clients and a split, with the rows of its methods."""

    shelf: Shelf
    dataset: str
    clients: str
    split: str

    def row(self, method: str) -> Row:
        """The row of a method in this column."""
        return self.shelf.row(self.dataset, self.clients, self.split, method)

    def __str__(self) -> str:
        return f"{self.dataset}, {self.clients} clients, {self.split}"


def difference(column: Column, *, one: str, others: Sequence[str], metric: str = "best") -> Iterator[Case]:
    """`one` minus each of the others."""
    for other in others:
        ours, theirs = column.row(one), column.row(other)
        yield combine(column, f"{ours.spelled()} − {theirs.spelled()}", metric, (1, ours), (-1, theirs))


def level(column: Column, *, methods: Sequence[str], metric: str) -> Iterator[Case]:
    """Each method by itself."""
    for row in map(column.row, methods):
        yield combine(column, row.spelled(), metric, (1, row))


def rise(column: Column, *, orders: Sequence[Sequence[str]], metric: str = "best") -> Iterator[Case]:
    """Each method of an order minus the one before it."""
    for order in orders:
        for before, after in pairwise(order):
            yield from difference(column, one=after, others=[before], metric=metric)


def growth(
    column: Column, *, one: str, others: Sequence[str], since: Mapping[str, Any], metric: str = "best"
) -> Iterator[Case]:
    """How much further ahead of each of the others `one` is here than in the column that differs by `since`."""
    start = replace(column, **since)
    for other in others:
        here, there = [(1, column.row(one)), (-1, column.row(other))], [(-1, start.row(one)), (1, start.row(other))]
        apart = f"{column.row(one).spelled()} − {column.row(other).spelled()}"
        yield combine(column, f"{apart}, more than in {start}", metric, *here, *there)


def rounds(column: Column, *, one: str, others: Sequence[str], smooth: int, slack: float) -> Iterator[Case]:
    """Rounds that `one` needs to reach a target, minus those that each of the others needs.

    The target is the lower of the two best accuracies less `slack` points, so that both reach it; accuracies are
    running means over the last `smooth` rounds, so that a single lucky round does not count.
    """

    def curves_and_target(records: Sequence[Record]) -> tuple[list[list[float]], float]:
        curves = [running_mean(record.accuracy, smooth) for record in records]
        return curves, min(map(max, curves)) - slack / 100

    def measure(records: Sequence[Record]) -> float:
        curves, target = curves_and_target(records)
        ours, theirs = (_reached(curve, target) for curve in curves)
        return ours - theirs

    def expected(records: Sequence[Record], rows: Sequence[Row]) -> list[Spread]:
        curves, target = curves_and_target(records)
        apart = [ours - theirs for ours, theirs in zip(*(record.accuracy for record in records), strict=True)]
        late = apart[len(apart) // 2 :]  # how their distance varies from round to round, while both hardly rise
        paper = _paper_spread(column.shelf, rows)
        noise = max(statistics.stdev(late) / math.sqrt(smooth), paper.std / 100 if paper else 0.0)
        moved = [_reached(curve, min(target + noise, max(curve))) - _reached(curve, target - noise) for curve in curves]
        return [Spread(max(1, *moved) / 2, _PAPER_RUNS - 1, "curves")]  # rounds are whole

    for other in others:
        rows = (column.row(one), column.row(other))
        what = f"rounds of {rows[0].spelled()} − {rows[1].spelled()}"
        yield Case(str(column), what, rows, measure, partial(expected, rows=rows), None, "+.1f")


def _reached(curve: Sequence[float], target: float) -> int:
    """The index of the first round that reaches the target."""
    return next(i for i, accuracy in enumerate(curve) if accuracy >= target)


KINDS: dict[str, Callable[..., Iterator[Case]]] = {
    "difference": difference,
    "level": level,
    "rise": rise,
    "growth": growth,
    "rounds": rounds,
}


def combine(column: Column, what: str, metric_name: str, *terms: tuple[int, Row]) -> Case:
    """A case that adds and subtracts a metric of rows of a column."""
    if metric_name not in METRICS:
        raise ConfigError(f"unknown metric {metric_name!r}; choose from {', '.join(METRICS)}")
    metric, signs, rows = METRICS[metric_name], [sign for sign, _ in terms], tuple(row for _, row in terms)

    def added(values: Sequence[float]) -> float:
        return sum(sign * value for sign, value in zip(signs, values, strict=True))

    def expected(records: Sequence[Record]) -> list[Spread]:
        found = [Spread(0.0, math.inf, "exact", measured=False)] if metric.exact else []
        if metric.by_round is not None:
            by_round = [added(values) for values in zip(*map(metric.by_round, records), strict=True)]
            if len(by_round) > 1:
                found.append(Spread(statistics.stdev(by_round), len(by_round) - 1, "rounds", measured=False))
        if metric.accuracy and (paper := _paper_spread(column.shelf, rows)):
            found.append(paper._replace(measured=metric.printed))  # other metrics may vary more: only a bound for them
        return found

    printed = [row.paper.accuracy for row in rows if row.paper is not None and metric.printed]
    return Case(
        str(column),
        what,
        rows,
        lambda records: added([metric.of(record) for record in records]),
        expected,
        added(printed) if len(printed) == len(rows) else None,
        f"{'+' if -1 in signs else ''}.{metric.decimals}f",
    )


def _paper_spread(shelf: Shelf, rows: Sequence[Row]) -> Spread | None:
    found = [std for row in rows if (std := shelf.std(row)) is not None]
    if len(found) < len(rows):
        return None
    return Spread(math.sqrt(sum((std + _HALF_A_DIGIT) ** 2 for std in found)), _PAPER_RUNS - 1, "paper")
