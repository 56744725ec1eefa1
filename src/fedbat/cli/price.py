"""`fedbat price`, and what `fedbat compare --link` adds to a comparison's output."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedbat.cli.options import LINK, Target, console, new_table, say, short_names
from fedbat.cli.report import Folders, readable_runs
from fedbat.errors import ConfigError
from fedbat.link import Link, mean_times, parse_link
from fedbat.storage import make_folder, write_text
from fedbat.units import megabytes

if TYPE_CHECKING:
    from fedbat.report import Priced, PricedGroup

_FAR = 10.0  # points: if the best run is further above the usual target, that says little about the good runs


def price(
    runs: Folders,
    link: Annotated[str, LINK],
    target: Target = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for link.json and link.png. Default: neither is written.", show_default=False),
    ] = None,
) -> None:
    """Work out what recorded runs take on a connection: rounds, bytes and seconds to an accuracy. Nothing is run again.

    [bold]Examples[/]
    $ fedbat price runs/demo --link up=10,down=50,latency=40
    $ fedbat price results/fmnist --link up=2,down=10,compute=5 --target 0.88 --out slow
    $ fedbat price runs/demo --link rates.csv,compute=30
    """
    check_target(target, link)
    if out is not None and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file, expected a folder; name another")
    price_runs(runs, parse_link(link), target, out)


def check_target(target: float | None, link: str | None) -> None:
    """Refuse a target that is not an accuracy, or has no link to go with it."""
    if target is not None and link is None:
        raise ConfigError(f"--target is {target} but there is no --link to reach it on; add --link up=10,down=50")
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target is {target}, expected an accuracy above 0 and up to 1, such as 0.85")


def price_runs(folders: Sequence[Path], link: Link, target: float | None, out: Path | None) -> None:
    """Print tables to the terminal; with a folder `out`, also write a file and a picture there."""
    from fedbat.plots import LinkRow, draw_link
    from fedbat.report import group_runs, price_group, title_of

    groups = [price_group(group, link, target) for group in group_runs(readable_runs(folders))]
    if out is not None:
        make_folder(out)
    for priced in groups:
        _print(priced, title_of(priced.group), link, target is None)
    if out is None:
        return
    rows = [
        LinkRow(f"{title_of(priced.group)}; {priced.link.computing}", priced.target, priced.curves())
        for priced in groups
    ]
    draw_link(rows, link.rates, out / "link.png")
    told = {"rates": link.rates, "groups": [priced.as_json() for priced in groups]}
    write_text(out / "link.json", json.dumps(told, indent=2) + "\n")
    say(f"on the link: {out / 'link.json'}, picture in {out / 'link.png'}")


def _print(priced: "PricedGroup", title: str, link: Link, usual: bool) -> None:
    """Print a group's table: rounds, traffic and time to the target; the rest describes the mean round."""
    why = " (99 % of the lowest best; --target sets another)" if usual else ""
    say(f"\n{title}: {priced.link}")
    if link.factor is not None and len(devices := {run.run.device or "an unknown machine" for run in priced.runs}) > 1:
        console.print(
            f"[yellow]warning:[/] compute={link.factor:g}x multiplies what each machine measured, and these runs are "
            f"of {' and '.join(sorted(map(escape, devices)))}; give compute=SECONDS",
            soft_wrap=True,
            highlight=False,
        )
    say(f"rounds, traffic, time: until {100 * priced.target:.2f} % accuracy{why}; the rest: a mean round, in seconds")
    _print_table(priced)
    if usual:
        _print_missed(priced)
    best = 100 * max(run.best for run in priced.runs)
    if usual and best - 100 * priced.target > _FAR:
        nearer = math.floor(0.99 * best) / 100
        say(f"the best run has {best:.2f} %; --target {nearer:.2f} compares those that come near it")
    if not any(run.costs for run in priced.runs):
        say(f"none reaches {100 * priced.target:.2f} %, the best has {best:.2f} %; lower --target")
    if link.seconds is None:
        other = "" if link.factor is not None else ", compute=1x takes each client's as measured"
        say(f"computing: {priced.clock}; compute=SECONDS sets that of your clients{other}")


def _print_table(priced: "PricedGroup") -> None:
    """Print a row for each run, or for several that differ only in their seeds; long paths follow below."""
    parts = [part for part in _PARTS if part != "computing" or priced.link.seconds is None]  # else the title tells it
    several = len(priced.series) < len(priced.runs)
    costs = ("rounds", "traffic", "time", *(_PARTS[part] for part in parts))
    table = new_table("run", *(["n"] if several else []), "best %", *costs)
    names, paths = short_names(list(priced.series)), []
    for label, seeds in priced.series.items():
        notes = list(dict.fromkeys(run.run.unfinished for run in seeds if run.run.unfinished))
        name = names[label]
        if name.endswith(path := f" ({seeds[0].run.name})"):  # twins
            paths.append(seeds[0].run.name)
            name = f"{name.removesuffix(path)} #{len(paths)}"
        bests = [100 * run.best for run in seeds]
        spread = f" ± {stdev(bests):.2f}" if len(bests) > 1 else ""
        mean = mean_times([mean_times(run.times) for run in seeds])
        seconds = (getattr(mean, part) for part in parts)
        figures = (f"{value:.3g}" if value > 0.1 else f"{value:.3f}" for value in seconds)
        note = f"({', '.join(notes)})".replace(" ", "\N{NO-BREAK SPACE}")  # it wraps as a whole
        label = escape(f"{name} {note}" if notes else name)
        counted = [str(len(seeds))] if several else []
        table.add_row(label, *counted, f"{fmean(bests):.2f}{spread}", *_costs(seeds), *figures)
    console.print(table)
    for number, path in enumerate(paths, start=1):
        say(f"#{number}: {path}")
    if several:
        say("n seeds: their means ± standard deviation; a dash where one of them does not reach the accuracy")


_PARTS = {"total": "round", "down": "down", "computing": "compute", "up": "up"}


def _costs(seeds: "Sequence[Priced]") -> tuple[str, ...]:
    """What it took to reach the target, in the mean; dashes if one does not."""
    costs = [run.costs for run in seeds if run.costs]
    if len(costs) < len(seeds):
        return ("–",) * 3
    rounds, num_bytes, seconds = map(fmean, zip(*costs, strict=True))
    return f"{rounds:.0f}", megabytes(num_bytes), _seconds(seconds)


def _print_missed(priced: "PricedGroup") -> None:
    """Name the runs that the usual target does not heed."""
    from fedbat.report import misses

    missed = [f"{run.label} ({why})" for run in priced.runs if (why := misses(run.run))]
    if len(missed) == len(priced.runs):
        say("no run is finished and above chance: the target says little")
    elif missed:
        say(f"the target does not heed {', '.join(missed)}")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
