"""FedAvg on the toy quadratics of the theorems: as a loop, and its mean and variance in closed form."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedbat.reproduce.theory.toys import LearningRate, Quadratics, draw


def fedavg(
    toy: Quadratics, learning_rate: LearningRate, *, w: Tensor, tau: int, num_rounds: int, rng: torch.Generator
) -> Iterator[Tensor]:
    """FedAvg of all clients with the data of `train`, one run, one client, one step at a time: w after each round."""
    num_clients, d = toy.c.shape
    for index in range(num_rounds):
        _, noise = draw(rng, tau, (len(w), num_clients, d), toy.sigma)
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
