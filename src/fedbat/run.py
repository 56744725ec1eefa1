"""Whole runs: without a trace, or with a record, checkpointed as they go and stopped at any time without loss."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from fedbat.checkpoint import Checkpoint, has_checkpoint, remove_checkpoint
from fedbat.engine import make_engine
from fedbat.engine.base import Engine
from fedbat.engine.cuda import Precision
from fedbat.errors import ConfigError, DataError
from fedbat.experiment import Experiment, Federation, prepare
from fedbat.lock import locked
from fedbat.memories import Memories, half_of_ram
from fedbat.records import RunRecord, is_begun, is_finished, read_experiment, read_summary
from fedbat.simulation import Round, State, initial_state, rounds

CHECKPOINT_SECONDS = 20.0  # between two checkpoints; a round on a GPU takes a fifth of a second


class Stop(Exception):
    """Raised by a callback to interrupt its run, which can be continued."""


def simulate(
    experiment: Experiment, engine: str = "auto", precision: Precision = "fp32"
) -> Iterator[tuple[Round, State]]:
    """The rounds of an experiment one by one, each with the state after it; nothing is written to disk."""
    federation = prepare(experiment)
    with closing(make_engine(federation, engine, precision=precision)) as made:
        yield from rounds(federation, made, initial_state(federation))


def run_recorded(
    federation: Federation,
    engine: Engine,
    folder: Path,
    *,
    engine_facts: Mapping[str, str | None] | None = None,
    on_start: Callable[[RunRecord], None] = lambda record: None,
    on_round: Callable[[Round], None] = lambda round_: None,
    on_client: Callable[[], None] = lambda: None,
    deadline: float = float("inf"),
    memory_budget: float | None = None,
) -> RunRecord:
    """Begin a run in a new folder, or go on with the one there, to the same results; a finished one is only read.

    `engine_facts` go into the record besides the engine's name and precision. `on_start` sees the record before the
    first round that is left to do, `on_round` sees each round. No round is begun after `deadline` (by
    time.monotonic()); `record.finished` tells whether all were done.
    ConfigError if another process is at work in the folder.
    Ctrl-C, `Stop` and errors propagate; the rounds done so far are recorded and a checkpoint is left to go on from.
    `memory_budget` bytes of client memories stay in RAM (default: half of the machine's), the rest wait on disk.
    """
    engine_facts = {"name": type(engine).__name__, "precision": engine.precision, **(engine_facts or {})}
    place = folder / "checkpoint"
    budget = half_of_ram() if memory_budget is None else memory_budget
    with locked(folder):
        if is_begun(folder) and is_finished(folder):
            _check_same(federation, folder)
            remove_checkpoint(place)  # in case the process died right before
            return RunRecord.read(folder, federation)
        record, checkpoint = _opened(federation, folder, place, budget, engine_facts)
        status, saved_at = "failed", time.monotonic()
        try:
            on_start(record)
            following = rounds(federation, engine, checkpoint.state, on_client, first=checkpoint.next_round)
            while not record.finished and time.monotonic() < deadline:
                round_, state = next(following)
                record.add(round_)
                checkpoint = Checkpoint(round_.index + 1, state)
                on_round(round_)
                if time.monotonic() - saved_at >= CHECKPOINT_SECONDS:
                    checkpoint.save(place)
                    saved_at = time.monotonic()
            status = "finished" if record.finished else "interrupted"
        except (KeyboardInterrupt, Stop):
            status = "interrupted"
            raise
        finally:
            if checkpoint.next_round == 0:  # nothing was done, nothing is left behind
                remove_checkpoint(place)
            elif status != "finished":
                checkpoint.save(place)
            record.close(status, checkpoint.next_round, checkpoint.state)
            if status == "finished":
                remove_checkpoint(place)
        return record


def _opened(
    federation: Federation, folder: Path, place: Path, budget: float, engine: Mapping[str, str | None] | None
) -> tuple[RunRecord, Checkpoint]:
    """The record to add to and the checkpoint to go on from, existing or new."""
    if is_begun(folder):
        _check_same(federation, folder)
        record = RunRecord.read(folder, federation)
        checkpoint = _last_checkpoint(federation, record, place, budget)
        record.resume(checkpoint.next_round, engine)
    else:
        record = RunRecord.begin(folder, federation, engine)
        checkpoint = Checkpoint(0, initial_state(federation, Memories(place, budget)))
    if not has_checkpoint(place):
        checkpoint.save(place)  # before the first round is recorded
    return record, checkpoint


def _check_same(federation: Federation, folder: Path) -> None:
    """Refuse a folder that holds another experiment, or the same one with other defaults of its method."""
    wanted, found = vars(federation.experiment), vars(read_experiment(folder))
    other = [f"{name} is {found[name]} there, {value} here" for name, value in wanted.items() if found[name] != value]
    if other:
        raise ConfigError(f"{folder} holds another run: {', '.join(other)}; name a new folder")
    settings = read_summary(folder).get("method_settings", {})
    now = json.loads(json.dumps(federation.method.settings()))
    if changed := [
        f"{name} was {settings[name]}, is {now.get(name)}" for name in settings if settings[name] != now.get(name)
    ]:
        raise ConfigError(
            f"{folder} was run with other defaults of {federation.experiment.method}: {', '.join(changed)}; restore "
            "them, or start the run anew in another folder"
        )


def _check_model(federation: Federation, checkpoint: Checkpoint, folder: Path) -> None:
    """Refuse a checkpoint of another model: a user's own may have changed under the same name."""
    found = {name: tuple(tensor.shape) for name, tensor in checkpoint.state.w.items()}
    wanted = {entry.name: tuple(entry.shape) for entry in federation.layout}
    if other := sorted(set(found.items()) ^ set(wanted.items())):
        name, _ = other[0]
        raise DataError(
            f"{folder} was run with another model: {name} is {found.get(name, 'not')} there, {wanted.get(name, 'not')} "
            "here; restore the model, or start the run anew in another folder"
        )


def _last_checkpoint(federation: Federation, record: RunRecord, place: Path, budget: float) -> Checkpoint:
    if has_checkpoint(place):
        checkpoint = Checkpoint.load(place, budget)
        _check_model(federation, checkpoint, record.folder)
        return checkpoint
    if record.rounds:
        raise DataError(
            f"{record.folder} has {len(record.rounds)} rounds but no checkpoint to go on from; "
            "start the run anew in another folder"
        )
    return Checkpoint(0, initial_state(federation, Memories(place, budget)))  # the run died before its first checkpoint
