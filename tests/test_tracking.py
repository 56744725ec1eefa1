"""What TensorBoard is told is what the record says, also of a run that goes on."""

import re
import sys
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import pytest

from fedbat import ConfigError
from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import prepare
from fedbat.run import run_recorded
from fedbat.simulation import initial_state, rounds
from fedbat.tracking import TensorBoard, figures
from tests.command import FAST, fedbat
from tests.test_simulation import sample

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def told(folder):
    """Rounds and values by name."""
    events = accumulators.EventAccumulator(str(folder)).Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def follow(folder, out, num_rounds=3):
    """Run, or go on, with TensorBoard beside it; Ctrl-C comes after so many rounds."""
    federation = prepare(sample("fedbat", rounds=3, down="4", average=0.5))
    with TensorBoard(folder) as board:

        def on_round(round_):
            board.round(round_)
            if round_.index + 1 == num_rounds < 3:
                raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            return run_recorded(federation, SequentialEngine(federation), out, on_start=board.begin, on_round=on_round)


def check(values, rounds):
    expected = {"bytes/uplink so far": list(enumerate(accumulate(r.uplink_bytes for r in rounds), start=1))}
    for round_ in rounds:
        for name, value in figures(round_):
            expected.setdefault(name, []).append((round_.index + 1, value))
    assert set(values) == set(expected)
    for name, pairs in expected.items():
        assert [step for step, _ in values[name]] == [step for step, _ in pairs], name
        assert [value for _, value in values[name]] == pytest.approx([value for _, value in pairs]), name


def test_every_figure_of_every_round_is_told(tmp_path):
    record = follow(tmp_path / "board", tmp_path / "run")
    values = told(tmp_path / "board")
    check(values, record.rounds)
    layers = record.rounds[0].layers
    assert {f"relative_error/{name}" for name in layers} <= set(values) and len(layers) > 1
    assert {"accuracy", "loss/test", "loss/train", "bytes/uplink", "bytes/downlink", "seconds"} <= set(values)
    for name in ("received", "averaged"):
        expected = [getattr(round_, name).accuracy for round_ in record.rounds]
        assert [value for _, value in values[f"accuracy/{name}"]] == pytest.approx(expected)


def test_models_that_are_not_there_are_not_told():
    federation = prepare(sample("fedbat", rounds=1))
    ((round_, _),) = rounds(federation, SequentialEngine(federation), initial_state(federation))
    assert not [name for name, _ in figures(round_) if name.startswith("accuracy/")]


@pytest.mark.parametrize("board_before", ["board", "another"])
def test_a_run_that_goes_on_is_told_whole_and_once(tmp_path, board_before):
    """Also if its beginning was told elsewhere."""
    assert follow(tmp_path / board_before, tmp_path / "run", num_rounds=2) is None
    record = follow(tmp_path / "board", tmp_path / "run")
    assert record.finished
    check(told(tmp_path / "board"), record.rounds)


@pytest.mark.parametrize("command", [["run"], ["compare", "--methods", "fedavg,fedbat"]])
def test_runs_of_the_same_name_do_not_erase_each_other(tmp_path, fedbat_here, command):
    def call(where, **expected):
        options = ["--rounds", 1, "--engine", "sequential", "--tensorboard", tmp_path / "board"]
        return fedbat_here(*command, *FAST, *options, "--out", tmp_path / where / "r", **expected)

    call("first", check=0)
    refused = call("second", check=2).stderr
    assert re.search(r"board/r\S* is the log of another run, \S*/first/r\S*; name another folder", refused)
    assert not (tmp_path / "second").exists()
    logged = tmp_path / "board" / "r" / ("" if command == ["run"] else "fedbat")
    assert len(told(logged)["accuracy"]) == 1


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("board", ["README.md", "README.md/board", "/proc/board"])
def test_what_is_in_a_folders_way_is_told_before_the_run_starts(tmp_path, fedbat_here, command, board):
    (tmp_path / "README.md").write_text("mine")
    refused = fedbat_here(command, *FAST, "--tensorboard", tmp_path / board, "--out", tmp_path / "r", check=2).stderr
    assert re.search(rf"folder {tmp_path / board}/r\S* cannot be created \(\w[\w ]+\); name another", refused)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_without_tensorboard_the_way_to_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


def test_comparison_is_followed_run_by_run(tmp_path):
    out, board = tmp_path / "mine", tmp_path / "board"
    options = ["--methods", "fedavg,fedbat", "--rounds", 2, "--engine", "sequential"]
    fedbat("compare", *FAST, *options, "--out", out, "--tensorboard", board, check=0)
    for method in ("fedavg", "fedbat"):
        assert [step for step, _ in told(board / "mine" / method)["accuracy"]] == [1, 2]


def test_example_of_the_docs_runs_as_written(tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "tracking.md").read_text()
    (code,) = re.findall(r"<!-- tests/test_tracking.py runs this -->\n```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time the run is finished, and stays on the board
        exec(code, {})
        assert len(told(tmp_path / "board" / "tracked")["accuracy"]) == 2
