"""RESULTS.md from the records: the paper's numbers, ours, and how they differ. Nothing in it is typed by hand."""

import itertools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path

from fedbat.reproduce import differences, traffic
from fedbat.reproduce.claims import Finding, Verdict, judge_all
from fedbat.reproduce.figures import WINDOW, pictures
from fedbat.reproduce.markdown import mean_std, number, padded, share, table
from fedbat.reproduce.pace import Machine
from fedbat.reproduce.record import Records
from fedbat.reproduce.results import WITHIN, Result, Results, duel, orderings
from fedbat.reproduce.tables import Book, Protocol, Row, Table, matches
from fedbat.reproduce.theory import section as theory
from fedbat.reproduce.verdicts import EVIDENCE, HEADER, claim_row, count_verdicts, evidence_rows, missing

AGAINST = ("fedavg", "signsgd", "ef-signsgd", "noisy-signsgd", "stoc-signsgd", "zerofl", "bifl")
_OPEN, _CLAIMS = "To be looked into", "Claims of the paper"
_OF_THE_PAPER = ("paper", "difference")
_COLUMNS = ("split", "method", "paper", "ours", "n", "difference", "last ten", "bytes up", "bit/param", "seconds")
_WORDS = ("split", "method")


def render(book: Book, records: Records, figures: Path, folder: str = "results") -> str:
    """The whole page; `figures` is the path from the page to the pictures, `folder` names that of the records."""
    files = book.folder.resolve().name
    results, findings = Results(book, records), judge_all(book, records)
    known = [note.only for note in book.notes]
    open_ = [r for r in results.deviating() if not any(matches(r.row.point, only) for only in known)]
    return "\n".join(
        [
            "# Results",
            "",
            f"Written by `fedbat reproduce --write` from the records in `{folder}/`; not to be edited.",
            *([f"Protocol: {book.protocol.title} (`{files}/protocols.toml`)."] if book.protocol.partition else []),
            "",
            *_summary(results, findings, len(open_)),
            *_reached(book, results),
            *_how_to_read(book),
            *itertools.chain.from_iterable(_section(found, book, results, figures) for found in _in_order(book)),
            *(_to_be_looked_into(open_, files) if _has_paper(book) else []),
            *_claims(findings, files),
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


def _how_to_read(book: Book) -> list[str]:
    beside_the_paper = [
        "Accuracies are test accuracies in percent. *paper* is what the paper prints (mean of five runs), *ours*",
        "the mean of *n* seeds with its standard deviation; both take the best round, as the authors' code does.",
    ]
    alone = [
        "Accuracies are test accuracies in percent. *ours* is that of the best round, the mean of *n* seeds with its",
        "standard deviation.",
    ]
    return [
        "## How to read the tables",
        "",
        *(beside_the_paper if _has_paper(book) else alone),
        "*last ten* is the mean over the last ten rounds. *bytes up* is what one client really sends in a round,",
        "packed, BatchNorm and header included; *seconds* is one whole run; runs made side by side each take longer.",
        "A row without figures has not been run yet; a table of which nothing has been run is only named.",
        "All seeds share one split of the data among clients (`partition_seed`, by default that of the authors' code):",
        "standard deviations and intervals say nothing about other splits.",
        *_meant(book.protocol),
        "",
        *(line for name, words in book.data.items() for line in (f"The data set *{name}* here is {words}.", "")),
    ]


def _meant(protocol: Protocol) -> Iterator[str]:
    """What the tables' names of splits and methods stand for on the command line."""
    splits = [f"*{name}* is `--partition {split}`" for name, split in protocol.partition.items() if name != split]
    methods = [
        f"`{method}` is `{method} {' '.join(f'{key}={value}' for key, value in settings.items())}`"
        for method, settings in protocol.settings.items()
    ]
    if splits or methods:
        yield from textwrap.wrap(f"In the tables {'; '.join([*splits, *methods])}.", 105, break_on_hyphens=False)


def _summary(results: Results, findings: Sequence[Finding], num_open: int) -> Iterator[str]:
    compared, columns = results.compared(), results.columns()
    usual = [{name: result for name, result in column.items() if " " not in name} for column in columns]
    yield from ["## Summary", ""]
    rows = [
        ["cells run, of all", share(len(results.found), results.num_rows)],
        ["runs (one for each seed)", str(len(results.records))],
    ]
    if compared:
        num_close = len(results.close())
        far = f"of these, pairs that the paper puts more than {WITHIN:g} point apart"
        rows += [
            [f"cells within {WITHIN:g} point of the paper, of those it has", share(num_close, len(compared))],
            [f"cells that deviate and are still [{_OPEN.lower()}]({_anchor(_OPEN)})", str(num_open)],
            ["pairs of methods, all settings at their defaults, ordered as in the paper", share(*orderings(usual))],
            [far, share(*orderings(usual, WITHIN))],
            ["pairs ordered as in the paper, variants such as `rho=4` included", share(*orderings(columns))],
        ]
    if findings:
        told = f"[claims]({_anchor(_CLAIMS)}) that hold / fail / are undecided / are left to tests"
        rows.append([told, count_verdicts(findings)])
    yield from table(("", "count"), rows, [""])
    met = [(other, found) for other in AGAINST if (found := duel(columns, "fedbat", other))]
    header = ("FedBAT against", "columns", "ahead", "ahead in the paper", "points", "points in the paper")
    duels = [
        [other, *map(str, found[:3]), f"{found.difference:+.2f}", f"{found.difference_in_paper:+.2f}"]
        for other, found in met
    ]
    if duels:
        yield from [
            "Best rounds of runs with the same seed, over all columns (data set, clients, split) in which both methods",
            "were run:",
            "",
        ]
        yield from table(header, duels, header[:1])
    if failed := [finding.claim.text for finding in findings if finding.verdict == Verdict.FAILS]:
        yield from ["Claims that fail by these records:", "", *(f"- {text}." for text in failed), ""]
    machines = Counter(Machine.of(record) for record in results.records)
    where = [[*machine, str(count)] for machine, count in sorted(machines.items())]
    yield from table(("machine", "precision", "runs at once", "runs"), where, ["machine"])


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return "#" + title.lower().replace(" ", "-")


def _to_be_looked_into(open_: Sequence[Result], files: str) -> Iterator[str]:
    yield from [
        f"## {_OPEN}",
        "",
        f"Cells that differ from the paper by more than {WITHIN:g} point and by more than twice its printed standard",
        f"deviation, for which `{files}/notes.toml` has no note yet.",
        "",
    ]
    words = ("data set", "clients", "split", "method")
    rows = [
        [
            *(result.row.point[key] for key in ("dataset", "clients", "split")),
            f"`{result.row.name()}`",
            number(result.row.paper),
            mean_std(result.best),
            str(len(result.records)),
            f"{result.difference:+.2f}",
        ]
        for result in open_
    ]
    header = (*words, "paper", "ours", "n", "difference")
    yield from table(header, rows, words) if rows else ["None.", ""]


def _claims(findings: Sequence[Finding], files: str) -> Iterator[str]:
    if not findings:
        return
    yield from [
        f"## {_CLAIMS}",
        "",
        "Each sentence that records can check, judged by differences between runs of the same seed. Its exact form and",
        f"the margins given to vague words are in `{files}/claims.toml`, the rules in `experiments/README.md`. *the",
        "paper's numbers* is the verdict on what the paper prints. *for / against / open* counts comparisons whose",
        "interval lies where the claim has it, elsewhere, or across the border; those not run yet are open. *decided",
        "by* names the comparison that decides or, for undecided claims, the one to watch. *spread from* says where",
        "the standard deviation is from.",
        "",
    ]
    yield from table(HEADER, map(claim_row, findings), HEADER)
    for finding in findings:
        if rows := evidence_rows(finding):
            yield from [f"<details><summary>Evidence: {finding.claim.id}</summary>", ""]
            yield from table(EVIDENCE, rows, EVIDENCE)
            if missing(finding):
                yield from [f"Not run yet: {missing(finding)} more.", ""]
            yield from ["</details>", ""]


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
        shown = [_row(row, results.of(row)) for row in rows]
        columns = zip(_COLUMNS, zip(*shown, strict=True), strict=True)
        beside = [name not in _OF_THE_PAPER or any(cells) for name, cells in columns]
        header, *lines = (list(compress(each, beside)) for each in (_COLUMNS, *shown))
        yield from table(header, lines, _WORDS)
        for note in book.notes:
            about = [row for row in rows if results.of(row) and matches(row.point, note.only)]
            if about:
                where = "; ".join(dict.fromkeys(f"{row.name()}, {row.point['split']}" for row in about))
                yield from [f"*{where}*: {note.text}", ""]


def _curves(found: Table, book: Book, results: Results) -> Iterator[str]:
    if results.groups(found):
        yield from [
            "A curve is the mean over seeds; where there are several, a band reaches from the lowest to the highest.",
            f"Accuracies are means over a round and the {WINDOW - 1} before it, as they jump where clients hold few",
            "labels; faint lines are the single rounds. Errors are ||sent − m|| / ||m||, mean over clients and over",
            "layers weighted by their parameters, as in the claims; EF-SignSGD's message carries what earlier ones",
            "left out, which counts as error.",
            "",
        ]


SECTIONS: dict[str, Callable[[Table, Book, Results], Iterator[str]]] = {
    "table": _beside_the_paper,
    "curves": _curves,
    "traffic": traffic.section,
    "differences": differences.section,
    "theory": theory.section,
}


def _row(row: Row, result: Result | None) -> list[str]:
    start = [row.point["split"], f"`{row.name()}`"]
    if result is None:
        return padded([*start, number(row.paper)], _COLUMNS)
    return [
        *start,
        number(row.paper or result.row.paper),
        mean_std(result.best),
        str(len(result.records)),
        "" if result.difference is None else f"{result.difference:+.2f}",
        mean_std(result.last10),
        f"{result.mean('uplink_bytes_per_client_round'):,.0f}",
        f"{result.mean('bits_per_parameter'):.3f}",
        f"{result.mean('seconds'):.0f}",
    ]
