"""A cell is one experiment with one seed. Its configuration identifies it, whichever tables it appears in."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbat.experiment import Experiment
from fedbat.methods import make_method, method_kind
from fedbat.records import file_name
from fedbat.settings import show

_IN_THE_PATH = ("method", "settings", "dataset", "partition", "clients", "seed")


@dataclass(frozen=True)
class Cell:
    """An experiment to be run once."""

    experiment: Experiment

    @cached_property
    def identity(self) -> str:
        """A hash that is the same for equal configurations, however they were written."""
        return identity(configuration(self.experiment))

    @cached_property
    def serves(self) -> tuple[str, ...]:
        """The identities of the cells that this cell's record will stand for."""
        return served(configuration(self.experiment))

    @cached_property
    def folder(self) -> Path:
        """The folder of its record below the results; different for different configurations."""
        e = self.experiment
        return Path(*map(file_name, (e.dataset, f"{e.partition}-n{e.clients}", f"{variant(e)}-seed{e.seed}")))


def configuration(experiment: Experiment, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that decides what is computed, with defaults written out; not machine, engine or precision.

    `settings` are the method's as an earlier run recorded them, in case a default has changed since.
    """
    resolved = experiment.resolved()
    method = make_method(resolved.method, resolved.settings)
    return dataclasses.asdict(resolved) | {"settings": method.settings() | dict(settings or {})}


def identity(configuration: Mapping[str, Any]) -> str:
    """A hash of the configuration."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:16]


def served(configuration: Mapping[str, Any]) -> tuple[str, ...]:
    """The identities of the cells that a record of this configuration stands for, its own first.

    An averaged model is kept alongside training and does not affect it, so the record also stands for the cell without.
    """
    return tuple(dict.fromkeys(identity({**configuration, **change}) for change in ({}, {"average": 0.0})))


def fewest(cells: Iterable[Cell]) -> list[Cell]:
    """The cells whose records stand for all of these: a cell that serves another takes its place."""
    server: dict[str, Cell] = {}
    for cell in cells:
        for key in cell.serves:
            if key not in server or len(cell.serves) > len(server[key].serves):
                server[key] = cell
    return list({cell.identity: cell for cell in server.values()}.values())


def canonical(experiment: Experiment) -> Experiment:
    """The same experiment with defaults written out, but only those method settings that differ from theirs."""
    resolved = experiment.resolved()
    kind, settings = method_kind(resolved.method), make_method(resolved.method, resolved.settings).settings()
    changed = {name: show(value) for name, value in settings.items() if value != kind().settings()[name]}
    return dataclasses.replace(resolved, settings=changed)


def variant(experiment: Experiment) -> str:
    """The method and whatever differs from its default: fedbat-rho-0, fedpaq-bits-3."""
    experiment = canonical(experiment)
    defaults = {name: getattr(Experiment, name) for name in vars(experiment) if name not in _IN_THE_PATH}
    defaults["per_round"] = min(defaults["per_round"], experiment.clients)
    usual = dataclasses.replace(experiment, **defaults).resolved()
    usual = dataclasses.replace(usual, rounds=dataclasses.replace(experiment, rounds=None).resolved().rounds)
    changed = {name: value for name, value in vars(experiment).items() if value != getattr(usual, name)}
    parts = [*experiment.settings.items(), *((name, show(value)) for name, value in changed.items())]
    return "-".join([experiment.method, *(f"{name}-{value}" for name, value in parts)])
