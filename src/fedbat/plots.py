"""Pictures of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedbat.view import megabytes

_INK, _PALE = "#1f2933", "#d5dbe1"
# Okabe and Ito's colours: distinguishable with any kind of colour vision.
_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#8c6d31",
    "#7b4173",
    "#637939",
)


class Curve(NamedTuple):
    """One run, round by round."""

    accuracy: Sequence[float]
    uplink_bytes: Sequence[int]  # of each round


def draw_comparison(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Accuracy against rounds, and against all bytes sent to the server so far (logarithmic)."""
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    by_round, by_bytes = figure.subplots(1, 2, sharey=True)
    for (label, curve), color in zip(curves.items(), _COLORS * len(curves), strict=False):
        percent = [100 * value for value in curve.accuracy]
        total, sent = 0, []
        for num_bytes in curve.uplink_bytes:
            total += num_bytes
            sent.append(total)
        for axes, x in ((by_round, range(1, len(percent) + 1)), (by_bytes, sent)):
            axes.plot(x, percent, color=color, label=label, lw=1.8, marker="o", ms=3 if len(percent) < 40 else 0)
    by_round.set(xlabel="round", ylabel="test accuracy, %")
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    by_bytes.set(xlabel="sent by all clients so far", xscale="log")
    by_bytes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: megabytes(value)))
    by_bytes.minorticks_off()
    for axes in (by_round, by_bytes):
        axes.grid(color=_PALE, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)
    by_round.legend(frameon=False, loc="best", fontsize=9)
    figure.suptitle(title, color=_INK, fontsize=11)
    figure.savefig(path)
