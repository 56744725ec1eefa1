"""What all pictures are made of: figures with tidy axes, axes in bytes, one legend, files."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedbat.plots.styles import INK, PALE, RunStyle
from fedbat.units import megabytes


def new_figure(
    width: float, height: float, rows: int, columns: int, *, sharey: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure, and its axes row by row."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    fields = figure.subplots(rows, columns, sharey=sharey, squeeze=False).tolist()
    for axes in (axes for row in fields for axes in row):
        axes.grid(color=PALE, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    return figure, fields


def new_row(num_fields: int) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, each with its own range."""
    figure, (fields,) = new_figure(1.2 + 3.7 * num_fields, 4.2, 1, num_fields)
    return figure, fields


def plot_accuracy(axes: Axes, x: Sequence[float], accuracy: Sequence[float], label: str, style: RunStyle) -> None:
    """Draw a run's accuracy curve, in percent."""
    percent, dots = [100 * value for value in accuracy], 3 if len(accuracy) < 40 else 0
    axes.plot(x, percent, color=style.color, linestyle=dashes(style), label=label, lw=1.8, marker="o", ms=dots)


def dashes(style: RunStyle) -> str | tuple[float, list[float]]:
    """The dashes of a style as Matplotlib takes them."""
    return (0, [length / 2 for length in style.dash]) if style.dash else "solid"


def bytes_axis(axes: Axes, label: str) -> None:
    """Make the x axis a logarithmic axis in bytes."""
    axes.set(xlabel=label, xscale="log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.minorticks_off()


def _short(num_bytes: float) -> str:
    """Bytes as a tick has them."""
    return f"{num_bytes / 1e9:g} GB" if num_bytes >= 1e9 else megabytes(num_bytes)


def log_ticks(axis: Axis) -> None:
    """Set ticks once all is drawn: at powers of ten, also at 2 and 5 times these if they are few, or in even steps."""
    low, high = axis.get_view_interval()
    even = MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=3)
    logs = LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,))
    axis.set_major_locator(logs if high > 10 * low else even)


def legend_below(
    figure: Figure, handles: Sequence[tuple[str, Artist]], ncols: int, handlelength: float | None = None
) -> None:
    """Put one legend for all axes below them."""
    labels, artists = zip(*handles, strict=True)
    figure.legend(
        artists, labels, loc="outside lower center", ncols=ncols, frameon=False, fontsize=9, handlelength=handlelength
    )


def save(figure: Figure, paths: Iterable[Path], shown: Any = None) -> None:
    """Write the figure without a date or random names, so that the same picture gives the same file.

    SVG files carry a hash of what is shown, by which one can tell whether they are still of the same.
    """
    with matplotlib.rc_context({"svg.hashsalt": "fedbat"}):
        for path in paths:
            svg = {"Date": None, "Identifier": digest(shown)}
            figure.savefig(path, metadata=svg if path.suffix == ".svg" else None)


def digest(shown: Any) -> str:
    """A hash of panels: their texts, and of their numbers as many digits as can be seen."""
    return hashlib.sha256(_text(shown).encode()).hexdigest()[:16]


def _text(shown: Any) -> str:
    if isinstance(shown, int | float):
        return f"{shown:.6g}"
    if isinstance(shown, str) or shown is None:
        return repr(shown)
    return f"({','.join(map(_text, shown.items() if isinstance(shown, Mapping) else shown))})"
