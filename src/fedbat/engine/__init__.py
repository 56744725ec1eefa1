"""Engines run the clients of a round; `sequential` is the specification of all others."""

import logging
from collections.abc import Callable
from typing import NamedTuple, get_args

import torch

from fedbat.engine.base import Engine
from fedbat.engine.cpu import CannotTravelError, CpuEngine
from fedbat.engine.cuda import CudaEngine, Precision
from fedbat.engine.recordable import CannotRecordError, check_recordable
from fedbat.engine.sequential import SequentialEngine
from fedbat.engine.workers import Workers, usable_cores
from fedbat.errors import ConfigError
from fedbat.experiment import Federation

_LOG = logging.getLogger(__name__)


class Asked(NamedTuple):
    """What was asked of an engine."""

    device: str | None
    precision: Precision
    workers: Workers | None  # to be used instead of the engine's own, and closed by whoever gave them


Maker = Callable[[Federation, Asked], Engine]


def _sequential(federation: Federation, asked: Asked) -> Engine:
    return SequentialEngine(federation, asked.device or "cpu", asked.precision == "bf16")


def _cpu(federation: Federation, asked: Asked) -> Engine:
    """The cpu engine; on a single core the sequential engine, which gives the same results."""
    if usable_cores() == 1:
        return _sequential(federation, asked)
    return CpuEngine(federation, asked.workers, asked.precision == "bf16")


def _cuda(federation: Federation, asked: Asked) -> Engine:
    device = torch.device(asked.device or "cuda")
    check_recordable(federation, device)
    return CudaEngine(federation, device, asked.precision)


def _auto(federation: Federation, asked: Asked) -> Engine:
    """The GPU if there is one, else the CPU's cores; --device cpu asks for the sequential engine on the CPU."""
    make = _sequential if asked.device == "cpu" else _cuda if torch.cuda.is_available() else _cpu
    try:
        return make(federation, asked)
    except CannotTravelError as error:
        _LOG.warning("one core is used: %s", error)
        return _sequential(federation, asked)
    except CannotRecordError as error:
        _LOG.warning("the sequential engine is used on the GPU, in fp32: %s", error)
        return _sequential(federation, Asked(asked.device or "cuda", "fp32", None))


ENGINES: dict[str, Maker] = {"auto": _auto, "sequential": _sequential, "cpu": _cpu, "cuda": _cuda}


def check_engine(name: str, device: str | None, precision: str) -> None:
    """Refuse an engine, device or precision that cannot be used here, or not together."""
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}; choose from {', '.join(ENGINES)}")
    if precision not in get_args(Precision):
        raise ConfigError(f"--precision is {precision!r}; choose from {', '.join(get_args(Precision))}")
    if device is not None and device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {device!r}; choose from cpu, cuda")
    if (name == "cuda" or (device or "").startswith("cuda")) and not torch.cuda.is_available():
        raise ConfigError("cuda was asked for, but PyTorch finds no NVIDIA GPU here; use --engine auto")
    if name == "cpu" and device not in (None, "cpu"):
        raise ConfigError(f"--device {device} does not go with --engine cpu; use --engine sequential or cuda")
    if name == "cuda" and device == "cpu":
        raise ConfigError("--device cpu does not go with --engine cuda; use --engine cpu or sequential")
    if precision == "tf32" and not _is_cuda(name, device):
        raise ConfigError("--precision tf32 is for the cuda engine; on the CPU use fp32 or bf16")
    if precision == "bf16" and name == "sequential" and device not in (None, "cpu"):
        raise ConfigError("--precision bf16 on a GPU is for the cuda engine; there the sequential engine is in fp32")


def make_engine(
    federation: Federation,
    name: str = "auto",
    device: str | None = None,
    precision: Precision = "fp32",
    workers: Workers | None = None,
) -> Engine:
    """The engine of this name; `device` moves the sequential one, the cpu engine uses `workers` instead of its own."""
    check_engine(name, device, precision)
    return ENGINES[name](federation, Asked(device, precision, workers))


def _is_cuda(name: str, device: str | None) -> bool:
    return name == "cuda" or (name == "auto" and device != "cpu" and torch.cuda.is_available())
