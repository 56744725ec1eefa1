"""The command line as a person meets it: real folders, and real processes wherever something is run."""

import errno
import json
import re
import signal
import subprocess
import time
from io import StringIO
from statistics import mean, stdev

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import nn

from fedbat.cli import _one_sentence_errors
from fedbat.cli.options import short_names
from fedbat.data import DATASETS
from fedbat.engine.workers import _Worker
from fedbat.methods import METHODS
from fedbat.methods.fedbat import FedBAT
from fedbat.settings import settings_of
from fedbat.simulation import Round
from fedbat.view import RunView
from tests.command import FAST, fedbat, process


def no_model(shape, num_classes):
    return 3


def wrong_size(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 3))


def wrong_input(shape, num_classes):
    return nn.Linear(5, num_classes)


def test_run_leaves_a_whole_record(tmp_path):
    out = tmp_path / "run"
    done = fedbat("run", *FAST, "--rounds", 3, "--set", "rho=4", "--set", "bits=2", "--out", out, check=0)
    assert {p.name for p in out.iterdir()} == {"summary.json", "rounds.jsonl", "model.safetensors"}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["method_settings"]["rho"] == 4
    assert summary["method_settings"]["bits"] == 2 and 2 < summary["bits_per_compressed_parameter"] < 2.1
    lines = [line for line in done.stdout.splitlines() if line.startswith("fedbat") and "round " in line]
    assert len(lines) == 3 and all(word in lines[1] for word in ("acc", "loss", "up", "bit/param", "left"))


def test_compare_ends_in_a_table_and_a_picture(tmp_path):
    out = tmp_path / "out"
    done = fedbat(
        "compare", *FAST, "--rounds", 2, "--methods", "fedavg,fedbat,fedpaq", "--set", "fedpaq.bits=3", "--out", out,
        check=0,
    )  # fmt: skip
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    folders = ("fedavg", "fedbat", "fedpaq-bits-3")
    summaries = {m.partition("-")[0]: json.loads((out / m / "summary.json").read_text()) for m in folders}
    assert summaries["fedpaq"]["method_settings"]["bits"] == 3
    lines = done.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("run "))
    assert max(map(len, lines[start : start + 4])) <= 80
    whole = summaries["fedavg"]["downlink_bytes_per_client_round"]
    for method, *_, up, down, less_up, less, _, _, _ in map(str.split, lines[start + 1 : start + 4]):
        summary = summaries[method]
        up_bytes, down_bytes = (summary[f"{way}link_bytes_per_client_round"] for way in ("up", "down"))
        assert float(up) == pytest.approx(8 * up_bytes / summary["num_parameters"], abs=6e-3)
        assert float(down) == pytest.approx(8 * down_bytes / summary["num_parameters"], abs=6e-3)
        assert float(less_up.removesuffix("x")) == pytest.approx(whole / up_bytes, abs=0.06)
        assert float(less.removesuffix("x")) == pytest.approx(2 * whole / (up_bytes + down_bytes), abs=0.06)
        assert summary["uplink_saving"] == pytest.approx(whole / up_bytes)
    assert str(out / "compare.png") in done.stdout and "received" not in done.stdout


def test_compare_sets_downlinks_side_by_side_and_prices_them(fedbat_here, tmp_path):
    out, on = tmp_path / "out", ("--link", "up=1,down=8,compute=2x", "--target", "0.01")
    plan = ("--rounds", 3, "--methods", "fedavg,fedbat", "--down", "32,follow", "--average", 0.5)
    done = fedbat("compare", *FAST, *plan, *on, "--out", out, check=0)
    progress = [line for line in done.stdout.splitlines() if " round " in line and " acc " in line]
    assert len(progress) == 12 and len({line.index("round ") for line in progress}) == 1  # in one column
    folders = {"fedavg", "fedavg-down-follow", "fedbat", "fedbat-down-follow"}
    assert {path.name for path in out.iterdir() if path.is_dir()} == folders
    others = done.stdout.partition("final, %")[2].splitlines()[1:5]
    for line, folder in zip(others, sorted(folders), strict=True):
        last = json.loads((out / folder / "rounds.jsonl").read_text().splitlines()[-1])
        expected = [found and found["accuracy"] for found in (last, last.get("received"), last.get("averaged"))]
        assert line.split()[-3:] == ["–" if figure is None else f"{100 * figure:.2f}" for figure in expected]
        assert (expected[1] is None) == ("down" not in folder) and expected[2] is not None
    told = json.loads((out / "link.json").read_text())
    (group,) = told["groups"]
    assert told["rates"] == "1 Mbit/s up, 8 down" and group["link"] == f"{told['rates']}, computing 2x as measured"
    assert group["computing"].startswith("measured client by client on ")
    assert group["target"] == 0.01 and len(group["runs"]) == 4
    for run in group["runs"]:
        assert run["run"] in done.stdout and run["to_target"]["rounds"] == 1
        first = json.loads((tmp_path / run["recorded_in"] / "rounds.jsonl").read_text().splitlines()[0])
        sent = 8e-6 * (first["uploads"][0] / 1 + first["downloads"][0] / 8)  # all clients' are of one size
        expected = sent + 2 * max(first["client_seconds"]) + first["server_seconds"]
        assert run["to_target"]["seconds"] == pytest.approx(expected)
    assert (out / "link.png").read_bytes().startswith(b"\x89PNG")
    again = fedbat_here("price", out, *on, "--out", tmp_path / "again", check=0)
    assert (tmp_path / "again" / "link.json").read_bytes() == (out / "link.json").read_bytes()
    assert "measured client by client" in again.stdout


