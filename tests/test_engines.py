"""One shared test for all engines: every method, the same uploads as the sequential engine."""

import dataclasses
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedbat import METHODS, Payload
from fedbat.engine import CpuEngine, CudaEngine, SequentialEngine, make_engine
from fedbat.engine.base import Lost, arithmetic
from fedbat.engine.cuda import _MAX_SLOTS
from fedbat.engine.recordable import CannotRecordError, check_recordable
from fedbat.engine.workers import Died, Task, Workers, usable_cores
from fedbat.errors import ConfigError, FedbatError, MethodError
from fedbat.experiment import Experiment, prepare
from fedbat.layout import layout_of
from fedbat.onepass import OnePass
from fedbat.simulation import initial_state, rounds
from fedbat.streams import stream_seed

SMALL = Experiment(
    clients=40, per_round=3, rounds=2, epochs=2, batch_size=50, partition="dirichlet", model=f"{__name__}:tiny"
)
CPU = torch.device("cpu")
VARIANTS = [(name, {}) for name in sorted(METHODS)] + [
    ("fedbat", {"sent": "last"}),
    ("fedbat", {"bits": "2"}),
    ("fedbat", {"bits": "3", "sent": "last"}),
    ("fedbat", {"bits": "4", "step": "inf-norm"}),
    ("fedbat", {"phi": "0"}),
    ("fedbat", {"phi": "1"}),
    ("fedbat", {"step": "inf-norm", "phi": "0.2"}),
    ("zerofl", {"variant": "weights"}),
    ("drive", {"scale": "mse"}),
    ("fedmrn", {"mask": "signed"}),
]


def tiny(shape, num_classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, num_classes)
    )


def dropping(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(shape[0] * shape[1] * shape[2], num_classes))


class Counting(nn.Module):
    """With a buffer that each forward pass replaces."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.net = tiny(shape, num_classes)
        self.register_buffer("level", torch.zeros(3))

    def forward(self, x):
        self.level = 0.5 * self.level + x.mean()
        return self.net(x)


class Troubled(nn.Module):
    """Calls `trouble` when it trains one client of round 0, which it knows by its random stream."""

    def __init__(self, trouble, client):
        super().__init__()
        self.net = tiny((1, 28, 28), 10)
        self.trouble, self.victim = trouble, stream_seed(SMALL.seed, "model", 0, client)

    def forward(self, x):
        if self.training and torch.initial_seed() == self.victim:
            self.trouble()
        return self.net(x)


@dataclasses.dataclass
class Kill:
    """The process that calls it, while the file is there."""

    flag: Path
    again: bool

    def __call__(self):
        if self.flag.exists():
            if not self.again:
                self.flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("no good")


def troubled(trouble, client):
    federation = prepare(dataclasses.replace(SMALL, method="ef-signsgd"))
    model = Troubled(trouble, client)
    return dataclasses.replace(federation, model=model, layout=layout_of(model))


@pytest.fixture(scope="module")
def workers():
    with closing(Workers(2)) as pool:
        yield pool


def engines(federation, workers):
    """All of them; the cuda engine's code runs eagerly here."""
    return {
        "sequential": SequentialEngine(federation),
        "cpu": CpuEngine(federation, workers),
        "cuda": CudaEngine(federation, "cpu"),
    }


def run(federation, engine):
    found, state = [], initial_state(federation)
    results = []
    train = engine.train

    def spy(*args):
        for result in train(*args):
            results.append(result)
            yield result

    engine.train = spy
    for round_, after in rounds(federation, engine, state):
        found.append(dataclasses.replace(round_, seconds=0, client_seconds=[], server_seconds=0))
        state = after
    return found, results, state


