"""The paper's claims as predicates over records: claims.toml says what is claimed, this module whether it is so.

A claim compares methods in some cells (its kind, see kinds.py) or is about toy problems (theory/kinds.py). It says
where the numbers must lie (`above`, `below`) and for how many (`quantifier`):
- every: *holds* when all intervals lie there; *fails* when one lies elsewhere;
- some: *holds* when all intervals of one cell lie there; *fails* when each cell has one elsewhere;
- any: *holds* when one interval lies there; *fails* when all lie elsewhere;
- most: *holds* when more than half of all that are needed lie there; *fails* when half of them lie elsewhere;
- mean: decided by the interval of the mean over all that are needed.
Everything else is *undecided* if all has been measured, as intervals straddle the border, or else *waiting for
records*: a missing one counts as an interval over the whole line. Claims that tests check are *tested*; here it is only
checked that the tests exist. What nothing here checks is *not checked*, and the file says why.
"""

import ast
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from fedbat.errors import ConfigError
from fedbat.reproduce.entries import check_keys, read_toml
from fedbat.reproduce.estimates import LEVEL, QUANTIFIERS, Estimate, Region, Spread, inside
from fedbat.reproduce.kinds import KINDS, Case, Column, Shelf
from fedbat.reproduce.measure import estimate
from fedbat.reproduce.record import Records
from fedbat.reproduce.results import Results
from fedbat.reproduce.tables import Book
from fedbat.reproduce.theory.kinds import TRIAL_KINDS, Choice, TrialCase, trial_cases

FILE = "claims.toml"
_KNOWN = ("id", "where", "text")  # of every claim


