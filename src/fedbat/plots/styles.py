"""Colors, dashes and ranges that are the same in every picture and on the page of a report."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, cycle, product
from statistics import median
from typing import NamedTuple

INK, PALE = "#1f2933", "#d5dbe1"
# Okabe and Ito's colors: distinguishable with any kind of color vision.
_METHOD_COLORS = {
    "fedavg": "#000000",
    "fedbat": "#d55e00",
    "ef-signsgd": "#0072b2",
    "signsgd": "#56b4e9",
    "noisy-signsgd": "#009e73",
    "stoc-signsgd": "#cc79a7",
    "zerofl": "#e69f00",
    "zerofl train_sparsity=0": "#e69f00",  # as the authors of FedBAT ran it
    # More bits and rivals, which are not in the paper: shades of FedBAT's color, and two of Tol's colors.
    "fedbat bits=2": "#f4a261",
    "fedbat bits=4": "#7f2704",
    "eden bits=1": "#332288",
    "fedmrn": "#117733",
}
_OTHER_COLORS = ("#8c6d31", "#7b4173", "#637939", "#843c39", "#808080")
_STROKES, _GAP = (2, 7, 14), 3


class RunStyle(NamedTuple):
    """How a run's curve looks."""

    color: str
    dash: tuple[int, ...]  # lengths drawn and left out in turn; solid if empty


def method_colors(labels: Iterable[str]) -> dict[str, str]:
    """Each method's own color, wherever it appears; other labels take the next free one."""
    labels = list(labels)
    others = [label for label in labels if label not in _METHOD_COLORS]
    spare = dict(zip(others, cycle(_OTHER_COLORS), strict=False))
    return {label: _METHOD_COLORS.get(label) or spare[label] for label in labels}


def run_styles(methods: Mapping[str, str], colors: Mapping[str, str] | None = None) -> dict[str, RunStyle]:
    """Styles by label, for runs given with their methods: colors tell methods apart, dashes runs of the same color.

    No two look alike; the plainest variant is solid.
    """
    colors = colors or method_colors(dict.fromkeys(methods.values()))
    free: defaultdict[str, Iterator[tuple[int, ...]]] = defaultdict(_dashes)
    styles = {}
    for label in sorted(methods, key=lambda label: (label.count(" "), label)):
        color = colors[methods[label]]
        styles[label] = RunStyle(color, next(free[color]))
    return styles


def _dashes() -> Iterator[tuple[int, ...]]:
    """Solid, then every rhythm of strokes, short ones first; none is another one shifted or repeated, so all differ."""
    yield ()
    for size in count(1):
        for rhythm in product(_STROKES, repeat=size):
            if all(rhythm < rhythm[turn:] + rhythm[:turn] for turn in range(1, size)):
                yield tuple(length for stroke in rhythm for length in (stroke, _GAP))


def zoom(curves: Iterable[Sequence[float]]) -> tuple[float, float]:
    """Limits of y that show every method's second half, and the best one's from a fifth of its rounds on.

    The start and single spikes tell little.
    """
    curves = list(curves)
    halves = [curve[len(curve) // 2 :] for curve in curves]
    low, high = min(map(median, halves)), max(map(max, halves))
    margin = max(high - low, 2.0)
    return min(low - margin, max(curve[len(curve) // 5] for curve in curves)), high + 0.1 * margin
