import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20240721)
