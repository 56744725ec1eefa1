"""Findings in words, for RESULTS.md and the terminal."""

import math
from collections import Counter
from collections.abc import Sequence

from fedbat.reproduce.claims import Finding, Measured, Verdict
from fedbat.reproduce.estimates import LEVEL, Estimate

HEADER = ("id", "claim", "where", "verdict", "the paper's numbers", "for / against / open", "decided by", "cells")
EVIDENCE = ("cell", "compared", "found", f"{1 - LEVEL:.0%} interval", "seeds", "spread from", "says")
_SAYS = {True: "for", False: "against", None: "open"}


def claim_row(finding: Finding) -> list[str]:
    """A finding as a row under HEADER."""
    claim = finding.claim
    start = [claim.id, claim.text, claim.where, str(finding.verdict)]
    if claim.tests:
        return [*start, "", "", ", ".join(test.partition("::")[2] for test in claim.tests), ""]
    cells = f"{finding.present} of {finding.needed}"
    return [*start, str(finding.printed or ""), " / ".join(map(str, _tally(finding))), _deciding(finding), cells]


def claim_lines(finding: Finding) -> list[str]:
    """A finding for the terminal: its name and how far it is decided, the claim, what decides the verdict."""
    claim = finding.claim
    if claim.tests:
        return [claim.id, claim.text, f"checked by {', '.join(test.partition('::')[2] for test in claim.tests)}"]
    counts = ", ".join(f"{count} {says}" for says, count in zip(_SAYS.values(), _tally(finding), strict=True))
    head = f"{claim.id}: {counts}; {finding.present} of {finding.needed} cells run"
    deciding, label = _deciding(finding), "closest" if finding.verdict is Verdict.UNDECIDED else "decided by"
    return [head, claim.text, *([f"{label}: {deciding}"] if deciding else [])]


def evidence_rows(finding: Finding) -> list[list[str]]:
    """What has been measured for a finding, as rows under EVIDENCE."""
    return [_evidence(measured, measured.estimate) for measured in finding.measured if measured.estimate is not None]


def missing(finding: Finding) -> int:
    """The number of comparisons that wait for records."""
    return sum(measured.estimate is None for measured in finding.measured)


def count_verdicts(findings: Sequence[Finding]) -> str:
    """How many claims have which verdict."""
    counts = Counter(finding.verdict for finding in findings)
    return " / ".join(str(counts[verdict]) for verdict in Verdict)


def _tally(finding: Finding) -> list[int]:
    counts = Counter(measured.opinion for measured in finding.measured)
    return [counts[opinion] for opinion in _SAYS]


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
