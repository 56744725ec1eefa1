"""`fedbat report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbat.cli.options import check_file, say
from fedbat.errors import DataError
from fedbat.storage import write_text
from fedbat.units import count, megabytes

if TYPE_CHECKING:
    from fedbat.report import Run


Folders = Annotated[list[Path], typer.Argument(help="Folders of runs, or any above them.", show_default=False)]


def report(
    runs: Folders,
    out: Annotated[Path, typer.Option(help="Page to write; an old one is replaced.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "Federated runs",
) -> None:
    """Put runs on one page to look at or to send: table, curves, the clients' labels, configurations.

    The page needs a browser and no network. Unfinished runs are shown as far as they have come.

    [bold]Examples[/]
    $ fedbat report runs/demo --out demo.html
    $ fedbat report results runs --title "FedBAT, reproduced"
    """
    check_file(out, ".html", ".htm")
    from fedbat.report import render

    found = readable_runs(runs)
    write_text(out, render(found, title))
    say(f"{count(len(found), 'run')} in {out}, {megabytes(out.stat().st_size)}")


def readable_runs(folders: Sequence[Path]) -> "list[Run]":
    """The runs in or below these folders; for each that is left out, the reason is printed."""
    from fedbat.report import find_runs

    found, faults = find_runs(folders)
    for fault in faults:
        say(f"left out: {fault}")
    for run in found:
        if run.edited:
            say(f"warning: {run.name} was edited after it was published: its hashes are not those of its contents")
    if not found:
        why = "none of the runs can be read" if faults else "no run has a finished round yet; wait for one"
        raise DataError(f"{', '.join(map(str, folders))}: {why}")
    return found
