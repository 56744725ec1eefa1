"""What the runs of a group take on a link to reach an accuracy that is the same for all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

from fedbat.figures import held_accuracy
from fedbat.link import Costs, Link, Times, costs_to, is_measured, mean_times, median_computing, price, usual_target
from fedbat.plots import LinkCurve
from fedbat.report.runs import Group, Run, title_of


@dataclass(frozen=True, eq=False)
class Priced:
    """One run on a link."""

    run: Run
    label: str
    times: list[Times]  # of each round
    costs: Costs | None  # to the target, if it was reached

    @property
    def best(self) -> float:
        """The best accuracy of what clients hold."""
        return max(map(held_accuracy, self.run.record.lines))

    @property
    def clock(self) -> str:
        """Where its clients' computing times come from."""
        measured = is_measured(self.run.record.lines)
        how = "measured client by client" if measured else "an equal share of the median round"
        return f"{how} on {self.run.device or 'an unknown machine'}"

    def as_json(self) -> dict[str, Any]:
        """The values to write to a file."""
        to_target = self.costs._asdict() if self.costs else None
        return {
            "run": self.label,
            "recorded_in": self.run.name,
            "unfinished": self.run.unfinished,
            "best_accuracy": self.best,
            "total_bytes_per_client_round": self.run.record.total_bytes,
            "to_target": to_target,
            "seconds_of_mean_round": mean_times(self.times)._asdict(),
        }


@dataclass(frozen=True, eq=False)
class PricedGroup:
    """Runs on the same clients and the same link."""

    group: Group
    link: Link  # with the seconds of computing, if they are the same for all
    target: float
    runs: list[Priced]  # those of the best methods first
    clock: str  # where the computing times come from

    @property
    def series(self) -> dict[str, list[Priced]]:
        """Runs by label; those that differ in nothing but their seeds are together."""
        priced = dict(zip(self.group.runs, self.runs, strict=True))
        return {label: [priced[run] for run in runs] for label, runs in self.group.series}

    def curves(self) -> dict[str, LinkCurve]:
        """Curves by label, each the mean of its seeds."""
        return {label: _mean_curve(seeds) for label, seeds in self.series.items()}

    def as_json(self) -> dict[str, Any]:
        """The values to write to a file."""
        runs = [priced.as_json() for priced in self.runs]
        return {
            "group": title_of(self.group),
            "link": str(self.link),
            "computing": self.clock,
            "target": self.target,
            "runs": runs,
        }


def price_group(group: Group, link: Link, target: float | None = None) -> PricedGroup:
    """Price the runs of a group. By default, the target is an accuracy that every run reaches, but for those that
    `misses` tells of, and all runs compute as long as the quickest: differences in measured times say more about what
    else the machine did than about methods.
    """
    given = link.seconds is not None
    if alike := not given and link.factor is None:
        link = replace(link, seconds=float(f"{min(median_computing(run.record.lines) for run in group.runs):.3g}"))
    if target is None:
        counted = [run for run in group.runs if not misses(run)] or group.runs
        target = usual_target(max(map(held_accuracy, run.record.lines)) for run in counted)
    runs = list(_priced(group, link, target))
    clocks = "; ".join(dict.fromkeys(run.clock for run in runs))
    clock = "as given" if given else f"the median client of the quickest run, {clocks}" if alike else clocks
    return PricedGroup(group, link, target, runs, clock)


def misses(run: Run) -> str | None:
    """Why the usual target does not heed a run, if so."""
    return run.unfinished or ("at chance" if run.at_chance else None)


def _priced(group: Group, link: Link, target: float) -> Iterable[Priced]:
    for run, label in zip(group.runs, group.labels, strict=True):
        times = price(run.record.lines, link)
        yield Priced(run, label, times, costs_to(target, run.record.lines, times))


def _mean_curve(seeds: Sequence[Priced]) -> LinkCurve:
    """The mean curve of runs: round by round, over those that have come that far."""
    lines = zip_longest(*(zip(map(held_accuracy, p.run.record.lines), p.times, strict=True) for p in seeds))
    rounds = [tuple(zip(*filter(None, line), strict=True)) for line in lines]
    notes = [f"{len(seeds)} seeds"] if len(seeds) > 1 else []
    notes += dict.fromkeys(priced.run.unfinished for priced in seeds if priced.run.unfinished)
    return LinkCurve(
        seeds[0].run.config["method"],
        [fmean(accuracies) for accuracies, _ in rounds],
        [mean_times(times) for _, times in rounds],
        f" ({', '.join(notes)})" if notes else "",
    )
