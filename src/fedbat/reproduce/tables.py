"""Experiment files: what each table and figure of the paper consists of, along with the paper's own numbers."""

import csv
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedbat.errors import ConfigError
from fedbat.experiment import Experiment
from fedbat.reproduce.cells import Cell
from fedbat.reproduce.entries import check_keys, read_toml
from fedbat.reproduce.protocol import PROTOCOL, Point, Protocol
from fedbat.reproduce.theory.trials import Trial, read_trials
from fedbat.settings import show

KEYS = ("dataset", "clients", "split", "method")  # every grid has these, and may also vary fields of the experiment
VIEWS = ("table", "curves", "traffic", "differences", "theory")  # what RESULTS.md makes of a file
ALL = "all"  # what the cells of order.toml are called on the command line
_NO_PROTOCOLS = {PROTOCOL: {"title": "as the files say"}}  # for a folder without protocols.toml


class Number(NamedTuple):
    """A result as the paper prints it, in percent."""

    accuracy: float
    std: float | None


@dataclass(frozen=True)
class Row:
    """One row of a table: a point of its grid and the paper's number for it."""

    point: Point
    paper: Number | None
    protocol: Protocol
    fixed: Mapping[str, Any]  # fields of the experiment that the file sets

    def name(self, *told: str) -> str:
        """The method and whatever else the grid varies, but for keys that are `told` otherwise."""
        varied = [f"{key}={value}" for key, value in self.point.items() if key not in (*KEYS, *told)]
        return " ".join([self.point["method"], *varied])

    def spelled(self, *told: str) -> str:
        """The same with the settings of the protocol, by which `fedbat run` and reports know the method."""
        method = self.point["method"]
        return self.protocol.spelled(method) + self.name(*told).removeprefix(method)

    def cell(self, seed: int) -> Cell:
        """The cell of this row with a seed."""
        return Cell(self.protocol.experiment(self.point, self.fixed, seed))

    @cached_property
    def identity(self) -> str:
        """The identity of the row, whatever the seed."""
        return self.cell(0).identity


class Grid(NamedTuple):
    """Every combination of some keys' values."""

    about: str | None
    keys: tuple[str, ...]  # the last one varies fastest
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Table:
    """One table or figure of the paper."""

    name: str
    title: str
    label: str | None  # in the paper
    view: str
    grids: tuple[Grid, ...]
    trials: tuple[Trial, ...] = ()  # of toy problems, which have no cells

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all grids; those of a data set, number of clients and split stand together, ordered by method."""
        rows = [row for grid in self.grids for row in grid.rows]
        columns = list(dict.fromkeys(map(_column, rows)))
        methods = list(dict.fromkeys(row.point["method"] for row in rows))
        return tuple(sorted(rows, key=lambda row: (columns.index(_column(row)), methods.index(row.point["method"]))))

    def groups(self) -> Iterator[tuple[tuple[str, str], list[Row]]]:
        """The rows by data set and number of clients."""
        for key, rows in itertools.groupby(self.rows, lambda row: (row.point["dataset"], row.point["clients"])):
            yield key, list(rows)

    def where(self, only: Mapping[str, str]) -> tuple[Row, ...]:
        """The rows that match every filter."""
        return tuple(row for row in self.rows if matches(row.point, only))


class Part(NamedTuple):
    """Some cells in the order in which everything is best run."""

    table: str
    seeds: list[int]
    only: dict[str, str]


class Note(NamedTuple):
    """A finding about some rows, in words."""

    only: dict[str, str]
    text: str
    open: bool = False  # it says what was tried, and the rows are still to be looked into


@dataclass(frozen=True)
class Book:
    """All experiment files of a folder."""

    folder: Path
    tables: Mapping[str, Table]
    order: tuple[Part, ...]
    notes: tuple[Note, ...]
    protocol: Protocol
    data: Mapping[str, str]  # what there is to know about a data set, in words

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys by which cells may be chosen."""
        keys = (key for table in self.tables.values() for grid in table.grids for key in grid.keys)
        return tuple(dict.fromkeys((*KEYS, *keys)))

    def cells(self, name: str, seeds: Sequence[int] | None, only: Mapping[str, str]) -> list[Cell]:
        """The cells of a table, or all in their order, each once; if `seeds` is None, those of the order, or 0."""
        if name != ALL and name not in self.tables:
            raise ConfigError(f"unknown experiment {name!r}; choose from {', '.join([*self.tables, ALL])}")
        self.check(only)
        parts = self.order if name == ALL else [Part(name, list(seeds or [0]), {})]
        found = [
            row.cell(seed)
            for part in parts
            for seed in part.seeds
            if seeds is None or seed in seeds
            for row in self.tables[part.table].where(part.only)
            if matches(row.point, only)
        ]
        if not found and not self.trials(name, seeds, only):
            wanted = [f"{key}={values}" for key, values in only.items()]
            wanted += [] if seeds is None else [f"seeds={','.join(map(str, seeds))}"]
            rows = [row for part in parts for row in self.tables[part.table].where(part.only)]
            known = {key: dict.fromkeys(row.point[key] for row in rows if key in row.point) for key in only}
            there = "; ".join(f"{key} is {', '.join(values)}" for key, values in known.items() if values)
            raise ConfigError(f"{name} has no cell with {' '.join(wanted)}; {there or 'leave out a filter'}")
        return list({cell.identity: cell for cell in found}.values())

    def trials(self, name: str, seeds: Sequence[int] | None, only: Mapping[str, str]) -> list[Trial]:
        """The trials of a table, or all; they have no data set, split or method to be chosen by."""
        names = [part.table for part in self.order] if name == ALL else [name]
        found = dict.fromkeys(trial for table in names for trial in self.tables[table].trials)
        return [trial for trial in found if not only and (seeds is None or trial.seed in seeds)]

    def check(self, only: Mapping[str, str]) -> None:
        """Refuse a filter that no file knows."""
        if unknown := set(only) - set(self.keys):
            raise ConfigError(
                f"cells cannot be chosen by {', '.join(sorted(unknown))}; choose by {', '.join(self.keys)}"
            )


