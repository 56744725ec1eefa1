"""Which part of an axis a chart shows at first: what is near the best curves, as all of it would flatten them."""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

_FEW = 20  # rounds: shorter curves are shown from their beginning
_NEAR = 3  # times as far from the best as the median curve is still near

Curve = Sequence[float | None]


class Frame(NamedTuple):
    """A range, and the numbers of the curves that end below it."""

    low: float
    high: float
    below: list[int]


def accuracy_frame(curves: Sequence[Curve]) -> Frame | None:
    """The frame of accuracies in percent; None if everything should be shown."""
    return _frame([[value for value in curve if value is not None] for curve in curves], least=2.0)


def loss_frame(curves: Sequence[Curve]) -> Frame | None:
    """The frame of losses on a logarithmic axis: a low loss is good, so that `below` the frame is above it."""
    found = _frame([[-math.log10(value) for value in curve if value] for curve in curves], least=0.08)
    return found and Frame(10**-found.high, 10**-found.low, found.below)


def _frame(curves: Sequence[Sequence[float]], least: float) -> Frame | None:
    """The frame of curves of which the highest is best; differences below `least` are none."""
    halves = {number: curve[len(curve) // 2 :] for number, curve in enumerate(curves) if len(curve) >= _FEW}
    if not halves:
        return None
    levels = {number: median(half) for number, half in halves.items()}
    best = max(levels.values())
    reach = max(least, _NEAR * median(best - level for level in levels.values()))
    near = [number for number, level in levels.items() if best - level <= reach]
    lowest, high = min(levels[number] for number in near), max(max(halves[number]) for number in near)
    low = lowest - max(least, high - lowest)
    margin = 0.04 * (high - low)
    return Frame(low, high + margin, [number for number, level in levels.items() if level < low])
