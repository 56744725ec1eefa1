"""Which client holds what, as numbers and in words."""

import numpy as np
from numpy.typing import NDArray

from fedbat.data.formats import Labels
from fedbat.data.population import Split

MOST_SHOWN = 500  # clients; more could not be told apart


def count_labels(split: Split, labels: Labels, num_classes: int) -> NDArray[np.int64]:
    """How many samples of each class the clients hold, [clients, classes]; only the first if there are many."""
    shown = range(min(len(split), MOST_SHOWN))
    return np.stack([np.bincount(labels[split[client]], minlength=num_classes) for client in shown])


def sizes_in_words(counts: NDArray[np.int64]) -> str:
    """How many samples these clients hold, in total and each."""
    sizes = counts.sum(axis=1)
    spread = f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}"
    return f"{sizes.sum():,} samples; per client {spread}"
