"""Flower: replies that must not count, and what a single client can do to a round (docs/deploy.md)."""

import copy
import dataclasses

import pytest
import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity

from fedbat import FedBAT, Payload, SignSGD, layout_of, make_method
from fedbat.errors import ConfigError
from fedbat.flower.records import UPLOAD, packed, unpacked
from fedbat.parts import Dense
from fedbat.streams import stream
from tests.flower_world import NUM_CLIENTS, SIZES, World, base, compressed, make_app, net, run, same


def replaced(reply, data):
    key = next(iter(reply.content.array_records))
    reply.content[key] = packed({UPLOAD: data})
    return [reply]


def raw(reply):
    return unpacked(next(iter(reply.content.array_records.values())), UPLOAD)


def restepped(reply, change):
    payload = Payload.from_bytes(raw(reply), layout_of(net()))
    parts = {k: dataclasses.replace(p, scale=change(p.scale)) for k, p in payload.parts.items()}
    return replaced(reply, dataclasses.replace(payload, parts=parts).to_bytes())


def other_round(reply):
    payload = Payload.from_bytes(raw(reply), layout_of(net()))
    return replaced(reply, dataclasses.replace(payload, context=payload.context + 1).to_bytes())


def not_finite(reply):
    data = bytearray(raw(reply))
    payload = Payload.from_bytes(bytes(data), layout_of(net()))
    rest = {k: v * float("nan") if v.is_floating_point() else v for k, v in payload.rest.items()}
    return replaced(reply, dataclasses.replace(payload, rest=rest).to_bytes())


def dense(reply):
    """Values where signs are expected."""
    payload = Payload.from_bytes(raw(reply), layout_of(net()))
    parts = {k: Dense(1e6 * part.unpack()) for k, part in payload.parts.items()}
    return replaced(reply, dataclasses.replace(payload, parts=parts).to_bytes())


def with_rest(reply, value):
    """BatchNorm's weights, which are 1 in the model, change by this much."""
    payload = Payload.from_bytes(raw(reply), layout_of(net()))
    rest = payload.rest | {"1.weight": torch.full_like(payload.rest["1.weight"], value)}
    return replaced(reply, dataclasses.replace(payload, rest=rest).to_bytes())


def with_metrics(reply, *records):
    del reply.content["metrics"]
    for number, record in enumerate(records):
        reply.content[f"metrics-{number}"] = MetricRecord(record)
    return [reply]


def plain_arrays(reply):
    reply.content["arrays"] = ArrayRecord(net().state_dict())
    return [reply]


def without_weight(reply):
    reply.content["metrics"] = MetricRecord({"train_loss": 1.0})
    return [reply]


SPOILERS = {
    "garbage": (lambda reply: replaced(reply, b"\x00garbage" * 50), "malformed"),
    "cut short": (lambda reply: replaced(reply, raw(reply)[:-3]), "malformed"),
    "other round": (other_round, "malformed"),
    "not finite": (not_finite, "malformed"),
    "plain arrays": (plain_arrays, "malformed"),
    "dense parts": (dense, "malformed"),
    "no weight": (without_weight, "weight"),
    "weight without measure": (lambda reply: with_metrics(reply, {"train_loss": 1.0, "num-examples": 1e300}), "weight"),
    "a metric in a list": (lambda reply: with_metrics(reply, {"train_loss": [1.0], "num-examples": 9}), "metrics"),
    "a metric of its own": (
        lambda reply: with_metrics(reply, {"train_loss": 1.0, "mine": 1.0, "num-examples": 9}),
        "metrics",
    ),
    "metrics twice": (
        lambda reply: with_metrics(reply, {"train_loss": 1.0, "num-examples": 9}, {"train_loss": 1.0}),
        "metrics",
    ),
    "huge values": (lambda reply: with_rest(reply, -1e30), "size"),
    "step out of bounds": (lambda reply: restepped(reply, lambda s: s * 0 + 9.0), "step"),
    "nothing": (lambda reply: [], None),
}


@pytest.mark.parametrize("what", SPOILERS)
def test_a_bad_reply_is_dropped_and_the_round_goes_on(what, caplog):
    spoil, kind = SPOILERS[what]
    chosen = sorted(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False).tolist())
    bad, silent = World(make_app()), World(make_app())
    bad.spoil[chosen[1]], silent.spoil[chosen[1]] = spoil, lambda reply: []
    found, expected = run(compressed(), bad, num_rounds=1), run(compressed(), silent, num_rounds=1)
    assert same(found.arrays, expected.arrays)  # as if it had not answered
    metrics = found.train_metrics_clientapp[1]
    assert metrics["fedbat-uploads"] == 2 and metrics["fedbat-missing"] == (kind is None)
    if kind is not None:
        assert metrics["fedbat-dropped"] == metrics[f"fedbat-dropped-{kind}"] == 1


def test_of_a_failure_the_last_line_is_told_and_whose_it_was(caplog):
    """Flower sends the whole traceback along."""
    chosen = sorted(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False).tolist())
    world = World(make_app())
    reason = "<class 'ray.exceptions.RayTaskError'>:<'Traceback:\n  File x, line 3\nRuntimeError: disk full\n'>"
    world.spoil[chosen[1]] = lambda reply: [Message(Error(ErrorCode.UNKNOWN, reason), reply_to=answered(reply))]

    def answered(reply):
        return Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")

    metrics = run(compressed(), world, num_rounds=1).train_metrics_clientapp[1]
    assert metrics["fedbat-dropped-failed"] == 1
    assert f"client {chosen[1]}: the client failed: RuntimeError: disk full" in caplog.text
    assert "Traceback" not in caplog.text


