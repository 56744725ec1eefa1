"""The reference engine: one client after the other, one thread, one loop; all other engines must agree with it.

On a CPU, some layers take fewer operations than PyTorch's own, with the same results up to rounding (`_quick`).
"""

import copy
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbat.data import augment, normalize
from fedbat.engine.base import ClientResult, Evaluation, arithmetic
from fedbat.engine.memory import keep_freed_memory
from fedbat.engine.pooling import pool_first
from fedbat.engine.small_convs import multiply_less
from fedbat.experiment import Federation
from fedbat.layout import tensors_of
from fedbat.onepass import compiled, suits
from fedbat.streams import Tensors, UniformNoise, stream, stream_seed
from fedbat.training import begin, wide

_TEST_BATCH = 500


class Epoch(NamedTuple):
    """One pass over a client's data, as drawn from the random streams: its order, and how each image is augmented."""

    samples: Tensor  # int64 [n]
    crop: Tensor  # int64 [n, 2]; crop and flip are empty if the data is not augmented
    flip: Tensor  # bool [n]


def draw_epochs(federation: Federation, round_: int, client: int) -> Iterator[Epoch]:
    """A client's local epochs, the same on every engine."""
    experiment, split = federation.experiment, federation.split[client]
    shuffle = stream(experiment.seed, "batches", round_, client)
    jitter = stream(experiment.seed, "augment", round_, client)
    sizes = [len(piece) for piece in torch.from_numpy(split).split(experiment.batch_size)]
    for _ in range(experiment.epochs):
        crop, flip = [np.empty((0, 2), np.int64)], [np.empty(0, np.bool_)]
        for size in sizes if federation.data.spec.augment else []:
            crop.append(jitter.integers(0, 9, (size, 2)))
            flip.append(jitter.random(size) < 0.5)
        parts = shuffle.permutation(split), np.concatenate(crop), np.concatenate(flip)
        yield Epoch(*map(torch.from_numpy, parts))


class Score(NamedTuple):
    """How well a model did on one batch of the test set."""

    correct: int
    loss: float  # sum over the samples


