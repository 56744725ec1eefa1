"""Flower without processes: a grid whose nodes are ClientApps called in turn, and a small federation on them."""

import copy
import random

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

import fedbat
from fedbat import FedBAT, UniformNoise
from fedbat.flower import Compressed, begin, fedbat_mod
from fedbat.flower.records import tensors_of_record
from fedbat.streams import stream

NUM_CLIENTS = 5
SIZES = [30, 50, 20, 70, 40]


class World:
    """Node ids are random; partition ids are 0 to N - 1. `spoil` may change or replace a node's replies."""

    def __init__(self, app, num_clients=NUM_CLIENTS, node_seed=0, node_config=None, run_config=None):
        ids = random.Random(node_seed).sample(range(10**6, 10**7), num_clients)
        self.contexts = {
            node: Context(
                run_id=1, node_id=node, node_config={"partition-id": k, **(node_config or {})}, state=RecordDict(),
                run_config=run_config or {},
            )
            for k, node in enumerate(ids)
        }  # fmt: skip
        self.apps = dict.fromkeys(ids, app)
        self.spoil = {}  # partition id -> function(reply) -> list of replies
        self.asked = []  # partition ids of each send_and_receive
        self.timeouts, self.about = set(), []  # of each send_and_receive; the metadata of each message
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1

    def partition(self, node):
        return self.contexts[node].node_config["partition-id"]

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        messages, replies = list(messages), []
        self.timeouts.add(timeout)
        self.asked.append([self.partition(m.metadata.dst_node_id) for m in messages])
        self.about += [m.metadata for m in messages]
        for message in messages:
            node = message.metadata.dst_node_id
            received = Message(
                copy.deepcopy(message.content), dst_node_id=node, message_type=message.metadata.message_type
            )
            TaskIdentity.node_id = node
            reply = self.apps[node](received, self.contexts[node])
            hello = "fedbat" in message.content.config_records and message.content.config_records["fedbat"]["hello"]
            spoil = None if hello else self.spoil.get(self.partition(node))
            replies += [reply] if spoil is None else spoil(reply)
        TaskIdentity.node_id = 1
        random.shuffle(replies)
        return replies


def key_of(state, what):
    """The name in a node's state of what its last training has kept."""
    return [key for key in state if key.endswith(f".{what}")][-1]


def memory_of(state):
    """What the client will be given in its next round."""
    if not any(key.endswith(".memory") for key in state):
        return {}
    kept = tensors_of_record(state[key_of(state, "memory")])
    return {name.removeprefix("after/"): tensor for name, tensor in kept.items() if name.startswith("after/")}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def client_data(partition):
    generator = torch.Generator().manual_seed(100 + partition)
    x = torch.randn(SIZES[partition], 6, generator=generator)
    return x, x[:, :3].argmax(1)


def train_one(model, partition, begin_, epochs=3, lr=0.1):
    """A user's loop."""
    x, y = client_data(partition)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = list(zip(x.split(10), y.split(10), strict=True))
    begin_(model, optimizer, epochs * len(batches))
    model.train()
    for _ in range(epochs):
        for xs, ys in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xs), ys)
            loss.backward()
            optimizer.step()
    return loss.item(), len(y)


def make_app(*mods):
    """A stock ClientApp: what is fedbat's is one mod and one call."""
    app = ClientApp(mods=list(mods) or [fedbat_mod])

    @app.train()
    def train(msg, context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        loss, num = train_one(model, context.node_config["partition-id"], begin)
        metrics = MetricRecord({"train_loss": loss, "num-examples": num})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg, context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"seen": float(sum(p.detach().sum() for p in model.parameters())), "num-examples": 1})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def base(kind=flower.FedAvg, **options):
    return kind(fraction_train=0.6, fraction_evaluate=0.0, min_available_nodes=3, **options)


def compressed(method=None, strategy=None, **options):
    return Compressed(strategy or base(), method or FedBAT(), net(), **options)


def sampled(round_, seed=0):
    """The partitions that `base` takes part with."""
    return sorted(stream(seed, "clients", round_).choice(NUM_CLIENTS, 3, replace=False).tolist())


def train_locally(method, model, client, round_, memory):
    """What a client uploads and how many samples it has, by the library alone."""
    begun = []

    def begin_(model, optimizer, num_steps):
        noise = UniformNoise(0, "noise", round_, client)
        begun.append(
            fedbat.begin(method, model, optimizer, num_steps, memory=memory or {}, noise=noise, context=round_)
        )

    _, num_samples = train_one(model, client, begin_)
    return begun[0].finish(), num_samples


def same(a, b):
    a, b = (tensors_of_record(x) if isinstance(x, ArrayRecord) else x for x in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def run(strategy, world, num_rounds=3, **options):
    return strategy.start(
        world, ArrayRecord(net().state_dict()), num_rounds, train_config=ConfigRecord({"lr": 0.1}), **options
    )
