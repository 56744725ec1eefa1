"""What claims say about trials, by kind: a number from each trial, with its interval over runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from fedbat.errors import ConfigError
from fedbat.reproduce.estimates import Estimate
from fedbat.reproduce.theory.record import TrialRecord
from fedbat.reproduce.theory.trials import Trial

Choice = Mapping[str, Sequence[Any]]  # values of a trial's fields


class Kind(NamedTuple):
    """A number, what it is called, and how it is shown."""

    of: Callable[[TrialRecord], Estimate]
    what: str
    style: str


class TrialCase(NamedTuple):
    """One number of a claim, from one trial."""

    trial: Trial
    kind: Kind

    @property
    def cell(self) -> str:
        """The trial, in words."""
        trial = self.trial
        return f"{trial.problem}, {trial.sampled} of {trial.clients} clients, {trial.compression.word}"

    @property
    def what(self) -> str:
        """What the number is called."""
        return self.kind.what

    @property
    def style(self) -> str:
        """The format of the number."""
        return self.kind.style

    def estimate(self, records: Mapping[Trial, TrialRecord]) -> Estimate | None:
        """The number, with its interval; None if the trial has not been run."""
        return self.kind.of(records[self.trial]) if self.trial in records else None


TRIAL_KINDS = {
    "slope": Kind(TrialRecord.slope, "slope", "+.3f"),
    "share-of-bound": Kind(TrialRecord.share, "share of the bound", ".1e"),
}


def trial_cases(trials: Sequence[Trial], kind: str, choice: Choice) -> list[TrialCase]:
    """A case for each trial that a claim is about."""
    names = [field.name for field in fields(Trial)]
    if unknown := choice.keys() - set(names):
        raise ConfigError(f"no trial has {', '.join(sorted(unknown))}; choose by {', '.join(names)}")
    found = [trial for trial in trials if all(getattr(trial, name) in values for name, values in choice.items())]
    if not found:
        raise ConfigError(f"no experiment file has a trial with {dict(choice)}; add one or correct the claim")
    return [TrialCase(trial, TRIAL_KINDS[kind]) for trial in found]
