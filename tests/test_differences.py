"""Single differences of the protocol, and cells that deviate from the paper: what records say, and the page."""

import dataclasses
import math
import statistics
from pathlib import Path

import pytest
from scipy import stats

from fedbat.reproduce import Records, load_book
from fedbat.reproduce.differences import sentence, switches_of
from fedbat.reproduce.kinds import Shelf
from fedbat.reproduce.questions import Questions
from fedbat.reproduce.report import render
from fedbat.reproduce.results import Results
from fedbat.reproduce.sides import sides
from fedbat.reproduce.tables import Note
from tests.made_up import EXPERIMENTS, made_up

BOOK = load_book(EXPERIMENTS)
SHELF = Shelf(BOOK)
DIFFERENCES = BOOK.tables["differences"]


def test_ours_is_what_the_other_tables_run_and_every_choice_is_another_cell():
    for grid in DIFFERENCES.grids:
        for switch in switches_of(grid, SHELF, Results(BOOK, Records(()))):
            point = switch.ours.point
            usual = SHELF.row(point["dataset"], point["clients"], point["split"], switch.method)
            assert switch.ours.identity == usual.identity != switch.switched.identity


def switched(by, grid=2, place=0):
    """The comparison of a grid after its switched runs lie `by` points above ours, one number for each seed."""
    ours, other = DIFFERENCES.grids[grid].rows[2 * place : 2 * place + 2]
    runs = [made_up(ours, 90 + seed, seed) for seed in range(len(by))]
    runs += [made_up(other, 90 + seed + points, seed) for seed, points in enumerate(by)]
    return switches_of(DIFFERENCES.grids[grid], SHELF, Results(BOOK, Records(tuple(runs))))


def test_differences_have_the_interval_of_paired_seeds():
    by = [-0.2, -0.9, -0.7]
    paper = math.hypot(0.25, 0.25)  # of FedAvg there, half a digit added, with four degrees of freedom
    error = math.sqrt((2 * statistics.variance(by) + 4 * paper**2) / 6 / 3)
    own = statistics.stdev(by) / math.sqrt(3)  # the paper's is of best rounds and tells nothing of the last ten
    for metric, freedom, scale in (("best", 6, error), ("last-ten", 2, own)):
        change = switched(by)[0].changes[metric]
        assert change.value == pytest.approx(statistics.fmean(by)) and change.seeds == 3
        assert change.interval() == pytest.approx(stats.t.interval(0.95, freedom, statistics.fmean(by), scale))


@pytest.mark.parametrize(
    ("by", "effect"),
    [
        ([-0.6, -0.5, -0.7], "costs 0.60 points"),
        ([0.6, 0.5, 0.7], "gains 0.60 points"),
        ([-0.6, 0.7, 0.1], "no measurable change (the interval reaches 0.74 points)"),
        ([5.0], "gains 5.00 points"),  # by the paper's standard deviations
        ([0.3], "no measurable change"),
    ],
)
def test_sentences_follow_from_the_numbers(by, effect):
    said = sentence(switched(by))
    assert said.startswith(f"`weights=batches` instead of `weights=samples`: {effect}")
    assert said.endswith("on fmnist non-iid-1 with fedavg.")


def test_the_page_of_differences_sets_runs_of_the_same_seed_against_each_other():
    ours, other = DIFFERENCES.grids[0].rows[:2]
    runs = [made_up(ours, accuracy, seed) for seed, accuracy in enumerate((90, 91, 50))]
    runs += [made_up(other, accuracy, seed) for seed, accuracy in enumerate((89, 90.5))]
    page = render(BOOK, Records(tuple(runs)), Path("figures")).split(f"## {DIFFERENCES.title}")[1]
    line = next(line for line in page.splitlines() if line.startswith("| fmnist | iid | `fedbat` | `bounds=off`"))
    cells = [cell.strip() for cell in line.split("|")[5:-1]]
    assert cells[:3] == cells[4:7] == ["90.50 ± 0.71", "89.75 ± 1.06", "-0.75"] and cells[8:] == ["2", "seeds, paper"]
    assert "`bounds=off` instead of `bounds=0.0005,0.05`: " in page
    assert "Not run yet: `fedbat bounds=off` (fmnist non-iid-1, fmnist non-iid-2, cifar10 iid," in page


# Cells that deviate.


