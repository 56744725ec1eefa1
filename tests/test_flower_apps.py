"""Flower apps as people write them: metrics, configs and strategies of their own, optimizers that are kept."""

import logging
import statistics

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import strategy as flower
from torch import nn

from fedbat import FedBAT
from fedbat.errors import ConfigError, MethodError
from fedbat.flower import begin, fedbat_mod
from tests.flower_world import World, base, compressed, make_app, net, run, same, train_one


@pytest.fixture
def told(caplog, monkeypatch):
    """Flower's log of warnings."""
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    caplog.set_level(logging.WARNING, FLOWER_LOGGER.name)
    return lambda: [record.getMessage() for record in caplog.records if record.getMessage().startswith("fedbat")]


def renamed(contents, key):
    return MetricRecord({"mean_loss": statistics.fmean(c.metric_records["metrics"]["train_loss"] for c in contents)})


def spread(contents, key):
    losses = [content.metric_records["metrics"]["train_loss"] for content in contents]
    return MetricRecord({"train_loss": losses[0], "spread": statistics.stdev(losses), "clients": len(losses)})


def listed(contents, key):
    return MetricRecord({"losses": sorted(c.metric_records["metrics"]["train_loss"] for c in contents)})


@pytest.mark.parametrize("kind", [flower.FedAvg, flower.FedAdam])
@pytest.mark.parametrize("aggregate", [renamed, spread, listed])
def test_metrics_are_aggregated_once_by_the_strategys_own_function(aggregate, kind):
    seen = []

    def spying(contents, key):
        seen.append(aggregate(contents, key))
        return seen[-1]

    strategy = base(kind, train_metrics_aggr_fn=spying)
    metrics = run(compressed(strategy=strategy), World(make_app()), 2).train_metrics_clientapp
    assert len(seen) == 2 and strategy.train_metrics_aggr_fn is spying
    for round_, made in enumerate(seen, 1):
        assert dict(made).items() <= dict(metrics[round_]).items()
    assert seen[0].get("clients", 3) == 3


class Changed(flower.FedAvg):
    """A strategy with messages of its own."""

    def change(self, number, message):
        """Nothing."""

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for number, message in enumerate(messages):
            self.change(number, message)
        return messages


class ForEach(Changed):
    def change(self, number, message):
        message.content = RecordDict({**message.content, "config": ConfigRecord({"number": number})})


class ForAll(Changed):
    def change(self, number, message):
        message.content["config"] = ConfigRecord({"lr": 0.05})


class Controlled(Changed):
    def change(self, number, message):
        message.content["control"] = ArrayRecord(net().state_dict())


class Special(Changed):
    def change(self, number, message):
        message.metadata.message_type = "train.special"


class Grouped(Changed):
    ttl = 3600.0

    def change(self, number, message):
        kind, about = message.metadata.message_type, message.metadata
        message.__dict__.update(
            Message(message.content, about.dst_node_id, kind, ttl=self.ttl, group_id="mine").__dict__
        )


class Brief(Grouped):
    ttl = 3.0


class Starting(flower.FedAvg):
    def start(self, *args, **kwargs):
        return super().start(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(ForEach, "gives nodes different contents"), (Controlled, r"array records arrays, control \(train\), expected")],
)
def test_messages_that_would_lose_something_are_refused(kind, message):
    with pytest.raises(ConfigError, match=message):
        run(compressed(strategy=base(kind)), World(make_app()), 1)


def test_one_config_for_all_arrives_and_sampling_by_the_seed_is_told(told):
    app, seen = ClientApp(mods=[fedbat_mod]), []

    @app.train()
    def train(msg, context):
        seen.append(msg.content["config"]["lr"])
        model = net()
        _, num = train_one(model, context.node_config["partition-id"], begin, 1)
        metrics = MetricRecord({"num-examples": num})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "m": metrics}), reply_to=msg)

    run(compressed(strategy=base(ForAll)), World(app), 1)
    assert seen == [0.05] * 3
    assert any("sampled by the seed; with seed=None your configure_train" in line for line in told())
    assert not any("sampled by the seed" in line for line in told()[1:])


def test_a_start_that_would_not_be_called_is_refused():
    with pytest.raises(ConfigError, match=r"Starting\.start would never be called"):
        compressed(strategy=base(Starting))


