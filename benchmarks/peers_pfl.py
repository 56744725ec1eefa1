"""pfl-research's side of benchmarks/peers.py, as in its PyTorch tutorials: a model with a loss, FederatedAveraging."""

import os
import time
from collections.abc import Iterator
from itertools import pairwise

import torch
from peers import client_data
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from fedbat.experiment import Federation


class Net(nn.Module):
    """A model as pfl wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.train(not eval)
        return F.cross_entropy(self.model(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y, eval).item() * len(y), len(y))}


class Stamp(TrainingProcessCallback):
    """Writes down when rounds end."""

    def __init__(self) -> None:
        self.stamps = [0.0]

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.stamps = [time.perf_counter()]
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration: int) -> tuple[bool, Metrics]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.stamps.append(time.perf_counter())
        return False, Metrics()


def run(federation: Federation, device: str) -> Iterator[float]:
    """Seconds of each round."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    experiment, clients = federation.experiment, list(range(federation.experiment.clients))
    held = {c: PyTorchTensorDataset(tuple(t.to(device) for t in client_data(federation, c))) for c in clients}
    data = FederatedDataset(held.__getitem__, get_user_sampler("random", clients))
    net = Net(federation.model).to(device)
    server = torch.optim.SGD(net.parameters(), lr=1.0)
    stamp = Stamp()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=experiment.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=experiment.per_round,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=PyTorchModel(net, torch.optim.SGD, server),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=experiment.epochs,
            local_learning_rate=experiment.lr,
            local_batch_size=experiment.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[stamp],
    )
    yield from (after - before for before, after in pairwise(stamp.stamps))
