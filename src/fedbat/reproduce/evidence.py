"""Claims and what they rest on: a section of RESULTS.md, and a page with every comparison made."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedbat.reproduce.claims import Finding, Group, judge_all
from fedbat.reproduce.markdown import anchor, table
from fedbat.reproduce.record import Records
from fedbat.reproduce.summary import CLAIMS
from fedbat.reproduce.tables import Book
from fedbat.reproduce.verdicts import EVIDENCE, HEADER, claim_row, evidence_rows, missing


def page_name(book: Book) -> str:
    """The file name of the page of evidence."""
    return f"CLAIMS{book.protocol.suffix}.md"


def section(findings: Sequence[Finding], files: str, page: str) -> Iterator[str]:
    """All claims with their verdicts; `page` is the path to that of the evidence."""
    if not findings:
        return
    yield from [
        f"## {CLAIMS}",
        "",
        "Each claim is judged by differences between runs of the same seed. Its exact form and the margins given to",
        f"vague words are in `{files}/claims.toml`, the rules in `experiments/README.md`, and every comparison on",
        f"[a page of its own]({page}). *Undecided* claims have been measured everywhere, but intervals are too wide;",
        "*waiting for records* are those some of whose cells have none. *The paper's numbers* is the verdict on what",
        "the paper prints. *For / against / open* counts comparisons (or cells, where all comparisons of one must",
        "agree) whose interval lies where the claim has it, elsewhere, or across the border; those not run yet are",
        "open. *Decided by* names the comparison that decides or, until then, the one to watch.",
        "",
    ]
    for group in Group:
        members = [finding for finding in findings if finding.claim.group == group]
        if members:
            yield from [f"### {CLAIMS} {group}", ""]
            yield from table(HEADER, (_linked(finding, page) for finding in members), HEADER)


def render_evidence(book: Book, records: Records, results_page: str) -> str:
    """The page of evidence; `results_page` is the path from it to RESULTS.md."""
    lines = [
        "# Evidence for the claims",
        "",
        "Written by `fedbat reproduce --write`; not to be edited. Verdicts are explained in",
        f"[{Path(results_page).name}]({results_page}). *Spread from* says where the standard deviation is from.",
        "",
    ]
    for finding in judge_all(book, records):
        if rows := evidence_rows(finding):
            lines += [f"## {finding.claim.id}", "", f"{finding.claim.text}: **{finding.verdict}**.", ""]
            lines += table(EVIDENCE, rows, EVIDENCE)
            lines += [f"Not run yet: {missing(finding)} more.", ""] if missing(finding) else []
    return "\n".join(lines)


def _linked(finding: Finding, page: str) -> list[str]:
    name, *rest = claim_row(finding)
    return [f"[{name}]({page}{anchor(name)})" if evidence_rows(finding) else name, *rest]
