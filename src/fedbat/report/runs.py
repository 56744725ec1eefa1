"""Which runs there are, what tells them apart, and which belong together: those with the same clients."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from fedbat.data import DATASETS
from fedbat.downlink import FULL
from fedbat.errors import DataError
from fedbat.experiment import split_of, variant_of
from fedbat.figures import at_chance
from fedbat.lock import is_held
from fedbat.report.names import SPLIT, as_text, label_of, usual_values, varying
from fedbat.reproduce.record import Record, hashes, load_record
from fedbat.storage import DRAFT
from fedbat.units import count


@dataclass(frozen=True, eq=False)
class Run:
    """A run, finished or not, with at least one round."""

    name: str  # its folder, starting from the one that was asked for
    record: Record

    @cached_property
    def config(self) -> dict[str, Any]:
        """What was run, with defaults written out; as recorded, if this version does not know it."""
        try:
            return self.record.configuration
        except DataError:
            summary = self.record.summary
            return {**summary["config"], "settings": summary["method_settings"]}

    @property
    def variant(self) -> str:
        """The variant as in `Experiment`: fedbat rho=2 down=4."""
        return variant_of(self.config["method"], self.config["settings"], self.config.get("down", FULL))

    @property
    def unfinished(self) -> str | None:
        """How far the run has come, if rounds are missing: 12 of 100 rounds."""
        done, asked = len(self.record.lines), self.config["rounds"]
        return None if done >= asked else f"{done} of {asked} rounds"

    @property
    def status(self) -> str:
        """The recorded status, unless its process was killed and could not write how it ended."""
        status = str(self.record.summary.get("status"))
        if status != "running" or is_held(self.record.folder):
            return status
        return f"stopped after {len(self.record.lines)} of {count(self.config['rounds'], 'round')}"

    def late(self, model: str | None = None) -> float | None:
        """The mean accuracy in percent of the last ten rounds (the last of few), of this or another tested model."""
        if not self.record.lines:
            return None
        return self.record.last10 if model is None else self.record.last10_of(model)

    @property
    def at_chance(self) -> bool:
        """Whether not even the best round beats a guess; unknown, thus False, of a user's own data."""
        spec = DATASETS.get(self.config["dataset"])
        return spec is not None and at_chance(self.record.best / 100, spec.num_classes)

    @cached_property
    def edited(self) -> bool:
        """Whether its configuration or rounds are not those it was published with; runs without hashes were not."""
        summary = self.record.summary
        if not {"identity", "rounds_sha256"} & summary.keys():
            return False
        return any(summary.get(name, value) != value for name, value in hashes(summary, self.record.folder).items())

    @property
    def device(self) -> str | None:
        """What computed the run."""
        if not self.record.summary.get("engine"):
            return None
        return self.record.gpu or f"CPU, {self.record.summary['machine'].get('cpus')} cores"

    @property
    def precision(self) -> str | None:
        """The precision of the engine."""
        return (self.record.summary.get("engine") or {}).get("precision")


class Series(NamedTuple):
    """Runs that differ in nothing but their seeds: one curve."""

    label: str
    runs: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """Runs with the same clients, best methods first."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Any]:
        """What all runs share; for the rest, the first run's values."""
        return self.runs[0].config

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """The names of what differs between runs, apart from the method and its settings."""
        return varying(self.runs)

    @cached_property
    def usual(self) -> dict[str, str]:
        """What most runs have where they differ: labels tell the rest. The seed is always told."""
        return usual_values(self.runs, [name for name in self.varying if name != "seed"])

    @cached_property
    def labels(self) -> list[str]:
        """A different label for each run, as short as possible."""
        labels = [label_of(run, self.varying, self.usual) for run in self.runs]
        often = Counter(labels)
        pairs = zip(labels, self.runs, strict=True)
        return [label if often[label] == 1 else f"{label} ({run.name})" for label, run in pairs]

    @cached_property
    def series(self) -> list[Series]:
        """All runs, with seeds joined, best means first; if two of them have the same seed, all stay apart."""
        names = [name for name in self.varying if name != "seed"]
        found: dict[str, list[Series]] = {}
        for run, label in zip(self.runs, self.labels, strict=True):
            found.setdefault(label_of(run, names, self.usual), []).append(Series(label, (run,)))
        series = []
        for label, members in found.items():
            runs = tuple(run for member in members for run in member.runs)
            seeds = {run.config["seed"] for run in runs}
            series += [Series(label, runs)] if len(seeds) == len(runs) else members
        return sorted(series, key=lambda one: -fmean(run.record.best for run in one.runs))


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All runs in or below these folders, and a sentence for each that could not be read."""
    runs, faults, seen = [], [], set()
    for root in folders:
        found = [path.parent for path in sorted(root.rglob("summary.json")) if path.parent.suffix != DRAFT]
        if not found:
            what = "holds no run, nor does any folder below" if root.exists() else "does not exist"
            raise DataError(f"{root} {what}; name a folder made by `fedbat run` or `fedbat compare`")
        for folder in found:
            if (place := folder.resolve()) not in seen:
                seen.add(place)
                try:
                    runs.append(Run(_name(folder, root), _check(load_record(folder))))
                except DataError as error:
                    faults.append(str(error))
    return runs, faults


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by which client holds what; groups are ordered by data set, then split, then number of clients."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(as_text(run.config.get(name)) for name in SPLIT), []).append(run)
    found = [Group(tuple(_best_first(members))) for members in groups.values()]
    return sorted(found, key=lambda group: (group.config["dataset"], split_of(group.config), group.config["clients"]))


def _best_first(runs: Sequence[Run]) -> list[Run]:
    """Sort runs by the best run of their variant; its other seeds stay next to it."""
    best: dict[str, float] = {}
    for run in runs:
        best[run.variant] = max(run.record.best, best.get(run.variant, 0.0))
    return sorted(runs, key=lambda run: (-best[run.variant], run.variant, run.config["seed"], run.name))


def title_of(group: Group) -> str:
    """The data set, split and number of clients of all its runs."""
    return f"{group.config['dataset']}, {split_of(group.config)}, {count(group.config['clients'], 'client')}"


def _name(folder: Path, root: Path) -> str:
    """A run's name, which shows nothing above the folder that was asked for: pages are sent to others."""
    return str(Path(root.resolve().name) / folder.relative_to(root))


def _check(record: Record) -> Record:
    if not record.lines:
        raise DataError(f"{record.folder} has no round yet")
    return record
