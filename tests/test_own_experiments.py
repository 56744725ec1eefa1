"""Data sets, splits and models of one's own, by the name of a function, as docs/own-experiments.md has them."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from fedbat.data import dataset_of, load_dataset, partition, spec_of
from fedbat.engine import make_engine
from fedbat.errors import ConfigError, DataError, FedbatError, MethodError
from fedbat.experiment import Experiment, prepare
from fedbat.method import Method
from fedbat.methods import make_method
from fedbat.methods.fedbat import FedBAT
from fedbat.methods.signsgd import SignSGD
from fedbat.run import run_recorded
from fedbat.settings import settings_of
from fedbat.simulation import initial_state, rounds
from tests.local_training import finish

PAGE = (Path(__file__).parent.parent / "docs" / "own-experiments.md").read_text()
MINE, SCRIPT, TABLE = re.findall(
    r"<!-- tests/test_own_experiments.py runs this.*? -->\n```python\n(.*?)```", PAGE, re.S
)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The page's module, in the current folder."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_runs_on_the_command_line_and_from_python(mine):
    for line in re.findall(r"^fedbat (run .*)$", PAGE, re.M):
        run_python("-m", "fedbat", *line.split(), "--engine", "cpu")
    summary = json.loads((mine / "runs" / "mine" / "summary.json").read_text())
    assert summary["config"]["dataset"] == "mine:stripes" and summary["config"]["model"] == "mine:small"
    assert summary["best_accuracy"] > 0.4  # a quarter is chance
    (mine / "script.py").write_text(SCRIPT)
    lines = [line.split() for line in run_python("script.py").splitlines()]
    assert [(line[0], line[1]) for line in lines] == [(rho, str(round_)) for rho in "06" for round_ in range(5)]
    assert all(0 < float(accuracy) <= 1 and int(up) > 0 for _, _, accuracy, up in lines)


def recorded(folder):
    """The rounds of a small run, as Python has them."""
    federation = prepare(Experiment(model="tests.test_simulation:tiny", clients=8, per_round=2, rounds=2, epochs=1))
    return run_recorded(federation, make_engine(federation, "sequential"), folder).rounds


def test_the_pages_table_has_every_round_of_every_run(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    folders = [Path("runs") / name for name in ("mine", "both/fedavg", "both/fedbat")]
    accuracies = {str(folder): {r.index + 1: r.accuracy for r in recorded(folder)} for folder in folders}
    names = {}
    exec(TABLE, names)
    table = names["table"]
    assert len(table) == 6 and table.pivot(index="round", columns="run", values="accuracy").to_dict() == accuracies


def test_rounds_count_from_one_in_files_and_from_zero_in_python(tmp_path):
    done = recorded(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [round_.index for round_ in done] == [0, 1] and [line["round"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_the_pages_sweep_runs_and_is_written_up(mine):
    (grid,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    (mine / "grids").mkdir()
    short = grid.replace("rounds = 15", "rounds = 1").replace("epochs = 2", "epochs = 1")
    (mine / "grids" / "mine.toml").write_text(short)
    sweep, write = re.findall(r"^fedbat (reproduce .*?)  +#", PAGE, re.M)
    run_python("-m", "fedbat", *sweep.split(), "--only", "split=dirichlet", "--engine", "sequential")
    done = run_python("-m", "fedbat", *write.split(), "--list")
    assert re.search(r"^mine +6 +3 ", done, re.M)
    page = (mine / "grids-results" / "RESULTS.md").read_text()
    rows = re.findall(r"^\| dirichlet \| `(.*?)` \| [\d.]+ ± [\d.]+ \| 3 \|", page, re.M)
    assert rows == ["fedavg", "fedbat rho=2", "fedbat rho=6"] and "paper" not in page.split("## How to read")[0]
    assert '`view = "curves"` above `[fixed]`' in PAGE
    (mine / "grids" / "mine.toml").write_text(short.replace("[fixed]", 'view = "curves"\n[fixed]'))
    run_python("-m", "fedbat", *write.split())
    page = (mine / "grids-results" / "RESULTS.md").read_text()
    assert "| dirichlet |" not in page and all(f": {kind}" in page for kind in ("accuracy by round", "error of what"))


def test_a_run_goes_on_with_other_code_of_ones_own_but_says_so(mine, fedbat_here):
    out = mine / "out"

    def stop(round_):
        raise KeyboardInterrupt

    experiment = Experiment(model="mine:small", clients=8, per_round=2, epochs=1, rounds=2)
    sys.path.insert(0, str(mine))
    try:
        federation = prepare(experiment)
        with pytest.raises(KeyboardInterrupt):
            run_recorded(federation, make_engine(federation, "sequential"), out, on_round=stop)
        before = json.loads((out / "summary.json").read_text())["own"]["mine"]
        (mine / "mine.py").write_text(MINE + "\n")
        said = fedbat_here("resume", out, "--engine", "sequential", check=0).stdout
    finally:
        sys.path.remove(str(mine))
        sys.modules.pop("mine", None)
    assert "code of your own mine " in said and f"instead of mine {before[:8]}" in said


def few(count=40):
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, 255, (count, 3, 8, 8), generator=draw, dtype=torch.uint8)
    return dataset_of(x, torch.arange(count) % 5, x[:10], torch.arange(10) % 5)


def thirds(labels, num_clients, seed):
    return np.array_split(np.arange(len(labels)), num_clients)


def one_short(labels, num_clients, seed):
    return thirds(labels, num_clients - 1, seed)


def beyond(labels, num_clients, seed):
    return [part + 1 for part in thirds(labels, num_clients, seed)]


def nothing():
    return "nothing"


def test_a_data_set_is_what_its_images_are():
    data = few()
    assert data.spec.num_classes == 5 and data.spec.shape == (3, 8, 8) and data.spec.default_labels == 3
    pixels = data.x_train.double() / 255
    for channel in range(3):
        assert data.spec.train_mean[channel] == pytest.approx(pixels[:, channel].mean().item(), abs=1e-5)
        assert data.spec.test_std[channel] == pytest.approx(pixels[:, channel].std().item(), abs=1e-5)
    name = f"{__name__}:few"
    assert load_dataset(name) is load_dataset(name) and spec_of(name).name == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": torch.zeros(4, 1, 8, 8)}, r"training images are torch.float32 .*expected torch.uint8 \[N, C"),
        ({"x_test": torch.zeros(2, 1, 9, 8, dtype=torch.uint8)}, r"test images are .*\[2, 1, 9, 8\]"),
        ({"y_train": torch.zeros(3, dtype=torch.int64)}, r"training labels are .*\[3\], expected a whole number"),
        ({"y_train": torch.zeros(4)}, "training labels are torch.float32"),
        ({"y_test": torch.tensor([0, 2])}, r"test labels: got labels 0..2, .* 0..1; number labels from 0, each among"),
        ({"y_train": torch.tensor([-1, 0, 1, 1])}, "training labels: got labels -1..1, .*; number labels from 0"),
        ({"x_test": torch.zeros(0, 1, 8, 8, dtype=torch.uint8), "y_test": torch.zeros(0)}, "there are no test images"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_are_refused(change, message):
    images, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    good = {"x_train": images, "y_train": labels, "x_test": images[:2], "y_test": labels[:2]}
    dataset_of(**good)
    with pytest.raises(DataError, match=message):
        dataset_of(**good | change)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stripes", "unknown data set 'stripes'; choose from cifar10, .*package.module:function"),
        ("nowhere:stripes", r"unknown data set 'nowhere:stripes' \(No module named 'nowhere'; start in the folder"),
        (f"{__name__}.deeper:stripes", rf"\(No module named '{__name__}.deeper'.*; start in the folder"),
        ("needy:stripes", r"unknown data set 'needy:stripes' \(No module named 'nowhere'\); choose"),
        (f"{__name__}:nothing", "returned a str, expected what fedbat.data.dataset_of returns"),
    ],
)
def test_data_sets_that_are_not_there(name, message, tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        prepare(Experiment(dataset=name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_short", "gave parts for 2 clients, expected 3"),
        ("beyond", "expected one row of sample numbers from 0 to 39"),
    ],
)
def test_splits_that_cannot_be(name, message):
    labels = few().y_train.numpy()
    assert [len(part) for part in partition(f"{__name__}:thirds", labels, 3)] == [14, 13, 13]
    with pytest.raises(DataError, match=message):
        partition(f"{__name__}:{name}", labels, 3)
    with pytest.raises(ConfigError, match="unknown partition 'nowhere:thirds'"):
        Experiment(partition="nowhere:thirds")


class Flattening(nn.Module):
    """As in PyTorch's tutorials: images that lie channels_last cannot be viewed as rows."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64 * 16, 5)
        self.more = nn.Conv2d(64, 64, 3, padding=1)
        self.pool = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x):
        x = self.more(self.pool(self.conv(x)))
        return self.out(x.view(-1, 64 * 16))


