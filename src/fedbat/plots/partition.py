"""Which client holds what, as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from fedbat.data.counts import sizes_in_words
from fedbat.plots.canvas import save
from fedbat.plots.styles import INK

_FRAME = "#9aa5b1"
_SHADES = ["#e3edf7", "#7fb0d8", "#2b6cb0", "#173a5e"]
_TEXT_ROWS, _TEXT_COLUMNS = 32, 16  # with more, numbers would be too small to read


def draw_partition(counts: NDArray[np.int64], title: str, path: Path) -> None:
    """Draw how many samples of each class each client holds, `counts` [clients, classes], into an image file.

    A cell's shade is its count on a square-root scale, or else a few large cells would bleach all others; white
    is exactly zero. The bars on the right are the clients' sizes. In small pictures the numbers are written in.
    """
    num_clients, num_classes = counts.shape
    few_clients = num_clients <= _TEXT_ROWS
    few_cells = few_clients and num_classes <= _TEXT_COLUMNS
    sizes = counts.sum(axis=1)

    figure = Figure(figsize=(9.5, 1.5 + min(0.3 * num_clients, 8.5)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))
    image = cells.pcolormesh(
        np.arange(num_classes + 1) - 0.5,
        np.arange(num_clients + 1) - 0.5,
        np.ma.masked_equal(counts, 0),
        cmap=LinearSegmentedColormap.from_list("shades", _SHADES),
        norm=PowerNorm(0.5, vmin=0, vmax=counts.max()),
        edgecolors="white",
        linewidth=1.0 if few_cells else 0.2 if num_clients <= 100 else 0.0,
    )
    bars.barh(np.arange(num_clients), sizes, height=0.7 if few_clients else 1.0, color=_SHADES[1])
    bars.margins(x=0.35 if few_clients else 0.05)

    if few_clients:
        for client, size in enumerate(sizes):
            bars.text(size, client, f" {size:,}", va="center", fontsize=8, color=INK)
    if few_cells:
        for client, label in np.argwhere(counts):
            count = counts[client, label]
            color = "white" if image.norm(count) > 0.55 else INK
            cells.text(label, client, f"{count:,}", ha="center", va="center", fontsize=7, color=color)
    else:
        colorbar = figure.colorbar(image, ax=bars, label="samples of one class", fraction=0.2, aspect=40)
        colorbar.outline.set_visible(False)
        colorbar.ax.tick_params(length=0, labelsize=8, colors=INK)

    for axes in (cells, bars):
        axes.tick_params(length=0, labelsize=8, colors=INK)
        axes.spines[:].set_visible(False)
    cells.spines[:].set(visible=True, color=_FRAME)
    cells.set(xlabel="class", ylabel="client")
    cells.xaxis.set_major_locator(MaxNLocator(20, integer=True, min_n_ticks=1))
    cells.yaxis.set_major_locator(MaxNLocator(_TEXT_ROWS, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    cells.invert_yaxis()
    bars.set(xlabel="samples")
    bars.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    bars.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.suptitle(title, color=INK)
    cells.set_title(sizes_in_words(counts), loc="left", fontsize=9, color=INK)
    save(figure, [path])
