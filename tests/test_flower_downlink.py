"""Few bits down in Flower: the library's own weights bit for bit, and no node is ever trained on a wrong model."""

import copy

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

import fedbat
from fedbat import FedBAT, Payload, layout_of, make_method
from fedbat.averaging import averaged
from fedbat.downlink import DOWNLINKS, snapshot
from fedbat.errors import ConfigError, DataError
from fedbat.flower import Compressed, fedbat_mod
from fedbat.flower.records import CONFIG, tensors_of_record
from fedbat.flower.sending import SENDING
from fedbat.following import Follower, Held, Leader, follow, message_bytes
from fedbat.layout import whole_layout
from tests.flower_world import (
    World,
    base,
    compressed,
    key_of,
    make_app,
    net,
    run,
    same,
    sampled,
    train_locally,
)

LAYOUT = layout_of(net())
WHOLE = whole_layout(net(), LAYOUT)


def following(strategy=None, **options):
    return compressed(strategy=strategy, down="follow", **options)


class Everyone:
    """What every client receives, from the library alone."""

    def __init__(self, down, w):
        self.down, self.leader, self.held, self.bytes = down, Leader(Follower.of(LAYOUT, w)), {}, []

    def send(self, w, clients):
        """What each gets, and the bytes."""
        if self.down == "follow":
            raws = {k: self.leader.message(self.held[k].held if k in self.held else None) for k in clients}
            self.held |= {k: follow(LAYOUT, self.held.get(k), raw) for k, raw in raws.items()}
            got = {k: self.held[k].w for k in clients}
        else:
            raws = dict.fromkeys(clients, snapshot(LAYOUT, w, int(self.down)))
            got = {k: Payload.from_bytes(raw, LAYOUT).values() for k, raw in raws.items()}
        self.bytes.append(sum(map(len, raws.values())))
        return got


def locally(down, method, num_rounds):
    """The same federation by the library's own Server: true model after each round, and bytes down."""
    model = net()
    server, memories, truth = fedbat.Server(method, model), {}, []
    everyone = Everyone(down, model.state_dict())
    for round_ in range(num_rounds):
        got = everyone.send(model.state_dict(), sampled(round_))
        for client in sampled(round_):
            local = net()
            local.load_state_dict(got[client])
            upload, num = train_locally(method, local, client, round_, memories.get(client))
            memories[client] = upload.memory
            server.add(upload.to_bytes(), num, context=round_)
        server.step()
        truth.append({name: x.clone() for name, x in model.state_dict().items()})
        everyone.leader = everyone.leader.lead(truth[-1])
    return truth, everyone


@pytest.mark.parametrize("method", ["fedbat", "ef-signsgd"])
@pytest.mark.parametrize("down", ["8", "2", "follow"])
def test_flower_gives_the_weights_and_the_bytes_of_the_library_alone(down, method):
    method, seen = make_method(method), []

    def evaluate(round_, arrays):
        seen.append((arrays, strategy.received, strategy.averaged))

    strategy = compressed(method, down=down, average=0.5)
    result = run(strategy, World(make_app()), num_rounds=4, evaluate_fn=evaluate)
    truth, everyone = locally(down, method, 4)
    assert same(result.arrays, truth[-1])
    assert [m["fedbat-downlink-bytes"] for m in result.train_metrics_clientapp.values()] == everyone.bytes
    average = {}
    for w, (true, received, average_seen) in zip(truth, seen[1:], strict=True):
        average = averaged(average, w, 0.5)
        assert same(true, w) and same(average_seen, average) and not same(received, w)
    last = everyone.leader.public.w if down == "follow" else everyone.send(truth[-1], [0])[0]
    assert same(seen[-1][1], last)
    assert seen[0][2] is None and same(result.arrays, seen[-1][0])


def test_every_downlink_of_the_simulation_is_there():
    assert SENDING.keys() == DOWNLINKS.keys()
    for wrong in ({"down": "5"}, {"down": 5}, {"average": 1.0}):
        with pytest.raises(ConfigError):
            compressed(**wrong)
    assert compressed(down=4).down == compressed(down="4").down
    with pytest.raises(ConfigError, match="no model before `start`"):
        following().received  # noqa: B018


