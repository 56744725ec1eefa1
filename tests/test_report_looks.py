"""On the page of `fedbat report`, no two curves of a group look alike and the labels of an axis do not overlap."""

import json

import pytest

from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.report import find_runs, group_runs, render
from fedbat.report.charts import styles_of
from fedbat.run import run_recorded
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
