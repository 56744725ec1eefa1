"""Writes the compact form of a run, its record."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from fedbat.errors import DataError
from fedbat.reproduce.record import DIGITS, ROUNDS, Record, hashes, load_record
from fedbat.storage import DRAFT

_FIGURES = ("relative_error", "step", "clipped")


def publish(run: Record, folder: Path) -> Record:
    """Write the compact form of a whole run; it appears in `folder` complete or not at all."""
    if faults := run.faults():
        raise DataError(f"{run.folder} cannot become a record: {'; '.join(faults)}")
    draft = folder.with_name(folder.name + DRAFT)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    lines = (json.dumps(_compact(line), separators=(",", ":"), allow_nan=False) for line in run.lines)
    (draft / ROUNDS).write_text("".join(line + "\n" for line in lines))
    summary = run.summary | {"layers": list(run.lines[0]["layers"])} | hashes(run.summary, draft)
    (draft / "summary.json").write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)
    return load_record(folder)


def _compact(line: dict[str, Any]) -> dict[str, Any]:
    columns = {figure: [_cut(report[figure]) for report in line["layers"].values()] for figure in _FIGURES}
    return _cut_all(_telling(line)) | {"layers": columns}


def _telling(line: dict[str, Any]) -> dict[str, Any]:
    """The line without clients' bytes if all are equal, as sums tell them then, and without times nobody measured."""
    said = [key for key in ("uploads", "downloads") if len(set(line.get(key, ()))) == 1]
    unknown = [key for key in ("client_seconds",) if not any(line.get(key, ()))]
    return {key: value for key, value in line.items() if key not in [*said, *unknown]}


def _cut_all(values: dict[str, Any]) -> dict[str, Any]:
    """Cut floats to fewer digits; accuracies stay as they are."""
    return {name: value if name == "accuracy" else _cut(value) for name, value in values.items()}


def _cut(value: Any) -> Any:
    if isinstance(value, dict):  # of a model tested besides the global one
        return _cut_all(value)
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
