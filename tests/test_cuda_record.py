"""CI has no GPU: the engine's checks were made on one, and the code has not changed since."""

import json

import pytest
from benchmarks import cuda_check
from scripts import cuda_page

RECORDS = sorted(cuda_page.FOLDER.glob("*.json"))
NEEDED = {"parity", "noise", "ratio", "time"}


@pytest.mark.parametrize("path", [path for path in RECORDS if path.stem in NEEDED], ids=lambda p: p.stem)
def test_the_checked_code_is_the_code(path):
    recorded, now = json.loads(path.read_text())["code"], cuda_check.code_digest()
    changed = [name for name in now if recorded.get(name) != now[name]]
    assert not changed, f"{changed} changed: run benchmarks/cuda_check.py --out results/cuda on a GPU"


def test_a_digest_is_of_what_code_does_not_of_what_is_said_about_it():
    code = 'def f(x):\n    """Twice."""\n    return 2 * x\n'
    same = 'def f(x):\n    """Doubles x."""\n    return 2 * x  # as the name says\n'
    assert cuda_check.digest_of(code) == cuda_check.digest_of(same) != cuda_check.digest_of(code.replace("2", "3"))


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


def test_the_pages_are_what_the_records_say():
    assert (cuda_page.FOLDER / "README.md").read_text() == cuda_page.page()
    text = cuda_page.PERFORMANCE.read_text()
    assert text == cuda_page.performance() and "| fmnist | iid | cnn | fedbat | bf16 |" in text
