"""How a quantity falls with time, and its bound: both axes logarithmic."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.lines import Line2D

from fedbat.plots.canvas import legend_below, new_figure, save
from fedbat.plots.panels import Line
from fedbat.plots.styles import INK

_COLORS = (
    *("#d55e00", "#000000", "#e69f00", "#0072b2", "#cc79a7", "#56b4e9"),
    *("#8c6d31", "#7b4173", "#637939", "#843c39"),
)
_DASHED = (0, (5, 3))


class RatePanel(NamedTuple):
    """One panel of a row of them."""

    title: str
    xlabel: str
    ylabel: str
    lines: Mapping[str, Line]
    bounds: Mapping[str, Sequence[float]]  # at the lines' x


def draw_rates(panels: Sequence[RatePanel], paths: Iterable[Path]) -> None:
    """Draw panels side by side: dots and solid lines are measured, dashed lines are their bounds."""
    figure, (fields,) = new_figure(1.2 + 5.2 * len(panels), 4.2, 1, len(panels))
    colors = dict(zip(dict.fromkeys(label for panel in panels for label in panel.lines), _COLORS, strict=False))
    for axes, panel in zip(fields, panels, strict=True):
        for label, line in panel.lines.items():
            axes.plot(line.x, line.y, color=colors[label], lw=1.5, marker="o", ms=4 if len(line.x) < 10 else 0)
            axes.plot(line.x, panel.bounds[label], color=colors[label], lw=1.2, ls=_DASHED)
            if line.band is not None:
                axes.fill_between(line.x, *line.band, alpha=0.2, lw=0, color=colors[label])
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xscale="log", yscale="log")
        axes.set_title(panel.title, color=INK, fontsize=10)
    handles = [(label, Line2D([], [], color=color, lw=1.5)) for label, color in colors.items()]
    bound = ("its bound", Line2D([], [], color=INK, lw=1.2, ls=_DASHED))
    legend_below(figure, [*handles, bound], (len(handles) + 2) // 2)
    save(figure, paths, panels)
