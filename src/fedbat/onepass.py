"""FedBAT's binarized steps on a CPU, each way in one pass over memory, where tensor code takes a dozen.

Used where Numba is installed (the extra `fast`). S and the gradients of m are those of FedBAT.forward and pull_back
bit for bit, for finite weights and an alpha that is no denormal number; the gradient of a step size is summed in
float64 here and may differ from theirs in its last digits.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fedbat.method import Forward, Local, Method
from fedbat.methods.fedbat import FedBAT
from fedbat.streams import Noise, Tensors, UniformNoise

Flat = np.ndarray[Any, np.dtype[Any]]


class Passes(NamedTuple):
    """Compiled loops over one layer, in the order of memory."""

    forward: Callable[[Flat, Flat, Flat, Flat, np.float32], None]
    pull_back: Callable[[Flat, Flat, Flat, Flat, Flat, np.float32], float]


class OnePass:
    """Stands in for a FedBAT: works from where training stands (`live`, w + m), with no m, u or S in memory."""

    def __init__(self, passes: Passes, method: FedBAT, w: Tensors, live: Tensors, noise: UniformNoise) -> None:
        self.passes, self.method, self.noise = passes, method, noise
        self.live = {name: live[name] for name in w}

    @classmethod
    def of(cls, method: Method, w: Tensors, live: Tensors, noise: Noise) -> "OnePass | None":
        """One for this method and these tensors, if there is any."""
        if not suits(method) or type(noise) is not UniformNoise or noise.device.type != "cpu":
            return None
        if not all(_in_order(x, live[name]) for name, x in w.items()) or (passes := compiled()) is None:
            return None
        return cls(passes, method, w, live, noise)

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
            self.passes.forward(_flat(w[name]), _flat(live), _flat(words[name]), _flat(weights[name]), alpha)
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
                slopes[i] = self.passes.pull_back(*where, _flat(given), _flat(passed[name]), alpha)
        learned = dict(zip(w, (seen.shared["pace"] * torch.from_numpy(slopes).float()).unbind(), strict=True))
        return passed, {name: learned[name] for name in passed if name in local.learned}


def suits(method: Method) -> TypeGuard[FedBAT]:
    """Whether the loops are this method's mathematics; a variant of one's own computes for itself."""
    return type(method) is FedBAT and method.bits == 1 and method.step != "inf-norm" and method.sent == "fresh"


@cache
def compiled() -> Passes | None:
    """The loops as Numba compiles them; None without a Numba that works here."""
    try:
        import numba

        return None if getattr(numba.config, "DISABLE_JIT", False) else _compile_and_keep(numba)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        warnings.warn(f"FedBAT's steps are some 3 % slower: Numba does not work here ({error!r})", stacklevel=2)
        return None


def _compile_and_keep(numba: Any) -> Passes:
    try:
        return _compile(numba, cache=True)
    except Exception:  # what was compiled can be neither kept nor read here: it is anew in every process
        return _compile(numba, cache=False)


def _compile(numba: Any, **options: Any) -> Passes:
    f32, i16, options = numba.float32[::1], numba.int16[::1], options | {"error_model": "numpy", "nogil": True}

    @numba.njit(numba.float32(numba.float32, numba.float32, numba.int16, numba.float32), **options)
    def binarized(w, live, word, alpha):  # type: ignore[no-untyped-def]
        """S(m, alpha)."""
        noise = (np.float32(word) + np.float32(0.5)) * np.float32(-(2**-15))  # 1 - 2 u
        return np.copysign(alpha, noise + (live - w) / (alpha if alpha != 0 else np.float32(1)))

    @numba.njit(numba.void(f32, f32, i16, f32, numba.float32), **options)
    def forward(w, live, words, weights, alpha):  # type: ignore[no-untyped-def]
        for i in range(w.size):
            weights[i] = w[i] + binarized(w[i], live[i], words[i], alpha)

    # reassoc: in whatever order terms are added, so that none waits for another; the terms stay what they are.
    @numba.njit(numba.float64(f32, f32, i16, f32, f32, numba.float32), fastmath={"reassoc"}, **options)
    def pull_back(w, live, words, given, passed, alpha):  # type: ignore[no-untyped-def]
        slope = 0.0
        for i in range(w.size):
            m, s = live[i] - w[i], binarized(w[i], live[i], words[i], alpha)
            passed[i] = given[i] if abs(m) <= alpha else np.float32(0)
            slope += np.float64(given[i]) * np.float64(s) - np.float64(passed[i]) * np.float64(m)
        return slope

    return Passes(forward, pull_back)


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
