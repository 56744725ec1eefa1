"""Runs cells until all have their records or time is up. May be killed and started again at any moment.

A cell is run in a working folder with checkpoints, and published when it is whole. A lock for that folder keeps other
processes off the cell, so any number of sweeps may work on one list, each with any number of workers.
"""

import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from shutil import rmtree
from typing import Literal, cast

import torch

from fedbat.checkpoint import next_round
from fedbat.data import Dataset, load_dataset
from fedbat.engine import make_engine
from fedbat.engine.cuda import Precision
from fedbat.engine.workers import Died, Task, Workers
from fedbat.errors import DataError, FedbatError
from fedbat.experiment import prepare
from fedbat.figures import late
from fedbat.lock import holding
from fedbat.records import is_begun, is_finished
from fedbat.reproduce.cells import Cell, fewest
from fedbat.reproduce.pace import Machine, Pace, cpu
from fedbat.reproduce.publish import publish
from fedbat.reproduce.record import Records, load_record
from fedbat.run import Stop, run_recorded
from fedbat.simulation import Round

_MEASURED = 5  # rounds from which a cell's speed is judged; the first records CUDA graphs and does not count
_MARGIN = 1.1  # runs of the same kind differ by this factor
_START = 5.0  # seconds from one cell to the next: data, model, checkpoint
_SAY_EVERY = 15.0  # seconds


@dataclass(frozen=True)
class Settings:
    """How and where to run."""

    results: Path
    work: Path
    engine: str = "auto"
    device: str | None = None
    precision: str = "fp32"
    jobs: int = 1  # processes that share the machine
    deadline: float = float("inf")  # of time.monotonic()

    @property
    def machine(self) -> Machine:
        """What the records of this sweep will say."""
        usual = "cuda" if self.engine in ("auto", "cuda") else "cpu"
        on_gpu = (self.device or usual).startswith("cuda") and torch.cuda.is_available()
        processor = torch.cuda.get_device_name() if on_gpu else cpu(os.cpu_count())
        return Machine(processor, self.precision, str(self.jobs))


Fate = Literal["done", "run", "unfinished", "waiting", "failed"]


@dataclass
class Outcome:
    """What became of the cells."""

    done: list[Cell] = field(default_factory=list)  # had their records before
    run: list[Cell] = field(default_factory=list)
    unfinished: list[Cell] = field(default_factory=list)  # begun, to be continued
    waiting: list[Cell] = field(default_factory=list)  # not begun: no time, or another sweep has them
    failed: list[Cell] = field(default_factory=list)

    def add(self, fate: Fate, cell: Cell) -> None:
        """Note what became of a cell."""
        getattr(self, fate).append(cell)

    def __str__(self) -> str:
        return ", ".join(f"{len(cells)} {fate}" for fate, cells in vars(self).items())


class _TooSlow(Stop):
    """Raised when it turns out that a cell cannot end in time."""


