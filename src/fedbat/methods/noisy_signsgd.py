"""Noisy-SignSGD: "Distributed Training with Heterogeneous Data: Bridging Median- and Mean-Based Algorithms",
NeurIPS 2020, arXiv 1906.01736.

Gaussian noise before the sign makes its expectation grow with m: E[m_hat] = alpha erf(m / (sigma sqrt 2)). Step size
and noise are as tuned in Appendix A.2 of the FedBAT paper; sigma is a standard deviation. As there, it works on a
round's update, not on each gradient, and the server takes a weighted mean, not a majority vote. A layer that has not
moved at all sends step size 0.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from fedbat.binarize import moved
from fedbat.method import Local, Method
from fedbat.parts import Kind, Part, Signs
from fedbat.settings import check_range
from fedbat.streams import Noise, Tensors


@dataclass(frozen=True)
class NoisySignSGD(Method):
    """Signs after Gaussian noise: m_hat = alpha sign(m + zeta), zeta ~ N(0, sigma^2)."""

    alpha: Annotated[float, "step size"] = 0.01
    sigma: Annotated[float, "the noise's standard deviation"] = 0.01

    kinds = (Kind(Signs),)

    def __post_init__(self) -> None:
        check_range("alpha", self.alpha, 0, 1e3, "the paper tunes it to 0.01", open_low=True)
        check_range("sigma", self.sigma, 0, 1e3, "the paper tunes it to 0.01", open_low=True)

    @property
    def step_bounds(self) -> tuple[float, float] | None:
        """alpha is the only step size it sends."""
        return self.alpha, self.alpha

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """alpha sign(m + zeta)."""
        u = noise(local.update)
        parts: dict[str, Part] = {}
        for name, m in local.update.items():
            # m + zeta > 0 for zeta = sigma Phi^-1(u) exactly when u > Phi(-m / sigma), which is far cheaper to compute.
            positive = u[name] > torch.special.ndtr(m / -self.sigma)
            parts[name] = Signs.of(positive, self.alpha * moved(m))
        return parts, memory
