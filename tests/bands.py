"""The small real run behind the accuracy bands, and the command that records them.

    python -m tests.bands [METHOD ...]    five seeds of every method into tests/bands.json and docs/small-run.md

A band is mean +- 5 standard deviations over the recorded seeds: too good is a bug too.
"""

import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import nn

from fedbat.engine.sequential import SequentialEngine
from fedbat.experiment import Experiment, prepare
from fedbat.methods import METHODS
from fedbat.simulation import initial_state, rounds

RECORDS = Path(__file__).parent / "bands.json"
PAGE = Path(__file__).parent.parent / "docs" / "small-run.md"
SEEDS = range(5)
LAST = 5  # the figure is the mean accuracy of the last rounds, in percent
TWO_RUNS = ("bifl", "bifl-full", "zerofl")  # averaged, because one run alone varies too much for a narrow band


def model(shape, num_classes):
    """A fifth of the paper's CNN in time; always the same start, so that seeds differ in all else alone."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, num_classes, bias=False),
    )  # fmt: skip


def measure(method: str, seed: int) -> float:
    """The figure of one seed."""
    seeds = (seed, seed + len(SEEDS)) if method in TWO_RUNS else (seed,)
    return statistics.fmean(run(method, s) for s in seeds)


def run(method: str, seed: int) -> float:
    """Mean accuracy of the last rounds."""
    settings = {
        "partition": "iid", "clients": 30, "per_round": 10, "rounds": 8, "epochs": 8, "model": "tests.bands:model",
    }  # fmt: skip
    federation = prepare(Experiment(method=method, seed=seed, **settings))
    found = [r for r, _ in rounds(federation, SequentialEngine(federation), initial_state(federation))]
    return 100 * statistics.fmean(r.accuracy for r in found[-LAST:])


def table() -> str:
    """The records as docs/small-run.md shows them."""
    rows = ["| method | mean | standard deviation | seeds 0 to 4 |", "|---|---|---|---|"]
    records = json.loads(RECORDS.read_text())
    for method, values in sorted(records.items(), key=lambda item: -statistics.fmean(item[1])):
        seeds = ", ".join(f"{value:.2f}" for value in values)
        rows.append(f"| `{method}` | {statistics.fmean(values):.2f} | {statistics.stdev(values):.2f} | {seeds} |")
    return "\n".join(rows)


def main() -> None:
    methods = sys.argv[1:] or sorted(METHODS)
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    jobs = [(method, seed) for method in methods for seed in SEEDS]
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(measure, *zip(*jobs, strict=True)), strict=True))
    for method in methods:
        records[method] = [round(found[method, seed], 3) for seed in SEEDS]
        values = records[method]
        print(f"{method:14} {statistics.fmean(values):6.2f} +- {statistics.stdev(values):.2f}  {values}")
    RECORDS.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
    head, _, tail = PAGE.read_text().partition("| method |")
    PAGE.write_text(head + table() + "\n\n" + tail.partition("\n\n")[2])


if __name__ == "__main__":
    main()
