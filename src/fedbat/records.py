"""What a run leaves on disk: summary.json, rounds.jsonl, model.safetensors. Valid after every round.

summary.json        configuration, provenance, and the figures people compare
rounds.jsonl        one line per round, layer errors included
model.safetensors   the global model at the end
average.safetensors the averaged model at the end, if one is kept
checkpoint/         while the run is unfinished: what it needs to go on
"""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_model

from fedbat.downlink import float32_bytes
from fedbat.engine.base import Evaluation
from fedbat.errors import ConfigError, DataError
from fedbat.experiment import Experiment, Federation, variants_of
from fedbat.figures import OTHERS, figures_of
from fedbat.layout import tensors_of
from fedbat.lock import LOCK
from fedbat.provenance import provenance
from fedbat.simulation import Round, State
from fedbat.storage import DRAFT, draft_of, make_folder, write_text
from fedbat.streams import Tensors
from fedbat.training import LayerReport


class RunRecord:
    """The folder of one run; left empty if not a single round was done."""

    def __init__(self, folder: Path, federation: Federation, rounds: list[Round], legs: list[dict[str, Any]]) -> None:
        self.folder, self.federation, self.rounds = folder, federation, rounds
        self.legs = legs  # who computed which rounds

    @classmethod
    def begin(cls, folder: Path, federation: Federation, engine: Mapping[str, str | None] | None = None) -> Self:
        """Begin a record in a new folder."""
        check_free(folder)
        make_folder(folder)
        record = cls(folder, federation, [], [_leg(1, engine, federation.experiment)])
        record._write_summary("running")
        return record

    @classmethod
    def read(cls, folder: Path, federation: Federation) -> Self:
        """Read what a run has written so far."""
        summary = read_summary(folder)
        legs = [{"first_round": 1, **{key: summary.get(key, {}) for key in _LEG}}, *summary["resumed"]]
        return cls(folder, federation, _read_rounds(folder / "rounds.jsonl"), legs)

    def resume(self, num_rounds: int, engine: Mapping[str, str | None] | None = None) -> None:
        """Go on after `num_rounds` rounds; the file may be ahead of the checkpoint, or end in half a line."""
        self._cut(num_rounds)
        first = num_rounds + 1
        before = [leg for leg in self.legs if leg["first_round"] < first]
        self.legs = [*before, _leg(first, engine, self.federation.experiment)]
        self._write_summary("running")

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return len(self.rounds) == self.federation.experiment.num_rounds

    def add(self, round_: Round) -> None:
        """Append a round; what is on disk stays valid if the process dies right after."""
        with (self.folder / "rounds.jsonl").open("a") as file:
            file.write(_line(round_))
        self.rounds.append(round_)
        self._write_summary("running")

    def close(self, status: str, num_rounds: int, state: State) -> None:
        """Write the model after `num_rounds` rounds and the final summary ("finished", "interrupted" or "failed")."""
        self._cut(num_rounds)  # Ctrl-C may have come while a line was written
        for draft in self.folder.glob(f"*{DRAFT}"):  # left behind by a process that was killed
            draft.unlink()
        if not self.rounds:
            for name in ("rounds.jsonl", "summary.json"):
                (self.folder / name).unlink()
            return
        for file, tensors in (("model.safetensors", state.w), ("average.safetensors", state.average)):
            if tensors:
                self._save_model(self.folder / file, tensors)
        self._write_summary(status)

    def _save_model(self, path: Path, tensors: Tensors) -> None:
        model = copy.deepcopy(self.federation.model)
        with torch.no_grad():
            for name, tensor in tensors_of(model, self.federation.layout).items():
                tensor.copy_(tensors[name])
        with draft_of(path) as draft:
            save_model(model, str(draft))

    def _cut(self, num_rounds: int) -> None:
        path = self.folder / "rounds.jsonl"
        if len(self.rounds) < num_rounds:
            raise DataError(
                f"{path} has {len(self.rounds)} whole rounds, expected the {num_rounds} of the checkpoint; "
                "start the run anew in another folder"
            )
        del self.rounds[num_rounds:]
        write_text(path, "".join(map(_line, self.rounds)))

    def _write_summary(self, status: str) -> None:
        start, *resumed = self.legs
        origin = {key: start[key] for key in _LEG} | {"resumed": resumed}
        summary = {"status": status, **origin, **summarize(self.federation, self.rounds)}
        write_text(self.folder / "summary.json", json.dumps(_jsonable(summary), indent=2, allow_nan=False) + "\n")


def check_free(folder: Path) -> None:
    """Refuse a folder that already holds something."""
    if folder.is_file():
        raise ConfigError(f"--out {folder} is a file, expected a new folder; name another")
    unfinished = False
    with suppress(DataError):  # somebody else's files of the same name
        unfinished = is_begun(folder) and not is_finished(folder)
    if unfinished:
        raise ConfigError(
            f"--out {folder} holds an unfinished run; go on with it by `fedbat resume {folder}`, or name a new folder"
        )
    if folder.is_dir() and any(path.suffix != DRAFT and path.name != LOCK for path in folder.iterdir()):
        raise ConfigError(f"--out {folder} already exists and is not empty; name a new folder or remove this one")


def is_begun(folder: Path) -> bool:
    """Whether a run or a comparison was begun in this folder."""
    return any((folder / name).is_file() for name in ("summary.json", "compare.json"))


def is_finished(folder: Path) -> bool:
    """Whether the run or comparison in this folder has done all its rounds."""
    if runs := run_folders(folder, read_plan(folder)):
        return all(is_begun(run) and is_finished(run) for run in runs)
    return bool(read_summary(folder)["status"] == "finished")


