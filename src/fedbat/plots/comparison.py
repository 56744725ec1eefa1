"""Runs side by side: accuracy against rounds and against bytes."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

from fedbat.plots.canvas import bytes_axis, legend_below, new_figure, plot_accuracy, save
from fedbat.plots.styles import INK, run_styles

_WIDTH = 13.5  # inches


class Curve(NamedTuple):
    """One run, or the mean over several seeds, round by round."""

    method: str
    accuracy: Sequence[float]  # of the model that clients hold
    uplink_bytes: Sequence[float]  # of each round
    downlink_bytes: Sequence[float]
    band: Sequence[tuple[float, float]] | None = None  # from the lowest to the highest accuracy


def draw_comparison(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Draw accuracy against rounds, all bytes sent up so far, and all bytes sent up and down (logarithmic)."""
    columns = max(1, int(_WIDTH / (0.75 + 0.075 * max(map(len, curves)))))  # of the legend
    legend_rows = -(-len(curves) // columns)
    figure, ((by_round, by_uplink, by_traffic),) = new_figure(_WIDTH, 4 + 0.2 * legend_rows, 1, 3, sharey=True)
    styles = run_styles({label: curve.method for label, curve in curves.items()})
    for label, curve in curves.items():
        num_rounds, traffic = len(curve.accuracy), map(sum, zip(curve.uplink_bytes, curve.downlink_bytes, strict=True))
        xs = (range(1, num_rounds + 1), list(accumulate(curve.uplink_bytes)), list(accumulate(traffic)))
        for axes, x in zip((by_round, by_uplink, by_traffic), xs, strict=True):
            plot_accuracy(axes, x, curve.accuracy, label, styles[label])
            if curve.band:
                low, high = ([100 * value for value in end] for end in zip(*curve.band, strict=True))
                axes.fill_between(x, low, high, alpha=0.2, lw=0, color=styles[label].color)
    by_round.set(xlabel="round", ylabel="test accuracy, %")
    by_round.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    bytes_axis(by_uplink, "sent up by all clients so far")
    bytes_axis(by_traffic, "sent up and down so far")
    by_traffic.sharex(by_uplink)  # so that what the way down adds shows as a shift to the right
    by_uplink.autoscale()
    handles, labels = by_round.get_legend_handles_labels()
    legend_below(figure, list(zip(labels, handles, strict=True)), min(len(labels), columns), handlelength=3)
    figure.suptitle(title, color=INK, fontsize=11)
    save(figure, [path])
