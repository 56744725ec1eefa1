"""Experiment files of one's own: data sets that are functions, grids that vary anything, and mistakes in them."""

import math
from pathlib import Path

import pytest
from torch import nn

from fedbat.data import load_dataset
from fedbat.engine.sequential import SequentialEngine
from fedbat.errors import ConfigError
from fedbat.experiment import prepare
from fedbat.reproduce import Records, load_book, load_record
from fedbat.reproduce.figures import TRAFFIC, draw_figures, pictures
from fedbat.reproduce.kinds import Shelf
from fedbat.reproduce.metrics import METRICS
from fedbat.reproduce.report import render
from fedbat.reproduce.results import Results
from fedbat.run import run_recorded
from tests.made_up import made_up

GRID = """
title = "Mine"
view = "table"
[fixed]
rounds = 2
epochs = 1
per_round = 2
[grid]
clients = [4]
dataset = ["fmnist-mini"]
split = ["iid"]
method = ["fedavg", "fedbat"]
"""


def book(folder, text=GRID, **others):
    for name, content in {"mine": text, **others}.items():
        (folder / f"{name}.toml").write_text(content)
    return load_book(folder)


def page(book, records):
    return render(book, Records(tuple(records)), Path("figures"))


def rows_of(book):
    return [row for table in book.tables.values() for row in table.rows]


def flat(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))


# Data sets that are functions.


def test_curves_and_errors_of_a_data_set_of_ones_own(tmp_path):
    own = "tests.test_own_experiments:few"
    text = GRID.replace("fmnist-mini", own).replace('"table"', '"curves"')
    found = book(tmp_path, text.replace("[fixed]", '[fixed]\nmodel = "tests.test_own_grids:flat"'))
    federation = prepare(found.cells("mine", [0], {"method": "fedbat"})[0].experiment, data=load_dataset(own))
    run_recorded(federation, SequentialEngine(federation), tmp_path / "run")
    record = load_record(tmp_path / "run")
    assert 0 < METRICS["error"].of(record) < 2
    drawn = draw_figures(found, Records((record,)), tmp_path / "figures")
    stems = {f"tests.test_own_experiments-few-n4-{kind}" for kind in ("rounds", "bytes", "error")}
    assert {path.stem for path in drawn} == stems and all(path.is_file() for path in drawn)
    assert all(f"(figures/{stem}.png)" in page(found, [record]) for stem in stems)


# Grids that vary anything.


def test_rows_are_named_by_whatever_their_grid_varies(tmp_path):
    varied = GRID + "lr = [0.1, 0.2]\n"
    names = ["fedavg lr=0.1", "fedavg lr=0.2", "fedbat lr=0.1", "fedbat lr=0.2"]
    found = book(tmp_path, varied)
    records = [made_up(row, 90 - place) for place, row in enumerate(rows_of(found))]
    shown = page(found, records)
    assert [shown.count(f"| iid | `{name}` | {90 - place:.2f} |") for place, name in enumerate(names)] == [1] * 4
    curves = book(tmp_path, varied.replace('"table"', '"curves"'))
    by_round, *_ = pictures(curves.tables["mine"], Results(curves, Records(tuple(records))))
    (panel,) = by_round.panels
    assert {name: line.y[-1] for name, line in panel.lines.items()} == {
        name: pytest.approx(90 - place) for place, name in enumerate(names)
    }


def test_traffic_names_what_varies_besides_the_way_down(tmp_path):
    found = book(tmp_path, GRID.replace('"table"', '"traffic"') + 'down = ["32", "4"]\nlr = [0.1, 0.2]\n')
    records = [made_up(row, 90) for row in rows_of(found)]
    shown = page(found, records)
    names = [f"{method} lr={lr}" for method in ("fedavg", "fedbat") for lr in (0.1, 0.2)]
    assert all(shown.count(f"| iid | `{name}` | {down} | 1 |") == 1 for name in names for down in ("32", "4"))
    (panel,) = TRAFFIC.panels(rows_of(found), Results(found, Records(tuple(records))))
    assert {name: len(spots) for name, spots in panel.series.items()} == dict.fromkeys(names, 2)


# Mistakes.


@pytest.mark.parametrize("text", [GRID.replace("rounds = 2", "seed = 1"), GRID + "seed = [0, 1]\n"])
def test_seeds_are_none_of_a_grids_business(tmp_path, text):
    with pytest.raises(ConfigError, match="has seed, but --seeds chooses seeds"):
        book(tmp_path, text)


def test_a_field_that_the_split_ignores_is_refused_as_on_the_command_line(tmp_path):
    found = book(tmp_path, GRID.replace("epochs = 1", "epochs = 1\nsamples = 1000"))
    with pytest.raises(ConfigError, match="--samples is 1000, but --partition iid does not use it; drop it, or cho"):
        found.cells("mine", [0], {})


def test_differences_need_two_values_and_no_words(tmp_path):
    text = GRID.replace('"table"', '"differences"') + "lr = [0.1, 0.2]\n"
    found = book(tmp_path, text)
    shown = page(found, [made_up(row, 90) for row in rows_of(found)])
    assert "### lr\n\n`lr=0.2` instead of `lr=0.1`: " in shown
    for values in ("[0.1]", "[0.1, 0.1]", "[]"):
        with pytest.raises(ConfigError, match="is what differs, but lr has fewer than two values; add one"):
            book(tmp_path, text.replace("[0.1, 0.2]", values))


def test_a_claim_cannot_mean_rows_that_differ_in_what_is_fixed(tmp_path):
    found = book(tmp_path, other=GRID.replace("epochs = 1", "epochs = 3"))
    point = ("fmnist-mini", "4", "iid", "fedbat")
    with pytest.raises(ConfigError, match="differ in what they fix for fmnist-mini, 4 clients, iid, fedbat; a claim"):
        Shelf(found).row(*point)
    page(found, [])  # which claims nothing
    assert Shelf(book(tmp_path, other=GRID)).row(*point).identity


# There is no paper.


def test_a_page_without_a_paper_does_not_speak_of_one(tmp_path):
    found = book(tmp_path)
    shown = page(found, [made_up(row, 90) for row in rows_of(found)])
    assert "paper" not in shown and "looked into" not in shown and "None" not in shown
    (tmp_path / "paper").mkdir()
    numbers = "dataset,clients,split,method,accuracy,std\nfmnist-mini,4,iid,fedbat,90,1\n"
    (tmp_path / "paper" / "mine.csv").write_text(numbers)
    assert "*paper* is what the paper prints" in page(load_book(tmp_path), [])
