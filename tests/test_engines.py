"""One shared test for all engines: every method, the same uploads as the sequential engine."""

import dataclasses

import pytest
import torch

from fedbat import METHODS
from fedbat.engine import CudaEngine, SequentialEngine, make_engine
from fedbat.errors import ConfigError
from fedbat.experiment import Experiment, prepare
from fedbat.simulation import initial_state, rounds

SMALL = Experiment(
    clients=40, per_round=3, rounds=2, epochs=2, batch_size=50, partition="dirichlet", model=f"{__name__}:tiny"
)
VARIANTS = [(name, {}) for name in sorted(METHODS)] + [
    ("fedbat", {"bits": "last"}),
    ("fedbat", {"phi": "0"}),
    ("fedbat", {"phi": "1"}),
    ("fedbat", {"step": "inf-norm", "phi": "0.2"}),
    ("zerofl", {"variant": "weights"}),
]


def tiny(shape, num_classes):
    return torch.nn.Sequential(
        torch.nn.Conv2d(shape[0], 4, 5, stride=3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(256, num_classes),
    )  # fmt: skip


def run(federation, engine):
    found, state = [], initial_state(federation)
    uploads = []
    train = engine.train

    def spy(*args):
        for result in train(*args):
            uploads.append(result)
            yield result

    engine.train = spy
    for round_, after in rounds(federation, engine, state):
        found.append(round_)
        state = after
    return found, uploads, state


@pytest.mark.parametrize(("method", "settings"), VARIANTS)
def test_cuda_engine_run_eagerly_on_the_cpu_sends_the_sequential_bytes(method, settings):
    """The engine's own code without the graphs; the graphs themselves need a GPU: benchmarks/cuda_check.py."""
    federation = prepare(dataclasses.replace(SMALL, method=method, settings=settings))
    slow_rounds, slow, slow_state = run(federation, SequentialEngine(federation))
    fast_rounds, fast, fast_state = run(federation, CudaEngine(federation, "cpu"))
    assert [r.upload for r in fast] == [r.upload for r in slow]
    assert all(torch.equal(fast_state.w[k], slow_state.w[k]) for k in slow_state.w)
    for a, b in zip(fast, slow, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-5)
        for name, report in b.layers.items():
            for ours, theirs in zip(a.layers[name], report, strict=True):
                assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-4, abs=1e-6))
    assert [r.accuracy for r in fast_rounds] == [r.accuracy for r in slow_rounds]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_engine_is_chosen_by_what_is_there():
    federation = prepare(SMALL)
    assert isinstance(make_engine(federation), SequentialEngine)
    for wrong in ({"name": "cuda"}, {"device": "cuda"}, {"precision": "bf16"}, {"name": "nope"}):
        with pytest.raises(ConfigError):
            make_engine(federation, **wrong)