class Verdict(StrEnum):
    """What the records say about a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    WAITING = "waiting for records"
    TESTED = "tested"
    UNCHECKED = "not checked"

    @classmethod
    def of(cls, opinion: bool | None, whole: bool = True) -> "Verdict":
        """The verdict for yes, no or neither, which may change if not the whole of a claim has been measured."""
        return {True: cls.HOLDS, False: cls.FAILS, None: cls.UNDECIDED if whole else cls.WAITING}[opinion]


class Group(StrEnum):
    """What a claim is about."""

    PAPER = "of the paper"
    TOYS = "on theory's toy problems"
    OURS = "of ours"


@dataclass(frozen=True)
class Claim:
    """A sentence that records or tests can check, or that nothing does."""

    id: str
    where: str  # in the paper, or "ours"
    text: str
    kind: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cells: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # data sets, clients and splits
    quantifier: str = "every"
    region: Region = field(default_factory=Region)
    trials: Choice | None = None  # instead of cells
    tests: tuple[str, ...] = ()  # instead of all of that
    unchecked: str = ""  # instead of anything: why not

    @property
    def group(self) -> Group:
        """What it is about."""
        if self.trials is not None:
            return Group.TOYS
        return Group.OURS if self.where == "ours" else Group.PAPER

    def cases(self, shelf: Shelf) -> list[list[Case]]:
        """The cases, by cell."""
        if self.kind is None or self.trials is not None:
            return []
        columns = itertools.product(*(map(str, self.cells[key]) for key in ("dataset", "clients", "split")))
        try:
            return [list(KINDS[self.kind](Column(shelf, *column), **self.arguments)) for column in columns]
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"claim {self.id!r}: {error}") from None

    def trial_cases(self, shelf: Shelf) -> list[TrialCase]:
        """The cases of a claim about toy problems."""
        if self.kind is None or self.trials is None:
            return []
        try:
            return trial_cases(shelf.trials, self.kind, self.trials)
        except ConfigError as error:
            raise ConfigError(f"claim {self.id!r}: {error}") from None


class Measured(NamedTuple):
    """A case and what its records say; the estimate is None if one of them is missing."""

    case: Case | TrialCase
    estimate: Estimate | None
    opinion: bool | None


@dataclass(frozen=True)
class Finding:
    """A claim with its verdict and the evidence."""

    claim: Claim
    verdict: Verdict
    printed: Verdict | None  # judged by the numbers the paper prints, taken as exact; None if it prints none
    measured: tuple[Measured, ...]
    deciding: Estimate | None  # the one on which the verdict depends
    present: int  # cells and trials of experiment files that have records
    needed: int


def has_claims(folder: Path) -> bool:
    """Whether a folder of experiment files has a file of claims."""
    return (folder / FILE).is_file()


def load_claims(folder: Path) -> tuple[Claim, ...]:
    """The claims in a folder of experiment files; empty if it has no file of claims."""
    if not has_claims(folder):
        return ()
    file = check_keys(str(folder / FILE), read_toml(folder / FILE), ["cells", "claim"])
    claims = tuple(
        _claim(check_keys(f"{folder / FILE}: a claim", entry, _KNOWN), file["cells"], folder.parent)
        for entry in file["claim"]
    )
    if twice := [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]:
        raise ConfigError(f"{folder / FILE}: {', '.join(twice)} twice; give every claim its own id")
    return claims


def judge_all(book: Book, records: Records) -> list[Finding]:
    """Judge every claim of a book."""
    shelf, results = Shelf(book), Results(book, records)
    return [judge(claim, shelf, results) for claim in load_claims(book.folder)]


def judge(claim: Claim, shelf: Shelf, results: Results) -> Finding:
    """Judge a claim by the records."""
    cases, trials = claim.cases(shelf), claim.trial_cases(shelf)
    if not cases and not trials:
        return Finding(claim, Verdict.UNCHECKED if claim.unchecked else Verdict.TESTED, None, (), None, 0, 0)
    estimates = [*estimate(cases, results), *([case.estimate(results.trials)] for case in trials)]
    printed = [[None if case.printed is None else _certain(case.printed) for case in cell] for cell in cases]
    decide, deciding = QUANTIFIERS[claim.quantifier]
    rows = {row.identity: row for cell in cases for case in cell for row in case.rows}
    every_case: list[Case | TrialCase] = [*itertools.chain(*cases), *trials]
    return Finding(
        claim,
        Verdict.of(decide(estimates, claim.region)(LEVEL), whole=None not in itertools.chain(*estimates)),
        Verdict.of(decide(printed, claim.region)(LEVEL)) if any(map(any, printed)) else None,
        tuple(
            Measured(case, found, inside(found, claim.region)(LEVEL))
            for case, found in zip(every_case, itertools.chain(*estimates), strict=True)
        ),
        deciding(estimates, claim.region),
        sum(results.of(row) is not None for row in rows.values()) + sum(c.trial in results.trials for c in trials),
        len(rows) + len(trials),
    )


def _certain(value: float) -> Estimate:
    return Estimate(value, Spread(0.0, 1, "printed"), 1)


def _claim(entry: Mapping[str, Any], grids: Mapping[str, Mapping[str, Sequence[Any]]], root: Path) -> Claim:
    """A claim from an entry of the file; keys that not all claims have are arguments of its kind."""
    left = dict(entry)
    name = left["id"]

    def choose(key: str, choices: Mapping[str, Any]) -> Any:
        if left.get(key) not in choices:
            raise ConfigError(f"claim {name!r}: {key} = {left.get(key)!r}, choose from {', '.join(choices)}")
        return left.pop(key)

    known = {key: left.pop(key) for key in _KNOWN}
    if "tests" in left:
        for test in left["tests"]:
            _check_test(name, test, root)
        return Claim(**known, tests=tuple(left["tests"]))
    if "unchecked" in left:
        return Claim(**known, unchecked=left["unchecked"])
    bounds = {key: float(left.pop(key)) for key in Region._fields if key in left}
    if not bounds:
        raise ConfigError(f"claim {name!r} says nothing: it has neither above nor below; give one of them")
    known |= {"quantifier": choose("quantifier", QUANTIFIERS), "region": Region(**bounds)}
    if "trials" in left:
        return Claim(**known, kind=choose("kind", TRIAL_KINDS), trials=left["trials"])
    return Claim(**known, kind=choose("kind", KINDS), cells=grids[choose("cells", grids)], arguments=left)


def _check_test(claim: str, test: str, root: Path) -> None:
    path, _, function = test.partition("::")
    try:
        found = {node.name for node in ast.parse((root / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    except OSError:
        found = set()
    if function not in found:
        raise ConfigError(f"claim {claim!r} points at {test}, which is no test; name one as tests/test_x.py::test_y")
