"""Stoc-SignSGD: "Stochastic Sign Descent Methods: New Algorithms and Better Theory", ICML 2021, arXiv 1905.12938.

Uniform noise as wide as the update's norm makes the sign unbiased up to a factor: E[m_hat] = alpha m / B. It works on a
round's update, without the original's momentum, as in the FedBAT paper. The original B = ||m||_2 leaves both
probabilities near 1/2, so the FedBAT paper takes B = ||m||_inf; both are available. The step size is tuned (Appendix
A.2); with `alpha=None` it is B itself, which makes m_hat unbiased and, with B = ||m||_inf, equal to FedBAT's S at
alpha = ||m||_inf. B is taken per layer, which the papers leave open. A layer that has not moved sends step size 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedbat.binarize import inf_norm, moved, stochastic_sign
from fedbat.method import Local, Method
from fedbat.parts import Kind, Part, Signs
from fedbat.settings import check_choice, check_range
from fedbat.streams import Noise, Tensors

Norm = Literal["inf", "l2"]
_NORMS: dict[Norm, Callable[[Tensor], Tensor]] = {"inf": inf_norm, "l2": torch.linalg.vector_norm}


@dataclass(frozen=True)
class StocSignSGD(Method):
    """Signs after uniform noise: +1 with probability 1/2 + m / (2 B), B = ||m||."""

    alpha: Annotated[float | None, "step size; off: the norm B"] = 0.01
    norm: Annotated[Norm, "B, of a layer: how wide the noise is"] = "inf"

    kinds = (Kind(Signs),)

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, Norm)
        if self.alpha is not None:
            check_range("alpha", self.alpha, 0, 1e3, "the paper tunes it to 0.01; off uses the norm", open_low=True)

    @property
    def step_bounds(self) -> tuple[float, float] | None:
        """alpha is the only step size it sends, unless it sends B."""
        return None if self.alpha is None else (self.alpha, self.alpha)

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """alpha sign(m + zeta), zeta ~ U(-B, B)."""
        u = noise(local.update)
        parts: dict[str, Part] = {}
        for name, m in local.update.items():
            norm = _NORMS[self.norm](m)
            scale = norm if self.alpha is None else self.alpha * moved(m)
            parts[name] = Signs.of(stochastic_sign(m, norm, u[name]), scale)
        return parts, memory
