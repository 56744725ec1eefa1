"""Random numbers that sender and receiver compute alike from a 64-bit seed, on any device: splitmix64 of a counter.

A seed is an int64 tensor of shape (), its bits read as unsigned; word number i of its sequence is
splitmix64(seed + (i + 1) gamma). It is all tensor arithmetic that wraps modulo 2^64, so it can be recorded on a GPU and
replayed with another seed.
"""

import torch
from torch import Tensor

from fedbat import packing
from fedbat.streams import Noise, Tensors


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def draw_seeds(noise: Noise, like: Tensors) -> Tensors:
    """A fresh seed for every tensor in `like`, from four draws of 16 bits each: noise on the CPU has no more."""
    u = noise({name: tensor.new_empty(4) for name, tensor in like.items()})
    return {name: seed_of(values) for name, values in u.items()}


def seed_of(u: Tensor) -> Tensor:
    """The seed made of four draws from U(0, 1), 16 bits each; 1, which GPUs may draw, counts as the number below."""
    sixteens = (u * 65536).to(torch.int64).clamp(max=65535)
    return (sixteens << torch.arange(0, 16 * u.numel(), 16, device=u.device)).sum()


def words(seed: Tensor, start: int, count: int) -> Tensor:
    """Words start to start + count - 1 of the seed's sequence, int64."""
    z = torch.arange(start + 1, start + count + 1, device=seed.device) * GAMMA + seed
    for shift, factor in zip((30, 27), _MIX, strict=True):
        z = (z ^ _shifted(z, shift)) * factor
    return z ^ _shifted(z, 31)


def signs(seed: Tensor, start: int, count: int, magnitude: float) -> Tensor:
    """`count` values of +-magnitude, float32, from the bits of words `start` on, least significant first; 1 means +."""
    bytes_ = words(seed, start, -(-count // 64)).view(torch.uint8)
    return (packing.signs_on(seed.device) * magnitude).index_select(0, bytes_.int()).view(-1)[:count]


def uniform(seed: Tensor, count: int) -> Tensor:
    """`count` numbers in (-1, 1), float32: (k + 1/2) / 2^15 for each signed 16 bits k of the words, never 0."""
    halves = words(seed, 0, -(-count // 4)).view(torch.int16)[:count]
    return halves.to(torch.float32).add_(0.5).mul_(2**-15)


def _shifted(z: Tensor, by: int) -> Tensor:
    """`z >> by` for unsigned words: on int64, the shift alone would extend the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)
