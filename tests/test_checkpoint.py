"""A run that is stopped, however it is stopped, goes on to the results it would have had."""

import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from statistics import median

import pytest
import torch
from torch import nn

from fedbat import layout_of, storage
from fedbat import run as run_module
from fedbat.checkpoint import Checkpoint
from fedbat.engine.sequential import SequentialEngine
from fedbat.errors import ConfigError, DataError
from fedbat.experiment import prepare
from fedbat.lock import LOCK
from fedbat.records import check_free, is_finished
from fedbat.run import run_recorded
from fedbat.simulation import initial_state, rounds
from tests.command import ENVIRONMENT

from .test_simulation import SMALL

METHODS = ("ef-signsgd", "fedbat")
FINISHED = {"summary.json", "rounds.jsonl", "model.safetensors"}


@pytest.fixture(autouse=True)
def checkpoint_every_round(monkeypatch):
    monkeypatch.setattr(run_module, "CHECKPOINT_SECONDS", 0)


@pytest.fixture(scope="module", params=METHODS)
def federation(request):
    return prepare(dataclasses.replace(SMALL, method=request.param, rounds=4))


@pytest.fixture(scope="module")
def uninterrupted(federation, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_recorded(federation, SequentialEngine(federation), folder)
    return folder


def run(federation, folder, **options):
    return run_recorded(federation, SequentialEngine(federation), folder, **options)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


def assert_same(folder, expected):
    assert lines_of(folder) == lines_of(expected)
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert {path.name for path in folder.iterdir()} == FINISHED
    summary, whole = summary_of(folder), summary_of(expected)
    timed_or_of_a_leg = {"seconds", "resumed", "engine"}
    assert {k: v for k, v in summary.items() if k not in timed_or_of_a_leg} == {
        k: v for k, v in whole.items() if k not in timed_or_of_a_leg
    }
    seconds = [json.loads(line)["seconds"] for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert summary["seconds"] == pytest.approx(sum(seconds))


def interrupt(num_calls):
    """Ctrl-C at the so-many-th call."""
    calls = itertools.count(1)

    def hook(*_):
        if next(calls) == num_calls:
            raise KeyboardInterrupt

    return hook


@pytest.mark.parametrize("where", [{"on_round": 1}, {"on_round": 3}, {"on_client": 6}, {"on_client": 12}])
@pytest.mark.parametrize("budget", [None, 0])
def test_interrupted_by_ctrl_c(federation, uninterrupted, tmp_path, where, budget):
    hooks = {name: interrupt(number) for name, number in where.items()}
    with pytest.raises(KeyboardInterrupt):
        run(federation, tmp_path / "run", memory_budget=budget, **hooks)
    stopped = summary_of(tmp_path / "run")
    assert stopped["status"] == "interrupted" and stopped["rounds_done"] == len(lines_of(tmp_path / "run")) > 0
    record = run(federation, tmp_path / "run", memory_budget=budget)
    assert record.finished and [leg["first_round"] for leg in record.legs] == [1, stopped["rounds_done"] + 1]
    assert_same(tmp_path / "run", uninterrupted)


def dies_at(number, federation, folder):
    """Run in a process that ends without a word right before or after one of its file replacements; whether it did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        return code == 9
    replace, moments = os.replace, itertools.count()

    def fragile(source, target):
        if next(moments) == number:
            os._exit(9)
        replace(source, target)
        if next(moments) == number:
            os._exit(9)

    try:
        storage.os.replace = fragile
        run(federation, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@pytest.mark.slow
def test_killed_at_one_moment_after_the_other(federation, uninterrupted, tmp_path):
    """Each process gets half a file operation further than the one before, until one comes to the end."""
    deaths = 0
    while dies_at(deaths, federation, tmp_path / "run"):
        deaths += 1
        assert deaths < 100
    assert deaths > 8
    assert_same(tmp_path / "run", uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_by_the_system_at_random_moments(method, fedbat_here, tmp_path):
    """Through the command line; what is killed, in new processes."""
    code = "import fedbat.run, fedbat.cli; fedbat.run.CHECKPOINT_SECONDS = 0.05; fedbat.cli.main()"
    start = [sys.executable, "-c", code]
    options = [
        "--method", method, "--clients", "12", "--per-round", "3", "--epochs", "1", "--rounds", "12",
        "--model", "tests.test_simulation:tiny", "--engine", "sequential",
    ]  # fmt: skip
    env = os.environ | ENVIRONMENT
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    fedbat_here("run", *options, "--out", whole, check=0)
    pace = median(json.loads(line)["seconds"] for line in (whole / "rounds.jsonl").read_text().splitlines())
    kills, moments = 0, random.Random(method)
    command = [*start, "run", *options, "--out", killed]
    while True:
        before = len((killed / "rounds.jsonl").read_bytes()) if kills else 0
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            while process.poll() is None and kills < 3:  # until it has done something, and then a little
                time.sleep(0.01)
                if (killed / "rounds.jsonl").exists() and len((killed / "rounds.jsonl").read_bytes()) > before:
                    time.sleep(moments.random() * 2 * pace)
                    process.send_signal(signal.SIGKILL)
                    break
            _, errors = process.communicate(timeout=300)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
        kills += 1
        command = [*start, "resume", str(killed)]
    assert kills > 1
    assert_same(killed, whole)


def test_a_process_that_died_at_the_very_end_leaves_nothing_for_long(uninterrupted, fedbat_here, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "checkpoint.json").write_text("{}")
    assert "is finished already" in fedbat_here("resume", folder, check=0).stdout
    assert_same(folder, uninterrupted)


@pytest.mark.parametrize("method", METHODS)
def test_another_model_and_a_lost_memory_are_told(method, tmp_path):
    federation = prepare(dataclasses.replace(SMALL, method=method))
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(federation, folder, on_round=interrupt(2))
    wider = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.Linear(20, 10))
    other = dataclasses.replace(federation, model=wider, layout=layout_of(wider))
    with pytest.raises(DataError, match=r"was run with another model: .* is .* there, .* here; restore the model"):
        run(other, folder)
    for path in (folder / "checkpoint").glob("memory-*"):
        path.unlink()
        with pytest.raises(DataError, match=f"cannot be read .{path.name} is not there"):
            run(federation, folder)
        break
    assert (method == "ef-signsgd") == any((folder / "checkpoint").glob("memory-*"))


def test_torn_and_stray_files_are_cut_and_removed(federation, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(federation, folder, on_round=interrupt(2))
    ahead = (uninterrupted / "rounds.jsonl").read_text().splitlines(keepends=True)[2:]
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(ahead[0] + ahead[1][:100])
    for stray in ("w-7.safetensors", "w-2.safetensors.0a.draft", "memory-99.safetensors", "checkpoint.json.1b.draft"):
        (folder / "checkpoint" / stray).write_bytes(b"torn")
    (folder / "summary.json.0a.draft").write_text("{")
    run(federation, folder, deadline=time.monotonic())
    assert len(lines_of(folder)) == 2 and not (folder / "checkpoint" / "memory-99.safetensors").exists()
    run(federation, folder)
    assert_same(folder, uninterrupted)


def test_a_process_that_died_before_its_first_checkpoint_begins_again(federation, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    assert dies_at(1, federation, folder)  # right after summary.json
    assert {path.name for path in folder.iterdir()} == {"summary.json", LOCK}
    run(federation, folder)
    assert_same(folder, uninterrupted)


def test_a_deadline_stops_between_rounds_and_costs_nothing(federation, uninterrupted, tmp_path):
    record = run(federation, tmp_path / "run", on_round=lambda _: time.sleep(1), deadline=time.monotonic() + 0.5)
    assert not record.finished and 0 < len(record.rounds) < 4
    assert summary_of(tmp_path / "run")["status"] == "interrupted"
    assert run(federation, tmp_path / "run").finished
    assert_same(tmp_path / "run", uninterrupted)


def test_library_users_save_and_load_states(federation, tmp_path):
    engine = SequentialEngine(federation)
    whole = list(rounds(federation, engine, initial_state(federation)))
    _, state = next(itertools.islice(rounds(federation, engine, initial_state(federation)), 1, None))
    Checkpoint(2, state).save(tmp_path)
    loaded = Checkpoint.load(tmp_path)
    assert loaded.next_round == 2 and set(loaded.state.memories) == set(state.memories)
    rest = list(rounds(federation, engine, loaded.state, first=2))
    assert [r.accuracy for r, _ in rest] == [r.accuracy for r, _ in whole[2:]]
    (_, one), (_, two) = rest[-1], whole[-1]
    assert all(torch.equal(one.w[name], two.w[name]) for name in two.w)
    for client, memory in two.memories.items():
        assert all(torch.equal(one.memories[client][name], tensor) for name, tensor in memory.items())


def test_the_users_own_files_stay(federation, tmp_path):
    """However much their names resemble ours."""
    own = {"notes.txt", "w-best.safetensors", "w-1.pt", "memory-7.txt", "checkpoint.json.bak", ".hidden", "results"}
    for name in own - {"results"}:
        (tmp_path / name).write_text("mine")
    (tmp_path / "results").mkdir()
    for number, (_, state) in enumerate(rounds(federation, SequentialEngine(federation), initial_state(federation))):
        Checkpoint(number + 1, state).save(tmp_path)
        Checkpoint.load(tmp_path)
    assert own < {path.name for path in tmp_path.iterdir()}
    assert [path.name for path in tmp_path.glob("w-*.safetensors") if path.name not in own] == ["w-4.safetensors"]


def test_only_memories_that_changed_are_written(tmp_path, monkeypatch):
    federation = prepare(dataclasses.replace(SMALL, method="ef-signsgd", rounds=6))
    written = []
    save = storage.save_tensors
    monkeypatch.setattr("fedbat.memories.save_tensors", lambda path, x: (written.append(path.name), save(path, x)))
    record = run(federation, tmp_path / "run")
    assert len(written) == sum(len(round_.clients) for round_ in record.rounds[:5]) + 4
    assert len(set(written)) == len(written)


def test_a_checkpoint_is_written_now_and_then(tmp_path, monkeypatch):
    federation = prepare(dataclasses.replace(SMALL, method="fedbat", rounds=3))
    saved = []
    save = Checkpoint.save
    monkeypatch.setattr(run_module, "CHECKPOINT_SECONDS", 1e6)
    monkeypatch.setattr(Checkpoint, "save", lambda self, folder: (saved.append(self.next_round), save(self, folder)))
    run(federation, tmp_path / "run")
    assert saved == [0]
    with pytest.raises(KeyboardInterrupt):
        run(federation, tmp_path / "other", on_round=interrupt(2))
    assert saved == [0, 0, 2]


def test_other_engines_are_recorded_with_their_first_round(tmp_path):
    federation = prepare(dataclasses.replace(SMALL, rounds=3))
    with pytest.raises(KeyboardInterrupt):
        run(federation, tmp_path / "run", on_round=interrupt(1), engine_facts={"name": "One"})
    run(federation, tmp_path / "run", deadline=time.monotonic(), engine_facts={"name": "Idle"})  # computed nothing
    run(federation, tmp_path / "run", engine_facts={"name": "Two"})
    summary = summary_of(tmp_path / "run")
    assert summary["engine"]["name"] == "One" and summary["versions"]["torch"] == torch.__version__
    assert [(leg["first_round"], leg["engine"]["name"]) for leg in summary["resumed"]] == [(2, "Two")]
    assert summary["resumed"][0]["versions"] == summary["versions"]


def test_what_cannot_be_continued_says_why(tmp_path):
    federation = prepare(SMALL)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(federation, folder, on_round=interrupt(1))
    other = prepare(dataclasses.replace(SMALL, lr=0.2))
    with pytest.raises(ConfigError, match=r"holds another run: lr is 0.1 there, 0.2 here; name a new folder"):
        run(other, folder)
    method = dataclasses.replace(federation.method, rho=5.0)  # as if its default had been changed
    now = dataclasses.replace(federation, method=method)
    with pytest.raises(ConfigError, match=r"run with other defaults of fedbat: rho was 6.0, is 5.0; restore them"):
        run(now, folder)
    index = folder / "checkpoint" / "checkpoint.json"
    whole = index.read_text()
    index.write_text(whole[:20])
    with pytest.raises(DataError, match=r"cannot be read .* start the run anew"):
        run(federation, folder)
    index.write_text(whole)
    lines = (folder / "rounds.jsonl").read_text()
    (folder / "rounds.jsonl").write_text(lines[:-5])
    with pytest.raises(DataError, match="has 0 whole rounds, expected the 1 of the checkpoint"):
        run(federation, folder)
    (folder / "rounds.jsonl").write_text(lines)
    index.unlink()
    with pytest.raises(DataError, match="has 1 rounds but no checkpoint to go on from"):
        run(federation, folder)


@pytest.mark.parametrize("file", ["summary.json", "compare.json"])
@pytest.mark.parametrize("text", ["{}", "[]", "3", "{"])
def test_files_that_are_no_runs_are_told_as_such(file, text, tmp_path):
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match="holds no run"):
        is_finished(tmp_path)
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        check_free(tmp_path)


def test_a_finished_run_is_read_and_left_alone(federation, uninterrupted):
    before = {path.name: path.read_bytes() for path in uninterrupted.iterdir()}
    record = run(federation, uninterrupted, on_round=interrupt(1))
    assert record.finished and len(record.rounds) == 4
    assert {path.name: path.read_bytes() for path in uninterrupted.iterdir()} == before
