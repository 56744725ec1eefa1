"""How runs are called, on the terminal and on the page of `fedbat report`, and what tells them apart there."""

import json

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
      return [left, right];
    }));
  document.documentElement.dataset.found = JSON.stringify(found);
});
done.observe(document.documentElement, { attributeFilter: ["data-state"] });
</script></body>"""


def runs_of(folder, **changes):
    """One run for each value of what is changed."""
    ((name, values),) = changes.items()
    for value in values:
        federation = prepare(Experiment(**(SMALL | {name: value})))
        run_recorded(federation, SequentialEngine(federation), folder / str(value))
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


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 9, 25])  # as many bytes apart: half a decade, one, one and a half
def test_labels_of_an_axis_are_few_and_apart(tmp_path, rounds):
    page = render(runs_of(tmp_path, rounds=[rounds]), "x")
    _, root = Reader(browse(page.replace("</body>", PROBE), tmp_path, "--dump-dom", "--window-size=1400,2400")).tags[0]
    for ticks in json.loads(root["data-found"]):
        assert 2 <= len(ticks) <= 13
        assert all(right + 8 < left for (_, right), (left, _) in zip(sorted(ticks), sorted(ticks)[1:], strict=False))
