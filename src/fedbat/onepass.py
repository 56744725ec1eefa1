"""FedBAT's binarized steps on a CPU, each way in one pass over memory, where tensor code takes a dozen.

Used where Numba is installed (the extra `fast`). S and the gradients of m are those of FedBAT.forward and pull_back
bit for bit; the gradient of a step size is summed in float64 here and may differ from theirs in its last digits.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

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
    pull_back: Callable[[Flat, Flat, Flat, Flat, np.float32], float]


class OnePass:
    """Stands in for a FedBAT: works from where training stands (`live`, w + m), with no m, u or S in memory."""

    def __init__(self, passes: Passes, method: FedBAT, w: Tensors, live: Tensors, noise: UniformNoise) -> None:
        self.passes, self.method, self.noise = passes, method, noise
        self.live = {name: live[name] for name in w}
        self._flat = {name: (_flat(w[name]), _flat(live[name])) for name in w}

    @classmethod
    def of(cls, method: Method, w: Tensors, live: Tensors, noise: Noise) -> "OnePass | None":
        """One for this method and these tensors, if there is any."""
        if type(method) is not FedBAT or method.bits > 1 or method.step == "inf-norm" or method.sent == "last":
            return None
        if not isinstance(noise, UniformNoise) or not all(_suits(x, live[name]) for name, x in w.items()):
            return None
        return None if (passes := compiled()) is None else cls(passes, method, w, live, noise)

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
        for (name, x), alpha in zip(weights.items(), alphas.numpy(), strict=True):
            self.passes.forward(*self._flat[name], words[name].numpy(), _flat(x), alpha)
        return Forward(weights, {}, {"alpha": alphas, "pace": paces})

    def pull_back(
        self, w: Tensors, local: Local, words: Tensors, seen: Forward, grad: Tensors
    ) -> tuple[Tensors, Tensors]:
        """As FedBAT.pull_back; where the gradients lie as the weights do, in their place."""
        grads: Tensors = {}
        slopes = np.zeros(len(w), np.float32)
        for i, (name, alpha) in enumerate(zip(w, seen.shared["alpha"].numpy(), strict=True)):
            if name in grad:
                grads[name] = _laid_out_as(self.live[name], grad[name])
                slopes[i] = self.passes.pull_back(*self._flat[name], words[name].numpy(), _flat(grads[name]), alpha)
        learned = dict(zip(w, (seen.shared["pace"] * torch.from_numpy(slopes)).unbind(), strict=True))
        return grads, {name: learned[name] for name in grads if name in local.learned}


@cache
def compiled() -> Passes | None:
    """The loops as Numba compiles them; None without it."""
    try:
        import numba
    except ImportError:
        return None

    def forward(w, live, words, weights, alpha):  # type: ignore[no-untyped-def]
        divisor = alpha if alpha != 0 else np.float32(1)
        for i in range(w.size):
            noise = (np.float32(words[i]) + np.float32(0.5)) * np.float32(-(2**-15))  # 1 - 2 u
            weights[i] = w[i] + np.copysign(alpha, noise + (live[i] - w[i]) / divisor)

    def pull_back(w, live, words, grad, alpha):  # type: ignore[no-untyped-def]
        divisor, slope = alpha if alpha != 0 else np.float32(1), 0.0
        for i in range(w.size):
            m = live[i] - w[i]
            noise = (np.float32(words[i]) + np.float32(0.5)) * np.float32(-(2**-15))
            s = np.copysign(alpha, noise + m / divisor)
            given = grad[i]
            passed = given if abs(m) <= alpha else np.float32(0)
            slope += np.float64(given) * np.float64(s) - np.float64(passed) * np.float64(m)
            grad[i] = passed
        return slope

    def compile_(loop: Callable[..., Any], **options: Any) -> Any:
        try:
            return numba.njit(loop, error_model="numpy", nogil=True, cache=True, **options)
        except RuntimeError:  # nowhere to keep what was compiled: every process compiles anew
            return numba.njit(loop, error_model="numpy", nogil=True, **options)

    # reassoc: in whatever order terms are added, so that none waits for another; the terms stay what they are.
    return Passes(compile_(forward), compile_(pull_back, fastmath={"reassoc"}))


def _suits(w: Tensor, live: Tensor) -> bool:
    """Whether both are float32 on the CPU and lie there alike, without gaps."""
    dense = w.is_contiguous() or (w.dim() == 4 and w.is_contiguous(memory_format=torch.channels_last))
    return dense and w.dtype == live.dtype == torch.float32 and w.device.type == "cpu" and _lie_alike(w, live)


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Strides of dimensions of size 1 address nothing."""
    return all(s == t for s, t, size in zip(a.stride(), b.stride(), a.shape, strict=True) if size > 1)


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    return x if _lie_alike(like, x) else torch.empty_like(like).copy_(x)


def _flat(x: Tensor) -> Flat:
    return x.detach().as_strided((x.numel(),), (1,)).numpy()
