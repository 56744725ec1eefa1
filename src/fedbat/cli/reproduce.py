"""`fedbat reproduce`."""

import os
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedbat.cli.options import INTERRUPTED, Device, EngineName, PrecisionName, console, pairs, say
from fedbat.engine import check_engine
from fedbat.errors import ConfigError
from fedbat.reproduce.cells import Cell
from fedbat.reproduce.othercode import other_code, told
from fedbat.reproduce.protocol import PROTOCOL
from fedbat.reproduce.record import Record, Records
from fedbat.reproduce.sweep import Settings, sweep
from fedbat.reproduce.tables import ALL, KEYS, Book, load_book
from fedbat.reproduce.theory.record import file_name, run_trials
from fedbat.reproduce.theory.trials import Trial

_INDENT = " " * 6  # of the lines about a claim
_EXPERIMENTS, _RESULTS = "experiments", "results"  # the repository's, side by side


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A table, a figure, theory, or all.", show_default=False)] = None,
    list_: Annotated[
        bool,
        typer.Option(
            "--list", help="Show what there is and how much of it is done; with NAME its cells. Runs nothing."
        ),
    ] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write",
            help="Write RESULTS.md, CLAIMS.md, figures and the generated parts of docs/; for experiments of your own "
            "the pages and figures in the folder of their records.",
        ),
    ] = False,
    claims: Annotated[bool, typer.Option("--claims", help="Judge the paper's claims by the records.")] = False,
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds, comma-separated. Default: 0; for all, those in order.toml.", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help=f"Run only these: KEY is {', '.join(KEYS)} or what a file varies (down). May be repeated.",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Begin no cell that cannot end within so many minutes. Default: no limit.", show_default=False
        ),
    ] = None,
    protocol: Annotated[str, typer.Option(help="authors (their code) or text (the paper's words).")] = PROTOCOL,
    engine: EngineName = "auto",
    device: Device = None,
    precision: PrecisionName = "fp32",
    jobs: Annotated[int, typer.Option(help="Cells to run at once, each in a process of its own.")] = 1,
    experiments: Annotated[Path, typer.Option(help="Folder of the experiment files.")] = Path(_EXPERIMENTS),
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the records. Default: results; for --experiments grids, grids-results beside it.",
            show_default=False,
        ),
    ] = None,
    work: Annotated[Path, typer.Option(help="Folder of unfinished runs.")] = Path("runs/reproduce"),
) -> None:
    """Run the cells of a table or figure of the paper that have no record yet.

    May be stopped and started again at any time: a cell with a valid record
    is not run again, an unfinished one goes on from its last checkpoint.

    [bold]Examples[/]
    $ fedbat reproduce --list
    $ fedbat reproduce table1 --list --only dataset=svhn
    $ fedbat reproduce table1 --only dataset=fmnist --only clients=100 --seeds 0,1,2
    $ fedbat reproduce all --minutes 60 --engine cuda --precision bf16
    $ fedbat reproduce --claims
    $ fedbat reproduce --write
    """
    start = time.monotonic()
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}, expected a whole number of at least 1")
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"--minutes is {minutes:g}, expected more than 0; leave it out for no limit")
    if not (name or list_ or write or claims):
        raise ConfigError("nothing to do; name a table, or use --list, --claims or --write")
    if name is None and (seeds or only or minutes is not None):
        raise ConfigError("--seeds, --only and --minutes choose what is run; name a table or a figure, or all")
    book, results = load_book(experiments, protocol), results or _usual_results(experiments)
    if name is not None:
        chosen = (name, _seeds(seeds), dict(pairs("--only", only, "dataset=fmnist")))
        cells, trials = book.cells(*chosen), book.trials(*chosen)
    if name is not None and not list_:
        check_engine(engine, device, precision)
        deadline = float("inf") if minutes is None else start + 60 * minutes
        settings = Settings(results, work, engine, device, precision, jobs, deadline)
        status = _sweep(cells, settings) if cells else 0
        if trials and status != INTERRUPTED:
            run_trials(trials, results, say, deadline)
        if cells and status != INTERRUPTED:
            _say_other_code(_of_cells(cells, Records.load(results)), results)
        if status:
            raise typer.Exit(status)
    if list_ and name is None:
        _print_list(book, records := Records.load(results))
        _say_other_code(records, results)
    elif list_:
        _print_cells(cells, trials, records := Records.load(results))
        _say_other_code(_of_cells(cells, records), results)
    if claims:
        _print_claims(book, Records.load(results))
    if write:
        _write(book, Records.load(results), results)


def _sweep(cells: list[Cell], settings: Settings) -> int:
    """Run the cells; returns the exit status."""
    try:
        return 1 if sweep(cells, settings, say).failed else 0
    except KeyboardInterrupt:
        say("interrupted; the same command goes on from here")
        return INTERRUPTED


