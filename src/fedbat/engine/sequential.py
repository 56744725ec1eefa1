"""The reference engine: one client after the other, one thread, nothing clever; all others must agree with it."""

import copy
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbat.data import augment, normalize
from fedbat.engine.base import ClientResult, Evaluation
from fedbat.experiment import Federation
from fedbat.layout import tensors_of
from fedbat.streams import Tensors, UniformNoise, stream, stream_seed
from fedbat.training import begin

_TEST_BATCH = 500


class SequentialEngine:
    """Plain SGD with a fresh optimizer every round, as the authors' clients do."""

    def __init__(self, federation: Federation) -> None:
        torch.set_num_threads(1)
        self.federation = federation
        # channels_last is a third faster on CPUs and changes no result beyond rounding.
        self.model = copy.deepcopy(federation.model)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._tensors = tensors_of(self.model, federation.layout)

    def train(
        self, w: Tensors, round_: int, clients: list[int], memories: Mapping[int, Tensors]
    ) -> Iterator[ClientResult]:
        """One client after the other."""
        for client in clients:
            yield self._train_one(w, round_, client, memories.get(client, {}))

    def _train_one(self, w: Tensors, round_: int, client: int, memory: Tensors) -> ClientResult:
        federation, experiment = self.federation, self.federation.experiment
        seed = experiment.seed
        self._load(w)
        self.model.train()
        torch.manual_seed(stream_seed(seed, "model", round_, client))  # for models with dropout
        optimizer = torch.optim.SGD(self.model.parameters(), lr=experiment.lr)
        noise = UniformNoise(seed, "noise", round_, client)
        loss_sum = 0.0
        with begin(
            federation.method,
            self.model,
            optimizer,
            federation.num_steps(client),
            layout=federation.layout,
            memory=memory,
            noise=noise,
            context=round_,
        ) as local:
            for x, y in self._batches(round_, client):
                optimizer.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                optimizer.step()
                loss_sum += loss.item()
            upload = local.finish()
        return ClientResult(
            client=client,
            upload=upload.to_bytes(),
            memory=upload.memory,
            num_samples=len(federation.split[client]),
            train_loss=loss_sum / upload.num_steps,
            nbits=upload.payload.nbits,
            layers=upload.layers,
        )

    @torch.no_grad()
    def evaluate(self, w: Tensors) -> Evaluation:
        """Accuracy and mean loss over the test set, with what the method computes with when tested."""
        names = [entry.name for entry in self.federation.layout.compressed]
        self._load(w | self.federation.method.evaluate({name: w[name] for name in names}))
        self.model.eval()
        data = self.federation.data
        correct, loss = 0, 0.0
        for x, y in zip(data.x_test.split(_TEST_BATCH), data.y_test.split(_TEST_BATCH), strict=True):
            logits = self.model(self._normalized(x, data.spec.test_mean, data.spec.test_std))
            correct += int((logits.argmax(1) == y).sum())
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
        return Evaluation(correct / len(data.y_test), loss / len(data.y_test))

    def _batches(self, round_: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The client's epochs, shuffled anew each time; the last batch of an epoch may be short."""
        data, experiment = self.federation.data, self.federation.experiment
        shuffle = stream(experiment.seed, "batches", round_, client)
        jitter = stream(experiment.seed, "augment", round_, client)
        for _ in range(experiment.epochs):
            order = torch.from_numpy(shuffle.permutation(self.federation.split[client]))
            for index in order.split(experiment.batch_size):
                x = data.x_train[index]
                if data.spec.augment:
                    crop = torch.from_numpy(jitter.integers(0, 9, (len(index), 2)))
                    x = augment(x, crop, torch.from_numpy(jitter.random(len(index)) < 0.5))
                yield self._normalized(x, data.spec.train_mean, data.spec.train_std), data.y_train[index]

    def _normalized(self, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
        return normalize(x, mean, std).contiguous(memory_format=torch.channels_last)

    def _load(self, w: Tensors) -> None:
        for name, tensor in self._tensors.items():
            tensor.copy_(w[name])
