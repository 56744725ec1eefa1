"""What `fedbat price` says and draws of several runs: seeds together, unfinished ones marked, the best told."""

from contextlib import suppress
from statistics import fmean

import pytest

from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.link import Link, Rate, median_computing, parse_link
from fedbat.report import find_runs, group_runs, price_group
from fedbat.run import run_recorded
from tests.test_report import SMALL

LINK = Link(Rate(10, 50))


def stop_after_two(round_):
    if round_.index == 1:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two seeds of FedAvg, the second stopped after two of three rounds, and FedBAT."""
    root = tmp_path_factory.mktemp("priced")
    for method, seed in (("fedavg", 0), ("fedavg", 1), ("fedbat", 0)):
        federation = prepare(Experiment(method=method, seed=seed, **SMALL))
        then = stop_after_two if seed else lambda round_: None
        with suppress(KeyboardInterrupt):
            run_recorded(federation, SequentialEngine(federation), root / f"{method}-{seed}", on_round=then)
    return root


def test_seeds_are_one_curve_in_the_picture(folder):
    (group,) = group_runs(find_runs([folder])[0])
    priced = price_group(group, LINK)
    curves = priced.curves()
    assert {label: curve.note for label, curve in curves.items()} == {
        "fedavg": " (2 seeds, 2 of 3 rounds)",
        "fedbat": "",
    }
    first, second = (run for run in priced.runs if run.run.config["method"] == "fedavg")
    found, (long, short) = curves["fedavg"], (first.run.record.accuracy, second.run.record.accuracy)
    assert found.accuracy == pytest.approx([fmean(pair) for pair in zip(long, short, strict=False)] + long[2:])
    totals = [fmean((a.total, b.total)) for a, b in zip(first.times, second.times, strict=False)]
    assert [times.total for times in found.times] == pytest.approx([*totals, first.times[2].total])


def test_all_runs_compute_alike_unless_asked(folder):
    """How long each took says more of what else the machine did."""
    (group,) = group_runs(find_runs([folder])[0])
    alike = price_group(group, LINK)
    seconds = {times.computing for run in alike.runs for times in run.times}
    assert seconds == {alike.link.seconds} and "the median client of the quickest run" in alike.clock
    given = price_group(group, parse_link("up=10,down=50,compute=1500"))
    assert given.clock == "as given" and str(given.link) == "10 Mbit/s up, 50 down, computing 1500 s a round"
    assert alike.link.seconds == pytest.approx(min(median_computing(r.record.lines) for r in group.runs), rel=5e-3)
    measured = price_group(group, parse_link("up=10,down=50,compute=1x"))
    assert len({times.computing for run in measured.runs for times in run.times}) > len(group.runs)


def test_the_table_marks_what_is_unfinished_and_tells_the_best(folder, fedbat_here):
    (group,) = group_runs(find_runs([folder])[0])
    best = max(run.record.best for run in group.runs)
    said = fedbat_here("price", folder, "--link", "up=10,down=50", "--target", "1", check=0).stdout
    assert "fedavg seed=1 (2 of 3 rounds)" in said and "seed=0 (" not in said
    assert f"none reaches 100.00 %, the best has {best:.2f} %; lower --target" in said
    usual = fedbat_here("price", folder, "--link", "up=10,down=50", check=0).stdout
    assert "none reaches" not in usual and "compute=1x takes each client's as measured" in " ".join(usual.split())