def same_tensors(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_results(a, b):
    plain = (result._replace(memory={}, seconds=None) for result in (a, b))
    return next(plain) == next(plain) and same_tensors(a.memory, b.memory)


@pytest.mark.parametrize(("method", "settings"), VARIANTS)
def test_engines_send_the_sequential_bytes(method, settings, workers, monkeypatch):
    """The cpu engine does all as the sequential one; the cuda engine's code, run eagerly here, sums in another order.

    Its graphs need a GPU: benchmarks/cuda_check.py.
    """
    federation = prepare(dataclasses.replace(SMALL, method=method, settings=settings))
    slow_rounds, slow, slow_state = run(federation, SequentialEngine(federation))
    cpu_rounds, cpu, cpu_state = run(federation, CpuEngine(federation, workers))
    assert cpu_rounds == slow_rounds
    assert all(same_results(a, b) for a, b in zip(cpu, slow, strict=True))
    assert same_tensors(cpu_state.w, slow_state.w)
    with monkeypatch.context() as patched:
        patched.setattr(OnePass, "of", lambda *_: None)  # it adds in another order than FedBAT's tensor code
        slow_rounds, slow, slow_state = run(federation, SequentialEngine(federation))
    cuda_rounds, cuda, cuda_state = run(federation, CudaEngine(federation, "cpu"))
    assert [r.upload for r in cuda] == [r.upload for r in slow]
    assert same_tensors(cuda_state.w, slow_state.w)
    for a, b in zip(cuda, slow, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-5)
        for name, report in b.layers.items():
            for ours, theirs in zip(a.layers[name], report, strict=True):
                assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-4, abs=1e-6))
    assert [r.accuracy for r in cuda_rounds] == [r.accuracy for r in slow_rounds]


def test_engines_remember_alike(workers):
    """So few clients that each is trained again and again, from what it remembers."""
    few = {"method": "ef-signsgd", "clients": 4, "rounds": 4, "epochs": 1, "partition": "iid"}
    federation = prepare(dataclasses.replace(SMALL, **few))
    _, slow, slow_state = run(federation, SequentialEngine(federation))
    assert max(sum(result.client == client for result in slow) for client in range(4)) > 2
    for name in ("cpu", "cuda"):
        _, found, state = run(federation, engines(federation, workers)[name])
        assert [result.upload for result in found] == [result.upload for result in slow]
        assert state.memories.keys() == slow_state.memories.keys()
        assert all(same_tensors(memory, slow_state.memories[client]) for client, memory in state.memories.items())


def test_engines_agree_on_augmented_images_more_clients_than_slots_and_a_short_last_test_batch(workers, monkeypatch):
    monkeypatch.setattr("fedbat.engine.cuda._TEST_BATCH", 300)
    many = {"method": "signsgd", "per_round": _MAX_SLOTS + 2, "rounds": 1, "epochs": 1}
    federation = prepare(dataclasses.replace(SMALL, **many))
    plain = [result.upload for result in run(federation, SequentialEngine(federation))[1]]
    spec = dataclasses.replace(federation.data.spec, augment=True)
    federation = dataclasses.replace(federation, data=dataclasses.replace(federation.data, spec=spec))
    (slow_round,), slow, _ = run(federation, SequentialEngine(federation))
    assert len(federation.data.y_test) % 300 and all(a != b.upload for a, b in zip(plain, slow, strict=True))
    for name in ("cpu", "cuda"):
        (round_,), found, _ = run(federation, engines(federation, workers)[name])
        assert [(result.client, result.upload) for result in found] == [(one.client, one.upload) for one in slow]
        assert round_.accuracy == slow_round.accuracy and round_.loss == pytest.approx(slow_round.loss, rel=1e-5)


def test_models_draw_what_they_would_draw_alone(monkeypatch):
    """Steps of different clients take turns; each client's dropout is the sequential engine's all the same."""
    monkeypatch.setattr("fedbat.engine.cuda._TURN", 1)
    federation = prepare(dataclasses.replace(SMALL, method="signsgd", model=f"{__name__}:dropping"))
    _, slow, _ = run(federation, SequentialEngine(federation))
    _, mixed, _ = run(federation, CudaEngine(federation, "cpu"))
    assert [result.upload for result in mixed] == [result.upload for result in slow]


def test_a_client_sends_the_same_whoever_was_trained_before(workers):
    """Also where a model gets new buffers in every forward pass."""
    federation = prepare(dataclasses.replace(SMALL, model=f"{__name__}:Counting"))
    w = initial_state(federation).w
    first, second = federation.sampled(0)[:2]
    engine = SequentialEngine(federation)
    score = engine.evaluate(w)
    _, after = engine.train(w, 0, [first, second], {})
    assert engine.evaluate(w) == score
    for alone in (SequentialEngine(federation), CpuEngine(federation, workers)):
        (result,) = alone.train(w, 0, [second], {})
        assert result.upload == after.upload


