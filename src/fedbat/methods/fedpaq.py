"""FedPAQ: "A Communication-Efficient Federated Learning Method with Periodic Averaging and Quantization", AISTATS 2020,
arXiv 1909.13014.

The update is rounded at random to 2s + 1 levels (QSGD's quantizer), so that E[m_hat] = m. The paper leaves open what
"b bits" and the norm are. Here b bits hold a sign and b - 1 bits of magnitude, s = 2^(b-1) - 1, and the scale is the
layer's largest magnitude: with the 2-norm of the original (`norm="l2"`), the error at 3 bits is 300 times larger and
the accuracies in the FedBAT paper's Table 5 are out of reach.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedbat.binarize import inf_norm, stochastic_levels
from fedbat.levels import Levels, num_steps
from fedbat.method import Local, Method
from fedbat.parts import Kind, Part
from fedbat.settings import check_choice, check_whole
from fedbat.streams import Noise, Tensors

Norm = Literal["inf", "l2"]
_NORMS: dict[Norm, Callable[[Tensor], Tensor]] = {"inf": inf_norm, "l2": torch.linalg.vector_norm}


@dataclass(frozen=True)
class FedPAQ(Method):
    """Rounds m at random to `bits` bits: m_hat = ||m|| j / s with E[m_hat] = m."""

    bits: Annotated[int, "for each weight, 2 to 8"] = 4
    norm: Annotated[Norm, "of a layer: what its levels are parts of"] = "inf"

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 2, 8, "the paper uses 3 and 4; for one bit choose a sign method")
        check_choice("norm", self.norm, Norm)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Levels of `bits` bits."""
        return (Kind(Levels, self.bits),)

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """Q(m), the randomly rounded levels and their scale."""
        u = noise(local.update)
        parts: dict[str, Part] = {}
        for name, m in local.update.items():
            scale = _NORMS[self.norm](m)
            levels = stochastic_levels(m, scale, num_steps(self.bits), u[name])
            parts[name] = Levels.of(levels, scale, self.bits)
        return parts, memory
