"""FedBAT's binarized steps on a CPU, each way in one pass over memory, where tensor code takes a dozen.

Used where Numba is installed (the extra `fast`). S and the gradients of m are those of FedBAT.forward and pull_back
bit for bit, for finite weights and an alpha that is no denormal number; the gradient of a step size is summed in
float64 here and may differ from theirs in its last digits.
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
    """Stands in for a FedBAT: works from where training stands (`live`, w + m), with no m, u or S in memory."""

    def __init__(self, loops: ModuleType, method: FedBAT, w: Tensors, live: Tensors, noise: UniformNoise) -> None:
        self.loops, self.method, self.noise = loops, method, noise
        self.live = {name: live[name] for name in w}

    @classmethod
    def of(cls, method: Method, w: Tensors, live: Tensors, noise: Noise) -> "OnePass | None":
        """One for this method and these tensors, if there is any."""
        if not suits(method) or type(noise) is not UniformNoise or noise.device.type != "cpu":
            return None
        if not all(_in_order(x, live[name]) for name, x in w.items()) or (loops := compiled()) is None:
            return None
        return cls(loops, method, w, live, noise)

    def ready(self, local: Local) -> bool:
        """Whether every layer has its alpha'; FedBAT.prepare finds it, from m."""
        return bool(local.fixed) and all(local.fixed["alpha_prime"].tolist())

    def draw(self) -> Tensors:
        """The noise of one step."""
        return self.noise.words(self.live)

    def forward(self, w: Tensors, local: Local, words: Tensors) -> Forward:
        """As FedBAT.forward."""
        alphas, paces = self.method.alphas(local)
        weights = {name: torch.empty_like(live) for name, live in self.live.items()}
        for (name, live), alpha in zip(self.live.items(), alphas.numpy(), strict=True):
            self.loops.forward(_flat(w[name]), _flat(live), _flat(words[name]), _flat(weights[name]), alpha)
        return Forward(weights, {}, {"alpha": alphas, "pace": paces})

    def pull_back(
        self, w: Tensors, local: Local, words: Tensors, seen: Forward, grad: Tensors
    ) -> tuple[Tensors, Tensors]:
        """As FedBAT.pull_back."""
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
    """Whether the loops are this method's mathematics; a variant of one's own computes for itself."""
    return type(method) is FedBAT and method.bits == 1 and method.step != "inf-norm" and method.sent == "fresh"


@cache
def compiled() -> ModuleType | None:
    """The loops; None without a Numba that works here."""
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
    """Whether both are float32 on the CPU and lie there alike, without gaps."""
    dense = w.is_contiguous() or (w.dim() == 4 and w.is_contiguous(memory_format=torch.channels_last))
    return dense and w.dtype == live.dtype == torch.float32 and w.device.type == "cpu" and _lie_alike(w, live)


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Strides of dimensions of size 1 address nothing."""
    return all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    return x if x.dtype == like.dtype and _lie_alike(like, x) else torch.empty_like(like).copy_(x)


class _Memory:
    """A tensor's memory as NumPy asks for it; Tensor.numpy() would forbid its storage to be resized ever after."""

    def __init__(self, x: Tensor) -> None:
        kind = np.dtype(np.int16 if x.dtype == torch.int16 else np.float32).str
        self.x = x  # lives as long as the array
        self.__array_interface__ = {"shape": (x.numel(),), "typestr": kind, "data": (x.data_ptr(), False), "version": 3}


def _flat(x: Tensor) -> Flat:
    return np.asarray(_Memory(x))
