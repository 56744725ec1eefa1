"""The engine for several cores: as many processes, each with a sequential engine that trains one client at a time.

Every result is the sequential engine's, bit for bit, because a sequential engine computes it. Data set and global
weights lie in shared memory; only a client's number and memory go to a worker, and its upload comes back.
"""

import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedbat.data import Dataset
from fedbat.engine.base import ClientResult, Evaluation, Lost
from fedbat.engine.sequential import Score, SequentialEngine, evaluation_of, num_test_batches, tested
from fedbat.engine.workers import Died, Task, Workers, usable_cores
from fedbat.errors import ConfigError, FedbatError
from fedbat.experiment import Federation
from fedbat.layout import Layout
from fedbat.streams import Tensors


class CannotTravelError(ConfigError):
    """A model or method that cannot be sent to a worker process."""


class CpuEngine:
    """Clients side by side, one core each; a client on which two workers die is lost to its round."""

    home = torch.device("cpu")

    def __init__(self, federation: Federation, workers: Workers | None = None, half: bool = False) -> None:
        self.federation, self._owns_workers = federation, workers is None
        self.precision = "bf16" if half else "fp32"
        private = _pickled_without_data(federation)
        data, layout = federation.data, federation.layout
        try:
            self._memory = torch.zeros(sum(_room(layout)), dtype=torch.uint8).share_memory_()
            for tensor in (data.x_train, data.y_train, data.x_test, data.y_test):
                tensor.share_memory_()
        except RuntimeError as error:
            raise ConfigError(
                f"shared memory cannot hold the data set ({error}); enlarge it (docker: --shm-size), "
                "or use --engine sequential"
            ) from error
        self._w = _tensors_in(self._memory, layout)
        self._workers = workers or workers_for(federation)
        self._make = partial(_Hand, private, data, self._memory, half)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the work left to this process should not take a worker's core

    def train(
        self, w: Tensors, round_: int, clients: list[int], memories: Mapping[int, Tensors]
    ) -> Iterator[ClientResult | Lost]:
        """Train as many clients at a time as there are workers, the largest first."""
        tasks = [
            Task(
                f"trained client {client}",
                "train",
                lambda client=client: (round_, client, memories.get(client, {})),  # type: ignore[misc]
                size=len(self.federation.split[client]),
            )
            for client in clients
        ]
        for client, found in zip(clients, self._run(tasks, w), strict=True):
            yield Lost(client, found.reason) if isinstance(found, Died) else found

    def evaluate(self, w: Tensors) -> Evaluation:
        """Test the batches on the workers; their scores are added in order."""
        batches = range(num_test_batches(self.federation))
        tasks = [Task(f"tested batch {n}", "test", partial(tuple, [n])) for n in batches]
        scores = []
        for found in self._run(tasks, tested(self.federation, w)):
            if isinstance(found, Died):
                raise FedbatError(f"the model could not be tested: {found.reason}; --engine sequential may show why")
            scores.append(found)
        return evaluation_of(scores, self.federation)

    def close(self) -> None:
        """End the workers, if they are this engine's own, and restore the number of threads."""
        torch.set_num_threads(self._threads)
        if self._owns_workers:
            self._workers.close()

    def _run(self, tasks: list[Task], w: Tensors) -> Iterator[Any]:
        """What becomes of the tasks, done on w: a copy in shared memory, where every worker finds it."""
        results = self._workers.run(tasks, self._make)  # refused while an unfinished round still needs its own w
        for name, tensor in self._w.items():
            tensor.copy_(w[name])
        return results


def workers_for(federation: Federation) -> Workers:
    """As many workers as can be of use; they also serve other federations with as many clients per round."""
    return Workers(min(usable_cores(), federation.experiment.per_round))


class _Hand:
    """What a worker holds: its own sequential engine, and a view of the shared memory."""

    def __init__(self, private: bytes, data: Dataset, memory: Tensor, half: bool) -> None:
        try:
            federation = Federation(data=data, **pickle.loads(private))
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"a worker process cannot import what the model or method is made of ({error}); define it at the top "
                "level of a module file, or use --engine sequential"
            ) from error
        self._engine = SequentialEngine(federation, half=half)
        self._w = _tensors_in(memory, federation.layout)

    def train(self, round_: int, client: int, memory: Tensors) -> ClientResult:
        """Train one client for one round."""
        (result,) = self._engine.train(self._w, round_, [client], {client: memory})
        return result

    def test(self, number: int) -> Score:
        """Test one batch of the test set."""
        return self._engine.test(self._w, number)


def _pickled_without_data(federation: Federation) -> bytes:
    """Everything but the data, which is shared."""
    private = {f.name: getattr(federation, f.name) for f in dataclasses.fields(federation) if f.name != "data"}
    try:
        return pickle.dumps(private)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise CannotTravelError(
            f"the model or method cannot be sent to a worker process ({error}); define its classes and functions at "
            "the top level of a module, or use --engine sequential"
        ) from error


def _room(layout: Layout) -> list[int]:
    """Bytes for each tensor, rounded up to whole cache lines."""
    return [-(-entry.numel * entry.dtype.itemsize // 64) * 64 for entry in layout]


def _tensors_in(memory: Tensor, layout: Layout) -> Tensors:
    """The tensors that travel, as views of one piece of memory."""
    return {
        entry.name: piece[: entry.numel * entry.dtype.itemsize].view(entry.dtype).view(entry.shape)
        for entry, piece in zip(layout, memory.split(_room(layout)), strict=True)
    }
