"""Few bits down: the snapshot's quantizer and bytes, the true model kept at the server, and the averaged model."""

import dataclasses
import itertools
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import norm

from fedbat import Payload, layout_of
from fedbat.averaging import averaged
from fedbat.channels import WIDTHS, Channels, levels_of
from fedbat.checkpoint import Checkpoint
from fedbat.downlink import DOWNLINKS, FOLLOW, FULL, SNAPSHOTS, Public, graded_widths, snapshot
from fedbat.engine import SequentialEngine
from fedbat.errors import ConfigError, WireError
from fedbat.experiment import Experiment, prepare
from fedbat.following import Follower, Leader, follow, message_bytes
from fedbat.gaussian import gaussian_levels
from fedbat.layout import Entry, Layout, tensors_of
from fedbat.models import build_model
from fedbat.packing import num_bytes
from fedbat.parts import Reader, Record
from fedbat.run import run_recorded
from fedbat.simulation import initial_state, rounds

CPU = torch.device("cpu")
SMALL = Experiment(clients=8, per_round=3, rounds=3, epochs=1, batch_size=100, model="tests.test_engines:tiny")


def relative_error(x, width):
    return float((Channels.of(x, width).unpack().view_as(x) - x).square().mean() / x.square().mean())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_levels_are_those_of_lloyd_and_max(width):
    """Each the mean of its cell of the normal law, each edge the middle between two; Max 1960."""
    levels = gaussian_levels(width, CPU)
    edges = [-math.inf, *((levels[1:] + levels[:-1]) / 2).tolist(), math.inf]
    means = [norm.expect(lb=low, ub=high, conditional=True) for low, high in pairwise(edges)]
    assert means == pytest.approx(levels.tolist(), rel=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_levels_are_symmetric_and_ascend(width):
    levels = levels_of(width, CPU)
    assert len(levels) == 2**width and torch.equal(levels, -levels.flip(0)) and (levels.diff() > 0).all()


@pytest.mark.parametrize(("width", "expected"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_error_on_normal_weights_is_the_least_possible(width, expected, rng):
    """Max 1960 again; fitting a scale to each channel can only lower it, by about 1 / (weights of a channel)."""
    x = torch.randn(64, 4096, generator=rng) * torch.logspace(-3, 0, 64)[:, None]
    found = torch.stack([torch.tensor(relative_error(row[None], width)) for row in x])
    assert float(found.mean()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_is_as_good_as_steps_up_to_the_largest_weight_and_few_bits_are_better(width, rng):
    x = torch.randn(32, 300, generator=rng)
    largest, steps = x.abs().amax(1, keepdim=True), 2 ** (width - 1) - 1
    plain = ((x / largest * steps).round() / steps * largest - x).square().mean() / x.square().mean()
    assert relative_error(x, width) < (0.9 if width <= 4 else 1.02) * float(plain)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_part_survives_its_bytes_and_has_no_more_of_them(width, rng):
    x = torch.randn(6, 5, 3, 3, generator=rng)
    x[2] = 0  # a dead channel
    part = Channels.of(x, width)
    body = part.body()
    assert len(body) == 4 * 6 + num_bytes(width * x.numel())
    again = Channels.parse(part.record(), x.numel(), Reader(memoryview(body)))
    assert torch.equal(again.unpack(), part.unpack()) and not part.unpack().view_as(x)[2].any()


@pytest.mark.parametrize(("width", "channels"), [(1, 6), (9, 6), (2, 0), (2, 7), (2, 271)])
def test_a_damaged_record_is_refused(width, channels):
    with pytest.raises(WireError):
        Channels.parse(Record(4, width, channels), 270, Reader(memoryview(bytes(10_000))))


def some_model():
    model = build_model("resnet10-narrow", (3, 32, 32), 10, 0)
    layout = layout_of(model)
    return layout, {name: x.clone() for name, x in tensors_of(model, layout).items()}


@pytest.mark.parametrize("down", [name for name in DOWNLINKS if name != FOLLOW])
def test_what_clients_receive_is_what_the_bytes_say(down):
    layout, w = some_model()
    sent = DOWNLINKS[down].publish(layout, w, None, 3)
    assert all(torch.equal(sent.w[entry.name], w[entry.name]) for entry in layout.rest)
    assert [(k, x.dtype, x.shape) for k, x in sent.w.items()] == [(k, x.dtype, x.shape) for k, x in w.items()]
    bits = 8 * sent.num_bytes / sum(entry.numel for entry in layout)
    assert int(down) <= bits < int(down) + 0.6 and (sent.w is w) == (down == FULL)


@pytest.mark.parametrize("narrowest", [2, 3, 4])
def test_no_other_widths_give_a_smaller_sum_of_relative_errors_for_as_many_bits(narrowest):
    """A bit more takes a tensor's relative error to a quarter; against all other ways to spend the bits."""
    sizes = [1000, 300, 249, 60, 7]
    layout = Layout(Entry(str(n), "compress", torch.float32, torch.Size([1, n])) for n in sizes)
    ours = [graded_widths(layout, narrowest)[str(n)] for n in sizes]
    assert ours[0] == narrowest and ours == sorted(ours)

    def bits(widths):
        return sum(n * b for n, b in zip(sizes, widths, strict=True))

    def error(widths):
        return sum(0.25**b for b in widths)

    others = itertools.product(range(1, 10), repeat=len(sizes))
    assert all(error(widths) >= error(ours) for widths in others if bits(widths) <= bits(ours))


def test_no_tensor_gets_more_than_eight_bits_and_empty_ones_do_not_matter():
    shapes = {"large": [10, 100_000], "one": [1, 1], "empty": [0, 3]}
    layout = Layout(Entry(name, "compress", torch.float32, torch.Size(shape)) for name, shape in shapes.items())
    assert graded_widths(layout, 2) == {"large": 2, "one": 8, "empty": 8}
    assert graded_widths(layout, 8) == dict.fromkeys(shapes, 8)
    assert graded_widths(Layout(), 2) == {}


@pytest.mark.parametrize("width", [int(width) for width in SNAPSHOTS])
def test_a_snapshot_that_is_not_packed_is_the_one_that_is(width):
    odd = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.Linear(7, 3))
    odd = odd.to(memory_format=torch.channels_last)
    of_odd = layout_of(odd, {"*.bias": "compress"})
    for layout, w in (some_model(), (of_odd, tensors_of(odd, of_odd))):
        raw, sent = snapshot(layout, w, width, 3), DOWNLINKS[str(width)].publish(layout, w, None, 3)
        assert sent.num_bytes == len(raw)
        assert all(torch.equal(sent.w[k], x) for k, x in Payload.from_bytes(raw, layout).values().items())


def run(**changes):
    federation = prepare(dataclasses.replace(SMALL, **changes))
    found = list(rounds(federation, SequentialEngine(federation), initial_state(federation)))
    return [r for r, _ in found], found[-1][1]


@pytest.mark.parametrize("method", ["fedavg", "bifl-full"])
def test_updates_are_added_to_the_true_model(method):
    """With a learning rate of next to nothing it stays, however coarse the snapshot is; also if weights are sent."""
    start = initial_state(prepare(SMALL)).w
    found, state = run(down="2", method=method, lr=1e-12)
    weights = [name for name, x in start.items() if x.dim() > 1]
    assert all(torch.allclose(state.w[name], start[name], atol=1e-7) for name in weights)
    assert all(r.received is not None and r.received.loss != r.loss for r in found)


class Listening(SequentialEngine):
    """Remembers what clients were given and gave."""

    def __init__(self, federation):
        super().__init__(federation)
        self.given, self.results = [], []

    def train(self, w, round_, clients, memories):
        self.given.append(w)
        self.results.append([])
        for result in super().train(w, round_, clients, memories):
            self.results[-1].append(result)
            yield result


@pytest.mark.parametrize("down", [FULL, "2", FOLLOW])
def test_the_true_model_is_the_first_plus_all_that_was_aggregated(down):
    federation = prepare(dataclasses.replace(SMALL, down=down, rounds=4))
    engine, start = Listening(federation), initial_state(federation)
    *_, (_, state) = rounds(federation, engine, start)
    floats = [entry.name for entry in federation.layout if entry.role != "max"]
    total = {name: start.w[name].double() for name in floats}
    for results in engine.results:
        weight = sum(result.num_samples for result in results)
        for result in results:
            payload = Payload.from_bytes(result.upload, federation.layout)
            sent = {name: part.unpack().view(start.w[name].shape) for name, part in payload.parts.items()}
            for name, change in (sent | payload.rest).items():
                if name in total:
                    total[name] += change.double() * (result.num_samples / weight)
    for name in floats:
        assert (state.w[name] - total[name]).norm() <= 1e-5 * total[name].norm(), name


def test_a_run_that_follows_counts_the_bytes_of_the_messages():
    """Against clients that hear them."""
    federation = prepare(dataclasses.replace(SMALL, down=FOLLOW, rounds=12, clients=40, per_round=2, epochs=1))
    engine, start = Listening(federation), initial_state(federation)
    leader, held, missed = Leader(Follower.of(federation.layout, start.w)), {}, []
    for round_, state in rounds(federation, engine, start):
        before, count = dict(held), 0
        for client in round_.clients:
            mine = held.get(client)
            raw = leader.message(mine and mine.held)
            held[client] = follow(federation.layout, mine, raw)
            count += len(raw)
            missed += [leader.public.version - mine.version] if client in before else []
        assert round_.downlink_bytes == count
        for client in round_.clients:
            assert all(torch.equal(held[client].w[name], x) for name, x in engine.given[-1].items())
        leader = leader.lead(state.w)
    assert max(missed) > 3


def test_eight_bits_train_like_thirty_two_and_downlink_bytes_shrink():
    whole, _ = run(rounds=4, epochs=2)
    few, _ = run(rounds=4, epochs=2, down="8")
    assert abs(whole[-1].loss - few[-1].loss) < 0.1
    assert whole[0].received is None and few[0].downlink_bytes < whole[0].downlink_bytes / 3


def test_the_averaged_model_is_the_exponential_average(rng):
    ws = [{"x": torch.randn(5, generator=rng), "n": torch.tensor(k)} for k in range(6)]
    past, expected = {}, ws[0]["x"]
    for k, w in enumerate(ws):
        past = averaged(past, w, 0.9)
        expected = expected if k == 0 else 0.9 * expected + 0.1 * w["x"]
        assert torch.allclose(past["x"], expected, atol=1e-6) and past["n"] == k
    assert averaged(past, ws[0], 0.0) == {}


def test_the_average_of_a_model_of_half_precision_moves_though_its_steps_are_small():
    past = {"x": torch.tensor(1.0, dtype=torch.bfloat16)}
    for _ in range(200):
        past = averaged(past, {"x": torch.tensor(1.03, dtype=torch.bfloat16)}, 0.9)
    assert past["x"].item() == pytest.approx(torch.tensor(1.03, dtype=torch.bfloat16).item(), rel=1e-6)


def moved(w, rng):
    return {k: x + 0.01 * torch.randn(x.shape, generator=rng) if x.is_floating_point() else x + 1 for k, x in w.items()}


def test_what_a_step_misses_is_sent_later(rng):
    """Once the true model stands still, the public one closes in on it."""
    layout, w = some_model()
    public = DOWNLINKS[FOLLOW].publish(layout, w, None, 0)
    w = moved(w, rng)
    gaps = []
    for version in range(1, 40):
        public = DOWNLINKS[FOLLOW].publish(layout, w, public, version)
        gaps.append(max(float((w[e.name] - public.w[e.name]).abs().mean()) for e in layout.compressed))
    assert gaps[-1] < 0.05 * gaps[0]


def test_a_follower_gets_what_it_missed_or_the_whole_model():
    layout, w = some_model()
    public, far = Public(w, 0, versions={1: 7, 2: 40, 3: 6}), 10**6
    cost = {client: DOWNLINKS[FOLLOW].reach(layout, public, [client], 40)[0] for client in (1, 2, 3, 4)}
    assert cost == {client: [message_bytes(layout, n)] for client, n in {1: 33, 2: 0, 3: 34, 4: None}.items()}
    assert DOWNLINKS[FOLLOW].reach(layout, public, [1], far)[0] == [message_bytes(layout, None)]
    assert DOWNLINKS[FOLLOW].reach(layout, public, [1, 4], 40)[1].versions == {1: 40, 2: 40, 3: 6, 4: 40}


def test_a_run_that_follows_learns_and_sends_less_each_way():
    whole, _ = run(rounds=6, per_round=8)
    less, state = run(rounds=6, per_round=8, down=FOLLOW)
    assert less[-1].received.accuracy > 0.8 * whole[-1].accuracy > 0.2
    assert whole[0].downlink_bytes <= less[0].downlink_bytes  # everyone's first download is whole
    assert less[-1].downlink_bytes < whole[-1].downlink_bytes / 10
    assert state.public.versions == dict.fromkeys(range(8), 5)


@pytest.mark.parametrize("down", ["4", FOLLOW])
def test_both_models_are_recorded_saved_and_survive_a_stop(tmp_path, down):
    federation = prepare(dataclasses.replace(SMALL, down=down, average=0.5))
    engine = SequentialEngine(federation)
    whole = run_recorded(federation, engine, tmp_path / "whole")

    def stop(round_):
        if round_.index == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_recorded(federation, engine, tmp_path / "twice", on_round=stop)
    checkpoint = Checkpoint.load(tmp_path / "twice" / "checkpoint")
    assert checkpoint.state.average.keys() == checkpoint.state.w.keys()
    again = run_recorded(federation, engine, tmp_path / "twice")
    assert [(r.received, r.averaged) for r in again.rounds] == [(r.received, r.averaged) for r in whole.rounds]
    for file in ("model.safetensors", "average.safetensors"):
        one, other = (load_file(tmp_path / folder / file) for folder in ("whole", "twice"))
        assert all(torch.equal(one[name], other[name]) for name in one)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["averaged_best_accuracy"] == max(r.averaged.accuracy for r in whole.rounds)
    assert summary["received_last10_accuracy"] > 0 and summary["config"]["down"] == down
    assert [r.downlink_bytes for r in again.rounds] == [r.downlink_bytes for r in whole.rounds]


@pytest.mark.parametrize("wrong", [{"down": "5"}, {"down": "1"}, {"average": 1.0}, {"average": -0.1}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        Experiment(**wrong)


def test_the_levels_in_the_wire_format_are_the_levels():
    page = (Path(__file__).parent.parent / "docs" / "wire-format.md").read_text()
    for width in (2, 3, 4):
        row = next(line for line in page.splitlines() if line.startswith(f"| {width} | 0."))
        assert [float(x) for x in row.split("|")[2].split(",")] == pytest.approx(
            levels_of(width, CPU)[2 ** (width - 1) :].tolist(), rel=1e-8
        )
