"""One training step a round on random images; the arrays are all that matters."""

import socket

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedbat import make_method
from fedbat.data import DATASETS
from fedbat.flower import Compressed, begin, fedbat_mod
from fedbat.models import build_model

STOCK = "stock"
SHAPES = {"cnn": DATASETS["fmnist"].shape, "resnet10": DATASETS["cifar10"].shape}  # the data set that goes with it

client_app = ClientApp(mods=[fedbat_mod])  # stock strategies pass it untouched
server_app = ServerApp()


def new_model(context: Context) -> torch.nn.Module:
    name = context.run_config["model"]
    return build_model(name, SHAPES[name], 10, seed=0)


@client_app.train()
def train(msg: Message, context: Context) -> Message:
    model = new_model(context)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if context.run_config["method"] != STOCK:
        begin(model, optimizer, num_steps=1)
    images = torch.randn(8, *SHAPES[context.run_config["model"]])
    torch.nn.functional.cross_entropy(model.train()(images), torch.arange(8)).backward()
    optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 8})})
    return Message(content, reply_to=msg)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    config, model = context.run_config, new_model(context)
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
    if config["method"] != STOCK:
        strategy = Compressed(strategy, make_method(config["method"]), model, down=config["down"])

    def stamp(server_round: int, arrays: ArrayRecord) -> None:
        with socket.create_connection(("127.0.0.1", config["stamps"])) as counter:
            counter.recv(1)  # until the bytes are noted

    strategy.start(grid, ArrayRecord(model.state_dict()), config["num-server-rounds"], evaluate_fn=stamp)
