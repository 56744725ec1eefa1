"""How long a cell will take, judged by how long others took on the same machine."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedbat.experiment import Experiment
from fedbat.reproduce.record import Record

# What two cells must share for one to predict the other, best first.
_KINDS = (
    ("dataset", "model", "partition", "clients", "method", "down", "average"),  # each model that is tested takes time
    ("dataset", "model", "partition", "clients", "method"),
    ("dataset", "model", "clients", "method"),
    ("dataset", "model", "method"),
    ("dataset", "model"),
    ("model",),
)


class Machine(NamedTuple):
    """What decides the speed: the processor, the arithmetic, and how many jobs share the processor."""

    processor: str
    precision: str
    jobs: str = "1"

    @classmethod
    def of(cls, record: Record) -> "Machine":
        """The machine on which a record was made."""
        engine = record.summary["engine"] or {}
        processor = record.gpu or cpu(record.summary["machine"].get("cpus"))
        return cls(processor, engine.get("precision", ""), engine.get("jobs", "1"))


def cpu(cores: int | None) -> str:
    """A machine without a GPU in use, by its number of cores, which the first records do not tell."""
    return "cpu" if cores is None else f"cpu, {cores} cores"


class Pace:
    """Seconds for one pass over the whole data set, by kind of cell."""

    def __init__(self, machine: Machine, records: Iterable[Record] = ()) -> None:
        self._seen: dict[tuple[Any, ...], list[float]] = {}
        for record in records:
            if Machine.of(record) == machine:
                self.learn(record)

    def learn(self, record: Record) -> None:
        """Remember how fast a whole run was, unless another machine may have done a part of it."""
        if not record.summary["resumed"]:
            self.observe(record.configuration, record.seconds / record.configuration["rounds"])

    def observe(self, configuration: Mapping[str, Any], seconds_per_round: float) -> None:
        """Remember how fast something ran."""
        for kind in _KINDS:
            self._seen.setdefault(_key(kind, configuration), []).append(seconds_per_round / _passes(configuration))

    def seconds(self, experiment: Experiment, rounds: int) -> float | None:
        """The seconds that so many rounds will take; None if nothing like it has run here yet."""
        configuration = vars(experiment)
        for kind in _KINDS:
            if seen := self._seen.get(_key(kind, configuration)):
                # The least: others ran on an older engine, or next to something else. Too low a guess is soon noticed.
                return rounds * min(seen) * _passes(configuration)
        return None


def _key(kind: tuple[str, ...], configuration: Mapping[str, Any]) -> tuple[Any, ...]:
    return kind, *(configuration[name] for name in kind)


def _passes(configuration: Mapping[str, Any]) -> float:
    """The passes over the whole data set in one round, by all clients together."""
    return float(configuration["epochs"] * configuration["per_round"] / configuration["clients"])