@pytest.mark.parametrize(("accuracy", "deviates"), [(78.6, False), (78.4, True), (82.4, False), (82.6, True)])
def test_a_cell_deviates_beyond_a_point_and_two_standard_deviations(accuracy, deviates):
    """The paper prints 80.5 +- 1.0 for SignSGD on FMNIST with three labels a client."""
    row = SHELF.row("fmnist", "100", "non-iid-2", "signsgd")
    assert (row.paper.accuracy, row.paper.std) == (80.5, 1.0)
    records = Records((made_up(row, accuracy),))
    page = render(BOOK, records, Path("figures"))
    listed = "| fmnist | 100 | non-iid-2 | `signsgd` | 80.5 ± 1.0 |" in page
    assert listed is deviates is bool(Results(BOOK, records).deviating())
    still = "cells that deviate, still [to be looked into](#to-be-looked-into)"
    assert f"{still} | {deviates:d} of {deviates:d} |" in page
    assert page.count("has no explanation yet.\n\nNo cell.\n") == (not deviates)
    explained = dataclasses.replace(BOOK, notes=(Note({"method": "signsgd"}, "A finding."),))
    page = render(explained, records, Path("figures"))
    assert f"{still} | 0 of {deviates:d} |" in page and "- *signsgd*: A finding.\n" in page
    tried = dataclasses.replace(BOOK, notes=(Note({"method": "signsgd"}, "What was tried.", open=True),))
    page = render(tried, records, Path("figures"))
    assert f"{still} | {deviates:d} of {deviates:d} |" in page and "- *signsgd*: What was tried.\n" in page


def leaning(*by):
    """EF-SignSGD so many points from the paper in as many columns."""
    rows = [row for row in BOOK.tables["table1"].rows if row.point["method"] == "ef-signsgd"][: len(by)]
    return Records(tuple(made_up(row, row.paper.accuracy + points) for row, points in zip(rows, by, strict=True)))


@pytest.mark.parametrize(
    ("by", "chance"),
    [
        ([0.2] * 6, 2 / 2**6),
        ([0.2] * 5, 2 / 2**5),
        ([-0.2] * 8 + [0.4], 2 * 10 / 2**9),
        ([-0.2] * 7 + [0.4] * 2, 2 * 46 / 2**9),
        ([0.2] * 6 + [0.0], 2 / 2**6),  # neither above nor below
        ([0.0], 1.0),
    ],
)
def test_a_method_on_one_side_of_the_paper_is_to_be_looked_into_however_little_it_differs(by, chance):
    records = leaning(*by)
    (side,) = sides(Results(BOOK, records).columns())
    assert side.chance == pytest.approx(chance) and side.mean == pytest.approx(statistics.fmean(by))
    page = render(BOOK, records, Path("figures"))
    assert side.one_sided is (chance < 0.05) is ("- `ef-signsgd` is above the paper in " in page)
    assert not Results(BOOK, records).deviating()
    row = f"| `ef-signsgd` | {len(by)} | {side.mean:+.2f} | {side.above} | {side.below} |"
    assert f"{row} {'one-sided' if side.one_sided else ''} |" in page
    for only in ({"method": "ef-signsgd"}, {"method": "ef-signsgd", "split": "iid"}):  # of which only one covers all
        explained = dataclasses.replace(BOOK, notes=(Note(only, "A finding."),))
        open_ = Questions.of(explained, Results(explained, records)).methods
        assert bool(open_) is (side.one_sided and len(only) > 1)


def test_a_point_is_within_a_point():
    """83.9 - 84.9 is a little below -1 in floating point."""
    row = SHELF.row("cifar10", "100", "non-iid-1", "fedbat")
    results = Results(BOOK, Records((made_up(row, row.paper.accuracy - 1),)))
    assert results.compared() and results.close() == results.compared() and not results.deviating()


def test_a_row_of_several_tables_stands_under_the_name_of_the_first():
    """FedBAT on three labels a client is also "fedbat rho=6" of Table 2 and "fedbat phi=0.5" of Table 3."""
    point = ("fmnist", "100", "non-iid-2")
    rows = [SHELF.row(*point, method) for method in ("fedbat", "signsgd")]
    (column,) = Results(BOOK, Records(tuple(made_up(row, 80) for row in rows))).columns()
    assert set(column) == {"fedbat", "signsgd"} and column["fedbat"].row.paper.std == 0.4


def test_a_table_of_which_nothing_was_run_is_only_named():
    row = SHELF.row("fmnist", "100", "iid", "fedavg")
    page = render(BOOK, Records((made_up(row, 92),)), Path("figures")).split("## Table 1")[1].split("\n## ")[0]
    assert [line for line in page.splitlines() if line.startswith("###")] == ["### fmnist, 100 clients"]
    assert "Not run yet: cifar10, 100 clients; svhn, 100 clients; " in page
