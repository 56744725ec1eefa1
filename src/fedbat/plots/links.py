"""Runs on a link: accuracy against time, and what their rounds consist of."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from fedbat.link import Times, mean_times
from fedbat.plots.canvas import dashes, legend_below, log_ticks, new_figure, plot_accuracy, save
from fedbat.plots.styles import INK, RunStyle, run_styles, zoom

_PART_COLORS = {"latency": "#d5dbe1", "down": "#7fb0d8", "computing": "#9aa5b1", "up": "#173a5e", "server": "#e0b873"}


class LinkCurve(NamedTuple):
    """One run on a link, or the mean of several, round by round."""

    method: str
    accuracy: Sequence[float]
    times: Sequence[Times]
    note: str = ""  # added to its label

    def points(self) -> list[tuple[float, float]]:
        """Seconds since the start and accuracy in percent, of each round."""
        seconds = accumulate(times.total for times in self.times)
        return [(x, 100 * value) for x, value in zip(seconds, self.accuracy, strict=True)]

    def first_from(self, percent: float) -> tuple[float, float]:
        """The first point with at least this accuracy; the last point if there is none."""
        points = self.points()
        return next((point for point in points if point[1] >= percent), points[-1])


class LinkRow(NamedTuple):
    """Runs to show together, and the accuracy they are to reach."""

    title: str
    target: float
    curves: Mapping[str, LinkCurve]


def draw_link(rows: Sequence[LinkRow], title: str, path: Path) -> None:
    """Draw accuracy against time on a link (logarithmic), and what rounds consist of."""
    most = max(len(row.curves) for row in rows)
    figure, fields = new_figure(16, 0.5 + (1.9 + max(2.3, 0.3 * most)) * len(rows), len(rows), 2)
    for row, (left, right) in zip(rows, fields, strict=True):
        styles = run_styles({label: curve.method for label, curve in row.curves.items()})
        _race(left, row, styles)
        _bars(right, row, styles)
    figure.suptitle(title, color=INK, fontsize=11)
    handles, labels = fields[0][1].get_legend_handles_labels()
    legend_below(figure, list(zip(labels, handles, strict=True)), len(labels))
    save(figure, [path])


def _race(axes: Axes, row: LinkRow, styles: Mapping[str, RunStyle]) -> None:
    """Draw accuracy against time, from ten points below the target on; a circle marks where it is reached."""
    target, curves = 100 * row.target, row.curves.values()
    for label, curve in row.curves.items():
        plot_accuracy(axes, [x for x, _ in curve.points()], curve.accuracy, label + curve.note, styles[label])
        if (there := curve.first_from(target))[1] >= target:
            axes.plot(*there, "o", ms=9, mfc="none", color=styles[label].color)
    axes.axhline(target, color=INK, lw=0.8, ls=(0, (4, 4)), zorder=1)
    axes.set(xlabel="seconds on the link so far (log)", ylabel="test accuracy, %", xscale="log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.minorticks_off()
    low, high = zoom([100 * value for value in curve.accuracy] for curve in curves)
    low = max(0.0, min(low, target - 10))
    axes.set_ylim(low, max(high, target + 2))
    axes.set_xlim(left=0.9 * min(curve.first_from(low)[0] for curve in curves))
    log_ticks(axes.xaxis)
    axes.set_title(f"{row.title}; target {target:.2f} %", color=INK, fontsize=10, loc="left")


def _bars(axes: Axes, row: LinkRow, styles: Mapping[str, RunStyle]) -> None:
    """Draw a bar for each run: the parts of its mean round, one after the other. Its name has a piece of its curve."""
    rounds = {label + curve.note: mean_times(curve.times) for label, curve in row.curves.items()}
    ends = [0.0] * len(rounds)
    for part, color in _PART_COLORS.items():
        lengths = [getattr(times, part) for times in rounds.values()]
        axes.barh(list(rounds), lengths, left=ends, color=color, label=part, height=0.6)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for label, end in zip(rounds, ends, strict=True):
        axes.annotate(f"{end:.3g} s", (end, label), (4, 0), textcoords="offset points", va="center", fontsize=9)
    edge = 0.5 + max(0, 4 - len(rounds)) / 2  # few bars are not stretched
    axes.set_ylim(len(rounds) - 1 + edge, -edge)  # from top to bottom
    axes.set_xlim(0, 1.12 * max(ends))
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.set(xlabel="seconds of a mean round")
    axes.tick_params(axis="y", length=0, pad=48)  # points, for a piece of each curve
    points = ("axes points", "data")
    for place, label in enumerate(row.curves):
        line = {"arrowstyle": "-", "color": styles[label].color, "ls": dashes(styles[label]), "lw": 1.8}
        line |= {"shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (-6, place), (-44, place), xycoords=points, textcoords=points, arrowprops=line)
