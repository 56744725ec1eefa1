"""Curves of methods, with bands over seeds, in a panel for each split."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter

from fedbat.plots.canvas import bytes_axis, legend_below, log_ticks, new_row, save
from fedbat.plots.styles import INK, method_colors, zoom

NEAR = 10.0  # points: methods that end further below the best do not decide what is in sight
_FRONT = ("fedbat", "fedavg")  # drawn over the others


class Line(NamedTuple):
    """A curve in one panel, with a band around it where there are several runs."""

    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


class Panel(NamedTuple):
    """One panel of a row of them."""

    title: str
    lines: Mapping[str, Line]  # by method


def draw_panels(
    panels: Sequence[Panel], ylabel: str, paths: Iterable[Path], *, by_bytes: bool = False, log: bool = False
) -> None:
    """Draw panels side by side with one legend; x is the round, or the bytes sent up so far."""
    figure, fields = new_row(len(panels))
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    colors = method_colors(labels)
    for axes, panel in zip(fields, panels, strict=True):
        for label, line in panel.lines.items():
            front = label in _FRONT
            color, order = colors[label], 3 if front else 2
            axes.plot(line.x, line.y, label=label, lw=1.7 if front else 1.1, color=color, zorder=order)
            if line.band is not None:
                axes.fill_between(line.x, *line.band, alpha=0.2, lw=0, color=color, zorder=order)
        axes.set_title(panel.title, color=INK, fontsize=10)
        axes.set_xlabel("round")
        if by_bytes:
            bytes_axis(axes, "sent up by all clients so far")
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.minorticks_off()
        else:
            low, high = zoom(_near_the_top([line.y for line in panel.lines.values()]))
            axes.set_ylim(low, high)
            if by_bytes:  # from where the first curve comes into sight
                points = (point for line in panel.lines.values() for point in zip(line.x, line.y, strict=True))
                axes.set_xlim(left=0.5 * min(x for x, y in points if y >= low))
    if log:  # errors of one picture are to be compared
        lows, highs = zip(*(axes.get_ylim() for axes in fields), strict=True)
        for axes in fields:
            axes.set_ylim(min(lows), max(highs))
            log_ticks(axes.yaxis)
    fields[0].set_ylabel(ylabel)
    found = (axes.get_legend_handles_labels() for axes in fields)
    handles = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    columns = min(len(labels), int(figure.get_figwidth() / 1.6))
    legend_below(figure, [(label, handles[label]) for label in labels], columns)
    save(figure, paths, panels)


def _near_the_top(curves: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """The curves that come near the best one in the end: a range that has place for all would show nothing else."""
    ends = [median(curve[len(curve) // 2 :]) for curve in curves]
    return [curve for curve, end in zip(curves, ends, strict=True) if end >= max(ends) - NEAR]
