"""Measuring cases: a number for each seed with which all its runs were made, and the interval of their mean."""

from collections.abc import Mapping, Sequence

from fedbat.reproduce.estimates import Estimate, joint_spread, own_spread
from fedbat.reproduce.kinds import Case
from fedbat.reproduce.record import Record
from fedbat.reproduce.results import Results


def estimate(cases: Sequence[Sequence[Case]], results: Results) -> list[list[Estimate | None]]:
    """The estimates of cases, by cell; None where a run is missing."""
    return [[_estimate(case, paired_runs(case, results)) for case in cell] for cell in cases]


def paired_runs(case: Case, results: Results) -> dict[int, list[Record]]:
    """The records of all rows of a case, for the seeds that all rows have."""
    runs = [{} if (result := results.of(row)) is None else result.by_seed for row in case.rows]
    return {seed: [found[seed] for found in runs] for seed in runs[0] if all(seed in found for found in runs)}


def _estimate(case: Case, runs: Mapping[int, Sequence[Record]]) -> Estimate | None:
    if not runs:
        return None
    values, expected = [case.measure(records) for records in runs.values()], case.expected(next(iter(runs.values())))
    return Estimate(sum(values) / len(values), joint_spread(own_spread(values), expected), len(values))
