"""On the page of `fedbat report`, runs that differ only in their seeds are one curve with a band."""

import json
import shutil
from statistics import fmean, stdev

import pytest

from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.report import find_runs, group_runs, render
from fedbat.report.charts import group_data, styles_of
from fedbat.reproduce.record import load_record
from fedbat.run import run_recorded
from tests.test_report import FACTS, SMALL, Reader, browse, needs_browser

PROBE = """<script>
const done = new MutationObserver(() => {
  done.disconnect();
  const charts = [...document.querySelectorAll(".charts .chart")];
  const drawn = () => charts.map((chart) => chart.querySelectorAll(".scatterlayer .trace").length);
  const button = document.querySelector(".switches small").parentElement;
  const number = charts[0].data.findIndex((trace) => trace.name === "fedavg");
  Plotly.Fx.hover(charts[0], [{ curveNumber: number, pointNumber: 1 }]);
  const found = { all: drawn(), switch: button.textContent, hover: charts[0].querySelector(".hoverlayer").textContent };
  button.click();
  found.without = drawn();
  const opener = document.querySelector(".overview [aria-expanded]"), rows = [...opener.closest("tbody").rows];
  const seen = () => rows.filter((row) => row.offsetHeight).map((row) => row.cells[0].textContent);
  found.seen = [seen()];
  opener.click();
  found.seen.push(seen());
  document.querySelector(".overview th button").click();
  found.seen.push(seen(), [...document.querySelectorAll(".overview tbody")].map((body) => body.rows.length));
  opener.click();
  found.seen.push(seen(), opener.getAttribute("aria-expanded"));
  document.documentElement.dataset.found = JSON.stringify(found);
});
done.observe(document.documentElement, { attributeFilter: ["data-state"] });
</script></body>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three seeds of one method, one of another."""
    root = tmp_path_factory.mktemp("seeds")
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("fedavg", 2), ("fedbat", 0)):
        federation = prepare(Experiment(method=method, seed=seed, **SMALL))
        run_recorded(federation, SequentialEngine(federation), root / f"{method}-{seed}", engine_facts=FACTS)
    return root


def curves_of(folder):
    (group,) = group_runs(find_runs([folder])[0])
    return {curve["label"]: curve for curve in group_data(group, styles_of([group]), "")["curves"]}


def test_a_curve_is_the_mean_of_its_seeds_in_a_band_from_the_lowest_to_the_highest(folder):
    curves = curves_of(folder)
    assert curves.keys() == {"fedavg", "fedbat"}
    seeds = [load_record(folder / f"fedavg-{seed}") for seed in range(3)]
    columns = list(zip(*(record.accuracy for record in seeds), strict=True))
    for name, way in (("mean", fmean), ("low", min), ("high", max)):
        assert curves["fedavg"]["accuracy"][name] == pytest.approx([100 * way(column) for column in columns], rel=1e-5)
    assert curves["fedavg"]["seeds"] == [3, 3, 3]
    assert curves["fedavg"]["traffic"][-1] == round(fmean(sum(record.traffic_bytes) for record in seeds))
    assert curves["fedbat"]["accuracy"].keys() == {"mean"}  # no band around a single run


def test_a_row_has_the_mean_of_its_seeds_and_opens_to_them(folder):
    runs = find_runs([folder])[0]
    reader = Reader(render(runs, "x"))
    assert reader.table.keys() == {"fedavg", "fedbat seed 0"}
    best = [load_record(folder / f"fedavg-{seed}").best for seed in range(3)]
    assert reader.table["fedavg"]["best"] == f"{fmean(best):.2f} ± {stdev(best):.2f}"
    assert (reader.table["fedavg"]["seeds"], reader.table["fedbat seed 0"]["seeds"]) == ("3", "1")
    column = reader.rows[0].index("best")
    assert [(row[0], row[column]) for row in reader.hidden] == [(f"seed {n}", f"{best[n]:.2f}") for n in range(3)]
    styles = styles_of(group_runs(runs))
    assert len({styles[run] for run in runs if run.variant == "fedavg"}) == 1


def test_a_mean_is_that_of_the_seeds_that_are_done(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "fedavg-1" / "rounds.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]))
    summary = tmp_path / "fedavg-1" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"status": "running"}))
    row = Reader(render(find_runs([tmp_path])[0], "x")).table["fedavg 1 unfinished"]
    best = [load_record(folder / f"fedavg-{seed}").best for seed in (0, 2)]
    assert (row["seeds"], row["best"]) == ("2 of 3", f"{fmean(best):.2f} ± {stdev(best):.2f}")


def test_twins_of_a_seed_stay_apart_and_look_different(folder, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(folder / "fedavg-0", tmp_path / name)
    (group,) = group_runs(find_runs([tmp_path])[0])
    assert [series.label for series in group.series] == group.labels
    assert len(set(styles_of([group]).values())) == 2


def test_a_curve_goes_on_with_the_seeds_that_have_come_so_far_and_has_gaps_where_one_diverged(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    for seed, keep, loss in ((1, 2, 1.5), (2, 3, None)):
        path = tmp_path / f"fedavg-{seed}" / "rounds.jsonl"
        lines = [json.loads(line) | {"loss": loss} for line in path.read_text().splitlines()[:keep]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = curves_of(tmp_path)["fedavg"]
    assert curve["seeds"] == [3, 3, 2] and None not in curve["accuracy"]["mean"]
    assert all(values == [None] * 3 for values in curve["loss"].values())
    assert curve["uplink"] == sorted(curve["uplink"])


@needs_browser
@pytest.mark.slow
def test_one_switch_and_one_band_for_all_seeds_and_hovering_tells_mean_and_range(folder, tmp_path):
    page = render(find_runs([folder])[0], "x")
    _, root = Reader(browse(page.replace("</body>", PROBE), tmp_path, "--dump-dom")).tags[0]
    found = json.loads(root["data-found"])
    assert found["switch"] == "fedavg 3 seeds"
    assert found["all"] == [3] * 6 and found["without"] == [1] * 6  # two curves and a band
    whole = ["fedavg", "seed 0", "seed 1", "seed 2"]
    assert found["seen"] == [["fedavg"], whole, whole, [4, 1], ["fedavg"], "false"]
    second = [100 * load_record(folder / f"fedavg-{seed}").accuracy[1] for seed in range(3)]
    told = f"accuracy mean {fmean(second):.2f} %, {min(second):.2f} % to {max(second):.2f} % over 3 seeds"
    assert told in found["hover"] and "round 2" in found["hover"]
