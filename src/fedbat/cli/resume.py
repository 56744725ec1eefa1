"""`fedbat resume`."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedbat.checkpoint import remove_checkpoint
from fedbat.cli.execution import RunOptions, check_trackers, execute, execute_all
from fedbat.cli.options import Device, MemoryBudget, TensorBoardFolder, num_bytes, say
from fedbat.cli.table import print_table
from fedbat.engine import ENGINES, check_engine
from fedbat.experiment import prepare
from fedbat.lock import locked
from fedbat.records import (
    is_begun,
    is_finished,
    read_experiment,
    read_plan,
    read_planned_engine,
    read_summary,
    run_folders,
)
from fedbat.units import count

EngineName = Annotated[str | None, typer.Option("--engine", help=f"One of {', '.join(ENGINES)}. Default: as before.")]
PrecisionName = Annotated[str | None, typer.Option("--precision", help="Arithmetic of the layers. Default: as before.")]


def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of an unfinished run or comparison.", show_default=False)],
    engine: EngineName = None,
    device: Device = None,
    precision: PrecisionName = None,
    memory_budget: MemoryBudget = None,
    tensorboard: TensorBoardFolder = None,
) -> None:
    """Continue a run or comparison that was stopped; on the CPU, the results are those of an uninterrupted one.

    [bold]Example[/]
    $ fedbat resume runs/rho4
    """
    plan = read_plan(folder)
    runs = run_folders(folder, plan) or [folder]
    if plan and is_finished(folder) and (folder / "compare.png").exists():
        return say(f"the comparison in {folder} is finished already")
    if not plan and is_finished(folder):
        with suppress(OSError), locked(folder):  # in case the folder is read-only
            remove_checkpoint(folder / "checkpoint")  # in case the process died right before
        done = count(read_summary(folder)["rounds_done"], "round")
        return say(f"the run in {folder} is finished already: {done}")
    asked = _asked(folder, runs)
    how = RunOptions(
        engine or asked.get("asked", "auto"),
        device or asked.get("device"),
        precision or asked.get("precision", "fp32"),
        num_bytes(memory_budget),
        tensorboard,
    )
    check_engine(how.engine, how.device, how.precision)
    if plan:
        federations = [prepare(experiment) for experiment in plan]
        check_trackers(federations, folder, how)
        with locked(folder):
            return execute_all(federations, folder, how)
    federation = prepare(read_experiment(folder))
    print_table([(federation, execute(federation, folder, how))])
    say(f"recorded in {folder}")


def _asked(folder: Path, runs: list[Path]) -> dict[str, Any]:
    """The engine asked for when the first of these runs began or, if none has, when the comparison was planned."""
    found = (read_summary(run)["engine"] for run in runs if is_begun(run))
    return next(found, None) or read_planned_engine(folder)
