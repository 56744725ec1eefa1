"""`fedbat run` and `fedbat compare`."""

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from fedbat.cli.options import (
    INTERRUPTED,
    BatchSize,
    Beta,
    Clients,
    Dataset,
    Device,
    EngineName,
    Epochs,
    Labels,
    LearningRate,
    Model,
    Out,
    Partition,
    PartitionSeed,
    PerRound,
    PrecisionName,
    Rounds,
    Seed,
    Settings,
    console,
    pair,
    say,
)
from fedbat.engine import check_engine, make_engine
from fedbat.engine.cuda import Precision
from fedbat.errors import ConfigError
from fedbat.experiment import Experiment, Federation, prepare
from fedbat.methods import METHODS, make_method
from fedbat.records import RunRecord, check_free, summarize
from fedbat.settings import setting_names
from fedbat.simulation import Round, initial_state, rounds
from fedbat.view import RunView, megabytes
from fedbat.wire import dense_upload_bytes


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
    seed: Seed = 0,
    partition_seed: PartitionSeed = 1234,
    settings: Settings = None,
    engine: EngineName = "auto",
    device: Device = None,
    precision: PrecisionName = "fp32",
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
        seed=seed,
        partition_seed=partition_seed,
    )
    folder = out or _default_folder(f"{dataset}-{partition}-{method}")
    check_free(folder)
    check_engine(engine, device, precision)
    federation = prepare(experiment)
    finished = execute(federation, folder, method, engine, device, precision)
    _print_table({method: finished}, federation)
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
    seed: Seed = 0,
    partition_seed: PartitionSeed = 1234,
    settings: Settings = None,
    engine: EngineName = "auto",
    device: Device = None,
    precision: PrecisionName = "fp32",
    out: Out = None,
) -> None:
    """Run several methods on the same split, initial weights, sampled clients and batches: a table and a picture.

    A setting counts for every method that has it; [bold]--set fedbat.rho=4[/] for one alone.

    [bold]Examples[/]

      fedbat compare --clients 20 --per-round 5 --rounds 15 --epochs 2

      fedbat compare --methods fedavg,fedbat,ef-signsgd,zerofl --dataset fmnist --partition labels --out runs/labels
    """
    from fedbat.plots import Curve, draw_comparison

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
        seed=seed,
        partition_seed=partition_seed,
    )
    for name in names:
        make_method(name)  # so that an unknown name is the first thing to be told
    per_method = _settings_by_method(names, [pair(text) for text in settings or []])
    experiments = [dataclasses.replace(base, method=name, settings=per_method[name]) for name in names]
    folder = out or _default_folder(f"{dataset}-{partition}-compare")
    check_free(folder)
    check_engine(engine, device, precision)
    federations = {experiment.method: prepare(experiment) for experiment in experiments}
    done: dict[str, list[Round]] = {}
    for name, federation in federations.items():
        done[name] = execute(federation, folder / name, name, engine, device, precision)
    _print_table(done, federation)
    picture = folder / "compare.png"
    curves = {name: Curve([r.accuracy for r in found], [r.uplink_bytes for r in found]) for name, found in done.items()}
    split = f"{partition}, {per_round} of {clients} clients a round, seed {seed}"
    draw_comparison(curves, f"{dataset}, {split}", picture)
    say(f"recorded in {folder}, picture in {picture}")


def execute(
    federation: Federation, folder: Path, label: str, engine_name: str, device: str | None, precision: str
) -> list[Round]:
    """Run with a live view and a record; Ctrl-C leaves the rounds done so far, recorded."""
    assert federation.experiment.rounds is not None
    engine, start = make_engine(federation, engine_name, device, cast(Precision, precision)), initial_state(federation)
    record = RunRecord(folder, federation, {"name": type(engine).__name__, "precision": precision})
    num_parameters = sum(p.numel() for p in federation.model.parameters())
    view = RunView(console, label, federation.experiment.rounds, federation.experiment.per_round, num_parameters)
    status, state = "failed", start
    try:
        with view:
            for round_, after in rounds(federation, engine, start, view.client):
                state = after
                record.add(round_)
                view.round(round_)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        where = f"recorded in {folder}" if record.rounds else "nothing recorded"
        say(f"interrupted after {len(record.rounds)} rounds, {where}")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        record.close(status, state)
    return record.rounds


def _print_table(done: dict[str, list[Round]], federation: Federation) -> None:
    table = Table(box=None, pad_edge=False)
    columns = ("method", "best", "last", "last 10", "uplink", "vs FedAvg", "bit/param", "seconds")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    dense = dense_upload_bytes(federation.layout)
    for name, found in done.items():
        s: dict[str, Any] = summarize(federation, found)
        table.add_row(
            name,
            *(f"{100 * s[key]:.2f} %" for key in ("best_accuracy", "final_accuracy", "last10_accuracy")),
            megabytes(sum(r.uplink_bytes for r in found)),
            f"{dense / s['uplink_bytes_per_client_round']:.1f}x less",
            f"{s['bits_per_parameter']:.3f}",
            f"{s['seconds']:.0f}",
        )
    console.print(table)


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
