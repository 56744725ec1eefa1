"""`fedbat run` and `fedbat compare`."""

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedbat.cli.execution import Means, execute, execute_all, print_table
from fedbat.cli.options import (
    Average,
    BatchSize,
    Beta,
    Clients,
    Dataset,
    Device,
    Down,
    EngineName,
    Epochs,
    Labels,
    LearningRate,
    MemoryBudget,
    Model,
    Out,
    Partition,
    PartitionSeed,
    PerRound,
    PrecisionName,
    Rounds,
    Samples,
    Seed,
    Settings,
    TensorBoardFolder,
    num_bytes,
    pair,
    say,
)
from fedbat.downlink import FULL
from fedbat.engine import check_engine
from fedbat.errors import ConfigError
from fedbat.experiment import Experiment, prepare
from fedbat.methods import METHODS, make_method
from fedbat.records import check_free, write_plan
from fedbat.settings import setting_names


def run(
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "fedbat",
    dataset: Dataset = "fmnist-mini",
    partition: Partition = "iid",
    clients: Clients = 100,
    per_round: PerRound = 10,
    rounds: Rounds = None,
    epochs: Epochs = 10,
    batch_size: BatchSize = 64,
    lr: LearningRate = 0.1,
    model: Model = None,
    beta: Beta = None,
    labels: Labels = None,
    samples: Samples = None,
    down: Down = FULL,
    average: Average = 0.0,
    seed: Seed = 0,
    partition_seed: PartitionSeed = 1234,
    settings: Settings = None,
    engine: EngineName = "auto",
    device: Device = None,
    precision: PrecisionName = "fp32",
    memory_budget: MemoryBudget = None,
    tensorboard: TensorBoardFolder = None,
    out: Out = None,
) -> None:
    """Run one method and record it.

    [bold]Examples[/]

      fedbat run --clients 20 --per-round 5 --rounds 10 --epochs 2

      fedbat run --method fedpaq --set bits=3 --dataset cifar10 --partition dirichlet

      fedbat run --dataset fmnist --set rho=4 --set bounds=off --out runs/rho4
    """
    experiment = Experiment(
        method=method,
        settings=dict(pair(text) for text in settings or []),
        dataset=dataset,
        partition=partition,
        clients=clients,
        per_round=per_round,
        rounds=rounds,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        model=model,
        beta=beta,
        labels=labels,
        samples=samples,
        down=down,
        average=average,
        seed=seed,
        partition_seed=partition_seed,
    )
    folder = out or _default_folder(f"{dataset}-{partition}-{method}")
    means = Means(engine, device, precision, num_bytes(memory_budget), tensorboard)
    check_free(folder)
    check_engine(engine, device, precision)
    federation = prepare(experiment)
    finished = execute(federation, folder, means)
    print_table({method: finished}, federation)
    say(f"recorded in {folder}")


def compare(
    methods: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(METHODS)}.")] = "fedavg,fedbat,signsgd",
    dataset: Dataset = "fmnist-mini",
    partition: Partition = "iid",
    clients: Clients = 100,
    per_round: PerRound = 10,
    rounds: Rounds = None,
    epochs: Epochs = 10,
    batch_size: BatchSize = 64,
    lr: LearningRate = 0.1,
    model: Model = None,
    beta: Beta = None,
    labels: Labels = None,
    samples: Samples = None,
    down: Down = FULL,
    average: Average = 0.0,
    seed: Seed = 0,
    partition_seed: PartitionSeed = 1234,
    settings: Settings = None,
    engine: EngineName = "auto",
    device: Device = None,
    precision: PrecisionName = "fp32",
    memory_budget: MemoryBudget = None,
    tensorboard: TensorBoardFolder = None,
    out: Out = None,
) -> None:
    """Run several methods on the same split, initial weights, sampled clients and batches: a table and a picture.

    A setting counts for every method that has it; [bold]--set fedbat.rho=4[/] for one alone.

    [bold]Examples[/]

      fedbat compare --clients 20 --per-round 5 --rounds 15 --epochs 2

      fedbat compare --methods fedavg,fedbat,ef-signsgd,zerofl --dataset fmnist --partition labels --out runs/labels
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f"--methods is {methods!r}, expected different names such as fedavg,fedbat")
    base = Experiment(
        dataset=dataset,
        partition=partition,
        clients=clients,
        per_round=per_round,
        rounds=rounds,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        model=model,
        beta=beta,
        labels=labels,
        samples=samples,
        down=down,
        average=average,
        seed=seed,
        partition_seed=partition_seed,
    )
    for name in names:
        make_method(name)  # so that an unknown name is the first thing to be told
    per_method = _settings_by_method(names, [pair(text) for text in settings or []])
    experiments = [dataclasses.replace(base, method=name, settings=per_method[name]) for name in names]
    folder = out or _default_folder(f"{dataset}-{partition}-compare")
    means = Means(engine, device, precision, num_bytes(memory_budget), tensorboard)
    check_free(folder)
    check_engine(engine, device, precision)
    federations = [prepare(experiment) for experiment in experiments]
    write_plan(folder, [federation.experiment for federation in federations])
    execute_all(federations, folder, means)


def _settings_by_method(names: list[str], pairs: list[tuple[str, str]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for key, value in pairs:
        method, dot, setting = key.rpartition(".")
        takers = [method] if dot else [name for name in names if setting in setting_names(METHODS[name])]
        if not takers or takers[0] not in found:
            raise ConfigError(f"--set {key}={value} fits none of the compared methods {', '.join(names)}")
        for taker in takers:
            found[taker][setting] = value
    return found


def _default_folder(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
