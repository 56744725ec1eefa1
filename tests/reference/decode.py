"""A slow and obvious reader of wire format v1, written from docs/wire-format.md alone; the numbers are its sections."""

import hashlib
import math
import struct
import zlib
from typing import NamedTuple

FORMATS = {  # section 5
    "float16": "f",
    "bfloat16": "f",
    "float32": "f",
    "float64": "d",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "bool": "B",
}


TO_INFINITY = 2.0**128 - 2.0**103  # from there on f32 rounds to infinity


class Invalid(Exception):
    """The bytes are not a version 1 message for this layout."""


class Tensor(NamedTuple):
    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]


def decode(raw: bytes, layout: list[Tensor], context: int | None = None) -> tuple[int, dict[str, list]]:
    """(context, name -> decoded elements in row-major order), or Invalid."""
    compressed = [tensor for tensor in layout if tensor.role == "compress"]
    others = [tensor for tensor in layout if tensor.role != "compress"]

    need(len(raw) >= 40, "header is incomplete")
    need(raw[0:4] == b"FBAT", "magic")
    need(raw[4] == 1, "version")
    need(raw[5:8] == bytes(3), "bytes 5-7")
    need(u32(raw[8:12]) == len(compressed), "L")
    need(raw[12:20] == layout_hash(layout), "layout hash")
    found_context = u64(raw[20:28])
    need(context is None or context == found_context, "context")
    need(u64(raw[28:36]) == len(raw), "length")
    need(u32(raw[36:40]) == zlib.crc32(raw[:36] + raw[40:]), "checksum")

    stream = Stream(raw, 40)
    records = [stream.take(8) for _ in compressed]
    decoded = {}
    for tensor, record in zip(compressed, records, strict=True):
        need(record[2:4] == bytes(2), "record bytes 2-3")
        need(record[0] in DECODERS, "kind")
        decoded[tensor.name] = DECODERS[record[0]](record[1], record[4:8], math.prod(tensor.shape), stream)
    for tensor in others:
        decoded[tensor.name] = plain(tensor, stream)
    need(stream.at == len(raw), "bytes left")
    return found_context, decoded


def follow(raw: bytes, layout: list[Tensor], held: tuple[int, dict[str, list]] | None) -> tuple[int, dict[str, list]]:
    """Section 10: (version, model) that a message leads to, or Invalid."""
    need(len(raw) >= 56 and raw[:5] == b"FBPM\x01" and raw[6:8] == bytes(2), "header")
    start, start_hash, version, end_hash = u64(raw[8:16]), raw[16:32], u64(raw[32:40]), raw[40:56]
    need(version < 2**63, "version")
    payloads, at = [], 56
    while at < len(raw):
        need(len(raw) - at >= 40 and 40 <= u64(raw[at + 28 : at + 36]) <= len(raw) - at, "length of a payload")
        payloads.append(raw[at : at + u64(raw[at + 28 : at + 36])])
        at += len(payloads[-1])
    compressed = [tensor for tensor in layout if tensor.role == "compress"]
    others = [tensor for tensor in layout if tensor.role != "compress"]
    if raw[5] == 0:
        need(start == 0 and start_hash == bytes(16) and len(payloads) == 1, "whole model")
        model = decode(payloads[0], layout, version)[1]
    else:
        need(raw[5] == 1 and start <= version and held is not None, "steps")
        need(held[0] == start and model_hash(start, held[1], layout) == start_hash, "another model is held")
        need(len(payloads) == (version - start + 1 if version > start else 0), "number of steps")
        model, types = dict(held[1]), {tensor.name: tensor.dtype for tensor in layout}
        for number, payload in enumerate(payloads[:-1], start + 1):
            for name, change in decode(payload, compressed, number)[1].items():
                model[name] = [of_type(types[name], fl(v + q)) for v, q in zip(model[name], change, strict=True)]
        if payloads:
            model |= decode(payloads[-1], others, version)[1]
    need(model_hash(version, model, layout) == end_hash, "hash of the model")
    return version, model


