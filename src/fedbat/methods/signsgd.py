"""SignSGD: "Compressed Optimisation for Non-Convex Problems", ICML 2018, arXiv 1802.04434, on model updates.

As used in the FedBAT paper (Eq. 3, Appendix A.2): one tuned step size for all layers and data sets, and a weighted mean
of signs at the server, not the original's majority vote. Where the paper is silent: sign(0) is a fair coin, so that a
weight that never moves does not drift, and a layer that has not moved at all sends step size 0.
"""

from dataclasses import dataclass
from typing import Annotated

from fedbat.binarize import moved, sign_or_coin
from fedbat.method import Local, Method
from fedbat.parts import Kind, Part, Signs
from fedbat.settings import check_range
from fedbat.streams import Noise, Tensors


@dataclass(frozen=True)
class SignSGD(Method):
    """Signs at one fixed step size: m_hat = alpha sign(m)."""

    alpha: Annotated[float, "step size"] = 0.001

    kinds = (Kind(Signs),)

    def __post_init__(self) -> None:
        check_range("alpha", self.alpha, 0, 1e3, "the paper tunes it to 0.001", open_low=True)

    @property
    def step_bounds(self) -> tuple[float, float] | None:
        """alpha is the only step size it sends."""
        return self.alpha, self.alpha

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """alpha sign(m)."""
        u = noise(local.update)
        parts: dict[str, Part] = {
            name: Signs.of(sign_or_coin(m, u[name]), self.alpha * moved(m)) for name, m in local.update.items()
        }
        return parts, memory
