"""The checks that need a GPU: parity with the sequential engine, independent noise, and the time of whole runs.

    python benchmarks/cuda_check.py --out results/cuda [--only parity,server,noise,ratio,time,free,bf16]

Writes one JSON file for each check into the folder given by --out, with a digest of the engine's code, and fails if a
bound is broken. CI has no GPU: a test compares the digests with the code as it is.

    parity  one client's round, fp32: the uploads of all methods against the sequential engine's on the same card
    server  uploads of all methods decoded and added on the card against the same on the CPU
    noise   what different clients draw inside recorded steps is independent
    ratio   seconds and memory of FedBAT (binarizing in every step) against FedAvg, round by round in turn
    time    whole runs, each in a fresh process, compiling and recording included, loading of the data not
    free    accuracy of free-running training in bf16 against the sequential engine in fp32, three seeds
    bf16    best accuracy of whole runs in bf16 against fp32 on this engine, FedAvg and FedBAT, three seeds; not among
            the default ones: what binarizes may bear half precision less well, and that is for the tables to know
"""

import argparse
import ast
import gc
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import fedbat
from fedbat import METHODS, Payload
from fedbat.engine.cuda import CudaEngine
from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.levels import Coded
from fedbat.parts import Dense, Signs, Sparse
from fedbat.seeded_parts import Rotated
from fedbat.server import Aggregator
from fedbat.simulation import initial_state, rounds

