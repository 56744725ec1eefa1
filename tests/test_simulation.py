"""Whole runs on real data: repeatable, paired across methods, and what their records say."""

import dataclasses
import json
import math
import time

import pytest
import torch
from safetensors.torch import load_file

import fedbat
from fedbat import METHODS, ConfigError, DataError, Payload, WireError
from fedbat.data import dataset_of
from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.records import RunRecord
from fedbat.simulation import initial_state, rounds
from fedbat.wire import dense_upload_bytes

MODEL = f"{__name__}:tiny"
SMALL = Experiment(clients=12, per_round=4, rounds=2, epochs=1, batch_size=50, model=MODEL, partition="dirichlet")


def tiny(shape, num_classes):
    """Fast to train, with BatchNorm and dropout so that every kind of state and randomness is there."""
    conv = torch.nn.Conv2d(shape[0], 4, 5, stride=3)
    return torch.nn.Sequential(
        conv, torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Dropout(0.1),
        torch.nn.Linear(256, num_classes),
    )  # fmt: skip


class Spy(SequentialEngine):
    """Remembers what clients were given and gave."""

    def __init__(self, federation):
        super().__init__(federation)
        self.batches, self.uploads, self.memories, self.reports = [], [], [], []

    def _batches(self, round_, client):
        for x, y in super()._batches(round_, client):
            self.batches.append((round_, client, x.sum().item(), y.sum().item()))
            yield x, y

    def train(self, w, round_, clients, memories):
        self.memories.append({k: {n: t.clone() for n, t in v.items()} for k, v in memories.items()})
        for result in super().train(w, round_, clients, memories):
            self.uploads.append(result.upload)
            self.reports.append(result.layers)
            yield result


def run(experiment):
    federation = prepare(experiment)
    engine = Spy(federation)
    found = list(rounds(federation, engine, initial_state(federation)))
    return federation, engine, [r for r, _ in found], found[-1][1]


def sample(method, **changes):
    return dataclasses.replace(SMALL, method=method, **changes)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_same_seed_same_bytes_and_weights(method):
    _, one, rounds_one, state_one = run(sample(method))
    torch.manual_seed(987)  # nothing may depend on the global generators
    _, two, rounds_two, state_two = run(sample(method))
    assert one.uploads == two.uploads
    assert all(torch.equal(state_one.w[k], state_two.w[k]) for k in state_one.w)
    assert [r.accuracy for r in rounds_one] == [r.accuracy for r in rounds_two]
    _, other, *_ = run(sample(method, seed=1))
    assert other.uploads != one.uploads


def test_two_methods_share_split_start_clients_and_batches():
    pairs = [run(sample(method)) for method in ("fedavg", "fedbat", "zerofl")]
    (first, first_engine, first_rounds, _) = pairs[0]
    for federation, engine, found, _ in pairs[1:]:
        assert all((a == b).all() for a, b in zip(first.split, federation.split, strict=True))
        assert all(
            torch.equal(a, b) for a, b in zip(first.model.parameters(), federation.model.parameters(), strict=True)
        )
        assert [r.clients for r in found] == [r.clients for r in first_rounds]
        assert engine.batches == first_engine.batches


def test_sampled_clients_are_distinct_and_uniform():
    federation = prepare(sample("fedavg"))
    drawn = [federation.sampled(t) for t in range(3000)]
    assert all(len(set(c)) == 4 and c == sorted(c) for c in drawn)
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=12).double()
    p = 4 / 12
    assert (counts - 3000 * p).abs().max() < 5 * math.sqrt(3000 * p * (1 - p))


def test_every_sample_is_used_once_an_epoch_and_the_short_batch_is_kept():
    federation = prepare(sample("fedavg", epochs=2))
    engine = SequentialEngine(federation)
    for client in range(3):
        sizes = [len(y) for _, y in engine._batches(0, client)]
        n = len(federation.split[client])
        assert len(sizes) == federation.num_steps(client) == 2 * math.ceil(n / 50)
        assert sum(sizes) == 2 * n and set(sizes) <= {50, n % 50}


def test_memory_belongs_to_the_client_and_waits_while_it_is_absent():
    _, engine, found, state = run(sample("ef-signsgd", rounds=4, per_round=3))
    took_part = set()
    for t, before in enumerate(engine.memories):
        assert set(before) == took_part
        after = engine.memories[t + 1] if t + 1 < len(engine.memories) else state.memories
        for client, memory in before.items():
            same = all(torch.equal(memory[k], after[client][k]) for k in memory)
            assert same == (client not in found[t].clients)
        took_part |= set(found[t].clients)


