"""Seconds a round of other simulators and of this one, side by side on the same work.

    python benchmarks/peers.py [--dataset fmnist] [--rounds 5] [--repeats 3] [--cores 2] [--device cpu|cuda]
                               [--only loop,flower] [--out peers.json]

The work: the paper's CNN, 100 clients of equal size (IID), 10 a round, batch 64, one local epoch of plain SGD, FedAvg
(and FedBAT here). Nobody evaluates. All start from the same split and initial weights, and the peers find their
clients' images in memory as normalized floats. Every contender runs in processes of its own, bound to `--cores` cores,
as its quickstart runs it; the contenders take turns `--repeats` times. A round's time is the median of all rounds but
each process's first, which is printed apart; starting up is not counted at all.

`make peers` installs the peers (flwr[simulation], pfl) into an environment of their own; a missing one is named.
On a GPU, what runs in one process is compared: the loop and pfl, with PyTorch's default of TF32 in convolutions, and
this engine in fp32.
"""

import argparse
import copy
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbat.data import normalize
from fedbat.engine import make_engine
from fedbat.experiment import Experiment, Federation, prepare
from fedbat.server import Aggregator
from fedbat.simulation import initial_state
from fedbat.wire import Payload


def client_data(federation: Federation, client: int) -> tuple[Tensor, Tensor]:
    """A client's images as the peers get them, and their labels."""
    data, index = federation.data, torch.from_numpy(federation.split[client])
    return normalize(data.x_train[index], data.spec.train_mean, data.spec.train_std), data.y_train[index]


def loop(federation: Federation, device: str, memory_format: torch.memory_format = torch.contiguous_format) -> Iterator:
    """What one writes without any library."""
    experiment = federation.experiment
    model = copy.deepcopy(federation.model).to(device).to(memory_format=memory_format).train()
    held = [tuple(t.to(device) for t in client_data(federation, c)) for c in range(experiment.clients)]
    w = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for round_ in range(experiment.rounds):
        sums = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in w.items()}
        total = 0
        for x, y in (held[client] for client in federation.sampled(round_)):
            model.load_state_dict(w)
            optimizer = torch.optim.SGD(model.parameters(), lr=experiment.lr)
            for index in torch.randperm(len(y), device=device).split(experiment.batch_size):
                optimizer.zero_grad()
                batch = x[index].contiguous(memory_format=memory_format)
                F.cross_entropy(model(batch), y[index]).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                sums[name].add_(tensor, alpha=len(y))
            total += len(y)
        w = {name: (tensor / total).to(w[name].dtype) for name, tensor in sums.items()}
        if device == "cuda":
            torch.cuda.synchronize()
        yield


def loop_channels_last(federation: Federation, device: str) -> Iterator:
    return loop(federation, device, torch.channels_last)


def flower(federation: Federation, device: str) -> Iterator:
    from peers_flower import run

    return run(federation, len(os.sched_getaffinity(0)))


def pfl(federation: Federation, device: str) -> Iterator:
    from peers_pfl import run

    return run(federation, device)


def ours(federation: Federation, device: str) -> Iterator:
    """The engine that --engine cpu or cuda names, and the server's side of a round."""
    state, experiment = initial_state(federation), federation.experiment
    w = state.w
    with closing(make_engine(federation, device)) as engine:
        for round_ in range(experiment.rounds):
            server = Aggregator(federation.method, federation.layout, w)
            for result in engine.train(w, round_, federation.sampled(round_), state.memories):
                server.add(Payload.from_bytes(result.upload, federation.layout), result.num_samples)
            w = server.result()
            yield


CONTENDERS: dict[str, tuple[str, Callable[[Federation, str], Iterator], str, str | None]] = {
    # name: what it is, how it runs, method, package
    "loop": ("plain PyTorch loop", loop, "fedavg", None),
    "loop-cl": ("the same, channels_last", loop_channels_last, "fedavg", None),
    "flower": ("Flower simulation", flower, "fedavg", "flwr"),
    "pfl": ("pfl-research", pfl, "fedavg", "pfl"),
    "fedavg": ("fedbat, FedAvg", ours, "fedavg", None),
    "fedbat": ("fedbat, FedBAT", ours, "fedbat", None),
}
OURS = ("fedavg", "fedbat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fmnist")
    parser.add_argument("--rounds", type=int, default=5, help="after the first")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--out", type=Path, help="also write all times as JSON")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(times_of(options.contender, options)))
        return
    names = [name for name in options.only.split(",") if is_there(name, options.device)]
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for repeat in range(options.repeats):
        for name in names:
            found[name].append(times_in_a_process(name, options))
            print(
                f"  {repeat + 1}/{options.repeats} {name:8} {' '.join(f'{t:.3f}' for t in found[name][-1])}", flush=True
            )
    report(found, options)
    if options.out:
        options.out.write_text(json.dumps({"torch": torch.__version__, "seconds": found}, indent=1) + "\n")


def is_there(name: str, device: str) -> bool:
    what, _, _, package = CONTENDERS[name]
    if device == "cuda" and name == "flower":
        print(f"{what}: left out on the GPU, its clients are processes of their own")
        return False
    if package and importlib.util.find_spec(package) is None:
        print(f"{what}: left out, {package} is not installed here; `make peers` brings it")
        return False
    return True


def times_of(name: str, options: argparse.Namespace) -> list[float]:
    """Seconds of each round, in this process."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    _, run, method, _ = CONTENDERS[name]
    experiment = Experiment(method=method, dataset=options.dataset, rounds=options.rounds + 1, epochs=1)
    seconds, rounds = [], run(prepare(experiment), options.device)
    for _ in range(experiment.rounds):
        start = time.perf_counter()
        took = next(rounds)  # a contender that keeps its own time says how long it took
        seconds.append(time.perf_counter() - start if took is None else took)
    rounds.close()
    return seconds


def times_in_a_process(name: str, options: argparse.Namespace) -> list[float]:
    command = [sys.executable, __file__, "--contender", name, "--dataset", options.dataset, "--device", options.device]
    command += ["--rounds", str(options.rounds), "--cores", str(options.cores)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
    environment.pop("OMP_NUM_THREADS", None)  # each decides for itself
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(found: dict[str, list[list[float]]], options: argparse.Namespace) -> None:
    median = {name: statistics.median(t for run in runs for t in run[1:]) for name, runs in found.items()}
    cores = f"{options.cores} cores" if options.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"\n{options.dataset}, CNN, 10 of 100 clients a round, one epoch, batch 64; {cores}, torch {torch.__version__}"
    )
    print(f"{'':26} {'first':>7} {'s/round':>8} {'least':>7}" + "".join(f"{'/ ' + name:>10}" for name in OURS))
    for name, runs in found.items():
        first, least = statistics.median(run[0] for run in runs), min(t for run in runs for t in run[1:])
        ratios = "".join(f"{median[name] / median[one]:10.2f}" for one in OURS if one in median)
        print(f"{CONTENDERS[name][0]:26} {first:7.2f} {median[name]:8.3f} {least:7.3f}{ratios}")


if __name__ == "__main__":
    main()