class Rolling(nn.Module):
    """Leaves its layer out every other time, by Python's dice."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.net = tiny(shape, num_classes)

    def forward(self, x):
        return self.net(x) * (random.random() < 0.5)


class RollingByNumPy(Rolling):
    def forward(self, x):
        return self.net(x) * (np.random.random() < 0.5)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Counting", "replaces level, .* write into it"),
        ("Rolling", "random numbers on the host"),
        ("RollingByNumPy", "random numbers on the host"),
    ],
)
def test_what_a_recorded_step_would_get_wrong_is_refused(model, told, monkeypatch, caplog):
    federation = prepare(dataclasses.replace(SMALL, model=f"{__name__}:{model}"))
    drawn, dice, level = torch.get_rng_state(), random.getstate(), federation.model.state_dict()
    with pytest.raises(CannotRecordError, match=told):
        check_recordable(federation, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), drawn) and random.getstate() == dice
    assert same_tensors(federation.model.state_dict(), level)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("fedbat.engine.check_recordable", lambda federation, _: check_recordable(federation, CPU))
    made = []
    monkeypatch.setattr("fedbat.engine.SequentialEngine", lambda _, *asked: made.append(asked))
    with pytest.raises(CannotRecordError):
        make_engine(federation, "cuda")
    make_engine(federation, precision="bf16")
    assert made == [("cuda", False)] and "sequential engine is used on the GPU, in fp32: the model's" in caplog.text


@pytest.mark.parametrize("model", ["tiny", "dropping"])
def test_other_models_are_recorded(model):
    check_recordable(prepare(dataclasses.replace(SMALL, model=f"{__name__}:{model}")), CPU)


@pytest.mark.parametrize("make", [SequentialEngine, CpuEngine])
def test_engines_leave_threads_and_random_numbers_as_they_were(make):
    federation = prepare(dataclasses.replace(SMALL, model=f"{__name__}:dropping"))
    torch.set_num_threads(2)
    try:
        drawn = torch.get_rng_state()
        with closing(make(federation)) as engine:
            list(engine.train(initial_state(federation).w, 0, federation.sampled(0), {}))
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.get_rng_state(), drawn)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_half_precision_on_a_cpu_rounds_what_layers_compute_and_nothing_else(method, workers):
    federation = prepare(dataclasses.replace(SMALL, method=method, rounds=1))
    _, full, _ = run(federation, SequentialEngine(federation))
    slow_rounds, slow, slow_state = run(federation, SequentialEngine(federation, half=True))
    cpu_rounds, cpu, cpu_state = run(federation, half := CpuEngine(federation, workers, half=True))
    assert half.precision == "bf16"
    assert cpu_rounds == slow_rounds and same_tensors(cpu_state.w, slow_state.w)
    assert all(same_results(a, b) for a, b in zip(cpu, slow, strict=True))
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in slow_state.w.values())
    for ours, exact in zip(slow, full, strict=True):
        assert ours.train_loss != exact.train_loss and ours.train_loss == pytest.approx(exact.train_loss, rel=0.02)


@pytest.mark.parametrize("down", ["4", "follow"])
def test_engines_agree_on_every_model_with_few_bits_down(down, workers):
    """The true model, the public one that clients hold, and the average, bit for bit."""
    federation = prepare(dataclasses.replace(SMALL, method="stoc-signsgd", rounds=3, down=down, average=0.5))
    slow_rounds, slow, slow_state = run(federation, SequentialEngine(federation))
    for engine in (CpuEngine(federation, workers), CudaEngine(federation, "cpu")):
        found, results, state = run(federation, engine)
        assert [r.upload for r in results] == [r.upload for r in slow]
        assert [(r.downloads, r.received.accuracy, r.averaged.accuracy) for r in found] == [
            (r.downloads, r.received.accuracy, r.averaged.accuracy) for r in slow_rounds
        ]
        assert same_tensors(state.w, slow_state.w) and same_tensors(state.average, slow_state.average)
        assert (state.public is None) == (down != "follow")
        if state.public:
            assert same_tensors(state.public.w, slow_state.public.w)
            assert state.public.versions == slow_state.public.versions


@pytest.mark.parametrize("engine", ["sequential", "cpu", "cuda"])
def test_no_two_clients_share_their_noise(engine, workers):
    """Bits that are nothing but noise agree as often as coins do, within five standard errors.

    All clients take as many steps (iid): else the last ones' noise would differ even if all drew the same stream.
    """
    noise_only = {"method": "fedbat", "settings": {"phi": "0", "sent": "last"}, "epochs": 1, "lr": 1e-9}
    federation = prepare(dataclasses.replace(SMALL, partition="iid", **noise_only))
    w, clients = initial_state(federation).w, federation.sampled(0)
    assert len({federation.num_steps(client) for client in clients}) == 1
    made = engines(federation, workers)[engine]
    bits = [
        torch.cat([part.unpack() > 0 for part in Payload.from_bytes(result.upload, federation.layout).parts.values()])
        for round_ in range(2)
        for result in made.train(w, round_, clients, {})
    ]
    agree = [float((a == b).float().mean()) for a, b in itertools.combinations(bits, 2)]
    assert len(agree) == 15 and max(abs(share - 0.5) for share in agree) <= 5 * 0.5 / len(bits[0]) ** 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_engine_is_chosen_by_what_is_there(monkeypatch):
    federation = prepare(SMALL)
    for cores, name, expected in [(1, "auto", SequentialEngine), (1, "cpu", SequentialEngine), (2, "auto", CpuEngine)]:
        monkeypatch.setattr("fedbat.engine.usable_cores", lambda cores=cores: cores)
        with closing(make_engine(federation, name)) as engine:
            assert type(engine) is expected
    assert isinstance(make_engine(federation, device="cpu"), SequentialEngine)
    for wrong in ({"name": "cuda"}, {"device": "cuda"}, {"precision": "tf32"}, {"name": "nope"}, {"device": "nope"}):
        with pytest.raises(ConfigError):
            make_engine(federation, **wrong)


def test_beside_a_gpu_the_cpu_is_had_by_asking_for_it(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert isinstance(make_engine(prepare(SMALL), device="cpu"), SequentialEngine)
    for wrong in ({"name": "cuda", "device": "cpu"}, {"device": "cpu", "precision": "tf32"}):
        with pytest.raises(ConfigError, match=r"cpu|CPU"):
            make_engine(prepare(SMALL), **wrong)
    with pytest.raises(ConfigError, match="the sequential engine is in fp32"):
        make_engine(prepare(SMALL), "sequential", "cuda", "bf16")


def test_cores_are_those_we_are_bound_to():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
    code += "from fedbat.engine.workers import usable_cores; assert usable_cores() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_engines_on_the_same_workers_keep_to_their_own_federations(workers):
    """Also the one that was made first, when the second has been used."""
    federations = [prepare(dataclasses.replace(SMALL, seed=seed)) for seed in (0, 1)]
    made = [CpuEngine(federation, workers) for federation in federations]
    for engine, federation in [*zip(made, federations, strict=True)] * 2:
        (found,), (expected,) = (
            each.train(initial_state(federation).w, 0, [3], {}) for each in (engine, SequentialEngine(federation))
        )
        assert same_results(found, expected)


def test_a_round_is_finished_before_the_next_work(workers):
    federation = prepare(SMALL)
    engine, w, clients = CpuEngine(federation, workers), initial_state(federation).w, federation.sampled(0)
    other = {name: torch.zeros_like(tensor) for name, tensor in w.items()}
    expected = list(SequentialEngine(federation).train(w, 0, clients, {}))
    arriving = engine.train(w, 0, clients, {})
    found = [next(arriving)]
    with pytest.raises(MethodError, match="finish the round first"):
        engine.evaluate(other)
    with pytest.raises(MethodError, match="finish the round first"):
        next(CpuEngine(federation, workers).train(other, 0, clients, {}))
    assert all(same_results(a, b) for a, b in zip([*found, *arriving], expected, strict=True))
    left = engine.train(w, 0, clients, {})
    next(left)
    left.close()
    assert engine.evaluate(w) == SequentialEngine(federation).evaluate(w)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_ctrl_c_is_for_the_parent_alone():
    """A terminal sends it to all; a worker that heard it would print a traceback into a clean stop."""
    with closing(Workers(1)) as pool:
        assert list(pool.run([Task("counted", "count", partial(tuple, "b"))], partial(list, "abc"))) == [1]
        status = Path(f"/proc/{pool._workers[0].process.pid}/status").read_text()
        assert int(status.split("SigIgn:")[1].split()[0], 16) >> signal.SIGINT - 1 & 1


def test_a_worker_that_dies_while_it_takes_anothers_place_is_replaced_too(caplog):
    with closing(Workers(1)) as pool:
        count = [Task("counted", "count", partial(tuple, "b"))], partial(list, "abc")
        assert list(pool.run(*count)) == [1]
        (worker,) = pool._workers
        worker.end()
        worker.start()
        worker.process.kill()
        assert list(pool.run(*count)) == [1] and "while it started; a new one takes its place" in caplog.text


def test_a_client_whose_worker_dies_is_tried_again(workers, tmp_path, caplog):
    client = prepare(SMALL).sampled(0)[1]
    federation = troubled(Kill(tmp_path / "flag", again=False), client)
    _, slow, slow_state = run(federation, SequentialEngine(federation))
    (tmp_path / "flag").touch()
    with caplog.at_level(logging.WARNING):
        found, cpu, state = run(federation, CpuEngine(federation, workers))
    assert "died with signal 9" in caplog.text and f"while it trained client {client}; it is tried" in caplog.text
    assert all(same_results(a, b) for a, b in zip(cpu, slow, strict=True)) and same_tensors(state.w, slow_state.w)
    assert not any(round_.lost for round_ in found)


def test_a_round_goes_on_without_a_client_that_kills_two_workers(workers, tmp_path):
    clients = prepare(SMALL).sampled(0)
    federation = troubled(Kill(tmp_path / "flag", again=True), clients[1])
    expected = list(SequentialEngine(federation).train(initial_state(federation).w, 0, clients, {}))
    (tmp_path / "flag").touch()
    found, results, _ = run(federation, CpuEngine(federation, workers))
    assert isinstance(results[1], Lost) and results[1].reason.count("died with signal 9") == 2
    assert all(same_results(results[i], expected[i]) for i in (0, 2))
    assert found[0].lost == {clients[1]: results[1].reason} and not found[1].lost


def test_a_model_that_cannot_be_tested_ends_the_run():
    class Deadly:
        """Workers that die of every task."""

        def run(self, tasks, make):
            return (Died(f"worker 0 died while it {task.deed}") for task in tasks)

    federation = prepare(SMALL)
    with pytest.raises(FedbatError, match="could not be tested: worker 0 died while it tested batch 0"):
        CpuEngine(federation, Deadly()).evaluate(initial_state(federation).w)


def test_an_error_in_a_worker_is_raised_as_it_was_there(workers):
    clients = prepare(SMALL).sampled(0)
    federation = troubled(fail, clients[1])
    engine = CpuEngine(federation, workers)
    with pytest.raises(ValueError, match="no good") as caught:
        list(engine.train(initial_state(federation).w, 0, clients, {}))
    (note,) = caught.value.__notes__
    assert f"failed while it trained client {clients[1]}" in note and "in fail" in note
    assert len(list(engine.train(initial_state(federation).w, 1, clients, {}))) == 3  # the pool is as good as new


def test_a_model_that_cannot_travel_is_refused(workers):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match="cannot be sent to a worker process"):
            CpuEngine(troubled(lambda: None, 0), workers)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_such_a_model_is_trained_on_one_core_unless_more_were_asked_for(monkeypatch, caplog):
    monkeypatch.setattr("fedbat.engine.usable_cores", lambda: 2)
    federation = troubled(lambda: None, 0)
    assert isinstance(make_engine(federation), SequentialEngine) and "one core is used" in caplog.text
    with pytest.raises(ConfigError, match="cannot be sent"):
        make_engine(federation, "cpu")


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from fedbat.engine import CpuEngine\n"
        "from fedbat.engine.workers import Workers\n"
        "from fedbat.experiment import Experiment, prepare\n"
        "from fedbat.simulation import initial_state, rounds\n"
        "federation = prepare(Experiment(rounds=1, epochs=1, per_round=2))\n"
        "list(rounds(federation, CpuEngine(federation, Workers(1)), initial_state(federation)))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ended with exit code 1 while it started; a script" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_workers_die_with_their_parent():
    code = (
        "from functools import partial; from importlib import import_module\n"
        "from fedbat.engine.workers import Task, Workers\n"
        "workers = Workers(2)\n"
        "for seconds in 0, 600:\n"
        "    print('asleep', flush=True)\n"
        "    tasks = [Task('slept', 'sleep', lambda: (seconds,))] * 2\n"
        "    list(workers.run(tasks, partial(import_module, 'time')))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["asleep\n"] * 2
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) >= 2
        parent.kill()
    deadline = time.time() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.time() < deadline
        time.sleep(0.05)


def test_the_sequential_engine_computes_in_full_float32_on_any_device():
    seen = []
    federation = prepare(dataclasses.replace(SMALL, rounds=1, per_round=1))
    engine = SequentialEngine(federation)
    engine.model.register_forward_hook(
        lambda *_: seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
    )
    with arithmetic(tf32=True):
        for _ in rounds(federation, engine, initial_state(federation)):
            pass
        assert torch.backends.cudnn.allow_tf32
    assert set(seen) == {(False, False)}
