"""CI has no GPU: the engine's checks were made on one, and the code has not changed since."""

import hashlib
import json
from pathlib import Path

import pytest
from scripts import cuda_page

RECORDS = sorted(cuda_page.FOLDER.glob("*.json"))
ENGINE = Path(__file__).parent.parent / "src" / "fedbat" / "engine"
FILES = (
    "buffers.py", "conv_kernels.py", "convs.py", "cuda.py", "fused.py", "kernels.py", "launch.py", "layer_kernels.py",
    "norms.py", "outbox.py", "slot.py", "stems.py",
)  # fmt: skip


NEEDED = {"parity", "noise", "ratio", "time"}


@pytest.mark.parametrize("path", [path for path in RECORDS if path.stem in NEEDED], ids=lambda p: p.stem)
def test_the_checked_code_is_the_code(path):
    digests = json.loads(path.read_text())["code"]
    changed = [name for name in FILES if digests.get(name) != hashlib.sha256((ENGINE / name).read_bytes()).hexdigest()]
    assert not changed, f"{changed} changed: run benchmarks/cuda_check.py --out results/cuda on a GPU"


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_the_checks_held(path):
    assert all(row.get("ok", True) for row in json.loads(path.read_text())["rows"])


def test_the_needed_checks_are_there():
    assert {path.stem for path in RECORDS} >= NEEDED


def test_whole_runs_take_no_longer_than_was_aimed_at():
    """docs/performance.md says that these aims are reached."""
    rows = json.loads((cuda_page.FOLDER / "time.json").read_text())["rows"]
    seconds = {(row["dataset"], row["partition"], row["model"]): row["seconds"] for row in rows}
    assert seconds["fmnist", "iid", "cnn"] <= 20
    assert seconds["fmnist", "dirichlet", "cnn"] <= 1.5 * seconds["fmnist", "iid", "cnn"]
    assert seconds["cifar10", "iid", "resnet10-narrow"] <= 75 and seconds["cifar10", "iid", "resnet10"] <= 100


def test_the_page_is_what_the_records_say():
    assert (cuda_page.FOLDER / "README.md").read_text() == cuda_page.page()
