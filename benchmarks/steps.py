"""What a training step costs: a plain PyTorch loop, the engine's FedAvg step, and a binarized FedBAT step.

    python benchmarks/steps.py [--model cnn|resnet10] [--steps 200]

All on one thread, channels_last, batch 64, the paper's models; the variants take turns, so that a noisy machine hits
all of them alike. Targets: FedAvg <= 1.05 x plain, binarized FedBAT (phi = 0; noise, pull-back and optimizer
included) <= 1.15 x FedAvg.
"""

import argparse
import statistics
import time

import torch
from torch.nn import functional as F

from fedbat import FedAvg, FedBAT, begin
from fedbat.models import build_model
from fedbat.streams import UniformNoise

SHAPES = {"cnn": (1, 28, 28), "resnet10": (3, 32, 32), "resnet10-narrow": (3, 32, 32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="cnn")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[options.model]
    x = torch.randn(64, *shape).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (64,))
    variants = {}
    for name, method in {"plain loop": None, "fedavg": FedAvg(), "fedbat, binarized": FedBAT(phi=0)}.items():
        model = build_model(options.model, shape, 10, seed=0).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        noise = UniformNoise(0, "noise", 0, 0)
        local = begin(method, model, optimizer, 10**6, noise=noise) if method else None
        variants[name] = (model, optimizer, local)
    seconds = {name: [] for name in variants}
    for _ in range(options.steps + 10):
        for name, (model, optimizer, _) in variants.items():
            start = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times[10:]) for name, times in seconds.items()}
    print(f"{options.model}, batch 64, one thread, median of {options.steps} steps")
    for name, value in median.items():
        print(f"  {name:18} {1e3 * value:8.2f} ms")
    print(f"  fedavg / plain loop        {median['fedavg'] / median['plain loop']:.3f}  (target 1.05)")
    print(f"  fedbat binarized / fedavg  {median['fedbat, binarized'] / median['fedavg']:.3f}  (target 1.15)")


if __name__ == "__main__":
    main()
