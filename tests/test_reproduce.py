"""Experiment files, cells, sweeps and reports."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedbat import METHODS
from fedbat.cli import app
from fedbat.data.datasets import DATASETS
from fedbat.errors import ConfigError, DataError
from fedbat.experiment import Experiment
from fedbat.figures import figures_of
from fedbat.layout import layout_of
from fedbat.link import parse_link, price
from fedbat.models import build_model
from fedbat.plots import Line, Panel, draw_panels
from fedbat.reproduce import Cell, Record, Records, load_book, load_record
from fedbat.reproduce.cells import canonical, configuration, identity
from fedbat.reproduce.figures import Curves, draw_figures, pictures
from fedbat.reproduce.metrics import weighted_error
from fedbat.reproduce.othercode import other_code
from fedbat.reproduce.pace import Machine, Pace
from fedbat.reproduce.publish import publish
from fedbat.reproduce.report import render
from fedbat.reproduce.results import Results, duel, orderings
from fedbat.reproduce.summary import AGAINST
from fedbat.reproduce.sweep import Settings, _claimed, _left, _rounds_left, _TooSlow, _Watch, sweep
from fedbat.simulation import Round
from tests.made_up import EXPERIMENTS, made_up, quiet, small_book

BOOK = load_book(EXPERIMENTS)
PRINTED = {"table1": 168, "table2": 24, "table3": 20, "table5": 21, "table6": 36}  # numbers in the paper's tables

SMALL = """
title = "Small"
label = "tb:small"
view = "curves"
[fixed]
rounds = 3
epochs = 1
per_round = 2
model = "tests.test_simulation:tiny"
[grid]
clients = [12]
dataset = ["fmnist-mini"]
split = ["iid", "non-iid-2"]
method = ["fedavg", "fedbat"]
"""


@pytest.fixture
def book(tmp_path):
    numbers = "dataset,clients,split,method,accuracy,std\nfmnist-mini,12,iid,fedavg,50.0,0.5\n"
    files = {
        "small.toml": SMALL,
        "order.toml": '[[part]]\ntable = "small"\nseeds = [0, 1]\n',
        "notes.toml": '[[note]]\nonly = { method = "fedbat" }\ntext = "A finding."\n[data]\nfmnist-mini = "a subset"\n',
        "paper/small.csv": numbers + "fmnist-mini,12,iid,fedbat,40.0,\n",
    }
    return small_book(tmp_path / "experiments", files)


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path / "results", tmp_path / "work", engine="sequential")


# The paper's numbers.


def test_every_number_of_the_paper_has_its_row_and_every_row_its_number():
    for name, count in PRINTED.items():
        table = BOOK.tables[name]
        lines = (EXPERIMENTS / "paper" / f"{name}.csv").read_text().splitlines()
        assert len(lines) - 1 == len(table.rows) == count
        assert all(row.paper is not None and 20 < row.paper.accuracy < 95 for row in table.rows)


def test_tables_of_the_paper_agree_on_the_cells_they_share():
    found = {}
    for row in itertools.chain.from_iterable(table.rows for table in BOOK.tables.values()):
        if row.paper is not None:
            assert found.setdefault(row.identity, row.paper.accuracy) == row.paper.accuracy, row.point
    assert len(found) < sum(PRINTED.values())


def test_what_the_paper_says_of_its_tables_holds_for_our_copy():
    """Section 5.3: phi = 0.5 is never beaten, and without a learned step FedBAT still beats every sign method."""
    number = {tuple(r.point.values()): r.paper.accuracy for t in BOOK.tables.values() for r in t.rows if r.paper}
    for dataset in ("fmnist", "svhn", "cifar10", "cifar100"):
        phis = [number["100", dataset, "non-iid-2", f"fedbat phi={phi}"] for phi in ("0.1", "0.3", "0.5", "0.7", "0.9")]
        assert phis[2] == max(phis)
        for method in ("signsgd", "ef-signsgd", "noisy-signsgd", "stoc-signsgd"):
            fixed = number["100", dataset, "non-iid-2", "fedbat rho=0"]
            assert fixed > number["100", dataset, "non-iid-2", method]


# Cells.


def test_a_cell_is_its_configuration_however_it_is_written():
    plain = Cell(Experiment(dataset="fmnist"))
    assert plain.identity == Cell(Experiment(dataset="fmnist", settings={"rho": "6.0"}, rounds=100)).identity
    assert plain.folder == Cell(Experiment(dataset="fmnist", settings={"rho": "6"})).folder
    for change in ({"seed": 1}, {"settings": {"rho": "4"}}, {"lr": 0.2}, {"clients": 30}, {"model": "resnet10"}):
        other = Cell(Experiment(**{"dataset": "fmnist", **change}))
        assert other.identity != plain.identity and other.folder != plain.folder


def test_folders_and_identities_go_together():
    books = [BOOK, load_book(EXPERIMENTS, "text")]
    cells = [cell for book in books for cell in book.cells("all", None, {})]
    assert len({cell.folder for cell in cells}) == len({cell.identity for cell in cells})
    for cell in cells:
        assert identity(configuration(canonical(cell.experiment))) == cell.identity


def test_the_protocol_decides_what_the_words_mean():
    row = next(row for row in BOOK.tables["table1"].rows if row.point["split"] == "non-iid-2")
    assert row.cell(0).experiment.partition == "labels-balanced"
    text = load_book(EXPERIMENTS, "text")
    narrow = text.cells("table1", [0], {"dataset": "cifar10", "split": "non-iid-2", "method": "fedbat"})
    for cell in narrow:
        assert (cell.experiment.model, cell.experiment.partition) == ("resnet10-narrow", "labels")
        assert cell.experiment.settings == {"bounds": "off", "sent": "last"}


def test_the_order_has_every_cell_once_and_first_things_first():
    cells = BOOK.cells("all", None, {})
    assert len({cell.identity for cell in cells}) == len(cells)
    for name in BOOK.tables:
        seeds = [0, 1, 2] if name in PRINTED else [0]
        assert {cell.identity for cell in BOOK.cells(name, seeds, {})} <= {cell.identity for cell in cells}
    first = [(c.experiment.dataset, c.experiment.clients, c.experiment.seed) for c in cells[:21]]
    assert set(first) == {("fmnist", 100, 0)}


def test_filters_choose_and_mistakes_are_told(tmp_path):
    assert len(BOOK.cells("table1", [0, 1], {"dataset": "fmnist,svhn", "clients": "30"})) == 2 * 2 * 3 * 7
    assert len(BOOK.cells("table2", None, {"method": "fedbat", "dataset": "fmnist"})) == 6
    with pytest.raises(ConfigError, match="choose from table1"):
        BOOK.cells("table9", None, {})
    with pytest.raises(ConfigError, match="no cell with dataset=mnist"):
        BOOK.cells("table1", None, {"dataset": "mnist"})
    with pytest.raises(ConfigError, match="no experiment files"):
        load_book(tmp_path)
    with pytest.raises(ConfigError, match="choose from authors, text"):
        load_book(EXPERIMENTS, "other")


# The sweep.


def test_a_sweep_runs_what_is_missing_once(book, settings):
    cells = book.cells("small", [0], {})
    assert sweep(cells, settings, quiet).run == cells
    before = {path: path.read_bytes() for path in settings.results.rglob("*.json*")}
    assert len(before) == 2 * len(cells)
    again = sweep(cells, settings, quiet)
    assert again.done == cells and not again.run
    assert before == {path: path.read_bytes() for path in settings.results.rglob("*.json*")}
    assert not list(settings.work.rglob("*.safetensors"))


@pytest.mark.parametrize("damage", ["half a line", "a round is missing", "another configuration"])
def test_an_invalid_record_is_run_again(book, settings, damage):
    cells = book.cells("small", [0], {"method": "fedbat", "split": "iid"})
    sweep(cells, settings, quiet)
    folder = settings.results / cells[0].folder
    summary, lines = json.loads((folder / "summary.json").read_text()), (folder / "rounds.jsonl").read_text()
    if damage == "a round is missing":
        (folder / "rounds.jsonl").write_text(lines[lines.index("\n") + 1 :])
    elif damage == "half a line":
        (folder / "rounds.jsonl").write_text(lines[:-20])
    else:
        (folder / "summary.json").write_text(json.dumps(summary | {"config": summary["config"] | {"lr": 0.2}}))
    assert sweep(cells, settings, quiet).run == cells
    assert load_record(folder).accuracy == [json.loads(line)["accuracy"] for line in lines.splitlines()]


def test_a_stopped_cell_goes_on_to_the_same_record(book, settings, monkeypatch):
    cells = book.cells("small", [0], {"method": "fedbat", "split": "iid"})
    sweep(cells, settings, quiet)
    whole = load_record(settings.results / cells[0].folder)
    other = dataclasses.replace(settings, results=settings.results / "other")

    def give_up(watch, round_):
        if round_.index == 1:
            raise _TooSlow

    with monkeypatch.context() as patch:
        patch.setattr(_Watch, "round", give_up)
        stopped = sweep(cells, other, quiet)
    assert stopped.unfinished == cells and not list(other.results.rglob("summary.json"))
    assert json.loads((other.work / cells[0].folder / "summary.json").read_text())["status"] == "interrupted"
    assert (other.work / cells[0].folder / "checkpoint").is_dir()
    assert sweep(cells, other, quiet).run == cells
    assert load_record(other.results / cells[0].folder).accuracy == whole.accuracy


def test_a_cell_is_stopped_once_its_pace_is_known_and_its_kind_is_remembered():
    cell, pace, now = Cell(Experiment(dataset="fmnist").resolved()), Pace(Machine("cpu", "fp32")), time.monotonic()
    rounds = [Round(i, 0.5, 1.0, 1.0, [0], {}, 1, 1, 1, {}, seconds=50.0 if i == 0 else 1.0) for i in range(5)]
    in_time, too_late = _Watch(cell, now + 120, pace, quiet), _Watch(cell, now + 60, pace, quiet)
    for round_ in rounds[:4]:
        in_time.round(round_)
        too_late.round(round_)
    in_time.round(rounds[4])
    assert pace.seconds(cell.experiment, 100) is None
    with pytest.raises(_TooSlow):
        too_late.round(rounds[4])
    assert pace.seconds(cell.experiment, 100) == pytest.approx(100)  # the first round is none to go by


def test_a_cell_that_cannot_end_in_time_is_not_begun(book, settings, monkeypatch):
    known, unknown = book.cells("small", [0, 1], {"method": "fedavg", "split": "iid"})
    sweep([known], settings, quiet)
    monkeypatch.setattr(Record, "seconds", 1e4)
    outcome = sweep([known, unknown], dataclasses.replace(settings, deadline=time.monotonic() + 1000), quiet)
    assert outcome.done == [known] and outcome.waiting == [unknown]
    assert not (settings.work / unknown.folder).exists()


def test_a_cell_that_another_process_has_is_left_to_it(book, settings):
    cells = book.cells("small", [0], {"method": "fedavg", "split": "iid"})
    with _claimed(settings.work / cells[0].folder) as mine:
        assert mine
        process = multiprocessing.get_context("spawn").Process(target=_expect_nothing_to_run, args=(cells, settings))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    assert sweep(cells, settings, quiet).run == cells


def test_progress_is_that_of_the_whole_sweep(book, settings):
    """What other processes have recorded meanwhile is done."""
    cells, said = book.cells("small", [0], {"split": "iid"}), []
    other = dataclasses.replace(settings, results=settings.work / "other")
    sweep(cells[1:], other, quiet)

    def say(text):
        said.append(text)
        if text.startswith(str(cells[0].folder)):
            shutil.copytree(other.results / cells[1].folder, settings.results / cells[1].folder, dirs_exist_ok=True)

    outcome = sweep(cells, settings, say)
    assert outcome.run == cells[:1] and outcome.done == cells[1:]
    progress = [text for text in said if "cells done" in text]
    assert progress == ["0 of 2 cells done, 2 cells of unknown length left", "2 of 2 cells done"]


def test_processes_share_the_time_that_is_left(settings):
    cell, pace = Cell(Experiment(dataset="fmnist").resolved()), Pace(Machine("cpu", "fp32"))
    pace.observe(configuration(cell.experiment), 11.95)  # 1195 s for 100 rounds, and five to begin
    assert _left([cell], pace, settings) == "20 min left"
    assert _left([cell] * 2, pace, dataclasses.replace(settings, jobs=2)) == "20 min left"
    assert _left([cell], pace, dataclasses.replace(settings, jobs=2)) == "20 min left"  # one has nothing to do
    other = Cell(Experiment(dataset="cifar10").resolved())
    assert _left([cell, other], pace, settings) == "20 min and 1 cell of unknown length left"


def test_a_killed_cell_has_the_rounds_after_its_checkpoint_to_run(settings):
    """Its last rounds are on record, but the checkpoint is from before them."""
    cell = Cell(Experiment(dataset="fmnist").resolved())
    folder = settings.work / cell.folder
    assert _rounds_left(cell, settings) == 100
    for status, told in (("running", 60), ("finished", 0)):
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint" / "checkpoint.json").write_text('{"next_round": 40}')
        (folder / "summary.json").write_text(json.dumps({"status": status, "config": {}, "rounds_done": 70}))
        assert _rounds_left(cell, settings) == told
    (folder / "summary.json").write_text("{")  # which its turn will tell
    assert _rounds_left(cell, settings) == 100


def _expect_nothing_to_run(cells, settings):
    torch.set_num_threads(1)
    assert sweep(cells, settings, quiet).waiting == cells


def test_a_failing_cell_does_not_stop_the_others(book, settings):
    cells = book.cells("small", [0], {"split": "iid"})
    bad = Cell(dataclasses.replace(cells[0].experiment, model="tests.test_simulation:nothing"))
    said = []
    outcome = sweep([bad, cells[1]], settings, said.append)
    assert outcome.failed == [bad] and outcome.run == [cells[1]]
    assert any("nothing" in text for text in said)


# How long it takes.


def test_pace_scales_with_the_work_and_knows_only_this_machine(book):
    machine, experiment = Machine("a card", "bf16"), Experiment(dataset="fmnist").resolved()
    pace = Pace(machine)
    assert pace.seconds(experiment, 100) is None
    pace.observe(configuration(experiment), 0.5)
    assert pace.seconds(experiment, 100) == pytest.approx(50)
    fewer = dataclasses.replace(experiment, clients=25, method="zerofl")  # four times the data for each client
    assert pace.seconds(fewer, 10) == pytest.approx(4 * 5)
    assert pace.seconds(Experiment(dataset="cifar10").resolved(), 10) is None
    record = _record({"fedavg": 0.5})[0]
    assert Pace(machine, [record]).seconds(experiment, 1) is None
    assert Pace(Machine.of(record), [record]).seconds(experiment, 1) == pytest.approx(record.seconds / 100)
    continued = Record(record.folder, record.summary | {"resumed": [{"first_round": 7}]}, record.lines)
    assert Pace(Machine.of(record), [continued]).seconds(experiment, 1) is None  # perhaps on two machines


# Records.


def _record(accuracies, dataset="fmnist", rounds=100, compressed=True, seed=0):
    """Whole runs made up, by method."""
    found, spec = [], DATASETS[dataset]
    for method, best in accuracies.items():
        config = dataclasses.asdict(Experiment(method=method, dataset=dataset, rounds=rounds, seed=seed).resolved())
        layers = {
            entry.name: {"relative_error": 0.123456789, "step": 0.00123456789, "clipped": 1 / 3}
            for entry in layout_of(build_model(config["model"], spec.shape, spec.num_classes, seed=0))
            if compressed and entry.role == "compress"
        }
        lines = [
            {"round": i + 1, "accuracy": best * (1 - math.exp(-i / 5)) if i else best, "loss": 1 / 3}
            | {
                "clients": list(range(90, 100)),
                "lost": {},
                "uplink_bytes": 1234567890,
                "uplink_nbits": 9876543210,
                "downlink_bytes": 1234567890,
                "layers": layers,
                "seconds": 1 / 3,
            }
            for i in range(rounds)
        ]
        summary = {"status": "finished", "config": config, "method_settings": METHODS[method]().settings()}
        summary |= {"engine": {"name": "E", "precision": "fp32"}, "own": {}, "resumed": [], "machine": {"gpu": None}}
        summary |= {"seed": seed, "rounds_done": rounds, "num_parameters": 1000, "num_compressed_parameters": 900}
        summary |= figures_of(lines, 1000, 900)
        found.append(Record(Path(method), json.loads(json.dumps(summary)), tuple(lines)))
    return found


def test_a_published_resnet_record_is_small_and_keeps_what_matters(tmp_path):
    run = _record({"fedbat": 0.8137}, "cifar10", 200)[0]
    record = publish(run, tmp_path / "a" / "b")
    assert sum(path.stat().st_size for path in record.folder.iterdir()) < 150_000
    assert record.accuracy == run.accuracy and record.uplink_bytes == run.uplink_bytes
    for found, expected in zip(record.layer_errors, run.layer_errors, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
    assert record.identity == run.identity and not record.faults()
    assert record.summary["layers"] == list(run.lines[0]["layers"])


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({"uploads": [7] * 10, "downloads": [30] * 10, "client_seconds": [None] * 10}, set()),
        ({"uploads": [6, 8] * 5, "downloads": [30] * 10, "client_seconds": [None] * 10}, {"uploads"}),
        (
            {"uploads": [7] * 10, "downloads": [50, 10] * 5, "client_seconds": [1.5] * 10},
            {"downloads", "client_seconds"},
        ),
    ],
)
def test_a_published_record_costs_on_a_link_what_its_run_costs(tmp_path, told, kept):
    run = _record({"fedbat": 0.9})[0]
    lines = tuple(line | {"uplink_bytes": 70, "downlink_bytes": 300} | told for line in run.lines)
    summary = run.summary | figures_of(lines, 1000, 900)
    record = publish(Record(run.folder, summary, lines), tmp_path / "record")
    assert {key for key in told if key in record.lines[0]} == kept
    link = parse_link("up=1,down=5,latency=3")
    for found, expected in zip(price(record.lines, link), price(lines, link), strict=True):
        assert found == pytest.approx(expected, rel=1e-3)  # seconds have four digits


def test_an_incomplete_run_is_not_published(tmp_path):
    run = _record({"fedbat": 0.8})[0]
    with pytest.raises(DataError, match="99 rounds, expected 1 to 100"):
        publish(Record(run.folder, run.summary, run.lines[:-1]), tmp_path / "record")
    assert not (tmp_path / "record").exists()


def test_records_are_asked_by_what_was_run():
    made = _record({"fedbat": 0.9, "fedavg": 0.8}) + _record({"fedbat": 0.7}, "svhn")
    records = Records(tuple(made))
    assert all(records.get(record.identity) is record for record in made)


def test_a_model_of_which_nothing_is_compressed_has_a_record_too(tmp_path):
    run = _record({"fedavg": 0.9}, compressed=False)[0]
    record = publish(run, tmp_path / "record")
    assert weighted_error(record) == weighted_error(run) == [math.inf] * 100


@pytest.mark.parametrize("summary", ["[]", "{}", '{"config": {}}', '{"config": {"method_settings": 3}}', "3"])
def test_a_summary_of_something_else_is_no_record(summary, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text(summary)
    (tmp_path / "other" / "rounds.jsonl").write_text("{}\n")
    assert len(Records.load(tmp_path)) == 0
    with pytest.raises(DataError, match="holds no record of fedbat"):
        load_record(tmp_path / "other")


def test_where_a_record_was_made_is_what_computed_it_not_what_was_there():
    record = _record({"fedbat": 0.9})[0]

    def processor(name, device=None, **machine):
        engine = {"name": name, "precision": "fp32", "device": device}
        summary = record.summary | {"engine": engine, "machine": {"gpu": "a card", **machine}}
        return Machine.of(Record(record.folder, summary, ())).processor

    assert processor("CudaEngine") == processor("SequentialEngine", "cuda:0") == "a card"
    assert processor("CpuEngine") == processor("SequentialEngine") == processor("CpuEngine", gpu=None) == "cpu"
    assert processor("CpuEngine", cpus=2) == "cpu, 2 cores" and processor("CudaEngine", cpus=2) == "a card"


def test_a_record_of_an_older_version_is_still_the_cells():
    """Fields that the experiment did not have yet are at their defaults; recorded settings outlive new defaults."""
    record = _record({"fedbat": 0.9})[0]
    old = {name: value for name, value in record.summary["config"].items() if name not in ("samples", "partition_seed")}
    assert Record(record.folder, record.summary | {"config": old}, record.lines).identity == record.identity
    other = record.summary | {"method_settings": record.summary["method_settings"] | {"rho": 5.0}}
    assert Record(record.folder, other, record.lines).identity != record.identity


# The report.


def test_results_are_means_over_seeds_beside_the_paper():
    runs = [_record({"fedbat": 0.91, "fedavg": 0.93}, seed=0), _record({"fedbat": 0.92}, seed=1)]
    results = Results(BOOK, Records(tuple(itertools.chain(*runs))))
    rows = [row for table in BOOK.tables.values() for row in table.rows]
    assert results.num_rows == len({row.cell(0).folder for row in rows}) < len(rows) and len(results.found) == 2
    fedbat = next(result for result in results.compared() if result.row.point["method"] == "fedbat")
    assert fedbat.best.mean == pytest.approx(91.5) and fedbat.best.std == pytest.approx(math.sqrt(0.5))
    assert fedbat.difference == pytest.approx(91.5 - 91.8)
    met = duel(results.columns(), "fedbat", "fedavg")
    assert met[:3] == (1, 0, 0) and met.difference == pytest.approx(-2)  # by the seed that both have
    assert met.difference_in_paper == pytest.approx(-0.2)
    assert duel(results.columns(), "fedbat", "zerofl") is None


def test_fedbat_is_set_against_fedavg_and_every_one_bit_baseline():
    methods = {row.point["method"] for name in ("table1", "table5") for row in BOOK.tables[name].rows}
    assert set(AGAINST) == methods - {"fedbat", "fedpaq bits=3", "fedpaq bits=4", "bifl-full"}  # which send more


def test_orderings_count_the_pairs_the_paper_ranks():
    """Of three methods, paper 92.0 > 91.8 > 90.3; here the first two change places."""
    results = Results(BOOK, Records(tuple(_record({"fedavg": 0.90, "fedbat": 0.91, "signsgd": 0.85}))))
    assert orderings(results.columns()) == (2, 3)
    assert orderings(results.columns(), apart=1.0) == (2, 2)


def test_the_page_shows_what_was_run_and_names_the_rest(book, settings):
    sweep(book.cells("small", [0, 1], {"split": "iid", "method": "fedbat"}), settings, quiet)
    records = Records.load(settings.results)
    tables = {"small": dataclasses.replace(book.tables["small"], view="table")}
    page = render(dataclasses.replace(book, tables=tables), records, Path("figures"))
    (row,) = (line for line in page.splitlines() if line.startswith(("| iid", "| non-iid-2")))
    assert "Not run yet: `fedavg` (iid, non-iid-2); `fedbat` (non-iid-2)." in page
    assert row.startswith("| iid | `fedbat` | 40.0 |") and " | 2 | " in row
    mean = sum(record.best for record in records) / 2
    assert f"| {mean:.2f} ± " in row and f"| {mean - 40:+.2f} |" in row
    assert "- *fedbat*: A finding." in page and "cells run, of all | 1 of 4 |" in page
    assert "| Small | 12 | 1 of 4 | 2 |" in page and "The data set *fmnist-mini* here is a subset." in page


def test_a_curve_is_a_trailing_mean_within_the_band_of_its_seeds():
    runs = [[10.0, 20, 60, 10, 0, 0], [30.0, 0, 0, 30, 20, 20]]
    records = [Record(Path(), {}, tuple({"y": y, "uplink_bytes": 7} for y in values)) for values in runs]
    curves = Curves("", "", lambda record: [line["y"] for line in record.lines], window=3, by_bytes=True)
    line = curves._line(records)
    assert line.x == [7, 14, 21, 28, 35, 42]
    assert line.y == pytest.approx([20, 15, 20, 20, 20, 40 / 3])
    low, high = line.band
    assert low == pytest.approx([10, 15, 10, 10, 50 / 3, 10 / 3]) and high == pytest.approx(
        [30, 15, 30, 30, 70 / 3, 70 / 3]
    )
    single = dataclasses.replace(curves, window=1)._line(records[:1])
    assert single.y == runs[0] and single.band is None


def test_what_has_no_place_on_a_logarithmic_axis_is_left_out():
    records = Records(tuple(_record({"fedbat": 0.9}, compressed=False)))
    drawn = pictures(BOOK.tables["figure3"], Results(BOOK, records))
    assert [picture.name for picture in drawn] == ["fmnist-n100-rounds", "fmnist-n100-bytes"]


def test_the_page_counts_only_the_runs_it_shows_and_has_no_empty_table():
    others = _record({"fedbat": 0.9}, rounds=7)  # of no row
    for shown in (["fedavg"], ["fedavg", "fedbat"]):
        page = render(BOOK, Records(tuple(others + _record(dict.fromkeys(shown, 0.9)))), Path("figures"))
        assert (
            f"| runs (one for each seed) | {len(shown)} |" in page
            and f"Runs: {len(shown)} on cpu in fp32, 1 at once." in page
        )
        assert ("FedBAT against" in page) == ("fedbat" in shown) == ("Best rounds of runs with the same seed" in page)


def test_seconds_say_how_many_runs_shared_the_machine():
    alone, *others = itertools.chain(*(_record({"fedbat": 0.9, "fedavg": 0.9}, seed=seed) for seed in (0, 1)))
    together = [Record(run.folder, run.summary | {"engine": {"jobs": "7"}}, run.lines) for run in others]
    page = render(BOOK, Records((alone, *together)), Path("figures"))
    told = {line.split("`")[1]: line.split("|")[-2] for line in page.splitlines() if line.startswith("| iid | `fed")}
    assert told == {"fedbat": " 33 (1 to 7 at once) ", "fedavg": " 33 (7 at once) "}


def test_a_method_has_the_name_by_which_it_can_be_run():
    """The tables' ZeroFL is trained densely, which is not the default."""
    (row,) = BOOK.tables["table1"].where({"dataset": "fmnist", "clients": "100", "split": "iid", "method": "zerofl"})
    page = render(BOOK, Records((made_up(row, 90),)), Path("figures"))
    assert "| iid | `zerofl train_sparsity=0` | 90.2 ± 0.1 |" in page and "`zerofl`" not in page
    text = load_book(EXPERIMENTS, "text").protocol
    assert text.spelled("fedbat rho=4") == "fedbat bounds=off sent=last rho=4" and text.spelled("fedavg") == "fedavg"


