"""What the commands share: their options, the console, and ways to print to it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedbat.data import DATASETS, PARTITIONS
from fedbat.downlink import DOWNLINKS
from fedbat.engine import ENGINES
from fedbat.errors import ConfigError
from fedbat.experiment import WEIGHTS
from fedbat.models import INITS, MODELS
from fedbat.tracking import writer_class

console = Console()

INTERRUPTED = 130  # what shells expect after Ctrl-C

_OR_YOUR_OWN = ", or your own as package.module:function."
Dataset = Annotated[str, typer.Option(help=f"One of {', '.join(DATASETS)}{_OR_YOUR_OWN}")]
Partition = Annotated[str, typer.Option(help=f"One of {', '.join(PARTITIONS)}{_OR_YOUR_OWN}")]
Clients = Annotated[int, typer.Option(help="Number of clients N.")]
PerRound = Annotated[int, typer.Option(help="Clients sampled in each round, K.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds R. Default: 100, for ResNets 200.", show_default=False)]
Epochs = Annotated[int, typer.Option(help="Local epochs E.")]
BatchSize = Annotated[int, typer.Option(help="Local batch size.")]
LearningRate = Annotated[float, typer.Option("--lr", help="Local learning rate of plain SGD.")]
Model = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(MODELS)}{_OR_YOUR_OWN} Default: the data set's."),
]
Init = Annotated[
    str | None,
    typer.Option(
        help=f"Initial weights, one of {', '.join(INITS)}. Default: normal (the authors'); own for a model of yours.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(help=f"How clients are weighted in the mean: by {' or '.join(WEIGHTS)} (as in the authors' code)."),
]
Beta = Annotated[
    float | None, typer.Option(help="Dirichlet concentration; smaller is more skewed. Default: 0.3, for cifar100 0.1.")
]
Labels = Annotated[
    int | None, typer.Option(help="Labels of a client in label partitions. Default: 3, for cifar100 10.")
]
Samples = Annotated[int | None, typer.Option(help="Samples of a client in virtual partitions. Default: 64.")]
_FOLLOW = "one-bit changes, for clients that keep a copy"


def _one_downlink(given: str) -> str:
    if "," in given:
        raise ConfigError(f"--down is {given!r}, expected one downlink; `fedbat compare --down {given}` runs several")
    return given


Down = Annotated[
    str,
    typer.Option(
        help=f"Bits per weight of the model sent to clients: {', '.join(DOWNLINKS)} ({_FOLLOW}).",
        callback=_one_downlink,
    ),
]
Downs = Annotated[
    str,
    typer.Option(
        "--down",
        help=f"Bits down, comma-separated, each run with every method: {', '.join(DOWNLINKS)} ({_FOLLOW}).",
    ),
]
Average = Annotated[
    float, typer.Option(help="Also keep a running average of the model, with this weight on the past, say 0.9. 0: off.")
]
Seed = Annotated[int, typer.Option(help="Seed of everything but the split.")]
PartitionSeed = Annotated[int, typer.Option(help="Seed of the split; 1234 is the authors'.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A method's hyper-parameter; see [bold]fedbat methods[/]."),
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar="FEDBAT_ENGINE",
        help=f"One of {', '.join(ENGINES)}; auto uses a GPU if there is one, else all cores.",
    ),
]
Device = Annotated[str | None, typer.Option(help="For the sequential engine: cpu or cuda.", show_default=False)]
PrecisionName = Annotated[str, typer.Option("--precision", help="Arithmetic of layers: fp32, bf16 or, on a GPU, tf32.")]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="RAM for client memories, say 2GB; the rest goes to disk. Default: half of the machine's."
    ),
]


def _with_tensorboard(folder: Path | None) -> Path | None:
    """Check, before anything is written, that TensorBoard is installed."""
    if folder is not None:
        writer_class()
    return folder


TensorBoardFolder = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        metavar="FOLDER",
        help="Log the run to this folder; view it with tensorboard --logdir FOLDER.",
        show_default=False,
        callback=_with_tensorboard,
    ),
]
LINK = typer.Option(
    "--link",
    metavar="up=10,down=50",
    help="Client connections in Mbit/s. Also latency=MS, compute=10x or SECONDS; or a .csv of client,up,down.",
    show_default=False,
)
Target = Annotated[
    float | None,
    typer.Option(
        help="Accuracy to reach on --link, say 0.85. Default: 99 % of the lowest of the runs' best accuracies.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="New folder for the record. Default: one under runs/.", show_default=False)
]


def num_bytes(text: str | None) -> float | None:
    """The number of bytes in a size such as 500MB or 2GB."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if not found:
        raise ConfigError(f"--memory-budget is {text!r}, expected a size such as 500MB or 2GB")
    return float(found[1]) * 10.0 ** (3 * " KMGT".index(found[2] or " "))


def say(text: str) -> None:
    """Print one line as it is."""
    console.print(escape(text), soft_wrap=True)


def new_table(label: str, *figures: str) -> Table:
    """A table with a column of names, which wrap if the window is narrow, and columns of figures, which do not."""
    table = Table(box=None, pad_edge=False)
    table.add_column(label, overflow="fold")
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table


def short_names(labels: Sequence[str]) -> dict[str, str]:
    """What tables call runs: a method of one's own without its module, if all names stay different."""
    short = {label: re.sub(r"^\S+:", "", label) for label in labels}
    return short if len(set(short.values())) == len(short) else dict(zip(labels, labels, strict=True))


def pairs(option: str, texts: list[str] | None, example: str) -> list[tuple[str, str]]:
    """The values of an option that takes NAME=VALUE, split into names and values."""
    found: list[tuple[str, str]] = []
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{option} {text!r}, expected NAME=VALUE such as {example}")
        if name.strip() in dict(found):
            raise ConfigError(f"{option} has {name.strip()} twice; give each name once")
        found.append((name.strip(), value.strip()))
    return found


def check_file(out: Path, *endings: str) -> None:
    """Refuse a path where no file with one of these endings can be written."""
    if out.suffix not in endings or out.is_dir():
        *most, last = endings
        expected = f"{', '.join(most)} or {last}" if most else last
        raise ConfigError(f"--out {out}, expected a file that ends in {expected}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist; create it or name another")
