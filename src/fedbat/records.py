"""What a run leaves on disk: summary.json, rounds.jsonl, model.safetensors. Valid after every round.

summary.json        configuration, provenance, and the figures people compare
rounds.jsonl        one line per round, layer errors included
model.safetensors   the global model at the end
"""

import copy
import dataclasses
import json
import math
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model

from fedbat.errors import ConfigError
from fedbat.experiment import Federation
from fedbat.layout import tensors_of
from fedbat.simulation import Round, State


class RunRecord:
    """The folder of one run; removed again if not even one round was done."""

    def __init__(self, folder: Path, federation: Federation, engine: dict[str, str] | None = None) -> None:
        check_free(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {folder} cannot be created ({error.strerror}); name another folder") from None
        self.folder, self.federation = folder, federation
        self.rounds: list[Round] = []
        self._provenance = provenance() | {"engine": engine}

    def add(self, round_: Round) -> None:
        """Append a round; what is on disk stays valid if the process dies right after."""
        self.rounds.append(round_)
        line = json.dumps(_jsonable(round_line(round_)), allow_nan=False)
        with (self.folder / "rounds.jsonl").open("a") as file:
            file.write(line + "\n")
        self._write_summary("running")

    def close(self, status: str, state: State) -> None:
        """Write the final summary ("finished", "interrupted" or "failed") and the model."""
        if not self.rounds:
            self.folder.rmdir()
            return
        model = copy.deepcopy(self.federation.model)
        with torch.no_grad():
            for name, tensor in tensors_of(model, self.federation.layout).items():
                tensor.copy_(state.w[name])
        save_model(model, str(self.folder / "model.safetensors"))
        self._write_summary(status)

    def _write_summary(self, status: str) -> None:
        summary = {"status": status, **self._provenance, **summarize(self.federation, self.rounds)}
        draft = self.folder / "summary.json.draft"
        draft.write_text(json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n")
        os.replace(draft, self.folder / "summary.json")


def check_free(folder: Path) -> None:
    """Refuse a folder that already holds something."""
    if folder.is_file():
        raise ConfigError(f"--out {folder} is a file, expected a new folder; name another")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder} already exists and is not empty; name a new folder or remove this one")


def summarize(federation: Federation, rounds: list[Round]) -> dict[str, Any]:
    """The figures of a run from its rounds."""
    accuracies = [round_.accuracy for round_ in rounds]
    client_rounds = sum(len(round_.clients) for round_ in rounds)
    uploads = sum(round_.num_uploads for round_ in rounds)
    uplink = sum(round_.uplink_bytes for round_ in rounds) / uploads
    num_parameters = sum(p.numel() for p in federation.model.parameters())
    num_compressed = sum(entry.numel for entry in federation.layout.compressed)
    nbits = sum(round_.uplink_nbits for round_ in rounds) / uploads
    return {
        "config": dataclasses.asdict(federation.experiment),
        "method_settings": federation.method.settings(),
        "seed": federation.experiment.seed,
        "rounds_done": len(rounds),
        "best_accuracy": max(accuracies),
        "final_accuracy": accuracies[-1],
        "last10_accuracy": sum(accuracies[-10:]) / len(accuracies[-10:]),
        "uplink_bytes_per_client_round": uplink,
        "downlink_bytes_per_client_round": sum(r.downlink_bytes for r in rounds) / client_rounds,
        "bits_per_parameter": 8 * uplink / num_parameters,
        "bits_per_compressed_parameter": nbits / num_compressed if num_compressed else None,
        "num_parameters": num_parameters,
        "num_compressed_parameters": num_compressed,
        "seconds": sum(round_.seconds for round_ in rounds),
    }


def round_line(round_: Round) -> dict[str, Any]:
    """One line of rounds.jsonl; rounds count from 1 there."""
    line = {field.name: getattr(round_, field.name) for field in dataclasses.fields(round_)}
    layers = {name: report._asdict() for name, report in round_.layers.items()}
    return {"round": line.pop("index") + 1, **line, "layers": layers}


def provenance() -> dict[str, Any]:
    """Which code ran on which machine."""
    return {
        "versions": {
            "fedbat": package_version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "git_revision": _git_revision(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def package_version() -> str:
    """The installed version, or that of a bare source tree."""
    try:
        return version("fedbat")
    except PackageNotFoundError:
        return "source"


def _git_revision() -> str | None:
    """Of the source tree this package runs from, with "+" when it has changes; None when installed."""
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        tracked = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10
        )
        if tracked.returncode:
            return None
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _jsonable(value: Any) -> Any:
    """NaN and infinity, which JSON has no word for, as null."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
