"""The page of `fedbat report`: what it says is what the records say, and a browser without a network draws it."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from fedbat import ConfigError, DataError
from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.lock import locked
from fedbat.report import find_runs, render
from fedbat.report.charts import group_data, styles_of
from fedbat.report.holdings import Holdings, holdings_of
from fedbat.report.runs import group_runs
from fedbat.reproduce.publish import publish
from fedbat.reproduce.record import load_record
from fedbat.run import run_recorded
from tests.test_simulation import MODEL

RESULTS = Path(__file__).parent.parent / "results"
NASTY = "<img src=x onerror=alert(1)>\"'&$x"
SMALL = {"clients": 12, "per_round": 2, "rounds": 3, "epochs": 1, "model": MODEL, "partition": "dirichlet"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FACTS = {"name": "SequentialEngine", "precision": "fp32", "asked": "sequential", "device": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two finished runs on the same clients."""
    root = tmp_path_factory.mktemp("runs")
    for name, method, settings in (("fedavg", "fedavg", {}), (NASTY, "fedbat", {"rho": "4"})):
        federation = prepare(Experiment(method=method, settings=settings, **SMALL))
        run_recorded(federation, SequentialEngine(federation), root / name, engine_facts=FACTS)
    return root


@pytest.fixture(scope="module")
def page(folder):
    return render(find_runs([folder])[0], f"Title {NASTY}")


def copied(folder, target, **summary):
    """The first run with another summary."""
    shutil.copytree(folder / "fedavg", target)
    found = json.loads((target / "summary.json").read_text())
    (target / "summary.json").write_text(json.dumps(found | summary))
    return target