@pytest.mark.parametrize("kind", [flower.FedAdam, flower.FedAvgM])
@pytest.mark.parametrize("down", ["2", "follow"])
def test_strategies_with_momentum_see_changes_of_the_true_model(kind, down, monkeypatch):
    """Against the same strategy given one dense reply a round: true model + mean of the uploads."""
    found, seen = base(kind), []
    aggregate = found.aggregate_train

    def spy(round_, replies):
        seen.append(tensors_of_record(next(iter(replies[0].content.array_records.values()))))
        return aggregate(round_, replies)

    monkeypatch.setattr(found, "aggregate_train", spy)
    uploads, app = [], make_app()

    def listening(msg, context):
        reply = app(msg, context)
        if reply.content.array_records:
            (array,) = next(iter(reply.content.array_records.values())).values()
            weight = reply.content["metrics"]["num-examples"]
            uploads[-1].append((weight, Payload.from_bytes(array.data, LAYOUT).values()))
        return reply

    truth = []

    def evaluate(round_, arrays):
        truth.append(tensors_of_record(arrays))
        uploads.append([])

    run(compressed(down=down, strategy=found), World(listening), num_rounds=3, evaluate_fn=evaluate)
    for w, sent, given in zip(truth, uploads, seen, strict=False):
        total = sum(weight for weight, _ in sent)
        for name in given:
            expected = w[name] + sum(change[name] * (weight / total) for weight, change in sent)
            assert torch.allclose(given[name], expected, atol=1e-6), name
    assert len(seen) == 3


@pytest.mark.parametrize("down", DOWNLINKS)
def test_the_app_sees_the_arrays_in_their_own_order(down):
    """Many apps load by position, and running_mean has the shape of a norm's weight."""
    seen = []

    def look(msg, context, call_next):
        seen.append(list(msg.content["arrays"]))
        return call_next(msg, context)

    strategy = compressed(down=down)
    result = run(strategy, World(make_app(fedbat_mod, look)), num_rounds=3)
    names = list(net().state_dict())
    assert len(seen) == 9 and all(order == names for order in [*seen, list(result.arrays), list(strategy.received)])


# Nodes that lose, damage or miss what they hold


class Told:
    """An app that remembers which model each node trained from in each round."""

    def __init__(self):
        self.models, self.app = {}, make_app(fedbat_mod, self._look)

    def _look(self, msg, context, call_next):
        model, round_ = tensors_of_record(msg.content["arrays"]), msg.content["config"]["server-round"]
        self.models.setdefault(round_, {})[context.node_config["partition-id"]] = model
        return call_next(msg, context)

    def __call__(self, msg, context):
        return self.app(msg, context)

    def check(self, expected):
        """Each round all had the same model, that of the undisturbed run."""
        assert self.models.keys() == expected.models.keys()
        for round_, models in self.models.items():
            model = next(iter(expected.models[round_].values()))
            assert all(same(found, model) for found in models.values()), round_


def replace_public(context, tensors):
    context.state[key_of(context.state, "public")] = ArrayRecord(tensors)


def restarted(context):
    context.state = RecordDict()


def damaged(context):
    tensors = tensors_of_record(context.state[key_of(context.state, "public")])
    tensors["w/0.weight"].view(-1)[3].view(torch.int32).bitwise_xor_(1)
    replace_public(context, dict(tensors))


def version_gone(context):
    del context.state[key_of(context.state, "public")]["version"]


def other_tensors(context):
    replace_public(context, {"version": torch.tensor(1), "w/a": torch.zeros(2, 2)})


def of_another_training(context):
    w = {name: x + 1 for name, x in net().state_dict().items()}
    replace_public(context, Follower(WHOLE, 2, w).to_tensors())


def older(context):
    replace_public(context, Follower.of(WHOLE, net().state_dict()).to_tensors())


HARM = [restarted, damaged, version_gone, other_tensors, of_another_training, older]


def all_of_them():
    return flower.FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=3)


