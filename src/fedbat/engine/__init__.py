"""Engines run the clients of a round; `sequential` is the specification of all others."""

from collections.abc import Callable
from typing import get_args

import torch

from fedbat.engine.base import Engine
from fedbat.engine.cpu import CpuEngine
from fedbat.engine.cuda import CudaEngine, Precision
from fedbat.engine.sequential import SequentialEngine
from fedbat.engine.workers import usable_cores
from fedbat.errors import ConfigError
from fedbat.experiment import Federation

Maker = Callable[[Federation, str | None, Precision], Engine]


def _sequential(federation: Federation, device: str | None, precision: Precision) -> Engine:
    return SequentialEngine(federation, device or "cpu")


def _cpu(federation: Federation, device: str | None, precision: Precision) -> Engine:
    """On a single core this is the sequential engine, which gives the same results."""
    return CpuEngine(federation) if usable_cores() > 1 else _sequential(federation, device, precision)


def _cuda(federation: Federation, device: str | None, precision: Precision) -> Engine:
    return CudaEngine(federation, device or "cuda", precision)


def _auto(federation: Federation, device: str | None, precision: Precision) -> Engine:
    """The GPU where there is one, else the cores there are, unless a device says where to be sequential."""
    make = _cuda if torch.cuda.is_available() else _cpu if device is None else _sequential
    return make(federation, device, precision)


ENGINES: dict[str, Maker] = {"auto": _auto, "sequential": _sequential, "cpu": _cpu, "cuda": _cuda}


def check_engine(name: str, device: str | None, precision: str) -> None:
    """Refuse what cannot be computed here."""
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; choose from {', '.join(ENGINES)}")
    if precision not in get_args(Precision):
        raise ConfigError(f"--precision is {precision!r}; choose from {', '.join(get_args(Precision))}")
    if (name == "cuda" or (device or "").startswith("cuda")) and not torch.cuda.is_available():
        raise ConfigError("cuda was asked for, but PyTorch finds no NVIDIA GPU here; use --engine auto")
    if name == "cpu" and device not in (None, "cpu"):
        raise ConfigError(f"--device {device} does not go with --engine cpu; use --engine sequential or cuda")
    if precision != "fp32" and not _is_cuda(name):
        raise ConfigError(f"--precision {precision} is for the cuda engine; on the CPU use fp32")


def make_engine(
    federation: Federation, name: str = "auto", device: str | None = None, precision: Precision = "fp32"
) -> Engine:
    """The engine by name; `device` moves the sequential one."""
    check_engine(name, device, precision)
    return ENGINES[name](federation, device, precision)


def _is_cuda(name: str) -> bool:
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())