def test_compare_takes_seeds_and_variants_of_a_method(fedbat_here, tmp_path):
    out = tmp_path / "out"
    methods = "fedavg,fedbat rho=2,fedbat rho=6"
    plan = ("--methods", methods, "--set", "fedbat.phi=0", "--seeds", "3,5", "--down", "32,4")
    said = fedbat_here("compare", *FAST, "--rounds", 20, *plan, "--out", out, check=0).stdout
    variants = ("fedavg", "fedbat-rho-2-phi-0", "fedbat-phi-0")
    names = [f"{variant}{down}" for variant in variants for down in ("", "-down-4")]
    assert {path.name for path in out.iterdir() if path.is_dir()} == {f"{n}-seed-{s}" for n in names for s in (3, 5)}
    assert re.search(r"^\[ 9/12\] fedbat rho=6 phi=0 seed=3 +round 1/20 ", said, re.M)
    for name in names:
        runs = [json.loads((out / f"{name}-seed-{seed}" / "summary.json").read_text()) for seed in (3, 5)]
        assert [run["seed"] for run in runs] == [3, 5]
        label = name.replace("-down-4", " down=4").replace("fedbat-phi-0", "fedbat rho=6 phi=0")
        label = label.replace("-rho-2", " rho=2").replace("-phi-0", " phi=0")
        (line,) = (line for line in said.splitlines() if re.match(rf"{label}  +\d", line) and "x" in line)
        for key in ("best_accuracy", "last10_accuracy"):
            values = [100 * run[key] for run in runs]
            assert f"{mean(values):.2f} ± {stdev(values):.2f}" in line
        assert len(line) <= 80
    assert "last 10" in said and "means ± standard deviations over 2 seeds" in said
    best = {  # by variant and seed
        name: [json.loads((out / f"{name}-seed-{s}" / "summary.json").read_text())["best_accuracy"] for s in (3, 5)]
        for name in ("fedavg", "fedbat-phi-0")
    }
    one, other = (100 * (a - b) for a, b in zip(best["fedbat-phi-0"], best["fedavg"], strict=True))
    half = 12.7062 * abs(one - other) / 2  # Student's quantile for one degree of freedom, times the error of the mean
    (line,) = re.findall(r"^fedbat rho=6 phi=0  +([-+].*)$", said.partition("against fedavg, points")[2], re.M)
    found = [float(number) for number in re.findall(r"[-+][\d.]+", line)[:3]]
    assert found == pytest.approx([(one + other) / 2, (one + other) / 2 - half, (one + other) / 2 + half], abs=0.006)


def test_settings_with_commas_stand_between_semicolons(fedbat_here, tmp_path):
    options = ["--rounds", 1, "--engine", "sequential", "--out", tmp_path / "out"]
    fedbat_here("compare", *FAST, "--methods", "fedavg; fedbat bounds=0.001,0.01;", *options, check=0)
    summary = json.loads((tmp_path / "out" / "fedbat-bounds-0.001,0.01" / "summary.json").read_text())
    assert summary["method_settings"]["bounds"] == [0.001, 0.01]


class Tern(FedBAT):
    """Of one's own."""


