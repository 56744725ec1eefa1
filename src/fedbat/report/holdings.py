"""How many samples of each class the clients of a split hold, found by splitting the data set again."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbat.data import DATASETS, PARTITIONS, load_dataset, partition
from fedbat.data.counts import count_labels, sizes_in_words
from fedbat.errors import FedbatError


@dataclass(frozen=True, eq=False)
class Holdings:
    """How many samples of each class the first clients of a split hold."""

    counts: NDArray[np.int64]  # [clients, classes]
    num_clients: int  # of the whole split

    @property
    def text(self) -> str:
        """The holdings in a sentence."""
        shown = len(self.counts)
        first = "" if shown == self.num_clients else f"The first {shown:,} of {self.num_clients:,} clients: "
        return f"{first}{sizes_in_words(self.counts)}."


def holdings_of(config: Mapping[str, Any]) -> Holdings | str:
    """What the clients of a run hold, or why that is not known here; nothing is downloaded."""
    name, clients = config["dataset"], config["clients"]
    if name not in DATASETS or config["partition"] not in PARTITIONS:  # users' own code is not run for a picture
        unknown = f"the data set {name}" if name not in DATASETS else f"the partition {config['partition']}"
        return f"Not shown: {unknown} is not one of fedbat's."
    if DATASETS[name].source.locate(None) is None:
        return f"Not shown: the data set {name} is not on the machine that wrote this page."
    try:
        labels = _labels(name)
        settings = [config.get(setting) for setting in ("beta", "labels", "samples")]
        split = partition(config["partition"], labels, clients, config["partition_seed"], *settings)
    except FedbatError as error:
        return f"Not shown: {error}."
    return Holdings(count_labels(split, labels, DATASETS[name].num_classes), clients)


@cache
def _labels(dataset: str) -> NDArray[np.int64]:
    labels: NDArray[np.int64] = load_dataset(dataset).y_train.numpy()
    return labels