class Reader(HTMLParser):
    """Tags with their attributes, and the cells of the tables of runs, those of hidden rows apart."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.rows, self.hidden, self.text, self._cells = [], [], [], "", None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if attributes.get("class") == "overview":
            self._cells = []
        if self._cells is not None and tag == "tr":
            self._cells = []
            (self.hidden if "hidden" in attributes else self.rows).append(self._cells)
        if self._cells is not None and tag in ("th", "td"):
            self._cells.append("")

    def handle_endtag(self, tag):
        if tag == "table":
            self._cells = None

    def handle_data(self, data):
        self.text += data
        if self._cells:
            self._cells[-1] += data

    @property
    def table(self):
        head, *rows = self.rows
        return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_table_shows_the_figures_of_the_records(folder, page):
    table = Reader(page).table
    assert set(table) == {"fedavg", "fedbat rho=4"}
    for row, name in (("fedavg", "fedavg"), ("fedbat rho=4", NASTY)):
        summary = json.loads((folder / name / "summary.json").read_text())
        accuracy = [json.loads(line)["accuracy"] for line in (folder / name / "rounds.jsonl").read_text().splitlines()]
        assert table[row]["best"] == f"{100 * max(accuracy):.2f}"
        assert table[row]["final"] == f"{100 * accuracy[-1]:.2f}"
        assert table[row]["uplink"] == f"{summary['uplink_bytes_per_client_round'] / 1000:.3g} kB"
        assert table[row]["up + down"] == f"{summary['total_bytes_per_client_round'] / 1000:.3g} kB"
        assert table[row]["saved up"] == f"{summary['uplink_saving']:.1f}x"
        assert table[row]["saved both"] == f"{summary['total_saving']:.1f}x"
        assert table[row]["bit/param"] == f"{summary['bits_per_parameter']:.3f}"
    text = Reader(page).text
    assert "2 runs: 2 methods, 1 data set, 1 kind of split, 6 rounds." in text
    assert "fmnist-mini, dirichlet beta=0.3\n" in text
    assert "12 clients, 2 a round, 3 rounds, 1 local epoch, batch size 64, learning rate 0.1" in text
    assert re.search(rf"model {MODEL}, seed 0, on CPU, \d+ cores, in fp32\n", text)


def test_what_clients_receive_and_the_averaged_model_have_columns_where_runs_have_them(folder, page, tmp_path):
    assert not {"received", "averaged"} & Reader(page).table["fedavg"].keys()
    path = copied(folder, tmp_path / "both") / "rounds.jsonl"
    models = {"received": {"accuracy": 0.25, "loss": 1.0}, "averaged": {"accuracy": 0.5, "loss": 1.0}}
    path.write_text("".join(json.dumps(json.loads(line) | models) + "\n" for line in path.read_text().splitlines()))
    table = Reader(render(find_runs([folder, tmp_path])[0], "")).rows
    found = {
        tuple(dict(zip(table[0], row, strict=True))[name] for name in ("received", "averaged")) for row in table[1:]
    }
    assert found == {("25.00", "50.00"), ("–", "–")}


def test_page_needs_nothing_from_elsewhere(page):
    assert "://" not in page
    for tag, attributes in Reader(page).tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes and attributes.get("href", "#").startswith("#")
    assert "default-src 'none'" in page


def test_names_of_the_user_are_text_not_markup(page):
    reader = Reader(page)
    assert reader.text.count(NASTY) >= 3  # in both titles and where the run was recorded
    assert not any(name.startswith("on") for _, attributes in reader.tags for name in attributes)
    assert [tag for tag, _ in reader.tags].count("script") == 3


def test_no_path_of_this_machine_is_sent_along(folder, page):
    assert str(folder.parent) not in page and f"{folder.name}/fedavg" in page


def test_same_runs_same_page(folder, page):
    assert render(find_runs([folder, folder / "fedavg"])[0], f"Title {NASTY}") == page


def test_both_forms_of_records_say_the_same(folder, tmp_path, page):
    for number, name in enumerate(("fedavg", NASTY)):
        publish(load_record(folder / name), tmp_path / f"record-{number}")
    small = render(find_runs([tmp_path])[0], "Title")
    assert Reader(small).rows == Reader(page).rows


def test_every_record_of_results_is_there_and_labels_differ():
    runs, faults = find_runs([RESULTS])
    assert not faults and len(runs) == len(list(RESULTS.rglob("summary.json"))) >= 33
    groups = group_runs(runs)
    assert sorted(run.name for group in groups for run in group.runs) == sorted(run.name for run in runs)
    for group in groups:
        assert len(set(group.labels)) == len(group.labels)
        assert len({(run.config["dataset"], run.config["partition"], run.config["clients"]) for run in group.runs}) == 1
    page = render(runs, "Results")
    assert len(page) < 3.5e6
    reader = Reader(page)
    assert len(reader.rows) == sum(1 + len(group.series) for group in groups)
    assert len(reader.hidden) == sum(len(series.runs) for group in groups for series in group.series if series.runs[1:])
    links = {attributes.get("href") for _, attributes in reader.tags}
    assert {f"#run-{number}" for number in range(1, len(runs) + 1)} | {
        f"#group-{n}" for n in range(len(groups))
    } < links
    assert "3 data sets, 4 kinds of split" in reader.text and "edited" not in reader.text


def test_a_label_tells_what_is_not_as_in_most_runs(folder, tmp_path):
    config = json.loads((folder / "fedavg" / "summary.json").read_text())["config"]
    changes = {"a": {}, "b": {"method": "signsgd"}, "c": {"lr": 0.2}}
    for name, change in changes.items():
        settings = (
            {}
            if "method" in change
            else json.loads((folder / "fedavg" / "summary.json").read_text())["method_settings"]
        )
        copied(
            folder,
            tmp_path / name,
            config=config | {"lr": 0.5, "weights": "batches"} | change,
            method_settings=settings,
        )
    (group,) = group_runs(find_runs([tmp_path])[0])
    assert sorted(group.labels) == ["fedavg", "fedavg lr=0.2", "signsgd"]
    text = Reader(render(group.runs, "x")).text
    assert "learning rate 0.5" in text and "weights=batches" in text and "a run's name tells where it differs" in text


def test_a_record_that_was_edited_is_marked_on_the_page_and_on_the_terminal(folder, fedbat_here, tmp_path):
    for name in ("whole", "config", "rounds"):
        publish(load_record(folder / "fedavg"), tmp_path / "runs" / name)
    summary = tmp_path / "runs" / "config" / "summary.json"
    summary.write_text(summary.read_text().replace('"lr": 0.1', '"lr": 0.2'))
    rounds = tmp_path / "runs" / "rounds" / "rounds.jsonl"
    first, *rest = rounds.read_text().splitlines(keepends=True)
    rounds.write_text("".join([json.dumps(json.loads(first) | {"accuracy": 0.99}) + "\n", *rest]))
    done = fedbat_here("report", tmp_path / "runs", "--out", tmp_path / "page.html", check=0)
    told = done.stdout + done.stderr
    assert told.count("was edited") == 2 and "runs/config was edited" in told and "runs/rounds was edited" in told
    reader = Reader((tmp_path / "page.html").read_text())
    assert "2 runs edited after publication" in reader.text
    marked = [row[0] for row in reader.rows if row[0].endswith(" edited")]
    assert len(marked) == 2 and not any("whole" in label for label in marked)
    assert not any(run.edited for run in find_runs([folder])[0])  # runs have no hashes


def test_labels_tell_apart_what_differs_and_twins_by_their_folders(folder, tmp_path):
    config = json.loads((folder / "fedavg" / "summary.json").read_text())["config"]
    for name, changes in (("a", {}), ("b", {}), ("c", {"lr": 0.5, "seed": 3})):
        copied(folder, tmp_path / name, config=config | changes)
    (group,) = group_runs(find_runs([tmp_path])[0])
    root = tmp_path.name
    assert sorted(group.labels) == [
        "fedavg lr=0.5 seed=3", f"fedavg seed=0 ({root}/a)", f"fedavg seed=0 ({root}/b)",
    ]  # fmt: skip


def test_downlinks_are_variants_with_curves_of_their_own(folder, tmp_path):
    config = json.loads((folder / "fedavg" / "summary.json").read_text())["config"]
    for down in ("32", "4", "follow"):
        copied(folder, tmp_path / down, config=config | {"down": down})
    (group,) = group_runs(find_runs([tmp_path])[0])
    assert sorted(group.labels) == ["fedavg", "fedavg down=4", "fedavg down=follow"]
    styles = styles_of([group])
    assert len({style.color for style in styles.values()}) == 1 and len(set(styles.values())) == 3
    assert [style.dash for run, style in styles.items() if run.variant == "fedavg"] == ["solid"]


def test_total_savings_of_the_committed_records_are_plausible():
    for record in (run.record for run in find_runs([RESULTS])[0]):
        ways = [record.summary["config"]["down"] != "32", record.summary["bits_per_parameter"] < 16]
        # below 2 where either way is float32, whatever goes the other way
        assert 2 < record.total_saving < 32 if all(ways) else 1 - 1e-3 < record.total_saving < 2
        assert len(record.traffic_bytes) == len(record.lines)


def test_unfinished_runs_are_shown_as_far_as_they_are(folder, tmp_path):
    begun = copied(folder, tmp_path / "begun", status="running")
    lines = (begun / "rounds.jsonl").read_text()
    (begun / "rounds.jsonl").write_text(lines[: lines.rindex('"loss"')])  # its third line is being written
    (copied(folder, tmp_path / "empty") / "rounds.jsonl").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{}")
    runs, faults = find_runs([tmp_path])
    assert [run.name for run in runs] == [f"{tmp_path.name}/begun"]
    assert "fedavg stopped after 2 of 3 rounds" in Reader(render(runs, "x")).table
    with locked(begun):
        assert "fedavg running" in Reader(render(runs, "x")).table
    assert len(faults) == 2 and "no round yet" in faults[0] and "is not a record" in faults[1]
    with pytest.raises(DataError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])


def test_a_diverged_loss_and_an_unknown_method_do_no_harm(folder, tmp_path):
    summary = json.loads((folder / "fedavg" / "summary.json").read_text())
    run = copied(folder, tmp_path / "run", config=summary["config"] | {"method": "mine"}, method_settings={"x": [1, 2]})
    lines = [json.loads(line) | {"loss": None} for line in (run / "rounds.jsonl").read_text().splitlines()]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "mine x=1,2" in Reader(render(find_runs([tmp_path])[0], "x")).table


def test_a_spike_of_the_loss_is_cut_off_and_nothing_else_is(folder, tmp_path):
    def top():
        (group,) = group_runs(find_runs([tmp_path])[0])
        return group_data(group, styles_of([group]), "")["loss_top"]

    path = copied(folder, tmp_path / "run") / "rounds.jsonl"
    assert top() is None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    usual = max(line["loss"] for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in [lines[0], lines[1] | {"loss": 1e6}, lines[2]]))
    assert usual <= top() < 1e3


def test_clients_hold_what_the_run_gave_them(monkeypatch, tmp_path):
    federation = prepare(Experiment(**SMALL))
    found = holdings_of(vars(federation.experiment))
    assert isinstance(found, Holdings)
    for client, counts in enumerate(found.counts):
        labels = federation.data.y_train[federation.split[client]]
        assert counts.tolist() == [(labels == label).sum() for label in range(10)]
    many = holdings_of(vars(Experiment(partition="virtual", clients=10**6).resolved()))
    assert len(many.counts) == 500 and many.text.startswith("The first 500 of 1,000,000 clients")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDBAT_DATA", raising=False)
    assert "not on the machine" in holdings_of(vars(Experiment(dataset="cifar10").resolved()))


def test_without_plotly_the_way_to_it_is_told(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match="pip install 'plotly"):
        render(find_runs([folder])[0], "x")


def test_command_writes_the_page(folder, fedbat_here, tmp_path):
    out = tmp_path / "page.html"
    assert f"2 runs in {out}" in fedbat_here("report", folder, "--out", out, "--title", "Mine", check=0).stdout
    assert "<title>Mine</title>" in out.read_text()
    assert "ends in .html" in fedbat_here("report", folder, "--out", tmp_path / "page.pdf", check=2).stderr
    assert "holds no run" in fedbat_here("report", tmp_path, "--out", out, check=2).stderr


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here; apt-get install chromium")

PROBE = """<script>
const done = new MutationObserver(() => {
  done.disconnect();
  const charts = [...document.querySelectorAll(".charts .chart")];
  const drawn = () => charts.map((chart) => chart.querySelectorAll(".scatterlayer .trace").length);
  const rows = () => [...document.querySelectorAll(".overview tbody")].map((body) => body.rows[0].cells[0].textContent);
  const sort = [...document.querySelectorAll(".overview th button")].find((head) => head.textContent === "best");
  const [first, second] = document.querySelectorAll(".switches [aria-pressed]");
  const inside = ({ range: [low, high], type }, values) =>
    values.map((value) => (type === "log" ? Math.log10(value) : value)).every((place) => low <= place && place <= high);
  const found = { all: drawn(), labels: [first.textContent, second.textContent] };
  found.whole = charts.map(({ data, layout }) =>
    data.every(({ x, y }) => inside(layout.xaxis, x) && inside(layout.yaxis, y)));
  first.click();
  found.withoutFirst = drawn();
  first.dispatchEvent(new Event("dblclick"));
  found.alone = charts.map((chart) => chart.data.map((trace) => trace.visible));
  document.querySelector("[data-all=true]").click();
  found.again = drawn();
  sort.click();
  found.falling = rows();
  sort.click();
  found.rising = rows();
  document.querySelector(".overview a").click();
  Plotly.Fx.hover(charts[0], [{ curveNumber: 0, pointNumber: 2 }]);
  found.hover = charts[0].querySelector(".hoverlayer").textContent;
  found.cells = document.querySelectorAll(".clients .heatmaplayer image").length;
  setTimeout(() => {
    found.opened = document.querySelectorAll("details[open] details[open]").length;
    document.documentElement.dataset.found = JSON.stringify(found);
  }, 100);
});
done.observe(document.documentElement, { attributeFilter: ["data-state"] });
</script></body>"""


def browse(page, folder, *options):
    """What Chromium makes of a page, with no network."""
    path = folder / "page.html"
    path.write_text(page)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={folder / 'user'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=60000",
        *options, path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_browser
@pytest.mark.slow
def test_browser_draws_all_charts_without_an_error(page, tmp_path):
    dom = browse(page, tmp_path, "--dump-dom")
    assert re.search(r'<html [^>]*data-state="drawn"', dom)
    assert re.search(r'<p id="failure"[^>]*hidden=""[^>]*></p>', dom)
    assert dom.count('class="trace scatter') == 6 * 2
    assert "<img" not in dom.replace("<image", "")


@needs_browser
@pytest.mark.slow
def test_page_that_cannot_draw_says_so(page, tmp_path):
    broken = re.sub(r'(id="library">)[^<]*', r"\1", page)
    dom = browse(broken, tmp_path, "--dump-dom")
    assert 'data-state="failed"' in dom and re.search(r'<p id="failure" role="alert">The charts could not be', dom)


@needs_browser
@pytest.mark.slow
def test_curves_are_switched_and_hovered_and_rows_sorted(page, folder, tmp_path):
    _, root = Reader(browse(page.replace("</body>", PROBE), tmp_path, "--dump-dom")).tags[0]
    found = json.loads(root["data-found"])
    best = {name: load_record(folder / name).best for name in ("fedavg", NASTY)}
    assert sorted(found["labels"]) == ["fedavg", "fedbat rho=4"]
    assert found["all"] == found["again"] == [2] * 6 and found["withoutFirst"] == [1] * 6
    assert all(found["whole"])  # no curve leaves its frame
    assert found["alone"] == [[True, False]] * 6
    falling = ["fedavg", "fedbat rho=4"] if best["fedavg"] >= best[NASTY] else ["fedbat rho=4", "fedavg"]
    assert found["falling"] == falling and found["rising"] == falling[::-1]
    assert found["opened"] == 1 and found["cells"] == 1
    (shown,) = [name for name, label in (("fedavg", "fedavg"), (NASTY, "fedbat rho=4")) if label == found["labels"][0]]
    assert f"accuracy {100 * load_record(folder / shown).accuracy[2]:.2f} %" in found["hover"]
    assert "round 3" in found["hover"]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 700, 420])
def test_page_looks_right(page, tmp_path, width):
    """Curves in their methods' colours where the charts are, and nothing wider than the window."""
    browse(page, tmp_path, f"--screenshot={tmp_path / 'page.png'}", f"--window-size={width},2600")
    image = (255 * matplotlib.image.imread(tmp_path / "page.png")[..., :3]).round().astype(int)
    assert image.shape == (2600, width, 3)
    for color in ((0xD5, 0x5E, 0x00), (0, 0, 0)):
        rows, columns = np.nonzero((image == color).all(axis=2))
        assert rows.max() - rows.min() > 300 and columns.max() - columns.min() > width / 3
    assert (image[:, -8:] == 255).all()


def test_a_run_that_died_between_a_line_and_its_summary_is_shown_without_that_round(folder, tmp_path):
    """Even in its first round, when there are no figures yet: it has no rounds, and others are shown."""
    begun = copied(folder, tmp_path / "begun", status="running", rounds_done=1)
    (run,) = find_runs([begun])[0]
    assert len(run.record.lines) == 1
    begun = copied(folder, tmp_path / "first", status="running", rounds_done=0)
    assert "fedavg" in render(find_runs([folder, tmp_path])[0], "x")
