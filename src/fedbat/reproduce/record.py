"""Records of finished runs, small enough to commit: summary.json and rounds.jsonl, one folder each.

A record keeps every round of a run; floats are cut to four digits and layers stand in columns, their names in the
summary, so that a ResNet's record takes a third of what its run wrote. Accuracies stay as they are.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedbat.downlink import FULL
from fedbat.errors import ConfigError, DataError
from fedbat.experiment import Experiment
from fedbat.reproduce.cells import configuration, identity, served
from fedbat.reproduce.theory.record import TrialRecord, load_trial_records
from fedbat.storage import DRAFT

_DIGITS = 4
_FIGURES = ("relative_error", "step", "clipped")


@dataclass(frozen=True, eq=False)
class Record:
    """One run as it was written down."""

    folder: Path
    summary: dict[str, Any]
    lines: tuple[dict[str, Any], ...]  # one for each round

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """What was run; what the experiment did not have yet when this was recorded is at its default."""
        try:
            return configuration(Experiment(**self.summary["config"]), self.summary["method_settings"])
        except (TypeError, ConfigError) as error:
            raise DataError(f"{self.folder}: a configuration this version cannot run ({error}); remove it") from None

    @cached_property
    def identity(self) -> str:
        """Of the cell this is the record of."""
        return identity(self.configuration)

    @property
    def best(self) -> float:
        """Accuracy in percent of the best round, which is what the paper reports."""
        return 100 * max(self.accuracy)

    @property
    def last10(self) -> float:
        """Mean accuracy in percent of the last ten rounds."""
        return 100 * sum(self.accuracy[-10:]) / len(self.accuracy[-10:])

    @property
    def accuracy(self) -> list[float]:
        """By round, from 0 to 1."""
        return [line["accuracy"] for line in self.lines]

    @property
    def uplink_bytes(self) -> list[int]:
        """By round, of all clients together."""
        return [line["uplink_bytes"] for line in self.lines]

    @property
    def traffic_bytes(self) -> list[int]:
        """By round, up and down, of all clients together."""
        return [line["uplink_bytes"] + line["downlink_bytes"] for line in self.lines]

    @property
    def total_bytes(self) -> float:
        """Up and down, of a client and a round."""
        return float(self.summary["uplink_bytes_per_client_round"] + self.summary["downlink_bytes_per_client_round"])

    @property
    def total_saving(self) -> float | None:
        """Of that, against the model in float32 both ways; records from before few bits went down had it one way."""
        if "total_saving" in self.summary:
            return float(self.summary["total_saving"])
        if self.summary["config"].get("down", FULL) != FULL:
            return None
        return float(2 * self.summary["downlink_bytes_per_client_round"] / self.total_bytes)

    @property
    def layer_errors(self) -> list[dict[str, float]]:
        """By round and layer, ||sent - m|| / ||m||, mean over clients; a layer that diverged has none."""
        return [_layer_errors(line["layers"], self.summary) for line in self.lines]

    @property
    def seconds(self) -> float:
        """That all rounds took together."""
        return float(self.summary["seconds"])

    @property
    def gpu(self) -> str | None:
        """The card that computed it; None for a CPU, whatever cards the machine had."""
        engine = self.summary.get("engine") or {}
        used = engine.get("name") == "CudaEngine" or str(engine.get("device")).startswith("cuda")
        return self.summary["machine"]["gpu"] if used else None

    def faults(self) -> list[str]:
        """Why this is not a whole record; empty if it is."""
        rounds, wanted = [line["round"] for line in self.lines], self.configuration["rounds"]
        found = []
        if self.summary["status"] != "finished":
            found.append(f"its status is {self.summary['status']!r}, expected 'finished'")
        if rounds != list(range(1, wanted + 1)):
            found.append(f"it has {len(rounds)} rounds, expected 1 to {wanted}")
        elif not math.isclose(self.summary["best_accuracy"], max(self.accuracy)):
            found.append("its summary is not what its rounds say")
        return found


class Records:
    """Whole records, to be asked for by what was run; those of toy problems beside the others."""

    def __init__(self, items: tuple[Record, ...], trials: tuple[TrialRecord, ...] = ()) -> None:
        self.items = items
        self.trials = {record.trial: record for record in trials}
        stand_ins = {key: record for record in items for key in served(record.configuration)}
        self._by_identity = stand_ins | {record.identity: record for record in items}

    @classmethod
    def load(cls, root: Path) -> Self:
        """All whole records below a folder; what is not whole has to be run again."""
        found = (_whole(path.parent) for path in sorted(root.rglob("summary.json")))
        return cls(tuple(record for record in found if record is not None), load_trial_records(root))

    def __iter__(self) -> Iterator[Record]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def get(self, identity: str) -> Record | None:
        """The record of a cell, or one that stands for it."""
        return self._by_identity.get(identity)


def load_record(folder: Path) -> Record:
    """Read a record, or the folder of any run."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        whole, _, _ = (folder / "rounds.jsonl").read_text().rpartition("\n")  # a run may be writing its last line
        lines = [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a record ({error}); expected summary.json and rounds.jsonl") from None
    config = summary.get("config") if isinstance(summary, dict) else None
    if not isinstance(config, dict) or "method" not in config or "method_settings" not in summary:
        raise DataError(f"{folder} holds no record of fedbat; its summary.json has no configuration of a run")
    return Record(folder, summary, tuple(lines))


def _whole(folder: Path) -> Record | None:
    try:
        record = load_record(folder)
        return None if record.faults() or folder.suffix == DRAFT else record
    except DataError:
        return None


def publish(run: Record, folder: Path) -> Record:
    """Write the small form of a whole run; it appears in `folder` at once or not at all."""
    if faults := run.faults():
        raise DataError(f"{run.folder} cannot become a record: {'; '.join(faults)}")
    draft = folder.with_name(folder.name + DRAFT)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    summary = run.summary | {"layers": list(run.lines[0]["layers"])}
    (draft / "summary.json").write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    lines = (json.dumps(_compact(line), separators=(",", ":"), allow_nan=False) for line in run.lines)
    (draft / "rounds.jsonl").write_text("".join(line + "\n" for line in lines))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)
    return load_record(folder)


def _compact(line: dict[str, Any]) -> dict[str, Any]:
    columns = {figure: [_cut(report[figure]) for report in line["layers"].values()] for figure in _FIGURES}
    return _cut_all(_telling(line)) | {"layers": columns}


def _telling(line: dict[str, Any]) -> dict[str, Any]:
    """Without each client's bytes where all have as many, which sums tell, and without times nobody took."""
    said = [key for key in ("uploads", "downloads") if len(set(line.get(key, ()))) == 1]
    unknown = [key for key in ("client_seconds",) if not any(line.get(key, ()))]
    return {key: value for key, value in line.items() if key not in [*said, *unknown]}


def _cut_all(values: dict[str, Any]) -> dict[str, Any]:
    """Accuracies stay as they are."""
    return {name: value if name == "accuracy" else _cut(value) for name, value in values.items()}


def _cut(value: Any) -> Any:
    if isinstance(value, dict):  # of a model tested beside the global one
        return _cut_all(value)
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def _layer_errors(layers: dict[str, Any], summary: dict[str, Any]) -> dict[str, float]:
    """Of layers in columns, as a record has them, or with a report for each, as a run does."""
    if "layers" in summary:
        errors = dict(zip(summary["layers"], layers["relative_error"], strict=True))
    else:
        errors = {name: report["relative_error"] for name, report in layers.items()}
    return {name: error for name, error in errors.items() if error is not None}
