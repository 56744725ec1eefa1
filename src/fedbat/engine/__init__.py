"""Engines run the clients of a round; `sequential` is the specification of all others."""

from typing import get_args

import torch

from fedbat.engine.base import Engine
from fedbat.engine.cpu import CpuEngine
from fedbat.engine.cuda import CudaEngine, Precision
from fedbat.engine.sequential import SequentialEngine
from fedbat.engine.workers import usable_cores
from fedbat.errors import ConfigError
from fedbat.experiment import Federation

ENGINES = ("auto", "sequential", "cpu", "cuda")


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
    """The engine by name; `auto` takes the GPU where there is one, else the cores there are.

    `device` moves the sequential engine. On a single core `cpu` is the sequential engine, which gives the same results.
    """
    check_engine(name, device, precision)
    if _is_cuda(name):
        return CudaEngine(federation, device or "cuda", precision)
    if (name == "cpu" or (name == "auto" and device is None)) and usable_cores() > 1:
        return CpuEngine(federation)
    return SequentialEngine(federation, device or "cpu")


def _is_cuda(name: str) -> bool:
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())
