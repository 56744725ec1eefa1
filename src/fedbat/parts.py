"""What one compressed tensor can look like in an upload: dense, signs or sparse.

A part keeps its packed form; `add_to` adds what `unpack` gives. On the wire a part is an 8-byte record (kind,
parameter, one 32-bit word) in the header and a body whose length follows from the record and the tensor's size
(docs/wire-format.md). Parts may lie on any device; `body` brings them to the CPU.
"""

import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fedbat import packing
from fedbat.binarize import inf_norm
from fedbat.errors import DivergedError, MethodError, WireError
from fedbat.packing import num_bytes
from fedbat.transfer import sent_to


class Record(NamedTuple):
    """The eight bytes about a part in the header: kind u8, parameter u8, two zero bytes, word u32."""

    kind: int
    parameter: int
    word: int


class Part(ABC):
    """One compressed tensor, packed."""

    KIND: ClassVar[int]

    @property
    @abstractmethod
    def numel(self) -> int:
        """Number of elements that it stands for."""

    @property
    @abstractmethod
    def nbits(self) -> int:
        """Bits of information, including the step size but no padding."""

    @property
    def step(self) -> Tensor | None:
        """The step size sent with it, if there is one."""
        return None

    @property
    def reach(self) -> Tensor | None:
        """The largest magnitude it can express, if there is one: what lies beyond is clipped."""
        return None

    def fault(self) -> str:
        """What is wrong with it as its method made it, and what is expected; empty if nothing is."""
        return ""

    @abstractmethod
    def unpack(self) -> Tensor:
        """Exactly what the server adds: float32, flat."""

    def largest(self) -> float:
        """The largest magnitude of its values."""
        return largest(self.unpack())

    def add_to(self, total: Tensor, weight: float) -> None:
        """total += weight * unpack(), in place; `total` is flat and may lie on another device."""
        total.add_(sent_to(total.device, self.unpack()), alpha=weight)

    @abstractmethod
    def record(self) -> Record:
        """Its entry in the header."""

    @abstractmethod
    def body(self) -> bytes:
        """Its bytes after the header."""

    @classmethod
    @abstractmethod
    def parse(cls, record: Record, numel: int, reader: "Reader") -> Self:
        """Read the part that `body` wrote; raises WireError, and reads nothing beyond what the record allows."""


def largest(x: Tensor) -> float:
    """The largest magnitude in a tensor, without a copy of it."""
    return float(inf_norm(x.float())) if x.numel() else 0.0


class Kind(NamedTuple):
    """A kind of part: its type, and the parameter in its record (None: any)."""

    part: type[Part]
    parameter: int | None = 0

    def fits(self, record: Record) -> bool:
        """Whether the record announces a part of this kind."""
        return record.kind == self.part.KIND and self.parameter in (None, record.parameter)

    def __str__(self) -> str:
        which = "any parameter" if self.parameter is None else f"parameter {self.parameter}"
        return f"{self.part.KIND} ({self.part.__name__}) with {which}"


class Reader:
    """Takes bytes off a buffer and never past its end."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes."""
        left = len(self._data) - self._at
        if count > left:
            raise WireError(f"{what} needs {count} bytes, only {left} are left; the upload is cut short or damaged")
        self._at += count
        return self._data[self._at - count : self._at]

    def take_bits(self, nbits: int, what: str) -> packing.Bytes:
        """The bytes that hold the next `nbits` bits, whose padding must be zero."""
        packed = np.frombuffer(self.take(num_bytes(nbits), what), np.uint8)
        if nbits % 8 and packed[-1] >> nbits % 8:
            raise WireError(f"{what} has non-zero padding bits, expected zeros; the upload is damaged")
        return packed

    def take_floats(self, count: int, what: str) -> Tensor:
        """The next `count` float32, all finite."""
        values = np.frombuffer(self.take(4 * count, what), "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise DivergedError(
                f"{what} holds NaN or infinity, expected finite numbers; the sender's training diverged"
            )
        return torch.from_numpy(values)

    def close(self) -> None:
        """Refuse bytes that are left over."""
        if left := len(self._data) - self._at:
            raise WireError(f"{left} bytes follow the last tensor, expected none; the upload is damaged")


