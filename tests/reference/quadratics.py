"""Toy federations with known optima, FedBAT on them as the proofs write it, and closed forms to compare with.

Everything is vectorised over independent runs ("seeds"): [seeds, clients, d]. Clients are separable functions with
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
        return float(self.a.min())

    @property
    def smoothness(self) -> float:
        return float(self.a.max())

    @property
    def mean_curvature(self) -> Tensor:
        return self.a.mean(0)

    @property
    def optimum(self) -> Tensor:
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
        """mean_k F_k* = F* - Gamma; every coordinate stands alone, so a grid finds it."""
        grid = torch.linspace(-6, 6, 2401, dtype=self.c.dtype)[:, None, None]
        return float(self._terms(grid).amin(0).mean(0).sum())

    def _terms(self, x: Tensor) -> Tensor:
        return (x - self.c) ** 2 / 2 + self.height * torch.cos(2 * x + self.c)


def some_quadratics(seed: int, *, num_clients: int, d: int, spread: float) -> Quadratics:
    """mu = 1 and L = 4, both reached by every client; sigma = 0.5."""
    rng = torch.Generator().manual_seed(seed)
    a = 1 + 3 * torch.rand(num_clients, d, generator=rng, dtype=torch.float64)
    a[:, 0], a[:, -1] = 1.0, 4.0
    c = spread * torch.randn(num_clients, d, generator=rng, dtype=torch.float64)
    return Quadratics(a, c, sigma=0.5)


def some_ripples(seed: int, *, num_clients: int, d: int) -> Ripples:
    """L = 5, curvatures between -3 and 5; sigma = 0.5."""
    rng = torch.Generator().manual_seed(seed)
    return Ripples(torch.randn(num_clients, d, generator=rng, dtype=torch.float64) / 2, height=1.0, sigma=0.5)


def inf_norm(m: Tensor) -> Tensor:
    """The theorems' alpha = ||m||_inf, [..., 1]."""
    return m.abs().amax(-1, keepdim=True)


def unbiased_binarization(m: Tensor, u: Tensor) -> Tensor:
    """S(m, ||m||_inf)."""
    return binarize_forward(m, inf_norm(m), u)


def identity(m: Tensor, u: Tensor) -> Tensor:
    """The limit q = 0."""
    return m


def choose(num_draws: int, num_clients: int, num_sampled: int, rng: torch.Generator) -> Tensor:
    """[draws, clients] of 0 and 1: K of N, uniform without replacement."""
    ranks = torch.rand(num_draws, num_clients, generator=rng).argsort(1)
    return (ranks < num_sampled).double()


class Round(NamedTuple):
    """One round of all runs."""

    start: Tensor  # [seeds, d]: the global model before it
    w: Tensor  # [seeds, d]: and after it
    updates: list[Tensor]  # m at the tau + 1 moments of the round, each [seeds, clients, d]
    gradients: list[Tensor]  # the stochastic gradients of its tau steps


def train(
    toy: Quadratics | Ripples,
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
        u, noise = _draw(rng, tau, (len(w), num_clients, d), toy.sigma)
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


def fedavg(
    toy: Quadratics, learning_rate: LearningRate, *, w: Tensor, tau: int, num_rounds: int, rng: torch.Generator
) -> Iterator[Tensor]:
    """FedAvg of all clients with the data of `train`, one run, one client, one step at a time: w after each round."""
    num_clients, d = toy.c.shape
    for index in range(num_rounds):
        _, noise = _draw(rng, tau, (len(w), num_clients, d), toy.sigma)
        updates = torch.zeros_like(noise[0])
        for run in range(len(w)):
            for k in range(num_clients):
                m = updates[run, k]
                for step in range(tau):
                    gradient = toy.a[k] * ((w[run] + m) - toy.c[k]) + noise[step, run, k]
                    m -= learning_rate(index * tau + step + 1) * gradient
        w = w + updates.sum(1) / num_clients
        yield w


def fedavg_moments(
    toy: Quadratics, learning_rate: LearningRate, *, w: Tensor, tau: int, num_rounds: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance, over the gradients' noise, of FedAvg's w after each round: both [rounds, d], exact.

    Within a round, w_k = c_k + (1 - eta a_k)(w_k - c_k) - eta noise is linear with independent normal noise.
    """
    num_clients, d = toy.c.shape
    variance, means, variances = torch.zeros(d, dtype=w.dtype), [], []
    for index in range(num_rounds):
        kept, noise = torch.ones_like(toy.a), torch.zeros_like(toy.a)
        for step in range(tau):
            eta = learning_rate(index * tau + step + 1)
            kept = kept * (1 - eta * toy.a)
            noise = noise * (1 - eta * toy.a) ** 2 + eta**2 * toy.sigma**2 / d
        w = (toy.c + kept * (w - toy.c)).mean(0)
        variance = kept.mean(0) ** 2 * variance + noise.sum(0) / num_clients**2
        means.append(w)
        variances.append(variance)
    return torch.stack(means), torch.stack(variances)


def plateau(toy: Quadratics, *, tau: int, num_sampled: int, rng: torch.Generator) -> float:
    """The limit of t (F(w_t) - F*) for eta_t = 2 / (mu t) and alpha = ||m||_inf.

    Near the optimum a round adds the sum h_k of tau stochastic gradients at w*, times eta, and its variance n is that
    of Lemma 6 with equality: binarization, sampling and data. With a the mean curvature of a coordinate,
    V' = (1 - 2 tau eta a) V + eta^2 n has the solution V = 4 n / (tau mu^2 (4 a / mu - 1) t).
    """
    num_clients, d = toy.c.shape
    noise = torch.randn(4000, num_clients, d, generator=rng, dtype=toy.a.dtype) * (toy.sigma * (tau / d) ** 0.5)
    h = tau * toy.gradient(toy.optimum) + noise
    binarization = (inf_norm(h) ** 2 - h**2).mean((0, 1)) / num_sampled
    sampling = h.var(1, correction=1).mean(0) * (num_clients - num_sampled) / (num_sampled * num_clients)
    data = tau * toy.sigma**2 / (d * num_clients)
    a = toy.mean_curvature
    variance = 4 * (binarization + sampling + data) / (tau * toy.mu**2 * (4 * a / toy.mu - 1))
    return float((a / 2 * variance).sum())


def _draw(rng: torch.Generator, tau: int, shape: tuple[int, int, int], sigma: float) -> tuple[Tensor, Tensor]:
    """The binarization's noise of tau + 1 moments and the data's of tau steps; float32 draws are much faster."""
    u = torch.rand(tau + 1, *shape, generator=rng).double()
    return u, torch.randn(tau, *shape, generator=rng).double() * (sigma / shape[-1] ** 0.5)
