"""On which side of the paper's numbers a method lies: what a rule for single cells cannot see."""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from fedbat.reproduce.estimates import LEVEL
from fedbat.reproduce.results import ROUNDING, Result


class Side(NamedTuple):
    """A method at its usual settings: its results in all columns (data set, clients, split)."""

    method: str
    results: tuple[Result, ...]

    @property
    def differences(self) -> list[float]:
        """Ours minus the paper's, in points."""
        return [result.difference or 0.0 for result in self.results]

    @property
    def mean(self) -> float:
        """The mean of these."""
        return statistics.fmean(self.differences)

    @property
    def above(self) -> int:
        """The number of columns in which ours is above the paper's."""
        return sum(difference > ROUNDING for difference in self.differences)

    @property
    def below(self) -> int:
        """The number of columns in which it is below."""
        return sum(difference < -ROUNDING for difference in self.differences)

    @property
    def chance(self) -> float:
        """How often as many or more would lie on one side if both sides were as likely: the two-sided sign test."""
        tosses, most = self.above + self.below, max(self.above, self.below)
        as_rare = sum(math.comb(tosses, heads) for heads in range(most, tosses + 1))
        return float(min(1.0, 2 * as_rare / 2**tosses))

    @property
    def one_sided(self) -> bool:
        """Whether that is too rare to be chance."""
        return self.chance <= LEVEL


def sides(columns: Iterable[dict[str, Result]]) -> list[Side]:
    """The sides of all methods at their usual settings, in the order in which columns have them."""
    found: dict[str, list[Result]] = {}
    for column in columns:
        for name, result in column.items():
            if " " not in name:
                found.setdefault(result.row.spelled(), []).append(result)
    return [Side(method, tuple(results)) for method, results in found.items()]
