"""Intervals of differences, and what follows from them for a claim about many.

A number has Student's interval at 95 %. Two or three seeds say little about their standard deviation, so it is pooled
with one measured elsewhere, if any (kinds.py says where), each weighted by its degrees of freedom; with one seed and no
expectation, the interval is the whole line. Where a single case decides - one that contradicts *every*, one that
proves *some* - it was picked out of many, so the level is divided by their number; where all must agree, that is not
needed. A mean over cases gets the mean of their standard errors, the largest it can have, as cases share runs.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

LEVEL = 0.05  # of error; intervals are shown at 1 - LEVEL


class Spread(NamedTuple):
    """A standard deviation between seeds, how well it is known, and where it comes from."""

    std: float
    freedom: float
    source: str
    measured: bool = True  # between seeds, even if elsewhere; not a bound that only stands in for it

    def reach(self, level: float) -> float:
        """Half the width of the interval of one value."""
        return _quantile(self.freedom, 1 - level / 2) * self.std


UNKNOWN = Spread(math.inf, 1, "unknown")


class Estimate(NamedTuple):
    """A mean over seeds with its uncertainty."""

    value: float
    spread: Spread
    seeds: int

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The interval that misses the true value with probability `level`."""
        half = self.spread.reach(level) / math.sqrt(self.seeds)
        return self.value - half, self.value + half


def own_spread(values: Sequence[float]) -> Spread | None:
    """The spread of a number measured on several seeds; None for a single one."""
    return Spread(statistics.stdev(values), len(values) - 1, "seeds") if len(values) > 1 else None


def joint_spread(own: Spread | None, expected: Sequence[Spread]) -> Spread:
    """With one seed, the widest expected spread; with several, their own pooled with those measured elsewhere."""
    if own is None:
        return max(expected, key=lambda spread: spread.reach(LEVEL), default=UNKNOWN)
    joined = [own, *(spread for spread in expected if spread.measured)]
    freedom = sum(spread.freedom for spread in joined)
    variance = sum(spread.freedom * spread.std**2 for spread in joined) / freedom  # as a moderated t-test has it
    return Spread(math.sqrt(variance), freedom, ", ".join(spread.source for spread in joined))


class Region(NamedTuple):
    """Where a claim says that a number lies, bounds included."""

    above: float = -math.inf
    below: float = math.inf

    def margin(self, low: float, high: float) -> float:
        """How far inside an interval lies; negative if it does not lie inside."""
        return min(low - self.above, self.below - high)


Opinion = Callable[[float], bool | None]  # at a level of error: yes, no, or None for undecided


def inside(estimate: Estimate | None, region: Region) -> Opinion:
    """Whether the interval lies inside, outside, or across the border; a missing one may lie anywhere."""

    def at(level: float) -> bool | None:
        if estimate is None:
            return None
        low, high = estimate.interval(level)
        slack = 1e-9  # differences of printed decimals
        if region.margin(low, high) >= -slack:
            return True
        return False if high < region.above - slack or low > region.below + slack else None

    return at


def all_of(opinions: Sequence[Opinion]) -> Opinion:
    """Yes if all say yes; no if one says no at its share of the level."""

    def at(level: float) -> bool | None:
        if any(opinion(level / len(opinions)) is False for opinion in opinions):
            return False
        return True if all(opinion(level) for opinion in opinions) else None

    return at


def one_of(opinions: Sequence[Opinion]) -> Opinion:
    """Yes if one says yes at its share of the level; no if all say no."""

    def at(level: float) -> bool | None:
        if any(opinion(level / len(opinions)) for opinion in opinions):
            return True
        return False if all(opinion(level) is False for opinion in opinions) else None

    return at


def most_of(opinions: Sequence[Opinion]) -> Opinion:
    """Yes if more than half say yes; no if half or more say no."""

    def at(level: float) -> bool | None:
        said = [opinion(level) for opinion in opinions]
        if 2 * said.count(True) > len(said):
            return True
        return False if 2 * said.count(False) >= len(said) else None

    return at


Estimates = Sequence[Sequence[Estimate | None]]  # by cell, each of its cases


def mean_of(estimates: Estimates) -> Estimate | None:
    """The mean over all cases; None as long as one is missing."""
    found = [estimate for cell in estimates for estimate in cell]
    known = [estimate for estimate in found if estimate is not None]
    if not known or len(known) < len(found):
        return None
    error = statistics.fmean(estimate.spread.std / math.sqrt(estimate.seeds) for estimate in known)
    freedom = min(estimate.spread.freedom for estimate in known)
    return Estimate(statistics.fmean(estimate.value for estimate in known), Spread(error, freedom, "mean"), 1)


def _opinions(estimates: Estimates, region: Region) -> list[Opinion]:
    return [inside(estimate, region) for cell in estimates for estimate in cell]


def _ranked(estimates: Estimates, region: Region) -> list[Estimate]:
    """The known estimates, from the furthest outside to the furthest inside."""
    known = [estimate for cell in estimates for estimate in cell if estimate is not None]
    return sorted(known, key=lambda estimate: region.margin(estimate.value, estimate.value))


class Quantifier(NamedTuple):
    """How the cases of a claim are taken together, and on which of them the verdict depends."""

    decide: Callable[[Estimates, Region], Opinion]
    deciding: Callable[[Estimates, Region], Estimate | None]


def _weakest(estimates: Estimates, region: Region) -> Estimate | None:
    return next(iter(_ranked(estimates, region)), None)


def _middle(estimates: Estimates, region: Region) -> Estimate | None:
    ranked = _ranked(estimates, region)
    return ranked[(len(ranked) - 1) // 2] if ranked else None


def _weakest_of_the_strongest_cell(estimates: Estimates, region: Region) -> Estimate | None:
    return next(iter(_ranked([[_weakest([cell], region)] for cell in estimates], region)[::-1]), None)


QUANTIFIERS = {
    "every": Quantifier(lambda estimates, region: all_of(_opinions(estimates, region)), _weakest),
    "most": Quantifier(lambda estimates, region: most_of(_opinions(estimates, region)), _middle),
    # Some cell in which all cases lie there: ahead of all baselines at once.
    "some": Quantifier(
        lambda estimates, region: one_of([all_of(_opinions([cell], region)) for cell in estimates]),
        _weakest_of_the_strongest_cell,
    ),
    # A single case, wherever it is.
    "any": Quantifier(
        lambda estimates, region: one_of(_opinions(estimates, region)),
        lambda estimates, region: next(iter(_ranked(estimates, region)[::-1]), None),
    ),
    "mean": Quantifier(
        lambda estimates, region: inside(mean_of(estimates), region), lambda estimates, region: mean_of(estimates)
    ),
}


@cache
def _quantile(freedom: float, probability: float) -> float:
    from scipy.special import stdtrit  # slow to import, and every command would wait for it

    return float(stdtrit(freedom, probability))