def of_type(dtype: str, x: float) -> float:
    """x rounded to the nearest number of this type, ties to even."""
    if dtype == "float16":
        return struct.unpack("<e", struct.pack("<e", x))[0]
    if dtype == "bfloat16":  # the upper half of an f32
        bits = u32(struct.pack("<f", x))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return x


def model_hash(version: int, model: dict[str, list], layout: list[Tensor]) -> bytes:
    """Section 10."""
    plain_tensors = [struct.pack(f"<{len(model[t.name])}{FORMATS[t.dtype]}", *model[t.name]) for t in layout]
    content = layout_hash(layout) + struct.pack("<Q", version) + b"".join(plain_tensors)
    return hashlib.blake2b(content, digest_size=16).digest()


def layout_hash(layout: list[Tensor]) -> bytes:
    """Section 2."""
    text = ""
    for tensor in layout:
        sizes = ",".join(str(size) for size in tensor.shape)
        text += tensor.role + "\t" + tensor.dtype + "\t" + sizes + "\t" + tensor.name + "\n"
    return hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()


def dense(parameter: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    need(parameter == 0 and word == bytes(4), "unused fields of dense")
    return stream.floats(d)


def signs(parameter: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    need(parameter == 0, "parameter of signs")
    step = positive(word)
    return [step if bit else -step for bit in stream.bits(d)]


def levels(b: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    need(2 <= b <= 8, "width of levels")
    scale, s = positive(word), 2 ** (b - 1) - 1
    values = []
    for code in stream.codes(d, b):
        need(code != 2**b - 1, "unused code")
        values.append(fl(fl((code - s) / s) * scale))
    return values


def odd_levels(b: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    need(2 <= b <= 4, "width of odd levels")
    step = positive(word)
    need((2**b - 1) * step < TO_INFINITY, "step of odd levels")
    return [fl((2 * code + 1 - 2**b) * step) for code in stream.codes(d, b)]


def sparse(r: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    k = u32(word)
    need(k <= d and r <= 31, "k or r")
    length = u32(stream.take(4))
    need(length <= math.ceil((k + d // 2**r) / 8), "U")
    low = stream.codes(k, r)
    unary_bytes = stream.take(length)
    need(length == 0 or unary_bytes[-1] != 0, "unary stream is too long")
    unary = all_bits(unary_bytes)
    need(sum(unary) == k, "ones in the unary stream")
    values = [0.0] * d
    position, at = -1, 0
    for part, value in zip(low, stream.floats(k), strict=True):
        q = 0
        while unary[at] == 0:
            q, at = q + 1, at + 1
        at += 1
        position += 1 + q * 2**r + part
        need(position < d, "position")
        values[position] = value
    return values


def channels(b: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    c = u32(word)
    need(2 <= b <= 8, "width of channels")
    need(c == 0 if d == 0 else c > 0 and d % c == 0, "number of channels")
    scales = [positive(stream.take(4)) for _ in range(c)]
    top = 2**b - 1
    table = [fl((2 * k - top) / top) for k in range(top + 1)] if b > 4 else both_signs(POSITIVE_LEVELS[b])
    need(all(scale * table[-1] < TO_INFINITY for scale in scales), "scale of channels")
    return [fl(scales[i // (d // c)] * table[code]) for i, code in enumerate(stream.codes(d, b))]


def rotated_signs(parameter: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    need(parameter == 0, "parameter of rotated signs")
    scale = rotated_scale(word)
    seed = u64(stream.take(8))
    return [fl(x * scale) for x in rotate_back([1.0 if bit else -1.0 for bit in stream.bits(d)], seed)]


def rotated_levels(b: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    need(b in POSITIVE_LEVELS, "width of rotated levels")
    scale = rotated_scale(word)
    seed = u64(stream.take(8))
    table = both_signs(POSITIVE_LEVELS[b])
    return [fl(x * scale) for x in rotate_back([table[code] for code in stream.codes(d, b)], seed)]


def masked_noise(parameter: int, word: bytes, d: int, stream: "Stream") -> list[float]:
    need(parameter <= 1, "parameter of masked noise")
    a = positive(word)
    seed = u64(stream.take(8))
    values = []
    for i, bit in enumerate(stream.bits(d)):
        k = struct.unpack("<4h", struct.pack("<Q", random_word(seed, i // 4)))[i % 4]
        noise = fl((k + 0.5) / 2**15 * a)
        values.append(noise if bit else -noise if parameter else 0.0)
    return values


POSITIVE_LEVELS = {
    2: [0.452780038, 1.51041758],
    3: [0.24509418, 0.756005287, 1.34390926, 2.15194559],
    4: [0.128395036, 0.388048291, 0.656759143, 0.942340434, 1.25623119, 1.6180464, 2.06901717, 2.73258948],
}


def both_signs(levels: list[float]) -> list[float]:
    return [fl(level) for level in [-level for level in levels[::-1]] + levels]


def rotate_back(y: list[float], seed: int) -> list[float]:
    d, n = len(y), 1
    if d == 0:
        return y
    while 2 * n <= d:
        n *= 2
    c, z = fl(n**-0.5), [fl(value) for value in y]
    for start, w in ((d - n, math.ceil(n / 64)), (0, 0)):
        h = 1
        while h < n:
            for j in range(n):
                if not j & h:
                    a, b = z[start + j], z[start + j + h]
                    z[start + j], z[start + j + h] = fl(a + b), fl(a - b)
            h *= 2
        for j in range(n):
            bit = random_word(seed, w + j // 64) >> (j % 64) & 1
            z[start + j] = fl(z[start + j] * c) * (1 if bit else -1)
    collected = list(z)
    if d > n:
        columns = math.isqrt(d)
        rows = d // columns
        for i in range(columns):
            for j in range(rows):
                collected[j * columns + i] = z[i * rows + j]
    return collected


def random_word(seed: int, i: int) -> int:
    modulus = 2**64
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) % modulus
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % modulus
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % modulus
    return z ^ (z >> 31)


def rotated_scale(word: bytes) -> float:
    scale = positive(word)
    need(scale < 2**64, "scale of rotated signs or levels")
    return scale


DECODERS = {
    0: dense, 1: signs, 2: levels, 3: sparse, 4: channels, 5: odd_levels,
    16: rotated_signs, 17: rotated_levels, 18: masked_noise,
}  # fmt: skip


def plain(tensor: Tensor, stream: "Stream") -> list:
    """Section 5."""
    form, d = FORMATS[tensor.dtype], math.prod(tensor.shape)
    values = list(struct.unpack(f"<{d}{form}", stream.take(d * struct.calcsize("<" + form))))
    if form in "fd":
        need(all(math.isfinite(value) for value in values), "NaN or infinity")
    if tensor.dtype == "bool":
        need(all(value in (0, 1) for value in values), "boolean")
        values = [value == 1 for value in values]
    return values


class Stream:
    """The bytes from `at` on."""

    def __init__(self, raw: bytes, at: int) -> None:
        self.raw, self.at = raw, at

    def take(self, count: int) -> bytes:
        need(self.at + count <= len(self.raw), "bytes missing")
        self.at += count
        return self.raw[self.at - count : self.at]

    def bits(self, count: int) -> list[int]:
        bits = all_bits(self.take((count + 7) // 8))
        need(not any(bits[count:]), "padding")
        return bits[:count]

    def codes(self, count: int, width: int) -> list[int]:
        bits = self.bits(count * width)
        return [sum(bits[width * i + j] * 2**j for j in range(width)) for i in range(count)]

    def floats(self, count: int) -> list[float]:
        values = list(struct.unpack(f"<{count}f", self.take(4 * count)))
        need(all(math.isfinite(value) for value in values), "NaN or infinity")
        return values


def positive(word: bytes) -> float:
    """A step or scale."""
    (value,) = struct.unpack("<f", word)
    need(math.isfinite(value) and math.copysign(1.0, value) > 0, "step size")
    return value


def all_bits(data: bytes) -> list[int]:
    return [byte >> n & 1 for byte in data for n in range(8)]


def u32(data: bytes) -> int:
    return struct.unpack("<I", data)[0]


def u64(data: bytes) -> int:
    return struct.unpack("<Q", data)[0]


def fl(x: float) -> float:
    """x rounded to float32; the double in between changes nothing for one product or quotient of two float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Invalid(what)
