"""Records of finished runs, small enough to commit: summary.json and rounds.jsonl, one folder each.

A record keeps every round of a run; floats are cut to four digits and layers are stored in columns, with their names in
the summary, so that a ResNet's record takes a third of what its run wrote. Accuracies stay as they are.

A record counts if it is whole, its summary agrees with its rounds and with the hashes of its configuration and rounds,
and it lies where its configuration belongs.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from fedbat.errors import ConfigError, DataError
from fedbat.experiment import Experiment
from fedbat.figures import figures_of, late
from fedbat.reproduce.cells import Cell, configuration, identity, served
from fedbat.reproduce.shape import check_line, check_summary
from fedbat.reproduce.theory.record import TrialRecord, load_trial_records
from fedbat.settings import show
from fedbat.storage import DRAFT

DIGITS = 4  # of floats
_CUT = 10.0 ** (1 - DIGITS)  # the most by which a sum of cut figures is off
_ROUNDING = 1e-9
ROUNDS = "rounds.jsonl"


@dataclass(frozen=True, eq=False)
class Record:
    """One run as it was written down."""

    folder: Path
    summary: dict[str, Any]
    lines: tuple[dict[str, Any], ...]  # one for each round

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """What was run; fields that experiments did not have yet when this was recorded are at their defaults."""
        with self._runnable():
            return configuration(Experiment(**self.summary["config"]), self.summary["method_settings"])

    @contextmanager
    def _runnable(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError, AttributeError, ConfigError) as error:
            raise DataError(f"{self.folder}: a configuration this version cannot run ({error}); remove it") from None

    @cached_property
    def identity(self) -> str:
        """The identity of the cell that this is the record of."""
        return identity(self.configuration)

    @property
    def place(self) -> Path:
        """The folder where it belongs below the results."""
        settings = self.configuration["settings"].items()
        texts = {name: show(tuple(value) if isinstance(value, list) else value) for name, value in settings}
        with self._runnable():
            return Cell(Experiment(**self.configuration | {"settings": texts})).folder

    @property
    def best(self) -> float:
        """The best round's accuracy in percent, which is what the paper reports."""
        return 100 * max(self.accuracy)

    @property
    def last10(self) -> float:
        """The mean accuracy of the last ten rounds, in percent; of fewer than twenty rounds the last one's."""
        return 100 * fmean(self.accuracy[late(len(self.lines))[1]])

    def last10_of(self, model: str) -> float | None:
        """The same of another model, "received" or "averaged", if it was tested."""
        found = [line[model]["accuracy"] for line in self.lines if line.get(model)]
        return 100 * fmean(found[late(len(self.lines))[1]]) if found else None

    @property
    def accuracy(self) -> list[float]:
        """Accuracy by round, from 0 to 1."""
        return [line["accuracy"] for line in self.lines]

    @property
    def uplink_bytes(self) -> list[int]:
        """Bytes sent up by round, of all clients together."""
        return [line["uplink_bytes"] for line in self.lines]

    @property
    def traffic_bytes(self) -> list[int]:
        """Bytes sent up and down by round, of all clients together."""
        return [line["uplink_bytes"] + line["downlink_bytes"] for line in self.lines]

    @property
    def total_bytes(self) -> float:
        """Bytes sent up and down per client and round."""
        return float(self.summary["uplink_bytes_per_client_round"] + self.summary["downlink_bytes_per_client_round"])

    @property
    def total_saving(self) -> float:
        """How many times less `total_bytes` is than the float32 model both ways."""
        return float(self.summary["total_saving"])

    @property
    def layer_errors(self) -> list[dict[str, float]]:
        """||sent - m|| / ||m|| by round and layer, averaged over clients; a layer that diverged has none."""
        return [_layer_errors(line["layers"], self.summary) for line in self.lines]

    @property
    def seconds(self) -> float:
        """The seconds that all rounds took together."""
        return float(self.summary["seconds"])

    @property
    def gpu(self) -> str | None:
        """The card that computed it; None for a CPU, whatever cards the machine had."""
        engine = self.summary.get("engine") or {}
        used = engine.get("name") == "CudaEngine" or str(engine.get("device")).startswith("cuda")
        return self.summary["machine"].get("gpu") if used else None

    def faults(self) -> list[str]:
        """Why this is not a whole record; empty if it is."""
        rounds, wanted = [line["round"] for line in self.lines], self.configuration["rounds"]
        found = []
        if self.summary["status"] != "finished":
            found.append(f"its status is {self.summary['status']!r}, expected 'finished'")
        if rounds != list(range(1, wanted + 1)):
            found.append(f"it has {len(rounds)} rounds, expected 1 to {wanted}")
        return found or self._contradictions()

    def _contradictions(self) -> list[str]:
        """Where its summary disagrees with its rounds."""
        summary = self.summary
        try:
            told = figures_of(self.lines, summary["num_parameters"], summary["num_compressed_parameters"])
        except (KeyError, TypeError, ArithmeticError) as error:
            return [f"its rounds cannot be summed up ({error!r})"]
        told |= {"seed": self.configuration["seed"], "rounds_done": len(self.lines)}
        return [
            f"its {name} is {summary.get(name)}, expected {value} by its rounds"
            for name, value in told.items()
            if not _agree(summary.get(name), value, _CUT if name == "seconds" else _ROUNDING)
        ]


