"""An experiment of the library as Flower apps, and the apps on Flower's own simulation.

python -m tests.flower_federation OUT    # one file of global weights for each of RUNS
"""

import json
import sys
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn import functional as F

from fedbat.data import normalize
from fedbat.engine.sequential import draw_epochs
from fedbat.experiment import Experiment, prepare
from fedbat.flower import Compressed, begin, fedbat_mod
from fedbat.flower.records import tensors_of_record
from fedbat.storage import save_tensors
from fedbat.streams import stream_seed

RUNS = (("fedavg", "32"), ("fedbat", "32"), ("ef-signsgd", "32"), ("fedbat", "4"), ("fedbat", "follow"))  # method, down


def small(shape, num_classes):
    """All that could differ: convolution, BatchNorm, dropout, biases."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(8 * (height // 2) * (width // 2), num_classes),
    )


def experiment(method, down="32"):
    """Clients of unequal sizes."""
    return Experiment(
        method=method, model="tests.flower_federation:small", partition="dirichlet", beta=0.3,
        clients=10, per_round=4, rounds=3, epochs=2, lr=0.05, seed=5, down=down,
    )  # fmt: skip


federation = cache(lambda method, down="32": prepare(experiment(method, down)))
client_app = ClientApp(mods=[fedbat_mod])


@client_app.train()
def train(msg: Message, context: Context) -> Message:
    """The sequential engine's work, in a user's own loop."""
    torch.set_num_threads(1)
    fed, client = federation("fedbat"), context.node_config["partition-id"]
    spec, settings = fed.data.spec, fed.experiment
    round_ = msg.content["config"]["server-round"] - 1
    model = fed.model.to(memory_format=torch.channels_last).train()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    torch.manual_seed(stream_seed(settings.seed, "model", round_, client))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    begin(model, optimizer, fed.num_steps(client))
    for epoch in draw_epochs(fed, round_, client):
        for index in epoch.samples.split(settings.batch_size):
            x = normalize(fed.data.x_train[index], spec.train_mean, spec.train_std)
            optimizer.zero_grad()
            F.cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), fed.data.y_train[index]).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(fed.split[client])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


def simulate(out: Path) -> None:
    """All runs one after the other, so that Flower starts only once."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        for method, down in RUNS:
            fed = federation(method, down)
            inside = FedAvg(fraction_train=0.4, fraction_evaluate=0.0, min_available_nodes=10)
            strategy = Compressed(inside, fed.method, fed.model, seed=fed.experiment.seed, down=down)
            result = strategy.start(grid, ArrayRecord(fed.model.state_dict()), fed.experiment.rounds)
            save_tensors(out / f"{method}-{down}.safetensors", tensors_of_record(result.arrays))
            down_bytes = [metrics["fedbat-downlink-bytes"] for metrics in result.train_metrics_clientapp.values()]
            (out / f"{method}-{down}.json").write_text(json.dumps(down_bytes))

    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2, "log_to_driver": False}}
    run_simulation(server_app, client_app, num_supernodes=10, backend_config=backend)


if __name__ == "__main__":
    from tests import flower_federation  # functions of __main__ would be pickled by value, caches and data included

    flower_federation.simulate(Path(sys.argv[1]))