def read_summary(folder: Path) -> dict[str, Any]:
    """Read the summary.json of a run's folder."""
    found = _read(folder / "summary.json")
    if "status" not in found or "config" not in found:
        raise _no_run(folder)
    return found


def read_experiment(folder: Path) -> Experiment:
    """The experiment that was recorded in this folder."""
    return experiment_of(read_summary(folder)["config"])


def write_plan(folder: Path, experiments: Sequence[Experiment], engine: Mapping[str, str | None]) -> None:
    """Write compare.json: the runs of a comparison, even those not yet begun, and how they are computed."""
    check_free(folder)
    plan = {"engine": engine, "runs": [dataclasses.asdict(experiment) for experiment in experiments]}
    write_text(folder / "compare.json", json.dumps(_jsonable(plan), indent=2) + "\n")


def read_plan(folder: Path) -> list[Experiment]:
    """The runs of a comparison; none if the folder is not one."""
    return [experiment_of(config) for config in _plan(folder).get("runs", [])]


def read_planned_engine(folder: Path) -> dict[str, Any]:
    """The engine that a comparison was begun with; {} where that was not recorded."""
    return dict(_plan(folder).get("engine", {}))


def _plan(folder: Path) -> dict[str, Any]:
    path = folder / "compare.json"
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        raise _no_run(path.parent) from None
    if not isinstance(found, dict):
        raise _no_run(path.parent)
    return found


def _no_run(folder: Path) -> DataError:
    what = "holds no run" if folder.exists() else "does not exist"
    return DataError(f"{folder} {what}; name a folder made by `fedbat run` or `fedbat compare`")


def run_folders(folder: Path, experiments: Sequence[Experiment]) -> list[Path]:
    """The folders of a comparison's runs, each named after its run's variant and seed."""
    return [folder / file_name(name) for name in _with_seeds([one.variant for one in experiments], experiments)]


def run_names(experiments: Sequence[Experiment]) -> list[str]:
    """What people are shown of a comparison's runs: their variants, with their seeds if there are several."""
    return _with_seeds(variants_of(experiments), experiments)


def _with_seeds(names: Sequence[str], experiments: Sequence[Experiment]) -> list[str]:
    several = len({experiment.seed for experiment in experiments}) > 1
    return [f"{name} seed={one.seed}" if several else name for name, one in zip(names, experiments, strict=True)]


def file_name(text: str) -> str:
    """The text as a name that every file system accepts."""
    return re.sub(r"[^\w.,+-]+", "-", text)


def experiment_of(config: Mapping[str, Any]) -> Experiment:
    """An experiment from its recorded form."""
    try:
        return Experiment(**config).resolved()
    except TypeError as error:
        raise DataError(f"this run was recorded by another version of fedbat ({error}); run it anew") from None


def _read_rounds(path: Path) -> list[Round]:
    """Read all complete lines; a process may have died while writing the last."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        return [_round_of(json.loads(line)) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); start the run anew in another folder") from None


def summarize(federation: Federation, rounds: list[Round]) -> dict[str, Any]:
    """The figures of a run from its rounds; before the first, only what was asked for."""
    asked = {
        "config": dataclasses.asdict(federation.experiment),
        "method_settings": federation.method.settings(),
        "seed": federation.experiment.seed,
        "rounds_done": len(rounds),
    }
    if not rounds:
        return asked
    num_parameters = federation.num_parameters
    num_compressed = sum(entry.numel for entry in federation.layout.compressed)
    figures = figures_of(list(map(_without_layers, rounds)), num_parameters, num_compressed)
    whole = float32_bytes(federation.layout)
    return {
        **asked,
        **figures,
        "uplink_saving": whole / figures["uplink_bytes_per_client_round"],  # against the model in float32
        "total_saving": 2 * whole / figures["total_bytes_per_client_round"],  # against it both ways
        "num_parameters": num_parameters,
        "num_compressed_parameters": num_compressed,
    }


def round_line(round_: Round) -> dict[str, Any]:
    """One line of rounds.jsonl; rounds count from 1 there."""
    return {**_without_layers(round_), "layers": {name: report._asdict() for name, report in round_.layers.items()}}


def _without_layers(round_: Round) -> dict[str, Any]:
    line = {field.name: getattr(round_, field.name) for field in dataclasses.fields(round_) if field.name != "layers"}
    for key in OTHERS:  # only where there is such a model
        found = line.pop(key)
        line |= {key: found._asdict()} if found else {}
    return {"round": line.pop("index") + 1, **line}


def _line(round_: Round) -> str:
    return json.dumps(_jsonable(round_line(round_)), allow_nan=False) + "\n"


def _round_of(line: dict[str, Any]) -> Round:
    """The inverse of `round_line`; null is read as NaN."""
    figures = {key: math.nan if line[key] is None else line[key] for key in ("accuracy", "loss", "train_loss")}
    layers = {name: LayerReport(**report) for name, report in line["layers"].items()}
    lost = {int(client): reason for client, reason in line["lost"].items()}
    others = {key: Evaluation(**line[key]) for key in OTHERS if line.get(key)}
    index = line.pop("round") - 1
    return Round(**(line | figures | others | {"index": index, "lost": lost, "layers": layers}))


_LEG = ("versions", "own", "git_revision", "machine", "engine")


def _leg(first_round: int, engine: Mapping[str, str | None] | None, experiment: Experiment) -> dict[str, Any]:
    """The provenance of the rounds from `first_round` on."""
    names = (experiment.method, experiment.model or "", experiment.dataset, experiment.partition)
    return {"first_round": first_round, **provenance(names), "engine": engine}


def _jsonable(value: Any) -> Any:
    """The value with NaN and infinity, which JSON lacks, as null."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