@dataclass(frozen=True, eq=False)
class Dense(Part):
    """Every value as float32."""

    values: Tensor  # float32 [numel]
    KIND: ClassVar[int] = 0

    @property
    def numel(self) -> int:
        return self.values.numel()

    @property
    def nbits(self) -> int:
        return 32 * self.numel

    def fault(self) -> str:
        """Values of another form would be added as they are, but sent as float32."""
        if self.values.dim() == 1 and self.values.dtype == torch.float32:
            return ""
        return f"values as {_form(self.values)}, expected them flat and float32: m.reshape(-1).float()"

    def unpack(self) -> Tensor:
        return self.values

    def record(self) -> Record:
        return Record(self.KIND, 0, 0)

    def body(self) -> bytes:
        return self.values.cpu().numpy().astype("<f4", copy=False).tobytes()

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        expect_unused("dense", parameter=record.parameter, word=record.word)
        return cls(reader.take_floats(numel, "a dense tensor"))


@dataclass(frozen=True, eq=False)
class Signs(Part):
    """scale * (+1 or -1): one bit per value and one float32."""

    packed: Tensor  # uint8 [ceil(count / 8)]
    scale: Tensor  # float32 []
    count: int
    KIND: ClassVar[int] = 1

    @classmethod
    def of(cls, positive: Tensor, scale: Tensor) -> Self:
        """Pack a boolean tensor; the scale has no dimensions."""
        return cls(packing.pack_signs(boolean(positive)), number(scale), positive.numel())

    @property
    def numel(self) -> int:
        return self.count

    @property
    def nbits(self) -> int:
        return self.count + 32

    @property
    def step(self) -> Tensor | None:
        return self.scale

    @property
    def reach(self) -> Tensor | None:
        return self.scale

    def unpack(self) -> Tensor:
        if self.packed.device.type != "cpu":  # no number is read from the device, so this can be recorded
            positive = packing.unpack_signs(self.packed, self.count)
            return positive.to(torch.float32).mul_(2).sub_(1).mul_(self.scale)
        values = torch.full((self.count,), -0.0, dtype=torch.float32, device="cpu")  # adding to it preserves even -0
        self.add_to(values, 1.0)
        return values

    def add_to(self, total: Tensor, weight: float) -> None:
        packing.add_signs(total, sent_to(total.device, self.packed), self.scale * weight)

    def record(self) -> Record:
        """The word is the step size."""
        return Record(self.KIND, 0, float_bits(self.scale))

    def body(self) -> bytes:
        return self.packed.cpu().numpy().tobytes()

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        expect_unused("signs", parameter=record.parameter)
        packed = reader.take_bits(numel, "a tensor of signs").copy()
        return cls(torch.from_numpy(packed), scale_of(record.word), numel)


