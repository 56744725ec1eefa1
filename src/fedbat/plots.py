"""Pictures of runs. The same records always give the same bytes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, cycle, zip_longest
from pathlib import Path
from statistics import median
from typing import NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from fedbat.downlink import DOWNLINKS
from fedbat.link import Times, mean_times
from fedbat.view import megabytes

_INK, _PALE = "#1f2933", "#d5dbe1"
# Okabe and Ito's colours: distinguishable with any kind of colour vision.
_METHOD_COLORS = {
    "fedavg": "#000000",
    "fedbat": "#d55e00",
    "ef-signsgd": "#0072b2",
    "signsgd": "#56b4e9",
    "noisy-signsgd": "#009e73",
    "stoc-signsgd": "#cc79a7",
    "zerofl": "#e69f00",
    # More bits and rivals, which the paper lacks: shades of FedBAT's own, and two of Tol's.
    "fedbat bits=2": "#f4a261",
    "fedbat bits=4": "#7f2704",
    "eden bits=1": "#332288",
    "fedmrn": "#117733",
}
_OTHER_COLORS = ("#8c6d31", "#7b4173", "#637939", "#843c39")
_PART_COLORS = {"latency": "#d5dbe1", "down": "#7fb0d8", "computing": "#9aa5b1", "up": "#173a5e", "server": "#e0b873"}
_RATE_COLORS = ("#d55e00", "#000000", "#e69f00", "#0072b2", "#cc79a7", "#56b4e9", *_OTHER_COLORS)
_FRONT = ("fedbat", "fedavg")  # drawn over the others
_DOWN_SHAPES = dict(zip(DOWNLINKS, ("o", "s", "D", "^", "v", "P"), strict=True))
# A method keeps its colour; its variants differ by these: lengths drawn and left out, the first being solid.
_DASHES: tuple[tuple[int, ...], ...] = (
    *((), (2, 3), (7, 3), (7, 3, 2, 3), (14, 3), (14, 3, 2, 3)),
    *((2, 8), (14, 3, 7, 3), (7, 3, 2, 3, 2, 3)),
)


class Curve(NamedTuple):
    """One run, round by round."""

    method: str
    accuracy: Sequence[float]
    uplink_bytes: Sequence[int]  # of each round
    downlink_bytes: Sequence[int]


class Line(NamedTuple):
    """A curve in one panel, with a band around it where there are several runs."""

    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


class Panel(NamedTuple):
    """One field of a row of them."""

    title: str
    lines: Mapping[str, Line]  # by method


class RatePanel(NamedTuple):
    """How something falls, and what bounds it."""

    title: str
    xlabel: str
    ylabel: str
    lines: Mapping[str, Line]
    bounds: Mapping[str, Sequence[float]]  # at the lines' x


class Spot(NamedTuple):
    """A run as one place: what it sends, what it reaches, and the downlink that its shape tells."""

    x: float
    y: float
    down: str


class SpotPanel(NamedTuple):
    """One field of a row of them."""

    title: str
    series: Mapping[str, Sequence[Spot]]  # by method


def draw_comparison(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Accuracy against rounds, against all bytes sent up so far, and against those sent up and down (logarithmic)."""
    figure, (by_round, by_uplink, by_traffic) = _figure(3, width=13.5)
    styles = run_styles({label: curve.method for label, curve in curves.items()})
    for label, curve in curves.items():
        num_rounds, traffic = len(curve.accuracy), map(sum, zip(curve.uplink_bytes, curve.downlink_bytes, strict=True))
        xs = (range(1, num_rounds + 1), list(accumulate(curve.uplink_bytes)), list(accumulate(traffic)))
        for axes, x in zip((by_round, by_uplink, by_traffic), xs, strict=True):
            _plot(axes, x, curve.accuracy, label, styles[label])
    by_round.set(xlabel="round", ylabel="test accuracy, %")
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _bytes_axis(by_uplink, "sent up by all clients so far")
    _bytes_axis(by_traffic, "sent up and down so far")
    by_traffic.sharex(by_uplink)  # what is added on the way down is seen as the way to the right
    by_uplink.autoscale()
    _run_legend(figure, by_round)
    figure.suptitle(title, color=_INK, fontsize=11)
    _save(figure, [path])


class LinkCurve(NamedTuple):
    """One run on a link, round by round."""

    method: str
    accuracy: Sequence[float]
    times: Sequence[Times]

    def points(self) -> list[tuple[float, float]]:
        """Seconds since the start and accuracy in percent, of each round."""
        seconds = accumulate(times.total for times in self.times)
        return [(x, 100 * value) for x, value in zip(seconds, self.accuracy, strict=True)]

    def first_from(self, percent: float) -> tuple[float, float]:
        """The first point that has so much accuracy; the last if there is none."""
        points = self.points()
        return next((point for point in points if point[1] >= percent), points[-1])


