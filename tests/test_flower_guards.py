"""What strategies, clients and disks may do to a round in Flower, and what must come of it."""

import logging
import shutil
from contextlib import nullcontext

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import strategy as flower
from torch import nn

from fedbat import EFSignSGD, FedBAT
from fedbat.errors import ConfigError, DivergedError
from fedbat.flower import Compressed, begin, fedbat_mod
from fedbat.flower.carried import momenta_of
from fedbat.flower.records import tensors_of_record
from tests.flower_world import World, base, compressed, make_app, memory_of, net, run, same, train_one
from tests.test_flower_replies import with_rest


@pytest.fixture
def told(caplog, monkeypatch):
    """Flower's log of warnings."""
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    caplog.set_level(logging.WARNING, FLOWER_LOGGER.name)
    return lambda: " | ".join(record.getMessage() for record in caplog.records)


class Declining(flower.FedAvg):
    def aggregate_train(self, server_round, replies):
        return None, None


@pytest.mark.parametrize("strategy", [base(Declining), base(flower.Bulyan, num_malicious_nodes=1)], ids=type)
def test_a_strategy_may_keep_the_old_model(strategy, told):
    """Bulyan does with fewer than 4 f + 3 replies: the plain mean would be what it protects from."""
    result = run(compressed(strategy=strategy, average=0.5), World(make_app()), 1)
    assert same(result.arrays, net().state_dict()) and "keeps the model as it is" in told()


class Diverging(flower.FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        if server_round == 2:
            arrays = ArrayRecord({name: x * float("nan") for name, x in tensors_of_record(arrays).items()})
        return arrays, metrics


@pytest.mark.parametrize("down", ["32", "4", "follow"])
def test_a_model_that_would_hold_nan_is_not_taken(down, tmp_path, told):
    strategy = compressed(strategy=base(Diverging), down=down, checkpoint=tmp_path)
    result = run(strategy, World(make_app()), 3)
    assert all(torch.isfinite(x).all() for x in tensors_of_record(result.arrays).values())
    assert "round 2 would bring NaN or infinity" in told()
    assert [result.train_metrics_clientapp[r]["fedbat-uploads"] for r in (1, 2, 3)] == [3, 3, 3]


def test_one_diverged_round_does_not_cost_a_client_its_memory():
    rounds = []

    def diverging(msg, context, call_next):
        if msg.has_content() and "arrays" in msg.content.array_records and context.node_config["partition-id"] == 2:
            rounds.append(len(rounds))
        return call_next(msg, context)

    app = ClientApp(mods=[fedbat_mod, diverging])

    @app.train()
    def train(msg, context):
        model, client = net(), context.node_config["partition-id"]
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        spoils = client == 2 and len(rounds) == 1
        loss, num = train_one(model, client, begin, lr=1e30 if spoils else 0.1)
        metrics = MetricRecord({"train_loss": 0.0 if spoils else loss, "num-examples": num})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)

    def as_flower_replies(msg, context):
        try:
            return app(msg, context)
        except DivergedError as error:
            return Message(Error(code=2, reason=str(error)), reply_to=msg)

    strategy = compressed(EFSignSGD(), flower.FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=5))
    found = run(strategy, World(as_flower_replies), 3).train_metrics_clientapp
    assert [found[r]["fedbat-uploads"] for r in (1, 2, 3)] == [4, 5, 5]


def test_a_damaged_memory_on_disk_is_told_and_training_goes_on(tmp_path, told):
    def world():
        return World(make_app(), node_config={"fedbat-memory": str(tmp_path / "nodes")})

    strategy = flower.FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=5)
    run(compressed(EFSignSGD(), strategy, checkpoint=tmp_path / "server"), world(), 1)
    for path in (tmp_path / "nodes").glob("*-memory-3.safetensors"):
        path.write_bytes(b"")
    found = run(compressed(EFSignSGD(), strategy, checkpoint=tmp_path / "server"), world(), 2)
    assert found.train_metrics_clientapp[2]["fedbat-uploads"] == 5 and "is damaged" in told()


def test_a_weight_of_next_to_nothing_costs_its_sender_the_round_alone():
    def nearly_none(reply):
        reply.content["metrics"]["num-examples"] = 1e-13
        return [reply]

    world = World(make_app())
    world.spoil = dict.fromkeys(range(5), nearly_none)
    found = run(compressed(), world, 1).train_metrics_clientapp[1]
    assert found["fedbat-dropped-weight"] == 3 and same(run(compressed(), world, 1).arrays, net().state_dict())


