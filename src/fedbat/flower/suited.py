"""Which of Flower's strategies can be compressed, and which of their features cannot be honored."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedbat.errors import ConfigError
from fedbat.flower.mods import callers
from fedbat.layout import Layout
from fedbat.streams import Tensors

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
    reason = next((why for kind, why in REFUSED.items() if isinstance(strategy, kind)), None)
    if reason is not None or not isinstance(strategy, flower.FedAvg):
        reason = reason or "it is no averaging strategy of Flower"
        raise ConfigError(f"{type(strategy).__name__} cannot be compressed: {reason}; use FedAvg or one built on it")
    if type(strategy).start is not Strategy.start:
        raise ConfigError(
            f"{type(strategy).__name__}.start would never be called: Compressed has a `start` of its own; put what it "
            "does into evaluate_fn or aggregate_train"
        )


def check_around() -> None:
    """Refuse a strategy around Compressed that needs plain updates."""
    for _, owner in callers():
        for kind, why in REFUSED.items():
            if isinstance(owner, kind):
                raise ConfigError(
                    f"{kind.__name__} cannot wrap Compressed: {why}; use it with plain FedAvg, without fedbat"
                )


def is_own(strategy: Strategy, name: str) -> bool:
    """Whether this method of the strategy is the user's own."""
    return not getattr(type(strategy), name).__module__.startswith("flwr.")


def check_drafts(drafts: Sequence[Message], model: ArrayRecord) -> None:
    """Refuse drafts that differ between nodes, or that send arrays other than the model that the strategy was given."""
    first = drafts[0]
    kind, records = first.metadata.message_type, first.content.array_records
    if any(draft.metadata.message_type != kind or draft.content != first.content for draft in drafts):
        raise ConfigError(f"the strategy gives nodes different contents ({kind}), expected the same for all of them")
    if len(records) != 1:
        raise ConfigError(
            f"the strategy sends the array records {', '.join(records) or 'none'} ({kind}), expected the model alone; "
            "other arrays cannot be compressed"
        )
    if next(iter(records.values())) != model:
        raise ConfigError(
            f"the strategy sends other arrays than the model it was given ({kind}), and clients would not get them; "
            "change the model in aggregate_train"
        )


def check_model(w: Tensors, whole: Layout, sent: Layout) -> None:
    """Refuse a first model, or one of a checkpoint, that is not of the model that Compressed was given, or has NaN."""
    wanted = {entry.name: tuple(entry.shape) for entry in whole}
    found = {name: tuple(tensor.shape) for name, tensor in w.items()}
    if other := sorted(found.items() ^ wanted.items()):
        name, _ = other[0]
        raise ConfigError(
            f"{name} is {found.get(name, 'missing')} in the arrays to start from, {wanted.get(name, 'missing')} in the "
            "model that Compressed was given; use one model for both, and its own state_dict(), not torch.compile's"
        )
    for entry in sent:
        if torch.isnan(w[entry.name]).any():
            raise ConfigError(f"{entry.name} holds NaN, from which nothing can be learned; start from another model")


def check_result(strategy: Strategy, given: Tensors, w: Tensors) -> None:
    """Refuse arrays that are not of the model."""
    for name, tensor in given.items():
        if name not in w or tensor.shape != w[name].shape:
            expected = tuple(w[name].shape) if name in w else "no such array"
            raise ConfigError(
                f"{type(strategy).__name__}.aggregate_train returned {name} with shape {tuple(tensor.shape)}, expected "
                f"{expected}; let it return the model's own arrays"
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
