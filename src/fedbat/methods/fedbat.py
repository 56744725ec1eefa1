"""FedBAT: "Communication-Efficient Federated Learning via Learnable Binarization", ICML 2024, arXiv 2408.03215.

Clients learn the one-bit update itself: after a warm-up, the model computes with w + S(m, alpha), and both the update
m and one step size alpha per layer are trained through S (Algorithm 1). Equations 6-9 are in fedbat/binarize.py.
`bits` = b > 1 is ours: S takes 2^b levels and sends b bits per weight; all else is the same.

Where the paper and the authors' code (Leopold1423/fedbat-icml24) differ:
- alpha is held within `bounds`, [5e-4, 5e-2] as in the code; the paper has none (`bounds=None`).
- alpha_e is what the optimizer trains, as in the code and Eq. 10; Eq. 14 writes the step on alpha itself.
- `sent="fresh"` sends S(m_tau, alpha_tau) drawn anew, as in the code; `sent="last"` sends the bits and the alpha of
  the last forward pass, as in Algorithm 1 (with phi = 0 and tau = 1 that pass saw S(0) = 0, so nothing is ever sent).
- The code sends float32 weights although the paper counts bits; here (bits, alpha) are packed.
- The server weights clients by samples, as in the paper; the code does by batches (`--weights batches`).
- BatchNorm and biases are trained throughout and travel in float32, as in the code; the paper is silent.
Where we depart from both:
- alpha' is set at the first step s >= floor(phi tau) at which the layer has moved, and until then S = 0; the paper and
  the code would start from alpha' = 0 (phi = 0), from the lower bound, or from a stale value (the code, phi = 1).
- A layer whose final m is 0 sends step size 0, whatever the bounds; the code would send random +-5e-4.
- When training ends inside the warm-up (phi = 1, or a loop shorter than announced), alpha' = mean|m| at the end.
- Noise is drawn once per optimizer step, not per forward pass, so that accumulated micro-batches see one S.
- alpha_e joins its layer's parameter group: with weight decay, which the paper does not use, it decays too.
- With b bits, alpha' = c_b mean|m|, where c_b minimizes ||S - m|| for normal m (at one bit that would be 0.81; the
  paper's 1 stays). `bounds` are those of one bit's alpha and are scaled by c_b too: unscaled, the lower one would
  decide alpha.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedbat.binarize import (
    binarize_backward,
    binarize_forward,
    codes_of,
    inf_norm,
    mean_abs,
    moved,
    step_size,
    stochastic_codes,
)
from fedbat.errors import ConfigError
from fedbat.levels import OddLevels, odd_levels
from fedbat.method import Forward, Local, Method, Step
from fedbat.parts import Kind, Part, Signs
from fedbat.settings import check_choice, check_range, check_whole
from fedbat.streams import Noise, Tensors

StepRule = Literal["learned", "fixed", "inf-norm"]
Sent = Literal["fresh", "last"]
_SHARES = {1: 1.0, 2: 0.53, 3: 0.33, 4: 0.19}  # c_b = alpha' / mean|m|


@dataclass(frozen=True)
class FedBAT(Method):
    """Learns the signs and their step size: min over (m, alpha) of F_k(w + S(m, alpha)), Eq. 5."""

    rho: Annotated[float, "how fast the step size is learned, Eq. 10"] = 6.0
    phi: Annotated[float, "share of the local steps that warm up without binarization"] = 0.5
    step: Annotated[StepRule, "fixed: rho = 0; inf-norm: the theorems' alpha = ||m||_inf, never bounded"] = "learned"
    bounds: Annotated[tuple[float, float] | None, "of alpha, for step = learned and fixed"] = (5e-4, 5e-2)
    sent: Annotated[Sent, "fresh: a new draw of S; last: the last step's"] = "fresh"
    bits: Annotated[int, "for each weight, 1 to 4"] = 1

    noisy_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_range("rho", self.rho, 0, 1e3, "rho=6 is the paper's, rho=0 fixes the step size")
        check_range(
            "phi",
            self.phi,
            0,
            1,
            "it is the warm-up share of the local steps; phi=0 binarizes from the first",
        )
        check_choice("step", self.step, StepRule)
        check_choice("sent", self.sent, Sent)
        check_whole("bits", self.bits, 1, 4, "bits=1 is the paper's")
        if self.bounds is not None and not 0 < self.bounds[0] <= self.bounds[1] < float("inf"):
            raise ConfigError(
                f"bounds={self.bounds}, expected 0 < lower <= upper; use 5e-4,5e-2 as the authors, or off for none"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Signs, or odd levels of `bits` bits."""
        return (Kind(Signs) if self.bits == 1 else Kind(OddLevels, self.bits),)

    @property
    def step_bounds(self) -> tuple[float, float] | None:
        """`bounds`, scaled down by c_b like alpha' itself."""
        if self.bounds is None or self.step == "inf-norm":
            return None
        low, high = self.bounds
        return _SHARES[self.bits] * low, _SHARES[self.bits] * high

    def learnables(self, w: Tensors) -> Tensors:
        """alpha_e = 0 for every layer, if step sizes are learned at all."""
        return {name: x.new_zeros(()) for name, x in w.items()} if self._learns else {}

    def alters_forward(self, step: Step) -> bool:
        """Algorithm 1, line 14: full-precision training while s < floor(phi tau)."""
        return step.index >= floor(self.phi * step.total + 1e-9)  # 0.7 * 90 is 62.99999999999999 in floats

    def prepare(self, w: Tensors, local: Local) -> Tensors:
        """alpha' = c_b ||m||_1 / d for every layer that has moved and has none yet (Eq. 13, where c_1 = 1)."""
        old = local.fixed.get("alpha_prime")
        if self.step == "inf-norm" or (old is not None and all(old.tolist())):
            return local.fixed
        now = _SHARES[self.bits] * torch.stack([mean_abs(m) for m in local.update.values()])
        return {"alpha_prime": now if old is None else torch.where(old > 0, old, now)}

    def forward(self, w: Tensors, local: Local, u: Tensors) -> Forward:
        """w + S(m, alpha), Eq. 6-7."""
        alphas, paces = self.alphas(local)
        weights, kept = {}, {}
        for (name, m), alpha in zip(local.update.items(), alphas.unbind(), strict=True):
            kept[name] = binarize_forward(m, alpha, u[name], self.bits)
            weights[name] = w[name] + kept[name]
        return Forward(weights, kept, {"alpha": alphas, "pace": paces})

    def pull_back(self, w: Tensors, local: Local, u: Tensors, seen: Forward, grad: Tensors) -> tuple[Tensors, Tensors]:
        """Eq. 8 for m, Eq. 9 summed over the layer for alpha, and on to alpha_e by Eq. 10."""
        grads, learned = {}, {}
        alphas, paces = seen.shared["alpha"].unbind(), seen.shared["pace"].unbind()
        for (name, m), alpha, pace in zip(local.update.items(), alphas, paces, strict=True):
            if name not in grad:  # the layer took no part in the forward pass
                continue
            grads[name], alpha_grad = binarize_backward(m, alpha, seen.kept[name], grad[name], self.bits)
            if self._learns:
                learned[name] = pace * alpha_grad
        return grads, learned

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """`bits` bits per weight and alpha: those of the last forward pass (Algorithm 1, line 23), or drawn anew."""
        parts: dict[str, Part] = {}
        if self.sent == "last" and local.last is not None:
            for (name, s), alpha in zip(local.last.kept.items(), local.last.shared["alpha"], strict=True):
                parts[name] = odd_levels(codes_of(s, alpha, self.bits), alpha, self.bits)
            return parts, memory
        alphas, _ = self.alphas(local)
        u = noise(local.update)
        for (name, m), alpha in zip(local.update.items(), alphas, strict=True):
            codes = stochastic_codes(m, alpha, u[name], self.bits)
            parts[name] = odd_levels(codes, alpha * moved(m), self.bits)
        return parts, memory

    # Nothing calls this any more; it goes with the next check on a GPU, whose digests cover this file.
    @classmethod
    def settings_of_record(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under their present names: `sent` was once called `bits`."""
        return {"sent" if value in get_args(Sent) else name: value for name, value in settings.items()}

    @property
    def _learns(self) -> bool:
        return self.step == "learned" and self.rho > 0

    def alphas(self, local: Local) -> tuple[Tensor, Tensor]:
        """alpha and d log alpha / d alpha_e of all layers."""
        if self.step == "inf-norm":
            alphas = torch.stack([inf_norm(m) for m in local.update.values()]) / ((1 << self.bits) - 1)
            return alphas, torch.zeros_like(alphas)
        alpha_prime = local.fixed["alpha_prime"]
        alpha_e = torch.stack(list(local.learned.values())) if self._learns else torch.zeros_like(alpha_prime)
        return step_size(alpha_prime, alpha_e.detach(), self.rho if self._learns else 0.0, self.step_bounds)
