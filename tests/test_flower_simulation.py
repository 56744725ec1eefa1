"""Flower's own simulation, with real processes, against the local engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedbat.engine.sequential import SequentialEngine
from fedbat.simulation import initial_state, rounds
from fedbat.storage import load_tensors
from tests.flower_federation import RUNS, federation
from tests.flower_processes import QUIET


@pytest.mark.slow
def test_flowers_simulation_gives_the_weights_of_the_local_engine_bit_for_bit(tmp_path):
    command = [sys.executable, "-m", "tests.flower_federation", str(tmp_path)]
    environment = os.environ | QUIET | {"FLWR_HOME": str(tmp_path / "flwr")}
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for method, down in RUNS:
        fed = federation(method, down)
        sizes = {len(fed.split[client]) for round_ in range(3) for client in fed.sampled(round_)}
        assert len(sizes) > 4
        start = initial_state(fed)
        told, states = zip(*rounds(fed, SequentialEngine(fed), start), strict=True)
        found = load_tensors(tmp_path / f"{method}-{down}.safetensors")
        assert found.keys() == states[-1].w.keys()
        for name, tensor in states[-1].w.items():
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, (method, down, name)
        assert not all(torch.equal(found[name], tensor) for name, tensor in start.w.items())
        if down != "32":  # whole models travel as safetensors, which has a header
            sent = json.loads((tmp_path / f"{method}-{down}.json").read_text())
            assert sent == [round_.downlink_bytes for round_ in told]
