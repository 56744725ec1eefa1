"""Cases measured: a number for each seed with which all their runs were made, and the interval of its mean."""

from collections.abc import Mapping, Sequence

from fedbat.reproduce.estimates import UNKNOWN, Estimate, Spread, own_spread, pooled_spread
from fedbat.reproduce.kinds import Case
from fedbat.reproduce.record import Record
from fedbat.reproduce.results import Results


def estimate(cases: Sequence[Sequence[Case]], results: Results) -> list[list[Estimate | None]]:
    """Of like cases, by cell; None where a run is missing. Those of several seeds lend their spread to the others."""
    values = [[_by_seed(case, results) for case in cell] for cell in cases]
    pooled = pooled_spread([spread for cell in values for found in cell if (spread := own_spread([*found.values()]))])
    return [
        [_estimate(case, found, results, pooled) for case, found in zip(*cell, strict=True)]
        for cell in zip(cases, values, strict=True)
    ]


def paired_runs(case: Case, results: Results) -> dict[int, list[Record]]:
    """The records of all rows of a case, by seed."""
    runs = [{} if (result := results.of(row)) is None else result.by_seed for row in case.rows]
    return {seed: [found[seed] for found in runs] for seed in runs[0] if all(seed in found for found in runs)}


def _by_seed(case: Case, results: Results) -> dict[int, float]:
    return {seed: case.measure(records) for seed, records in paired_runs(case, results).items()}


def _estimate(case: Case, values: Mapping[int, float], results: Results, pooled: Spread | None) -> Estimate | None:
    if not values:
        return None
    spread = own_spread([*values.values()])
    if spread is None:
        (records,) = paired_runs(case, results).values()
        spread = case.stand_in(records) or pooled or UNKNOWN
    return Estimate(sum(values.values()) / len(values), spread, len(values))
