"""Messages to try the wire format with: golden ones, any that hypothesis makes up, and what they mean."""

import json
import struct
import zlib
from pathlib import Path

import torch
from hypothesis import strategies as st

from fedbat.layout import Entry, Layout
from fedbat.wire import Payload
from tests.reference import decode as reference
from tests.test_parts import parts_of_size
from tests.test_rivals import seeded_parts_of_size

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
VECTORS = json.loads((GOLDEN / "vectors.json").read_text())


def tensor_dtype(name):
    return getattr(torch, name)


def seal(raw):
    """The message with the length and the checksum it ought to have: what lies behind these checks is then reached."""
    raw = bytearray(raw)
    struct.pack_into("<Q", raw, 28, len(raw))
    struct.pack_into("<I", raw, 36, zlib.crc32(raw[40:], zlib.crc32(raw[:36])))
    return bytes(raw)


def values_of(payload):
    """name -> decoded elements, as the reference decoder gives them."""
    flat = {name: part.unpack() for name, part in payload.parts.items()} | payload.rest
    return {name: tensor.reshape(-1).tolist() for name, tensor in flat.items()}


def reference_layout(layout):
    return [reference.Tensor(e.name, e.role, str(e.dtype).removeprefix("torch."), tuple(e.shape)) for e in layout]


def entry(name, shape, role="compress", dtype=torch.float32):
    return Entry(name, role, dtype, torch.Size(shape))


def layout_from(vector):
    return Layout(
        Entry(e["name"], e["role"], tensor_dtype(e["dtype"]), torch.Size(e["shape"])) for e in vector["layout"]
    )


def expected_values(vector):
    return {name: part["values"] for name, part in vector["parts"].items()} | vector["rest"]


def golden(name):
    return (GOLDEN / f"{name}.bin").read_bytes()


DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@st.composite
def rest_tensors(draw, e):
    if e.dtype == torch.bool:
        element = st.booleans()
    elif e.dtype.is_floating_point:
        element = st.floats(allow_nan=False, allow_infinity=False, width=64 if e.dtype == torch.float64 else 16)
    else:
        info = torch.iinfo(e.dtype)
        element = st.integers(info.min, info.max)
    values = draw(st.lists(element, min_size=e.numel, max_size=e.numel))
    return torch.tensor(values, dtype=e.wire_dtype).view(e.shape)


@st.composite
def layouts(draw):
    entries = []
    for i in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 5), min_size=2, max_size=3))
        entries.append(entry(f"w{i}", shape, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16]))))
    for i in range(draw(st.integers(0, 3))):
        dtype = tensor_dtype(draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        entries.append(entry(f"r{i}", shape, "dense" if dtype.is_floating_point else "max", dtype))
    return Layout(draw(st.permutations(entries)))


@st.composite
def payloads(draw):
    layout = draw(layouts())
    parts = {e.name: draw(parts_of_size(e.numel) | seeded_parts_of_size(e.numel)) for e in layout.compressed}
    rest = {e.name: draw(rest_tensors(e)) for e in layout.rest}
    return Payload(layout, parts, rest, draw(st.integers(0, 2**64 - 1)))
