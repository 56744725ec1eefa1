"""DRIVE: "One-bit Distributed Mean Estimation", NeurIPS 2021, arXiv 2105.08339.

A seeded random rotation R makes all coordinates of the update alike and nearly Gaussian; their signs travel with one
scale, and the server rotates back: m_hat = S R^T sign(R m). Of the paper's two scales, `unbiased` is
S = ||m||^2 / ||R m||_1, for which <m_hat, m> = ||m||^2 always, so that E[m_hat] = m under a uniform rotation, at a
relative error of pi/2 - 1; `mse` is S = ||R m||_1 / d, which has the least error, 1 - 2/pi, but shrinks m by 2/pi.

Where we depart from the paper and its code:
- One rotation, scale and seed for each layer, not for the whole model.
- Hadamard matrices stand in for a uniform rotation as in the paper's code, but without its padding to a power of two,
  and applied twice (fedbat/rotation.py). Unbiasedness then holds for dense updates, up to terms that fall with d.
- sign(0) = -1, which R^T turns into noise without bias. A layer that has not moved sends scale 0.
- Not in the FedBAT paper's tables; nothing here is tuned.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from fedbat.binarize import inner
from fedbat.method import Local, Method
from fedbat.parts import Kind, Part
from fedbat.rotation import rotate
from fedbat.seeded_parts import RotatedSigns
from fedbat.seeds import draw_seeds
from fedbat.settings import check_choice
from fedbat.streams import Noise, Tensors

Scale = Literal["unbiased", "mse"]


@dataclass(frozen=True)
class DRIVE(Method):
    """Signs after a random rotation: m_hat = S R^T sign(R m)."""

    scale: Annotated[Scale, "of the signs: unbiased on average, or of the least error"] = "unbiased"

    kinds = (Kind(RotatedSigns),)

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, Scale)

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """S, sign(R m) and the seed of R."""
        seeds = draw_seeds(noise, local.update)
        parts: dict[str, Part] = {}
        for name, m in local.update.items():
            x = m.reshape(-1).float()
            rotated = rotate(x, seeds[name])
            l1 = inner(rotated.sign(), rotated)
            scale = unbiased_scale(x, l1) if self.scale == "unbiased" else l1 / max(x.numel(), 1)
            parts[name] = RotatedSigns.of(rotated > 0, scale, seeds[name])
        return parts, memory


def unbiased_scale(x: Tensor, fit: Tensor) -> Tensor:
    """||x||^2 / fit with fit = <levels, R x>: then <x_hat, x> = ||x||^2; 0 for a vector of zeros."""
    return inner(x, x) / (fit + (fit == 0))
