"""Records compared with the paper's numbers: means over seeds, differences, and which method is ahead of which."""

import itertools
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fedbat.reproduce.cells import served
from fedbat.reproduce.record import Record, Records
from fedbat.reproduce.tables import Book, Row, Table

WITHIN = 1.0  # point: how close to the paper counts as reproduced
ROUNDING = 1e-9  # slack for differences between numbers with few decimals: 83.9 is one point from 84.9, not more


class MeanStd(NamedTuple):
    """A mean over seeds, and the standard deviation if there is more than one."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "MeanStd":
        """The mean and standard deviation over the runs of one cell."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True, eq=False)
class Result:
    """A row that has been run, with the records of all its seeds."""

    row: Row
    records: tuple[Record, ...]

    @cached_property
    def best(self) -> MeanStd:
        """The accuracy of the best rounds, as the paper reports it."""
        return MeanStd.of([record.best for record in self.records])

    @cached_property
    def last10(self) -> MeanStd:
        """The accuracy of the last ten rounds."""
        return MeanStd.of([record.last10 for record in self.records])

    @cached_property
    def averaged(self) -> MeanStd | None:
        """The accuracy of the averaged model in the last ten rounds, over the seeds for which one was kept."""
        return self.last10_of("averaged")

    @property
    def averaging_gain(self) -> float | None:
        """How far that is above the model itself, over the same seeds."""
        gains = [kept - record.last10 for record in self.records if (kept := record.last10_of("averaged")) is not None]
        return statistics.fmean(gains) if gains else None

    def only(self, seeds: Collection[int]) -> "Result":
        """The same with these seeds alone."""
        return Result(self.row, tuple(record for seed, record in self.by_seed.items() if seed in seeds))

    @property
    def difference(self) -> float | None:
        """The difference from the paper, in points; None if it has no number."""
        return None if self.row.paper is None else self.best.mean - self.row.paper.accuracy

    @property
    def traffic(self) -> float:
        """Bytes per client and round, up and down."""
        return statistics.fmean(record.total_bytes for record in self.records)

    @property
    def saving(self) -> float:
        """How many times less that is than the float32 model both ways."""
        return statistics.fmean(record.total_saving for record in self.records)

    @cached_property
    def by_seed(self) -> dict[int, Record]:
        """The records by the seed they were run with."""
        return {record.configuration["seed"]: record for record in self.records}

    def lead(self, other: "Result") -> float | None:
        """How far its best rounds are above the other's, averaged over the seeds both have; None if there are none."""
        shared = self.by_seed.keys() & other.by_seed.keys()
        leads = [self.by_seed[seed].best - other.by_seed[seed].best for seed in sorted(shared)]
        return statistics.fmean(leads) if leads else None

    def last10_of(self, model: str) -> MeanStd | None:
        """The accuracy of another model in the last ten rounds, over the seeds with which it was tested."""
        found = [last10 for record in self.records if (last10 := record.last10_of(model)) is not None]
        return MeanStd.of(found) if found else None

    def accuracy(self, figure: str) -> MeanStd | None:
        """An accuracy from the summaries, in percent; None if they do not have it."""
        values = [100 * record.summary[figure] for record in self.records if figure in record.summary]
        return MeanStd.of(values) if values else None

    def mean(self, figure: str) -> float:
        """The mean of a figure from the summaries."""
        return statistics.fmean(record.summary[figure] for record in self.records)