def test_what_the_superlink_says_of_a_dead_node_is_no_reply(caplog):
    """Its error comes from the SuperLink, which has a number of its own."""

    def gone(reply):
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        return [Message(Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat"), reply_to=questions.pop())]

    chosen = sorted(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False).tolist())
    world = World(make_app())
    questions = [Message(RecordDict(), dst_node_id=SUPERLINK_NODE_ID, message_type="train")]
    world.spoil[chosen[0]] = gone
    metrics = run(compressed(), world, num_rounds=1).train_metrics_clientapp[1]
    assert metrics["fedbat-uploads"] == 2 and metrics["fedbat-dropped"] == 0 and metrics["fedbat-missing"] == 1


def test_a_client_that_answers_twice_counts_once():
    chosen = sorted(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False).tolist())
    world = World(make_app())
    world.spoil[chosen[0]] = lambda reply: [reply, copy.copy(reply)]
    result = run(compressed(), world, num_rounds=1)
    assert same(result.arrays, run(compressed(), World(make_app()), num_rounds=1).arrays)
    assert result.train_metrics_clientapp[1]["fedbat-dropped-twice"] == 1


def test_a_step_size_far_from_the_median_is_dropped():
    method = FedBAT(bounds=None)
    chosen = sorted(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False).tolist())
    bad, silent = World(make_app()), World(make_app())
    bad.spoil[chosen[2]] = lambda reply: restepped(reply, lambda s: s * 1e4)
    silent.spoil[chosen[2]] = lambda reply: []
    found, expected = (run(compressed(method), world, num_rounds=1) for world in (bad, silent))
    assert same(found.arrays, expected.arrays)
    assert found.train_metrics_clientapp[1]["fedbat-dropped-step"] == 1


@pytest.mark.parametrize(("bits", "dropped"), [(1, 0), (4, 1)])
def test_the_bounds_of_a_step_size_are_those_of_its_bits(bits, dropped):
    world = World(make_app())
    client = int(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False)[0])
    world.spoil[client] = lambda reply: restepped(reply, lambda s: s * 0 + 0.03)  # one bit may send up to 0.05
    metrics = run(compressed(FedBAT(bits=bits), max_ratio=1e9), world, num_rounds=1).train_metrics_clientapp[1]
    assert metrics.get("fedbat-dropped-step", 0) == dropped


def test_a_round_without_any_upload_keeps_the_model():
    world = World(make_app())
    world.spoil = dict.fromkeys(range(NUM_CLIENTS), lambda reply: replaced(reply, b""))
    result = run(compressed(), world, num_rounds=2)
    assert result.train_metrics_clientapp[1]["fedbat-uploads"] == 0
    assert same(result.arrays, ArrayRecord(net().state_dict()))


@pytest.mark.parametrize(
    ("value", "dropped"),
    [(50.0, 0), (-99.0, 0), (101.0, 1), (-1e4, 1)],  # of a tensor of ones: max_ratio is 100
)
def test_values_may_be_larger_than_the_others_but_not_beyond_all_measure(value, dropped):
    world = World(make_app())
    client = int(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False)[0])
    world.spoil[client] = lambda reply: with_rest(reply, value)
    metrics = run(compressed(), world, num_rounds=1).train_metrics_clientapp[1]
    assert metrics.get("fedbat-dropped-size", 0) == dropped


@pytest.mark.parametrize("name", ["signsgd", "noisy-signsgd", "stoc-signsgd", "fedmrn"])
def test_a_method_with_one_step_size_takes_no_other(name):
    def restepped_by(reply, factor):
        payload = Payload.from_bytes(raw(reply), layout_of(net()))
        field = "half_width" if name == "fedmrn" else "scale"
        parts = {k: dataclasses.replace(p, **{field: factor * p.step}) for k, p in payload.parts.items()}
        return replaced(reply, dataclasses.replace(payload, parts=parts).to_bytes())

    for factor, dropped in ((1.0, 0), (1.01, 1), (0.99, 1)):
        world = World(make_app())
        client = int(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False)[0])
        world.spoil[client] = lambda reply, factor=factor: restepped_by(reply, factor)
        metrics = run(compressed(make_method(name)), world, num_rounds=1).train_metrics_clientapp[1]
        assert metrics.get("fedbat-dropped-step", 0) == dropped


def test_a_step_size_of_many_digits_is_the_clients_too():
    metrics = run(compressed(SignSGD(alpha=0.0012345678)), World(make_app()), num_rounds=1).train_metrics_clientapp[1]
    assert metrics["fedbat-uploads"] == 3


def test_an_operator_may_say_how_many_samples_a_client_has_at_most():
    chosen = sorted(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False).tolist())
    most = sorted(SIZES[client] for client in chosen)[1]
    metrics = run(compressed(max_examples=most), World(make_app()), num_rounds=1).train_metrics_clientapp[1]
    assert metrics["fedbat-uploads"] == 2 and metrics["fedbat-dropped-weight"] == 1
    with pytest.raises(ConfigError, match="max_examples=inf"):
        compressed(max_examples=float("inf"))


def test_odd_metrics_do_not_end_a_round_of_a_strategy_that_compares_clients():
    world = World(make_app())
    client = int(stream(0, "clients", 0).choice(NUM_CLIENTS, 3, replace=False)[0])
    world.spoil[client] = lambda reply: with_metrics(reply, {"train_loss": [1.0, 2.0], "num-examples": 9})
    result = run(compressed(strategy=base(flower.FedMedian)), world, num_rounds=1)
    assert result.arrays and result.train_metrics_clientapp[1]["fedbat-dropped-metrics"] == 1