def test_nodes_are_asked_by_the_name_of_the_strategys_action():
    app = ClientApp(mods=[fedbat_mod])

    @app.train("special")
    def train(msg, context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        loss, num = train_one(model, context.node_config["partition-id"], begin)
        metrics = MetricRecord({"train_loss": loss, "num-examples": num})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    found = run(compressed(strategy=base(Special)), World(app)).arrays
    assert same(found, run(compressed(strategy=base(Changed)), World(make_app())).arrays)


@pytest.mark.parametrize(("kind", "ttl"), [(flower.FedAvg, 40.0), (Grouped, 40.0), (Brief, 3.0)])
def test_messages_expire_with_their_round_and_keep_their_group(kind, ttl):
    """Else a slow node works through all the rounds that it has missed."""
    world = World(make_app())
    run(compressed(strategy=base(kind), timeout=40), world, 2)
    hellos, sent = world.about[:5], world.about[5:]
    assert [about.ttl for about in hellos] == [40] * 5 and [about.ttl for about in sent] == [ttl] * 6
    assert {about.group_id for about in sent} == {"" if kind is flower.FedAvg else "mine"}


def failing(app, partition):
    """As Flower answers for an app that raises."""

    def answer(msg, context):
        try:
            return app(msg, context)
        except Exception as error:
            return Message(Error(code=2, reason=f"Traceback\n{type(error).__name__}: {error}"), reply_to=msg)

    return lambda msg, context: (answer if context.node_config["partition-id"] == partition else app)(msg, context)


def test_a_mod_around_ours_may_read_the_config(told):
    """Also in the question who a node is, which comes before its first training."""

    def mine(msg, context, call_next):
        assert msg.content["config"]["lr"] == 0.1
        return call_next(msg, context)

    world = World(make_app(mine, fedbat_mod))
    assert same(run(compressed(), world).arrays, run(compressed(), World(make_app())).arrays) and not told()


def test_a_node_that_cannot_say_who_it_is_is_told_of_with_the_reason_and_counted(told):
    def mine(msg, context, call_next):
        return call_next(msg, context) if msg.content["config"]["mu"] else None

    broken, world = make_app(mine, fedbat_mod), World(make_app())
    node = next(node for node in world.contexts if world.partition(node) == 2)
    world.apps[node] = failing(broken, 2)
    found = run(compressed(), world).train_metrics_clientapp
    assert [found[round_]["fedbat-unknown"] for round_ in (1, 2, 3)] == [1, 1, 1]
    (line,) = [line for line in told() if "has not said who it is" in line]
    assert f"node {node} " in line and "takes no part until it does: the client failed: KeyError: " in line


def test_without_a_single_partition_id_a_seed_promises_too_much(told):
    world = World(ClientApp())  # without the mod
    for node in world.contexts:
        world.apps[node] = failing(world.apps[node], world.partition(node))
    found = run(compressed(), world, 2).train_metrics_clientapp
    assert found[1]["fedbat-unknown"] == 5 and found[1]["fedbat-dropped-failed"] == 3
    assert sum("no node has told a partition-id, so which ones train is not repeatable" in x for x in told()) == 1


def test_a_node_whose_partition_changes_is_known_by_the_new_one(told):
    """An operator restarts it with another --node-config; with its key it is the same node to Flower."""
    world = World(make_app(), num_clients=4)
    node = next(node for node in world.contexts if world.partition(node) == 2)

    def evaluate(round_, arrays):
        if round_ == 1:
            world.contexts[node].node_config["partition-id"] = 4

    strategy = base()
    strategy.fraction_train = 1.0
    run(compressed(strategy=strategy), world, 4, evaluate_fn=evaluate)
    assert sum(f"node {node} has the partition-id 4 now; it had 2" in line for line in told()) == 1
    assert [sorted(asked) for asked in world.asked if asked][-1] == [0, 1, 3, 4]


def test_nodes_that_are_never_sampled_are_told_of_once(told):
    world = World(make_app())
    twin, lone, *_ = world.contexts
    world.contexts[twin].node_config["partition-id"] = 4
    del world.contexts[lone].node_config["partition-id"]
    world.partition = lambda node: world.contexts[node].node_config.get("partition-id", -1)
    run(compressed(strategy=base(min_train_nodes=2)), world, 3)
    lines = [line for line in told() if "takes no part" in line]
    assert len(lines) == 2
    assert sum("another node has its partition-id, 4, too" in line for line in lines) == 1
    assert sum(f"node {lone} takes no part: it has no partition-id" in line for line in lines) == 1


def test_one_app_serves_plain_flower_as_well():
    """With the strategy bare, begin changes nothing: what arrives is the mean of what plain clients train."""

    def plain():
        app = ClientApp()

        @app.train()
        def train(msg, context):
            model = net()
            model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            loss, num = train_one(model, context.node_config["partition-id"], lambda *_: None)
            metrics = MetricRecord({"train_loss": loss, "num-examples": num})
            return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

        return app

    everyone = {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_available_nodes": 5}
    ours, theirs = (run(flower.FedAvg(**everyone), World(app), 2).arrays for app in (make_app(), plain()))
    for name, tensor in ours.to_torch_state_dict().items():
        torch.testing.assert_close(tensor.float(), theirs.to_torch_state_dict()[name].float(), rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_an_app_keeps_is_free_again_after_a_mistake():
    kept, app, calls = {}, ClientApp(mods=[fedbat_mod]), []

    @app.train()
    def train(msg, context):
        partition = context.node_config["partition-id"]
        if partition not in kept:
            model = net()
            kept[partition] = model, torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = kept[partition]
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        begin(model, optimizer, 1)
        nn.functional.mse_loss(model(torch.randn(9, 6)), torch.zeros(9, 3)).backward()
        calls.append(partition)
        if calls.count(partition) == 1:
            raise RuntimeError("out of memory, say")
        optimizer.step()
        metrics = MetricRecord({"num-examples": 9})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    world = World(app)
    (node, context), *_ = world.contexts.items()
    orders = next(iter(compressed().configure_train(1, ArrayRecord(net().state_dict()), ConfigRecord(), world)))
    received = Message(orders.content, dst_node_id=node, message_type="train")
    with pytest.raises(RuntimeError, match="out of memory"):
        app(received, context)
    orders = next(iter(compressed().configure_train(1, ArrayRecord(net().state_dict()), ConfigRecord(), world)))
    assert app(Message(orders.content, dst_node_id=node, message_type="train"), context).has_content()


def test_a_reply_with_other_arrays_is_refused():
    app = ClientApp(mods=[fedbat_mod])

    @app.train()
    def train(msg, context):
        model = net()
        train_one(model, context.node_config["partition-id"], begin, 1)
        arrays = {"arrays": ArrayRecord(model.state_dict()), "control": ArrayRecord(model.state_dict())}
        return Message(RecordDict({**arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    with pytest.raises(MethodError, match="array records arrays, control, expected the model's alone"):
        run(compressed(FedBAT()), World(app), 1)