def num_test_batches(federation: Federation) -> int:
    """The number of batches in the test set; the last may be short."""
    return -(-len(federation.data.y_test) // _TEST_BATCH)


def tested(federation: Federation, w: Tensors) -> Tensors:
    """The tensors that the method computes with when the global tensors w are tested."""
    return w | federation.method.evaluate({entry.name: w[entry.name] for entry in federation.layout.compressed})


def evaluation_of(scores: Iterable[Score], federation: Federation) -> Evaluation:
    """The scores added up in the order of the batches, so that every engine rounds alike."""
    correct, loss = (sum(column) for column in zip(*scores, strict=True))
    return Evaluation(correct / len(federation.data.y_test), loss / len(federation.data.y_test))


class SequentialEngine:
    """Plain SGD with a fresh optimizer every round, as the authors' clients do.

    With `half`, layers compute in bfloat16 (PyTorch's autocast); weights, updates and what is sent stay in float32.
    """

    home = torch.device("cpu")

    def __init__(self, federation: Federation, device: torch.device | str = "cpu", half: bool = False) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        self.federation, self.device = federation, torch.device(device)
        self.precision = "bf16" if half else "fp32"
        # The first optimizer imports half of PyTorch, and Numba compiles: done here, not on the first client's time.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        if self.device.type == "cpu" and suits(federation.method):
            compiled()
        self._autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=half)
        self.model, self._format = copy.deepcopy(federation.model).to(self.device), torch.contiguous_format
        if self.device.type == "cpu" and _takes_channels_last(federation):
            self.model, self._format = _quick(self.model), torch.channels_last
        data = federation.data
        self._data = dataclasses.replace(
            data,
            x_train=data.x_train.to(self.device),
            y_train=data.y_train.to(self.device),
            x_test=data.x_test.to(self.device),
            y_test=data.y_test.to(self.device),
        )

    def train(
        self, w: Tensors, round_: int, clients: list[int], memories: Mapping[int, Tensors]
    ) -> Iterator[ClientResult]:
        """Train one client after the other; the user's own random numbers go on as if none had been trained."""
        cards = [self.device] if self.device.type == "cuda" else []
        for client in clients:
            with torch.random.fork_rng(cards):
                result = self._train_one(w, round_, client, memories.get(client, {}))
            yield result

    def close(self) -> None:
        """Restore the number of threads."""
        torch.set_num_threads(self._threads)

    @arithmetic(tf32=False)
    def _train_one(self, w: Tensors, round_: int, client: int, memory: Tensors) -> ClientResult:
        federation, experiment = self.federation, self.federation.experiment
        seed, start = experiment.seed, time.perf_counter()
        self._load(w)
        self.model.train()
        torch.manual_seed(stream_seed(seed, "model", round_, client))  # for models with dropout
        optimizer = torch.optim.SGD(self.model.parameters(), lr=experiment.lr)
        noise = UniformNoise(seed, "noise", round_, client, device=self.device)
        loss_sum = 0.0
        with begin(
            federation.method,
            self.model,
            optimizer,
            federation.num_steps(client),
            layout=federation.layout,
            memory={name: tensor.to(self.device) for name, tensor in memory.items()},
            noise=noise,
            context=round_,
        ) as local:
            for x, y in self._batches(round_, client):
                optimizer.zero_grad()
                with self._autocast:
                    loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                optimizer.step()
                loss_sum += loss.item()
            upload = local.finish()
        packed = upload.to_bytes()
        return ClientResult(
            client=client,
            upload=packed,
            memory={name: tensor.cpu() for name, tensor in upload.memory.items()},
            num_samples=len(federation.split[client]),
            train_loss=loss_sum / upload.num_steps,
            nbits=upload.payload.nbits,
            layers=upload.layers,
            seconds=time.perf_counter() - start,
        )

    def evaluate(self, w: Tensors) -> Evaluation:
        """Accuracy and mean loss over the test set."""
        seen = tested(self.federation, w)
        return evaluation_of((self.test(seen, n) for n in range(num_test_batches(self.federation))), self.federation)

    @arithmetic(tf32=False)
    @torch.no_grad()
    def test(self, w: Tensors, number: int) -> Score:
        """Test the model with the weights w on one batch of the test set."""
        data, rows = self._data, slice(number * _TEST_BATCH, (number + 1) * _TEST_BATCH)
        self._load(w)
        self.model.eval()
        x, y = self._normalized(data.x_test[rows], data.spec.test_mean, data.spec.test_std), data.y_test[rows]
        with self._autocast:
            logits = wide(self.model(x))
        return Score(int((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum")))

    def _batches(self, round_: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches the model is trained on; the last one of an epoch may be short."""
        data, size = self._data, self.federation.experiment.batch_size
        for epoch in draw_epochs(self.federation, round_, client):
            samples, crop, flip = (tensor.to(self.device).split(size) for tensor in epoch)
            for number, index in enumerate(samples):
                x = data.x_train[index]
                if data.spec.augment:
                    x = augment(x, crop[number], flip[number])
                yield self._normalized(x, data.spec.train_mean, data.spec.train_std), data.y_train[index]

    def _normalized(self, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        return normalize(x, mean, std).contiguous(memory_format=self._format)

    def _load(self, w: Tensors) -> None:
        # Looked up anew each time: a forward pass may have given the model other buffers.
        for name, tensor in tensors_of(self.model, self.federation.layout).items():
            tensor.copy_(w[name])


def _quick(model: nn.Module) -> nn.Module:
    """The model in the form that CPUs compute fastest; the results are PyTorch's up to rounding.

    channels_last is a third faster there (and slower on GPUs in fp32), and two kinds of layers take fewer operations.
    """
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pool_first(model)
    multiply_less(model)
    return model


def _takes_channels_last(federation: Federation) -> bool:
    """Whether the model can take channels_last; models that flatten by `x.view(len(x), -1)` cannot."""
    images = torch.zeros(federation.experiment.batch_size, *federation.data.spec.shape)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _quick(copy.deepcopy(federation.model)).train()(images.contiguous(memory_format=torch.channels_last))
    except RuntimeError:
        return False  # a faulty model fails in training, too, and says why
    return True
