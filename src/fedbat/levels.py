"""Parts with a few bits per value and one scale: evenly spaced levels, with or without zero."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedbat import packing
from fedbat.errors import DivergedError, MethodError, WireError
from fedbat.parts import Part, Reader, Record, Signs, float_bits, number, scale_of
from fedbat.transfer import sent_to

_SOME = 1024  # levels looked at for fractions: an author who forgot to round has them everywhere


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

    def fault(self) -> str:
        """A code that stands for no level."""
        most = len(self._levels()) - 1
        if self.numel and self.codes.max() > most:
            return f"level code {self.codes.max()}, expected at most {most}"
        return ""

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
        """Read one code per value, each of which stands for a level."""
        width, name = record.parameter, cls.NAME
        if width not in cls.WIDTHS:
            raise WireError(
                f"{name} of {width} bits, expected {cls.WIDTHS[0]} to {cls.WIDTHS[-1]}; the upload is damaged"
            )
        packed = reader.take_bits(width * numel, f"a tensor of {name}")
        codes = torch.from_numpy(packing.unpack_codes(packed, numel, width))
        part = cls(codes, scale_of(record.word), width)
        if fault := part.fault():
            raise WireError(f"{fault}; upload or method is at fault")
        return part


class Levels(Coded):
    """scale * j / s with integers |j| <= s = 2^(width-1) - 1."""

    KIND: ClassVar[int] = 2
    NAME, WIDTHS = "levels", range(2, 9)

    @classmethod
    def of(cls, levels: Tensor, scale: Tensor, width: int) -> Self:
        """From integer-valued levels in [-s, s]."""
        _check_width(cls, width)
        s = num_steps(width)
        codes = (_whole(levels, -s, s) + s).to(torch.uint8)
        return cls(codes, number(scale), width)

    @property
    def step(self) -> Tensor | None:
        """The distance between neighboring levels."""
        return self.scale / num_steps(self.width)

    @property
    def reach(self) -> Tensor | None:
        return self.scale

    def _levels(self) -> Tensor:
        return _unit_levels(self.width, self.codes.device)


class OddLevels(Coded):
    """scale * (2 code + 1 - 2^width): the odd multiples of a step, equally many on each side of zero."""

    KIND: ClassVar[int] = 5
    NAME, WIDTHS = "odd levels", range(2, 5)

    @classmethod
    def of(cls, codes: Tensor, step: Tensor, width: int) -> Self:
        """From integers in [0, 2^width)."""
        _check_width(cls, width)
        return cls(_whole(codes, 0, (1 << width) - 1).to(torch.uint8), number(step), width)

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

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        """Read one code per value; all levels must be finite."""
        part = super().parse(record, numel, reader)
        if not torch.isfinite(part.scale * part._top):
            step, top = float(part.scale), part._top
            raise DivergedError(
                f"step size {step}, expected {top} times it to be finite; the sender's training diverged"
            )
        return part


def odd_levels(codes: Tensor, step: Tensor, width: int) -> Part:
    """step * (2 code + 1 - 2^width) in the fewest bytes: with one bit, the part is signs and the codes are booleans."""
    return Signs.of(codes, step) if width == 1 else OddLevels.of(codes, step, width)


def _check_width(kind: type[Coded], width: int) -> None:
    if width not in kind.WIDTHS:
        raise MethodError(
            f"{kind.__name__} of width {width}, expected {kind.WIDTHS[0]} to {kind.WIDTHS[-1]} bits; for one bit use "
            "Signs, for more Dense"
        )


def _whole(levels: Tensor, low: int, high: int) -> Tensor:
    """The levels, flat, refused unless they are whole numbers in this range; on a GPU their values are not read."""
    flat = levels.reshape(-1)
    if flat.device.type == "cpu" and len(flat):
        least, most = (float(x) for x in flat.aminmax())
        if least < low or most > high:
            raise MethodError(f"levels from {least:g} to {most:g}, expected {low} to {high}; clamp or scale them")
        some = flat[:_SOME]
        if flat.is_floating_point() and ((some - some.round()).abs() > 0).any():  # false for NaN, told by the server
            raise MethodError(
                "levels with fractions, expected whole numbers: round them, at random for an unbiased mean, "
                "(x + u).floor(), or to the nearest, x.round()"
            )
    return flat


@cache
def _unit_levels(width: int, device: torch.device) -> Tensor:
    """j / s: multiplied by the scale, the outermost are exactly +-scale, and no finite scale overflows."""
    s = num_steps(width)
    # On the CPU, because on a GPU torch divides by multiplying with 1 / s.
    return (torch.arange(-s, s + 1, dtype=torch.float32, device="cpu") / s).to(device)


def num_steps(width: int) -> int:
    """s: the number of levels on each side of zero that `width` bits can tell apart."""
    return (1 << (width - 1)) - 1