def matches(point: Point, only: Mapping[str, str]) -> bool:
    """Whether a point has one of the comma-separated values of every filter; a bare method matches its variants."""
    return all(
        point.get(key) in (allowed := values.split(",")) or (key == "method" and point[key].split()[0] in allowed)
        for key, values in only.items()
    )


def load_book(folder: Path, protocol: str = PROTOCOL) -> Book:
    """Read every experiment file, taking the paper's terms as `protocol` does."""
    files = {path.stem: read_toml(path) for path in sorted(folder.glob("*.toml"))}
    if not files:
        raise ConfigError(
            f"no experiment files in {folder}; work in a clone of the repository, or let --experiments name a folder "
            "with files of yours"
        )
    protocols = files.get("protocols", _NO_PROTOCOLS)
    if protocol not in protocols:
        raise ConfigError(f"unknown protocol {protocol!r}; choose from {', '.join(protocols)}")
    place = f"{folder / 'protocols'}.toml: {protocol}"
    words: dict[str, Any] = {"partition": {}, "model": {}, "settings": {}}
    chosen = Protocol(protocol, **words | check_keys(place, protocols[protocol], ["title"], words))
    order = tuple(
        Part(**({"only": {}} | check_keys(f"{folder / 'order'}.toml: a part", part, ["table", "seeds"], ["only"])))
        for part in files.get("order", {}).get("part", [])
    )
    with_tables = [name for name, file in files.items() if "grid" in file or "trial" in file]
    names = dict.fromkeys([part.table for part in order] + with_tables)
    if missing := names.keys() - files.keys():
        raise ConfigError(f"{folder / 'order.toml'} names {', '.join(missing)}, which is no file there; add it")
    tables = {name: _table(folder, name, files[name], chosen) for name in names}
    notes = tuple(
        Note(**check_keys(f"{folder / 'notes'}.toml: a note", note, ["only", "text"], ["open"]))
        for note in files.get("notes", {}).get("note", [])
    )
    book = Book(folder, tables, order, notes, chosen, files.get("notes", {}).get("data", {}))
    for only in [part.only for part in order] + [note.only for note in notes]:
        book.check(only)
    return book


def _table(folder: Path, name: str, file: Mapping[str, Any], protocol: Protocol) -> Table:
    place = f"{folder / name}.toml"
    check_keys(place, file, ["title"])
    if (view := file.get("view", VIEWS[0])) not in VIEWS:
        raise ConfigError(f"{place}: view = {view!r}, choose from {', '.join(VIEWS)}")
    paper = _paper_numbers(folder / "paper" / f"{name}.csv")
    found = file.get("grid", [])
    entries = found if isinstance(found, list) else [found]
    grids = tuple(_grid(place, entry, paper, protocol, file.get("fixed", {})) for entry in entries)
    single = [grid.keys[-1] for grid in grids if len({row.point[grid.keys[-1]] for row in grid.rows}) < 2]
    if view == "differences" and single:
        raise ConfigError(
            f"{place}: the last key of a grid is what differs, but {single[0]} has fewer than two values; add one, or "
            "put another key last"
        )
    if view == "traffic" and not all("down" in grid.keys for grid in grids):
        raise ConfigError(f'{place}: a grid has no down, which view = "traffic" shows; add down = ["32", "4"], say')
    return Table(name, file["title"], file.get("label"), view, grids, read_trials(place, file.get("trial", [])))


def _grid(
    place: str,
    entry: Mapping[str, Any],
    paper: Mapping[tuple[str, ...], Number],
    protocol: Protocol,
    fixed: Mapping[str, Any],
) -> Grid:
    values = {key: value for key, value in entry.items() if key != "about"}
    fields = [field.name for field in dataclasses.fields(Experiment)]
    if missing := set(KEYS) - set(values):
        raise ConfigError(f"{place}: a grid has no {', '.join(sorted(missing))}; it needs {', '.join(KEYS)}")
    if unknown := (set(values) | set(fixed)) - {*KEYS, *fields}:
        raise ConfigError(f"{place}: no experiment has {', '.join(sorted(unknown))}; vary or fix {', '.join(fields)}")
    if "seed" in {**values, **fixed}:
        raise ConfigError(f"{place} has seed, but --seeds chooses seeds, or order.toml for all; leave it out")
    rows = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        point = {key: show(value) for key, value in chosen.items()}
        varied = {key: value for key, value in chosen.items() if key not in KEYS}
        rows.append(Row(point, paper.get(_key(point)), protocol, {**fixed, **varied}))
    return Grid(entry.get("about"), tuple(values), tuple(rows))


def _paper_numbers(path: Path) -> dict[tuple[str, ...], Number]:
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {
            _key(line): Number(float(line["accuracy"]), float(line["std"]) if line["std"] else None)
            for line in csv.DictReader(file)
        }


def _key(point: Point) -> tuple[str, ...]:
    return tuple(point[key] for key in KEYS)


def _column(row: Row) -> tuple[str, ...]:
    return tuple(row.point[key] for key in ("dataset", "clients", "split"))