def test_in_eighty_columns_names_and_footers_are_whole(fedbat_here, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--rounds", 1, "--engine", "sequential", "--link", "up=1,down=8", "--out", tmp_path / "out"]
    said = fedbat_here("compare", *FAST, "--methods", "fedavg,tests.test_cli:Tern rho=2", *options, check=0).stdout
    assert len(re.findall(r"^Tern rho=2 +\d", said, re.M)) == 2  # what was run, and what it costs on the link
    for footer in (
        "bits: a parameter, biases, norms and headers included",
        "saved: against float32; traffic: all",
    ):
        (line,) = (line for line in said.splitlines() if line.startswith(footer))
        assert line == line.rstrip() and len(line) <= 80


def test_a_name_without_its_module_is_one_only_where_it_names_one():
    assert short_names(["fedavg", "a.b:C rho=2 down=4"]) == {"fedavg": "fedavg", "a.b:C rho=2 down=4": "C rho=2 down=4"}
    for two in (["a:C", "b:C"], ["a:fedavg", "fedavg"]):
        assert short_names(two) == dict(zip(two, two, strict=True))


def interrupted(out, *args, by=signal.SIGINT):
    """Ctrl-C, or another signal, once a round is done; what was printed."""
    running = subprocess.Popen(**process(*args, "--out", out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.time() + 120
    # The first round is done for certain once the second is written.
    while not any(path.read_text().count("\n") > 1 for path in out.rglob("rounds.jsonl")) and time.time() < deadline:
        time.sleep(0.02)
    running.send_signal(by)
    printed, _ = running.communicate(timeout=60)
    assert running.returncode == 130 and "interrupted after" in printed and "Traceback" not in printed
    return printed


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_a_valid_record_to_go_on_from(by, fedbat_here, tmp_path):
    out = tmp_path / "run"
    printed = interrupted(out, "run", *FAST, "--rounds", 15, "--engine", "sequential", by=by)
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert summary["status"] == "interrupted" and summary["rounds_done"] == len(lines) >= 1
    assert (out / "model.safetensors").exists() and f"go on with: fedbat resume {out}" in printed
    refused = fedbat_here("run", *FAST, "--out", out, check=2)
    assert f"holds an unfinished run; go on with it by `fedbat resume {out}`" in refused.stderr
    again = fedbat("resume", out, check=0).stdout
    assert f"continuing at round {len(lines) + 1}" in again and "round 15/15" in again and "saved up" in again
    assert "round 1/15" not in again and "instead of" not in again
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["rounds_done"] == 15
    assert f"the run in {out} is finished already: 15 rounds" in fedbat_here("resume", out, check=0).stdout


def test_comparison_goes_on_with_the_methods_that_are_left(fedbat_here, tmp_path):
    out = tmp_path / "out"
    args = ["compare", *FAST, "--rounds", 15, "--methods", "fedbat,fedpaq", "--set", "fedpaq.bits=3"]
    printed = interrupted(out, *args, "--engine", "sequential")
    assert f"go on with: fedbat resume {out}" in printed and not (out / "fedpaq-bits-3").exists()
    assert "holds an unfinished run" in fedbat_here("run", *FAST, "--out", out, check=2).stderr
    done = fedbat("resume", out, "--memory-budget", "1.5 GB", check=0).stdout
    folders = {"fedbat": "fedbat", "fedpaq": "fedpaq-bits-3"}
    summaries = {m: json.loads((out / folder / "summary.json").read_text()) for m, folder in folders.items()}
    assert all(summary["status"] == "finished" for summary in summaries.values())
    assert summaries["fedpaq"]["method_settings"]["bits"] == 3
    assert summaries["fedpaq"]["engine"]["asked"] == "sequential"
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    _, _, table = done.partition("run ")
    assert [line.split()[0] for line in table.splitlines()[1:3]] == ["fedbat", "fedpaq"]
    assert "is finished already" in fedbat_here("resume", out, check=0).stdout
    (out / "compare.png").unlink()
    fedbat_here("resume", out, check=0)
    assert (out / "compare.png").exists()


class Stopping(nn.Linear):
    """Ctrl-C comes while it is trained, as long as `stops`."""

    stops = True

    def forward(self, x):
        if Stopping.stops and torch.is_grad_enabled():
            raise KeyboardInterrupt
        return super().forward(x)


def stopping(shape, num_classes):
    return nn.Sequential(nn.Flatten(), Stopping(shape[0] * shape[1] * shape[2], num_classes))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "No space left on device: 'x'; make room"),
        (SafetensorError("I/O error"), "I/O error; make room"),
    ],
)
def test_a_full_disk_is_told_in_one_sentence(error, told, capsys):
    with pytest.raises(SystemExit, match="1"), _one_sentence_errors():
        raise error
    assert told in capsys.readouterr().err
    with pytest.raises(ConnectionError), _one_sentence_errors():
        raise ConnectionResetError(errno.ECONNRESET, "is about no disk")