@dataclass(frozen=True, eq=False)
class Sparse(Part):
    """A few float32 values at Rice-coded positions, zero elsewhere."""

    positions: Tensor  # int64 [kept], ascending
    values: Tensor  # float32 [kept]
    count: int
    KIND: ClassVar[int] = 3

    @property
    def numel(self) -> int:
        return self.count

    @property
    def nbits(self) -> int:
        """32 per kept value, plus the code of the positions and the length of its unary part."""
        width, _, unary = self._coded()
        return 32 * len(self.values) + len(self.positions) * width + 8 * len(unary) + 32

    def fault(self) -> str:
        """Positions have to ascend, for their gaps are sent."""
        at, values = self.positions, self.values
        if at.dim() != 1 or at.shape != values.shape or (at.dtype, values.dtype) != (torch.int64, torch.float32):
            return (
                f"positions as {_form(at)} and values as {_form(values)}, expected equally many int64 and float32, flat"
            )
        if len(at) and not (at[0] >= 0 and at[-1] < self.count and (at[1:] > at[:-1]).all()):
            return (
                f"positions that do not ascend within 0 to {self.count - 1}, expected flat ones, sorted: "
                "m.reshape(-1).abs().topk(k).indices.sort().values"
            )
        return ""

    def unpack(self) -> Tensor:
        dense = torch.zeros(self.count, dtype=torch.float32, device=self.values.device)
        dense[self.positions] = self.values
        return dense

    def largest(self) -> float:
        return largest(self.values)

    def add_to(self, total: Tensor, weight: float) -> None:
        total.index_add_(0, self.positions.to(total.device), self.values.to(total), alpha=weight)

    def record(self) -> Record:
        """The parameter is the Rice width, the word the number of kept values."""
        return Record(self.KIND, packing.choose_rice_width(self.positions.cpu().numpy()), len(self.values))

    def body(self) -> bytes:
        """u32 length of the unary stream, low bits, unary stream, values."""
        _, low, unary = self._coded()
        values = self.values.cpu().numpy().astype("<f4", copy=False).tobytes()
        return struct.pack("<I", len(unary)) + low.tobytes() + unary.tobytes() + values

    @classmethod
    def parse(cls, record: Record, numel: int, reader: Reader) -> Self:
        """At most `numel` values at ascending positions inside the tensor."""
        width, kept = record.parameter, record.word
        if kept > numel or width > 31:
            raise WireError(
                f"{kept} values coded with width {width}, expected at most {numel} and 31; the upload is damaged"
            )
        (unary_length,) = struct.unpack("<I", reader.take(4, "a sparse tensor"))
        most = num_bytes(kept + (numel >> width))  # the high parts of all gaps together skip at most numel >> width
        if unary_length > most:
            raise WireError(f"positions of {unary_length} bytes, expected at most {most}; the upload is damaged")
        low = reader.take_bits(kept * width, "a sparse tensor's positions")
        unary = np.frombuffer(reader.take(unary_length, "a sparse tensor's positions"), np.uint8)
        values = reader.take_floats(kept, "a sparse tensor")
        positions = packing.rice_decode(low, unary, kept, width)
        if positions is None or (kept and positions[-1] >= numel) or (unary_length and not unary[-1]):
            raise WireError(f"positions do not name exactly {kept} places among {numel}; the upload is damaged")
        return cls(torch.from_numpy(positions), values, numel)

    def _coded(self) -> tuple[int, packing.Bytes, packing.Bytes]:
        positions = self.positions.cpu().numpy()
        width = packing.choose_rice_width(positions)
        return width, *packing.rice_encode(positions, width)


def boolean(positive: Tensor) -> Tensor:
    """The signs, refused unless they are booleans."""
    if getattr(positive, "dtype", None) != torch.bool:
        raise MethodError(f"signs as {_form(positive)}, expected a boolean tensor, such as m > 0")
    return positive


def number(scale: Tensor) -> Tensor:
    """A scale or step size as parts keep it, refused unless it is a single one."""
    if not isinstance(scale, Tensor) or scale.dim():
        raise MethodError(
            f"a scale as {_form(scale)}, expected one number for the layer, a tensor without dimensions such as "
            "m.abs().mean() or torch.tensor(0.01)"
        )
    return scale.detach().to(torch.float32)


def _form(x: object) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else f"the {type(x).__name__} {x!r:.40}"


def float_bits(value: Tensor) -> int:
    """A float32 as the record's word."""
    return int.from_bytes(struct.pack("<f", float(value)), "little")


def scale_of(word: int) -> Tensor:
    """The step size or scale in the record's word."""
    (value,) = struct.unpack("<f", struct.pack("<I", word))
    if not math.isfinite(value):
        raise DivergedError(f"step size {value}, expected a finite number >= 0; the sender's training diverged")
    if math.copysign(1.0, value) < 0:
        raise WireError(f"step size {value}, expected a finite number >= 0; message or method is at fault")
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def expect_unused(kind: str, **fields: int) -> None:
    """Refuse a record whose unused fields are not zero."""
    for name, value in fields.items():
        if value:
            raise WireError(f"{name} of a {kind} tensor is {value}, expected 0; the upload is damaged")
