"""Flower: the same method code, checked without processes (real ones are in test_flower_deployment.py)."""

import copy
import dataclasses
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod, message_size_mod
from flwr.serverapp import strategy as flower
from torch import nn

import fedbat
from fedbat import METHODS, EFSignSGD, FedBAT, layout_of, make_method
from fedbat.errors import ConfigError, MethodError, WireError
from fedbat.flower import Compressed, begin, fedbat_mod
from fedbat.flower.checkpoint import ServerCheckpoint
from fedbat.flower.records import CONFIG, UPLOAD, Orders, tensors_of_record, unpacked
from fedbat.streams import stream
from tests.flower_world import (
    NUM_CLIENTS,
    World,
    base,
    client_data,
    compressed,
    make_app,
    memory_of,
    net,
    run,
    same,
    sampled,
    train_locally,
    train_one,
)


def locally(method, num_rounds):
    """The same federation by the library's own Server."""
    model = net()
    server, memories = fedbat.Server(method, model), {}
    for round_ in range(num_rounds):
        for client in sampled(round_):
            upload, num = train_locally(method, copy.deepcopy(model), client, round_, memories.get(client))
            memories[client] = upload.memory
            server.add(upload.to_bytes(), num, context=round_)
        server.step()
    return model.state_dict(), memories


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in sorted(METHODS)), ("fedbat", {"bits": "2"}), ("fedbat", {"bits": "4"})],
)
def test_flower_gives_the_weights_of_the_library_alone(name, settings):
    method = make_method(name, settings)
    world = World(make_app())
    result = run(compressed(method), world)
    expected, memories = locally(method, 3)
    assert same(result.arrays, dict(expected))
    for context in world.contexts.values():
        assert same(memory_of(context.state), memories.get(context.node_config["partition-id"], {}))


def test_clients_are_sampled_by_partition_whatever_their_node_ids():
    worlds = [World(make_app(), node_seed=seed) for seed in (1, 2)]
    first, second = (run(compressed(seed=7), world) for world in worlds)
    assert same(first.arrays, second.arrays)
    assert worlds[0].asked[1:] == worlds[1].asked[1:]
    assert sorted(worlds[0].asked[0]) == list(range(NUM_CLIENTS))  # everyone is asked who it is, once
    assert [asked for asked in worlds[0].asked[1:] if asked] == [sampled(round_, seed=7) for round_ in range(3)]


def test_of_two_nodes_with_one_partition_the_later_to_answer_counts():
    """A node that restarts without a key gets a new id, and its old one is listed until the SuperLink misses it."""
    expected, world, asked = run(compressed(), World(make_app())), World(make_app()), []
    send, client = world.send_and_receive, int(stream(0, "clients", 1).choice(NUM_CLIENTS, 3, replace=False)[0])
    old = next(node for node in world.contexts if world.partition(node) == client)

    def restarting(messages, *, timeout=None):
        asked.append([message.metadata.dst_node_id for message in messages])
        if len(asked) == 2:  # a hello, round 1
            world.contexts = {old + 1: world.contexts[old]} | world.contexts
            world.apps[old + 1] = world.apps[old]
        return send(messages, timeout=timeout)

    world.send_and_receive = restarting
    assert same(run(compressed(), world).arrays, expected.arrays)
    assert [old + 1] in asked and not any(old in nodes for nodes in asked[2:])


def test_without_a_seed_nobody_is_asked_and_flower_samples():
    world = World(make_app())
    run(compressed(seed=None), world)
    assert [len(asked) for asked in world.asked if asked] == [3, 3, 3]


def test_metrics_have_the_bytes_of_each_direction():
    world = World(make_app())
    metrics = run(compressed(), world).train_metrics_clientapp[2]
    whole = 3 * sum(entry.nbytes for entry in layout_of(net()))
    assert metrics["fedbat-uploads"] == 3 and metrics["fedbat-dropped"] == 0
    assert metrics["fedbat-uplink-bytes"] < whole < metrics["fedbat-downlink-bytes"]
    assert metrics["train_loss"] > 0 and "num-examples" not in metrics


