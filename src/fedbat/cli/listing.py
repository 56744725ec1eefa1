"""`fedbat methods`, `fedbat data list` and `fedbat data show`."""

import inspect
import itertools
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import nn

from fedbat.cli.options import (
    Beta,
    Clients,
    Dataset,
    Labels,
    Partition,
    PartitionSeed,
    Samples,
    check_file,
    console,
    say,
)
from fedbat.data import DATASETS
from fedbat.data.counts import count_labels
from fedbat.data.files import missing_folder
from fedbat.experiment import Experiment, prepare
from fedbat.method import Method
from fedbat.methods import METHODS, make_method
from fedbat.settings import setting_names, settings_of
from fedbat.training import LocalTraining
from fedbat.units import count


def methods(
    name: Annotated[str | None, typer.Argument(help="A method to explain. Default: all are listed.")] = None,
) -> None:
    """List the methods, what they send, and the names of their settings; or explain one of them.

    [bold]Example[/]
    $ fedbat methods fedbat
    """
    if name is not None:
        return _explain(type(make_method(name)))
    table = Table(box=None, pad_edge=False)
    for column in ("method", "bits", "what it does", "--set"):
        table.add_column(column, no_wrap=column == "method", justify="right" if column == "bits" else "left")
    for name, kind in METHODS.items():
        table.add_row(name, f"{_bits(kind()):.2g}", escape(_gist(kind)), " ".join(setting_names(kind)))
    console.print(table)
    say("bits: sent up for each weight, at the default settings; `fedbat methods NAME` explains one and its settings")


def _explain(kind: type[Method]) -> None:
    """Print what a method's file (or class, if it is the user's own) says before the details, and its settings."""
    told = inspect.getmodule(kind) if kind in METHODS.values() else kind
    paragraphs = (inspect.getdoc(told) or "").split("\n\n")
    for paragraph in itertools.takewhile(lambda text: "\n- " not in text, paragraphs):
        console.print(escape(" ".join(paragraph.split())), "", sep="\n", highlight=False)
    settings = settings_of(kind)
    if not settings:
        return say("It has no settings.")
    table = Table(box=None, pad_edge=False)
    for column in ("--set", "default", "values", "meaning"):
        table.add_column(column, no_wrap=column in ("--set", "default"))
    for setting in settings:
        table.add_row(*map(escape, setting))
    console.print(table)


def data_list() -> None:
    """List the data sets and where they were found."""
    table = Table(box=None, pad_edge=False)
    for column in ("data set", "train", "test", "classes", "model", "here"):
        table.add_column(column, justify="right" if column in ("train", "test", "classes") else "left")
    folders: dict[str, Path] = {}
    for name, spec in DATASETS.items():
        if found := spec.source.locate(None):
            folders[name] = next(iter(found.values())).parent
        here = "yes" if found else "downloaded when first used"
        sizes = (f"{spec.num_train:,}", f"{spec.num_test:,}", str(spec.num_classes))
        table.add_row(name, *sizes, spec.default_model, here)
    console.print(table)
    if missing := missing_folder():
        say(f"$FEDBAT_DATA is {missing}, which is not a folder; create it or name another")
    for name, folder in folders.items():  # paths stay whole, so that they can be copied
        say(f"{name}: {folder}")


def data_show(
    dataset: Dataset = "fmnist-mini",
    partition: Partition = "dirichlet",
    clients: Clients = 100,
    beta: Beta = None,
    labels: Labels = None,
    samples: Samples = None,
    partition_seed: PartitionSeed = 1234,
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg, .pdf).")] = Path("partition.png"),
) -> None:
    """Draw how many samples of each class every client holds.

    [bold]Example[/]
    $ fedbat data show --partition labels --clients 20 --out labels.png
    """
    from fedbat.plots.partition import draw_partition  # matplotlib is slow to import

    check_file(out, ".png", ".svg", ".pdf")
    experiment = Experiment(
        dataset=dataset,
        partition=partition,
        clients=clients,
        per_round=1,
        beta=beta,
        labels=labels,
        samples=samples,
        partition_seed=partition_seed,
    )
    federation = prepare(experiment)
    data = federation.data
    counts = count_labels(federation.split, data.y_train.numpy(), data.spec.num_classes)
    shown = len(counts)
    title = count(clients, "client") if shown == clients else f"the first {shown:,} of {clients:,} clients"
    draw_partition(counts, f"{dataset}, {federation.experiment.split}, {title}", out)
    say(f"picture in {out}")


def _bits(method: Method) -> float:
    """The size of an upload of one layer, for each weight."""
    layer = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with LocalTraining(method, layer, optimizer, 1, memory={}) as local:
        layer(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        return local.finish().payload.nbits / layer.weight.numel()


def _gist(kind: type) -> str:
    """The first line of its docstring, up to the formula."""
    return (kind.__doc__ or "").strip().splitlines()[0].partition(": ")[0].rstrip(".")
