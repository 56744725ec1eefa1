"""A picture of who holds what."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_INK, _FAINT, _BAR = "#1f2933", "#9aa5b1", "#4c78a8"
_MOST_TEXT_ROWS, _MOST_TEXT_COLUMNS = 32, 16  # beyond, numbers in the cells are too small to read


def draw_partition(counts: NDArray[np.int64], title: str, path: Path) -> None:
    """Draw how many samples of each class each client holds, `counts` [clients, classes], into an image file.

    A cell's shade is its count, on a square-root scale, else a few large cells would bleach all others; white
    is exactly zero. The bars at the right are the clients' sizes.
    """
    # matplotlib is slow to import; the object API leaves the user's pyplot figures and backend alone
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts.shape
    sizes = counts.sum(axis=1)
    height = float(np.clip(0.30 * num_clients, 2.4, 8.5))
    figure = Figure(figsize=(9.5, height + 1.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=(4, 1))

    shades = LinearSegmentedColormap.from_list("shades", ["#e3edf7", "#7fb0d8", "#2b6cb0", "#14304f"])
    image = cells.imshow(
        np.ma.masked_equal(counts, 0),
        cmap=shades,
        norm=PowerNorm(0.5, vmin=0, vmax=max(int(counts.max()), 1)),
        aspect="auto",
        interpolation="nearest",
    )
    cells.set_xlabel("class")
    cells.set_ylabel("client")
    bars.barh(np.arange(num_clients), sizes, height=0.7 if num_clients <= 64 else 1.0, color=_BAR)
    bars.set_xlabel("samples")
    bars.margins(x=0.3 if num_clients <= _MOST_TEXT_ROWS else 0.05)

    if num_clients <= _MOST_TEXT_ROWS:
        for client, size in enumerate(sizes):
            bars.text(size, client, f" {size:,}", va="center", fontsize=8, color=_INK)
    if num_clients <= _MOST_TEXT_ROWS and num_classes <= _MOST_TEXT_COLUMNS:
        for (client, label), count in np.ndenumerate(counts):
            if count:
                shade = float(image.norm(count))
                color = "white" if shade > 0.6 else _INK
                cells.text(label, client, f"{count}", ha="center", va="center", fontsize=7, color=color)

    for axes in (cells, bars):
        axes.yaxis.set_major_locator(MaxNLocator(20 if num_clients > _MOST_TEXT_ROWS else 32, integer=True))
        axes.tick_params(length=0, labelsize=8, colors=_INK)
        axes.spines[:].set_visible(False)
    cells.xaxis.set_major_locator(MaxNLocator(20, integer=True))
    bars.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    cells.spines[:].set_visible(True)
    cells.spines[:].set_color(_FAINT)
    colorbar = figure.colorbar(image, ax=bars, label="samples of one class", fraction=0.2, aspect=30)
    colorbar.outline.set_visible(False)
    figure.suptitle(title)
    figure.savefig(path)