def test_a_comparison_stopped_in_its_first_round_goes_on_with_its_engine(fedbat_here, tmp_path, monkeypatch):
    out = tmp_path / "out"
    args = ["compare", *FAST[:-1], "tests.test_cli:stopping", "--rounds", 1, "--methods", "fedavg,fedbat"]
    printed = fedbat_here(*args, "--engine", "sequential", "--out", out, check=130).stdout
    assert f"interrupted after 0 rounds, nothing recorded\ngo on with: fedbat resume {out}" in printed
    assert [path.name for path in out.iterdir()] == ["compare.json"]
    monkeypatch.setattr(Stopping, "stops", False)
    fedbat_here("resume", out, check=0)
    for method in ("fedavg", "fedbat"):
        assert json.loads((out / method / "summary.json").read_text())["engine"]["asked"] == "sequential"


def test_the_methods_of_a_comparison_share_their_workers(fedbat_here, tmp_path, monkeypatch):
    started, start = [], _Worker.start
    for module in ("fedbat.engine", "fedbat.engine.cpu"):
        monkeypatch.setattr(f"{module}.usable_cores", lambda: 2)
    monkeypatch.setattr(_Worker, "start", lambda self: (started.append(self), start(self)))
    args = ["compare", *FAST, "--rounds", 1, "--methods", "fedavg,fedbat", "--engine", "cpu"]
    fedbat_here(*args, "--out", tmp_path / "out", check=0)
    assert len(started) == 2 and not any(worker.process.is_alive() for worker in started)