class Results:
    """What has been run of a book, by row."""

    def __init__(self, book: Book, records: Records) -> None:
        runs: dict[str, dict[int, Record]] = {}  # by seed
        for record in records:
            for key in served(record.configuration | {"seed": 0}):
                runs.setdefault(key, {})[record.configuration["seed"]] = record
        rows = {row.identity: row for table in book.tables.values() for row in table.rows}
        # Tables share rows; the first with the paper's number stands for all: "fedbat", not "fedbat phi=0.5".
        tables = reversed(tuple(book.tables.values()))
        rows |= {row.identity: row for table in tables for row in reversed(table.rows) if row.paper}
        self.num_rows = len(rows)
        trials = {trial for table in book.tables.values() for trial in table.trials}
        self.trials = {trial: record for trial, record in records.trials.items() if trial in trials}
        self.found = {
            key: Result(row, tuple(runs[key][seed] for seed in sorted(runs[key])))
            for key, row in rows.items()
            if key in runs
        }
        shown = set(self.records)
        pairs = ((record, records.get(record.identity)) for record in records if record not in shown)
        self.repeats = tuple((one, other) for one, other in pairs if other in shown)  # runs of one training and seed

    @cached_property
    def records(self) -> tuple[Record, ...]:
        """The records of all results, each once; a record may stand for several rows."""
        return tuple(dict.fromkeys(record for result in self.found.values() for record in result.records))

    def of(self, row: Row) -> Result | None:
        """The result of a row, if it has been run."""
        return self.found.get(row.identity)

    def training(self, row: Row) -> Result | None:
        """The result of a row with, for seeds it lacks, records of the same training without an averaged model."""
        by_seed: dict[int, Record] = {}
        for key in reversed(row.cell(0).serves):  # the row's own come last, and stay
            by_seed |= self.found[key].by_seed if key in self.found else {}
        return Result(row, tuple(by_seed[seed] for seed in sorted(by_seed))) if by_seed else None

    def groups(self, table: Table) -> list[tuple[tuple[str, str], list[Row]]]:
        """The rows of a table by data set and number of clients, where any has been run."""
        return [(key, rows) for key, rows in table.groups() if any(map(self.of, rows))]

    def compared(self) -> list[Result]:
        """The results for which the paper has a number."""
        return [result for result in self.found.values() if result.row.paper is not None]

    def close(self) -> list[Result]:
        """The compared results that are at most a point off."""
        return [result for result in self.compared() if not _further(result, WITHIN)]

    def deviating(self) -> list[Result]:
        """The compared results that are off by more than a point and more than twice the paper's standard deviation."""
        return [result for result in self.compared() if _further(result, _tolerance(result))]

    def columns(self) -> list[dict[str, Result]]:
        """The compared results by name, for each data set, number of clients and split."""
        found: dict[tuple[str, ...], dict[str, Result]] = {}
        for result in self.compared():
            point = result.row.point
            column = found.setdefault((point["dataset"], point["clients"], point["split"]), {})
            column[result.row.name()] = result
        return list(found.values())


class Orderings(NamedTuple):
    """Pairs of methods of one column that the paper ranks, and how many rank the same here."""

    agree: int
    all: int


def orderings(columns: Iterable[dict[str, Result]], apart: float = 0.0) -> Orderings:
    """Count the pairs that the paper puts more than `apart` points apart."""
    agree, total = 0, 0
    for column in columns:
        for a, b in itertools.combinations(column.values(), 2):
            ours, theirs = a.lead(b), _paper(a) - _paper(b)
            if ours is not None and abs(theirs) > apart + ROUNDING:
                total += 1
                agree += theirs * ours > 0
    return Orderings(agree, total)


class Duel(NamedTuple):
    """One method against another over the columns in which both were run."""

    columns: int
    ahead: int
    ahead_in_paper: int
    difference: float  # mean, in points
    difference_in_paper: float


def duel(columns: Iterable[dict[str, Result]], one: str, other: str) -> Duel | None:
    """How often and how far `one` is ahead, here and in the paper; None if they never met."""
    met = [(column[one], column[other]) for column in columns if one in column and other in column]
    leads = [(lead, _paper(a) - _paper(b)) for a, b in met if (lead := a.lead(b)) is not None]
    if not leads:
        return None
    ours, theirs = zip(*leads, strict=True)
    return Duel(
        len(leads),
        sum(value > 0 for value in ours),
        sum(value > ROUNDING for value in theirs),
        statistics.fmean(ours),
        statistics.fmean(theirs),
    )


def _further(result: Result, points: float) -> bool:
    return abs(result.difference or 0) > points + ROUNDING


def _tolerance(result: Result) -> float:
    assert result.row.paper is not None
    return max(WITHIN, 2 * (result.row.paper.std or 0))


def _paper(result: Result) -> float:
    assert result.row.paper is not None
    return result.row.paper.accuracy