def test_a_folder_of_ones_own_needs_a_table_and_nothing_else(tmp_path):
    with pytest.raises(ConfigError, match=r"no experiment files in .*with files of yours"):
        load_book(tmp_path)
    grid = 'clients = [5]\ndataset = ["fmnist-mini"]\nsplit = ["labels"]\nmethod = ["fedbat"]\n'
    (tmp_path / "mine.toml").write_text(f'title = "Mine"\n[fixed]\nper_round = 2\n[grid]\n{grid}')
    book = load_book(tmp_path)
    (cell,) = book.cells("mine", None, {})
    assert str(cell.folder) == "fmnist-mini/labels-n5/fedbat-per_round-2-seed0"
    assert "cells run, of all | 0 of 1" in render(book, Records(()), Path("figures"))
    page = render(book, Records(tuple(made_up(row, 90) for row in book.tables["mine"].rows)), Path("figures"))
    assert "| split | method | best | n | last ten |" in page  # there is no paper to stand beside
    assert "of the paper" not in page and "Claims" not in page and "Protocol" not in page
    with pytest.raises(ConfigError, match="unknown split 'labls'; choose from dirichlet, iid, labels"):
        (tmp_path / "mine.toml").write_text(f'title = "Mine"\n[grid]\n{grid.replace("labels", "labls")}')
        load_book(tmp_path).cells("mine", None, {})


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("mine", "[grid]\n", "mine.toml has no title; it needs title"),
        ("mine", SMALL.replace("curves", "traffic"), 'mine.toml: a grid has no down, which view = "traffic" shows'),
        ("order", '[[part]]\ntable = "small"\n', "order.toml: a part has no seeds; it needs table, seeds"),
        (
            "order",
            '[[part]]\ntable = "small"\nseeds = []\nfor = 1\n',
            "a part has for, expected only table",
        ),
        ("order", "part = [1]\n", "a part is 1, expected a table with table, seeds"),
        ("notes", "[[note]]\nonly = {}\n", "notes.toml: a note has no text; it needs only, text"),
        ("protocols", "[authors]\n", "protocols.toml: authors has no title"),
    ],
)
def test_mistakes_in_files_are_told_with_their_place(tmp_path, file, text, sentence):
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / f"{file}.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load_book(tmp_path)


