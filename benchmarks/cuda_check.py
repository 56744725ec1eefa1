"""The checks that need a GPU: parity with the sequential engine, independent noise, and the time of whole runs.

    python benchmarks/cuda_check.py --out results/cuda [--only parity,noise,time] [--rounds 20,100] [--dataset fmnist]

Writes one JSON record, with a digest of the engine's code, into the folder given by --out, and fails if a bound is
broken. CI has no GPU: a test compares that digest with the code.
"""

import argparse
import gc
import hashlib
import itertools
import json
import platform
import sys
import time
from pathlib import Path

import torch

from fedbat import METHODS, Payload
from fedbat.engine import cuda, sequential, slot
from fedbat.engine.cuda import CudaEngine
from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.parts import Dense, Levels, Signs, Sparse
from fedbat.simulation import initial_state, rounds

MAX_FLIPPED, MAX_DENSE = 1e-3, 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="parity,noise,time")
    parser.add_argument("--rounds", default="20,100", help="lengths of the timed runs")
    parser.add_argument("--dataset", default="fmnist")
    parser.add_argument("--methods", default="fedavg,fedbat", help="of the timed runs")
    parser.add_argument("--partitions", default="iid,dirichlet")
    parser.add_argument("--precisions", default="fp32,tf32,bf16")
    options = parser.parse_args()
    checks, record = options.only.split(","), {"machine": machine(), "code": code_digest()}
    if "parity" in checks:
        record["parity"] = [parity(options.dataset, name, epochs) for epochs in (1, 10) for name in METHODS]
    if "noise" in checks:
        record["noise"] = noise(options.dataset)
    if "time" in checks:
        record["time"] = []
        cells = (options.rounds, options.precisions, options.partitions, options.methods)
        for num, precision, partition, method in itertools.product(*(cell.split(",") for cell in cells)):
            record["time"].append(timed(options.dataset, method, partition, precision, int(num)))
        record["fedbat_over_fedavg"] = ratios(record["time"])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cuda.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path}")
    sys.exit(any(not check["ok"] for check in [*record.get("parity", []), record.get("noise", {"ok": True})]))


def parity(dataset: str, method: str, epochs: int) -> dict:
    """One client's round, fp32, the same batches and noise in both engines: how far apart are the uploads?"""
    federation = prepare(Experiment(method=method, dataset=dataset, partition="dirichlet", epochs=epochs))
    w, client = initial_state(federation).w, federation.sampled(0)[0]
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
    expected, found = (
        next(iter(engine.train(w, 0, [client], {})))
        for engine in (SequentialEngine(federation, "cuda"), CudaEngine(federation, precision="fp32"))
    )
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = before
    a, b = (Payload.from_bytes(result.upload, federation.layout) for result in (expected, found))
    flipped = total = 0
    apart = [0.0]
    for name, one in a.parts.items():
        other = b.parts[name]
        total += one.numel
        if isinstance(one, Signs):
            flipped += int(((one.unpack() > 0) != (other.unpack() > 0)).sum())
            apart.append(float((one.scale - other.scale).abs()))
        elif isinstance(one, Levels):
            flipped += int((one.codes != other.codes).sum())
            apart.append(float((one.scale - other.scale).abs()))
        elif isinstance(one, Sparse):
            flipped += one.numel - int(((one.unpack() != 0) == (other.unpack() != 0)).sum())
            both = (one.unpack() != 0) & (other.unpack() != 0)
            apart.append(float(((one.unpack() - other.unpack()) * both).abs().max()))
        elif isinstance(one, Dense):
            apart.append(float((one.values - other.values).abs().max()))
    apart += [float((a.rest[name] - b.rest[name]).abs().max()) for name in a.rest]
    share, far = flipped / total, max(apart)
    row = {
        "method": method,
        "steps": federation.num_steps(client),
        "flipped": share,
        "dense": far,
        "loss": abs(expected.train_loss - found.train_loss),
        "same_bytes": expected.upload == found.upload,
        "ok": share <= MAX_FLIPPED and far <= MAX_DENSE,
    }
    print(row, flush=True)
    return row


def noise(dataset: str) -> dict:
    """Bits that are nothing but the noise drawn inside the graphs: no two clients may share more than chance."""
    experiment = Experiment(method="fedbat", settings={"phi": "0", "bits": "last"}, dataset=dataset, epochs=1, lr=1e-9)
    federation = prepare(experiment)
    engine, w, clients = CudaEngine(federation), initial_state(federation).w, federation.sampled(0)
    bits = {
        (round_, result.client): torch.cat(
            [part.unpack() > 0 for part in Payload.from_bytes(result.upload, federation.layout).parts.values()]
        )
        for round_ in range(2)
        for result in engine.train(w, round_, clients, {})
    }
    agree = [float((a == b).float().mean()) - 0.5 for a, b in itertools.combinations(bits.values(), 2)]
    count = len(next(iter(bits.values())))
    worst, bound = max(map(abs, agree)), 5 * 0.5 / count**0.5
    row = {"pairs": len(agree), "bits": count, "worst": worst, "five_sigma": bound, "ok": worst <= bound}
    print("noise", row, flush=True)
    return row


def timed(dataset: str, method: str, partition: str, precision: str, num_rounds: int) -> dict:
    """A whole run: recording of the steps included, loading of the data not."""
    federation = prepare(
        Experiment(method=method, dataset=dataset, partition=partition, rounds=num_rounds, clients=100, per_round=10)
    )
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one per stream ever used, which would count as the next run's peak
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine = CudaEngine(federation, precision=precision)
    found = [round_ for round_, _ in rounds(federation, engine, initial_state(federation))]
    row = {
        "dataset": dataset,
        "method": method,
        "partition": partition,
        "precision": precision,
        "rounds": num_rounds,
        "seconds": time.perf_counter() - start,
        "first_round": found[0].seconds,
        "median_round": sorted(r.seconds for r in found)[num_rounds // 2],
        "graphs": sum(len(slot.graphs) for slot in engine._slots),
        "steps": sum(federation.num_steps(client) for r in found for client in r.clients),
        "peak_MiB": torch.cuda.max_memory_allocated() >> 20,
        "reserved_MiB": torch.cuda.max_memory_reserved() >> 20,
        "best_accuracy": max(r.accuracy for r in found),
    }
    print(row, flush=True)
    return row


def ratios(rows: list[dict]) -> list[dict]:
    """Seconds of FedBAT over FedAvg, cell by cell."""
    seconds = {(r["partition"], r["precision"], r["rounds"], r["method"]): r["seconds"] for r in rows}
    cells = dict.fromkeys(key[:3] for key in seconds)
    return [
        {"partition": cell[0], "precision": cell[1], "rounds": cell[2], "ratio": seconds[*cell, "fedbat"] / base}
        for cell in cells
        if (base := seconds.get((*cell, "fedavg"))) and (*cell, "fedbat") in seconds
    ]


def machine() -> dict:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),  # no local paths
    }


def code_digest() -> dict:
    return {
        Path(module.__file__).name: hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
        for module in (cuda, slot, sequential)
    }


if __name__ == "__main__":
    main()