@pytest.mark.parametrize("kind", [flower.FedAdam, flower.FedYogi, flower.FedAdagrad, flower.FedAvgM, flower.FedProx])
def test_the_strategy_inside_sees_the_mean_of_the_uploads(kind):
    """Against the same strategy given one dense reply with the mean that the library's own server finds."""
    extra = {"proximal_mu": 0.1} if kind is flower.FedProx else {}
    options = dict(fraction_train=0.6, fraction_evaluate=0.0, min_available_nodes=3, **extra)
    result = run(compressed(strategy=kind(**options)), World(make_app()), num_rounds=1)
    mean, _ = locally(FedBAT(), 1)
    stock, world = kind(**options), World(make_app())
    parameters = {name for name, _ in net().named_parameters()}
    start = ArrayRecord({k: v for k, v in ArrayRecord(net().state_dict()).items() if k in parameters})
    message = next(iter(stock.configure_train(1, start, ConfigRecord(), world)))
    content = RecordDict(
        {
            "arrays": ArrayRecord({k: v for k, v in ArrayRecord(mean).items() if k in parameters}),
            "metrics": MetricRecord({"num-examples": 1.0}),
        }
    )
    expected, _ = stock.aggregate_train(1, [Message(content, reply_to=message)])
    found = tensors_of_record(result.arrays)
    for name, tensor in tensors_of_record(expected).items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    buffers = [name for name, _ in net().named_buffers()]
    assert same({k: found[k] for k in buffers}, {k: mean[k] for k in buffers})
    assert found["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("kind", [flower.FedMedian, flower.FedTrimmedAvg, flower.Krum, flower.MultiKrum])
def test_strategies_that_compare_clients_get_a_dense_model_of_each(kind, monkeypatch):
    seen = []
    strategy = kind(fraction_train=0.6, fraction_evaluate=0.0, min_available_nodes=3)
    aggregate = strategy.aggregate_train

    def spy(round_, replies):
        replies = list(replies)
        seen.append([dict(next(iter(r.content.array_records.values())).items()) for r in replies])
        return aggregate(round_, replies)

    monkeypatch.setattr(strategy, "aggregate_train", spy)
    result = run(compressed(strategy=strategy), World(make_app()), num_rounds=2)
    assert [len(models) for models in seen] == [3, 3]
    assert all(model["0.weight"].numpy().shape == (16, 6) for models in seen for model in models)
    assert result.arrays["1.num_batches_tracked"].numpy().dtype == np.int64


@pytest.mark.parametrize(
    "wrong",
    [
        flower.DifferentialPrivacyServerSideFixedClipping(flower.FedAvg(), 0.1, 1.0, 3),
        flower.FedXgbBagging(),
        object(),
    ],
)
def test_strategies_that_cannot_work_are_refused_with_the_reason(wrong):
    with pytest.raises(ConfigError, match="cannot be compressed"):
        Compressed(wrong, FedBAT(), net())


def test_what_clients_could_not_be_told_is_refused_at_the_start(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Mine(FedBAT):
        pass

    with pytest.raises(ConfigError, match=r"Mine is not registered.* set fedbat.METHODS"):
        compressed(Mine())
    monkeypatch.setitem(METHODS, "mine", Mine)
    assert run(compressed(Mine()), World(make_app()), num_rounds=1).train_metrics_clientapp[1]["fedbat-uploads"] == 3
    for wrong in ({"seed": -1}, {"seed": 2**63}, {"timeout": float("nan")}, {"max_ratio": float("nan")}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            compressed(**wrong)


# State that outlives processes


@pytest.mark.parametrize("kind", [flower.FedAvg, flower.FedAdam, partial(flower.FedAvgM, server_momentum=0.9)])
def test_a_server_that_stops_goes_on_after_its_last_round(kind, tmp_path):
    def strategy(checkpoint=None):
        inside = kind(fraction_train=0.6, fraction_evaluate=0.0, min_available_nodes=3)
        return compressed(strategy=inside, checkpoint=checkpoint)

    seen = []

    def evaluate(round_, arrays):
        seen.append(round_)
        return MetricRecord({"round": round_})

    whole = run(strategy(), World(make_app()), num_rounds=4)
    run(strategy(tmp_path), World(make_app()), num_rounds=2)
    rest = run(strategy(tmp_path), World(make_app(), node_seed=5), num_rounds=4, evaluate_fn=evaluate)
    assert same(whole.arrays, rest.arrays) and list(whole.arrays) == list(rest.arrays)  # some apps load by position
    assert sorted(rest.train_metrics_clientapp) == [3, 4] and seen == [2, 3, 4]
    done = run(strategy(tmp_path), World(make_app()), num_rounds=4)
    assert same(done.arrays, whole.arrays)  # nothing left to do
    assert len(list(tmp_path.glob("round-*"))) == 1


def test_what_a_strategy_carries_comes_back_as_it_was(tmp_path):
    """By name even where parameters are called 0 and 1, as in a ParameterList; in a list where it was one."""
    named = {"0": np.ones(3), "10": np.zeros((2, 2)), "9": np.full(1, 7.0)}
    before = SimpleNamespace(m_t=named, v_t=None, momentum_vector=[array.copy() for array in named.values()])
    after = SimpleNamespace(m_t=None, v_t=None, momentum_vector=None)
    ServerCheckpoint(tmp_path).save(4, {"model": net().state_dict()}, before, {"down": "4"})
    assert ServerCheckpoint(tmp_path).load(after)[::2] == (4, {"down": "4"})
    assert after.m_t.keys() == named.keys() and after.v_t is None
    for found, expected in [*zip(after.momentum_vector, named.values(), strict=True), (after.m_t["9"], named["9"])]:
        assert np.array_equal(found, expected)


def test_going_on_with_other_settings_is_told(tmp_path, caplog):
    run(compressed(checkpoint=tmp_path), World(make_app()), num_rounds=1)
    run(compressed(checkpoint=tmp_path), World(make_app()), num_rounds=2)
    assert "going on with another" not in caplog.text
    run(compressed(FedBAT(rho=2), checkpoint=tmp_path, down=4), World(make_app()), num_rounds=3)
    assert "going on with another down: 32 before, 4 now" in caplog.text
    assert "going on with another method: " in caplog.text and "another strategy" not in caplog.text


def test_a_nodes_memory_outlives_its_restart(tmp_path):
    method = make_method("ef-signsgd", {})
    whole = run(compressed(method), World(make_app()), num_rounds=4)
    world = World(make_app(), node_config={"fedbat-memory": str(tmp_path / "memory")})
    strategy = compressed(method, checkpoint=tmp_path / "server")
    run(strategy, world, num_rounds=2)
    for context in world.contexts.values():  # all nodes restart: Context.state is gone; and so does the server
        context.state, context.run_id = RecordDict(), 2
    rest = run(compressed(method, checkpoint=tmp_path / "server"), world, num_rounds=4)
    assert same(whole.arrays, rest.arrays)


def test_a_second_training_in_the_same_run_remembers_nothing_of_the_first():
    world, method = World(make_app()), make_method("ef-signsgd", {})
    first, second = (run(compressed(method), world) for _ in range(2))
    assert same(first.arrays, second.arrays)


# What users may get wrong


@pytest.mark.parametrize("mods", [[fedbat_mod, fixedclipping_mod], [fedbat_mod, LocalDpMod(1.0, 1.0, 1.0, 1e-5)]])
def test_mods_that_need_plain_arrays_are_refused_with_what_to_use_instead(mods):
    with pytest.raises(ConfigError, match=r"remove it from the ClientApp's mods: .* instead"):
        run(compressed(), World(make_app(*mods)), num_rounds=1)


def test_a_refused_mod_is_found_around_ours_too():
    def config_for_clipping(msg, context, call_next):
        for record in msg.content.config_records.values():
            record["clipping_norm"] = 1.0
        msg.content.config_records.pop("config", None)
        return call_next(msg, context)

    with pytest.raises(ConfigError, match="fixedclipping_mod needs"):
        run(compressed(seed=None), World(make_app(config_for_clipping, fixedclipping_mod, fedbat_mod)), num_rounds=1)


def test_mods_that_only_look_are_welcome():
    result = run(compressed(), World(make_app(message_size_mod, fedbat_mod)), num_rounds=1)
    assert same(result.arrays, run(compressed(), World(make_app()), num_rounds=1).arrays)


def test_begin_outside_a_round_or_twice_or_never_is_told():
    model = net()
    with pytest.raises(MethodError, match="mods=\\[fedbat_mod\\]"):
        begin(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for calls, message in ((0, "returned without"), (2, "called twice")):
        app = ClientApp(mods=[fedbat_mod])

        @app.train()
        def train(msg, context, calls=calls):
            model = net()
            model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            for _ in range(calls):
                begin(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

        with pytest.raises(MethodError, match=message):
            run(compressed(), World(app), num_rounds=1)


def app_that(prepare, steps=2):
    """Trains for two steps after `prepare(model, optimizer, state)` has loaded the model and begun, in any order."""
    app = ClientApp(mods=[fedbat_mod])

    @app.train()
    def train(msg, context):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(model, optimizer, msg.content["arrays"].to_torch_state_dict())
        x, y = client_data(context.node_config["partition-id"])
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=msg)

    return app


def test_a_model_that_does_not_hold_what_was_sent_is_refused():
    """Loading it later would count as training, forgetting to load it would send the way from elsewhere."""

    def too_early(model, optimizer, state):
        with torch.no_grad():
            model[0].weight.add_(1)
        begin(model, optimizer, 2)
        model.load_state_dict(state)

    with pytest.raises(MethodError, match=r"0\.weight is not what the server sent; call begin after load"):
        run(compressed(), World(app_that(too_early)), num_rounds=1)

    def wrapped(model, optimizer, state):
        model.load_state_dict(state)
        begin(nn.Sequential(model), optimizer, 2)

    with pytest.raises(MethodError, match=r"begin got a model with '0\.0\.weight', but the server sent 0\.weight"):
        run(compressed(), World(app_that(wrapped)), num_rounds=1)


def test_a_compiled_model_may_be_given():
    def compiled(model, optimizer, state):
        model.load_state_dict(state)
        begin(torch.compile(model, backend="eager"), optimizer, 2)

    def plain(model, optimizer, state):
        model.load_state_dict(state)
        begin(model, optimizer, 2)

    found, expected = (run(compressed(), World(app_that(how)), num_rounds=2) for how in (compiled, plain))
    assert found.train_metrics_clientapp[2]["fedbat-uploads"] == 3 and same(found.arrays, expected.arrays)


def test_another_number_of_steps_than_announced_is_told(caplog):
    def three(model, optimizer, state):
        model.load_state_dict(state)
        begin(model, optimizer, 3)

    run(compressed(), World(app_that(three, steps=3)), num_rounds=1)
    assert "announced" not in caplog.text
    run(compressed(), World(app_that(three, steps=2)), num_rounds=1)
    assert "begin announced num_steps=3, but the optimizer took 2 steps" in caplog.text


def test_rounds_in_vain_leave_the_model_and_are_told(caplog):
    world = World(make_app())
    for client in range(NUM_CLIENTS):
        world.spoil[client] = lambda reply: []
    result = run(compressed(), world, num_rounds=3)
    assert same(result.arrays, ArrayRecord(net().state_dict()))
    assert (
        caplog.text.count("learned in 3 rounds in a row; no node replied; is mods=[fedbat_mod] in the ClientApp") == 1
    )


def test_a_stock_strategy_fails_loudly_on_packed_replies():
    world, strategy = World(make_app()), compressed()
    messages = strategy.configure_train(1, ArrayRecord(net().state_dict()), ConfigRecord(), world)
    replies = world.send_and_receive(messages)
    with pytest.raises(TypeError):
        base().aggregate_train(1, replies)


def test_the_app_serves_stock_strategies_untouched():
    app = ClientApp(mods=[fedbat_mod])

    @app.train()
    def train(msg, context):
        content = RecordDict({"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    result = run(base(), World(app), num_rounds=1)
    assert torch.allclose(tensors_of_record(result.arrays)["0.weight"], net().state_dict()["0.weight"])


def test_evaluation_on_clients_is_off_unless_asked_for_and_that_is_said(caplog):
    world = World(make_app())
    strategy = flower.FedAvg(fraction_train=0.6, min_available_nodes=3)
    assert not run(compressed(strategy=strategy), world, num_rounds=1).evaluate_metrics_clientapp
    assert "clients do not evaluate, although fraction_evaluate is 1.0; evaluate_on_clients=True" in caplog.text
    caplog.clear()
    result = run(compressed(strategy=strategy, evaluate_on_clients=True), World(make_app()), num_rounds=1)
    state = tensors_of_record(result.arrays)
    expected = float(sum(state[name].sum() for name, _ in net().named_parameters()))
    assert result.evaluate_metrics_clientapp[1]["seen"] == pytest.approx(expected, rel=1e-5)
    run(compressed(strategy=flower.FedAvg(fraction_evaluate=0.0)), world, num_rounds=1)
    assert "clients do not evaluate" not in caplog.text


def test_the_message_to_a_client_holds_one_array_and_our_settings_leave_it():
    world, strategy = World(make_app()), compressed()
    message = next(iter(strategy.configure_train(1, ArrayRecord(net().state_dict()), ConfigRecord(), world)))
    assert [len(record) for record in message.content.array_records.values()] == [1]
    assert CONFIG in message.content.config_records
    with pytest.raises(WireError):
        unpacked(ArrayRecord(net().state_dict()), UPLOAD)


def app_of_one_partition():
    """All clients have the same data, whoever they are."""
    app = ClientApp(mods=[fedbat_mod])

    @app.train()
    def train(msg, context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        _, num = train_one(model, 0, begin)
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": num})}), reply_to=msg)

    return app


def test_nodes_without_a_partition_id_are_asked_for_it_once():
    world = World(app_of_one_partition())
    numbers = {node: world.partition(node) for node in world.contexts}
    world.partition = numbers.__getitem__
    for context in world.contexts.values():
        del context.node_config["partition-id"]
    metrics = run(compressed(), world).train_metrics_clientapp
    assert [metrics[round_]["fedbat-uploads"] for round_ in (1, 2, 3)] == [3, 3, 3]
    assert [len(asked) for asked in world.asked if asked] == [NUM_CLIENTS, 3, 3, 3]


def test_nodes_without_a_partition_id_share_neither_noise_nor_files(tmp_path):
    """With one noise for all, their random signs would err in the same direction."""
    app, uploads = app_of_one_partition(), {}
    world = World(app)
    for method in (FedBAT(), EFSignSGD()):
        strategy = compressed(method)
        message = next(iter(strategy.configure_train(1, ArrayRecord(net().state_dict()), ConfigRecord(), world)))
        for node, partition in ((11, None), (12, None), (13, 0), (14, 0)):
            config = {"fedbat-memory": str(tmp_path)} | ({} if partition is None else {"partition-id": partition})
            context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
            received = Message(copy.deepcopy(message.content), dst_node_id=node, message_type="train")
            uploads[node] = unpacked(app(received, context).content.array_records["arrays"], UPLOAD)
        if method == FedBAT():
            assert uploads[11] != uploads[12] and uploads[13] == uploads[14]
    assert len(list(tmp_path.iterdir())) == 3  # memories of two nodes and of one partition


def test_a_server_cannot_choose_where_a_node_writes():
    orders = Orders(0, FedBAT(), {}, 0, "../../elsewhere")
    with pytest.raises(WireError, match="letters and digits"):
        Orders.take_from(RecordDict({CONFIG: orders.to_config()}))


def test_a_round_waits_as_long_as_it_is_told_to():
    world = World(make_app())
    run(compressed(timeout=12.5), world, num_rounds=1)
    assert world.timeouts == {12.5}  # for who is there, for training and for evaluation
