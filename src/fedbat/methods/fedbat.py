"""FedBAT: "Communication-Efficient Federated Learning via Learnable Binarization", ICML 2024.

Clients learn the one-bit update itself: after a warm-up, the model computes with w + S(m, alpha), and both the update
m and one step size alpha per layer are trained through S (Algorithm 1). Equations 6-9 are in fedbat/binarize.py.

Where the paper and the authors' code (Leopold1423/fedbat-icml24) differ:
- alpha is held within `bounds`, [5e-4, 5e-2] as in the code; the paper has none (`bounds=None`).
- alpha_e is what the optimizer trains, as in the code and Eq. 10; Eq. 14 writes the step on alpha itself.
- `bits="fresh"` sends S(m_tau, alpha_tau) drawn anew, as the code; `bits="last"` sends the bits and the alpha of
  the last forward pass, as Algorithm 1.
- Both send (bits, alpha) only in word: the code ships float32 weights. Here they are packed.
Where neither says: alpha' is set at the first step s >= floor(phi tau) at which the layer has moved (until then S = 0);
a layer that never moves sends step size 0, whatever the bounds; when training ends inside the warm-up (phi = 1, or a
loop shorter than announced), alpha' = mean|m| at the end and the bits are drawn from it.
"""

from dataclasses import dataclass
from math import floor
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedbat.binarize import binarize_backward, mean_abs, step_size, stochastic_sign
from fedbat.errors import ConfigError
from fedbat.method import Forward, Local, Method, Step
from fedbat.parts import Part, Signs
from fedbat.settings import check_choice, check_range
from fedbat.streams import Noise, Tensors

StepRule = Literal["learned", "fixed", "inf-norm"]
Bits = Literal["fresh", "last"]


@dataclass(frozen=True)
class FedBAT(Method):
    """min over (m, alpha) of F_k(w + S(m, alpha)), Eq. 5."""

    rho: float = 6.0  # pace of the step size, Eq. 10
    phi: float = 0.5  # share of the local steps that warm up without binarization
    step: StepRule = "learned"  # fixed: rho = 0; inf-norm: the theorems' alpha = ||m||_inf, never bounded
    bounds: tuple[float, float] | None = (5e-4, 5e-2)  # of alpha, for step = learned and fixed
    bits: Bits = "fresh"

    noisy_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("rho", self.rho, 0, 1e3, "rho=6 is the paper's, rho=0 fixes the step size")
        check_range("phi", self.phi, 0, 1, "it is the warm-up share of the local steps; phi=0 binarizes from the first")
        check_choice("step", self.step, StepRule)
        check_choice("bits", self.bits, Bits)
        if self.bounds is not None and not 0 < self.bounds[0] <= self.bounds[1] < float("inf"):
            raise ConfigError(
                f"bounds={self.bounds}, expected 0 < lower <= upper; use 5e-4,5e-2 as the authors, or off for none"
            )

    def learnables(self, w: Tensors) -> Tensors:
        """alpha_e = 0 for every layer, if it is learned at all."""
        return {name: torch.zeros((), dtype=x.dtype, device=x.device) for name, x in w.items() if self._learns}

    def alters_forward(self, step: Step) -> bool:
        """Lines 14 and 16 of Algorithm 1: full-precision training for s < floor(phi tau)."""
        return step.index >= floor(self.phi * step.total)

    def prepare(self, w: Tensors, local: Local) -> Tensors:
        """alpha' = ||m||_1 / d for every layer that has moved and has none yet (Eq. 13)."""
        if self.step == "inf-norm":
            return {}
        fixed = dict(local.fixed)
        for name, m in local.update.items():
            if name not in fixed or fixed[name] == 0:
                fixed[name] = mean_abs(m)
        return fixed

    def forward(self, w: Tensors, local: Local, u: Tensors) -> Forward:
        """w + S(m, alpha), Eq. 6-7."""
        weights, kept = {}, {}
        for name, m in local.update.items():
            alpha, _ = self._alpha(name, local)
            kept[name] = torch.where(stochastic_sign(m, alpha, u[name]), alpha, -alpha)
            weights[name] = w[name] + kept[name]
            kept["alpha " + name] = alpha
        return Forward(weights, kept)

    def pull_back(
        self, w: Tensors, local: Local, u: Tensors, seen: Forward, grad: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Eq. 8 for m, Eq. 9 summed over the layer for alpha, and on to alpha_e by Eq. 10."""
        grads, learned = {}, {}
        for name, g in grad.items():
            m = local.update[name]
            alpha, slope = self._alpha(name, local)
            grads[name], alpha_grad_alpha = binarize_backward(m, alpha, seen.kept[name], g)
            if self._learns:  # d alpha / d alpha_e is rho * alpha, or 0 where a bound holds alpha
                learned[name] = torch.where(slope > 0, self.rho * alpha_grad_alpha, 0.0)
        return grads, learned

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """One bit a weight and alpha: line 20 of Algorithm 1, or drawn anew."""
        u = {} if self._sends_last(local) else noise(local.update)
        fixed = self.prepare(w, local)
        parts: dict[str, Part] = {}
        for name, m in local.update.items():
            if self._sends_last(local):
                alpha, positive = local.last["alpha " + name], local.last[name] > 0
            else:
                alpha, _ = self._alpha(name, Local(local.update, local.learned, fixed))
                alpha = alpha * (m != 0).any()
                positive = stochastic_sign(m, alpha, u[name])
            parts[name] = Signs.of(positive, alpha)
        return parts, memory

    @property
    def _learns(self) -> bool:
        return self.step == "learned" and self.rho > 0

    def _sends_last(self, local: Local) -> bool:
        return self.bits == "last" and bool(local.last)

    def _alpha(self, name: str, local: Local) -> tuple[Tensor, Tensor]:
        """alpha and d alpha / d alpha_e."""
        if self.step == "inf-norm":
            alpha = local.update[name].abs().amax()
            return alpha, torch.zeros_like(alpha)
        alpha_prime = local.fixed[name]
        alpha_e = local.learned[name] if self._learns else torch.zeros_like(alpha_prime)
        return step_size(alpha_prime, alpha_e, self.rho if self._learns else 0.0, self.bounds)
