"""Flower's side of benchmarks/peers.py: its PyTorch quickstart (ClientApp, ServerApp, FedAvg) on the benchmark's data.

The apps run on Flower's simulation engine with one virtual client per core, each torch on one thread, as Ray sets it.
"""

import logging
import os
import time
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peers import client_data
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedbat.experiment import Experiment, Federation, prepare

client_app = ClientApp()


@cache
def federation_of(dataset: str) -> Federation:
    """Read once in each of Flower's worker processes."""
    return prepare(Experiment(dataset=dataset))


@cache
def samples_of(dataset: str, client: int) -> TensorDataset:
    return TensorDataset(*client_data(federation_of(dataset), client))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    model = federation_of(config["dataset"]).model
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    samples = samples_of(config["dataset"], context.node_config["partition-id"])
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model.train()
    for x, y in DataLoader(samples, batch_size=config["batch-size"], shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": len(samples)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def run(federation: Federation, cores: int) -> Iterator[float]:
    """Seconds of each round, as its server sees them."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    experiment, stamps, server_app = federation.experiment, [], ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        def stamp(round_: int, arrays: ArrayRecord) -> None:
            stamps.append(time.perf_counter())  # called before the first round and after each

        strategy = FedAvg(fraction_train=experiment.per_round / experiment.clients, fraction_evaluate=0.0)
        config = {"lr": experiment.lr, "batch-size": experiment.batch_size, "dataset": experiment.dataset}
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(federation.model.state_dict()),
            train_config=ConfigRecord(config),
            num_rounds=experiment.rounds,
            evaluate_fn=stamp,
        )

    backend: dict[str, Any] = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": cores}}
    run_simulation(server_app, client_app, experiment.clients, backend_config=backend)
    yield from (after - before for before, after in pairwise(stamps))
