"""How fast FedBAT converges on toy problems, compared with the theorems: a section of RESULTS.md and its picture."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from fedbat.plots import Line, RatePanel
from fedbat.reproduce import markdown
from fedbat.reproduce.estimates import LEVEL
from fedbat.reproduce.results import Results
from fedbat.reproduce.tables import Book, Table
from fedbat.reproduce.theory.record import TrialRecord
from fedbat.reproduce.theory.trials import PROBLEMS, Trial
from fedbat.reproduce.verdicts import show_interval

_INTERVAL = f"{1 - LEVEL:.0%} interval"
_WORDS = ("clients heard", "compressed by")
_COLUMNS = (
    *_WORDS,
    "slope",
    _INTERVAL,
    "theorem's slope",
    "constant",
    f"its {_INTERVAL}",
    "expected",
    "bound's constant",
    "largest share of the bound",
    "q²",
    "G²",
    "runs",
    "seconds",
)


def records_of(table: Table, results: Results) -> list[TrialRecord]:
    """The records of a table's trials, as far as they have been run."""
    return [results.trials[trial] for trial in table.trials if trial in results.trials]


def section(table: Table, book: Book, results: Results) -> Iterator[str]:
    """A table for each problem."""
    yield from [
        "FedBAT as the theorems have it (no warm-up, step size ||m||∞) on federations whose optima are known, many",
        "independent runs each; `none` sends updates as they are, which is FedAvg. *slope* is that of the logarithm of",
        "the error against that of time, fitted to each run. *constant* is error × time^rate over the last doubling of",
        "time; *bound's constant* the same of the theorem's bound, with G and q as measured. Bounds are far from",
        "tight; *expected* therefore gives the limit of the constant if the variances of Lemma 6 are taken as",
        "equalities. FedAvg with all clients is left with the noise of the data and the clients' drift, which falls as",
        "1/t². In the picture a line is the mean of the runs, its band reaches from the lowest to the highest.",
        "",
    ]
    for problem, trials in groupby(table.trials, lambda trial: trial.problem):
        kind, members = PROBLEMS[problem], list(trials)
        yield from [f"### {kind.title}", "", _words(members[0]), ""]
        found = [(trial, results.trials[trial]) for trial in members if trial in results.trials]
        if found:
            yield from markdown.table(_COLUMNS, [_row(*pair) for pair in found], _WORDS)
        left = [trial for trial in members if trial not in results.trials]
        yield from markdown.not_run((trial.compress, f"{trial.sampled} of {trial.clients}") for trial in left)


def panels(records: Sequence[TrialRecord]) -> list[RatePanel]:
    """The mean and range of the runs, with the bound, for each problem."""
    found = []
    for _, members in groupby(records, lambda record: record.trial.problem):
        by_label = {_label(record.trial): record for record in members}
        problem = next(iter(by_label.values())).problem
        found.append(
            RatePanel(
                problem.title,
                problem.time,
                problem.what,
                {label: _line(record) for label, record in by_label.items()},
                {label: record.bound.tolist() for label, record in by_label.items()},
            )
        )
    return found


def _line(record: TrialRecord) -> Line:
    band = (record.values.min(1).tolist(), record.values.max(1).tolist())
    return Line(record.times.tolist(), record.mean.tolist(), band)


def _label(trial: Trial) -> str:
    return f"{trial.sampled} of {trial.clients}, {trial.compression.word}"


def _words(trial: Trial) -> str:
    """The settings that the trials of a problem share, in words."""
    kind, convex = PROBLEMS[trial.problem], f"μ = {trial.mu:g}, " if trial.mu else ""
    return (
        f"{trial.clients} clients, {trial.dimension} dimensions, {convex}L = {trial.smoothness:g}, "
        f"σ = {trial.sigma:g}, τ = {trial.tau}, to {trial.steps:,} steps; error is {kind.what}, time is {kind.time}."
    )


def _row(trial: Trial, record: TrialRecord) -> list[str]:
    slope, constant, constants = record.slope(), record.constant(), record.constants
    style = ",.0f" if constant.value > 100 else ".3g"
    return [
        f"{trial.sampled} of {trial.clients}",
        trial.compress,
        f"{slope.value:.3f}",
        show_interval(slope, ".3f"),
        f"{-record.problem.rate:g}",
        f"{constant.value:{style}}",
        show_interval(constant, style),
        f"{constants['limit']:{style}}" if "limit" in constants else "",
        f"{record.bound_constant():.2e}",
        f"{record.share().value:.1e}",
        f"{constants['q2']:.1f}",
        f"{constants['g2']:.0f}",
        str(trial.seeds),
        f"{record.facts['seconds']:.0f}",
    ]
