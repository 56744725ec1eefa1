"""How runs are called, on the terminal and on the page of `fedbat report`, and what tells them apart there."""

import json
import re
import shutil
from itertools import pairwise

import pytest

from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.report import find_runs, group_runs, render
from fedbat.report.charts import styles_of
from fedbat.report.runs import split_of
from fedbat.run import run_recorded
from fedbat.units import count
from tests.test_report import SMALL, Reader, browse, needs_browser

PROBE = """<script>
const done = new MutationObserver(() => {
  done.disconnect();
  const found = [...document.querySelectorAll(".charts .chart")].map((chart) =>
    [...chart.querySelectorAll(".xtick text")].map((tick) => {
      const { left, right } = tick.getBoundingClientRect();
      return [left, right, tick.textContent];
    }));
  document.documentElement.dataset.found = JSON.stringify(found);
});
done.observe(document.documentElement, { attributeFilter: ["data-state"] });
</script></body>"""


def run_of(folder, **changes):
    """A run in this folder."""
    federation = prepare(Experiment(**(SMALL | changes)))
    run_recorded(federation, SequentialEngine(federation), folder)


def runs_of(folder, **changes):
    """One run for each value of what is changed."""
    ((name, values),) = changes.items()
    for value in values:
        run_of(folder / str(value), **{name: value})
    return find_runs([folder])[0]


def test_a_run_is_called_the_same_when_it_runs_and_when_it_is_read(tmp_path):
    experiment = Experiment(settings={"rho": "4", "phi": "0.5", "bounds": "off"}, down="4", **(SMALL | {"rounds": 1}))
    federation = prepare(experiment)
    run_recorded(federation, SequentialEngine(federation), tmp_path)
    (run,), _ = find_runs([tmp_path])
    assert run.variant == experiment.variant == "fedbat rho=4 bounds=off down=4"  # phi is as always
    assert Experiment(settings={"bounds": "1e-3,0.1"}).variant == "fedbat bounds=0.001,0.1"


def test_a_split_names_its_setting_once_and_one_is_no_plural():
    unused = {"beta": None, "labels": None, "samples": None}
    assert split_of(unused | {"partition": "labels", "labels": 3}) == "labels=3"
    assert split_of(unused | {"partition": "labels-balanced", "labels": 3}) == "labels-balanced labels=3"
    assert split_of(unused | {"partition": "virtual", "beta": 0.3, "samples": 64}) == "virtual beta=0.3 samples=64"
    assert split_of(unused | {"partition": "iid"}) == "iid"
    assert [count(number, "run") for number in (0, 1, 1000)] == ["0 runs", "1 run", "1,000 runs"]


@pytest.mark.parametrize("name", ["rounds", "epochs"])
def test_runs_that_differ_in_one_number_look_different(tmp_path, name):
    groups = group_runs(runs_of(tmp_path, **{name: [1, 2, 3]}))
    assert len(groups) == 1 and len(set(styles_of(groups).values())) == 3


def test_runs_that_look_the_same_are_told_apart_by_what_differs_or_by_their_folders(tmp_path):
    run_of(tmp_path / "a", method="fedavg")
    run_of(tmp_path / "b", method="fedavg", lr=0.5, seed=3)
    table = Reader(render(find_runs([tmp_path])[0], "x")).table
    assert set(table) == {"fedavg seed 0", "fedavg lr=0.5 seed 3"}
    shutil.copytree(tmp_path / "a", tmp_path / "twin")
    table = Reader(render(find_runs([tmp_path])[0], "x")).table
    twins = {f"fedavg seed=0 ({tmp_path.name}/{name})" for name in ("a", "twin")}
    assert set(table) == {*twins, "fedavg lr=0.5 seed 3"}


def test_the_last_rounds_are_the_last_ten_or_of_few_the_last(tmp_path):
    """As on the terminal: of a short run, the mean would take in rounds in which it hardly knew a thing."""
    run_of(tmp_path / "run", rounds=1)
    path = tmp_path / "run" / "rounds.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    for number, name, figure in ((19, "final", "19.00"), (20, "last 10", "15.50")):
        rounds = [line | {"round": n, "accuracy": n / 100} for n in range(1, number + 1)]
        path.write_text("".join(json.dumps(round_) + "\n" for round_ in rounds))
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"rounds_done": number}))
        (row,) = Reader(render(find_runs([tmp_path])[0], "x")).table.values()
        assert row[name] == figure


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 9, 25])  # as many bytes apart: half a decade, one, one and a half
def test_labels_of_an_axis_are_few_and_apart(tmp_path, rounds):
    page = render(runs_of(tmp_path, rounds=[rounds]), "x")
    _, root = Reader(browse(page.replace("</body>", PROBE), tmp_path, "--dump-dom", "--window-size=1400,2400")).tags[0]
    for number, ticks in enumerate(json.loads(root["data-found"])):
        assert 2 <= len(ticks) <= 13
        assert all(right + 8 < left for (_, right, _), (left, *_) in pairwise(sorted(ticks)))
        assert number < 2 or all(re.fullmatch(r"\d+[kMG]?B", text) for _, _, text in ticks)  # the first two show rounds