class Reshaping(Flattening):
    def forward(self, x):
        x = self.more(self.pool(self.conv(x)))
        return self.out(x.reshape(-1, 64 * 16))


def flattening(shape, num_classes):
    return Flattening()


def reshaping(shape, num_classes):
    return Reshaping()


def test_models_that_flatten_by_view_run_and_learn_what_those_learn_that_reshape():
    accuracies = []
    for model in ("flattening", "reshaping"):
        experiment = Experiment(
            dataset=f"{__name__}:few", clients=2, per_round=2, rounds=1, epochs=2, model=f"{__name__}:{model}", lr=0.01
        )
        federation = prepare(experiment)
        engine = make_engine(federation, "sequential")
        ((round_, state),) = rounds(federation, engine, initial_state(federation))
        accuracies.append((round_.loss, state.w["conv.weight"]))
    (loss, w), (other_loss, other_w) = accuracies
    assert loss == pytest.approx(other_loss, rel=1e-3)
    assert torch.nn.functional.cosine_similarity(w.flatten(), other_w.flatten(), dim=0) > 0.999


# Methods of one's own.


@dataclass(frozen=True)
class Choosy(Method):
    """Settings of several types."""

    norm: Literal["l1", "l2"] = "l1"
    share: float | Literal["auto"] = 0.5
    both: tuple[int, float] = (1, 2.0)


