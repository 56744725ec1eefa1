"""The built wheel works from any folder, with nothing of the source tree beside it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
SCRIPT = """
import fedbat, pathlib, sys
from fedbat.data import load_dataset
assert pathlib.Path(fedbat.__file__).is_relative_to(sys.argv[1]), fedbat.__file__
data = load_dataset("fmnist-mini")
assert tuple(data.x_train.shape) == (6000, 1, 28, 28) and tuple(data.x_test.shape) == (1000, 1, 28, 28)
assert (pathlib.Path(fedbat.__file__).parent / "py.typed").exists()
"""


@pytest.mark.slow
def test_wheel_works_from_any_folder(tmp_path):
    subprocess.run(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", ROOT], check=True, timeout=300
    )
    (wheel,) = (tmp_path / "dist").glob("fedbat-*.whl")
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", site, wheel], check=True, timeout=300)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "FEDBAT_DATA": ""}
    subprocess.run([sys.executable, "-c", SCRIPT, site], check=True, cwd=elsewhere, env=env, timeout=120)
    command = [sys.executable, "-m", "fedbat", "run", "--clients", "300", "--per-round", "1", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--epochs", "1"], cwd=elsewhere, env=env, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list(elsewhere.glob("runs/*/summary.json"))) == 1
