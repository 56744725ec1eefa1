"""How many samples of each class the clients of a split hold, dealt out again from the data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbat.data import DATASETS, load_dataset, partition
from fedbat.errors import FedbatError

MOST_SHOWN = 500  # clients; more are no longer told apart


@dataclass(frozen=True, eq=False)
class Holdings:
    """Of the first clients of a split."""

    counts: NDArray[np.int64]  # [clients, classes]
    num_clients: int  # of the whole split

    @property
    def text(self) -> str:
        """In a sentence."""
        sizes = self.counts.sum(axis=1)
        first = "" if len(sizes) == self.num_clients else f"The first {len(sizes):,} of {self.num_clients:,} clients: "
        spread = f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}"
        return f"{first}{sizes.sum():,} samples; per client {spread}."


def holdings_of(config: Mapping[str, Any]) -> Holdings | str:
    """Of the clients of a run, or why they are not known here; nothing is downloaded."""
    name, clients = config["dataset"], config["clients"]
    if name not in DATASETS:
        return f"Not shown: this version of fedbat does not know the data set {name}."
    if DATASETS[name].source.locate(None) is None:
        return f"Not shown: the data set {name} is not on the machine that wrote this page."
    try:
        labels = _labels(name)
        settings = [config.get(setting) for setting in ("beta", "labels", "samples")]
        split = partition(config["partition"], labels, clients, config["partition_seed"], *settings)
    except FedbatError as error:
        return f"Not shown: {error}."
    classes, shown = DATASETS[name].num_classes, range(min(clients, MOST_SHOWN))
    return Holdings(np.stack([np.bincount(labels[split[k]], minlength=classes) for k in shown]), clients)


@cache
def _labels(dataset: str) -> NDArray[np.int64]:
    labels: NDArray[np.int64] = load_dataset(dataset).y_train.numpy()
    return labels
