"""Which code ran on which machine."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch


def provenance(names: Iterable[str] = ()) -> dict[str, Any]:
    """Versions, revision and machine, for a record; the user's own code is found by the `names` of what was run."""
    return {
        "versions": {
            "fedbat": package_version(),
            "source": source_digest(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "numba": _numba(),
        },
        "own": _own_modules(names),
        "git_revision": _git_revision(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def package_version() -> str:
    """The installed version; "source" for a bare source tree."""
    try:
        return version("fedbat")
    except PackageNotFoundError:
        return "source"


@cache
def source_digest() -> str:
    """A hash of this package's source files: names a version where there is no git, as in a copy on another machine."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(here.rglob("*.py"), key=lambda path: path.relative_to(here).as_posix()):
        digest.update(f"{path.relative_to(here).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _own_modules(names: Iterable[str]) -> dict[str, str]:
    """The hash of the file of each module in the `package.module:name` among these, by module."""
    modules = (name.partition(":")[0] for name in names if ":" in name)
    return {module: digest for module in modules if (digest := own_digest(module))}


def own_digest(module: str) -> str | None:
    """The hash of a module's file as it is now, whether imported or not; None if it has none or cannot be found."""
    try:
        path = getattr(sys.modules.get(module), "__file__", None) or getattr(find_spec(module), "origin", None)
    except (ImportError, ValueError):  # its package is gone, or it was made without a file
        return None
    if path is None or not (source := Path(path)).is_file():
        return None
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def _numba() -> str | None:
    """Numba's version or None; with and without it, FedBAT's steps on CPUs may differ in their last digits."""
    try:
        return version("numba")
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The revision of the source tree this package runs from, with "+" if it has changes; None if installed."""
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
