"""Uploads as bytes, format version 1 (docs/wire-format.md): a header, one record per compressed tensor, the bodies.

    bytes      field
    0  - 3     "FBAT"
    4          version = 1
    5  - 7     zero
    8  - 11    u32  number of compressed tensors
    12 - 19    layout hash, eight bytes
    20 - 27    u64  context: whatever sender and receiver agree on, such as the round (0 if unused)
    28 - 35    u64  length of the whole upload
    36 - 39    u32  CRC-32 of everything else
    40 - ...   8 bytes per compressed tensor, then their bodies, then the rest as it is

Integers are little-endian. What arrives is never unpickled and never trusted: `from_bytes` checks all of it, and what
it allocates is bounded by the layout's tensors and by the bytes that are there, never by a size that the sender claims.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedbat.channels import Channels
from fedbat.errors import ConfigError, DivergedError, WireError
from fedbat.layout import Entry, Layout
from fedbat.levels import Levels, OddLevels
from fedbat.packing import num_bytes
from fedbat.parts import Dense, Kind, Part, Reader, Record, Signs, Sparse
from fedbat.seeded_parts import MaskedNoise, RotatedLevels, RotatedSigns
from fedbat.streams import Tensors

MAGIC, VERSION = b"FBAT", 1
_HEADER = struct.Struct("<4sB3xI8sQQ")
_CHECKSUM = struct.Struct("<I")
_RECORD = struct.Struct("<BBHI")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_PARTS = (Dense, Signs, Levels, Sparse, Channels, OddLevels, RotatedSigns, RotatedLevels, MaskedNoise)
KINDS: dict[int, type[Part]] = {part.KIND: part for part in _PARTS}
PRIVATE = range(224, 256)  # kinds that no release assigns: parts of one's own


_OwnPart = TypeVar("_OwnPart", bound=Part)


def register(part: type[_OwnPart]) -> type[_OwnPart]:
    """Let uploads hold parts of your own, as a decorator of their class; servers have to import it, too.

    Its `KIND` is a number in `PRIVATE` that no other part has. Defined again, as in a notebook, it replaces itself.
    """
    kind: Any = getattr(part, "KIND", None)
    if kind not in PRIVATE:
        raise ConfigError(
            f"{part.__name__}.KIND is {kind}, expected {PRIVATE[0]} to {PRIVATE[-1]}, which no release assigns; set "
            f"KIND: ClassVar[int] = {PRIVATE[0]}, say"
        )
    taken = KINDS.get(kind, part)
    if (taken.__module__, taken.__qualname__) != (part.__module__, part.__qualname__):
        raise ConfigError(
            f"{part.__name__}.KIND is {kind}, which {taken.__module__}.{taken.__qualname__} has already; choose "
            f"another from {PRIVATE[0]} to {PRIVATE[-1]}"
        )
    KINDS[kind] = part
    return part


@dataclass(frozen=True)
class Payload:
    """One client's upload: a part per compressed tensor, and the rest as it is."""

    layout: Layout
    parts: dict[str, Part]
    rest: Tensors
    context: int = 0

    @property
    def nbits(self) -> int:
        """Bits of the method's own parts: the number papers quote, before headers and the dense rest."""
        return sum(part.nbits for part in self.parts.values())

    def values(self) -> Tensors:
        """Every tensor as it decodes, in the layout's shapes and types."""
        found = {name: part.unpack() for name, part in self.parts.items()} | self.rest
        return {entry.name: found[entry.name].view(entry.shape).to(entry.dtype) for entry in self.layout}

    def to_bytes(self) -> bytes:
        """The upload as it travels."""
        records, bodies = [], []
        for entry in self.layout.compressed:
            part = self.parts[entry.name]
            kind, parameter, word = part.record()
            records.append(_RECORD.pack(kind, parameter, 0, word))
            bodies.append(part.body())
        bodies += [plain_bytes(self.rest[entry.name], entry) for entry in self.layout.rest]
        pieces = records + bodies
        length = HEADER_BYTES + sum(map(len, pieces))
        header = _HEADER.pack(MAGIC, VERSION, len(records), self.layout.hash, self.context, length)
        checksum = zlib.crc32(header)
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        return b"".join([header, _CHECKSUM.pack(checksum), *pieces])

    @staticmethod
    def from_bytes(
        raw: bytes | bytearray | memoryview,
        layout: Layout,
        context: int | None = None,
        kinds: Sequence[Kind] | None = None,
    ) -> "Payload":
        """The payload that `to_bytes` wrote for this layout; WireError for anything else.

        With `context` given, an upload of another context (another round, say) is refused; with `kinds`, one that holds
        a part of another kind: a bound on step sizes is useless if a client may send dense values instead.
        """
        try:
            data = memoryview(raw).cast("B")
        except TypeError as error:
            raise WireError(
                f"got {type(raw).__name__}, expected contiguous bytes ({error}); pass upload.to_bytes(), or bytes(...)"
            ) from None
        found_context = _check_header(data, layout, context)
        reader = Reader(data[HEADER_BYTES:])
        records = reader.take(_RECORD.size * len(layout.compressed), "the header")
        parts: dict[str, Part] = {}
        for fields, entry in zip(_RECORD.iter_unpack(records), layout.compressed, strict=True):
            try:
                record = _checked_record(*fields)
                if kinds is not None:
                    _check_kind(record, kinds)
                parts[entry.name] = KINDS[record.kind].parse(record, entry.numel, reader)
            except WireError as error:
                raise type(error)(f"{entry.name}: {error}") from None
        rest = {entry.name: _rest_from_bytes(reader, entry) for entry in layout.rest}
        reader.close()
        return Payload(layout, parts, rest, found_context)


