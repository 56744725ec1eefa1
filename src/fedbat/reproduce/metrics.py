"""What a claim may measure of a record, by name."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import torch

from fedbat.data.datasets import DATASETS
from fedbat.layout import Layout, layout_of
from fedbat.models import build_model
from fedbat.reproduce.record import Record


@dataclass(frozen=True)
class Metric:
    """A number of one record, and what is known of its spread between seeds when only one was run."""

    of: Callable[[Record], float]
    decimals: int = 2
    printed: bool = False  # the paper prints it
    accuracy: bool = False  # the standard deviations the paper prints are of its kind
    by_round: Callable[[Record], Sequence[float]] | None = None  # of which it is the mean
    exact: bool = False  # follows from method and model; no chance in it


def _last_ten(record: Record) -> list[float]:
    return [100 * accuracy for accuracy in record.accuracy[-10:]]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Of each value and those before it."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def weighted_error(record: Record) -> list[float]:
    """By round, ||sent - m|| / ||m||, mean over clients and over layers weighted by their parameters."""
    configuration = record.configuration
    layout = _layout_by_name(configuration["model"], configuration["dataset"])
    sizes = {entry.name: entry.numel for entry in layout}
    found = []
    for errors in record.layer_errors:
        total = sum(sizes[name] for name in errors)
        found.append(sum(sizes[name] * error for name, error in errors.items()) / total if total else math.inf)
    return found


@cache
def _layout_by_name(model: str, dataset: str) -> Layout:
    spec = DATASETS[dataset]
    with torch.device("meta"):
        return layout_of(build_model(model, spec.shape, spec.num_classes, seed=0))


METRICS = {
    "best": Metric(lambda record: record.best, printed=True, accuracy=True),
    "last-ten": Metric(lambda record: record.last10, accuracy=True, by_round=_last_ten),
    "error": Metric(lambda record: fmean(weighted_error(record)), decimals=3, by_round=weighted_error),
    # Of all that is sent, BatchNorm and header included, for each parameter of the model.
    "bits": Metric(lambda record: float(record.summary["bits_per_parameter"]), exact=True),
    "compression": Metric(lambda record: 32 / record.summary["bits_per_parameter"], exact=True),
    # Of what methods encode, for each weight they encode.
    "bits-of-weights": Metric(
        lambda record: float(record.summary["bits_per_compressed_parameter"]), decimals=4, exact=True
    ),
}
