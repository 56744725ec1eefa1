"""The bounds of Theorems 1 to 3 on the toys' errors, and the limit that Lemma 6 gives if its variances are equalities.

G and q are not known beforehand; they are measured in the runs themselves. Squares are called g2, q2 and sigma2.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedbat.reproduce.theory.toys import Compression, Quadratics, Round

Floats = NDArray[np.float64]


class Constants(NamedTuple):
    """G^2 = max E||gradient||^2 over clients and steps, and q^2 = max over updates, in the rounds seen so far."""

    g2: float = 0.0
    q2: float = 0.0

    def after(self, round_: Round, compression: Compression) -> "Constants":
        """The constants after seeing one more round."""
        m = torch.stack(round_.updates[1:])
        g2 = (torch.stack(round_.gradients) ** 2).sum(-1).mean(1).max()
        q2 = (compression.variance(m).sum(-1) / (m**2).sum(-1)).max()
        return Constants(max(self.g2, float(g2)), max(self.q2, float(q2)))


def uplink_factor(n: int, k: int, q2: float) -> float:
    """The factor on 4 tau^2 G^2 for hearing K of N clients through S."""
    return (q2 * (n - 1) + n - k) / (k * (n - 1))


def b_of_theorem_2(
    n: int, k: int, *, smoothness: float, sigma2: float, heterogeneity: float, g2: float, q2: float, tau: int
) -> float:
    """B of Theorem 2; with K = N, that of Theorem 1 for balanced clients."""
    drift = 8 * (1 + q2) * (tau - 1) ** 2 * g2
    return sigma2 / n + 6 * smoothness * heterogeneity + drift + 4 * uplink_factor(n, k, q2) * tau**2 * g2


def bound_of_theorem_2(times: Floats, *, b: float, mu: float, smoothness: float, gamma: float, start2: float) -> Floats:
    """The bound on E F(w_t) - F* at gamma + t = `times`; `start2` is ||w_1 - w*||^2."""
    return smoothness / mu / times * (2 * b / mu + mu * (gamma + 1) / 2 * start2)


def bound_of_theorem_3(
    times: Floats, n: int, k: int, *, smoothness: float, sigma2: float, descent: float, g2: float, q2: float, tau: int
) -> Floats:
    """The bound on the mean of E||grad F||^2 over T = `times` steps; `descent` is F(w_0) - F* + Gamma."""
    p = sigma2 / n + 4 * uplink_factor(n, k, q2) * tau**2 * g2
    q = 4 * (1 + q2) * (tau - 1) ** 2 * g2
    return (2 * smoothness * descent + p) / np.sqrt(times) + q / times


def limit(toy: Quadratics, *, tau: int, num_sampled: int, rng: torch.Generator, compression: Compression) -> float:
    """The limit of t (F(w_t) - F*) for eta_t = 2 / (mu t).

    Near the optimum, a round adds eta times the sum h_k of tau stochastic gradients at w*, whose variance n is that
    of Lemma 6 with equality: compression, sampling and data. If a is the mean curvature of a coordinate,
    V' = (1 - 2 tau eta a) V + eta^2 n has the solution V = 4 n / (tau mu^2 (4 a / mu - 1) t).
    """
    num_clients, d = toy.c.shape
    noise = torch.randn(4000, num_clients, d, generator=rng, dtype=toy.a.dtype) * (toy.sigma * (tau / d) ** 0.5)
    h = tau * toy.gradient(toy.optimum) + noise
    compressed = compression.variance(h).mean((0, 1)) / num_sampled
    sampling = h.var(1, correction=1).mean(0) * (num_clients - num_sampled) / (num_sampled * num_clients)
    data = tau * toy.sigma**2 / (d * num_clients)
    a = toy.mean_curvature
    variance = 4 * (compressed + sampling + data) / (tau * toy.mu**2 * (4 * a / toy.mu - 1))
    return float((a / 2 * variance).sum())