class NotADataclass(FedBAT):
    """Looks like FedBAT with another pace."""

    rho: float = 12.0


class NewSetting(FedBAT):
    """Looks like a setting."""

    pace: float = 12.0


@dataclass(frozen=True)
class Bare(Method):
    """Cannot be made by its name alone."""

    pace: float


@dataclass(frozen=True)
class Listed(Method):
    """A tuple of any length can be given in Python only."""

    layers: tuple[float, ...] = (1.0, 2.0)
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass(frozen=True)
class Forgetful(FedBAT):
    """Leaves out a layer."""

    def encode(self, w, local, memory, noise):
        parts, memory = super().encode(w, local, memory, noise)
        return dict(list(parts.items())[1:]), memory


@dataclass(frozen=True)
class Mistaken(Method):
    """Its kinds are another's."""

    kinds = FedBAT().kinds


def test_settings_are_read_by_their_types():
    name = f"{__name__}:Choosy"
    assert make_method(name, {"share": "auto", "norm": "l2"}) == Choosy(share="auto", norm="l2")
    assert make_method(name, {"share": "0.25", "both": "3,4"}) == Choosy(share=0.25, both=(3, 4.0))
    for setting, text, expected in (("norm", "zzz", "l1 or l2"), ("share", "most", "number or auto")):
        with pytest.raises(ConfigError, match=rf"{setting}='{text}' could not be read; expected {expected}"):
            make_method(name, {setting: text})


def test_settings_that_are_no_text_are_shown_and_left_to_python():
    name = f"{__name__}:Listed"
    assert [tuple(setting[:3]) for setting in settings_of(type(make_method(name)))] == [
        ("layers", "1,2", "given in Python"),
        ("names", "a", "given in Python"),
    ]
    with pytest.raises(ConfigError, match=r"layers is a tuple\[float, ...\], which cannot be given as text"):
        make_method(name, {"layers": "1,2"})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("NotADataclass", r"NotADataclass changes rho without being a dataclass; add @dataclass\(frozen=True\)"),
        ("NewSetting", r"NewSetting changes pace without being a dataclass; add @dataclass\(frozen=True\)"),
        ("Bare", "setting pace of Bare has no default value"),
    ],
)
def test_settings_that_would_not_count_are_refused(kind, message):
    with pytest.raises(ConfigError, match=message):
        make_method(f"{__name__}:{kind}")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Forgetful(), r"Forgetful.encode gave parts for \['3.weight'\], expected one for each of \['0"),
        (Mistaken(), r"Mistaken.encode gave kind 0 .Dense. with parameter 0 for 0.weight, expected kind .*Signs"),
    ],
)  # fmt: skip
def test_who_writes_a_method_is_told_what_it_gave(method, message):
    with pytest.raises(MethodError, match=message):
        finish(method, 2, 2)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Experiment)])
@pytest.mark.parametrize("value", [True, ["6"], 3j, -1, -0.5, "no such thing"], ids=repr)
def test_what_a_field_cannot_be_is_refused_by_its_name(field, value):
    """At once, or, where it depends on the data, before anything is trained; never as another library's error."""
    with pytest.raises(FedbatError, match=re.escape(str(value))):
        prepare(Experiment(**{"partition": "dirichlet", field: value}))


@pytest.mark.parametrize("make", [lambda: FedBAT(rho="6"), lambda: FedBAT(bits=True), lambda: SignSGD(alpha=None)])
def test_settings_of_another_type_are_refused(make):
    with pytest.raises(ConfigError, match="expected"):
        make()