MAX_FLIPPED, MAX_DENSE, MAX_ADDED, MAX_RATIO = 1e-3, 1e-4, 1e-6, 1.05
CHECKED = (  # the engine, and the math that its kernels repeat
    *(f"engine/{name}.py" for name in (
        "buffers", "conv_kernels", "convs", "cuda", "fused", "kernels", "launch", "layer_kernels", "norms", "outbox",
        "pairs", "slot", "stems",
    )),
    "binarize.py", "methods/fedbat.py",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="parity,server,noise,ratio,time,free")
    aimed_at = "fmnist:iid,fmnist:dirichlet,cifar10:iid:resnet10-narrow,cifar10:iid:resnet10"
    parser.add_argument("--runs", default=aimed_at, help="of `time`: DATASET:PARTITION[:MODEL],...")
    free = "fmnist:100,cifar10:20:resnet10-narrow"
    parser.add_argument("--free", default=free, help="of `free`: DATASET:ROUNDS[:MODEL],...")
    parser.add_argument(
        "--bf16", default="fmnist:labels-balanced,svhn:dirichlet", help="of `bf16`: DATASET:PARTITION[:MODEL],..."
    )
    parser.add_argument(
        "--at-once", type=int, default=6, help="runs of `free` and `bf16`; those done are kept if it is stopped"
    )
    parser.add_argument("--job", help="one run as JSON, made in this process; used by the checks themselves")
    options = parser.parse_args()
    if options.job:
        print(json.dumps(run(**json.loads(options.job))))
        return
    if options.out is None:
        parser.error("--out is missing; name the folder to write to")
    checks = {
        "parity": parity,
        "server": server,
        "noise": noise,
        "ratio": ratio,
        "time": lambda: timed(options.runs.split(",")),
        "free": lambda: free(options.free.split(","), options.out / "free", options.at_once),
        "bf16": lambda: half(options.bf16.split(","), options.out / "free", options.at_once),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    broken = []
    for name in options.only.split(","):
        rows = checks[name]()
        broken += [name for row in rows if not row.get("ok", True)]
        record = {"machine": machine(), "code": code_digest(), "rows": rows}
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    if broken:
        sys.exit(f"out of bounds: {', '.join(dict.fromkeys(broken))}")


def parity() -> list[dict]:
    """All methods after one epoch and after ten, and some with augmentation where CIFAR-10 is at hand."""
    variants = [*((name, {}) for name in METHODS), ("fedbat", {"bits": "2"})]
    cells = [(*variant, "fmnist", None, epochs) for epochs in (1, 10) for variant in variants]
    cells.append(("fedbat", {}, "fmnist", "cuda_models:dropping", 1))
    try:
        prepare(Experiment(dataset="cifar10"))
        cells += [(method, {}, "cifar10", "resnet10-narrow", 1) for method in ("fedavg", "fedbat", "zerofl")]
    except Exception as error:
        print(f"CIFAR-10 is left out: {error}")
    return [say(compare_uploads(*cell)) for cell in cells]


def compare_uploads(method: str, settings: dict, dataset: str, model: str | None, epochs: int) -> dict:
    """The same batches and noise in both engines: how far apart are the uploads?"""
    federation = prepare(
        Experiment(method=method, settings=settings, dataset=dataset, model=model, partition="dirichlet", epochs=epochs)
    )
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
        elif isinstance(one, Coded):
            flipped += int((one.codes != other.codes).sum())
            apart.append(float((one.scale - other.scale).abs()))
        elif isinstance(one, Rotated):
            flipped += int((one.levels() != other.levels()).sum())
            apart.append(float((one.scale - other.scale).abs()))
        elif isinstance(one, Sparse):
            flipped += one.numel - int(((one.unpack() != 0) == (other.unpack() != 0)).sum())
            both = (one.unpack() != 0) & (other.unpack() != 0)
            apart.append(float(((one.unpack() - other.unpack()) * both).abs().max()))
        elif isinstance(one, Dense):
            apart.append(float((one.values - other.values).abs().max()))
        else:
            flipped += int((~torch.isclose(one.unpack(), other.unpack(), rtol=1e-4)).sum())
    apart += [float((a.rest[name] - b.rest[name]).abs().max()) for name in a.rest]
    share, far = flipped / total, max(apart)
    return {
        "method": " ".join([method, *(f"{name}={value}" for name, value in settings.items())]),
        "dataset": dataset,
        "model": model or "",
        "steps": federation.num_steps(client),
        "flipped": share,
        "dense": far,
        "loss": abs(expected.train_loss - found.train_loss),
        "same_bytes": expected.upload == found.upload,
        "ok": share <= MAX_FLIPPED and far <= MAX_DENSE,
    }


def server() -> list[dict]:
    """Two uploads of each method, added with unequal weights: what the model becomes, on the card and on the CPU."""
    found = []
    for method in METHODS:
        federation = prepare(Experiment(method=method, dataset="fmnist", epochs=1))
        w, clients = initial_state(federation).w, federation.sampled(0)[:2]
        uploads = [result.upload for result in CudaEngine(federation, precision="fp32").train(w, 0, clients, {})]
        models = []
        for device in ("cpu", "cuda"):
            aggregator = Aggregator(federation.method, federation.layout, {k: x.to(device) for k, x in w.items()})
            for weight, upload in enumerate(uploads, start=1):
                aggregator.add(Payload.from_bytes(upload, federation.layout), weight)
            models.append(aggregator.result())
        on_cpu, on_card = models
        apart = max(
            float((on_card[k].cpu() - x).abs().max() / x.abs().max().clamp(min=1e-9)) for k, x in on_cpu.items()
        )
        found.append(say({"method": method, "apart": apart, "ok": apart <= MAX_ADDED}))
    return found


def noise() -> list[dict]:
    """What different clients, and one client in different rounds, draw in recorded steps: no more alike than chance."""
    found = []
    for sent in ("last", "fresh"):  # drawn by tensor code; drawn for the fused kernels
        settings = {"phi": "0", "sent": sent}
        federation = prepare(Experiment(method="fedbat", settings=settings, dataset="fmnist", epochs=1, lr=1e-9))
        engine, w, clients = CudaEngine(federation), initial_state(federation).w, federation.sampled(0)
        drawn = []
        for round_ in range(2):
            uploads = [Payload.from_bytes(r.upload, federation.layout) for r in engine.train(w, round_, clients, {})]
            if sent == "last":  # nothing is learned at this rate, so that the last signs are noise and nothing else
                drawn += [torch.cat([part.unpack() > 0 for part in upload.parts.values()]) for upload in uploads]
            else:
                drawn += [slot.fused.noise.cpu() > 0.5 for slot in engine._slots]
        agree = [float((a == b).float().mean()) - 0.5 for a, b in itertools.combinations(drawn, 2)]
        worst, bound = max(map(abs, agree)), 5 * 0.5 / len(drawn[0]) ** 0.5
        row = {"sent": sent, "pairs": len(agree), "count": len(drawn[0]), "worst": worst, "five_sigma": bound}
        found.append(say(row | {"ok": worst <= bound}))
    return found


def ratio() -> list[dict]:
    """FedAvg and FedBAT take turns, so that what else the machine does hits both."""
    found = []
    for precision in ("bf16", "tf32", "fp32"):
        seconds, peaks = {}, {}
        for _ in range(2):
            for method, settings in (("fedavg", {}), ("fedbat", {"phi": "0"})):
                row = run("fmnist", method, "iid", precision, 20, settings=settings)
                seconds.setdefault(method, []).append(row["median_round"])
                peaks[method] = row["peak_MiB"]
        share = min(seconds["fedbat"]) / min(seconds["fedavg"])
        found.append(
            say(
                {
                    "precision": precision,
                    "fedavg_round": min(seconds["fedavg"]),
                    "fedbat_round": min(seconds["fedbat"]),
                    "fedbat_over_fedavg": share,
                    "peak_MiB_of_ten_clients": peaks,
                    "ok": share <= MAX_RATIO,
                }
            )
        )
    return found


def timed(cells: list[str]) -> list[dict]:
    """FedBAT in bf16 as a user would start it."""
    found = []
    for cell in cells:
        dataset, partition, model = _cell(cell)
        job = dict(dataset=dataset, method="fedbat", partition=partition, precision="bf16", **model)
        with tempfile.TemporaryDirectory() as empty:  # no kernel was compiled before
            found.append(say(finish(start(job, TRITON_CACHE_DIR=empty))))
    return found


def free(cells: list[str], folder: Path, at_once: int) -> list[dict]:
    """Several runs at once, a process each: the sequential engine leaves the card idle most of the time."""
    jobs = [
        dict(
            dataset=name, method="fedbat", partition="iid", precision=precision, num_rounds=int(num), seed=seed, **model
        )
        for name, num, model in map(_cell, cells)
        for seed in range(3)
        for precision in ("sequential", "bf16")
    ]
    rows = made(jobs, folder, at_once)
    found = []
    for cell in cells:
        dataset, num, _ = _cell(cell)
        accuracy = {
            precision: [r["last5_accuracy"] for r in rows if (r["dataset"], r["precision"]) == (dataset, precision)]
            for precision in ("bf16", "sequential")
        }
        apart = abs(statistics.mean(accuracy["bf16"]) - statistics.mean(accuracy["sequential"]))
        spread = max(statistics.stdev(accuracy["bf16"]), statistics.stdev(accuracy["sequential"]))
        bound = 3 * max(spread, 0.002) * (2 / 3) ** 0.5  # of a difference of two means of three
        row = {"dataset": dataset, "rounds": int(num), **accuracy, "apart": apart, "bound": bound, "ok": apart <= bound}
        found.append(say(row))
    return found


def half(cells: list[str], folder: Path, at_once: int) -> list[dict]:
    """Runs in pairs of the same seed, that is of the same batches and noise, on the same engine."""
    groups = [(*_cell(cell), method) for cell in cells for method in ("fedavg", "fedbat")]
    jobs = [
        dict(dataset=dataset, method=method, partition=partition, precision=precision, seed=seed, **model)
        for dataset, partition, model, method in groups
        for precision in ("fp32", "bf16")
        for seed in range(3)
    ]
    rows, found = iter(made(jobs, folder, at_once)), []
    for dataset, partition, _, method in groups:
        full, bf16 = ([next(rows)["best_accuracy"] for _ in range(3)] for _ in range(2))
        differences = [b - a for a, b in zip(full, bf16, strict=True)]
        row = {"dataset": dataset, "partition": partition, "method": method, "fp32": full, "bf16": bf16}
        error = statistics.stdev(differences) / 3**0.5
        found.append(say(row | {"difference": statistics.mean(differences), "standard_error": error}))
    return found


def made(jobs: list[dict], folder: Path, at_once: int) -> list[dict]:
    """These runs, each in a process of its own; one that this code has made before is read."""
    folder.mkdir(exist_ok=True)
    code = hashlib.sha256(json.dumps(code_digest()).encode()).hexdigest()[:8]
    paths = [folder / f"{'-'.join(str(value) for value in job.values())}-{code}.json" for job in jobs]
    missing = [(path, job) for path, job in zip(paths, jobs, strict=True) if not path.exists()]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda item: item[0].write_text(json.dumps(finish(start(item[1])))), missing))
    return [json.loads(path.read_text()) for path in paths]


