"""Write results/cuda/README.md and the GPU figures of docs/performance.md from benchmarks/cuda_check.py's records."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER, PERFORMANCE = ROOT / "results" / "cuda", ROOT / "docs" / "performance.md"
_BLOCK = re.compile(r"(<!-- GPU (\w+), written by scripts/cuda_page.py -->\n).*?(<!-- end -->)", re.S)
COLUMNS = {
    "time": ("dataset", "partition", "model", "method", "precision", "rounds", "seconds", "first_round", "median_round",
             "peak_MiB", "best_accuracy"),
    "ratio": ("precision", "fedavg_round", "fedbat_round", "fedbat_over_fedavg", "peak_MiB_of_ten_clients"),
    "parity": ("method", "dataset", "model", "steps", "flipped", "dense", "same_bytes"),
    "server": ("method", "apart"),
    "noise": ("sent", "pairs", "count", "worst", "five_sigma"),
    "free": ("dataset", "rounds", "bf16", "sequential", "apart", "bound"),
    "bf16": ("dataset", "partition", "method", "fp32", "bf16", "difference", "standard_error"),
}  # fmt: skip
TITLES = {
    "time": "Whole runs, each in a fresh process: seconds, recording of the steps included, loading of the data not",
    "ratio": "FedBAT binarizing in every step (phi=0) against FedAvg, in turn: seconds a round, MiB for ten clients",
    "parity": "One client's round in fp32 against the sequential engine on the same card",
    "server": "Two uploads added on the card against the CPU: largest difference over largest value of a tensor",
    "noise": "What different clients draw in recorded steps: share of equal bits, minus one half",
    "free": "Free-running accuracy (mean of the last five rounds), bf16 against the sequential engine in fp32, by seed "
    "(made once, not anew with every change of the code)",
    "bf16": "Best accuracy in bf16 against fp32 on this engine, by seed (made once)",
}


def page() -> str:
    """The records as one page."""
    lines = [
        "# The CUDA engine on a GPU",
        "",
        "Written by `scripts/cuda_page.py` from the records beside it; not to be edited. `benchmarks/cuda_check.py`",
        "makes them, on a machine with a GPU; a test fails when the engine's code has changed since.",
    ]
    for name, title in TITLES.items():
        if (FOLDER / f"{name}.json").exists():
            lines += ["", f"## {title}", "", *_table(name)]
    return "\n".join(lines) + "\n"


def performance() -> str:
    """docs/performance.md with its blocks of GPU figures written anew."""
    return _BLOCK.sub(lambda found: "\n".join([found[1], *_table(found[2]), "", found[3]]), PERFORMANCE.read_text())


def _table(name: str) -> list[str]:
    """A record's machine, command and rows."""
    record, columns = json.loads((FOLDER / f"{name}.json").read_text()), COLUMNS[name]
    machine = record["machine"]
    about = f"{machine['gpu']}, PyTorch {machine['torch']}, cuDNN {machine['cudnn']}, Python {machine['python']}"
    return [
        f"{about}. `python {machine['command']}`",
        "",
        "| " + " | ".join(column.replace("_", " ") for column in columns) + " |",
        "|---" * len(columns) + "|",
        *("| " + " | ".join(_shown(row[column]) for column in columns) + " |" for row in record["rows"]),
    ]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
    PERFORMANCE.write_text(performance())
