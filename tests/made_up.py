"""Made up: experiment files that run in seconds, and whole records of rows of any."""

import dataclasses
from pathlib import Path

from fedbat.methods import make_method
from fedbat.reproduce import Record, load_book

WHOLE = 32_000.0  # bytes of a model in float32
EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def small_book(folder, files):
    """A book of these files, text by path, and the protocols of the real one."""
    protocols = (EXPERIMENTS / "protocols.toml").read_text()
    for path, text in ({"protocols.toml": protocols, "notes.toml": ""} | files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return load_book(folder)


def quiet(text):
    """For sweeps that nobody listens to."""


def made_up(row, accuracy, seed=0, up=1000.0, down=3000.0):
    """A whole record of a row, flat at `accuracy` percent, its averaged model a point above, what clients get below."""
    experiment = row.cell(seed).experiment
    evaluations = {"received": accuracy - 1, "averaged": accuracy + 1}
    lines = [
        {"round": i + 1, "accuracy": accuracy / 100, "layers": {}, "loss": 1.0, "clients": [0], "uplink_bytes": up}
        | {name: {"accuracy": value / 100} for name, value in evaluations.items()}
        for i in range(experiment.rounds)
    ]
    summary = {
        "status": "finished",
        "config": dataclasses.asdict(experiment),
        "method_settings": make_method(experiment.method, experiment.settings).settings(),
        "best_accuracy": accuracy / 100,
        "bits_per_parameter": 1.0,
        "bits_per_compressed_parameter": 1.0,
        "uplink_bytes_per_client_round": up,
        "total_saving": 2 * WHOLE / (up + down),
        "downlink_bytes_per_client_round": down,
        "seconds": 1.0,
        "engine": {},
        "own": {},
        "resumed": [],
        "machine": {"gpu": None},
    }
    for name, value in evaluations.items():
        summary |= {f"{name}_best_accuracy": value / 100, f"{name}_last10_accuracy": value / 100}
    return Record(Path(f"{row.identity}-{seed}"), summary, tuple(lines))


def without_average(record):
    """The same of a run that kept no averaged model."""
    summary = {name: value for name, value in record.summary.items() if not name.startswith("averaged")}
    lines = ({name: value for name, value in line.items() if name != "averaged"} for line in record.lines)
    return Record(record.folder, summary, tuple(lines))
