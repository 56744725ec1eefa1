"""The seeded rotation: the numbers behind it, orthogonality, and that it makes vectors look Gaussian."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat import seeds
from fedbat.rotation import _hadamard_, rotate, rotate_back
from fedbat.streams import UniformNoise
from tests.reference import decode as reference

SIZES = [0, 1, 2, 3, 63, 64, 65, 129, 1000, 9 * 2**11, 2**14, 2**14 + 1, 50_000]
LARGE = [2**18, 9 * 2**15, 2**19, 600_000]  # more than a block


def seed(number):
    return torch.from_numpy(np.array(number % 2**64, np.uint64).view(np.int64))


def slow_hadamard(x):
    """All sums and differences, from near to far."""
    h = 1
    while h < x.numel():
        a, b = x.view(-1, 2, h).unbind(1)
        x, h = torch.stack([a + b, a - b], 1).view(-1), 2 * h
    return x


# Numbers from a seed


def test_words_are_splitmix64():
    """The first outputs for seed 1234567 as in the generator's published test vector."""
    found = seeds.words(seed(1234567), 0, 5).numpy().view(np.uint64).tolist()
    assert found == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(1, 50))
@settings(deadline=None)
def test_words_wrap_and_may_start_anywhere(number, start, count):
    expected = [reference.random_word(number, start + i) for i in range(count)]
    assert seeds.words(seed(number), start, count).numpy().view(np.uint64).tolist() == expected


def test_signs_are_fair_and_those_of_two_seeds_independent():
    count = 1 << 18
    signs = [seeds.signs(seed(number), 0, count, 0.5) for number in (0, 1, 2**63, 2**64 - 1)]
    assert all((x.abs() == 0.5).all() for x in signs)
    products = torch.stack([2 * x for x in signs]) @ torch.stack([2 * x for x in signs]).T / count
    assert (products - torch.eye(4)).abs().max() < 5 / math.sqrt(count)
    assert max(abs(float(x.mean())) for x in signs) < 5 * 0.5 / math.sqrt(count)


def test_uniform_has_the_moments_of_its_law_and_is_never_zero():
    count = 1 << 18
    x = seeds.uniform(seed(5), count)
    assert x.abs().min() > 0 and x.abs().max() < 1
    assert abs(float(x.mean())) < 5 * math.sqrt(1 / 3 / count)
    assert abs(float((x**2).mean()) - 1 / 3) < 5 * math.sqrt(4 / 45 / count)


def test_seeds_use_all_64_bits_and_no_two_are_alike():
    drawn = seeds.draw_seeds(UniformNoise(0, "test"), {str(i): torch.empty(0) for i in range(4096)})
    numbers = torch.stack(list(drawn.values()))
    assert len(numbers.unique()) == 4096
    bits = (numbers[:, None] >> torch.arange(64)) & 1
    assert (bits.float().mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(4096)
    assert seeds.seed_of(torch.ones(4)) == -1  # a GPU may draw 1


# The rotation


@pytest.mark.parametrize("log_n", [0, 1, 6, 13, 14, 15, 17, 18, 19, 20])
def test_blocks_change_no_bit(log_n, rng):
    x = torch.randn(2**log_n, generator=rng)
    assert torch.equal(_hadamard_(x.clone()), slow_hadamard(x))


@pytest.mark.parametrize("d", [1, 2, 3, 100, 257])
def test_the_slow_twin_finds_the_same_bits(d, rng):
    x = torch.randn(d, generator=rng)
    assert rotate_back(x, seed(2**64 - 7)).tolist() == reference.rotate_back(x.tolist(), 2**64 - 7)


@pytest.mark.parametrize("d", SIZES + LARGE)
def test_there_and_back_is_the_identity_and_lengths_stay(d, rng):
    x = torch.randn(d, generator=rng)
    before = x.clone()
    y = rotate(x, seed(d))
    assert torch.equal(x, before) and y.shape == x.shape
    # Each of 2 log2(n) additions and 4 products rounds once, by at most half of 2^-23, of what is about 1.
    error = 2**-24 * (4 * math.log2(d + 2) + 8)
    assert ((rotate_back(y, seed(d)) - x).norm() <= error * x.norm()).item()
    assert ((y.norm() - x.norm()).abs() <= error * x.norm()).item()


@pytest.mark.parametrize("d", [1, 2, 5, 48, 100])
def test_the_matrix_is_orthogonal_and_back_is_its_transpose(d):
    matrix = torch.stack([rotate(x, seed(3)) for x in torch.eye(d)], 1)
    back = torch.stack([rotate_back(x, seed(3)) for x in torch.eye(d)], 1)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(d), rtol=0, atol=1e-6)
    torch.testing.assert_close(back, matrix.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("d", [4096, 5000, 9 * 512])
@pytest.mark.parametrize("shape", ["one row large", "ramp", "heavy tails"])
def test_what_is_rotated_looks_gaussian(d, shape, rng):
    """Second and fourth moments of sqrt(d) R x / ||x||: 1 exactly and 3 up to its spread over d coordinates."""
    x = torch.randn(d, generator=rng)
    if shape == "one row large":
        x[d // 3 : d // 3 + d // 10] *= 30
    elif shape == "ramp":
        x *= torch.linspace(0, 1, d)
    else:
        x = x**3
    kurtosis = []
    for number in range(20):
        z = rotate(x, seed(number)) * (math.sqrt(d) / x.norm())
        kurtosis.append(float((z**4).mean()))
    # Fourth powers of a Gaussian vary by sqrt(96); windows that are dealt out still differ a little in energy.
    assert abs(sum(kurtosis) / 20 - 3) < 5 * math.sqrt(96 / d / 20) + (0 if d == 4096 else 0.02)


def test_two_windows_spread_even_a_single_entry(rng):
    """One pass would leave entries of one size; two make them Gaussian where d is a power of two."""
    x = torch.zeros(4096)
    x[17] = 1.0
    z = torch.stack([rotate(x, seed(number)) * 64 for number in range(20)])
    assert abs(float((z**4).mean()) - 3) < 5 * math.sqrt(96 / z.numel()) + 3 * 2 / 4096
