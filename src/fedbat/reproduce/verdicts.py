"""Findings in words, for RESULTS.md, its page of evidence, and the terminal."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from fedbat.reproduce.claims import Finding, Group, Measured, Verdict
from fedbat.reproduce.estimates import LEVEL, Estimate

HEADER = ("id", "claim", "where", "verdict", "the paper's numbers", "for / against / open", "decided by", "cells")
EVIDENCE = ("cell", "compared", "found", f"{1 - LEVEL:.0%} interval", "seeds", "spread from", "says")
_SAYS = {True: "for", False: "against", None: "open"}
_OF_ALL = ("every", "most")  # quantifiers with which a single case against a claim counts


def claim_row(finding: Finding) -> list[str]:
    """A finding as a row under HEADER."""
    claim = finding.claim
    start = [claim.id, claim.text, claim.where, str(finding.verdict)]
    if not finding.measured:
        return [*start, "", "", _instead(finding), ""]
    cells = f"{finding.present} of {finding.needed}"
    return [*start, str(finding.printed or ""), " / ".join(map(str, _tally(finding))), _deciding(finding), cells]


def claim_lines(finding: Finding) -> list[str]:
    """A finding for the terminal: its name and how far it is decided, the claim, what decides the verdict."""
    claim = finding.claim
    if not finding.measured:
        return [claim.id, claim.text, _instead(finding)]
    counts = ", ".join(f"{count} {says}" for says, count in zip(_SAYS.values(), _tally(finding), strict=True))
    head = f"{claim.id}: {counts}; {finding.present} of {finding.needed} cells run"
    decided = finding.verdict in (Verdict.HOLDS, Verdict.FAILS)
    deciding, label = _deciding(finding), "decided by" if decided else "closest"
    return [head, claim.text, *([f"{label}: {deciding}"] if deciding else [])]


def evidence_rows(finding: Finding) -> list[list[str]]:
    """What has been measured for a finding, as rows under EVIDENCE."""
    return [_evidence(measured, measured.estimate) for measured in finding.measured if measured.estimate is not None]


def missing(finding: Finding) -> int:
    """The number of comparisons that wait for records."""
    return sum(measured.estimate is None for measured in finding.measured)


def verdict_counts(findings: Sequence[Finding]) -> Iterator[list[str]]:
    """How many claims have which verdict, a row for each group."""
    for group in Group:
        counts = Counter(finding.verdict for finding in findings if finding.claim.group == group)
        if counts:
            yield [str(group), *(str(counts[verdict] or "") for verdict in Verdict)]


def contradicted(findings: Sequence[Finding]) -> Iterator[str]:
    """The claims that fail and those that may yet fail, with the numbers that speak against them, as sentences."""
    for finding in sorted(findings, key=lambda finding: finding.verdict != Verdict.FAILS):
        against = [m for m in finding.measured if m.opinion is False]
        open_ = finding.verdict in (Verdict.UNDECIDED, Verdict.WAITING) and finding.claim.quantifier in _OF_ALL
        if finding.verdict == Verdict.FAILS:
            yield f"**{finding.claim.id}** fails: {finding.claim.text}. Found: {_range(finding.measured)}."
        elif against and open_:
            run = len(finding.measured) - missing(finding)
            yield (
                f"{finding.claim.id} ({finding.verdict}): {finding.claim.text}. Against it: {len(against)} of {run} "
                f"comparisons, with {_range(against)}."
            )


def _instead(finding: Finding) -> str:
    """What there is in place of a measurement."""
    tests = ", ".join(test.partition("::")[2] for test in finding.claim.tests)
    return finding.claim.unchecked or f"checked by {tests}"


def _range(found: Sequence[Measured]) -> str:
    values, style = [m.estimate.value for m in found if m.estimate is not None], found[0].case.style
    low, high = f"{min(values):{style}}", f"{max(values):{style}}"
    return low if low == high else f"{low} to {high}"


def _tally(finding: Finding) -> list[int]:
    """For, against and open: the comparisons or, where all of one cell must agree, the cells."""
    cells: dict[str, list[bool | None]] = {}
    for place, measured in enumerate(finding.measured):
        together = measured.case.cell if finding.claim.quantifier == "some" else str(place)
        cells.setdefault(together, []).append(measured.opinion)
    said = [False if False in opinions else (None if None in opinions else True) for opinions in cells.values()]
    return [said.count(opinion) for opinion in _SAYS]


def _deciding(finding: Finding) -> str:
    """The comparison on which the verdict depends, or the mean of all."""
    estimate = finding.deciding
    if estimate is None:
        return ""
    style = finding.measured[0].case.style
    about = "mean"
    for measured in finding.measured:
        if measured.estimate is estimate:
            about = f"{measured.case.what}, {measured.case.cell}"
    return f"{estimate.value:{style}} {show_interval(estimate, style)} {about}"


def _evidence(measured: Measured, estimate: Estimate) -> list[str]:
    case = measured.case
    return [
        case.cell,
        case.what,
        f"{estimate.value:{case.style}}",
        show_interval(estimate, case.style),
        str(estimate.seeds),
        estimate.spread.source,
        _SAYS[measured.opinion],
    ]


def show_interval(estimate: Estimate, style: str) -> str:
    """An estimate's interval, at the level that is shown everywhere."""
    low, high = estimate.interval()
    return f"[{low:{style}}, {high:{style}}]" if math.isfinite(high - low) else "[unknown]"
