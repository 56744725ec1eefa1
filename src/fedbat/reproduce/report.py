"""RESULTS.md from the records: the paper's numbers, ours, and how they differ. Nothing in it is typed by hand."""

import itertools
import textwrap
from collections.abc import Callable, Iterator
from itertools import compress
from pathlib import Path

from fedbat.plots import NEAR
from fedbat.reproduce import differences, evidence, questions, summary, traffic
from fedbat.reproduce.claims import judge_all
from fedbat.reproduce.figures import WINDOW, pictures
from fedbat.reproduce.markdown import mean_std, not_run, number, share, span, table
from fedbat.reproduce.pace import Machine
from fedbat.reproduce.protocol import Protocol
from fedbat.reproduce.record import Records
from fedbat.reproduce.results import Result, Results
from fedbat.reproduce.tables import Book, Row, Table
from fedbat.reproduce.theory.section import section as theory

_OF_THE_PAPER = ("paper", "difference")
_COLUMNS = ("split", "method", "paper", "ours", "n", "difference", "last ten", "bytes up", "bit/param", "seconds")
_WORDS = ("split", "method")


def render(book: Book, records: Records, figures: Path, folder: str = "results") -> str:
    """The whole page; `figures` is the path from the page to the pictures, `folder` names that of the records."""
    files = book.folder.resolve().name
    results, findings = Results(book, records), judge_all(book, records)
    open_ = questions.Questions.of(book, results)
    return "\n".join(
        [
            "# Results",
            "",
            f"Written by `fedbat reproduce --write` from the records in `{folder}/`; not to be edited.",
            *([f"Protocol: {book.protocol.title} (`{files}/protocols.toml`)."] if book.protocol.partition else []),
            "",
            *summary.section(results, findings, open_),
            *(questions.section(open_, files) if _has_paper(book) else []),
            *questions.notes(book, results),
            *evidence.section(findings, files, (figures.parent / evidence.page_name(book)).as_posix()),
            *_how_to_read(book, results),
            *_reached(book, results),
            *itertools.chain.from_iterable(_section(found, book, results, figures) for found in _in_order(book)),
        ]
    )


def _has_paper(book: Book) -> bool:
    """Whether there are printed numbers to compare with; for experiments of one's own there need not be."""
    return any(row.paper for found in book.tables.values() for row in found.rows)


def _in_order(book: Book) -> list[Table]:
    """The paper's tables and figures, its theory, then ours."""
    return sorted(book.tables.values(), key=lambda table: (table.label is None, bool(table.trials)))


def _reached(book: Book, results: Results) -> Iterator[str]:
    """How much of each table has been run, by number of clients; figures show cells of tables."""
    yield from ["## What has been run", ""]
    rows = []
    for found in _in_order(book):
        by_clients: dict[str, dict[str, Result | None]] = {}
        for row in found.rows if found.view != "curves" else ():
            by_clients.setdefault(row.point["clients"], {})[row.identity] = results.of(row)
        for clients, cells in by_clients.items():
            run = [result for result in cells.values() if result is not None]
            rows.append([found.title, clients, share(len(run), len(cells)), str(sum(len(r.records) for r in run))])
        if found.trials:
            done = len(results.trials.keys() & set(found.trials))
            rows.append([found.title, "", share(done, len(found.trials)), str(done)])
    yield from table(("table", "clients", "cells run", "runs"), rows, ["table"])


def _how_to_read(book: Book, results: Results) -> list[str]:
    beside_the_paper = [
        "Accuracies are test accuracies in percent. *paper* is what the paper prints (mean of five runs), *ours*",
        "the mean of *n* seeds with its standard deviation; both take the best round, as the authors' code does.",
    ]
    alone = [
        "Accuracies are test accuracies in percent. *best* is that of the best round, the mean of *n* seeds with its",
        "standard deviation.",
    ]
    return [
        "## How to read the tables",
        "",
        *(beside_the_paper if _has_paper(book) else alone),
        "*last ten* is the mean over the last ten rounds (of fewer than twenty, the last one). *bytes up* is what one",
        "client really sends in a round, packed, BatchNorm and header included; *seconds* is one whole run, beside",
        "others if so many ran at once.",
        "All seeds share one split of the data among clients (`partition_seed`, by default that of the authors' code):",
        "standard deviations and intervals say nothing about other splits.",
        *_repeats(results),
        *_meant(book.protocol),
        "",
    ]


