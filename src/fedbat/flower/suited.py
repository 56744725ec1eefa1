"""Which of Flower's strategies can be compressed."""

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
    """Refuse one whose clients send no updates to be averaged, or must send them plain."""
    if not isinstance(strategy, flower.FedAvg) or type(strategy) in REFUSED:
        reason = REFUSED.get(type(strategy), "it is no averaging strategy of Flower")
        raise ConfigError(f"{type(strategy).__name__} cannot be compressed: {reason}; use FedAvg or one built on it")