def upload_bytes(layout: Layout, body: Callable[[Entry], int]) -> int:
    """Length of an upload in which each compressed tensor has a body of the length that `body` gives."""
    parts = sum(_RECORD.size + body(entry) for entry in layout.compressed)
    return HEADER_BYTES + parts + sum(entry.nbytes for entry in layout.rest)


def dense_upload_bytes(layout: Layout) -> int:
    """Length of an upload that compresses nothing: what FedAvg sends."""
    return upload_bytes(layout, lambda entry: 4 * entry.numel)


def signs_upload_bytes(layout: Layout) -> int:
    """Length of an upload that sends signs and a step size for every compressed tensor."""
    return upload_bytes(layout, lambda entry: num_bytes(entry.numel))


def split_payloads(data: memoryview) -> Iterator[memoryview]:
    """Split payloads that follow one another by the lengths their headers announce; nothing else is checked."""
    while len(data):
        if len(data) < HEADER_BYTES:
            raise WireError(f"{len(data)} bytes are left, a payload has at least {HEADER_BYTES}; it was cut short")
        length = _HEADER.unpack_from(data)[-1]
        if not HEADER_BYTES <= length <= len(data):
            raise WireError(f"a payload announces {length} bytes, {len(data)} are left; it was cut short or damaged")
        yield data[:length]
        data = data[length:]


def plain_bytes(tensor: Tensor, entry: Entry) -> bytes:
    """A tensor that is not compressed, as it travels."""
    values = tensor.to("cpu", entry.wire_dtype).contiguous().numpy()
    return values.astype(_numpy_dtype(entry.wire_dtype), copy=False).tobytes()


def _check_header(data: memoryview, layout: Layout, context: int | None) -> int:
    if len(data) < HEADER_BYTES:
        raise WireError(f"got {len(data)} bytes, an upload has at least {HEADER_BYTES}; it was cut short")
    magic, version, num_parts, layout_hash, found_context, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"starts with {magic!r}, expected {MAGIC!r}; these bytes are not a fedbat upload")
    if version != VERSION:
        raise WireError(f"format version {version}, this release reads {VERSION}; use the same fedbat on both sides")
    if length != len(data):
        raise WireError(f"got {len(data)} bytes, the header announces {length}; it was cut short or has a tail")
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    found_checksum = zlib.crc32(data[HEADER_BYTES:], zlib.crc32(data[: _HEADER.size]))
    if checksum != found_checksum:
        raise WireError(f"checksum {found_checksum:08x}, expected {checksum:08x}; it was damaged on the way")
    if any(data[5:8]):
        raise WireError("bytes 5 to 7 of the header are not zero, as version 1 demands; the sender is not version 1")
    if layout_hash != layout.hash or num_parts != len(layout.compressed):
        raise WireError(
            f"layout {layout_hash.hex()} with {num_parts} compressed tensors, expected {layout.hash.hex()} with "
            f"{len(layout.compressed)}; sender and receiver must use the same model and the same roles, types and "
            "frozen layers included"
        )
    if context is not None and found_context != context:
        raise WireError(f"context {found_context}, expected {context}; this upload belongs to another round")
    return int(found_context)


def _checked_record(kind: int, parameter: int, unused: int, word: int) -> Record:
    if kind in PRIVATE and kind not in KINDS:
        raise WireError(
            f"part of kind {kind}, one of somebody's own that is not registered here; import the module that calls "
            "fedbat.wire.register on the receiver, too"
        )
    if kind not in KINDS:
        raise WireError(f"part of kind {kind}, this release knows {sorted(KINDS)}; the sender is newer or damaged")
    if unused:
        raise WireError(f"reserved bytes hold {unused:#x}, expected 0; the sender is not version 1, or damaged")
    return Record(kind, parameter, word)


def _check_kind(record: Record, kinds: Sequence[Kind]) -> None:
    if not any(kind.fits(record) for kind in kinds):
        got = Kind(KINDS[record.kind], record.parameter)
        raise WireError(
            f"part of kind {got}, expected {' or '.join(map(str, kinds))}; sender and receiver must use the same "
            "method and settings, and a method must list in `kinds` what it sends"
        )


@cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[np.generic]:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype.newbyteorder("<")


def _rest_from_bytes(reader: Reader, entry: Entry) -> Tensor:
    raw = reader.take(entry.nbytes, entry.name)
    if entry.dtype == torch.bool and np.frombuffer(raw, np.uint8).max(initial=0) > 1:
        raise WireError(f"{entry.name} holds bytes other than 0 and 1, expected booleans; the upload is damaged")
    dtype = _numpy_dtype(entry.wire_dtype)
    values = np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise DivergedError(
            f"{entry.name} holds NaN or infinity, expected finite numbers; the sender's training diverged"
        )
    return torch.from_numpy(values).view(entry.shape)
