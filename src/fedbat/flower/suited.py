"""Which of Flower's strategies can be compressed, and which of their features cannot be honored."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from flwr.app import Message, MetricRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedbat.errors import ConfigError

COMPARING = (flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum, flower.Bulyan, flower.QFedAvg)
"""Strategies that need each client's model."""

REFUSED = {
    flower.DifferentialPrivacyServerSideFixedClipping: "it clips plain updates, and a packed one is not clipped",
    flower.DifferentialPrivacyServerSideAdaptiveClipping: "it clips plain updates, and a packed one is not clipped",
    flower.DifferentialPrivacyClientSideFixedClipping: "its clients clip plain updates, and theirs are packed",
    flower.DifferentialPrivacyClientSideAdaptiveClipping: "its clients clip plain updates, and theirs are packed",
    flower.FedXgbBagging: "it sends trees, not tensors",
    flower.FedXgbCyclic: "it sends trees, not tensors",
}


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy whose clients send no updates to average, or must send them uncompressed."""
    if not isinstance(strategy, flower.FedAvg) or type(strategy) in REFUSED:
        reason = REFUSED.get(type(strategy), "it is no averaging strategy of Flower")
        raise ConfigError(f"{type(strategy).__name__} cannot be compressed: {reason}; use FedAvg or one built on it")
    if type(strategy).start is not Strategy.start:
        raise ConfigError(
            f"{type(strategy).__name__}.start would never be called: Compressed has a `start` of its own; put what it "
            "does into evaluate_fn or aggregate_train"
        )


def chooses_nodes(strategy: Strategy) -> bool:
    """Whether its configure_train is the user's own."""
    return not type(strategy).configure_train.__module__.startswith("flwr.")


def check_drafts(drafts: Sequence[Message]) -> None:
    """Refuse drafts that differ between nodes, or that send arrays other than the model."""
    first = drafts[0].content
    if any(draft.content.config_records != first.config_records for draft in drafts):
        raise ConfigError("configure_train gives nodes different configs, expected one for all of them")
    if len(first.array_records) != 1:
        raise ConfigError(
            f"configure_train sends the array records {', '.join(first.array_records)}, expected the model alone; "
            "other arrays cannot be compressed"
        )


@contextmanager
def metrics_known(strategy: Strategy, metrics: MetricRecord) -> Iterator[None]:
    """Inside, let the strategy, which is handed one reply, report the metrics its own function made of all replies."""
    inside = cast(Any, strategy)
    own = inside.train_metrics_aggr_fn
    inside.train_metrics_aggr_fn = lambda contents, key: metrics
    try:
        yield
    finally:
        inside.train_metrics_aggr_fn = own
