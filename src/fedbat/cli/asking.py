"""For commands that take a whole Experiment: its options are listed here once, with the dataclass's defaults."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from fedbat.cli import options
from fedbat.cli.execution import RunOptions
from fedbat.engine import check_engine
from fedbat.experiment import Experiment, check_partition

_EXPERIMENT = {
    "dataset": options.Dataset,
    "partition": options.Partition,
    "clients": options.Clients,
    "per_round": options.PerRound,
    "rounds": options.Rounds,
    "epochs": options.Epochs,
    "batch_size": options.BatchSize,
    "lr": options.LearningRate,
    "model": options.Model,
    "init": options.Init,
    "weights": options.Weights,
    "beta": options.Beta,
    "labels": options.Labels,
    "samples": options.Samples,
    "down": options.Down,
    "average": options.Average,
    "seed": options.Seed,
    "partition_seed": options.PartitionSeed,
}
_RUN_OPTIONS = {
    "engine": options.EngineName,
    "device": options.Device,
    "precision": options.PrecisionName,
    "memory_budget": options.MemoryBudget,
    "tensorboard": options.TensorBoardFolder,
}


def asks_for_experiment(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's parameters `base` and `how` by the options of an experiment and of how to run it.

    Options that the command defines itself are left to it.
    """
    own = inspect.signature(command).parameters
    shared = {name: hint for name, hint in _EXPERIMENT.items() if name not in own}

    @wraps(command)
    def asked(**given: Any) -> None:
        base = check_partition(Experiment(**{name: given.pop(name) for name in shared}), "--")
        how = {name: given.pop(name) for name in _RUN_OPTIONS}
        how["memory_budget"] = options.num_bytes(how["memory_budget"])
        check_engine(how["engine"], how["device"], how["precision"])
        command(base=base, how=RunOptions(**how), **given)

    parameters: list[inspect.Parameter] = []
    for parameter in own.values():
        instead = {"base": (shared, _defaults()), "how": (_RUN_OPTIONS, RunOptions._field_defaults)}.get(parameter.name)
        hints, defaults = instead or ({parameter.name: parameter.annotation}, {parameter.name: parameter.default})
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
            for name, hint in hints.items()
        ]
    asked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    asked.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return asked


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(Experiment)}