def test_a_method_with_half_a_setting_is_told(tmp_path):
    (tmp_path / "mine.toml").write_text('title = "Mine"\n[grid]\nclients = [5]\ndataset = ["fmnist-mini"]\n'
                                        'split = ["iid"]\nmethod = ["fedbat rho"]\n')  # fmt: skip
    with pytest.raises(ConfigError, match="method 'fedbat rho' has 'rho', expected a setting such as rho=6"):
        load_book(tmp_path).cells("mine", None, {})


def test_the_same_records_give_the_same_pictures(tmp_path):
    records = Records(tuple(_record({"fedavg": 0.9, "fedbat": 0.89, "zerofl": 0.8}) + _record({"fedbat": 0.9}, seed=1)))
    first, second = draw_figures(BOOK, records, tmp_path / "a"), draw_figures(BOOK, records, tmp_path / "b")
    assert {path.name for path in first} == {
        f"fmnist-n100-{kind}.{end}" for kind in ("rounds", "bytes", "error") for end in ("png", "svg")
    }
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_method_has_its_colour_in_every_picture(tmp_path):
    line = Line([1, 2, 3], [1.0, 2.0, 3.0])
    colours = []
    for methods in (["fedbat"], ["zerofl", "fedbat"]):
        path = tmp_path / f"{len(methods)}.svg"
        draw_panels([Panel("", dict.fromkeys(methods, line))], "", [path])
        colours.append("#d55e00" in path.read_text())
    assert colours == [True, True]