def test_bytes_add_up_and_fedavg_sends_the_dense_size():
    federation, engine, found, _ = run(sample("fedavg"))
    assert {len(u) for u in engine.uploads} == {dense_upload_bytes(federation.layout)}
    assert sum(r.uplink_bytes for r in found) == sum(map(len, engine.uploads))


def test_fedavg_with_one_client_is_plain_training():
    federation, _, _, state = run(sample("fedavg", clients=1, per_round=1, partition="iid", epochs=1, rounds=1))
    model = prepare(federation.experiment).model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = SequentialEngine(federation)
    from fedbat.streams import stream_seed

    torch.manual_seed(stream_seed(0, "model", 0, 0))
    for x, y in engine._batches(0, 0):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state.w[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weights", "size"), [("samples", 1), ("batches", 50)])
def test_clients_weigh_by_samples_or_batches(weights, size):
    """The model is the first one plus the mean of what was sent, each client counted ceil(samples / size) times."""
    federation, engine, (found,), state = run(sample("fedavg", weights=weights, rounds=1))
    counts = [math.ceil(len(federation.split[client]) / size) for client in found.clients]
    assert len(set(counts)) > 1
    uploads = [Payload.from_bytes(upload, federation.layout) for upload in engine.uploads]
    for name, start in initial_state(federation).w.items():
        sent = [upload.parts[name].unpack() if name in upload.parts else upload.rest[name] for upload in uploads]
        if start.is_floating_point():
            mean = sum(n * x.double() for n, x in zip(counts, sent, strict=True)).view(start.shape) / sum(counts)
            torch.testing.assert_close(state.w[name].double(), start + mean, rtol=1e-5, atol=1e-6)


def test_a_model_starts_as_asked_and_by_default_as_the_authors_or_as_it_says():
    def start(**changes):
        federation = prepare(sample("fedavg", **changes))
        return federation.experiment.init, next(federation.model.parameters())

    (own, first), (kept, second) = start(), start(init="own")
    assert own == kept == "own" and torch.equal(first, second)
    assert start(model="cnn")[0] == start(init="normal")[0] == "normal"
    assert not torch.equal(start(init="normal")[1], first)


def test_record_is_complete_and_true(tmp_path):
    federation = prepare(sample("fedbat"))
    record = RunRecord.begin(tmp_path / "run", federation)
    for round_, after in rounds(federation, SequentialEngine(federation), initial_state(federation)):
        record.add(round_)
        state = after
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "running"
    record.close("finished", 2, state)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    accuracies = [line["accuracy"] for line in lines]
    assert summary["status"] == "finished" and summary["rounds_done"] == 2 == len(lines)
    assert summary["best_accuracy"] == max(accuracies) and summary["final_accuracy"] == accuracies[-1]
    assert summary["last10_accuracy"] == pytest.approx(sum(accuracies) / 2)
    per_client = sum(line["uplink_bytes"] for line in lines) / 8
    assert summary["uplink_bytes_per_client_round"] == per_client
    num_parameters = sum(p.numel() for p in federation.model.parameters())
    assert summary["bits_per_parameter"] == pytest.approx(8 * per_client / num_parameters)
    d, layers = sum(e.numel for e in federation.layout.compressed), len(federation.layout.compressed)
    assert summary["bits_per_compressed_parameter"] == pytest.approx((d + 32 * layers) / d)
    dense = sum(e.nbytes for e in federation.layout)
    assert summary["downlink_bytes_per_client_round"] == dense and summary["seconds"] > 0
    assert summary["total_bytes_per_client_round"] == per_client + dense
    assert summary["total_saving"] == pytest.approx(2 * dense / (per_client + dense))
    assert summary["versions"].keys() == {"python", "torch", "numpy", "numba", "fedbat", "source"}
    assert summary["own"].keys() == {__name__}
    assert summary["config"]["rounds"] == 2
    for line in lines:
        assert set(line["layers"]) == {e.name for e in federation.layout.compressed}
        for report in line["layers"].values():
            assert report["relative_error"] > 0 and report["step"] > 0 and 0 <= report["clipped"] <= 1
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(saved[name], state.w[name]) for name in state.w)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("iid", (None, None, None)),
        ("dirichlet", (0.7, None, None)),
        ("labels", (None, 3, None)),
        ("virtual", (0.7, None, 64)),
        ("virtual-iid", (None, None, 64)),
    ],
)
def test_a_setting_is_recorded_where_the_partition_uses_it(partition, expected):
    beta = 0.7 if expected[0] else None
    found = Experiment(partition=partition, beta=beta).resolved()
    assert (found.beta, found.labels, found.samples) == expected
    assert found.resolved() == found


