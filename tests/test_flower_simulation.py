"""Flower's own simulation, with real processes, against the local engine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedbat.engine.sequential import SequentialEngine
from fedbat.simulation import initial_state, rounds
from fedbat.storage import load_tensors
from tests.flower_federation import METHODS, federation
from tests.flower_processes import QUIET


@pytest.mark.slow
def test_flowers_simulation_gives_the_weights_of_the_local_engine_bit_for_bit(tmp_path):
    command = [sys.executable, "-m", "tests.flower_federation", str(tmp_path)]
    environment = os.environ | QUIET | {"FLWR_HOME": str(tmp_path / "flwr")}
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        fed = federation(method)
        sizes = {len(fed.split[client]) for round_ in range(3) for client in fed.sampled(round_)}
        assert len(sizes) > 4
        start = initial_state(fed)
        *_, (_, state) = rounds(fed, SequentialEngine(fed), start)
        found = load_tensors(tmp_path / f"{method}.safetensors")
        assert found.keys() == state.w.keys()
        for name, tensor in state.w.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, (method, name)
        assert not all(torch.equal(found[name], tensor) for name, tensor in start.w.items())
