"""RESULTS.md from the records: the paper's numbers, ours, and what separates them. Nothing in it is typed by hand."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedbat.reproduce.claims import Finding, judge_all
from fedbat.reproduce.figures import KINDS, groups, picture_name
from fedbat.reproduce.pace import Machine
from fedbat.reproduce.record import Records
from fedbat.reproduce.results import WITHIN, Result, Results, Spread, duel, orderings
from fedbat.reproduce.tables import Book, Number, Row, Table, matches
from fedbat.reproduce.verdicts import EVIDENCE, HEADER, claim_row, count_verdicts, evidence_rows, missing

AGAINST = ("fedavg", "signsgd", "ef-signsgd", "noisy-signsgd", "stoc-signsgd", "zerofl")
_COLUMNS = ("split", "method", "paper", "ours", "n", "difference", "last ten", "bytes up", "bit/param", "seconds")
_LEFT = ("split", "method", "FedBAT against", "data set", "machine", "", *HEADER, *EVIDENCE)


def render(book: Book, records: Records, figures: Path) -> str:
    """The whole page; `figures` is where the pictures lie, seen from the page."""
    results, findings = Results(book, records), judge_all(book, records)
    return "\n".join(
        [
            "# Results",
            "",
            "Written by `fedbat reproduce --write` from the records in `results/`; not to be edited. Accuracies are",
            "test accuracies in percent. *paper* is what the paper prints (mean of five runs), *ours* the mean of *n*",
            "seeds with its standard deviation; both take the best round, as the authors' code does. *last ten* is the",
            "mean over the last ten rounds. *bytes up* is what one client really sends in a round, packed, BatchNorm",
            "and header included; *seconds* is one whole run. A row without figures has not been run yet.",
            f"Protocol: {book.protocol.title} (`experiments/protocols.toml`).",
            "",
            *_summary(results, records, findings),
            *_claims(findings),
            *itertools.chain.from_iterable(_section(table, book, results, figures) for table in book.tables.values()),
        ]
    )


def _summary(results: Results, records: Records, findings: Sequence[Finding]) -> Iterator[str]:
    compared, columns = results.compared(), results.columns()
    close = sum(abs(result.difference or 0) <= WITHIN for result in compared)
    yield from ["## Summary", ""]
    rows = [
        ["cells run, of all", _share(len(results.found), results.num_rows)],
        ["runs (one for each seed)", str(sum(len(result.records) for result in results.found.values()))],
        [f"cells within {WITHIN:g} point of the paper, of those it has", _share(close, len(compared))],
        ["pairs of methods ordered as in the paper", _share(*orderings(columns))],
        [f"those the paper puts more than {WITHIN:g} point apart", _share(*orderings(columns, WITHIN))],
        ["claims that hold / fail / are undecided / are left to tests", count_verdicts(findings)],
    ]
    yield from _table(("", "count"), rows)
    met = [(other, found) for other in AGAINST if (found := duel(columns, "fedbat", other))]
    header = ("FedBAT against", "columns", "ahead", "ahead in the paper", "points", "points in the paper")
    duels = [
        [other, *map(str, found[:3]), f"{found.difference:+.2f}", f"{found.difference_in_paper:+.2f}"]
        for other, found in met
    ]
    yield from _table(header, duels)
    machines = Counter(Machine.of(record) for record in records)
    where = [[*machine, str(count)] for machine, count in sorted(machines.items())]
    yield from _table(("machine", "precision", "runs at once", "runs"), where)


def _claims(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        return
    yield from [
        "## Claims of the paper",
        "",
        "Each sentence that records can check, judged by differences between runs of the same seed. Its exact form and",
        "the margins given to vague words are in `experiments/claims.toml`, the rules in `experiments/README.md`. *the",
        "paper's numbers* is the verdict on what the paper prints. *for / against / open* counts comparisons whose",
        "interval lies where the claim has it, elsewhere, or across the border; those not run yet are open. *hangs on*",
        "is the one that decides. With one seed, *spread from* says what stands in for the standard deviation.",
        "",
    ]
    yield from _table(HEADER, map(claim_row, findings))
    for finding in findings:
        if rows := evidence_rows(finding):
            yield from [f"<details><summary>Evidence: {finding.claim.id}</summary>", ""]
            yield from _table(EVIDENCE, rows)
            if missing(finding):
                yield from [f"Not run yet: {missing(finding)} more.", ""]
            yield from ["</details>", ""]


def _section(table: Table, book: Book, results: Results, figures: Path) -> Iterator[str]:
    yield from [f"## {table.title}", ""]
    for (dataset, clients), rows in groups(table):
        found = {id(row): results.of(row) for row in rows}
        if table.curves:
            if any(found.values()):
                for kind in KINDS:
                    path = figures / f"{picture_name(dataset, clients, kind)}.png"
                    yield from [f"![{dataset}, {clients} clients: {KINDS[kind].title}]({path.as_posix()})", ""]
            continue
        yield from [f"### {dataset}, {clients} clients", ""]
        yield from _table(_COLUMNS, [_row(row, found[id(row)]) for row in rows])
        for note in book.notes:
            about = [row for row in rows if found[id(row)] and matches(row.point, note.only)]
            if about:
                where = "; ".join(dict.fromkeys(f"{row.point['method']}, {row.point['split']}" for row in about))
                yield from [f"*{where}*: {note.text}", ""]


def _row(row: Row, result: Result | None) -> list[str]:
    start = [row.point["split"], f"`{row.point['method']}`", _number(row.paper)]
    if result is None:
        return start + [""] * (len(_COLUMNS) - len(start))
    return [
        *start,
        _spread(result.best),
        str(len(result.records)),
        "" if result.difference is None else f"{result.difference:+.2f}",
        _spread(result.last10),
        f"{result.mean('uplink_bytes_per_client_round'):,.0f}",
        f"{result.mean('bits_per_parameter'):.3f}",
        f"{result.mean('seconds'):.0f}",
    ]


def _number(number: Number | None) -> str:
    if number is None:
        return ""
    return f"{number.accuracy:.1f}" + ("" if number.std is None else f" ± {number.std:.1f}")


def _spread(spread: Spread) -> str:
    return f"{spread.mean:.2f}" + ("" if spread.std is None else f" ± {spread.std:.2f}")


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join('---' if name in _LEFT else '---:' for name in header)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""
