"""The command line: parse, call, print."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbat.data import DATASETS, PARTITIONS, draw_partition
from fedbat.engine import ENGINES, check_engine, make_engine
from fedbat.engine.cuda import Precision
from fedbat.errors import ConfigError, DataError, FedbatError
from fedbat.experiment import Experiment, Federation, prepare
from fedbat.methods import METHODS, make_method
from fedbat.models import MODELS
from fedbat.records import RunRecord, check_free, package_version, summarize
from fedbat.settings import setting_names, show
from fedbat.simulation import Round, initial_state, rounds
from fedbat.view import RunView, megabytes
from fedbat.wire import dense_upload_bytes

app = typer.Typer(
    help="Federated learning that sends one bit per weight.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets and who holds which part of them.", no_args_is_help=True)
app.add_typer(data_app, name="data")
console = Console()

_INTERRUPTED = 130  # what shells expect after Ctrl-C

Dataset = Annotated[str, typer.Option(help=f"One of {', '.join(DATASETS)}.")]
Partition = Annotated[str, typer.Option(help=f"One of {', '.join(PARTITIONS)}.")]
Clients = Annotated[int, typer.Option(help="Number of clients N.")]
PerRound = Annotated[int, typer.Option(help="Clients sampled in each round, K.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds R. Default: 100, for ResNets 200.", show_default=False)]
Epochs = Annotated[int, typer.Option(help="Local epochs E.")]
BatchSize = Annotated[int, typer.Option(help="Local batch size.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Local learning rate of plain SGD.")]
Model = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(MODELS)}, or your own as package.module:function. Default: the data set's."),
]
Beta = Annotated[float | None, typer.Option(help="Of the Dirichlet partition. Default: 0.3, for cifar100 0.1.")]
Labels = Annotated[int | None, typer.Option(help="Per client, in label partitions. Default: 3, for cifar100 10.")]
Seed = Annotated[int, typer.Option(help="Of everything but the split.")]
PartitionSeed = Annotated[int, typer.Option(help="Of the split; 1234 is the authors'.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A method's hyper-parameter; see [bold]fedbat methods[/]."),
]
EngineName = Annotated[str, typer.Option("--engine", help=f"One of {', '.join(ENGINES)}; auto takes a GPU if any.")]
Device = Annotated[str | None, typer.Option(help="For the sequential engine: cpu or cuda.", show_default=False)]
PrecisionName = Annotated[str, typer.Option("--precision", help="Of the cuda engine: fp32, tf32 or bf16.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write, new. Default: under runs/.", show_default=False)]


@app.command()
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
        settings=dict(_pair(text) for text in settings or []),
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
    _say(f"recorded in {folder}")


@app.command()
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
    per_method = _settings_by_method(names, [_pair(text) for text in settings or []])
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
    _say(f"recorded in {folder}, picture in {picture}")


@app.command()
def methods() -> None:
    """List the methods, what they send, and their hyper-parameters."""
    table = Table(box=None, pad_edge=False)
    for column in ("method", "what it does", "--set"):
        table.add_column(column, no_wrap=column == "method")
    for name, kind in METHODS.items():
        defaults = (f"{field.name}={show(field.default)}" for field in dataclasses.fields(kind))
        table.add_row(name, escape(_first_line(kind)), " ".join(defaults))
    console.print(table)


@data_app.command("list")
def data_list() -> None:
    """List the data sets and where they were found."""
    table = Table(box=None, pad_edge=False)
    for column in ("data set", "train", "test", "classes", "model", "found"):
        right = column in ("train", "test", "classes")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for name, spec in DATASETS.items():
        found = spec.source.locate(None)
        where = "downloaded when first used" if found is None else str(next(iter(found.values())).parent)
        table.add_row(
            name,
            f"{spec.num_train:,}",
            f"{spec.num_test:,}",
            str(spec.num_classes),
            spec.default_model,
            where,
        )
    console.print(table)


@data_app.command("show")
def data_show(
    dataset: Dataset = "fmnist-mini",
    partition: Partition = "dirichlet",
    clients: Clients = 100,
    beta: Beta = None,
    labels: Labels = None,
    partition_seed: PartitionSeed = 1234,
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg, .pdf).")] = Path("partition.png"),
) -> None:
    """Draw how many samples of each class every client holds.

    [bold]Example[/]

      fedbat data show --partition labels --clients 20 --out labels.png
    """
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist; create it or name another")
    if out.suffix not in (".png", ".svg", ".pdf") or out.is_dir():
        raise ConfigError(f"--out {out}, expected a file that ends in .png, .svg or .pdf")
    experiment = Experiment(
        dataset=dataset,
        partition=partition,
        clients=clients,
        per_round=1,
        beta=beta,
        labels=labels,
        partition_seed=partition_seed,
    )
    federation = prepare(experiment)
    labels_, classes = federation.data.y_train.numpy(), federation.data.spec.num_classes
    counts = np.stack([np.bincount(labels_[index], minlength=classes) for index in federation.split])
    draw_partition(counts, f"{dataset}, {partition}, {clients} clients", out)
    _say(f"picture in {out}")


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
        _say(f"interrupted after {len(record.rounds)} rounds, {where}")
        raise typer.Exit(_INTERRUPTED) from None
    finally:
        record.close(status, state)
    return record.rounds


def main() -> None:
    """Entry point: the user's mistakes end in one sentence, not in a traceback."""
    sys.path.insert(0, os.getcwd())  # so that --model finds a module of the folder one works in
    with _one_sentence_errors():
        app()


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    try:
        yield
    except FedbatError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2 if isinstance(error, ConfigError | DataError) else 1)


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


def _say(text: str) -> None:
    console.print(escape(text), soft_wrap=True)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {text!r}, expected NAME=VALUE such as rho=6")
    return name.strip(), value.strip()


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


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fedbat {package_version()}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Federated learning that sends one bit per weight."""
