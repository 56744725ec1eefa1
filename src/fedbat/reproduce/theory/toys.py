"""Toy federations with known optima, and FedBAT on them as in the proofs.

Everything is vectorized over independent runs ("seeds"): [seeds, clients, d]. Clients are separable functions with
balanced data (p_k = 1/N). As in the proof of Theorem 2, all clients train in every round and K of them are heard.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedbat.binarize import binarize_forward

LearningRate = Callable[[int], float]  # of the step t = 1, 2, ...
Compress = Callable[[Tensor, Tensor], Tensor]  # (m, u) -> what is seen and sent in place of m


@dataclass(frozen=True)
class Quadratics:
    """F_k(w) = 1/2 sum_i a_ki (w_i - c_ki)^2: mu = min a, L = max a, F_k* = 0."""

    a: Tensor  # [clients, d]
    c: Tensor  # [clients, d]
    sigma: float  # the gradients' noise has E||noise||^2 = sigma^2

    @property
    def mu(self) -> float:
        """The strong convexity of every client."""
        return float(self.a.min())

    @property
    def smoothness(self) -> float:
        """L, the smoothness of the functions."""
        return float(self.a.max())

    @property
    def mean_curvature(self) -> Tensor:
        """The curvature of F, by coordinate."""
        return self.a.mean(0)

    @property
    def optimum(self) -> Tensor:
        """w*, the minimum of F."""
        return (self.a * self.c).mean(0) / self.mean_curvature

    @property
    def heterogeneity(self) -> float:
        """Gamma = F* - mean_k F_k*."""
        return float((self.a * (self.optimum - self.c) ** 2).sum(-1).mean() / 2)

    def gradient(self, x: Tensor) -> Tensor:
        """grad F_k(x_k) of all clients; x is [..., clients, d]."""
        return self.a * (x - self.c)

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
        """L, the smoothness of the functions."""
        return 1 + 4 * self.height

    def value(self, w: Tensor) -> Tensor:
        """F(w); w is [..., d]."""
        return self._terms(w[..., None, :]).mean(-2).sum(-1)

    def gradient(self, x: Tensor) -> Tensor:
        """grad F_k(x_k) of all clients; x is [..., clients, d]."""
        return x - self.c - 2 * self.height * torch.sin(2 * x + self.c)

    def curvature(self, w: Tensor) -> Tensor:
        """The second derivatives of F; w is [..., d]."""
        return 1 - 4 * self.height * torch.cos(2 * w[..., None, :] + self.c).mean(-2)

    def mean_minimum(self) -> float:
        """mean_k F_k* = F* - Gamma, on a grid for each coordinate by itself, as minima have |w - c| <= 2 height."""
        grid = 2 * self.height * torch.linspace(-1, 1, 2001, dtype=self.c.dtype)[:, None, None]
        return float(self._terms(self.c + grid).amin(0).mean(0).sum())

    def _terms(self, x: Tensor) -> Tensor:
        return (x - self.c) ** 2 / 2 + self.height * torch.cos(2 * x + self.c)


Toy = Quadratics | Ripples


def some_quadratics(
    rng: torch.Generator, *, num_clients: int, d: int, spread: float, mu: float, smoothness: float, sigma: float
) -> Quadratics:
    """Random quadratics; every client attains mu and L."""
    a = mu + (smoothness - mu) * torch.rand(num_clients, d, generator=rng, dtype=torch.float64)
    a[:, 0], a[:, -1] = mu, smoothness
    c = spread * torch.randn(num_clients, d, generator=rng, dtype=torch.float64)
    return Quadratics(a, c, sigma)


def some_ripples(
    rng: torch.Generator, *, num_clients: int, d: int, spread: float, smoothness: float, sigma: float
) -> Ripples:
    """Random ripples, with curvatures between 2 - L and L."""
    c = spread * torch.randn(num_clients, d, generator=rng, dtype=torch.float64)
    return Ripples(c, (smoothness - 1) / 4, sigma)


def inf_norm(m: Tensor) -> Tensor:
    """The theorems' alpha = ||m||_inf, [..., 1]."""
    return m.abs().amax(-1, keepdim=True)


def unbiased_binarization(m: Tensor, u: Tensor) -> Tensor:
    """S(m, ||m||_inf), which is unbiased."""
    return binarize_forward(m, inf_norm(m), u)


def identity(m: Tensor, u: Tensor) -> Tensor:
    """No compression, the limit q = 0: FedAvg."""
    return m


class Compression(NamedTuple):
    """What is sent in place of m, unbiased, and the variance that it adds to each coordinate."""

    word: str
    apply: Compress
    variance: Callable[[Tensor], Tensor]


COMPRESSIONS = {
    "binarization": Compression("binarized", unbiased_binarization, lambda m: inf_norm(m) ** 2 - m**2),
    "none": Compression("FedAvg", identity, torch.zeros_like),
}


def choose(num_draws: int, num_clients: int, num_sampled: int, rng: torch.Generator) -> Tensor:
    """[draws, clients] of 0 and 1: K of N clients, uniformly without replacement."""
    ranks = torch.rand(num_draws, num_clients, generator=rng).argsort(1)
    return (ranks < num_sampled).double()


class Round(NamedTuple):
    """One round of all runs."""

    start: Tensor  # [seeds, d]: the global model before it
    w: Tensor  # [seeds, d]: and after it
    updates: list[Tensor]  # m before, between and after the tau steps of the round, each [seeds, clients, d]
    gradients: list[Tensor]  # the stochastic gradients of its tau steps


def train(
    toy: Toy,
    learning_rate: LearningRate,
    *,
    w: Tensor,  # [seeds, d]
    tau: int,
    num_rounds: int,
    num_sampled: int,
    rng: torch.Generator,
    compress: Compress = unbiased_binarization,
) -> Iterator[Round]:
    """FedBAT with phi = 0: m <- m - eta_t grad F_k(w + S(m), xi) for tau steps, then w <- w + mean over K of S(m)."""
    num_clients, d = toy.c.shape
    for index in range(num_rounds):
        u, noise = draw(rng, tau, (len(w), num_clients, d), toy.sigma)
        start, updates, gradients = w, [torch.zeros_like(noise[0])], []
        for step in range(tau):
            seen = start[:, None] + compress(updates[-1], u[step])
            gradients.append(toy.gradient(seen) + noise[step])
            updates.append(updates[-1] - learning_rate(index * tau + step + 1) * gradients[-1])
        sent = compress(updates[-1], u[tau])
        if num_sampled < num_clients:
            sent = sent * choose(len(w), num_clients, num_sampled, rng)[..., None]
        w = start + sent.sum(1) / num_sampled
        yield Round(start, w, updates, gradients)


def draw(rng: torch.Generator, tau: int, shape: tuple[int, int, int], sigma: float) -> tuple[Tensor, Tensor]:
    """The noise of tau + 1 binarizations and of the data in tau steps; drawn in float32, which is much faster."""
    u = torch.rand(tau + 1, *shape, generator=rng).double()
    return u, torch.randn(tau, *shape, generator=rng).double() * (sigma / shape[-1] ** 0.5)