def _cell(cell: str) -> tuple[str, str, dict[str, str]]:
    """Data set, rounds or partition, and the model where one is named."""
    dataset, what, *model = cell.split(":")
    return dataset, what, {"model": model[0]} if model else {}


def run(
    dataset: str,
    method: str,
    partition: str,
    precision: str,
    num_rounds: int | None = None,
    model: str | None = None,
    seed: int = 0,
    settings: dict[str, str] | None = None,
) -> dict:
    """A whole run in this process; precision "sequential" is the slow engine in fp32."""
    federation = prepare(
        Experiment(
            method=method,
            settings=settings or {},
            dataset=dataset,
            partition=partition,
            rounds=num_rounds,
            model=model,
            seed=seed,
        )
    )
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # one per stream ever used, which would count as this run's peak
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    slow = precision == "sequential"
    engine = SequentialEngine(federation, "cuda") if slow else CudaEngine(federation, precision=precision)
    found = [round_ for round_, _ in rounds(federation, engine, initial_state(federation))]
    accuracies = [r.accuracy for r in found]
    return {
        "dataset": dataset,
        "method": method,
        "partition": partition,
        "model": federation.experiment.model,
        "precision": precision,
        "seed": seed,
        "rounds": len(found),
        "seconds": time.perf_counter() - begin,
        "first_round": found[0].seconds,
        "median_round": statistics.median(r.seconds for r in found),
        "peak_MiB": torch.cuda.max_memory_allocated() >> 20,
        "best_accuracy": max(accuracies),
        "last5_accuracy": statistics.mean(accuracies[-5:]),
    }


def start(job: dict, **environment: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)


def finish(process: subprocess.Popen) -> dict:
    out, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{process.args} failed")
    return json.loads(out.splitlines()[-1])


def say(row: dict) -> dict:
    print(row, flush=True)
    return row


def machine() -> dict:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),  # no local paths
    }


def code_digest() -> dict[str, str]:
    folder = Path(fedbat.__file__).parent
    return {name: digest_of((folder / name).read_text()) for name in CHECKED}


def digest_of(source: str) -> str:
    """Of a module's code; comments, docstrings and line breaks do not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


if __name__ == "__main__":
    main()