class Records:
    """Whole records, looked up by what was run; those of toy problems next to the others."""

    def __init__(
        self,
        items: tuple[Record, ...],
        trials: tuple[TrialRecord, ...] = (),
        faults: Mapping[Path, str] | None = None,
    ) -> None:
        # Of two runs of one training, which differ as a GPU rounds, the later one stands for it in all tables alike:
        # the one that kept an averaged model, as it serves more cells.
        self.items = tuple(sorted(items, key=lambda record: len(served(record.configuration))))
        self.trials = {record.trial: record for record in trials}
        self.faults = faults or {}  # why a folder below the results does not count
        self._by_identity = {key: record for record in self.items for key in served(record.configuration)}

    @classmethod
    def load(cls, root: Path) -> Self:
        """All records below a folder that count; whatever does not has to be run again."""
        found, faults = [], {}
        for folder in (path.parent for path in sorted(root.rglob("summary.json"))):
            try:
                if folder.suffix != DRAFT:
                    found.append(_load_valid(folder))
            except (DataError, OSError) as error:  # another process may be publishing it right now
                faults[folder.relative_to(root)] = str(error)
        return cls(tuple(found), load_trial_records(root), faults)

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
        whole, _, _ = (folder / ROUNDS).read_text().rpartition("\n")  # a run may be writing its last line
        lines = [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a record ({error}); expected summary.json and {ROUNDS}") from None
    config = summary.get("config") if isinstance(summary, dict) else None
    if not isinstance(config, dict) or "method" not in config or "method_settings" not in summary:
        raise DataError(f"{folder} holds no record of fedbat; its summary.json has no configuration of a run")
    check_summary(summary, str(folder / "summary.json"))
    lines = lines[: summary["rounds_done"]]  # a run may have died between its last line and its summary
    num_layers = len(summary["layers"]) if "layers" in summary else None
    for number, line in enumerate(lines, start=1):
        check_line(line, num_layers, f"{folder / ROUNDS}, line {number}")
    return Record(folder, summary, tuple(lines))


def _load_valid(folder: Path) -> Record:
    """A record that counts; DataError says why another does not."""
    record = load_record(folder)
    faults, place = record.faults(), record.place
    if folder.absolute().parts[-len(place.parts) :] != place.parts:
        faults.append(f"its configuration is that of {place}")
    if any(record.summary.get(name) != value for name, value in hashes(record.summary, folder).items()):
        faults.append("its configuration or its rounds are not those that were published")
    if faults:
        raise DataError(f"{folder} does not count as a record: {'; '.join(faults)}; restore it or run it again")
    return record


def hashes(summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Hashes of what was run as written down, unaffected by later versions' defaults, and of its rounds."""
    return {
        "identity": identity({**summary["config"], "settings": summary["method_settings"]}),
        "rounds_sha256": hashlib.sha256((folder / ROUNDS).read_bytes()).hexdigest(),
    }


def _layer_errors(layers: dict[str, Any], summary: dict[str, Any]) -> dict[str, float]:
    """Errors by layer, from columns of layers as in a record, or from a report for each layer as in a run."""
    if "layers" in summary:
        errors = dict(zip(summary["layers"], layers["relative_error"], strict=True))
    else:
        errors = {name: report["relative_error"] for name, report in layers.items()}
    return {name: error for name, error in errors.items() if error is not None}


def _agree(said: Any, told: float | None, tolerance: float) -> bool:
    if isinstance(said, int | float) and told is not None:
        return math.isclose(said, told, rel_tol=tolerance)
    return said is told is None
