"""BiFL: "Communication-Efficient Federated Learning with Binary Neural Networks", JSAC 2021, arXiv 2110.02226.

Clients train a binary network: the forward pass sees a sign(v) of the real weights v = w + m clipped to [-1, 1], and
the gradient goes straight through to them where |w + m| <= 1. `bifl` sends the signs of the weights (not of the
update) and the server averages them (the paper's scheme Bi-UpOnly); `bifl-full` sends v itself.

Decisions where the papers are silent: weights are binarized, activations are not; all compressed layers are binarized,
first and last included; the magnitude a is mean|v| per layer (XNOR-Net), because the classifier has no BatchNorm to
absorb it; the magnitude travels with the signs; sign(0) = +1; w + m is clipped where it is used, not between steps; the
test pass uses the binary weights. No maximum-likelihood reconstruction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedbat.binarize import mean_abs, straight_through
from fedbat.method import Forward, Local, Method, Step
from fedbat.parts import Dense, Kind, Part, Signs
from fedbat.streams import Noise, Tensors


def binary(v: Tensor) -> Tensor:
    """mean|v| sign(v), sign(0) = +1."""
    scale = mean_abs(v)
    return torch.where(v >= 0, scale, -scale)


@dataclass(frozen=True)
class BiFLFull(Method):
    """Trains binary networks and sends their real-valued weights."""

    @property
    def sends_weights(self) -> bool:
        """True: it sends weights, not updates."""
        return True

    def alters_forward(self, step: Step) -> bool:
        """True: the network is binary in every step."""
        return True

    def forward(self, w: Tensors, local: Local, u: Tensors) -> Forward:
        """a sign(v), with the gradient of v inside [-1, 1]."""
        latent = self._latent(w, local)
        return Forward({name: straight_through(binary(v.detach()), v) for name, v in latent.items()})

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """The real weights."""
        return {name: Dense(v.reshape(-1).float()) for name, v in self._latent(w, local).items()}, memory

    def aggregate(self, w: Tensors, mean: Tensors) -> Tensors:
        """The mean of the weights is the next model."""
        return mean

    def evaluate(self, w: Tensors) -> Tensors:
        """Tested as trained: binary."""
        return {name: binary(v) for name, v in w.items()}

    def _latent(self, w: Tensors, local: Local) -> Tensors:
        return {name: (w[name] + m).clamp(-1, 1) for name, m in local.update.items()}


@dataclass(frozen=True)
class BiFL(BiFLFull):
    """Trains binary networks and sends the signs of their weights."""

    kinds = (Kind(Signs),)
    step_bounds = (0.0, 1.0)  # the step size is the mean of magnitudes clipped to this range

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """a sign(v), the weights that training used."""
        latent = self._latent(w, local)
        parts: dict[str, Part] = {name: Signs.of(v >= 0, mean_abs(v)) for name, v in latent.items()}
        return parts, memory
