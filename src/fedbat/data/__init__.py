"""Data sets, which clients hold which part of them, and what is done to their images."""

from fedbat.data.datasets import (
    DATASETS,
    Dataset,
    Spec,
    check_dataset,
    dataset_of,
    load_dataset,
    read_dataset,
    spec_of,
)
from fedbat.data.partition import (
    PARTITIONS,
    SETTINGS,
    partition,
    partition_dirichlet,
    partition_iid,
    partition_labels,
    partition_labels_balanced,
    scheme_of,
    users_of,
)
from fedbat.data.population import MIN_VIRTUAL_SAMPLES, Population, Split
from fedbat.data.transforms import augment, normalize

__all__ = [
    "DATASETS",
    "MIN_VIRTUAL_SAMPLES",
    "PARTITIONS",
    "SETTINGS",
    "Dataset",
    "Population",
    "Spec",
    "Split",
    "augment",
    "check_dataset",
    "dataset_of",
    "load_dataset",
    "normalize",
    "partition",
    "partition_dirichlet",
    "partition_iid",
    "partition_labels",
    "partition_labels_balanced",
    "read_dataset",
    "scheme_of",
    "spec_of",
    "users_of",
]