@pytest.mark.parametrize("harm", HARM)
def test_a_node_that_holds_something_else_is_brought_up_to_date_in_the_same_round(harm):
    undisturbed, told = Told(), Told()
    expected = run(following(all_of_them()), World(undisturbed), num_rounds=4)
    world, rounds = World(told), []
    victim = next(node for node in world.contexts if world.partition(node) == 2)

    def evaluate(round_, arrays):
        rounds.append(round_)
        if round_ == 2:
            harm(world.contexts[victim])

    found = run(following(all_of_them()), world, num_rounds=4, evaluate_fn=evaluate)
    assert same(found.arrays, expected.arrays)
    told.check(undisturbed)
    one, all_ = message_bytes(LAYOUT, 1), message_bytes(LAYOUT, None)
    sent = [m["fedbat-downlink-bytes"] for m in found.train_metrics_clientapp.values()]
    instead = message_bytes(LAYOUT, 2) if harm is older else all_
    assert sent == [5 * all_, 5 * one, 5 * one + instead, 5 * one]
    assert all(m["fedbat-uploads"] == 5 for m in found.train_metrics_clientapp.values())
    assert world.asked.count([2]) == 1


def test_a_node_whose_reply_was_lost_goes_on_from_what_it_holds():
    """The server believes in the version before; the node says better, and needs nothing more."""
    undisturbed, told = Told(), Told()
    worlds = World(undisturbed), World(told)
    lost = []

    def lose_the_second(reply):
        lost.append(reply)
        return [] if len(lost) == 2 else [reply]

    worlds[0].spoil[2] = lambda reply: [reply]
    worlds[1].spoil[2] = lose_the_second
    run(following(all_of_them()), worlds[0], num_rounds=1)
    found = run(following(all_of_them()), worlds[1], num_rounds=4)
    metrics = found.train_metrics_clientapp
    assert [metrics[r]["fedbat-missing"] for r in (1, 2, 3, 4)] == [0, 1, 0, 0]
    one, two = (message_bytes(LAYOUT, n) for n in (1, 2))
    # what it was sent first starts from version 0, it holds 1 and needs the step to 2
    assert metrics[3]["fedbat-downlink-bytes"] == 4 * one + two + one
    for models in told.models.values():
        first = next(iter(models.values()))
        assert all(same(model, first) for model in models.values())


def test_a_new_node_gets_the_whole_model_and_all_train_from_the_same():
    told = Told()
    world = World(told, num_clients=4)
    late = World(told, num_clients=5, node_seed=9)
    newcomer = next(node for node in late.contexts if late.partition(node) == 4)

    def evaluate(round_, arrays):
        if round_ == 2:
            world.contexts[newcomer], world.apps[newcomer] = late.contexts[newcomer], told
            TaskIdentity.run_id = TaskIdentity.task_id = 1

    found = run(following(all_of_them()), world, num_rounds=3, evaluate_fn=evaluate)
    one, all_ = message_bytes(LAYOUT, 1), message_bytes(LAYOUT, None)
    sent = [m["fedbat-downlink-bytes"] for m in found.train_metrics_clientapp.values()]
    assert sent == [4 * all_, 4 * one, 4 * one + all_]
    assert set(told.models[3]) == set(range(5))
    for models in told.models.values():
        assert all(same(model, models[0]) for model in models.values())


def test_a_node_that_always_refuses_is_left_out_with_the_reason(caplog):
    world = World(make_app())

    def refusing(reply):
        told = reply.content.config_records[CONFIG]
        reply.content = RecordDict({CONFIG: ConfigRecord({**told, "refused": "no"})})
        return [reply]

    world.spoil[2] = refusing
    found = run(following(all_of_them()), world, num_rounds=2)
    for metrics in found.train_metrics_clientapp.values():
        assert metrics["fedbat-uploads"] == 4 and metrics["fedbat-dropped-refused"] == 1
    assert "it could not take the model: no" in caplog.text
    one, all_ = message_bytes(LAYOUT, 1), message_bytes(LAYOUT, None)
    # round 1: it says that it holds version 0 now, and is sent nothing more; round 2: the whole model, then a step
    assert found.train_metrics_clientapp[1]["fedbat-downlink-bytes"] == 5 * all_ + message_bytes(LAYOUT, 0)
    assert found.train_metrics_clientapp[2]["fedbat-downlink-bytes"] == 4 * one + all_ + message_bytes(LAYOUT, 0)