def test_another_engine_goes_on_and_is_said_and_recorded(fedbat_here, tmp_path):
    out = tmp_path / "run"
    interrupted(out, "run", *FAST, "--rounds", 15, "--engine", "sequential")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["engine"] == {"name": "SequentialEngine", "precision": "fp32", "asked": "sequential", "device": None}
    summary["engine"] |= {"name": "CudaEngine", "precision": "bf16", "asked": "cuda"}
    summary["versions"]["source"] = "0123456789abcdef"
    (out / "summary.json").write_text(json.dumps(summary))
    if not torch.cuda.is_available():
        assert "use --engine auto" in fedbat_here("resume", out, check=2).stderr
    done = fedbat("resume", out, "--engine", "sequential", "--precision", "fp32", check=0).stdout
    assert "engine SequentialEngine (fp32) instead of CudaEngine (bf16): the results may differ" in done
    assert "fedbat's source " in done and "instead of 01234567: " in done
    summary = json.loads((out / "summary.json").read_text())
    assert summary["engine"]["name"] == "CudaEngine" and len(summary["resumed"]) == 1
    assert summary["resumed"][0]["engine"]["name"] == "SequentialEngine" and summary["resumed"][0]["first_round"] > 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--method", "nope"], "unknown method 'nope'; choose from"),
        (["run", "--method", "fedbatt"], "did you mean fedbat?"),
        (["run", "--set", "rhoo=3"], "did you mean rho?"),
        (["run", "--partition", "dirchlet"], "did you mean dirichlet?"),
        (["run", "--dataset", "cifar"], "did you mean cifar10?"),
        (["run", "--dataset", "MNIST"], "did you mean fmnist?"),
        (["run", "--method", "FedBAT"], "did you mean fedbat?"),
        (["run", "--model", "resnet"], "did you mean resnet10?"),
        (["run", "--per-round", "200"], "--per-round is 200 but there are only 100 clients"),
        (["run", "--set", "phi=7"], "phi=7.0, expected a number in [0, 1]"),
        (["run", "--set", "phi"], "expected NAME=VALUE"),
        (["run", "--dataset", "nope"], "unknown data set 'nope'"),
        (["run", "--partition", "nope"], "unknown partition 'nope'"),
        (["run", "--model", "nope"], "unknown model 'nope'; choose from"),
        (["run", "--clients", "many"], "valid integer"),
        (["run", "--nope"], "No such option"),
        (["compare", "--methods", "fedavg,fedavg"], "expected different names"),
        (["compare", "--methods", "fedavg,nope"], "unknown method 'nope'"),
        (["compare", "--methods", "fedbat,fedbat rho=6.0"], "--methods has fedbat twice: rho=6.0 is the default"),
        (["compare", "--methods", "fedbat rho=4,fedbat rho=4.0"], "--methods has fedbat-rho-4 twice: by its settings"),
        (["compare", "--methods", "fedbat rho=4,5"], "unknown method '5'; choose from"),
        (["compare", "--methods", "fedbat bounds=0.001,0.01"], "end each variant by a semicolon: --methods 'fedavg;"),
        (["compare", "--methods", "fedavg; fedbat bounds=1,0.01"], "bounds=(1.0, 0.01), expected"),
        (["compare", "--seeds", "0,1", "--seed", "2"], "--seeds 0,1 and --seed 2 are both given"),
        (["run", "--down", "4,3"], "expected one downlink; `fedbat compare --down 4,3` runs several"),
        (["compare", "--methods", "fedbat rho"], "--methods 'rho', expected NAME=VALUE such as rho=6"),
        (["compare", "--methods", "fedavg fedbat"], "has no separator before fedbat; separate methods by commas"),
        (["compare", "--methods", "fedbat rho=1 rho=2"], "--methods has rho twice"),
        (["compare", "--seeds", "0,0"], "--seeds is '0,0', expected different whole numbers"),
        (["compare", "--seeds", "0,x"], "--seeds is '0,x', expected different whole numbers such as 0,1,2"),
        (["run", "--set", "rho=1", "--set", "rho=2"], "--set has rho twice"),
        (["compare", "--methods", "fedavg,signsgd", "--set", "rho=3"], "fits none of the compared methods"),
        (["compare", "--methods", "fedbat", "--set", "fedbat.rho=x"], "could not be read"),
        (["compare", "--down", "4,4"], "--down is '4,4', expected different names such as 32,4"),
        (["compare", "--down", "4,5"], "down is '5', expected '32', '8', '4', '3', '2', 'follow'"),
        (["compare", "--link", "up=10"], "--link is 'up=10', expected up=10,down=50 (Mbit/s)"),
        (["compare", "--target", "0.8"], "there is no --link to reach it on"),
        (["compare", "--link", "up=1,down=1", "--target", "80"], "--target is 80.0, expected an accuracy above 0"),
        (["price", "nowhere", "--link", "up=1,down=1"], "does not exist; name a folder made by"),
        (["price", "nowhere"], "Missing option '--link'"),
        (["data", "show", "--out", "nowhere/p.png"], "does not exist"),
        (["data", "show", "--out", "p.foo"], "expected a file that ends in .png, .svg or .pdf"),
        (["run", "--model", "tests.test_cli:no_model"], "returned a int, expected an nn.Module"),
        (["run", "--model", "tests.test_cli:wrong_size"], "gives (2, 3) for two images, expected (2, 10)"),
        (["run", "--model", "tests.test_cli:wrong_input"], "cannot take images of shape (1, 28, 28)"),
        (["run", "--out", "/dev/null/x"], "cannot be created"),
        (["run", "--engine", "nope"], "unknown engine 'nope'; choose from auto, sequential, cpu, cuda"),
        (["run", "--memory-budget", "much"], "--memory-budget is 'much', expected a size such as 500MB or 2GB"),
        (["run", "--partition", "virtual", "--samples", "5"], "got 5 samples for each virtual client, expected 64 to"),
        (["run", "--beta", "0.1"], "--beta is 0.1, but --partition iid does not use it; drop it, or choose dirichlet"),
        (["compare", "--partition", "dirichlet", "--labels", "2"], "drop it, or choose labels or labels-balanced"),
        (["data", "show", "--samples", "64"], "drop it, or choose virtual or virtual-iid"),
        (["resume", "."], "holds no run; name a folder made by `fedbat run` or `fedbat compare`"),
        (["resume", "nowhere"], "does not exist; name a folder made by"),
        (["run", "--precision", "fp8"], "choose from fp32, tf32, bf16"),
    ],
)
def test_mistakes_end_in_one_sentence_and_leave_nothing(arguments, sentence, fedbat_here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = fedbat_here(*arguments)
    words = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2 and sentence in words, done.stderr
    assert not list(tmp_path.iterdir())


def test_folder_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = fedbat("run", *FAST, "--rounds", 1, "--out", tmp_path, check=2)
    assert "already exists" in done.stderr and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_mistake_in_a_module_is_told_by_its_line_there(fedbat_here, tmp_path, monkeypatch):
    text = (
        "from dataclasses import dataclass\nimport fedbat\n@dataclass\nclass Thawed(fedbat.FedBAT):\n    k: int = 3\n"
    )
    (tmp_path / "thawing.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    told = fedbat_here("run", "--method", "thawing:Thawed", check=2).stderr
    assert re.search(r"thawing\.py, line [34]: cannot inherit non-frozen .*; use @dataclass\(frozen=True\)\)", told)


def test_the_first_round_does_not_count_in_the_time_left(monkeypatch):
    """It also starts things up: here for a hundred seconds, where every other takes two."""
    clock = iter((100.0, 102.0, 104.0))
    monkeypatch.setattr("fedbat.view.time.perf_counter", lambda: next(clock))
    console = Console(file=StringIO(), width=200)
    view = RunView(console, "fedbat", num_rounds=10, per_round=1, num_parameters=8)
    view.begin([])
    for index in range(3):
        view.round(Round(index, 0.5, 1.0, 1.0, [0], {}, 1, 8, 1, {}, 1.0))
    lines = console.file.getvalue().splitlines()
    assert "left" not in lines[0] and lines[1].endswith("16 s left") and lines[2].endswith("14 s left")


def test_divergence_is_explained(tmp_path):
    done = fedbat("run", *FAST, "--rounds", 2, "--method", "fedavg", "--lr", "1e30", "--out", tmp_path / "x", check=1)
    assert "lower --lr" in done.stderr and "Traceback" not in done.stderr and not (tmp_path / "x").exists()


def test_methods_and_data_and_version(fedbat_here, tmp_path):
    listed = fedbat_here("methods", check=0).stdout
    assert re.search(r"^fedbat +1 +Learns the signs and their step size +rho phi step bounds", listed, re.M)
    assert "m_hat" not in listed and "`fedbat methods NAME`" in listed
    assert re.search(r"^zerofl +1.2 ", listed, re.M) and re.search(r"^fedavg +32 ", listed, re.M)
    assert "fmnist-mini" in fedbat_here("data", "list", check=0).stdout
    fedbat_here("data", "show", "--partition", "labels", "--clients", 12, "--out", tmp_path / "p.png", check=0)
    fedbat_here("data", "show", "--partition", "virtual", "--clients", 10**6, "--out", tmp_path / "v.png", check=0)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("p.png", "v.png"))
    assert fedbat("--version", check=0).stdout.startswith("fedbat ")


def test_a_missing_folder_of_data_is_told(fedbat_here, monkeypatch):
    monkeypatch.setenv("FEDBAT_DATA", "/nope")
    assert "$FEDBAT_DATA is /nope, which is not a folder; create it" in fedbat_here("data", "list", check=0).stdout


def test_paths_of_data_are_whole_in_a_narrow_window(fedbat_here, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    folder = tmp_path / ("deep" * 20) / "svhn"
    folder.mkdir(parents=True)
    for name in DATASETS["svhn"].source.files:
        (folder / name).touch()
    monkeypatch.setenv("FEDBAT_DATA", str(folder.parent))
    assert f"svhn: {folder}" in fedbat_here("data", "list", check=0).stdout.splitlines()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_explained_with_every_setting(name, fedbat_here):
    text = " ".join(fedbat_here("methods", name, check=0).stdout.split())
    assert "arXiv" in text.split("--set")[0]
    for setting in settings_of(METHODS[name]):
        assert setting.meaning and f"{setting.name} {setting.default} " in text
    assert "--set" in text or "It has no settings." in text


def test_a_setting_is_explained_with_what_can_be_given(fedbat_here):
    text = fedbat_here("methods", "fedbat", check=0).stdout
    assert re.search(r"^sent +fresh +fresh or last +fresh: a new draw of S", text, re.M)
    assert re.search(r"^bounds +0.0005,0.05 +number,number or off +of alpha", text, re.M)
    assert "Where the paper and the authors' code" not in text
    assert "unknown method 'fedbit'; choose from" in fedbat_here("methods", "fedbit", check=2).stderr


@pytest.mark.parametrize("command", [["run"], ["compare"], ["resume"], ["price"], ["methods"], ["data", "show"]])
def test_help_has_examples(command, fedbat_here):
    text = fedbat_here(*command, "--help", check=0).stdout
    assert "Example" in text and "fedbat " + " ".join(command) in text


@pytest.mark.parametrize(
    "command, words", [("resume", "Folder of an unfinished"), ("report", "Folders of runs"), ("reproduce", "A table")]
)
def test_help_tells_what_arguments_are(command, words, fedbat_here):
    text = fedbat_here(command, "--help", check=0).stdout
    assert words in text.split("Arguments")[1].split("Options")[0]
