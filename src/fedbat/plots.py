"""Pictures of runs. The same records always give the same bytes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, zip_longest
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
_FRONT = ("fedbat", "fedavg")  # drawn over the others
_DOWN_SHAPES = dict(zip(DOWNLINKS, ("o", "s", "D", "^", "v", "P"), strict=True))


class Curve(NamedTuple):
    """One run, round by round."""

    accuracy: Sequence[float]
    uplink_bytes: Sequence[int]  # of each round


class Line(NamedTuple):
    """A curve in one panel, with a band around it where there are several runs."""

    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None


class Panel(NamedTuple):
    """One field of a row of them."""

    title: str
    lines: Mapping[str, Line]  # by method


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
    """Accuracy against rounds, and against all bytes sent to the server so far (logarithmic)."""
    figure, (by_round, by_bytes) = _figure(2, width=11.0)
    colors = method_colors(curves)
    for label, curve in curves.items():
        percent = [100 * value for value in curve.accuracy]
        for axes, x in ((by_round, range(1, len(percent) + 1)), (by_bytes, list(accumulate(curve.uplink_bytes)))):
            dots = 3 if len(percent) < 40 else 0
            axes.plot(x, percent, color=colors[label], label=label, lw=1.8, marker="o", ms=dots)
    by_round.set(xlabel="round", ylabel="test accuracy, %")
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _bytes_axis(by_bytes)
    by_round.legend(frameon=False, loc="best", fontsize=9)
    figure.suptitle(title, color=_INK, fontsize=11)
    _save(figure, [path])


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
            _bytes_axis(axes)
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


def _figure(num_fields: int, width: float, sharey: bool = True) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    fields = list(figure.subplots(1, num_fields, sharey=sharey, squeeze=False)[0])
    for axes in fields:
        axes.grid(color=_PALE, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)
    return figure, fields


def _legend(figure: Figure, handles: Sequence[tuple[str, Artist]], ncols: int) -> None:
    """One for all fields, below them."""
    labels, artists = zip(*handles, strict=True)
    figure.legend(artists, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9)


def _bytes_axis(axes: Axes, label: str = "sent by all clients so far") -> None:
    axes.set(xlabel=label, xscale="log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: megabytes(value)))
    axes.minorticks_off()


def _save(figure: Figure, paths: Iterable[Path]) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "fedbat"}):
        for path in paths:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
