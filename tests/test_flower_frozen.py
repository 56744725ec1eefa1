"""What goes down in Flower of a model with a frozen backbone, tied weights and buffers that nobody sends."""

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from torch import nn

from fedbat import FedBAT, layout_of
from fedbat.downlink import snapshot
from fedbat.flower import Compressed, begin, fedbat_mod
from fedbat.flower.records import CONFIG, model_to_bytes
from fedbat.following import message_bytes
from fedbat.layout import Layout, whole_layout
from tests.flower_world import World, key_of

ROLES = {"table": "skip"}
STILL = ("frozen.weight", "frozen.bias", "table")


class Odd(nn.Module):
    """Tied weights, a frozen layer, a buffer that is skipped and not finite, a weight without elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.out = nn.Linear(8, 6, bias=False), nn.Linear(8, 6)
        self.out.weight = self.embed.weight
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.register_buffer("table", torch.randn(3))
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.out(self.frozen(self.embed(x)))


class Masked(Odd):
    def __init__(self):
        super().__init__()
        self.table[1] = -torch.inf


def app_of(kind, seen):
    app = ClientApp(mods=[fedbat_mod])

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, state = kind(), msg.content["arrays"].to_torch_state_dict()
        model.load_state_dict(state)
        seen.append(state)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        begin(model, optimizer, num_steps=1)
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": 4})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        seen.append(msg.content["arrays"].to_torch_state_dict())
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return app


def everyone(kind=flower.FedAvg, **options):
    return kind(fraction_train=1.0, min_available_nodes=5, **options)


def start(world, kind=Odd, num_rounds=3, strategy=None, **options):
    model = kind()
    compressed = Compressed(strategy or everyone(fraction_evaluate=0.0), FedBAT(), model, roles=ROLES, **options)
    return compressed, compressed.start(world, ArrayRecord(model.state_dict()), num_rounds)


def bytes_down(result):
    return [metrics["fedbat-downlink-bytes"] for metrics in result.train_metrics_clientapp.values()]


def moving_layout(keep):
    """The twin: every tensor that a loaded model needs, less further names of one, less what stands still."""
    model = Odd()
    whole = whole_layout(model, layout_of(model, ROLES))
    return Layout(e for e in whole if e.name != "out.weight" and not (keep and e.name in STILL))


def each_round(down, keep):
    """Bytes of what one node gets in a later round."""
    layout, model = moving_layout(keep), Odd()
    if down == "follow":
        return message_bytes(layout, 1)
    w = {entry.name: model.state_dict()[entry.name] for entry in layout}
    return len(model_to_bytes(w)) if down == "32" else len(snapshot(layout, w, int(down)))


FROZEN_BYTES = len(model_to_bytes({name: Odd().state_dict()[name] for name in STILL}))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("down", ["32", "4", "follow"])
def test_tied_frozen_and_skipped_tensors_arrive_and_none_travels_twice(down, keep):
    seen = []
    strategy, result = start(World(app_of(Odd, seen)), down=down, keep_frozen=keep)
    assert all(m["fedbat-uploads"] == 5 for m in result.train_metrics_clientapp.values())
    first = {name: x.clone() for name, x in Odd().state_dict().items()}
    for state in seen:
        assert list(state) == list(first)
        assert torch.equal(state["embed.weight"], state["out.weight"])
        assert all(torch.equal(state[name], first[name]) for name in STILL)
    assert not torch.equal(seen[-1]["out.weight"], seen[0]["out.weight"])  # it has learned
    assert list(strategy.received.to_torch_state_dict()) == list(first)
    kept = keep or down == "follow"
    before = message_bytes(moving_layout(kept), None) if down == "follow" else each_round(down, kept)
    later = each_round(down, kept)
    assert bytes_down(result) == [5 * (before + kept * FROZEN_BYTES), 5 * later, 5 * later]


def test_what_never_changes_need_not_be_finite():
    for down in ("4", "follow"):
        seen = []
        _, result = start(World(app_of(Masked, seen)), Masked, down=down, keep_frozen=True)
        assert len(seen) == 15 and all(state["table"][1] == -torch.inf for state in seen)
        assert result.train_metrics_clientapp[3]["fedbat-uploads"] == 5


def lose(context):
    del context.state[key_of(context.state, "frozen")]


def damage(context):
    kept = context.state[key_of(context.state, "frozen")]["packed"]
    kept.data = kept.data[:-1] + bytes([kept.data[-1] ^ 1])


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("harm", [lose, damage])
@pytest.mark.parametrize("down", ["4", "follow"])
def test_a_node_without_the_frozen_tensors_gets_them_in_the_same_round(down, harm, seed):
    seen, trained = [], []
    app = app_of(Odd, seen)

    def harmed_once(msg, context):
        config = msg.content.config_records[CONFIG]
        if config["round"] == 1 and not config["hello"] and not trained:
            trained.append(context.node_id)
            harm(context)
        return app(msg, context)

    _, result = start(World(harmed_once), down=down, keep_frozen=True, seed=seed)
    first = Odd().state_dict()
    assert all(torch.equal(state[name], first[name]) for state in seen for name in STILL) and len(seen) == 15
    later, extra = each_round(down, keep=True), FROZEN_BYTES + each_round(down, keep=True)
    assert bytes_down(result)[1:] == [5 * later + extra, 5 * later]


def test_frozen_tensors_outlive_a_node_on_its_disk(tmp_path):
    seen = []
    world = World(app_of(Odd, seen), node_config={"fedbat-memory": str(tmp_path / "disk")})
    options = {"down": "4", "keep_frozen": True, "checkpoint": tmp_path / "server"}
    start(world, num_rounds=1, **options)
    for context in world.contexts.values():
        context.state = RecordDict()
    _, result = start(world, num_rounds=2, **options)
    assert bytes_down(result) == [5 * each_round("4", keep=True)] and len(seen) == 10


def test_evaluation_needs_no_second_copy():
    seen = []
    strategy = everyone(fraction_evaluate=1.0, min_evaluate_nodes=5)
    world = World(app_of(Odd, seen))
    _, result = start(world, strategy=strategy, down="4", keep_frozen=True, evaluate_on_clients=True)
    told = [metrics["fedbat-downlink-bytes"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert told == [5 * each_round("4", keep=True)] * 3 and len(seen) == 30


@pytest.mark.parametrize("kind", [flower.FedAvg, flower.FedTrimmedAvg, flower.FedAdam])
def test_strategies_leave_frozen_tensors_alone(kind):
    """A mean of equal numbers may round: of three it does."""
    seen = []
    _, result = start(World(app_of(Odd, seen)), strategy=everyone(kind, fraction_evaluate=0.0), down="4")
    found, first = result.arrays.to_torch_state_dict(), Odd().state_dict()
    assert all(torch.equal(found[name], first[name]) for name in STILL)
    assert not torch.equal(found["embed.weight"], first["embed.weight"])