def _write(book: Book, records: Records, results: Path) -> None:
    from fedbat.reproduce.claims import has_claims
    from fedbat.reproduce.evidence import page_name, render_evidence
    from fedbat.reproduce.figures import draw_figures
    from fedbat.reproduce.report import render
    from fedbat.reproduce.results import Results

    shown = Results(book, records)
    suffix = book.protocol.suffix
    place = results.parent if _are_the_repositorys(book.folder, results) else results
    page, figures = place / f"RESULTS{suffix}.md", results / f"figures{suffix}"
    drawn = draw_figures(book, records, figures)
    page.write_text(render(book, records, figures.relative_to(place), results.resolve().name))
    if has_claims(book.folder):
        (results / page_name(book)).write_text(render_evidence(book, records, os.path.relpath(page, results)))
    _say_faults(records)
    say(f"{len(shown.records) + len(shown.trials)} records in {page}, {len(drawn)} pictures in {figures}")
    if book.protocol.name == PROTOCOL and place != results:
        _fill_pages(book, records, results)


def _usual_results(experiments: Path) -> Path:
    """Where records go unless told otherwise: own experiments never write among the committed records of a clone."""
    name = experiments.resolve().name
    return experiments.parent / (_RESULTS if name == _EXPERIMENTS else f"{name}-results")


def _are_the_repositorys(experiments: Path, results: Path) -> bool:
    """Whether these two folders are laid out as in a clone, which has the page about them and docs/ beside them."""
    root = experiments.resolve().parent
    return (experiments.resolve(), results.resolve()) == (root / _EXPERIMENTS, root / _RESULTS)


def _fill_pages(book: Book, records: Records, results: Path) -> None:
    """Fill in what pages in docs/ say about the records."""
    from fedbat.reproduce.blocks import block_names, fill
    from fedbat.reproduce.choosing.choices import has_choices
    from fedbat.reproduce.choosing.page import blocks

    if not has_choices(book):
        return
    pages = {path: path.read_text() for path in sorted((results.parent / "docs").glob("*.md"))}
    pages = {path: text for path, text in pages.items() if block_names(text)}
    made = blocks(book, records, results) if pages else {}
    for path, text in pages.items():
        path.write_text(fill(text, made))
    if pages:
        say(f"blocks in {', '.join(map(str, pages))}")


def _print_list(book: Book, records: Records) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "cells", "done", "what"):
        table.add_column(column, justify="right" if column in ("cells", "done") else "left", no_wrap=column != "what")
    titles = {name: found.title for name, found in book.tables.items()}
    if book.order:
        titles[ALL] = "Everything, with the seeds of order.toml; tables share cells"
    for name, title in titles.items():
        cells, trials = book.cells(name, None, {}), book.trials(name, None, {})
        table.add_row(name, str(len(cells) + len(trials)), str(_num_done(cells, trials, records)), title)
    console.print(table)
    _say_faults(records)


def _print_cells(cells: Sequence[Cell], trials: Sequence[Trial], records: Records) -> None:
    for cell in cells:
        record, fault = records.get(cell.identity), records.faults.get(cell.folder)
        if record is None:
            say(f"{cell.folder}: not run yet" + (f"; {fault}" if fault else ""))
        else:
            by = f", by other code of {', '.join(modules)}" if (modules := other_code(record)) else ""
            say(f"{cell.folder}: best {record.best:.2f} %{by}")
    for trial in trials:
        say(f"{file_name(trial)}: {'done' if trial in records.trials else 'not run yet'}")
    say(f"{_num_done(cells, trials, records)} of {len(cells) + len(trials)} done")


def _of_cells(cells: Sequence[Cell], records: Records) -> list[Record]:
    return [record for cell in cells if (record := records.get(cell.identity))]


def _say_faults(records: Records) -> None:
    for fault in records.faults.values():
        say(f"left out: {fault}")


def _say_other_code(found: Iterable[Record], results: Path) -> None:
    if sentence := told(found, results):
        say(sentence)


def _num_done(cells: Sequence[Cell], trials: Sequence[Trial], records: Records) -> int:
    return sum(records.get(cell.identity) is not None for cell in cells) + len(records.trials.keys() & set(trials))


def _print_claims(book: Book, records: Records) -> None:
    from fedbat.reproduce.claims import Verdict, judge_all
    from fedbat.reproduce.verdicts import claim_lines

    findings, counts = judge_all(book, records), list[str]()
    for verdict in Verdict:
        found = [finding for finding in findings if finding.verdict == verdict]
        if found:
            console.print(f"[bold]{verdict}[/] ({len(found)})")
            counts.append(f"{len(found)} {verdict}")
        for finding in found:
            head, *rest = claim_lines(finding)
            say(f"  {head}")
            for line in rest:
                say(_indented(line))
    say(", ".join(counts))


def _indented(line: str) -> str:
    return textwrap.fill(line, console.width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)


def _seeds(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds is {text!r}, expected whole numbers such as 0,1,2") from None
