"""FedBAT's binarized steps on a CPU, forward and backward in one pass over memory each; tensor code takes a dozen.

Used where Numba is installed (the extra `fast`). S and the gradients of m are those of FedBAT.forward and pull_back
bit for bit, for finite weights and an alpha that is not denormal; the gradient of a step size is summed in float64
here and may differ from theirs in its last digits.
"""

import warnings
from functools import cache
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fedbat.method import Forward, Local, Method
from fedbat.methods.fedbat import FedBAT
from fedbat.streams import Noise, Tensors, UniformNoise

Flat = np.ndarray[Any, np.dtype[Any]]


class OnePass:
    """Stands in for a FedBAT: works on the current weights (`live`, w + m), with no m, u or S in memory."""

    def __init__(self, loops: ModuleType, method: FedBAT, w: Tensors, live: Tensors, noise: UniformNoise) -> None:
        self.loops, self.method, self.noise = loops, method, noise
        self.live = {name: live[name] for name in w}

    @classmethod
    def of(cls, method: Method, w: Tensors, live: Tensors, noise: Noise) -> "OnePass | None":
        """A OnePass for this method and these tensors, or None if they do not suit it."""
        if not suits(method) or type(noise) is not UniformNoise or noise.device.type != "cpu":
            return None
        if not all(_in_order(x, live[name]) for name, x in w.items()) or (loops := compiled()) is None:
            return None
        return cls(loops, method, w, live, noise)

    def ready(self, local: Local) -> bool:
        """Whether every layer has its alpha', which FedBAT.prepare computes from m."""
        return bool(local.fixed) and all(local.fixed["alpha_prime"].tolist())

    def draw(self) -> Tensors:
        """The noise of one step."""
        return self.noise.words(self.live)

    def forward(self, w: Tensors, local: Local, words: Tensors) -> Forward:
        """The same as FedBAT.forward."""
        alphas, paces = self.method.alphas(local)
        weights = {name: torch.empty_like(live) for name, live in self.live.items()}
        for (name, live), alpha in zip(self.live.items(), alphas.numpy(), strict=True):
            self.loops.forward(_flat(w[name]), _flat(live), _flat(words[name]), _flat(weights[name]), alpha)
        return Forward(weights, {}, {"alpha": alphas, "pace": paces})

    def pull_back(
        self, w: Tensors, local: Local, words: Tensors, seen: Forward, grad: Tensors
    ) -> tuple[Tensors, Tensors]:
        """The same as FedBAT.pull_back."""
        passed = {name: torch.empty_like(live) for name, live in self.live.items() if name in grad}
        slopes = np.zeros(len(w))
        for i, (name, alpha) in enumerate(zip(w, seen.shared["alpha"].numpy(), strict=True)):
            if name in grad:
                given = _laid_out_as(self.live[name], grad[name])
                where = _flat(w[name]), _flat(self.live[name]), _flat(words[name])
                slopes[i] = self.loops.pull_back(*where, _flat(given), _flat(passed[name]), alpha)
        learned = dict(zip(w, (seen.shared["pace"] * torch.from_numpy(slopes).float()).unbind(), strict=True))
        return passed, {name: learned[name] for name in passed if name in local.learned}


def suits(method: Method) -> TypeGuard[FedBAT]:
    """Whether the loops compute what this method does; a user's own variant computes for itself."""
    return type(method) is FedBAT and method.bits == 1 and method.step != "inf-norm" and method.sent == "fresh"


@cache
def compiled() -> ModuleType | None:
    """The compiled loops; None without a working Numba."""
    try:
        import numba

        if getattr(numba.config, "DISABLE_JIT", False):
            return None
        from fedbat import loops

        return loops
    except ModuleNotFoundError:
        return None
    except Exception as error:
        warnings.warn(f"FedBAT's steps are some 3 % slower: Numba does not work here ({error!r})", stacklevel=2)
        return None


def _in_order(w: Tensor, live: Tensor) -> bool:
    """Whether both are float32 on the CPU, in the same order in memory and without gaps."""
    dense = w.is_contiguous() or (w.dim() == 4 and w.is_contiguous(memory_format=torch.channels_last))
    return dense and w.dtype == live.dtype == torch.float32 and w.device.type == "cpu" and _lie_alike(w, live)


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether the strides agree; those of dimensions of size 1 do not count, as they address nothing."""
    return all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    return x if x.dtype == like.dtype and _lie_alike(like, x) else torch.empty_like(like).copy_(x)


class _Memory:
    """A tensor's memory as NumPy asks for it; after Tensor.numpy(), its storage could never be resized again."""

    def __init__(self, x: Tensor) -> None:
        kind = np.dtype(np.int16 if x.dtype == torch.int16 else np.float32).str
        self.x = x  # kept alive as long as the array
        self.__array_interface__ = {"shape": (x.numel(),), "typestr": kind, "data": (x.data_ptr(), False), "version": 3}


def _flat(x: Tensor) -> Flat:
    return np.asarray(_Memory(x))
