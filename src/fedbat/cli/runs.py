"""`fedbat run` and `fedbat compare`."""

import dataclasses
import itertools
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedbat.cli.asking import asks_for_experiment
from fedbat.cli.execution import RunOptions, check_trackers, execute, execute_all
from fedbat.cli.options import LINK, Downs, Out, Settings, Target, pairs, say
from fedbat.cli.price import check_target, price_runs
from fedbat.cli.table import print_table
from fedbat.downlink import FULL
from fedbat.errors import ConfigError
from fedbat.experiment import Experiment, prepare
from fedbat.link import parse_link
from fedbat.lock import locked
from fedbat.methods import METHODS, make_method, method_kind
from fedbat.records import check_free, file_name, run_folders, write_plan
from fedbat.settings import setting_names

_NAMES = f"{', '.join(METHODS)}, or your own as package.module:Class"


@asks_for_experiment
def run(
    *,
    method: Annotated[str, typer.Option(help=f"One of {_NAMES}.")] = "fedbat",
    base: Experiment,
    settings: Settings = None,
    how: RunOptions,
    out: Out = None,
) -> None:
    """Run one method and record it.

    [bold]Examples[/]
    $ fedbat run --clients 20 --per-round 5 --rounds 10 --epochs 2
    $ fedbat run --method fedpaq --set bits=3 --dataset cifar10 --partition dirichlet
    $ fedbat run --dataset fmnist --set rho=4 --set bounds=off --out runs/rho4
    """
    experiment = dataclasses.replace(base, method=method, settings=dict(pairs("--set", settings, "rho=6")))
    folder = out or _default_folder(f"{base.dataset}-{base.partition}-{method}")
    check_free(folder)
    federation = prepare(experiment)
    finished = execute(federation, folder, how)
    print_table([(federation, finished)])
    say(f"recorded in {folder}")


@asks_for_experiment
def compare(
    *,
    methods: Annotated[
        str,
        typer.Option(
            help=f"Separated by commas, each with settings of its own if wanted (fedbat rho=4), of {_NAMES}. "
            "Where a setting has commas, separate by semicolons: 'fedavg; fedbat bounds=0.001,0.01'."
        ),
    ] = "fedavg,fedbat,signsgd",
    down: Downs = FULL,
    seeds: Annotated[
        str | None,
        typer.Option(help="Comma-separated, in place of --seed: each method with each of them.", show_default=False),
    ] = None,
    base: Experiment,
    settings: Settings = None,
    link: Annotated[str | None, LINK] = None,
    target: Target = None,
    how: RunOptions,
    out: Out = None,
) -> None:
    """Run several methods on the same split, initial weights, sampled clients and batches: a table and a picture.

    A setting applies to every method that has it; [bold]--set fedbat.rho=4[/] to one alone.
    With [bold]--seeds[/] the table has means and standard deviations, and the picture bands.

    With [bold]--link[/] also what the runs take on that connection to reach an accuracy;
    [bold]fedbat price[/] works that out for recorded runs.

    [bold]Examples[/]
    $ fedbat compare --clients 20 --per-round 5 --rounds 15 --epochs 2
    $ fedbat compare --methods fedavg,fedbat,ef-signsgd,zerofl --dataset fmnist --partition labels --out runs/labels
    $ fedbat compare --methods fedavg,fedbat --down 32,4 --rounds 15 --epochs 2 --link up=10,down=50
    $ fedbat compare --methods "fedavg,fedbat rho=2,fedbat rho=6" --seeds 0,1,2 --rounds 15 --epochs 2
    """
    downs, chosen = _listed("--down", down, "32,4"), _seeds(seeds, base.seed)
    variants = _variants(methods)
    names = list(dict.fromkeys(name for name, _ in variants))
    check_target(target, link)
    on = parse_link(link) if link is not None else None
    if on:
        on.check(base.clients)
    per_method = _settings_by_method(names, pairs("--set", settings, "rho=6"))
    experiments = [
        dataclasses.replace(base, method=name, settings=per_method[name] | own, down=width, seed=seed)
        for (name, own), width, seed in itertools.product(variants, downs, chosen)
    ]
    if twice := [name for name, often in Counter(run_folders(Path(), experiments)).items() if often > 1]:
        usual = [text for name, own in variants for text in _usual(name, own)]
        why = f"{', '.join(usual)} is the default" if usual else "by its settings"
        raise ConfigError(f"--methods has {twice[0]} twice: {why}; give each variant once")
    folder = out or _default_folder(f"{base.dataset}-{base.partition}-compare")
    check_free(folder)
    federations = [prepare(experiment) for experiment in experiments]
    check_trackers(federations, folder, how)
    with locked(folder):
        write_plan(folder, [federation.experiment for federation in federations], how.asked)
        execute_all(federations, folder, how)
    if on:
        price_runs([folder], on, target, folder)


def _listed(option: str, text: str, example: str, separator: str = ",") -> list[str]:
    found = [name.strip() for name in text.split(separator) if name.strip()]
    if len(set(found)) != len(found) or not found:
        raise ConfigError(f"{option} is {text!r}, expected different names such as {example}")
    return found


def _variants(text: str) -> list[tuple[str, dict[str, str]]]:
    """The methods, each with its own settings; an unknown one is reported before anything else."""
    separator = ";" if ";" in text else ","
    variants = [_variant(one, separator) for one in _listed("--methods", text, "fedavg,fedbat", separator)]
    for name, _ in variants:
        try:
            make_method(name)
        except ConfigError as error:
            if separator == "," and "=" in text:
                raise ConfigError(
                    f"{error}; if a setting has commas, end each variant by a semicolon: "
                    "--methods 'fedavg; fedbat bounds=0.001,0.01;'"
                ) from None
            raise
    return variants


def _usual(name: str, own: dict[str, str]) -> list[str]:
    """The settings that are at their defaults."""
    return [f"{key}={own[key]}" for key in own if Experiment(method=name, settings={key: own[key]}).variant == name]


def _variant(text: str, separator: str) -> tuple[str, dict[str, str]]:
    """Split a method from its own settings: fedbat rho=4."""
    name, *settings = text.split()
    if also := next((word for word in settings if word in METHODS), None):
        mark = "semicolons" if separator == ";" else "commas"
        raise ConfigError(f"--methods {text!r} has no separator before {also}; separate methods by {mark}")
    return name, dict(pairs("--methods", settings, "rho=6"))


def _seeds(text: str | None, usual: int) -> list[int]:
    if text is None:
        return [usual]
    if usual != Experiment.seed:
        raise ConfigError(f"--seeds {text} and --seed {usual} are both given, expected one of them; drop --seed")
    try:
        found = [int(seed) for seed in text.split(",")]
    except ValueError:
        found = []
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"--seeds is {text!r}, expected different whole numbers such as 0,1,2")
    return found


def _settings_by_method(names: list[str], settings: list[tuple[str, str]]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for key, value in settings:
        method, dot, setting = key.rpartition(".")
        takers = [method] if dot else [name for name in names if setting in setting_names(method_kind(name))]
        if not takers or takers[0] not in found:
            raise ConfigError(
                f"--set {key}={value} fits none of the compared methods {', '.join(names)}; see `fedbat methods`"
            )
        for taker in takers:
            found[taker][setting] = value
    return found


def _default_folder(name: str) -> Path:
    return Path("runs") / f"{file_name(name)}-{datetime.now():%Y%m%d-%H%M%S}"
