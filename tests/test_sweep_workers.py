"""Sweeps in several processes, of which any may die at any moment."""

import dataclasses
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress

import pytest

from fedbat.reproduce import Cell, Records
from fedbat.reproduce.sweep import Settings, _claimed, sweep
from tests.command import process
from tests.made_up import quiet, small_book
from tests.test_reproduce import SMALL

LAST = "done, 4 run, 0 unfinished, 0 waiting, 0 failed"


@pytest.fixture
def cells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return book(tmp_path / "experiments", SMALL).cells("small", [0], {})


def book(folder, text):
    return small_book(folder, {"small.toml": text, "order.toml": '[[part]]\ntable = "small"\nseeds = [0]\n'})


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path / "results", tmp_path / "work", engine="sequential", jobs=2)


@pytest.mark.slow
def test_several_processes_leave_the_records_of_one_and_a_true_last_line(cells, settings, tmp_path, capfd):
    alone = Settings(tmp_path / "alone", tmp_path / "work", engine="sequential")
    assert sweep(cells, alone, quiet).run == sweep(cells, settings, print).run == cells
    one, two = (Records.load(root) for root in (alone.results, settings.results))
    assert all(one.get(cell.identity).accuracy == two.get(cell.identity).accuracy for cell in cells)
    said = capfd.readouterr().out.splitlines()
    assert said[0] == "0 of 4 cells done, 4 cells of unknown length left" and said[-1] == f"0 {LAST}"
    assert "4 of 4 cells done" in said


def lethal(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def faulty(*_):
    raise RuntimeError("out of memory")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "end"), [("lethal", f"died with signal {signal.SIGKILL:d}"), ("faulty", "ended with exit code 1")]
)
def test_a_cell_that_workers_die_of_is_named_and_the_others_are_run(cells, settings, model, end, capfd):
    bad = Cell(dataclasses.replace(cells[0].experiment, model=f"tests.test_sweep_workers:{model}"))
    outcome = sweep([bad, *cells[1:]], settings, print)
    assert outcome.failed == [bad] and outcome.run == cells[1:]
    said = capfd.readouterr().out
    assert said.count(f"{end} while it ran {bad.folder}") == 2 and f"{bad.folder} failed: worker" in said


def test_an_unforeseen_error_costs_its_cell_with_one_process_too(cells, settings, capsys):
    bad = Cell(dataclasses.replace(cells[0].experiment, model="tests.test_sweep_workers:faulty"))
    outcome = sweep([bad, cells[1]], dataclasses.replace(settings, jobs=1), print)
    assert outcome.failed == [bad] and outcome.run == [cells[1]]
    said = capsys.readouterr()
    assert f"{bad.folder} failed: RuntimeError: out of memory" in said.out and "Traceback" in said.err


@pytest.mark.slow
def test_a_folder_that_cannot_be_read_costs_its_cell_and_the_way_out_is_told(cells, settings, capfd):
    broken = settings.work / cells[1].folder
    broken.mkdir(parents=True)
    (broken / "summary.json").write_text("{")
    outcome = sweep(cells, settings, print)
    assert outcome.failed == [cells[1]] and len(outcome.run) == 3
    assert f"to run the cell from its first round, remove {broken}" in capfd.readouterr().out
    (broken / "summary.json").unlink()
    assert sweep(cells, settings, quiet).run == [cells[1]]


def test_a_cell_that_another_sweep_had_is_looked_at_again(cells, settings):
    """Its process may be dead by then, as here, or through with it."""
    with ExitStack() as other:
        assert other.enter_context(_claimed(settings.work / cells[0].folder))
        last = str(cells[-1].folder)
        outcome = sweep(
            cells,
            dataclasses.replace(settings, jobs=1),
            lambda text: other.close() if text.startswith(last) and "best" in text else None,
        )
    assert outcome.run == cells


def holders(work):
    """The processes that have a cell."""
    found = []
    for path in work.rglob("*-seed0.lock"):
        with suppress(FileNotFoundError, IndexError):  # taken or let go at this moment
            found.append(int(path.read_text().split()[1]))
    return found


def started(settings):
    """A sweep of two workers, both at work."""
    where = ["--results", settings.results, "--work", settings.work, "--experiments", settings.work.parent / "long"]
    book(settings.work.parent / "long", SMALL.replace("rounds = 3", "rounds = 60"))
    command = process("reproduce", "small", "--jobs", 2, "--engine", "sequential", *where)
    sweeping = subprocess.Popen(**command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: len(holders(settings.work)) == 2 or sweeping.poll() is not None)
    assert sweeping.poll() is None, sweeping.communicate()
    return sweeping


def wait_until(true):
    deadline = time.time() + 120
    while not true() and time.time() < deadline:
        time.sleep(0.02)
    assert true()


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_cell_of_a_killed_worker_is_run_by_another(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with started(settings) as sweeping:
        pid = holders(settings.work)[0]
        os.kill(pid, signal.SIGKILL)
        said, told = sweeping.communicate(timeout=300)
    assert f"(pid {pid}) died with signal 9 while it ran fmnist-mini/" in told and "tried once more" in told
    assert sweeping.returncode == 0 and said.splitlines()[-1] == f"0 {LAST}"


@pytest.mark.slow
def test_workers_end_with_their_sweep_and_the_next_one_goes_on(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with started(settings) as sweeping:
        pids = holders(settings.work)
        sweeping.kill()
    assert sweeping.pid not in pids
    wait_until(lambda: not any(map(is_alive, pids)))
    with started(settings) as again:
        said, _ = again.communicate(timeout=300)
    assert said.splitlines()[-1] == f"0 {LAST}"
