"""The figures by which runs are compared, all computed from the lines of rounds.jsonl."""

from collections.abc import Mapping, Sequence
from typing import Any

OTHERS = ("received", "averaged")  # models that are tested besides the global one

Lines = Sequence[Mapping[str, Any]]  # of rounds.jsonl

_FEW = 20  # rounds: with fewer, the last ten would include some in which the model had hardly begun to learn


def late(num_rounds: int) -> tuple[str, slice]:
    """What the rounds that tell how a run ended are called, and which they are."""
    return ("final", slice(-1, None)) if num_rounds < _FEW else ("last 10", slice(-10, None))


def held_accuracy(line: Mapping[str, Any]) -> float:
    """The accuracy of what clients hold after a round, which is not the model itself where few bits go down."""
    return float((line.get("received") or line)["accuracy"])


def at_chance(accuracy: float, num_classes: int) -> bool:
    """Whether a model does no better than guessing, but for a tenth that is luck."""
    return accuracy <= 1.1 / num_classes


def figures_of(lines: Lines, num_parameters: int, num_compressed: int) -> dict[str, Any]:
    """The figures of a run with at least one round, on a model of that size; summaries are checked against them."""
    client_rounds = sum(len(line["clients"]) for line in lines)
    uploads = client_rounds - sum(len(line.get("lost", ())) for line in lines)
    uplink = sum(line["uplink_bytes"] for line in lines) / uploads
    downlink = sum(line["downlink_bytes"] for line in lines) / client_rounds
    nbits = sum(line["uplink_nbits"] for line in lines) / uploads
    return {
        **_best_and_last10("", lines),
        **{name: value for key in OTHERS for name, value in _of_other(key, lines).items()},
        "final_accuracy": lines[-1]["accuracy"],
        "uplink_bytes_per_client_round": uplink,
        "downlink_bytes_per_client_round": downlink,
        "total_bytes_per_client_round": uplink + downlink,
        "bits_per_parameter": 8 * uplink / num_parameters,
        "bits_per_compressed_parameter": nbits / num_compressed if num_compressed else None,
        "seconds": sum(line["seconds"] for line in lines),
    }


def _of_other(key: str, lines: Lines) -> dict[str, float]:
    """The figures of a model that only some rounds test; empty if none did."""
    found = [line[key] for line in lines if line.get(key)]
    return _best_and_last10(f"{key}_", found) if found else {}


def _best_and_last10(prefix: str, tested: Lines) -> dict[str, float]:
    accuracies = [test["accuracy"] for test in tested]
    last = accuracies[-10:]
    return {f"{prefix}best_accuracy": max(accuracies), f"{prefix}last10_accuracy": sum(last) / len(last)}
