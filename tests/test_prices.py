"""What `fedbat price` says and draws of several runs: seeds together, unfinished ones marked, the best told."""

import json
import re
import shutil
from contextlib import suppress
from statistics import fmean, stdev

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
    said = said.replace("\N{NO-BREAK SPACE}", " ")
    seeds = [run.record.best for run in group.runs if run.config["method"] == "fedavg"]
    assert re.search(rf"^fedavg \(2 of 3 rounds\) +2 +{fmean(seeds):.2f} ± {stdev(seeds):.2f} ", said, re.M)
    assert re.search(r"^fedbat +1 +\d", said, re.M) and "seed=" not in said
    assert f"none reaches 100.00 %, the best has {best:.2f} %; lower --target" in said
    usual = fedbat_here("price", folder, "--link", "up=10,down=50", check=0).stdout
    assert "the target does not heed fedavg seed=1 (2 of 3 rounds)" in usual
    assert "none reaches" not in usual and "compute=1x takes each client's as measured" in " ".join(usual.split())


def test_a_folder_that_cannot_be_made_is_told_before_the_table(folder, fedbat_here, tmp_path):
    (tmp_path / "file").touch()
    done = fedbat_here("price", folder, "--link", "up=10,down=50", "--out", tmp_path / "file" / "x", check=2)
    assert "x cannot be created (Not a directory); name another" in done.stderr and "best %" not in done.stdout


def altered(folder, target, accuracy=None, **summary):
    """The finished run of FedAvg, with other accuracies or another summary."""
    shutil.copytree(folder / "fedavg-0", target)
    found = json.loads((target / "summary.json").read_text())
    (target / "summary.json").write_text(json.dumps(found | summary))
    if accuracy is not None:
        lines = [json.loads(line) for line in (target / "rounds.jsonl").read_text().splitlines()]
        text = "".join(json.dumps(line | {"accuracy": accuracy}) + "\n" for line in lines)
        (target / "rounds.jsonl").write_text(text)
    return target


def test_the_usual_target_heeds_only_finished_runs_above_chance(folder, fedbat_here, tmp_path):
    config = json.loads((folder / "fedavg-0" / "summary.json").read_text())["config"]
    altered(folder, tmp_path / "good", 0.8)
    altered(folder, tmp_path / "worse", 0.6, config=config | {"lr": 0.2})
    altered(folder, tmp_path / "lost", 0.099, config=config | {"lr": 5.0})
    said = fedbat_here("price", tmp_path, folder / "fedavg-1", "--link", "up=10,down=50", check=0).stdout
    assert "until 59.40 % accuracy" in said
    (told,) = (line for line in said.splitlines() if line.startswith("the target does not heed"))
    assert "fedavg seed=1 (2 of 3 rounds)" in told and "fedavg lr=5 seed=0 (at chance)" in told and "lr=0.2" not in told
    alone = fedbat_here("price", tmp_path / "lost", "--link", "up=10,down=50", check=0).stdout
    assert "no run is finished and above chance" in alone


def test_computing_times_of_different_machines_are_not_multiplied_without_a_warning(folder, fedbat_here, tmp_path):
    altered(folder, tmp_path / "a", engine={"name": "CpuEngine"}, machine={"cpus": 4, "gpu": None})
    altered(folder, tmp_path / "b", engine={"name": "CudaEngine"}, machine={"cpus": 4, "gpu": "H200"})
    warning = "warning: compute=2x multiplies what each machine measured, and these runs are of CPU, 4 cores and H200"
    said = fedbat_here("price", tmp_path, "--link", "up=10,down=50,compute=2x", check=0).stdout
    assert f"{warning}; give compute=SECONDS" in said
    for folders, compute in (([tmp_path], "compute=5"), ([tmp_path / "a"], "compute=2x")):
        link = f"up=10,down=50,{compute}"
        assert "warning" not in fedbat_here("price", *folders, "--link", link, check=0).stdout


def test_twins_have_numbers_in_the_table_and_their_folders_below(folder, fedbat_here, tmp_path):
    for name in ("one", "two"):
        altered(folder, tmp_path / name)
    said = fedbat_here("price", tmp_path, "--link", "up=10,down=50", check=0).stdout
    assert re.search(r"^fedavg #1 +\d", said, re.M) and f"\n#2: {tmp_path.name}/two\n" in said


def test_in_eighty_columns_no_word_is_broken(folder, fedbat_here, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    summary = json.loads((folder / "fedavg-0" / "summary.json").read_text())
    for seed in range(3):
        config = summary["config"] | {"method": "zerofl", "settings": {"train_sparsity": "0.0"}, "seed": seed}
        settings = {"sparsity": 0.97, "train_sparsity": 0.0, "extra": 0.0}
        altered(folder, tmp_path / str(seed), 0.5 + seed / 10, config=config, method_settings=settings)
    said = fedbat_here("price", tmp_path, "--link", "up=2,down=10,compute=5", check=0).stdout
    assert re.search(r"^train_sparsity=0 ", said, re.M)
