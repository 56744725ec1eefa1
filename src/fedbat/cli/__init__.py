"""The command line: parse, call, print."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError

from fedbat.cli.listing import data_list, data_show, methods
from fedbat.cli.options import console
from fedbat.cli.price import price
from fedbat.cli.report import report
from fedbat.cli.reproduce import reproduce
from fedbat.cli.resume import resume
from fedbat.cli.runs import compare, run
from fedbat.errors import ConfigError, DataError, FedbatError
from fedbat.provenance import package_version

# System errors that concern the user's folders and disks rather than a model's code.
_STORAGE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
}

app = typer.Typer(
    help="Federated learning that sends one bit per weight.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets and who holds which part of them.", no_args_is_help=True)
for command in (run, compare, resume, price, report, methods, reproduce):
    app.command()(command)
app.add_typer(data_app, name="data")
data_app.command("list")(data_list)
data_app.command("show")(data_show)


def main() -> None:
    """Entry point: the user's mistakes end in one sentence, not in a traceback."""
    sys.path.insert(0, os.getcwd())  # so that --model finds a module in the current folder
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's way of saying Ctrl-C: what is done is kept
    with _one_sentence_errors():
        app()


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    try:
        yield
    except FedbatError as error:
        _print_error(str(error))
        sys.exit(2 if isinstance(error, ConfigError | DataError) else 1)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in _STORAGE:
            raise
        _print_error(f"{error}; make room or name another place, and go on with a run by `fedbat resume FOLDER`")
        sys.exit(1)


def _print_error(text: str) -> None:
    Console(stderr=True).print(f"[red]error:[/] {escape(text)}", soft_wrap=True, highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fedbat {package_version()}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning that sends one bit per weight."""