LIES = [
    {},
    {"partition-id": "two"},
    {"partition-id": [2]},
    {"partition-id": 2, "version": -1, "hash": b""},
    {"partition-id": 2, "version": 2, "hash": bytes(16)},
    {"partition-id": 2, "version": "newest", "hash": "right"},
    {"partition-id": 2, "refused": 3},
]


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("lie", LIES)
def test_whatever_a_node_says_about_itself_the_others_go_on(lie, seed):
    """And it is never trained on a wrong model, only sent more than it needs."""
    told = Told()
    world = World(told)

    def lying(reply):
        reply.content[CONFIG] = ConfigRecord(lie)
        return [reply]

    world.spoil[2] = lying
    found = run(following(all_of_them(), seed=seed), world)
    assert all(m["fedbat-uploads"] >= 4 for m in found.train_metrics_clientapp.values())
    for models in told.models.values():
        assert all(same(model, models[0]) for model in models.values())


@pytest.mark.parametrize("seed", [0, None])
def test_whoever_says_what_another_holds_is_brought_up_to_date(seed):
    """Client 2 is sent steps from what client 0 holds, refuses, and says better."""
    told = Told()
    world, held = World(told), {}

    def remember(reply):
        held.update({key: reply.content[CONFIG][key] for key in ("version", "hash")})
        return [reply]

    def repeat(reply):
        if "refused" not in reply.content[CONFIG] and reply.content.array_records:
            reply.content[CONFIG] = ConfigRecord({"partition-id": 2, **held})
        return [reply]

    world.spoil |= {0: remember, 2: repeat}
    victim = next(node for node in world.contexts if world.partition(node) == 2)

    def evaluate(round_, arrays):
        restarted(world.contexts[victim])

    found = run(following(all_of_them(), seed=seed), world, evaluate_fn=evaluate)
    assert all(m["fedbat-uploads"] == 5 for m in found.train_metrics_clientapp.values())
    for models in told.models.values():
        assert all(same(model, models[0]) for model in models.values())


@pytest.mark.parametrize("down", DOWNLINKS)
def test_nodes_that_hold_what_nobody_knows_share_one_message(down):
    """Else the server would pack the whole model once for each."""
    strategy, world = compressed(strategy=all_of_them(), down=down), World(make_app())
    run(strategy, world, num_rounds=2)
    for number, node in enumerate(world.contexts):
        strategy._nodes.held[node] = Held(number, bytes([number] * 16)) if number else None
    messages = strategy.configure_train(3, ArrayRecord(net().state_dict()), ConfigRecord(), world)
    assert len({id(message.content) for message in messages}) == 1


def test_without_a_seed_following_works_too():
    told = Told()
    found = run(following(seed=None), World(told), num_rounds=5)
    assert all(m["fedbat-uploads"] == 3 for m in found.train_metrics_clientapp.values())
    for models in told.models.values():
        first = next(iter(models.values()))
        assert all(same(model, first) for model in models.values())


# What outlives processes


def test_a_nodes_copy_outlives_its_restart_on_its_disk(tmp_path):
    expected = run(following(), World(make_app()), num_rounds=4)
    world = World(make_app(), node_config={"fedbat-memory": str(tmp_path)})

    def evaluate(round_, arrays):
        for context in world.contexts.values():
            context.state = RecordDict()

    found = run(following(), world, num_rounds=4, evaluate_fn=evaluate)
    assert same(found.arrays, expected.arrays)
    assert bytes_down(found) == bytes_down(expected)
    for path in tmp_path.glob("*-public-*"):
        path.write_bytes(path.read_bytes()[:100])
    again = run(following(), world, num_rounds=1)  # another training, and damaged files of the one before
    assert bytes_down(again) == [3 * message_bytes(LAYOUT, None)]


def cut_short(raw):
    return raw[:100]


def other_dimensions(raw):
    """In the metadata, which no checksum covers."""
    assert b'"w/0.weight":"1;0,1"' in raw
    return raw.replace(b'"w/0.weight":"1;0,1"', b'"w/0.weight":"1;0,,"')


@pytest.mark.parametrize("damage", [cut_short, other_dimensions])
def test_a_damaged_file_on_a_nodes_disk_is_as_good_as_none(damage, tmp_path):
    undisturbed, told = Told(), Told()
    run(following(all_of_them()), World(undisturbed), num_rounds=3)
    world = World(told, node_config={"fedbat-memory": str(tmp_path)})

    def evaluate(round_, arrays):
        for path in tmp_path.glob("*-public-1.*"):
            path.write_bytes(damage(path.read_bytes()))
        next(c for n, c in world.contexts.items() if world.partition(n) == 1).state = RecordDict()

    found = run(following(all_of_them()), world, num_rounds=3, evaluate_fn=evaluate)
    told.check(undisturbed)
    one, all_ = message_bytes(LAYOUT, 1), message_bytes(LAYOUT, None)
    assert bytes_down(found) == [5 * all_, 5 * one + all_, 5 * one + all_]


