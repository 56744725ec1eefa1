"""Parts with a few bits per value and one scale: evenly spaced levels, with or without zero."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedbat import packing
from fedbat.errors import DivergedError, WireError
from fedbat.parts import Part, Reader, Record, Signs, float_bits, scale_of
from fedbat.transfer import sent_to


@dataclass(frozen=True, eq=False)
class Coded(Part):
    """scale * level[code]: `width` bits per value and one float32."""

    codes: Tensor  # uint8 [numel], 0 for the lowest level
    scale: Tensor  # float32 []
    width: int
    NAME: ClassVar[str]
    WIDTHS: ClassVar[range]

    @property
    def numel(self) -> int:
        return self.codes.numel()

    @property
    def nbits(self) -> int:
        return self.width * self.numel + 32

    @abstractmethod
    def _levels(self) -> Tensor:
        """What the codes stand for at scale 1, ascending: float32, on the device of the codes."""

    def unpack(self) -> Tensor:
        return packing.look_up(self._values(), self.codes)

    def add_to(self, total: Tensor, weight: float) -> None:
        codes = sent_to(total.device, self.codes)
        packing.add_codes(total, codes, sent_to(total.device, self._values() * weight))

    def _values(self) -> Tensor:
        return self._levels() * self.scale.to(self.codes.device)

    def record(self) -> Record:
        """The parameter is the width, the word the scale."""
        return Record(self.KIND, self.width, float_bits(self.scale))

    def body(self) -> bytes:
        return packing.pack_codes(self.codes.cpu().numpy(), self.width).tobytes()

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        """Read one code per value; `_check` refuses what no sender means."""
        width, name = record.parameter, cls.NAME
        if width not in cls.WIDTHS:
            raise WireError(
                f"{name} of {width} bits, expected {cls.WIDTHS[0]} to {cls.WIDTHS[-1]}; the upload is damaged"
            )
        packed = reader.take_bits(width * numel, f"a tensor of {name}")
        codes = torch.from_numpy(packing.unpack_codes(packed, numel, width))
        part = cls(codes, scale_of(record.word), width)
        part._check()
        return part

    @abstractmethod
    def _check(self) -> None:
        """Raise WireError for codes or scales that no sender means."""


class Levels(Coded):
    """scale * j / s with integers |j| <= s = 2^(width-1) - 1."""

    KIND: ClassVar[int] = 2
    NAME, WIDTHS = "levels", range(2, 9)

    @classmethod
    def of(cls, levels: Tensor, scale: Tensor, width: int) -> Self:
        """From integer-valued levels in [-s, s]."""
        assert width in cls.WIDTHS, width
        codes = (levels.reshape(-1) + num_steps(width)).to(torch.uint8)
        return cls(codes, scale.detach().to(torch.float32), width)

    @property
    def step(self) -> Tensor | None:
        """The distance between neighboring levels."""
        return self.scale / num_steps(self.width)

    @property
    def reach(self) -> Tensor | None:
        return self.scale

    def _levels(self) -> Tensor:
        return _unit_levels(self.width, self.codes.device)

    def _check(self) -> None:
        """The code 2^width - 1 stands for no level."""
        most = 2 * num_steps(self.width)
        if self.numel and self.codes.max() > most:
            raise WireError(f"level code {self.codes.max()}, expected at most {most}; upload or method is at fault")


class OddLevels(Coded):
    """scale * (2 code + 1 - 2^width): the odd multiples of a step, equally many on each side of zero."""

    KIND: ClassVar[int] = 5
    NAME, WIDTHS = "odd levels", range(2, 5)

    @classmethod
    def of(cls, codes: Tensor, step: Tensor, width: int) -> Self:
        """From integers in [0, 2^width)."""
        assert width in cls.WIDTHS, width
        return cls(codes.reshape(-1).to(torch.uint8), step.detach().to(torch.float32), width)

    @property
    def step(self) -> Tensor | None:
        """Half the distance between neighboring levels."""
        return self.scale

    @property
    def reach(self) -> Tensor | None:
        return self.scale * self._top

    @property
    def _top(self) -> int:
        return (1 << self.width) - 1

    def _levels(self) -> Tensor:
        top = self._top
        return torch.arange(-top, top + 1, 2, dtype=torch.float32, device=self.codes.device)

    def _check(self) -> None:
        """Every code stands for a level; all levels must be finite."""
        if not torch.isfinite(self.scale * self._top):
            step, top = float(self.scale), self._top
            raise DivergedError(
                f"step size {step}, expected {top} times it to be finite; the sender's training diverged"
            )


def odd_levels(codes: Tensor, step: Tensor, width: int) -> Part:
    """step * (2 code + 1 - 2^width) in the fewest bytes: with one bit, the part is signs and the codes are booleans."""
    return Signs.of(codes, step) if width == 1 else OddLevels.of(codes, step, width)


@cache
def _unit_levels(width: int, device: torch.device) -> Tensor:
    """j / s: multiplied by the scale, the outermost are exactly +-scale, and no finite scale overflows."""
    s = num_steps(width)
    # On the CPU, because on a GPU torch divides by multiplying with 1 / s.
    return (torch.arange(-s, s + 1, dtype=torch.float32, device="cpu") / s).to(device)


def num_steps(width: int) -> int:
    """s: the number of levels on each side of zero that `width` bits can tell apart."""
    return (1 << (width - 1)) - 1
