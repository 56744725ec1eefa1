"""Toy federations with known optima, FedBAT on them as the theorems' proofs write it, and closed forms to compare with.

Everything is vectorised over independent runs ("seeds"): [seeds, clients, d]. Clients are separable functions with
balanced data (p_k = 1/N). As in the proof of Theorem 2, all clients train in every round and K of them are heard.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedbat.binarize import binarize_forward

Compress = Callable[[Tensor, Tensor], Tensor]  # (m, u) -> what is seen and sent in place of m


@dataclass(frozen=True)
class Quadratics:
    """F_k(w) = 1/2 sum_i a_ki (w_i - c_ki)^2, gradients with noise of variance sigma^2 in all (Assumptions 1-3)."""

    a: Tensor  # [clients, d]: curvatures in [mu, L]
    c: Tensor  # [clients, d]: the clients' own optima
    sigma: float
    mu: float
    smoothness: float  # L

    def gradient(self, x: Tensor) -> Tensor:
        """grad F_k(x_k) of all clients; x is [..., clients, d]."""
        return self.a * (x - self.c)

    def values(self, x: Tensor) -> Tensor:
        """F_k(x_k) of all clients."""
        return (self.a * (x - self.c) ** 2).sum(-1) / 2

    @property
    def mean_curvature(self) -> Tensor:  # [d]
        return self.a.mean(0)

    @property
    def optimum(self) -> Tensor:  # [d]
        return (self.a * self.c).mean(0) / self.mean_curvature

    @property
    def gamma_heterogeneity(self) -> float:
        """Gamma = F* - mean_k F_k*, and F_k* = 0."""
        return float(self.values(self.optimum).mean())

    def gap(self, w: Tensor) -> Tensor:
        """F(w) - F*; w is [..., d]."""
        return (self.mean_curvature * (w - self.optimum) ** 2).sum(-1) / 2


@dataclass(frozen=True)
class Ripples:
    """F_k(w) = sum_i (w_i - c_ki)^2 / 2 + height cos(2 w_i + c_ki): smooth, bounded below, many local minima."""

    c: Tensor  # [clients, d]
    height: float
    sigma: float

    @property
    def smoothness(self) -> float:
        return 1 + 4 * self.height

    def gradient(self, x: Tensor) -> Tensor:
        return x - self.c - 2 * self.height * torch.sin(2 * x + self.c)

    def values(self, x: Tensor) -> Tensor:
        return ((x - self.c) ** 2 / 2 + self.height * torch.cos(2 * x + self.c)).sum(-1)

    def curvature(self, x: Tensor) -> Tensor:
        return 1 - 4 * self.height * torch.cos(2 * x + self.c)

    @property
    def mean_minimum(self) -> float:
        """mean_k F_k* = F* - Gamma, by a grid: every coordinate stands alone."""
        grid = torch.linspace(-8, 8, 4001, dtype=self.c.dtype)[:, None, None]
        each = (grid - self.c) ** 2 / 2 + self.height * torch.cos(2 * grid + self.c)
        return float(each.amin(0).sum(-1).mean())


def some_quadratics(seed: int, num_clients: int = 10, d: int = 20, spread: float = 1.0) -> Quadratics:
    """mu = 1, L = 4 and sigma = 0.5, with every client's curvatures touching both ends."""
    rng = torch.Generator().manual_seed(seed)
    a = 1 + 3 * torch.rand(num_clients, d, generator=rng, dtype=torch.float64)
    a[:, 0], a[:, -1] = 1.0, 4.0
    c = spread * torch.randn(num_clients, d, generator=rng, dtype=torch.float64)
    return Quadratics(a, c, sigma=0.5, mu=1.0, smoothness=4.0)


def inf_norm(m: Tensor) -> Tensor:
    """The theorems' alpha = ||m||_inf, [..., 1]."""
    return m.abs().amax(-1, keepdim=True)


def unbiased_binarization(m: Tensor, u: Tensor) -> Tensor:
    """S(m, ||m||_inf)."""
    return binarize_forward(m, inf_norm(m), u)


def identity(m: Tensor, u: Tensor) -> Tensor:
    """The limit q = 0."""
    return m


class Round(NamedTuple):
    """One round of all runs."""

    w: Tensor  # [seeds, d]: the global model after it
    start: Tensor  # [seeds, d]: and before it
    updates: list[Tensor]  # m of tau + 1 moments, each [seeds, clients, d]
    gradients: list[Tensor]  # the stochastic gradients of the tau steps


def train(
    toy: Quadratics | Ripples,
    learning_rate: Callable[[int], float],  # of t = 1, 2, ...
    *,
    w: Tensor,  # [seeds, d]
    tau: int,
    num_rounds: int,
    num_sampled: int,
    rng: torch.Generator,
    compress: Compress = unbiased_binarization,
) -> Iterator[Round]:
    """FedBAT with phi = 0: x = w + S(m); m <- m - eta_t grad F_k(x, xi); w <- w + mean over K of S(m)."""
    num_clients, d = toy.c.shape
    shape, t = (len(w), num_clients, d), 0
    for _ in range(num_rounds):
        u = torch.rand(tau + 1, *shape, generator=rng).to(w.dtype)  # float32 draws are several times faster
        noise = torch.randn(tau, *shape, generator=rng).to(w.dtype) * (toy.sigma / d**0.5)
        start, updates, gradients = w, [w.new_zeros(shape)], []
        for step in range(tau):
            t += 1
            x = start[:, None] + compress(updates[-1], u[step])
            gradients.append(toy.gradient(x) + noise[step])
            updates.append(updates[-1] - learning_rate(t) * gradients[-1])
        sent = compress(updates[-1], u[tau])
        if num_sampled < num_clients:
            sent = sent * choose(len(w), num_clients, num_sampled, rng)[..., None]
        w = start + sent.sum(1) / num_sampled
        yield Round(w, start, updates, gradients)


def choose(num_draws: int, num_clients: int, num_sampled: int, rng: torch.Generator) -> Tensor:
    """[draws, clients] of 0 and 1: K of N, uniform without replacement."""
    order = torch.rand(num_draws, num_clients, generator=rng).argsort(1)
    return (order < num_sampled).double()
