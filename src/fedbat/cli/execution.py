"""What the commands that run something share: a live view beside the run, a table and a picture after it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import typer

from fedbat.cli.options import INTERRUPTED, console, new_table, say
from fedbat.engine import make_engine
from fedbat.engine.cpu import workers_for
from fedbat.engine.cuda import Precision
from fedbat.engine.workers import Workers
from fedbat.experiment import Federation
from fedbat.records import RunRecord, is_begun, is_finished, run_folder, summarize
from fedbat.run import run_recorded
from fedbat.simulation import Round
from fedbat.tracking import TensorBoard, check_board
from fedbat.view import RunView, count, megabytes


class RunOptions(NamedTuple):
    """How a run is computed and followed, as the user asked for it; what it computes is the experiment's."""

    engine: str = "auto"
    device: str | None = None
    precision: str = "fp32"
    memory_budget: float | None = None  # bytes
    tensorboard: Path | None = None  # a folder there for each run

    @property
    def asked(self) -> dict[str, str | None]:
        """What is to be remembered for who goes on."""
        return {"precision": self.precision, "asked": self.engine, "device": self.device}


def execute(
    federation: Federation,
    folder: Path,
    how: RunOptions,
    whole: Path | None = None,
    workers: Workers | None = None,
    width: int = 0,
) -> list[Round]:
    """Begin or continue a run with a live view, its name as wide as the widest of a comparison.

    After Ctrl-C, `whole` (or the folder) is what to resume.
    """
    if is_begun(folder) and is_finished(folder):
        return RunRecord.read(folder, federation).rounds
    experiment = federation.experiment
    assert experiment.rounds is not None
    num_parameters = sum(p.numel() for p in federation.model.parameters())
    view = RunView(console, experiment.variant.ljust(width), experiment.rounds, experiment.per_round, num_parameters)

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
        closing(make_engine(federation, how.engine, how.device, cast(Precision, how.precision), workers)) as engine,
        _tracker(how, folder, whole) as tracker,
    ):
        try:
            with view:
                record = run_recorded(
                    federation,
                    engine,
                    folder,
                    engine_facts={"name": type(engine).__name__, **how.asked},
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
    """In a folder called like the run's, unless that is another's; a comparison's runs lie in one together."""
    if how.tensorboard is None:
        return nullcontext()
    above = whole.resolve().name if whole else ""
    board = how.tensorboard / above / folder.resolve().name
    check_board(board, folder)
    return TensorBoard(board)


def check_trackers(federations: list[Federation], folder: Path, how: RunOptions) -> None:
    """Whether all runs of a comparison can be logged, told before the first begins."""
    for federation in federations:
        _tracker(how, run_folder(folder, federation.experiment), folder)


def execute_all(federations: list[Federation], folder: Path, how: RunOptions) -> None:
    """Begin or continue a comparison in a folder that is locked: each run in one of its own, a table and a picture."""
    from fedbat.plots import Curve, draw_comparison

    done: list[tuple[Federation, list[Round]]] = []
    curves: dict[str, Curve] = {}
    width = max(len(federation.experiment.variant) for federation in federations)
    with closing(workers_for(federations[0])) as workers:  # handed on: to start them takes seconds
        for federation in federations:
            asked = federation.experiment
            found = execute(federation, run_folder(folder, asked), how, folder, workers, width)
            columns = ([getattr(r, name) for r in found] for name in ("accuracy", "uplink_bytes", "downlink_bytes"))
            done.append((federation, found))
            curves[asked.variant] = Curve(asked.method, *columns)
    print_table(done)
    picture = folder / "compare.png"
    split = f"{asked.partition}, {asked.per_round} of {asked.clients} clients a round, seed {asked.seed}"
    draw_comparison(curves, f"{asked.dataset}, {split}", picture)
    say(f"recorded in {folder}, picture in {picture}")


def print_table(done: Sequence[tuple[Federation, list[Round]]]) -> None:
    """What people compare, a line for each run: percent, bits a parameter, how many times less is sent than in float32.

    Traffic is up and down, of all clients and rounds.
    """
    table = new_table("run", "best %", "last 10", "bits up", "down", "saved up", "both", "traffic", "seconds")
    summaries: dict[str, dict[str, Any]] = {}
    for federation, found in done:
        label = federation.experiment.variant
        s = summaries[label] = summarize(federation, found)
        table.add_row(
            label,
            *(f"{100 * s[key]:.2f}" for key in ("best_accuracy", "last10_accuracy")),
            f"{s['bits_per_parameter']:.2f}",
            f"{8 * s['downlink_bytes_per_client_round'] / s['num_parameters']:.2f}",
            *(f"{s[key]:.1f}x" for key in ("uplink_saving", "total_saving")),
            megabytes(sum(r.uplink_bytes + r.downlink_bytes for r in found)),
            f"{s['seconds']:.0f}",
        )
    console.print(table)
    _print_other_models(summaries)


def _print_other_models(summaries: Mapping[str, dict[str, Any]]) -> None:
    """Beside the server's model: what clients receive of it, and its average; nothing where there is neither."""
    models = {"the model": "last10", "received": "received_last10", "averaged": "averaged_last10"}
    found = {label: [s.get(f"{key}_accuracy") for key in models.values()] for label, s in summaries.items()}
    if all(figure is None for _, *others in found.values() for figure in others):
        return
    table = new_table("last 10, %", *models)
    for label, figures in found.items():
        table.add_row(label, *("–" if figure is None else f"{100 * figure:.2f}" for figure in figures))
    console.print(table)


def _changes(record: RunRecord) -> list[str]:
    """What a continued run is told when it is not computed as before."""
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


_SAME: dict[str, Callable[[Mapping[str, Any]], str]] = {  # what bits depend on
    "engine": _engine,
    "PyTorch": lambda leg: str(leg["versions"]["torch"]),
    "NumPy": lambda leg: str(leg["versions"]["numpy"]),
    "Numba": lambda leg: str(leg["versions"].get("numba")),
    "fedbat": lambda leg: str(leg["versions"]["fedbat"]),
    "revision": lambda leg: str(leg["git_revision"])[:12],
}