def test_a_million_clients_start_at_once_and_only_those_that_took_part_cost_anything():
    start = time.perf_counter()
    federation = prepare(sample("ef-signsgd", partition="virtual", clients=10**6, per_round=5, rounds=2))
    drawn = [federation.sampled(t) for t in range(20)]
    assert time.perf_counter() - start < 5
    assert len({client for clients in drawn for client in clients}) > 90  # of 100 draws from a million
    *_, (_, state) = rounds(federation, SequentialEngine(federation), initial_state(federation))
    assert set(state.memories) == {*drawn[0], *drawn[1]}


def test_diverged_training_is_said_with_round_and_client():
    with pytest.raises(WireError, match=r"round 1, client \d+: .*lower --lr"):
        run(sample("fedavg", lr=1e30))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"per_round": 13}, ConfigError, "--per-round is 13 but there are only 12 clients"),
        ({"rounds": 0}, ConfigError, "--rounds is 0"),
        ({"epochs": 1.5}, ConfigError, "--epochs is 1.5 .float., expected whole number"),
        ({"batch_size": 0}, ConfigError, "--batch-size is 0"),
        ({"lr": float("nan")}, ConfigError, "--lr is nan"),
        ({"seed": -1}, ConfigError, "--seed is -1"),
        ({"dataset": "mnist"}, ConfigError, "unknown data set 'mnist'; choose from"),
        ({"method": "x"}, ConfigError, "unknown method 'x'"),
        ({"settings": {"phi": "2"}}, ConfigError, "phi=2"),
        ({"partition": "x"}, ConfigError, "unknown partition 'x'"),
        ({"clients": 6001, "partition": "iid"}, ConfigError, "6001 clients for 6000 samples"),
        ({"clients": 5999}, DataError, "at least 10 for each"),
        ({"partition": "labels", "labels": 11}, ConfigError, "11 labels per client"),
        ({"partition": "labels", "clients": 4, "labels": 2}, DataError, "use more clients or more labels"),
        ({"beta": 0.0}, ConfigError, "beta"),
        ({"partition": "virtual", "samples": 10}, ConfigError, "10 samples for each virtual client"),
        ({"model": "nope"}, ConfigError, "unknown model 'nope'"),
        ({"weights": "x"}, ConfigError, "--weights is 'x'; choose from samples, batches"),
        ({"init": "x"}, ConfigError, "--init is 'x'; choose from normal, own"),
    ],
)
def test_impossible_experiments_say_got_expected_fix(changes, error, message):
    with pytest.raises(error, match=message):
        prepare(sample("fedbat", **changes) if "method" not in changes else dataclasses.replace(SMALL, **changes))


def test_a_setting_that_the_partition_would_ignore_is_refused():
    with pytest.raises(
        ConfigError, match=r"--beta is 0\.5, but --partition iid does not use it; drop it, or choose dir"
    ):
        Experiment(partition="iid", beta=0.5)


def test_data_of_another_name_than_the_experiments_are_refused():
    images = torch.zeros(20, 1, 28, 28, dtype=torch.uint8)
    own = dataset_of(images, torch.arange(20) % 4, images[:4], torch.arange(4))
    with pytest.raises(ConfigError, match="data is 'own', but dataset is 'fmnist-mini', which the record would name"):
        prepare(SMALL, data=own)


def test_the_papers_resnets_are_trained_twice_as_long_whatever_others_are_called():
    rounds_of = {name: Experiment(model=name).resolved().rounds for name in ("cnn", "resnet10", "resnets:tiny")}
    assert rounds_of == {"cnn": 100, "resnet10": 200, "resnets:tiny": 100}


def test_simulate_yields_what_an_engine_made_by_hand_would():
    experiment = sample("fedbat")
    _, _, expected, state = run(experiment)
    found = list(fedbat.simulate(experiment, engine="sequential"))
    assert [(r.accuracy, r.loss, r.uplink_bytes) for r, _ in found] == [
        (r.accuracy, r.loss, r.uplink_bytes) for r in expected
    ]
    assert all(torch.equal(x, state.w[name]) for name, x in found[-1][1].w.items())


def test_a_rounds_reports_are_means_over_its_clients():
    _, engine, (first, _), _ = run(sample("fedbat"))
    assert len(engine.reports) == 8
    for name, report in first.layers.items():
        one_each = [reports[name] for reports in engine.reports[:4]]
        for figure in report._fields:
            assert getattr(report, figure) == pytest.approx(sum(getattr(r, figure) for r in one_each) / 4)
    assert len({report.clipped for reports in engine.reports for report in reports.values()}) > 8
