"""A weight tensor in a few bits with one scale per output channel: how snapshots go down to the clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedbat import packing
from fedbat.errors import DivergedError, WireError
from fedbat.gaussian import gaussian_levels
from fedbat.parts import Part, Reader, Record

WIDTHS = range(2, 9)
_FEW = 4  # up to this many bits, levels are placed where most weights are; with more, evenly over the whole range


@dataclass(frozen=True, eq=False)
class Channels(Part):
    """scale[channel] * level[code]: `width` bits per value and one float32 per channel (the first dimension)."""

    codes: Tensor  # uint8 [numel]
    scales: Tensor  # float32 [channels]
    width: int
    KIND: ClassVar[int] = 4

    @classmethod
    def of(cls, x: Tensor, width: int) -> Self:
        """The nearest levels; with few bits, the scales that fit them best in the least-squares sense.

        With many bits, a scale makes the largest weight fit; with few, that would waste levels on outliers.
        """
        if not x.numel():
            return cls(x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=torch.float32), width)
        rows = x.detach().float().reshape(num_channels(x.shape), -1)
        levels = levels_of(width, x.device)
        edges = (levels[1:] + levels[:-1]) / 2
        if width > _FEW:
            scales = rows.abs().amax(1)
        else:
            scales = rows.square().mean(1).sqrt()
            chosen = levels[torch.bucketize(rows / _divisor(scales)[:, None], edges)]
            scales = (rows * chosen).sum(1) / chosen.square().sum(1)
        codes = torch.bucketize(rows / _divisor(scales)[:, None], edges)
        return cls(codes.to(torch.uint8).reshape(-1), scales, width)

    @property
    def numel(self) -> int:
        return self.codes.numel()

    @property
    def nbits(self) -> int:
        return self.width * self.numel + 32 * self.scales.numel()

    def unpack(self) -> Tensor:
        if not self.numel:
            return self.scales
        values = packing.look_up(levels_of(self.width, self.codes.device), self.codes)
        return values.view(self.scales.numel(), -1).mul_(self.scales[:, None]).reshape(-1)

    def record(self) -> Record:
        """The parameter is the width, the word the number of channels."""
        return Record(self.KIND, self.width, self.scales.numel())

    def body(self) -> bytes:
        """The scales, then the codes."""
        codes = packing.pack_codes(self.codes.cpu().numpy(), self.width)
        return self.scales.cpu().numpy().astype("<f4", copy=False).tobytes() + codes.tobytes()

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        """Read a part; every channel has equally many values, and all of them are finite."""
        width, channels = record.parameter, record.word
        fits = numel % channels == 0 if 0 < channels <= numel else channels == numel
        if width not in WIDTHS or not fits:
            raise WireError(
                f"{channels} channels of {width} bits for {numel} values, expected a divisor and 2 to 8; "
                "the model is damaged"
            )
        scales = reader.take_floats(channels, "the scales of a tensor")
        if torch.signbit(scales).any() or not torch.isfinite(scales * levels_of(width, scales.device)[-1]).all():
            raise DivergedError(
                f"scales from {scales.min()} to {scales.max()}, expected none below 0 and all values finite; the "
                "sender's training diverged"
            )
        codes = packing.unpack_codes(reader.take_bits(width * numel, "a tensor's levels"), numel, width)
        return cls(torch.from_numpy(codes), scales, width)


def num_channels(shape: Sequence[int]) -> int:
    """The number of slices with a scale of their own: the first dimension, 1 for a vector, 0 for an empty tensor."""
    return (shape[0] if len(shape) > 1 else 1) if math.prod(shape) else 0


def body_bytes(shape: Sequence[int], width: int) -> int:
    """Length of the body of a tensor of this shape."""
    return 4 * num_channels(shape) + packing.num_bytes(width * math.prod(shape))


@cache
def levels_of(width: int, device: torch.device) -> Tensor:
    """2^width levels: if few, those of the normal distribution; if many, evenly spaced from -1 to 1."""
    if width <= _FEW:
        return gaussian_levels(width, device)
    top = (1 << width) - 1
    return torch.arange(-top, top + 1, 2, dtype=torch.float32, device=device) / top


def _divisor(scales: Tensor) -> Tensor:
    """The scales, with 1 in place of the 0 of a channel of zeros."""
    return torch.where(scales > 0, scales, 1.0)
