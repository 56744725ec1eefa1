"""What the paper's words stand for: protocols.toml says how its splits, models and methods are run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedbat.data.partition import PARTITIONS
from fedbat.errors import ConfigError
from fedbat.experiment import Experiment
from fedbat.reproduce.cells import canonical
from fedbat.reproduce.entries import changes_of

PROTOCOL = "authors"  # the one that reproduces the paper's numbers

Point = Mapping[str, str]  # a value for each key of a grid, in the paper's terms


@dataclass(frozen=True)
class Protocol:
    """What the paper's terms stand for."""

    name: str
    title: str
    partition: Mapping[str, str]  # by split
    model: Mapping[str, str]  # by data set, if it is not the default one
    settings: Mapping[str, Mapping[str, str]]  # by method

    @property
    def suffix(self) -> str:
        """What the names of pages and folders about another protocol than the usual one end in."""
        return "" if self.name == PROTOCOL else f"-{self.name}"

    def spelled(self, method: str) -> str:
        """A method with all settings that it is run with, those of the protocol included."""
        name, changes = changes_of(method)
        settings = {**self.settings.get(name, {}), **changes}
        return " ".join([name, *(f"{key}={value}" for key, value in settings.items())])

    def experiment(self, point: Point, fixed: Mapping[str, Any], seed: int) -> Experiment:
        """The experiment for a point of a grid; a method may come with settings: "fedbat rho=4"."""
        method, changes = changes_of(point["method"])
        split = self.partition.get(point["split"], point["split"])
        if split not in PARTITIONS and ":" not in split:
            choices = ", ".join(dict.fromkeys([*self.partition, *PARTITIONS]))
            raise ConfigError(f"unknown split {split!r}; choose from {choices}")
        chosen: dict[str, Any] = {
            "method": method,
            "settings": {**self.settings.get(method, {}), **changes},
            "dataset": point["dataset"],
            "partition": split,
            "clients": int(point["clients"]),
            "model": self.model.get(point["dataset"]),
            "seed": seed,
        }
        return canonical(Experiment(**chosen | dict(fixed)))
