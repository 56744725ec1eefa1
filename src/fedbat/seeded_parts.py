"""Parts of which the receiver recreates one half from a 64-bit seed: rotated signs and levels, masked noise.

Their bodies begin with the seed (docs/wire-format.md, kinds 16 to 31). To add a rotated part, the server has to rotate
it back, which costs about as much as encoding it cost the client.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedbat import packing, seeds
from fedbat.errors import DivergedError, WireError
from fedbat.gaussian import gaussian_levels
from fedbat.parts import Part, Reader, Record, boolean, expect_unused, float_bits, number, scale_of
from fedbat.rotation import rotate_back

LARGEST_SCALE = 2.0**64
"""Of rotated parts: they add up to sqrt(d) times it, which must be finite."""

WIDTHS = (2, 3, 4)
"""Of rotated levels; one bit is rotated signs."""


class Seeded(Part):
    """A part whose receiver needs its seed."""

    seed: Tensor  # int64 [], 64 bits

    def body(self) -> bytes:
        """u64 seed, then the rest."""
        return self.seed.cpu().numpy().astype("<i8").tobytes() + self._rest_of_body()

    @abstractmethod
    def _rest_of_body(self) -> bytes: ...


class OneBit(Seeded):
    """One bit per value, one float32 and a seed."""

    packed: Tensor  # uint8 [ceil(count / 8)]
    count: int

    @property
    def numel(self) -> int:
        return self.count

    @property
    def nbits(self) -> int:
        return self.count + 32 + 64

    def _rest_of_body(self) -> bytes:
        return self.packed.cpu().numpy().tobytes()


class Rotated(Seeded):
    """scale * R^T levels, where R is the rotation made from the seed."""

    scale: Tensor  # float32 []

    @property
    def step(self) -> Tensor | None:
        return self.scale

    @abstractmethod
    def levels(self) -> Tensor:
        """The values to be rotated back: float32, flat."""

    def unpack(self) -> Tensor:
        return rotate_back(self.levels(), self.seed).mul_(self.scale)


@dataclass(frozen=True, eq=False)
class RotatedSigns(OneBit, Rotated):
    """Levels +1 and -1."""

    packed: Tensor
    scale: Tensor
    seed: Tensor
    count: int
    KIND: ClassVar[int] = 16

    @classmethod
    def of(cls, positive: Tensor, scale: Tensor, seed: Tensor) -> Self:
        """Pack a boolean tensor."""
        return cls(packing.pack_signs(boolean(positive)), number(scale), seed, positive.numel())

    def levels(self) -> Tensor:
        return packing.unpack_signs(self.packed, self.count).to(torch.float32).mul_(2).sub_(1)

    def record(self) -> Record:
        """The word is the scale."""
        return Record(self.KIND, 0, float_bits(self.scale))

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        expect_unused("rotated signs", parameter=record.parameter)
        scale, seed = _rotated_scale(record.word), _take_seed(reader)
        packed = reader.take_bits(numel, "a tensor of rotated signs").copy()
        return cls(torch.from_numpy(packed), scale, seed, numel)


@dataclass(frozen=True, eq=False)
class RotatedLevels(Rotated):
    """The 2^width Lloyd-Max levels of the normal distribution: `width` bits per value, one float32 and a seed."""

    codes: Tensor  # uint8 [numel], 0 for the lowest level
    scale: Tensor
    seed: Tensor
    width: int
    KIND: ClassVar[int] = 17

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, seed: Tensor, width: int) -> Self:
        """From integers in [0, 2^width)."""
        return cls(codes.reshape(-1).to(torch.uint8), number(scale), seed, width)

    @property
    def numel(self) -> int:
        return self.codes.numel()

    @property
    def nbits(self) -> int:
        return self.width * self.numel + 32 + 64

    def levels(self) -> Tensor:
        return gaussian_levels(self.width, self.codes.device)[self.codes.int()]

    def record(self) -> Record:
        """The parameter is the width, the word the scale."""
        return Record(self.KIND, self.width, float_bits(self.scale))

    def _rest_of_body(self) -> bytes:
        return packing.pack_codes(self.codes.cpu().numpy(), self.width).tobytes()

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        """Read codes of 2 to 4 bits, all of which stand for a level."""
        width = record.parameter
        if width not in WIDTHS:
            raise WireError(f"rotated levels of {width} bits, expected 2 to 4; the upload is damaged")
        scale, seed = _rotated_scale(record.word), _take_seed(reader)
        packed = reader.take_bits(width * numel, "a tensor of rotated levels")
        return cls(torch.from_numpy(packing.unpack_codes(packed, numel, width)), scale, seed, width)


@dataclass(frozen=True, eq=False)
class MaskedNoise(OneBit):
    """Uniform noise within +-half_width, made from the seed, times a mask of {0, 1} or, `signed`, of {-1, +1}."""

    packed: Tensor
    half_width: Tensor  # float32 []
    seed: Tensor
    count: int
    signed: bool
    KIND: ClassVar[int] = 18

    @classmethod
    def of(cls, mask: Tensor, half_width: Tensor, seed: Tensor, signed: bool) -> Self:
        """Pack a mask: True is 1, False is 0 or -1."""
        return cls(packing.pack_signs(boolean(mask)), number(half_width), seed, mask.numel(), signed)

    @property
    def step(self) -> Tensor | None:
        return self.half_width

    def unpack(self) -> Tensor:
        mask = packing.unpack_signs(self.packed, self.count).to(torch.float32)
        noise = seeds.uniform(self.seed, self.count).mul_(self.half_width)
        return noise.mul_(mask.mul_(2).sub_(1) if self.signed else mask)

    def record(self) -> Record:
        """The parameter is 1 for signed masks, the word the half-width."""
        return Record(self.KIND, int(self.signed), float_bits(self.half_width))

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        if record.parameter > 1:
            raise WireError(f"mask of type {record.parameter}, expected 0 or 1; the upload is damaged")
        half_width, seed = scale_of(record.word), _take_seed(reader)
        packed = reader.take_bits(numel, "a mask").copy()
        return cls(torch.from_numpy(packed), half_width, seed, numel, bool(record.parameter))


def _take_seed(reader: Reader) -> Tensor:
    seed = int.from_bytes(reader.take(8, "a seed"), "little", signed=True)
    return torch.tensor(seed, dtype=torch.int64, device="cpu")


def _rotated_scale(word: int) -> Tensor:
    scale = scale_of(word)
    if scale >= LARGEST_SCALE:
        raise DivergedError(f"scale {float(scale)}, expected less than 2^64; the sender's training diverged")
    return scale
