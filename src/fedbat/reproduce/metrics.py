"""What a claim may measure in a record, by name."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from fedbat.data import spec_of
from fedbat.figures import late
from fedbat.layout import Layout, layout_of
from fedbat.models import build_model
from fedbat.reproduce.record import Record


@dataclass(frozen=True)
class Metric:
    """A number from one record, and what is known about its spread between seeds if only one was run."""

    of: Callable[[Record], float]
    decimals: int = 2
    printed: bool = False  # the paper prints it
    accuracy: bool = False  # the paper's standard deviations are of this kind
    by_round: Callable[[Record], Sequence[float]] | None = None  # the values of which it is the mean
    exact: bool = False  # follows from method and model, without any chance


def _last_ten(record: Record) -> list[float]:
    return [100 * accuracy for accuracy in record.accuracy[late(len(record.lines))[1]]]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value, the mean of up to `window` values that end there."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def weighted_error(record: Record) -> list[float]:
    """||sent - m|| / ||m|| by round, averaged over clients and over layers weighted by their parameters."""
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
    spec = spec_of(dataset)
    return layout_of(build_model(model, spec.shape, spec.num_classes, seed=0))


METRICS = {
    "best": Metric(lambda record: record.best, printed=True, accuracy=True),
    "last-ten": Metric(lambda record: record.last10, accuracy=True, by_round=_last_ten),
    "error": Metric(lambda record: fmean(weighted_error(record)), decimals=3, by_round=weighted_error),
    # Of everything that is sent, BatchNorm and header included, per parameter of the model.
    "bits": Metric(lambda record: float(record.summary["bits_per_parameter"]), exact=True),
    "compression": Metric(lambda record: 32 / record.summary["bits_per_parameter"], exact=True),
    # Of what methods encode, per weight that they encode.
    "bits-of-weights": Metric(
        lambda record: float(record.summary["bits_per_compressed_parameter"]), decimals=4, exact=True
    ),
}
