"""Records of trials: one small JSON file each, looked up by what was run."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedbat.errors import ConfigError
from fedbat.provenance import provenance
from fedbat.reproduce.cells import identity
from fedbat.reproduce.estimates import Estimate, own_spread
from fedbat.reproduce.theory.theorems import Floats
from fedbat.reproduce.theory.trials import PROBLEMS, Problem, Trial
from fedbat.storage import write_text

FOLDER = "theory"  # below the results
_DIGITS = 6
_LONGEST = 30.0  # seconds: no trial takes more, unless the machine is very slow


@dataclass(frozen=True, eq=False)
class TrialRecord:
    """A trial as it was written down."""

    trial: Trial
    times: Floats
    values: Floats  # [times, seeds]
    constants: dict[str, float]
    facts: dict[str, Any]  # seconds, versions, machine

    @cached_property
    def problem(self) -> Problem:
        """The toy and its theorem."""
        return PROBLEMS[self.trial.problem](self.trial)

    @property
    def bound(self) -> Floats:
        """The theorem's bound at all times."""
        return self.problem.bound(self.times, self.constants)

    @property
    def mean(self) -> Floats:
        """The mean over the runs at all times."""
        return np.asarray(self.values.mean(1))

    def slope(self) -> Estimate:
        """The slope of log value against log time, fitted to each run."""
        late = np.log10(self.times[-1] / self.times) < self.problem.decades
        return _over_seeds(np.polyfit(np.log(self.times[late]), np.log(self.values[late]), 1)[0])

    def constant(self, until: float = math.inf) -> Estimate:
        """The c of c / time^rate: each run's mean over the last octave, or over the octave that ends at `until`."""
        end = min(until, self.times[-1])
        octave = (self.times > end / 2) & (self.times <= end)
        return _over_seeds((self.times[octave, None] ** self.problem.rate * self.values[octave]).mean(0))

    def bound_constant(self) -> float:
        """The same constant of the bound, at the end."""
        return float(self.times[-1] ** self.problem.rate * self.bound[-1])

    def share(self) -> Estimate:
        """The share of the bound that is used up, at the time when that is largest."""
        nearest = int(np.argmax(self.mean / self.bound))
        return _over_seeds(self.values[nearest] / self.bound[nearest])


def run_trial(trial: Trial) -> TrialRecord:
    """Train and measure a trial on this machine's CPU."""
    start = time.perf_counter()
    measured = PROBLEMS[trial.problem](trial).measure()
    facts = {"device": "cpu", "seconds": round(time.perf_counter() - start, 2), **provenance()}
    return TrialRecord(trial, *measured, facts)


def run_trials(
    trials: Sequence[Trial], results: Path, say: Callable[[str], None], deadline: float = math.inf
) -> list[TrialRecord]:
    """Run the trials that have no record yet and can end before the deadline; returns the new records."""
    known, run = {record.trial for record in load_trial_records(results)}, []
    for trial in trials:
        if trial not in known and time.monotonic() + _LONGEST < deadline:
            record = run_trial(trial)
            write_record(record, results)
            run.append(record)
            say(f"{file_name(trial)}: slope {record.slope().value:.2f}, {record.facts['seconds']:.0f} s")
    left = sum(trial not in known for trial in trials) - len(run)
    say(f"{len(trials) - left - len(run)} trials done before, {len(run)} run, {left} left")
    return run


def file_name(trial: Trial) -> str:
    """The name of a trial's file; different for different configurations."""
    words = (trial.problem, trial.sampled, "of", trial.clients, trial.compress)
    return "-".join(map(str, (*words, identity(dataclasses.asdict(trial))[:8]))) + ".json"


def write_record(record: TrialRecord, results: Path) -> None:
    """Write a record, one line for each part; the file appears complete or not at all."""
    parts = {
        "trial": dataclasses.asdict(record.trial),
        "identity": identity(dataclasses.asdict(record.trial)),
        **record.facts,
        "constants": {name: _cut(value) for name, value in record.constants.items()},
        "times": record.times.tolist(),
        "values": [[_cut(value) for value in row] for row in record.values.tolist()],
    }
    path = results / FOLDER / file_name(record.trial)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f'"{name}": {json.dumps(part, allow_nan=False)}' for name, part in parts.items())
    write_text(path, f"{{\n{lines}\n}}\n")


def load_trial_records(results: Path) -> tuple[TrialRecord, ...]:
    """All whole records; one that is not whole, or not what its identity says, has to be run again."""
    found = (_load(path) for path in sorted((results / FOLDER).glob("*.json")))
    return tuple(record for record in found if record is not None)


def _load(path: Path) -> TrialRecord | None:
    try:
        parts = json.loads(path.read_text())
        trial = Trial(**parts.pop("trial"))
        times, values = (np.array(parts.pop(name), dtype=float) for name in ("times", "values"))
        same = parts.pop("identity") == identity(dataclasses.asdict(trial))
        whole = times.shape == (len(trial.rounds),) and values.shape == (len(times), trial.seeds)
        return TrialRecord(trial, times, values, parts.pop("constants"), parts) if same and whole else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return None


def _over_seeds(values: Floats) -> Estimate:
    spread = own_spread(values.tolist())
    assert spread is not None  # a trial has several runs
    return Estimate(float(values.mean()), spread, len(values))


def _cut(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