# The command.


def test_the_command_runs_lists_and_writes(book, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    runner = CliRunner()

    def reproduce(*arguments):
        return runner.invoke(app, ["reproduce", *arguments])

    done = reproduce("small", "--only", "split=iid", "--only", "method=fedbat", "--engine", "sequential")
    assert done.exit_code == 0 and "1 run, 0 unfinished" in done.output, done.output
    listed = reproduce("--list").output.split()
    assert listed[listed.index("small") :][:3] == ["small", "4", "1"]
    cells = reproduce("small", "--list").output.splitlines()
    assert len(cells) == 5 and cells[-1] == "1 of 4 done" and sum("not run yet" in cell for cell in cells) == 3
    written = reproduce("--write")
    assert written.exit_code == 0 and "1 records in RESULTS.md" in written.output
    text = reproduce("--write", "--protocol", "text")
    assert text.exit_code == 0 and "0 records in RESULTS-text.md" in text.output
    assert "cells run, of all | 1 of 4 |" in (tmp_path / "RESULTS.md").read_text()
    assert (tmp_path / "results/figures/fmnist-mini-n12-rounds.png").is_file()
    assert not (tmp_path / "results/CLAIMS.md").exists()  # nothing is claimed
    claim = 'id = "a"\nwhere = "ours"\ntext = "t"\nunchecked = "why"\n'
    (tmp_path / "experiments/claims.toml").write_text(f"[cells]\n[[claim]]\n{claim}")
    assert reproduce("--write").exit_code == 0
    assert "](../RESULTS.md)" in (tmp_path / "results/CLAIMS.md").read_text()
    assert "](results/CLAIMS.md)" in (tmp_path / "RESULTS.md").read_text()


def test_experiments_of_ones_own_leave_a_clone_as_it_is(tmp_path, monkeypatch):
    """Their records and page have a folder of their own, in which its links are right."""
    monkeypatch.chdir(tmp_path)
    theirs = {"RESULTS.md": "# Results", "docs/page.md": "<!-- from the records: width -->\n<!-- end -->\n"}
    for name, text in theirs.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    traffic = SMALL.replace('"curves"', '"traffic"') + 'down = ["32", "4"]\n'
    small_book(Path("grids"), {"small.toml": SMALL, "traffic.toml": traffic})
    command = ["reproduce", "small", "--only", "split=iid", "--engine", "sequential", "--write"]
    done = CliRunner().invoke(app, [*command, "--experiments", "grids"])
    assert done.exit_code == 0, done.output
    assert {name: Path(name).read_text() for name in theirs} == theirs and not Path("results").exists()
    page = Path("grids-results/RESULTS.md").read_text()
    assert "from the records in `grids-results/`" in page and "`grids/protocols.toml`" in page
    links = re.findall(r"\]\(([^)#]+)\)", page)
    assert links and all((Path("grids-results") / link).is_file() for link in links), links


def test_records_that_other_code_of_ones_own_made_are_named(tmp_path, monkeypatch, fedbat_here):
    monkeypatch.chdir(tmp_path)
    module = "from fedbat.methods.fedbat import FedBAT\n\n\nclass Mine(FedBAT):\n    pass\n"
    Path("mymethods.py").write_text(module)
    small_book(Path("grids"), {"small.toml": SMALL.replace('["fedavg", "fedbat"]', '["fedavg", "mymethods:Mine"]')})
    mine = ("--experiments", "grids", "--engine", "sequential")
    try:
        first = fedbat_here("reproduce", "small", "--only", "split=iid", *mine, check=0).stdout
        listed = fedbat_here("reproduce", "small", "--list", *mine, check=0).stdout
        assert "other code" not in first + listed
        Path("mymethods.py").write_text(module + "\n")
        swept = fedbat_here("reproduce", "small", *mine, check=0).stdout
        cells = fedbat_here("reproduce", "small", "--list", *mine, check=0).stdout
        sys.modules.pop("mymethods")  # which a list of all tables may not need
        tables = fedbat_here("reproduce", "--list", *mine, check=0).stdout
    finally:
        sys.modules.pop("mymethods", None)
    for said in (swept, cells, tables):
        assert said.count("made by other code of mymethods than is there now: 1 record, marked by --list") == 1
        assert said.splitlines()[-1].endswith("to run a cell again, remove its folder from grids-results")
    (named,) = re.findall(r"^(.*): best .*, by other code of mymethods$", cells, re.M)
    assert (Path("grids-results") / named / "summary.json").is_file() and "iid" in named
    Path("mymethods.py").unlink()
    assert other_code(load_record(Path("grids-results") / named)) == []  # nothing to compare with


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to do"),
        (["small", "--seeds", "a"], "expected whole numbers such as 0,1,2"),
        (["small", "--only", "fmnist"], "expected NAME=VALUE"),
        (["--list", "--only", "dataset=fmnist"], "choose what is run; name a table"),
        (["small", "--only", "model=cnn"], "choose by dataset, clients, split, method"),
        (["small", "--jobs", "0"], "at least 1"),
        (["small", "--minutes", "-1"], "--minutes is -1, expected more than 0"),
        (["small", "--minutes", "nan"], "--minutes is nan, expected more than 0"),
    ],
)
def test_mistakes_on_the_command_line_are_told(book, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)
