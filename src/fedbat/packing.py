"""Bits into bytes and back: signs, b-bit codes, and sorted positions by Rice coding.

Element i's bit j is bit `i * b + j` of the stream, and bit n of a stream is bit `n % 8` (least significant first) of
byte `n // 8`. Unused bits of the last byte are zero.
"""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]

_BLOCK = 1 << 16  # bytes or codes worked on at a time: what stays in cache
_LANES = ((8, 0x0001_0001_0001_0001), (16, 0x0000_0001_0000_0001), (32, 1))  # bits, and a one in every second lane


def num_bytes(nbits: int) -> int:
    """Bytes that hold `nbits` bits."""
    return -(-nbits // 8)


def pack_signs(positive: Tensor) -> Tensor:
    """A boolean tensor as one bit per element, uint8 on the same device."""
    flat = positive.reshape(-1)
    if flat.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(num_bytes(flat.numel()), 8)
    return (padded.to(torch.uint8) << _bit_numbers(flat.device)).sum(1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits as booleans."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little").view(np.bool_))
    bits = (packed[:, None] >> _bit_numbers(packed.device)) & 1
    return bits.view(-1)[:count].bool()


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


@cache
def signs_of_byte() -> npt.NDArray[np.float32]:
    """[256, 8]: the eight signs -1.0 / +1.0 that each byte stands for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return bits.astype(np.float32) * 2 - 1


def add_signs(total: Tensor, packed: Tensor, scale: Tensor | float) -> None:
    """total += scale * (+1 or -1), in place, `total` flat.

    A byte is looked up in a table of its eight scaled signs, a block at a time so that the block stays in cache:
    about as fast as adding a dense vector.
    """
    if total.device.type != "cpu":
        _add_by_table(total, packed, signs_on(total.device) * scale)
        return
    table = signs_of_byte() * np.float32(scale)
    sums, bytes_ = total.numpy(), packed.numpy()
    whole = total.numel() // 8
    scratch = np.empty((min(_BLOCK, max(whole, 1)), 8), np.float32)
    eights = sums[: whole * 8].reshape(-1, 8)
    for start in range(0, whole, _BLOCK):
        rows = eights[start : start + _BLOCK]
        # mode="clip" skips the bounds check; every uint8 is in range.
        rows += np.take(table, bytes_[start : start + len(rows)], axis=0, out=scratch[: len(rows)], mode="clip")
    if total.numel() % 8:
        sums[whole * 8 :] += table[bytes_[whole]][: total.numel() % 8]


def _add_by_table(total: Tensor, packed: Tensor, table: Tensor) -> None:
    total.add_(table[packed.int()].view(-1)[: total.numel()])


@cache
def signs_on(device: torch.device) -> Tensor:
    """`signs_of_byte` on a device."""
    return torch.from_numpy(signs_of_byte()).to(device)


def pack_codes(codes: npt.NDArray[np.unsignedinteger], width: int) -> Bytes:
    """Unsigned integers below 2^width as `width` bits each."""
    if 0 < width <= 8:
        return _pack_bytes(codes, width)
    bytes_ = codes.astype(codes.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(len(codes), codes.itemsize)
    bits = np.unpackbits(bytes_, axis=1, bitorder="little")[:, :width]
    return np.packbits(bits, bitorder="little")


def unpack_codes(packed: Bytes, count: int, width: int) -> npt.NDArray[np.unsignedinteger]:
    """The first `count` integers of `width` bits, as uint8 where that holds them, else uint32.

    A block at a time (blocks begin on whole bytes): beyond the result this takes no memory that grows with `count`.
    """
    if width in (1, 2, 4, 8):
        return _unpack_whole(packed[: num_bytes(count * width)], count, width)
    codes: npt.NDArray[np.unsignedinteger] = np.empty(count, np.uint8 if width <= 8 else np.uint32)
    place_values = (1 << np.arange(width)).astype(codes.dtype)
    for start in range(0, count, _BLOCK):
        rows, left = codes[start : start + _BLOCK], packed[start * width // 8 :]
        if 0 < width <= 8:
            rows[:] = _unpack_bytes(left[: num_bytes(len(rows) * width)], width)[: len(rows)]
        else:
            bits = np.unpackbits(left, count=len(rows) * width, bitorder="little")
            np.matmul(bits.reshape(len(rows), width), place_values, out=rows)
    return codes


def _pack_bytes(codes: npt.NDArray[np.unsignedinteger], width: int) -> Bytes:
    """Eight codes of a byte each are one 64-bit number, in which neighbors close up, then pairs, then fours."""
    packed = np.empty((-(-len(codes) // 8), width), np.uint8)
    for start in range(0, len(packed), _BLOCK // 8):
        rows = packed[start : start + _BLOCK // 8]
        lanes = np.zeros(8 * len(rows), np.uint8)
        some = codes[8 * start : 8 * (start + len(rows))]
        lanes[: len(some)] = some
        eights = lanes.view("<u8")
        for bits, ones in _LANES:
            low = _low(bits, ones)
            eights = (eights & low) | (eights >> bits & low) << bits * width // 8
        rows[:] = eights.view(np.uint8).reshape(-1, 8)[:, :width]
    return packed.reshape(-1)[: num_bytes(len(codes) * width)]


def _unpack_bytes(packed: Bytes, width: int) -> Bytes:
    """The inverse of `_pack_bytes`, with up to seven zeros at the end."""
    whole, tail = divmod(len(packed), width)
    lanes = np.zeros((whole + (tail > 0), 8), np.uint8)
    lanes[:whole, :width] = packed[: whole * width].reshape(-1, width)
    lanes[whole:, :tail] = packed[whole * width :]
    eights = lanes.view("<u8")
    for bits, ones in reversed(_LANES):
        used = bits * width // 8
        low = _low(used, ones)
        eights = (eights & low) | (eights >> used & low) << bits
    return eights.view(np.uint8).reshape(-1)


def _unpack_whole(packed: Bytes, count: int, width: int) -> Bytes:
    """For widths at which no code spans two bytes: each byte is looked up, and its codes are written as one number."""
    codes = np.empty((len(packed), 8 // width), np.uint8)
    table, numbers = _codes_of_byte(width), codes.view(f"u{8 // width}")[:, 0]
    for start in range(0, len(packed), _BLOCK):
        rows = slice(start, start + _BLOCK)
        np.take(table, packed[rows], out=numbers[rows], mode="clip")
    return codes.reshape(-1)[:count]


@cache
def _codes_of_byte(width: int) -> npt.NDArray[np.unsignedinteger]:
    """[256]: the codes in a byte, a byte each, read as one number."""
    codes = np.arange(256)[:, None] >> np.arange(0, 8, width) & (1 << width) - 1
    return codes.astype(np.uint8).view(f"u{8 // width}")[:, 0]


def _low(bits: int, ones: int) -> np.uint64:
    """A mask of the lowest `bits` bits in every second lane."""
    return np.uint64(((1 << bits) - 1) * ones)


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """table[codes] for uint8 codes that are all in range; on a CPU without the memory that wide indices would take."""
    if codes.device.type != "cpu":
        return table[codes.int()]
    values = torch.empty(codes.shape, dtype=table.dtype, device="cpu")
    for start in range(0, len(codes), _BLOCK):
        rows = slice(start, start + _BLOCK)
        # mode="clip" skips the bounds check.
        np.take(table.numpy(), codes.numpy()[rows], out=values.numpy()[rows], mode="clip")
    return values


def add_codes(total: Tensor, codes: Tensor, table: Tensor) -> None:
    """total += table[codes], in place, for uint8 codes that are all in range; all on one device, total and codes flat.

    Two codes are read as one number and looked up in a table of pairs: about as fast as adding signs.
    """
    if total.device.type != "cpu" or len(codes) < 512 * len(table):  # for few codes the table of pairs is not worth it
        total.add_(look_up(table, codes))
        return
    single = table.numpy()
    pairs = np.zeros((len(single), 256, 2), np.float32)
    pairs[:, : len(single), 0], pairs[..., 1] = single, single[:, None]
    flat, sums, even = pairs.reshape(-1, 2), total.numpy(), len(codes) & ~1
    twos, numbers = sums[:even].reshape(-1, 2), codes.numpy()[:even].view("<u2")
    scratch = np.empty((_BLOCK // 2, 2), np.float32)
    for start in range(0, len(numbers), len(scratch)):
        rows = twos[start : start + len(scratch)]
        rows += np.take(flat, numbers[start : start + len(rows)], axis=0, out=scratch[: len(rows)], mode="clip")
    sums[even:] += single[codes.numpy()[even:]]


def choose_rice_width(positions: Integers) -> int:
    """The remainder width for which these positions take the fewest bits."""
    gaps = _gaps(positions)
    guess = int(np.log2(gaps.mean() + 1)) if len(gaps) else 0
    return min(range(max(guess - 2, 0), guess + 2), key=lambda width: _rice_bits(gaps, width))


def rice_encode(positions: Integers, width: int) -> tuple[Bytes, Bytes]:
    """Ascending positions as gaps: (low `width` bits of each gap, the rest in unary).

    A gap is the number of positions skipped; its high part q is written as q zeros and a one. For random positions
    this takes within 5 % of their entropy while at most 60 % are taken, and never more than one bit per place.
    """
    gaps = _gaps(positions)
    ends = np.cumsum((gaps >> width) + 1) - 1
    unary = np.zeros(int(ends[-1]) + 1 if len(ends) else 0, np.uint8)
    unary[ends] = 1
    low = (gaps & ((1 << width) - 1)).astype(np.uint32)
    return pack_codes(low, width), np.packbits(unary, bitorder="little")


def rice_decode(low: Bytes, unary: Bytes, count: int, width: int) -> Integers | None:
    """The positions, or None when the unary stream does not hold exactly `count` ones."""
    bits = np.unpackbits(unary, bitorder="little")
    if np.count_nonzero(bits) != count:
        return None
    # In place, since a hostile sender may keep every position.
    positions = np.flatnonzero(bits)
    positions -= np.arange(count)  # zeros before one number i: the high parts up to i
    positions <<= width
    positions += np.cumsum(unpack_codes(low, count, width).astype(np.int64))
    positions += np.arange(count)
    return positions


def _gaps(positions: Integers) -> Integers:
    return np.diff(positions, prepend=-1) - 1


def _rice_bits(gaps: Integers, width: int) -> int:
    return len(gaps) * (width + 1) + int((gaps >> width).sum())
