"""`fedbat report`."""

from pathlib import Path
from typing import Annotated

import typer

from fedbat.cli.options import say
from fedbat.errors import ConfigError, DataError
from fedbat.storage import write_text
from fedbat.view import megabytes


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or any above them.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Page to write, or to write anew.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Of the page.")] = "Federated runs",
) -> None:
    """Put runs on one page to look at or to send: table, curves, the clients' labels, configurations.

    The page needs a browser and no network. Unfinished runs are shown as far as they are.

    [bold]Examples[/]

      fedbat report runs/demo --out demo.html

      fedbat report results runs --title "FedBAT on two data sets"
    """
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"--out {out}, expected a file that ends in .html")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist; create it or name another")
    from fedbat.report import find_runs, render

    found, faults = find_runs(runs)
    for fault in faults:
        say(f"left out: {fault}")
    if not found:
        raise DataError(f"{', '.join(map(str, runs))}: none of the runs has a whole round yet")
    write_text(out, render(found, title))
    say(f"{len(found)} runs in {out}, {megabytes(out.stat().st_size)}")
