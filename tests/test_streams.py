"""Random streams: named, independent, repeatable."""

import math

import numpy as np
import torch

from fedbat.streams import UniformNoise, stream, stream_seed

LIKE = {"a": torch.empty(300, 70), "b": torch.empty(11)}


def draw(*key, calls=1):
    noise = UniformNoise(*key)
    return [noise(LIKE) for _ in range(calls)][-1]["a"]


def test_same_key_same_stream_other_key_other_stream():
    assert torch.equal(draw(1, "noise", 2, 3), draw(1, "noise", 2, 3))
    for other in ((2, "noise", 2, 3), (1, "encode", 2, 3), (1, "noise", 3, 2), (1, "noise", 2)):
        assert not torch.equal(draw(1, "noise", 2, 3), draw(*other))
    assert not torch.equal(draw(1, "noise", calls=1), draw(1, "noise", calls=2))
    assert stream(1, "x", 2).random() == stream(1, "x", 2).random() != stream(1, "x", 3).random()
    assert stream_seed(1, "x") == stream_seed(1, "x") != stream_seed(1, "y") and 0 <= stream_seed(1, "x") < 2**63


def test_noise_is_uniform_in_the_open_interval():
    u = draw(0, "noise").double().flatten()
    n = len(u)
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / math.sqrt(12 * n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt((1 / 80 - 1 / 144) / n)
    # Kolmogorov-Smirnov: P(sqrt(n) D > 2.2) < 2e-4
    distance = np.abs(np.sort(u.numpy()) - (np.arange(n) + 0.5) / n).max() + 0.5 / n
    assert math.sqrt(n) * distance < 2.2


def test_clients_and_calls_are_uncorrelated():
    """Shared noise would not average out over clients, silently."""
    streams = [draw(0, "noise", 5, client).flatten() for client in range(8)] + [
        draw(0, "noise", 5, 0, calls=2).flatten()
    ]
    correlation = torch.corrcoef(torch.stack(streams))
    off_diagonal = correlation[~torch.eye(9, dtype=torch.bool)].abs().max()
    assert off_diagonal < 5 / math.sqrt(streams[0].numel())


def test_noise_lies_in_memory_as_its_tensor_does():
    like = {"x": torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last), "y": torch.empty(())}
    u = UniformNoise(0, "x")(like)
    assert u["x"].stride() == like["x"].stride() and u["y"].shape == ()
    assert len(u["x"].unique()) > 40
