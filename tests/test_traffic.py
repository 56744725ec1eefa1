"""Traffic both ways: records that stand for several cells, files that vary any field, the page and its pictures."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from fedbat.downlink import DOWNLINKS, whole_bytes
from fedbat.errors import ConfigError
from fedbat.experiment import Experiment, prepare
from fedbat.reproduce import Cell, Records, load_book
from fedbat.reproduce.cells import fewest
from fedbat.reproduce.figures import PICTURES, draw_figures, pictures
from fedbat.reproduce.figures import TRAFFIC as SPOTS
from fedbat.reproduce.pace import Machine, Pace
from fedbat.reproduce.record import load_record
from fedbat.reproduce.report import SECTIONS, render
from fedbat.reproduce.results import Results
from fedbat.reproduce.sweep import Settings, sweep
from fedbat.reproduce.tables import VIEWS
from tests.made_up import EXPERIMENTS, made_up, quiet, small_book, without_average

BOOK = load_book(EXPERIMENTS)
FEW = BOOK.tables["traffic"]

SMALL = """
title = "Small"
[fixed]
rounds = 3
epochs = 1
per_round = 2
model = "tests.test_simulation:tiny"
"""
PLAIN = """
[grid]
clients = [12]
dataset = ["fmnist-mini"]
split = ["iid"]
method = ["fedavg", "fedbat"]
"""
TRAFFIC = SMALL.replace("Small", "Few bits").replace("[fixed]", 'view = "traffic"\n[fixed]\naverage = 0.9') + PLAIN


@pytest.fixture
def book(tmp_path):
    """Two files that share their training: one with an averaged model, one without; the one without comes first."""
    parts = ('[[part]]\ntable = "plain"\nseeds = [0]\n', '[[part]]\ntable = "few"\nseeds = [0]\n')
    files = {
        "plain.toml": SMALL + PLAIN,
        "few.toml": TRAFFIC + 'down = ["32", "4"]\n',
        "order.toml": "".join(parts),
    }
    return small_book(tmp_path / "experiments", files)


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path / "results", tmp_path / "work", engine="sequential")


# A record stands for every cell whose training it is.


def averaging(average, **changes):
    return Cell(Experiment(dataset="fmnist", average=average, **changes).resolved())


def test_a_cell_stands_for_the_one_that_asks_for_no_averaged_model_and_no_other():
    plain, kept, other = averaging(0.0), averaging(0.9), averaging(0.99)
    assert plain.identity in kept.serves and kept.identity not in plain.serves and other.identity not in kept.serves
    assert averaging(0.0, down="4").identity not in kept.serves
    assert kept.folder.name == "fedbat-average-0.9-seed0"
    assert averaging(0.9, down="4", weights="batches").folder.name == "fedbat-weights-batches-down-4-average-0.9-seed0"


def test_the_fewest_cells_serve_all_and_come_where_they_are_first_needed():
    plain, kept, other = averaging(0.0), averaging(0.9), averaging(0.99)
    between = Cell(Experiment(dataset="svhn").resolved())
    assert fewest([plain, between, kept]) == fewest([kept, between, plain]) == [kept, between]
    assert fewest([plain, plain]) == [plain] and fewest([between, plain]) == [between, plain]
    for cells in itertools.permutations([plain, kept, other, between]):
        found = fewest(cells)
        assert {key for cell in found for key in cell.serves} >= {cell.identity for cell in cells} and len(found) == 3


def test_an_averaged_model_changes_nothing_in_the_training_so_one_run_fills_both_tables(book, settings):
    cells = book.cells("all", None, {})
    plain, kept = book.cells("plain", [0], {}), book.cells("few", [0], {})
    assert len(cells) == 6 and len(plain) == 2
    outcome = sweep(cells, settings, quiet)
    first = [cell.identity for cell in kept if cell.experiment.down == "32"]
    assert [cell.identity for cell in outcome.run[:2]] == first
    assert len(outcome.run) == 4 and not outcome.failed
    records = Records.load(settings.results)
    assert all(records.get(cell.identity) is not None for cell in cells) and len(records) == 4
    assert len(Results(book, records).records) == 4
    assert not sweep(cells, settings, quiet).run

    alone = dataclasses.replace(settings, results=settings.results / "alone", work=settings.work / "alone")
    sweep(plain, alone, quiet)
    for cell in plain:
        own, shared = load_record(alone.results / cell.folder), records.get(cell.identity)
        assert own.accuracy == shared.accuracy and own.uplink_bytes == shared.uplink_bytes
        assert [line["loss"] for line in own.lines] == [line["loss"] for line in shared.lines]
        assert "averaged" in shared.lines[0] and "averaged" not in own.lines[0]
        both = Records((shared, own))
        assert both.get(cell.identity) is both.get(shared.identity) is shared
        results = Results(book, both)
        found = results.found
        assert (own, shared) in results.repeats
        assert found[cell.identity].records == found[shared.identity].records == (shared,)  # all tables show the same


def test_a_record_without_an_averaged_model_is_none_for_a_cell_that_asks_for_it(book, settings):
    plain, kept = book.cells("plain", [0], {}), book.cells("few", [0], {"down": "32"})
    sweep(plain, settings, quiet)
    assert sweep(kept, settings, quiet).run == kept


def test_published_evaluations_keep_their_accuracy(book, settings):
    (cell,) = book.cells("few", [0], {"down": "4", "method": "fedbat"})
    sweep([cell], settings, quiet)
    record = load_record(settings.results / cell.folder)
    for name in ("received", "averaged"):
        accuracies = [line[name]["accuracy"] for line in record.lines]
        assert record.summary[f"{name}_best_accuracy"] == max(accuracies)
        assert all(len(repr(line[name]["loss"])) < 9 for line in record.lines)


def test_time_is_judged_by_what_was_tested_beside_the_model_if_known():
    pace, plain, kept = Pace(Machine("a card", "bf16")), averaging(0.0), averaging(0.9, down="4")
    pace.observe(vars(plain.experiment), 1.0)
    assert pace.seconds(kept.experiment, 10) == pytest.approx(10)
    pace.observe(vars(kept.experiment), 2.0)
    assert pace.seconds(kept.experiment, 10) == pytest.approx(20)
    assert pace.seconds(plain.experiment, 10) == pytest.approx(10)


# Files.


def test_every_column_of_traffic_has_every_method_both_ways_and_fedbat_all_ways():
    columns = {}
    for row in FEW.rows:
        assert row.cell(0).experiment.average == 0.9 and row.cell(0).experiment.down == row.point["down"]
        column = columns.setdefault((row.point["dataset"], row.point["split"]), {})
        column.setdefault(row.point["method"], []).append(row.point["down"])
    assert columns.pop(("cifar10", "non-iid-1")) == {"fedbat": [down for down in DOWNLINKS if down != "follow"]}
    assert len(columns) == 5
    for column in columns.values():
        assert column.pop("fedbat") == list(DOWNLINKS)
        assert column.pop("fedavg") == column.pop("eden bits=1") == ["32", "3", "2"]
        assert "fedmrn" in column and all(found == ["32", "2"] for found in column.values())


def test_rows_of_several_grids_stand_together():
    keys = [(row.point["dataset"], row.point["split"], row.point["method"]) for row in FEW.rows]
    assert [key for key, _ in itertools.groupby(keys)] == list(dict.fromkeys(keys))


def test_cells_are_chosen_by_what_files_vary():
    found = BOOK.cells("traffic", None, {"down": "8,follow", "dataset": "cifar10"})
    assert [cell.experiment.down for cell in found] == ["8", "follow", "8", "follow", "8"]
    assert {cell.experiment.down for cell in BOOK.cells("all", None, {"down": "2"})} == {"2"}
    with pytest.raises(ConfigError, match=r"choose by dataset, clients, split, method, .*down"):
        BOOK.cells("traffic", None, {"lr": "0.1"})


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (TRAFFIC.replace('"traffic"', '"pie"'), "view = 'pie', choose from table, curves"),
        (TRAFFIC + 'dwn = ["32"]\n', "no experiment has dwn; vary or fix method, "),
        (TRAFFIC.replace("average", "avg"), "no experiment has avg"),
        (TRAFFIC.replace("split =", "down ="), "a grid has no split; it needs dataset"),
    ],
)
def test_mistakes_in_files_are_told(book, file, message):
    (book.folder / "few.toml").write_text(file)
    with pytest.raises(ConfigError, match=message):
        load_book(book.folder)


def test_a_filter_in_a_file_must_be_known(book):
    (book.folder / "notes.toml").write_text('[[note]]\nonly = { lr = "1" }\ntext = "x"\n')
    with pytest.raises(ConfigError, match="cannot be chosen by lr"):
        load_book(book.folder)


# Pages.


def test_every_view_has_its_section():
    assert SECTIONS.keys() == set(VIEWS) >= PICTURES.keys()


def test_the_page_of_traffic_shows_what_the_records_say(book, settings):
    sweep(book.cells("few", [0], {"method": "fedbat"}), settings, quiet)
    records = Records.load(settings.results)
    page = render(book, records, Path("figures")).split("## Few bits")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| iid")]
    assert [row[1:3] for row in rows] == [["`fedbat`", down] for down in ("32", "4")]
    assert "Not run yet: `fedavg down=32`, `fedavg down=4` (iid)." in page
    whole = whole_bytes(prepare(book.cells("few", [0], {})[0].experiment).layout)
    for row, down in zip(rows, ("32", "4"), strict=True):
        (record,) = (record for record in records if record.configuration["down"] == down)
        summary = record.summary
        assert row[3:6] == ["1", f"{record.best:.2f}", f"{record.last10:.2f}"]
        received, last_ten = (
            "" if found is None else f"{found:.2f}" for found in map(record.last10_of, ("received", "averaged"))
        )
        best = f"{100 * summary['averaged_best_accuracy']:.2f}"
        assert row[6:9] == [received, best, last_ten] and bool(received) == (down == "4")
        up, down_bytes = sum(record.uplink_bytes) / 6, sum(line["downlink_bytes"] for line in record.lines) / 6
        assert row[9:12] == [f"{up:,.0f}", f"{down_bytes:,.0f}", f"{up + down_bytes:,.0f}"]
        assert row[12] == f"{2 * whole / (up + down_bytes):.1f} x"
    assert "fmnist-mini, 12 clients: accuracy against total traffic](figures/fmnist-mini-n12-traffic.png)" in page


def many():
    """Every row of traffic but one, with numbers as they might be."""
    up = {"fedavg": 1.57e6, "fedbat": 5.7e4, "eden bits=1": 5.7e4, "fedmrn": 5.7e4}
    down = {"32": 1.57e6, "8": 4e5, "4": 2.1e5, "3": 1.6e5, "2": 1.1e5, "follow": 5e5}
    found = []
    for place, row in enumerate(FEW.rows[:-1]):
        method, way = row.point["method"], row.point["down"]
        found.append(made_up(row, 85 - len(way) / 4 - place % 7 / 5, up=up.get(method, 2e5), down=down[way]))
    return found


def test_a_run_that_kept_no_average_stands_for_its_training_and_then_the_picture_shows_the_model_itself(book):
    plain, few = (book.tables[name].rows for name in ("plain", "few"))
    (fedavg,) = (row for row in plain if row.point["method"] == "fedavg")
    fedbat = [row for row in few if row.point["method"] == "fedbat"]
    of_the_plain = without_average(made_up(fedavg, 91))
    averaging_runs = [made_up(row, 90 - place) for place, row in enumerate(fedbat)]
    page = render(book, Records((of_the_plain, *averaging_runs)), Path("figures")).split("## Few bits")[1]
    assert "| iid | `fedavg` | 32 | 1 | 91.00 | 91.00 |" in page and "Not run yet: `fedavg down=4` (iid)." in page

    def drawn(runs):
        """Accuracies in the picture, and what they are called."""
        results = Results(book, Records(tuple(runs)))
        (panel,) = SPOTS.panels(few, results)
        heights = {method: [spot.y for spot in found] for method, found in panel.series.items()}
        return heights, SPOTS.measure(few, results)

    assert drawn([of_the_plain, *averaging_runs]) == ({"fedavg": [91], "fedbat": [90, 89]}, "last ten rounds")
    assert drawn(averaging_runs) == ({"fedbat": [91, 90]}, "averaged model, last ten rounds")
    assert not list(pictures(book.tables["few"], Results(book, Records((of_the_plain,)))))  # of another table only


def test_a_training_has_the_seeds_of_all_its_records_and_one_of_each_whatever_table_shows_it(book):
    plain, few = (book.tables[name].rows[0] for name in ("plain", "few"))
    own, *others = made_up(few, 90), *(made_up(plain, 80 + seed, seed) for seed in range(3))
    results = Results(book, Records((*others, own)))
    assert results.training(few).records == (own, *others[1:]) and results.of(few).records == (own,)
    assert results.of(plain).records == results.training(plain).records == (own, *others[1:])
    assert results.repeats == ((others[0], own),)
    page = render(book, Records((*others, own)), Path("figures"))
    assert "best rounds of those made twice\n(1) lie up to 10.00 points apart." in page


def test_spots_of_a_panel_are_means_over_the_same_seeds(book):
    few = book.tables["few"].rows
    runs = [made_up(few[0], 90, 0), *(made_up(row, 80 + seed, seed) for row in few[1:] for seed in (0, 1))]

    def drawn(*records):
        panels = SPOTS.panels(few, Results(book, Records(records)))
        return [{name: [spot.y for spot in spots] for name, spots in panel.series.items()} for panel in panels]

    assert drawn(*runs) == [{"fedavg": [91, 81], "fedbat": [81, 81]}]  # the averaged model is a point above
    assert drawn(runs[0], runs[2]) == []  # no seed in common
    assert drawn(*(run for run in runs if run.configuration["down"] == "32")) == []  # nothing to compare yet


def test_pictures_of_traffic_are_one_for_each_data_set_and_the_same_for_the_same_records(tmp_path):
    records = Records(tuple(many()))
    book = dataclasses.replace(BOOK, tables={"traffic": FEW})
    first, second = draw_figures(book, records, tmp_path / "a"), draw_figures(book, records, tmp_path / "b")
    names = {f"{dataset}-n100-traffic.{end}" for dataset in ("fmnist", "cifar10") for end in ("png", "svg")}
    assert names == {path.name for path in first}
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