def bytes_down(result):
    return [metrics["fedbat-downlink-bytes"] for metrics in result.train_metrics_clientapp.values()]


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("down", ["4", "follow"])
def test_a_server_that_stops_goes_on_with_all_its_models(down, on_disk, tmp_path):
    node_config = {"fedbat-memory": str(tmp_path / "node")} if on_disk else {}
    strategies = [
        compressed(down=down, average=0.9, checkpoint=tmp_path / name) for name in ("whole", "twice", "twice")
    ]
    whole = run(strategies[0], World(make_app()), num_rounds=6)
    world = World(make_app(), node_config=node_config)
    first = run(strategies[1], world, num_rounds=3)
    for context in world.contexts.values():  # a run that goes on is a new one to the nodes
        context.state, context.run_id = RecordDict(), 2
    rest = run(strategies[2], world, num_rounds=6)
    assert same(whole.arrays, rest.arrays) and list(whole.arrays) == list(rest.arrays)
    assert same(strategies[0].received, strategies[2].received)
    assert same(strategies[0].averaged, strategies[2].averaged)
    kept = down == "4" or on_disk
    assert (bytes_down(first) + bytes_down(rest) == bytes_down(whole)) == kept
    done = compressed(down=down, average=0.9, checkpoint=tmp_path / "twice")
    assert same(run(done, world, num_rounds=6).arrays, whole.arrays)  # nothing left to do
    assert same(done.averaged, strategies[0].averaged)


def gone(path):
    path.unlink()


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "harm"), [("last.json", half), ("round-2.safetensors", half), ("round-2.safetensors", gone)]
)
def test_a_damaged_checkpoint_is_told_as_such(file, harm, tmp_path):
    run(following(checkpoint=tmp_path), World(make_app()), num_rounds=2)
    harm(tmp_path / file)
    with pytest.raises(DataError, match=r"cannot be read .*; restore it, or begin anew in another folder"):
        run(following(checkpoint=tmp_path), World(make_app()), num_rounds=3)


def test_a_second_training_with_the_same_nodes_starts_anew():
    world = World(make_app())
    first, second = (run(following(), world) for _ in range(2))
    assert same(first.arrays, second.arrays)


# Evaluation, and models with more than what is trained


@pytest.mark.parametrize("down", ["4", "follow"])
def test_clients_evaluate_what_they_receive(down):
    strategy = flower.FedAvg(fraction_train=1.0, min_available_nodes=3)
    strategy = compressed(down=down, strategy=strategy, evaluate_on_clients=True)
    world = World(make_app())
    for spoiled in (1, 2):
        world.spoil[spoiled] = lambda reply: [copy.copy(reply)]
    result = run(strategy, world, num_rounds=3)
    received = tensors_of_record(strategy.received)
    expected = float(sum(received[name].sum() for name, _ in net().named_parameters()))
    assert result.evaluate_metrics_clientapp[3]["seen"] == pytest.approx(expected, rel=1e-5)
    told = [m["fedbat-downlink-bytes"] for m in result.evaluate_metrics_clientapp.values()]
    if down == "follow":  # who evaluates has the model for the next round
        assert told == [5 * message_bytes(LAYOUT, 1)] * 3
        assert bytes_down(result)[1:] == [5 * message_bytes(LAYOUT, 0)] * 2
    else:
        assert told == bytes_down(result)


@pytest.mark.parametrize("down", ["4", "follow"])
def test_what_clients_would_refuse_is_refused_at_the_start(down):
    model = net()
    model.register_buffer("mask", torch.full((2, 2), -torch.inf))
    strategy = Compressed(all_of_them(), FedBAT(), model, down=down)
    with pytest.raises(ConfigError, match=r"mask holds NaN or infinity, .*persistent=False.*role skip"):
        strategy.start(World(make_app()), ArrayRecord(model.state_dict()), 1)