def sweep(cells: Sequence[Cell], settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Run every cell that has no valid record yet and can end before the deadline."""
    records = Records.load(settings.results)
    pending = fewest(cell for cell in cells if records.get(cell.identity) is None)
    outcome = Outcome(done=[cell for cell in cells if records.get(cell.identity) is not None])
    hand = _Hand(pending, len(outcome.done), settings, Pace(settings.machine, records), say)
    hand.say_progress()
    fates = list(_fates(hand))
    for index, (cell, fate) in enumerate(zip(pending, fates, strict=True)):
        # Whoever had a cell a while ago may have finished it by now, or be dead.
        outcome.add(fate or hand.attempt_or_fail(index) or "waiting", cell)
    say(str(outcome))
    return outcome


def _fates(hand: "_Hand") -> Iterator[Fate | None]:
    """Run the cells, in this process or in several; yields the fate of each, None for one that another sweep has."""
    num_workers = min(hand.settings.jobs, len(hand.pending))
    if num_workers <= 1:
        yield from map(hand.attempt_or_fail, range(len(hand.pending)))
        return
    tasks = [
        Task(f"ran {cell.folder}", "attempt_or_die", partial(tuple, [index])) for index, cell in enumerate(hand.pending)
    ]
    with closing(Workers(num_workers, daemon=False)) as workers:
        for cell, found in zip(hand.pending, workers.run(tasks, hand.itself), strict=True):
            if isinstance(found, Died):
                hand.say(f"{cell.folder} failed: {found.reason}")
            yield "failed" if isinstance(found, Died) else found


@dataclass(frozen=True)
class _Hand:
    """Runs cells; each process has its own."""

    pending: Sequence[Cell]
    num_done: int  # cells that are done, not among `pending`
    settings: Settings
    pace: Pace
    say: Callable[[str], None]

    def itself(self) -> "_Hand":
        """This hand, for a worker to hold a copy."""
        return self

    def say_progress(self) -> None:
        """Report the whole sweep's progress: other processes run cells of this list, too."""
        left = [cell for cell in self.pending if not _is_recorded(cell, self.settings)]
        total = self.num_done + len(self.pending)
        time_left = f", {_left(left, self.pace, self.settings)}" if left else ""
        self.say(f"{total - len(left)} of {total} cells done{time_left}")

    def attempt(self, index: int) -> Fate | None:
        """Run one of the cells; returns its fate, None if another process has it."""
        cell = self.pending[index]
        with _claimed(self.settings.work / cell.folder) as mine:
            fate = _attempt(cell, self.settings, self.pace, self.say) if mine else None
        if fate == "run":
            self.say_progress()
        return fate

    def attempt_or_fail(self, index: int) -> Fate | None:
        """The same, but unforeseen errors, such as a GPU out of memory, cost the cell and not the sweep."""
        try:
            return self.attempt(index)
        except FedbatError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.say(f"{self.pending[index].folder} failed: {type(error).__name__}: {error}")
            return "failed"

    def attempt_or_die(self, index: int) -> Fate | None:
        """The same in a worker, which ends by them: another with a fresh GPU context tries the cell once more."""
        try:
            return self.attempt(index)
        except FedbatError:
            raise
        except Exception:
            traceback.print_exc()
            sys.exit(1)


def _attempt(cell: Cell, settings: Settings, pace: Pace, say: Callable[[str], None]) -> Fate:
    """Begin or continue a cell if there is time for it, and publish what is whole."""
    folder, target = settings.work / cell.folder, settings.results / cell.folder
    if _is_recorded(cell, settings):
        return "done"  # by another process, since this one last looked
    rounds = _rounds_left(cell, settings)
    seconds = pace.seconds(cell.experiment, rounds)
    if time.monotonic() + _START + _MARGIN * (seconds or 0) > settings.deadline:
        return "waiting"
    say(f"{cell.folder}: {rounds} rounds" + ("" if seconds is None else f", about {_duration(seconds)}"))
    try:
        if not _ends(cell, folder, settings, pace, say):
            say(f"{cell.folder} will not end in time; it can be continued")
            return "unfinished"
        record = publish(load_record(folder), target)
    except FedbatError as error:
        begun = f"; to run the cell from its first round, remove {folder}" if is_begun(folder) else ""
        say(f"{cell.folder} failed: {error}{begun}")
        return "failed"
    rmtree(folder)
    pace.learn(record)
    what, _ = late(len(record.lines))
    say(f"{cell.folder}: best {record.best:.2f} %, {what} {record.last10:.2f} %, {record.seconds:.0f} s")
    return "run"


def _ends(cell: Cell, folder: Path, settings: Settings, pace: Pace, say: Callable[[str], None]) -> bool:
    """Run a cell until its last round or the deadline; whether it got to the last round."""
    federation = prepare(cell.experiment, data=_data(cell.experiment.dataset))
    engine = make_engine(federation, settings.engine, settings.device, cast(Precision, settings.precision))
    watch = _Watch(cell, settings.deadline, pace, say)
    try:
        return run_recorded(
            federation,
            engine,
            folder,
            engine_facts={
                "asked": settings.engine,
                "device": settings.device,
                "jobs": str(settings.jobs),
            },
            on_round=watch.round,
            deadline=settings.deadline,
        ).finished
    except _TooSlow:
        return False
    finally:
        engine.close()
        del engine, federation
        gc.collect()  # models and graphs of this cell refer to each other; the next cell needs their memory


class _Watch:
    """Watches a running cell: reports its progress, and stops it once it is clear that it cannot end in time."""

    def __init__(self, cell: Cell, deadline: float, pace: Pace, say: Callable[[str], None]) -> None:
        self._cell, self._deadline, self._pace, self._say = cell, deadline, pace, say
        self._seconds: list[float] = []
        self._said = time.monotonic()

    def round(self, round_: Round) -> None:
        experiment, now = self._cell.experiment, time.monotonic()
        self._seconds.append(round_.seconds)
        done, per_round = round_.index + 1, statistics.median(self._seconds[1:] or self._seconds)
        left = (experiment.num_rounds - done) * per_round
        if now - self._said > _SAY_EVERY:
            self._said = now
            accuracy = f"accuracy {100 * round_.accuracy:.1f} %"
            self._say(f"  {self._cell.folder} round {done}/{experiment.num_rounds}  {accuracy}  {_duration(left)} left")
        if len(self._seconds) == _MEASURED and now + left > self._deadline:
            self._pace.observe(vars(experiment), per_round)
            raise _TooSlow


@lru_cache(maxsize=1)  # the cells of one data set come one after the other
def _data(name: str) -> Dataset:
    return load_dataset(name)


def _claimed(folder: Path) -> AbstractContextManager[bool]:
    """A context that tells whether this process may have the cell, its folder's removal included."""
    return holding(folder.with_name(folder.name + ".lock"))


def _is_recorded(cell: Cell, settings: Settings) -> bool:
    return Records.load(settings.results / cell.folder).get(cell.identity) is not None


def _rounds_left(cell: Cell, settings: Settings) -> int:
    """The rounds still to be run: a killed cell goes on from its checkpoint, which may be some rounds behind."""
    folder = settings.work / cell.folder
    try:
        if is_begun(folder) and is_finished(folder):
            return 0
        return cell.experiment.num_rounds - next_round(folder / "checkpoint")
    except DataError:  # reported when the cell's turn comes
        return cell.experiment.num_rounds


def _left(cells: Sequence[Cell], pace: Pace, settings: Settings) -> str:
    times = [pace.seconds(cell.experiment, _rounds_left(cell, settings)) for cell in cells]
    known = [_START + seconds for seconds in times if seconds is not None]
    unknown = len(times) - len(known)
    parts = [_duration(sum(known) / min(settings.jobs, len(cells)))] if known else []
    parts += [f"{unknown} cell{'' if unknown == 1 else 's'} of unknown length"] if unknown else []
    return f"{' and '.join(parts)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
