"""EDEN: "Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning", ICML 2022,
arXiv 2108.08842.

DRIVE with b bits: after the rotation the coordinates z = sqrt(d) R m / ||m|| are nearly standard normal, so each goes
to the nearest of the 2^b Lloyd-Max levels q of that distribution, and m_hat = S R^T q with S = ||m||^2 / <q, R m>, so
that <m_hat, m> = ||m||^2 as in DRIVE. If D_b is the quantizer's own error (0.363, 0.117, 0.0345, 0.0095 for b = 1 to
4), the relative error is 1 / (1 - D_b) - 1. At b = 1 the level itself cancels: that is DRIVE, and DRIVE's parts are
sent.

Rotation, layers and zeros are treated as in fedbat/methods/drive.py. Only whole numbers of bits; the paper also thins
out coordinates for rates in between, and entropy-codes the levels, which saves little at few bits.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Annotated

import torch

from fedbat.binarize import inner
from fedbat.gaussian import gaussian_levels
from fedbat.method import Local, Method
from fedbat.methods.drive import DRIVE, unbiased_scale
from fedbat.parts import Kind, Part
from fedbat.rotation import rotate
from fedbat.seeded_parts import RotatedLevels
from fedbat.seeds import draw_seeds
from fedbat.settings import check_whole
from fedbat.streams import Noise, Tensors


@dataclass(frozen=True)
class EDEN(Method):
    """Levels after a random rotation: m_hat = S R^T q(R m), q the best of `bits` bits for a normal distribution."""

    bits: Annotated[int, "for each weight, 1 to 4"] = 2

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 1, 4, "1 is unbiased DRIVE")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Rotated levels; at one bit, the kinds of DRIVE."""
        return DRIVE.kinds if self.bits == 1 else (Kind(RotatedLevels, self.bits),)

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """S, q(R m) and the seed of R."""
        if self.bits == 1:
            return DRIVE().encode(w, local, memory, noise)
        seeds = draw_seeds(noise, local.update)
        parts: dict[str, Part] = {}
        for name, m in local.update.items():
            x = m.reshape(-1).float()
            rotated = rotate(x, seeds[name])
            levels = gaussian_levels(self.bits, x.device)
            halfway = (levels[1:] + levels[:-1]) / 2
            spread = (inner(x, x).sqrt() / sqrt(max(x.numel(), 1))).float()  # of the coordinates of R m
            codes = torch.bucketize(rotated, halfway * spread, out_int32=True)
            scale = unbiased_scale(x, inner(levels[codes], rotated))
            parts[name] = RotatedLevels.of(codes, scale, seeds[name], self.bits)
        return parts, memory
