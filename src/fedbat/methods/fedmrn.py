"""FedMRN: "Masked Random Noise for Communication-Efficient Federated Learning", ACM MM 2024, arXiv 2408.03220.

The update is a mask over random noise that the server can make itself: m_hat = n M, with uniform n made from a seed
that is sent, and M in {0, 1} (`binary`) or {-1, +1} (`signed`), one bit per weight. Clients train the update m as
usual, but the model computes with w + n M(m / n, U): M is 1 with probability m / n clipped to [0, 1], or (m / n + 1) /
2, so that E[n M] = m where n can reach m. Masks come in gradually ("progressive stochastic masking"): at step s of tau,
an element is masked with probability s / tau, and otherwise clipped to what masks can reach; gradients pass to m
unchanged.

Where we depart from the paper and its code (Leopold1423/fedmrn-mm24):
- s counts from 0, as in FedBAT, so that the first step computes with w.
- n is uniform on 2^16 points between its ends, none nearer to 0 than 1 / 2^16 of the ends; the code lifts |n| to 1e-8.
- Every layer has its own seed of 64 bits, made from the first four numbers of the client's noise, which step 0 does not
  use; the code draws it from 1001 values.
- One uniform number decides whether an element is masked and, if it is, which way.
- The code sends float32 weights; here the mask travels as bits. A layer that has not moved sends noise of width 0.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedbat.binarize import moved
from fedbat.method import Forward, Local, Method, Step
from fedbat.parts import Kind, Part
from fedbat.seeded_parts import MaskedNoise
from fedbat.seeds import seed_of, uniform, words
from fedbat.settings import check_choice, check_range
from fedbat.streams import Noise, Tensors

Mask = Literal["binary", "signed"]
_HALF_WIDTH: dict[Mask, float] = {"binary": 0.01, "signed": 0.005}


@dataclass(frozen=True)
class FedMRN(Method):
    """Learns a one-bit mask over seeded noise: m_hat = n M."""

    mask: Annotated[Mask, "of 0 and 1, or of -1 and +1"] = "binary"
    half_width: Annotated[float | None, "of the noise; off: the paper's 0.01, for signed masks 0.005"] = None

    noisy_forward: ClassVar[bool] = True
    needs_progress: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("mask", self.mask, Mask)
        if self.half_width is not None:
            check_range("half_width", self.half_width, 0, 1e3, "off is the paper's choice", open_low=True)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Masks of the type that `mask` names."""
        return (Kind(MaskedNoise, int(self.mask == "signed")),)

    @property
    def step_bounds(self) -> tuple[float, float] | None:
        """The noise has one fixed half-width."""
        return self._half_width, self._half_width

    def alters_forward(self, step: Step) -> bool:
        """True: the model computes with masks, or with what they can reach, in every step."""
        return True

    def forward(self, w: Tensors, local: Local, u: Tensors) -> Forward:
        """w + n M with probability s / tau, otherwise w + m as far as masks reach."""
        assert local.progress is not None
        if local.last is None:
            seeds = _seeds(u)
            noise = {name: self._noise(seed, m) for (name, m), seed in zip(local.update.items(), seeds, strict=True)}
        else:
            seeds, noise = local.last.shared["seeds"], local.last.kept
        share = local.progress.clamp(max=1)  # a loop may be longer than announced
        weights = {}
        for name, m in local.update.items():
            ratio = m / noise[name]
            masked = self._masked(ratio, u[name] / share.clamp(min=1e-9))  # u < share is uniform on (0, share)
            seen = torch.where(u[name] < share, masked, ratio.clamp(self._lowest, 1))
            weights[name] = w[name] + noise[name] * seen
        return Forward(weights, noise, {"seeds": seeds})

    def pull_back(self, w: Tensors, local: Local, u: Tensors, seen: Forward, grad: Tensors) -> tuple[Tensors, Tensors]:
        """Gradients pass straight through to m."""
        return grad, {}

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """A fresh mask for every element, and the seeds."""
        u = noise(local.update)
        seeds = _seeds(u) if local.last is None else local.last.shared["seeds"]
        parts: dict[str, Part] = {}
        for (name, m), seed in zip(local.update.items(), seeds, strict=True):
            positive = self._masked(m / self._noise(seed, m), u[name]) > 0
            half_width = self._half_width * moved(m)
            parts[name] = MaskedNoise.of(positive, half_width, seed, signed=self.mask == "signed")
        return parts, memory

    def _masked(self, ratio: Tensor, u: Tensor) -> Tensor:
        """M in {0, 1} or {-1, +1}, with mean `ratio` as far as these values reach."""
        if self.mask == "binary":
            return _at_least(ratio, u)
        return 2 * _at_least((ratio + 1) / 2, u) - 1

    def _noise(self, seed: Tensor, like: Tensor) -> Tensor:
        """The noise n of one layer."""
        return uniform(seed, like.numel()).mul_(self._half_width).view(like.shape)

    @property
    def _half_width(self) -> float:
        return _HALF_WIDTH[self.mask] if self.half_width is None else self.half_width

    @property
    def _lowest(self) -> int:
        return 0 if self.mask == "binary" else -1


def _at_least(p: Tensor, u: Tensor) -> Tensor:
    """1 where u <= p, else 0: never where p <= 0 and always where p >= 1, as noise may be 1 on GPUs but never 0."""
    return (p - u).floor().add(1).clamp(0, 1)


def _seeds(u: Tensors) -> Tensor:
    """One seed for each layer."""
    first = torch.cat([x.reshape(-1)[:4] for x in u.values()])[:4]
    return words(seed_of(first), 0, len(u))
