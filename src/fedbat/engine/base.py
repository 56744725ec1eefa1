"""The contract between a simulation and the engine that computes for it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from fedbat.streams import Tensors
from fedbat.training import LayerReport


class ClientResult(NamedTuple):
    """What one client's round left behind."""

    client: int
    upload: bytes
    memory: Tensors  # on the CPU; kept for this client until it is sampled again
    num_samples: int
    train_loss: float  # mean over the local steps
    nbits: int  # of the method's own parts, without headers and the dense rest
    layers: dict[str, LayerReport]
    seconds: float | None = None  # of its work, if the engine can tell one client's from another's


class Lost(NamedTuple):
    """A client whose work could not be done; the round goes on without it."""

    client: int
    reason: str


class Evaluation(NamedTuple):
    """How well a model does on the test set."""

    accuracy: float  # in [0, 1]
    loss: float


class Engine(Protocol):
    """Trains clients and tests models; owns devices, threads and scratch space, but no federated state."""

    home: torch.device
    """Where the global model is best kept between rounds."""

    @property
    def precision(self) -> str:
        """The precision of the layers' arithmetic."""
        ...

    def train(
        self, w: Tensors, round_: int, clients: list[int], memories: Mapping[int, Tensors]
    ) -> Iterator[ClientResult | Lost]:
        """Train these clients, each from w and its own memory; yields what became of each, in this order."""
        ...

    def evaluate(self, w: Tensors) -> Evaluation:
        """Test the global tensors w."""
        ...

    def close(self) -> None:
        """Release whatever outlives a round; no call may follow."""
        ...


@contextmanager
def arithmetic(tf32: bool) -> Iterator[None]:
    """Inside, set whether GPUs may multiply float32 as TF32, which PyTorch allows for convolutions by default."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32, matmul.allow_tf32 = tf32, tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before