class LinkRow(NamedTuple):
    """Runs to be seen together, and the accuracy they are to reach."""

    title: str
    target: float
    curves: Mapping[str, LinkCurve]


def draw_link(rows: Sequence[LinkRow], title: str, path: Path) -> None:
    """Accuracy against the time on a link (logarithmic), and what its rounds are made of."""
    most = max(len(row.curves) for row in rows)
    figure = Figure(figsize=(13.5, (1.9 + max(2.3, 0.3 * most)) * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for row, (left, right) in zip(rows, figure.subplots(len(rows), 2, squeeze=False), strict=True):
        _tidy([left, right])
        _race(left, row)
        _bars(right, {label: mean_times(curve.times) for label, curve in row.curves.items()})
    figure.suptitle(title, color=_INK, fontsize=11)
    _save(figure, [path])


def _race(axes: Axes, row: LinkRow) -> None:
    """From ten points below the target on; a circle is where it is reached."""
    target, curves = 100 * row.target, row.curves.values()
    styles = run_styles({label: curve.method for label, curve in row.curves.items()})
    for label, curve in row.curves.items():
        _plot(axes, [x for x, _ in curve.points()], curve.accuracy, label, styles[label])
        if (there := curve.first_from(target))[1] >= target:
            axes.plot(*there, "o", ms=9, mfc="none", color=styles[label].color)
    axes.axhline(target, color=_INK, lw=0.8, ls=(0, (4, 4)), zorder=1)
    axes.set(xlabel="seconds on the link so far", ylabel="test accuracy, %", xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.minorticks_off()
    low, high = zoom(Line((), [100 * value for value in curve.accuracy]) for curve in curves)
    low = max(0.0, min(low, target - 10))
    axes.set_ylim(low, max(high, target + 2))
    axes.set_xlim(left=0.9 * min(curve.first_from(low)[0] for curve in curves))
    axes.set_title(f"{row.title}; target {target:.2f} %", color=_INK, fontsize=10)
    axes.legend(frameon=False, fontsize=9, handlelength=3, loc="best")


def _bars(axes: Axes, rounds: Mapping[str, Times]) -> None:
    """One for each run: the parts of its mean round, one after the other."""
    ends = [0.0] * len(rounds)
    for part, color in _PART_COLORS.items():
        lengths = [getattr(times, part) for times in rounds.values()]
        axes.barh(list(rounds), lengths, left=ends, color=color, label=part, height=0.6)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    for label, end in zip(rounds, ends, strict=True):
        axes.annotate(f"{end:.3g} s", (end, label), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_ylim(max(len(rounds), 4) - 0.5, -0.5)  # from top to bottom, and few bars are not stretched
    axes.set_xlim(0, 1.12 * max(ends))
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    axes.set(xlabel="seconds of a mean round")
    axes.legend(frameon=False, fontsize=9, ncols=len(_PART_COLORS), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_panels(
    panels: Sequence[Panel], ylabel: str, paths: Iterable[Path], *, by_bytes: bool = False, log: bool = False
) -> None:
    """Panels side by side with one legend; x is the round, or the bytes sent so far."""
    width = 1.2 + 3.7 * len(panels)
    figure, fields = _figure(len(panels), width, sharey=False)
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines))
    colors = method_colors(labels)
    for axes, panel in zip(fields, panels, strict=True):
        for label, line in panel.lines.items():
            front = label in _FRONT
            color, order = colors[label], 3 if front else 2
            axes.plot(line.x, line.y, label=label, lw=1.7 if front else 1.1, color=color, zorder=order)
            if line.band is not None:
                axes.fill_between(line.x, *line.band, alpha=0.2, lw=0, color=color, zorder=order)
        axes.set_title(panel.title, color=_INK, fontsize=10)
        axes.set_xlabel("round")
        if by_bytes:
            _bytes_axis(axes, "sent by all clients so far")
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(*zoom(panel.lines.values()))
    fields[0].set_ylabel(ylabel)
    found = (axes.get_legend_handles_labels() for axes in fields)
    handles = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    _legend(figure, [(label, handles[label]) for label in labels], min(len(labels), int(width / 1.6)))
    _save(figure, paths)


def draw_spots(panels: Sequence[SpotPanel], xlabel: str, ylabel: str, paths: Iterable[Path]) -> None:
    """Panels side by side: a colour for each method, a shape for each downlink; x is bytes."""
    figure, fields = _figure(len(panels), 1.2 + 3.7 * len(panels), sharey=False)
    spots = [(label, spot) for panel in panels for label, found in panel.series.items() for spot in found]
    colors = method_colors(dict.fromkeys(label for label, _ in spots))
    shapes = {down: shape for down, shape in _DOWN_SHAPES.items() if any(spot.down == down for _, spot in spots)}
    for axes, panel in zip(fields, panels, strict=True):
        for label, found in panel.series.items():
            for spot in found:
                axes.plot(spot.x, spot.y, shapes[spot.down], ms=8, color=colors[label], mec="white", mew=0.7, alpha=0.9)
        axes.set_title(panel.title, color=_INK, fontsize=10)
        _bytes_axis(axes, xlabel)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.margins(0.08)
    fields[0].set_ylabel(ylabel)
    rows = (
        {label: Line2D([], [], color=color, lw=4) for label, color in colors.items()},
        {f"down {down}": Line2D([], [], ls="", marker=shape, ms=8, color=_INK) for down, shape in shapes.items()},
    )
    blank = ("", Line2D([], [], ls=""))
    columns = list(zip_longest(*(row.items() for row in rows), fillvalue=blank))  # filled from the top
    _legend(figure, [pair for column in columns for pair in column], len(columns))
    _save(figure, paths)


def draw_rates(panels: Sequence[RatePanel], paths: Iterable[Path]) -> None:
    """Panels side by side, both axes logarithmic: dots and lines are measured, dashes are what bounds them."""
    figure, fields = _figure(len(panels), 1.2 + 5.2 * len(panels), sharey=False)
    colors = dict(zip(dict.fromkeys(label for panel in panels for label in panel.lines), _RATE_COLORS, strict=False))
    for axes, panel in zip(fields, panels, strict=True):
        for label, line in panel.lines.items():
            axes.plot(line.x, line.y, color=colors[label], lw=1.5, marker="o", ms=4 if len(line.x) < 10 else 0)
            axes.plot(line.x, panel.bounds[label], color=colors[label], lw=1.2, ls=(0, (5, 3)))
            if line.band is not None:
                axes.fill_between(line.x, *line.band, alpha=0.2, lw=0, color=colors[label])
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, xscale="log", yscale="log")
        axes.set_title(panel.title, color=_INK, fontsize=10)
    handles = [(label, Line2D([], [], color=color, lw=1.5)) for label, color in colors.items()]
    bound = ("its bound", Line2D([], [], color=_INK, lw=1.2, ls=(0, (5, 3))))
    _legend(figure, [*handles, bound], ncols=(len(handles) + 2) // 2)
    _save(figure, paths)


def zoom(lines: Iterable[Line]) -> tuple[float, float]:
    """From below where the last method spends its second half; first rounds and single spikes tell little."""
    halves = [line.y[len(line.y) // 2 :] for line in lines]
    low, high = min(map(median, halves)), max(map(max, halves))
    margin = max(high - low, 2.0)
    return low - margin, high + 0.1 * margin


def method_colors(labels: Iterable[str]) -> dict[str, str]:
    """A method's own colour wherever it appears; others take the next free one."""
    labels = list(labels)
    others = [label for label in labels if label not in _METHOD_COLORS]
    spare = dict(zip(others, _OTHER_COLORS * len(others), strict=False))
    return {label: _METHOD_COLORS.get(label) or spare[label] for label in labels}


class RunStyle(NamedTuple):
    """How a run's curve looks."""

    color: str
    dash: tuple[int, ...]


def run_styles(methods: Mapping[str, str], colors: Mapping[str, str] | None = None) -> dict[str, RunStyle]:
    """By label, of runs given with their methods: colours tell methods, dashes their variants, solid the plainest."""
    styles = {}
    for method, color in (colors or method_colors(dict.fromkeys(methods.values()))).items():
        variants = sorted((label for label in methods if methods[label] == method), key=lambda x: (x.count(" "), x))
        for label, dash in zip(variants, cycle(_DASHES), strict=False):
            styles[label] = RunStyle(color, dash)
    return styles


def _figure(num_fields: int, width: float, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    fields = list(figure.subplots(1, num_fields, sharey=sharey, squeeze=False)[0])
    _tidy(fields)
    return figure, fields


def _tidy(fields: Iterable[Axes]) -> None:
    for axes in fields:
        axes.grid(color=_PALE, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)


def _legend(figure: Figure, handles: Sequence[tuple[str, Artist]], ncols: int) -> None:
    """One for all fields, below them."""
    labels, artists = zip(*handles, strict=True)
    figure.legend(artists, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)


def _plot(axes: Axes, x: Sequence[float], accuracy: Sequence[float], label: str, style: RunStyle) -> None:
    percent, dots = [100 * value for value in accuracy], 3 if len(accuracy) < 40 else 0
    dashes = (0, [length / 2 for length in style.dash]) if style.dash else "solid"
    axes.plot(x, percent, color=style.color, linestyle=dashes, label=label, lw=1.8, marker="o", ms=dots)


def _run_legend(figure: Figure, axes: Axes) -> None:
    """All runs in one line below everything, or in as many as they need."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / (0.75 + 0.075 * max(map(len, labels)))))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), columns), frameon=False, fontsize=9,
        handlelength=3,
    )  # fmt: skip


def _bytes_axis(axes: Axes, label: str) -> None:
    axes.set(xlabel=label, xscale="log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: megabytes(value)))
    axes.minorticks_off()


def _save(figure: Figure, paths: Iterable[Path]) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "fedbat"}):
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
