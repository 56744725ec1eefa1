"""What a training step costs: a plain PyTorch loop, FedAvg and binarized FedBAT in it, and both in a CPU engine.

    python benchmarks/steps.py [--model cnn|resnet10] [--steps 200]

All on one thread, channels_last, batch 64, the paper's models; the variants take turns, so that a noisy machine hits
all of them alike. FedBAT's steps are Numba's compiled passes if it is installed; "in tensors" is FedBAT without it. An
engine's model has some layers in fewer operations, or with --precision bf16 computes in that.
Targets, without that: FedAvg <= 1.05 x plain, binarized FedBAT (phi = 0; noise, pull-back and optimizer included)
<= 1.05 x FedAvg. Then the memory that training one client takes, each in a fresh process: by how much the peak of its
resident memory grows from `begin` to `finish`, with the model and a batch there already.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from fedbat import FedAvg, FedBAT, begin
from fedbat.engine.memory import keep_freed_memory
from fedbat.engine.pooling import pool_first
from fedbat.engine.small_convs import multiply_less
from fedbat.models import build_model
from fedbat.onepass import compiled
from fedbat.streams import UniformNoise


class InTensors(FedBAT):
    """As FedBAT computes without Numba: the compiled passes are FedBAT's own, not a subclass's."""


SHAPES = {"cnn": (1, 28, 28), "resnet10": (3, 32, 32), "resnet10-narrow": (3, 32, 32)}
VARIANTS = {  # name: method, whether the model is an engine's, and whether it computes in bf16
    "plain loop": (None, False, False),
    "fedavg": (FedAvg(), False, False),
    "fedbat, binarized": (FedBAT(phi=0), False, False),
    "fedbat, in tensors": (InTensors(phi=0), False, False),
    "engine, fedavg": (FedAvg(), True, False),
    "engine, fedbat": (FedBAT(phi=0), True, False),
    "bf16, fedavg": (FedAvg(), True, True),
    "bf16, fedbat": (FedBAT(phi=0), True, True),
}
RATIOS = [  # and their targets
    ("fedavg", "plain loop", 1.05),
    ("fedbat, binarized", "fedavg", 1.05),
    ("fedbat, in tensors", "fedavg", None),
    ("engine, fedavg", "fedavg", None),
    ("engine, fedbat", "fedbat, binarized", None),
    ("engine, fedbat", "engine, fedavg", None),
    ("bf16, fedavg", "engine, fedavg", None),
    ("bf16, fedbat", "engine, fedbat", None),
]


class Variant:
    """A model in training."""

    def __init__(self, name: str, method: FedAvg | FedBAT | None, engines: bool, half: bool) -> None:
        self.x = torch.randn(64, *SHAPES[name]).contiguous(memory_format=torch.channels_last)
        self.y = torch.randint(0, 10, (64,))
        self.model = build_model(name, SHAPES[name], 10, seed=0).to(memory_format=torch.channels_last)
        if engines:
            pool_first(self.model)
            multiply_less(self.model)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.before = _peak_kib()
        noise = UniformNoise(0, "noise", 0, 0)
        self.local = begin(method, self.model, self.optimizer, 10**6, noise=noise) if method else None

    def step(self) -> float:
        """Seconds of one."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with self.autocast:
            loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="cnn")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    compile_passes()  # which takes memory, too, but once in a process and not for each client
    if options.memory_of:
        print(memory(Variant(options.model, *VARIANTS[options.memory_of])))
        return
    variants = {name: Variant(options.model, *which) for name, which in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.steps + 10):
        for name, variant in variants.items():
            seconds[name].append(variant.step())
    median = {name: statistics.median(times[10:]) for name, times in seconds.items()}
    least = {name: min(times[10:]) for name, times in seconds.items()}
    grown = {name: _memory_in_a_fresh_process(options.model, name) for name in VARIANTS}
    print(f"{options.model}, batch 64, one thread, {options.steps} steps{'' if compiled() else ', without Numba'}")
    for name in VARIANTS:
        times = f"median {1e3 * median[name]:7.2f} ms   least {1e3 * least[name]:7.2f} ms"
        print(f"  {name:18} {times}   peak memory {grown[name] / 1024:6.1f} MiB")
    for a, b, target in RATIOS:
        ratios = f"median {median[a] / median[b]:.3f}, least {least[a] / least[b]:.3f}"
        aim = f" (target {target})" if target else ""
        print(f"  {a + ' / ' + b:34} {ratios}{aim}, memory {grown[a] / grown[b]:.3f}")


def compile_passes() -> None:
    """FedBAT's, if Numba is there: a few steps of any model."""
    model = torch.nn.Linear(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with begin(FedBAT(phi=0), model, optimizer, 5):
        for _ in range(5):
            model(torch.ones(1, 1)).square().sum().backward()
            optimizer.step()


def memory(variant: Variant) -> int:
    """KiB that a client's round adds to the peak of this process."""
    for _ in range(20):
        variant.step()
    if variant.local:
        variant.local.finish().to_bytes()
    return _peak_kib() - variant.before


def _memory_in_a_fresh_process(model: str, name: str) -> int:
    command = [sys.executable, __file__, "--model", model, "--memory-of", name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _peak_kib() -> int:
    """Of this program's own memory; ru_maxrss would also count the process it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    main()
