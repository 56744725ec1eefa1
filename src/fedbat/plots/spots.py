"""Runs as single spots: what they reach against what they send, for every downlink."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fedbat.downlink import DOWNLINKS
from fedbat.plots.canvas import bytes_axis, legend_below, log_ticks, new_row, save
from fedbat.plots.styles import INK, method_colors

_LEAST_SPAN = 2.0  # of y: two runs that differ by chance must not lie at the ends of the picture
_DOWN_SHAPES = dict(zip(DOWNLINKS, cycle("osD^vP")))


class Spot(NamedTuple):
    """A run as one spot: what it sends, what it reaches, and the downlink that its shape stands for."""

    x: float
    y: float
    down: str


class SpotPanel(NamedTuple):
    """One panel of a row of them."""

    title: str
    series: Mapping[str, Sequence[Spot]]  # by method


def draw_spots(panels: Sequence[SpotPanel], xlabel: str, ylabel: str, paths: Iterable[Path]) -> None:
    """Draw panels side by side: a color for each method, a shape for each downlink; x is bytes."""
    figure, fields = new_row(len(panels))
    spots = [(label, spot) for panel in panels for label, found in panel.series.items() for spot in found]
    colors = method_colors(dict.fromkeys(label for label, _ in spots))
    shapes = {down: shape for down, shape in _DOWN_SHAPES.items() if any(spot.down == down for _, spot in spots)}
    for axes, panel in zip(fields, panels, strict=True):
        for label, found in panel.series.items():
            for spot in found:
                axes.plot(spot.x, spot.y, shapes[spot.down], ms=8, color=colors[label], mec="white", mew=0.7, alpha=0.9)
        axes.set_title(panel.title, color=INK, fontsize=10)
        bytes_axis(axes, xlabel)
        axes.margins(0.08)
        _see_at_least(axes, _LEAST_SPAN)
        log_ticks(axes.xaxis)
    fields[0].set_ylabel(ylabel)
    rows = (
        {label: Line2D([], [], color=color, lw=4) for label, color in colors.items()},
        {f"down {down}": Line2D([], [], ls="", marker=shape, ms=8, color=INK) for down, shape in shapes.items()},
    )
    blank = ("", Line2D([], [], ls=""))
    columns = list(zip_longest(*(row.items() for row in rows), fillvalue=blank))  # filled from the top
    legend_below(figure, [pair for column in columns for pair in column], len(columns))
    save(figure, paths, panels)


def _see_at_least(axes: Axes, span: float) -> None:
    """Widen the range of y to both sides until it is at least this wide."""
    low, high = axes.get_ylim()
    more = max(0.0, span - (high - low)) / 2
    axes.set_ylim(low - more, high + more)
