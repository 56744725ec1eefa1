"""One process at a time in a run's folder."""

import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from fedbat import lock
from fedbat.errors import ConfigError
from fedbat.lock import LOCK, holding, locked
from tests.command import FAST, process


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs a process that stands still")
@pytest.mark.parametrize("command", [["run"], ["compare", "--methods", "fedavg,fedbat"]])
def test_a_folder_in_use_is_refused_until_its_process_is_dead(command, fedbat_here, tmp_path):
    out = tmp_path / "out"
    start = process(*command, *FAST, "--rounds", 12, "--engine", "sequential", "--out", out)
    with subprocess.Popen(**start, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as first:
        deadline = time.time() + 120
        while not list(out.rglob("summary.json")) and time.time() < deadline:
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)  # it stands still, and has the folder
        begun = {path: path.read_bytes() for path in out.rglob("*.js*")}
        refused = fedbat_here("resume", out, check=2).stderr
        assert f"{out} is in use by process {first.pid} on " in refused and "stop it, or name another" in refused
        assert begun and begun == {path: path.read_bytes() for path in out.rglob("*.js*")}
        first.kill()
    fedbat_here("resume", out, check=0)
    assert not list(out.rglob(LOCK))


def _expect_refusal(folder):
    with pytest.raises(ConfigError, match="is in use by process"), locked(folder):
        pass


def test_a_lock_is_let_go_at_the_end_and_leaves_nothing(tmp_path):
    folder = tmp_path / "new" / "run"
    for _ in range(2):
        with locked(folder):
            assert (folder / LOCK).read_text().startswith(f"process {os.getpid()} on ")
            _expect_refusal(folder)
            child = multiprocessing.get_context("spawn").Process(target=_expect_refusal, args=(folder,))
            child.start()
            child.join(60)
            assert child.exitcode == 0
        assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), locked(folder):
        (folder / "file").touch()
        raise KeyboardInterrupt
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_what_a_killed_process_left_behind_means_nothing(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on elsewhere, of long ago")
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def _count(path, times):
    for _ in range(times):
        while True:
            with holding(path.with_name("lock")) as mine:
                if mine:
                    path.write_text(str(int(path.read_text()) + 1))
                    break


def test_no_two_processes_ever_hold_it(tmp_path):
    """Each takes, uses and removes the file many times over; a count that two raise at once would end too low."""
    path = tmp_path / "count"
    path.write_text("0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count, args=(path, 300)) for _ in range(3)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(120)
    assert path.read_text() == "900"


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, caplog):
    def none_here(file):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock_or_raise", none_here)
    with caplog.at_level(logging.WARNING), locked(tmp_path):
        assert "without locks; nothing keeps two processes from it" in caplog.text


def test_a_folder_that_its_holder_removes_at_the_same_moment_is_made_again(tmp_path):
    """An empty folder goes with its lock; whoever comes just then must not stumble over that."""

    def come_and_go(_):
        held = 0
        for _ in range(300):
            with suppress(ConfigError), locked(tmp_path / "run"):  # in use by another
                held += 1
        return held

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(come_and_go, range(4))) > 0
    assert not (tmp_path / "run").exists()