def _repeats(results: Results) -> Iterator[str]:
    """How far runs with the same seed lie apart: all of it is rounding, which no seed controls."""
    apart = [abs(one.best - other.best) for one, other in results.repeats]
    if apart:
        yield from [
            "Runs of one cell and seed differ, too, as a GPU rounds in varying order: best rounds of those made twice",
            f"({len(apart)}) lie up to {max(apart):.2f} points apart. All tables show the same one of the two.",
        ]


def _meant(protocol: Protocol) -> Iterator[str]:
    """What the tables' names of splits stand for on the command line; methods are named as there."""
    splits = [f"*{name}* is `--partition {split}`" for name, split in protocol.partition.items() if name != split]
    if splits:
        yield from textwrap.wrap(f"In the tables {'; '.join(splits)}.", 105, break_on_hyphens=False)


def _section(found: Table, book: Book, results: Results, figures: Path) -> Iterator[str]:
    yield from [f"## {found.title}", ""]
    yield from SECTIONS[found.view](found, book, results)
    for picture in pictures(found, results):
        yield from [f"![{picture.title}]({(figures / picture.name).as_posix()}.png)", ""]
    begun = dict(results.groups(found))
    if left := [f"{', '.join(key)} clients" for key, _ in found.groups() if key not in begun]:
        yield from [f"Not run yet: {'; '.join(left)}.", ""]


def _beside_the_paper(found: Table, book: Book, results: Results) -> Iterator[str]:
    for (dataset, clients), rows in results.groups(found):
        yield from [f"### {dataset}, {clients} clients", ""]
        shown = [_row(row, result) for row in rows if (result := results.of(row)) is not None]
        columns = zip(_COLUMNS, zip(*shown, strict=True), strict=True)
        beside = [name not in _OF_THE_PAPER or any(cells) for name, cells in columns]
        header, *lines = (list(compress(each, beside)) for each in (_COLUMNS, *shown))
        if not _has_paper(book):
            header = ["best" if name == "ours" else name for name in header]
        yield from table(header, lines, _WORDS)
        yield from not_run((row.spelled(), row.point["split"]) for row in rows if results.of(row) is None)


def _curves(found: Table, book: Book, results: Results) -> Iterator[str]:
    if results.groups(found):
        yield from [
            "A curve is the mean over seeds; where there are several, a band reaches from the lowest to the highest.",
            f"Accuracies are means over a round and the {WINDOW - 1} before it, as they jump where clients hold few",
            f"labels; methods that end more than {NEAR:g} points below the best are in sight only as far as they come.",
            "Errors are ||sent − m|| / ||m||, mean over clients and over layers weighted by their parameters, as in",
            "the claims; EF-SignSGD's message carries what earlier ones left out, which counts as error.",
            "",
        ]


SECTIONS: dict[str, Callable[[Table, Book, Results], Iterator[str]]] = {
    "table": _beside_the_paper,
    "curves": _curves,
    "traffic": traffic.section,
    "differences": differences.section,
    "theory": theory,
}


def _row(row: Row, result: Result) -> list[str]:
    return [
        row.point["split"],
        f"`{row.spelled()}`",
        number(row.paper or result.row.paper),
        mean_std(result.best),
        str(len(result.records)),
        "" if result.difference is None else f"{result.difference:+.2f}",
        mean_std(result.last10),
        f"{result.mean('uplink_bytes_per_client_round'):,.0f}",
        f"{result.mean('bits_per_parameter'):.3f}",
        f"{result.mean('seconds'):.0f}{_at_once(result)}",
    ]


def _at_once(result: Result) -> str:
    """How many runs shared the machine, if any did."""
    jobs = [int(Machine.of(record).jobs) for record in result.records]
    return f" ({span(jobs)} at once)" if max(jobs) > 1 else ""
