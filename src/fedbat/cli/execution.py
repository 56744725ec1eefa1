"""What the commands that run something share: a live view during the run, a table and a picture after it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import typer

from fedbat.cli.options import INTERRUPTED, console, say
from fedbat.cli.table import Done, by_variant, print_table
from fedbat.engine import make_engine
from fedbat.engine.cpu import workers_for
from fedbat.engine.cuda import Precision
from fedbat.engine.workers import Workers
from fedbat.experiment import Federation
from fedbat.records import RunRecord, is_begun, is_finished, run_folders, run_names
from fedbat.run import run_recorded
from fedbat.simulation import Round
from fedbat.tracking import TensorBoard, check_board
from fedbat.units import count
from fedbat.view import RunView

if TYPE_CHECKING:
    from fedbat.plots import Curve


class RunOptions(NamedTuple):
    """How a run is computed and followed, as the user asked for it; what it computes is the experiment's."""

    engine: str = "auto"
    device: str | None = None
    precision: str = "fp32"
    memory_budget: float | None = None  # bytes
    tensorboard: Path | None = None  # gets a folder for each run

    @property
    def asked(self) -> dict[str, str | None]:
        """The choices to remember for whoever resumes."""
        return {"precision": self.precision, "asked": self.engine, "device": self.device}


def execute(
    federation: Federation,
    folder: Path,
    how: RunOptions,
    whole: Path | None = None,
    workers: Workers | None = None,
    name: str | None = None,
) -> list[Round]:
    """Begin or continue a run with a live view, in which `name` labels it, as in a comparison.

    After Ctrl-C, `whole` (or the folder) is named as what to resume.
    """
    if is_begun(folder) and is_finished(folder):
        return RunRecord.read(folder, federation).rounds
    experiment = federation.experiment
    label, num_rounds = name or experiment.variant, experiment.num_rounds
    view = RunView(console, label, num_rounds, experiment.per_round, federation.num_parameters)

    def begin(record: RunRecord) -> None:
        for line in _changes(record):
            say(line)
        view.begin(record.rounds)
        if tracker:
            tracker.begin(record)

    def follow(round_: Round) -> None:
        view.round(round_)
        if tracker:
            tracker.round(round_)

    with (
        _tracker(how, folder, whole) as tracker,
        closing(make_engine(federation, how.engine, how.device, cast(Precision, how.precision), workers)) as engine,
    ):
        try:
            with view:
                record = run_recorded(
                    federation,
                    engine,
                    folder,
                    engine_facts={"asked": how.engine, "device": how.device},
                    on_start=begin,
                    on_round=follow,
                    on_client=view.client,
                    memory_budget=how.memory_budget,
                )
        except KeyboardInterrupt:
            where = f"recorded in {folder}" if view.num_done else "nothing recorded"
            say(f"interrupted after {count(view.num_done, 'round')}, {where}")
            if view.num_done or whole:
                say(f"go on with: fedbat resume {whole or folder}")
            raise typer.Exit(INTERRUPTED) from None
    return record.rounds


def _tracker(how: RunOptions, folder: Path, whole: Path | None) -> AbstractContextManager[TensorBoard | None]:
    """A tracker in a folder named like the run's, unless another run logs there; a comparison's runs lie together."""
    if how.tensorboard is None:
        return nullcontext()
    above = whole.resolve().name if whole else ""
    board = how.tensorboard / above / folder.resolve().name
    check_board(board, folder)
    return TensorBoard(board)


def check_trackers(federations: list[Federation], folder: Path, how: RunOptions) -> None:
    """Refuse a comparison with a run that cannot be logged, before its first run begins."""
    for run in run_folders(folder, [federation.experiment for federation in federations]):
        _tracker(how, run, folder)


def execute_all(federations: list[Federation], folder: Path, how: RunOptions) -> None:
    """Begin or continue a comparison in a locked folder: each run in its own folder, then a table and a picture."""
    from fedbat.plots import draw_comparison

    experiments = [federation.experiment for federation in federations]
    folders, names = run_folders(folder, experiments), run_names(experiments)
    width = max(map(len, names))
    done: list[Done] = []
    with closing(workers_for(federations[0])) as workers:  # handed on, because starting them takes seconds
        for number, (federation, run, name) in enumerate(zip(federations, folders, names, strict=True), start=1):
            label = f"[{number:{len(str(len(names)))}}/{len(names)}] {name:{width}}"
            done.append((federation, execute(federation, run, how, folder, workers, label)))
    print_table(done)
    picture, asked = folder / "compare.png", experiments[0]
    seeds = sorted({experiment.seed for experiment in experiments})
    drawn = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds"
    title = f"{asked.dataset}, {asked.split}, {asked.per_round} of {asked.clients} clients a round, {drawn}"
    if any(round_.received for _, found in done for round_ in found):
        title += "; accuracy of what clients receive"
    draw_comparison({label: _curve(runs) for label, runs in by_variant(done).items()}, title, picture)
    say(f"recorded in {folder}, picture in {picture}")


def _curve(runs: Sequence[Done]) -> "Curve":
    """A variant's curve: round by round, the mean over its seeds, and the range from the lowest to the highest."""
    from fedbat.plots import Curve

    rounds = list(zip(*(found for _, found in runs), strict=True))
    return Curve(
        runs[0][0].experiment.method,
        [fmean(map(_held, same)) for same in rounds],
        [fmean(r.uplink_bytes for r in same) for same in rounds],
        [fmean(r.downlink_bytes for r in same) for same in rounds],
        [(min(map(_held, same)), max(map(_held, same))) for same in rounds] if len(runs) > 1 else None,
    )


def _held(round_: Round) -> float:
    """The accuracy of the model that clients hold after a round."""
    return (round_.received or round_).accuracy


def _changes(record: RunRecord) -> list[str]:
    """What to report about a continued run: from where, and what is not as it was before."""
    if len(record.legs) < 2:
        return []
    before, now = record.legs[-2:]
    lines = [f"continuing at round {now['first_round']}"]
    for what, of in _SAME.items():
        if (old := of(before)) != (new := of(now)):
            lines.append(f"{what} {new} instead of {old}: the results may differ from those of an uninterrupted run")
    return lines


def _engine(leg: Mapping[str, Any]) -> str:
    facts = leg["engine"] or {}
    return f"{facts.get('name')} ({facts.get('precision')})"


_SAME: dict[str, Callable[[Mapping[str, Any]], str]] = {  # what results depend on, bit for bit
    "engine": _engine,
    "PyTorch": lambda leg: str(leg["versions"]["torch"]),
    "NumPy": lambda leg: str(leg["versions"]["numpy"]),
    "Numba": lambda leg: str(leg["versions"].get("numba")),
    "fedbat": lambda leg: str(leg["versions"]["fedbat"]),
    "fedbat's source": lambda leg: str(leg["versions"].get("source"))[:8],
    "code of your own": lambda leg: ", ".join(f"{name} {found[:8]}" for name, found in leg.get("own", {}).items()),
}