class Lookahead(flower.FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        ahead = ArrayRecord({name: x + 100 for name, x in tensors_of_record(arrays).items()})
        return super().configure_train(server_round, ahead, config, grid)


class Scored(flower.FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for number, message in enumerate(messages):
            message.content = RecordDict({**message.content, "scores": MetricRecord({"lr": 0.1 * number})})
        return messages


@pytest.mark.parametrize(("kind", "why"), [(Lookahead, "other arrays than the model"), (Scored, "different contents")])
def test_what_clients_would_not_get_is_refused(kind, why):
    with pytest.raises(ConfigError, match=why):
        run(compressed(strategy=base(kind)), World(make_app()), 1)


class Thresholds(flower.FedAvg):
    def configure_evaluate(self, server_round, arrays, config, grid):
        messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        for number, message in enumerate(messages):
            message.content = RecordDict({**message.content, "config": ConfigRecord({"threshold": number})})
        return messages


def test_evaluations_that_differ_between_nodes_are_refused():
    strategy = Thresholds(fraction_train=0.6, fraction_evaluate=1.0, min_available_nodes=3)
    with pytest.raises(ConfigError, match=r"different contents \(evaluate\)"):
        run(compressed(strategy=strategy, evaluate_on_clients=True), World(make_app()), 1)


def test_odd_scores_cost_their_sender_the_evaluation_alone(told):
    def odd(reply):
        if "seen" in reply.content["metrics"]:
            reply.content["metrics"]["more"] = 1.0
        return [reply]

    world = World(make_app())
    world.spoil = {4: odd}
    strategy = flower.FedAvg(fraction_train=0.6, fraction_evaluate=1.0, min_available_nodes=3)
    found = run(compressed(strategy=strategy, evaluate_on_clients=True), world, 1)
    assert "seen" in found.evaluate_metrics_clientapp[1] and "the evaluation of round 1 drops node" in told()


def test_an_app_may_call_begin_while_it_evaluates():
    app = make_app()

    @app.evaluate("tuned")
    def evaluate(msg, context):
        model = net()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        loss, num = train_one(model, context.node_config["partition-id"], begin)
        return Message(RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": num})}), reply_to=msg)

    class Tuned(flower.FedAvg):
        def configure_evaluate(self, server_round, arrays, config, grid):
            messages = list(super().configure_evaluate(server_round, arrays, config, grid))
            for message in messages:
                message.metadata.message_type = "evaluate.tuned"
            return messages

    strategy = Tuned(fraction_train=0.6, fraction_evaluate=1.0, min_available_nodes=3)
    found = run(compressed(strategy=strategy, evaluate_on_clients=True), World(app), 1)
    assert found.evaluate_metrics_clientapp[1]["loss"] > 0


@pytest.mark.parametrize("down", ["32", "4", "follow"])
@pytest.mark.parametrize("other", ["compiled", "another"])
def test_arrays_of_another_model_are_refused_at_the_start(other, down):
    state = net().state_dict() if other == "compiled" else nn.Linear(3, 2).state_dict()
    state = {f"_orig_mod.{name}": x for name, x in state.items()} if other == "compiled" else state
    with pytest.raises(ConfigError, match="in the arrays to start from"):
        compressed(down=down).start(World(make_app()), ArrayRecord(state), 1)


@pytest.mark.parametrize("down", ["32", "4"])
def test_a_model_changed_between_two_rounds_is_the_one_that_clients_get(down):
    seen = []

    def spying(msg, context, call_next):
        seen.append(float(tensors_of_record(msg.content["arrays"])["0.weight"].abs().max()))
        return call_next(msg, context)

    strategy, world = compressed(down=down), World(make_app(fedbat_mod, spying))
    arrays = ArrayRecord(net().state_dict())
    for round_ in (1, 2):
        messages = list(strategy.configure_train(round_, arrays, ConfigRecord(), world))
        arrays, _ = strategy.aggregate_train(round_, world.send_and_receive(messages))
        arrays = ArrayRecord({name: torch.zeros_like(x) for name, x in tensors_of_record(arrays).items()})
    assert all(seen[:3]) and not any(seen[3:]) and len(seen) == 6


def test_a_node_that_missed_the_question_who_it_is_is_asked_again(told):
    class Late(World):
        missed = False

        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            if not self.missed:
                self.missed = True
                return [reply for reply in replies if self.partition(reply.metadata.src_node_id) != 0]
            return replies

    world = Late(make_app())
    run(compressed(), world, 12)
    assert any(0 in asked for asked in world.asked[1:]) and "has not said who it is" in told()
    questions = [asked for asked in world.asked if asked == [0]]
    assert len(questions) == 1


def test_a_second_start_remembers_nothing_of_the_first():
    strategy, world = compressed(EFSignSGD()), World(make_app())
    first, second = run(strategy, world).arrays, run(strategy, world).arrays
    assert same(first, second)


def test_a_second_run_does_not_write_into_the_checkpoint_of_a_live_one(tmp_path):
    """Ctrl-C on `flwr run --stream` ends the log, not the run; both would train under one name."""

    def once_more(round_, arrays):
        if round_ == 1:
            with pytest.raises(ConfigError, match="is in use by process"):
                run(compressed(checkpoint=tmp_path), World(make_app()), 3)

    found = run(compressed(checkpoint=tmp_path), World(make_app()), 2, evaluate_fn=once_more)
    assert len(found.train_metrics_clientapp) == 2
    assert len(run(compressed(checkpoint=tmp_path), World(make_app()), 3).train_metrics_clientapp) == 1


def test_a_folder_that_a_node_cannot_write_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"folder .*file/memory cannot be created"):
        run(compressed(EFSignSGD()), World(make_app(), node_config={"fedbat-memory": str(tmp_path / "file/memory")}), 1)


def test_a_disk_that_a_node_cannot_write_to_is_named(tmp_path, monkeypatch):
    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedbat.flower.receiving.save_tensors", full)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written .*No space left.*fedbat-memory"):
        run(compressed(EFSignSGD()), World(make_app(), node_config={"fedbat-memory": str(tmp_path)}), 1)


def test_going_on_with_a_method_that_remembers_nothing_works(tmp_path):
    """And with one that does again, what was remembered is still of use."""

    def world():
        return World(make_app(), node_config={"fedbat-memory": str(tmp_path / "nodes")})

    for num_rounds, method in enumerate((EFSignSGD(), FedBAT(), EFSignSGD(memory=False), EFSignSGD()), 1):
        found = run(compressed(method, checkpoint=tmp_path / "server"), world(), num_rounds)
        assert found.train_metrics_clientapp[num_rounds]["fedbat-uploads"] == 3


def test_going_on_with_other_tensors_begins_to_lead_anew(tmp_path, told):
    node_config = {"fedbat-memory": str(tmp_path / "nodes")}
    for num_rounds, roles in ((2, {}), (4, {"3.bias": "skip"})):
        strategy = compressed(down="follow", roles=roles, checkpoint=tmp_path / "server")
        found = run(strategy, World(make_app(), node_config=node_config), num_rounds)
    assert [found.train_metrics_clientapp[round_]["fedbat-uploads"] for round_ in (3, 4)] == [3, 3]
    assert "nodes are sent the whole model anew: in the checkpoint, a model with other tensors is kept" in told()


def test_a_round_that_is_trained_again_begins_with_the_same_memory(tmp_path):
    """The server dies in a round whose uploads left already: they are lost, and must not be missing from the memory."""

    def everyone():
        return flower.FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=5)

    class Dying(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            if server_round == 3:
                raise KeyboardInterrupt
            return super().aggregate_train(server_round, replies)

    whole, parts = World(make_app()), World(make_app())
    expected = run(compressed(EFSignSGD(), everyone()), whole, 4)
    dying = Dying(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=5)
    with pytest.raises(KeyboardInterrupt):
        run(compressed(EFSignSGD(), dying, checkpoint=tmp_path), parts, 4)
    found = run(compressed(EFSignSGD(), everyone(), checkpoint=tmp_path), parts, 4)
    assert same(found.arrays, expected.arrays)
    for a, b in zip(whole.contexts.values(), parts.contexts.values(), strict=True):
        assert same(memory_of(a.state), memory_of(b.state)) and memory_of(a.state)


def test_a_memory_of_rounds_that_were_undone_is_forgotten(tmp_path, told):
    """A checkpoint was restored from a backup: what the memories lack was never added to that model."""
    world = World(make_app())
    run(compressed(EFSignSGD(), checkpoint=tmp_path / "server"), world, 1)
    shutil.copytree(tmp_path / "server", tmp_path / "backup")
    run(compressed(EFSignSGD(), checkpoint=tmp_path / "server"), world, 4)
    assert "is remembered is of round" not in told()
    found = run(compressed(EFSignSGD(), checkpoint=tmp_path / "backup"), world, 4).train_metrics_clientapp
    assert "is remembered is of round" in told() and all(found[r]["fedbat-uploads"] == 3 for r in (2, 3, 4))


def test_two_strategies_that_take_turns_keep_a_memory_each():
    world, apart = World(make_app()), [World(make_app()), World(make_app())]

    def rounds(strategy, world):
        arrays = ArrayRecord(net().state_dict())
        for round_ in (1, 2, 3):
            messages = list(strategy.configure_train(round_, arrays, ConfigRecord(), world))
            arrays, _ = strategy.aggregate_train(round_, world.send_and_receive(messages))
            yield arrays

    def both():
        return [compressed(EFSignSGD(), down="follow"), compressed(EFSignSGD(), down="follow", seed=1)]

    turns = list(zip(*(rounds(strategy, world) for strategy in both()), strict=True))[-1]
    alone = [list(rounds(strategy, own))[-1] for strategy, own in zip(both(), apart, strict=True)]
    assert all(same(found, expected) for found, expected in zip(turns, alone, strict=True))
    run(compressed(EFSignSGD()), world)
    assert all(len({key.split(".")[1] for key in context.state}) <= 2 for context in world.contexts.values())


HUGE = {flower.FedAdam: 1e25, flower.FedYogi: 1e25, flower.FedAdagrad: 1e25, flower.FedAvgM: 3e38}  # squared: infinity


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("kind", HUGE)
def test_one_huge_value_costs_a_round_and_not_the_momentum(kind, told):
    """As if nobody had answered in that round."""

    def huge(reply):
        return with_rest(reply, HUGE[kind])

    def silence(reply):
        return []

    def in_round_2(change):
        rounds = []

        def spoil(reply):
            rounds.append(reply)
            return change(reply) if len(rounds) == 2 else [reply]

        return spoil

    def after(change):
        world = World(make_app(), num_clients=2)
        world.spoil = {0: in_round_2(change), 1: in_round_2(silence)}
        options = {"server_momentum": 0.9, "server_learning_rate": 2.0} if kind is flower.FedAvgM else {}
        inside = kind(fraction_train=1.0, fraction_evaluate=0.0, **options)
        return run(compressed(strategy=inside), world, 4).arrays, inside

    (found, inside), (expected, other) = after(huge), after(silence)
    assert same(found, expected)
    mine, theirs = momenta_of(inside), momenta_of(other)
    assert mine and all((mine[path] == theirs[path]).all() for path in mine)
    assert told().count("round 2 would bring NaN or infinity into") == 1


def test_nan_in_the_first_model_is_refused_at_the_start_and_infinity_in_a_mask_is_not():
    for value, refused in ((float("nan"), True), (float("inf"), False)):
        model = net()
        model.register_buffer("mask", torch.full((2, 2), value))
        strategy = Compressed(base(), FedBAT(), model)
        with pytest.raises(ConfigError, match="mask holds NaN") if refused else nullcontext():
            strategy._begin(model.state_dict(), {})


def test_rounds_in_vain_are_told_with_what_most_replies_were_dropped_for(told):
    def nobody(reply):
        reply.content["metrics"]["num-examples"] = 0
        return [reply]

    world = World(make_app())
    world.spoil = dict.fromkeys(range(5), nobody)
    run(compressed(), world, 3)
    assert "in 3 rounds in a row; 3 of 3 replies were dropped as weight, such as: its metric 'num-examples'" in told()


def test_an_own_aggregation_is_told_that_it_gets_the_mean_alone(told):
    run(compressed(strategy=base(Diverging)), World(make_app()), 1)
    assert "Diverging.aggregate_train is given a single reply, the mean of all uploads" in told()

    class Median(flower.FedMedian):
        def aggregate_train(self, server_round, replies):
            return super().aggregate_train(server_round, replies)

    before = told().count("single reply")
    run(compressed(strategy=base(Median)), World(make_app()), 1)
    run(compressed(strategy=base(flower.FedAdam)), World(make_app()), 1)
    assert told().count("single reply") == before


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [("control", (2,), r"expected no such array"), ("3.bias", (1,), r"expected \(3,\)")],
)
def test_arrays_that_are_not_of_the_model_are_refused_from_a_strategy(name, shape, why):
    class More(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            arrays, metrics = super().aggregate_train(server_round, replies)
            return ArrayRecord({**tensors_of_record(arrays), name: torch.zeros(shape)}), metrics

    with pytest.raises(ConfigError, match=rf"More\.aggregate_train returned {name} with shape .*{why}"):
        run(compressed(strategy=base(More)), World(make_app()), 1)


@pytest.mark.parametrize(
    "kind", [flower.DifferentialPrivacyClientSideFixedClipping, flower.DifferentialPrivacyServerSideFixedClipping]
)
def test_a_strategy_around_ours_that_needs_plain_updates_is_refused(kind):
    with pytest.raises(ConfigError, match=f"{kind.__name__} cannot wrap Compressed"):
        run(kind(compressed(), 0.1, 1.0, 3), World(make_app()), 1)
