import os

import pytest
import torch

from tests.command import Here

os.environ.setdefault("FEDBAT_ENGINE", "sequential")  # test_engines has the workers
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def fedbat_here(monkeypatch, capsys) -> Here:
    return Here(monkeypatch, capsys)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20240721)
