"""Wire format v1 (check 8): golden bytes, an independent reader, sizes, and what must be refused."""

import gc
import json
import math
import pickle
import re
import struct
import tracemalloc
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import make_golden
from torch import nn

from fedbat.channels import WIDTHS
from fedbat.errors import WireError
from fedbat.layout import Entry, Layout, layout_of, tensors_of
from fedbat.levels import Levels
from fedbat.methods import make_method
from fedbat.models import build_model
from fedbat.parts import KINDS, Dense, Signs, Sparse
from fedbat.server import Aggregator
from fedbat.wire import HEADER_BYTES, Payload, dense_upload_bytes
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


# Golden vectors.


def layout_from(vector):
    return Layout(
        Entry(e["name"], e["role"], tensor_dtype(e["dtype"]), torch.Size(e["shape"])) for e in vector["layout"]
    )


def payload_from(vector):
    layout = layout_from(vector)
    parts = {name: make_golden.part_of(**part) for name, part in vector["parts"].items()}
    rest = {e.name: torch.tensor(vector["rest"][e.name], dtype=e.dtype).view(e.shape) for e in layout.rest}
    return Payload(layout, parts, rest, vector["context"])


def expected_values(vector):
    return {name: part["values"] for name, part in vector["parts"].items()} | vector["rest"]


def golden(name):
    return (GOLDEN / f"{name}.bin").read_bytes()


def test_golden_vectors_cover_every_kind_and_dtype():
    assert {f"{name}.bin" for name in VECTORS} == {path.name for path in GOLDEN.glob("*.bin")}
    parts = [part for vector in VECTORS.values() for part in vector["parts"].values()]
    seeded = {"rotated-signs", "rotated-levels", "masked-noise"}
    plain = {"dense", "signs", "levels", "sparse", "odd-levels", "channels"}
    assert {part["kind"] for part in parts} == plain | seeded
    assert {part["width"] for part in parts if part["kind"] == "channels"} == set(WIDTHS)
    for kind in ("rotated-levels", "odd-levels"):
        assert {part["width"] for part in parts if part["kind"] == kind} == {2, 3, 4}
    assert {part["width"] for part in parts if part["kind"] == "levels"} == set(range(2, 9))
    assert {len(part["values"]) % 8 for part in parts if part["kind"] == "signs"} == set(range(8))
    assert any(part["kind"] == "sparse" and part["values"] and not part["positions"] for part in parts)
    dtypes = {e["dtype"] for vector in VECTORS.values() for e in vector["layout"]}
    assert dtypes >= {"bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64"}


@pytest.mark.parametrize("name", VECTORS)
def test_encoder_writes_the_golden_bytes(name):
    assert payload_from(VECTORS[name]).to_bytes() == golden(name)


@pytest.mark.parametrize("name", VECTORS)
def test_decoder_reads_the_golden_bytes(name):
    vector = VECTORS[name]
    layout = layout_from(vector)
    assert layout.hash.hex() == vector["layout_hash"]
    payload = Payload.from_bytes(golden(name), layout, vector["context"])
    assert payload.context == vector["context"]
    assert values_of(payload) == expected_values(vector)
    for e in layout.rest:
        assert payload.rest[e.name].shape == e.shape and payload.rest[e.name].dtype == e.wire_dtype


@pytest.mark.parametrize("name", VECTORS)
def test_reference_decoder_reads_the_golden_bytes(name):
    vector = VECTORS[name]
    layout = reference_layout(layout_from(vector))
    assert reference.layout_hash(layout).hex() == vector["layout_hash"]
    assert reference.decode(golden(name), layout, vector["context"]) == (vector["context"], expected_values(vector))


def test_script_writes_the_golden_files(tmp_path):
    make_golden.main(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in GOLDEN.iterdir()}


def test_documented_bytes_are_the_golden_bytes():
    text = (ROOT / "docs" / "wire-format.md").read_text()
    block = {kind: re.search(rf"```{kind}\n(.*?)```", text, re.S)[1] for kind in ("hexdump", "layout", "rice")}
    dumped = "".join(line[2:] for line in block["hexdump"].splitlines())
    assert bytes.fromhex(dumped) == golden("example")
    lines = [line.split("\t") for line in block["layout"].splitlines()]
    assert lines == [
        [e["role"], e["dtype"], ",".join(map(str, e["shape"])), e["name"]] for e in VECTORS["example"]["layout"]
    ]
    assert f"hash `{bytes.fromhex(VECTORS['example']['layout_hash']).hex(' ')}`" in text
    assert bytes.fromhex(block["rice"]) == payload_from(VECTORS["sparse"]).parts["rice-example"].body()
    assert f"{zlib.crc32(b'123456789'):08X}" in text


# The twin: an independent reader agrees on all messages, good and bad.

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


@given(payloads())
@settings(deadline=None)
def test_bytes_and_back_is_the_identity_and_the_twin_agrees(payload):
    raw = payload.to_bytes()
    again = Payload.from_bytes(raw, payload.layout)
    assert again.to_bytes() == raw and again.nbits == payload.nbits
    assert values_of(again) == values_of(payload)
    assert list(again.parts) == [e.name for e in payload.layout.compressed]
    assert reference.decode(raw, reference_layout(payload.layout)) == (payload.context, values_of(payload))


@given(payloads(), st.data())
@settings(deadline=None, max_examples=300)
def test_decoders_agree_on_what_is_damaged(payload, data):
    """Damage behind a right length and checksum: both readers refuse, or both read the same."""
    raw = bytearray(payload.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.integers(0, len(raw) - 1))
        raw[where] = data.draw(st.integers(0, 255) | st.sampled_from([0, 1, raw[where] ^ 1, raw[where] ^ 128, 255]))
    cut = data.draw(st.integers(HEADER_BYTES, len(raw) + 2))
    damaged = seal((raw + b"\0\0")[:cut] if data.draw(st.booleans()) else raw)
    try:
        expected = reference.decode(damaged, reference_layout(payload.layout))
    except reference.Invalid:
        with pytest.raises(WireError):
            Payload.from_bytes(damaged, payload.layout)
        return
    found = Payload.from_bytes(damaged, payload.layout)
    assert (found.context, values_of(found)) == expected


@pytest.mark.parametrize("name", ["example", "mixed", "sparse", "channels"])
def test_every_single_bit_behind_the_checksum(name):
    layout, raw = layout_from(VECTORS[name]), golden(name)
    outcomes = {True: 0, False: 0}
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        flipped = seal(flipped)
        try:
            expected = reference.decode(flipped, reference_layout(layout))
        except reference.Invalid:
            expected = None
            with pytest.raises(WireError):
                Payload.from_bytes(flipped, layout)
        else:
            found = Payload.from_bytes(flipped, layout)
            assert (found.context, values_of(found)) == expected
        outcomes[expected is None] += 1
    assert all(outcomes.values())  # some bits are values, some are structure


# Sizes.

IMAGES = {"fmnist": ((1, 28, 28), 10), "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100)}


def signs_payload(model):
    layout = layout_of(model)
    live = tensors_of(model, layout)
    parts = {e.name: Signs.of(live[e.name] > 0, torch.tensor(0.01)) for e in layout.compressed}
    return Payload(layout, parts, {e.name: live[e.name] for e in layout.rest})


@pytest.mark.parametrize("images", IMAGES)
@pytest.mark.parametrize("name", ["cnn", "resnet10", "resnet10-narrow"])
def test_size_law_on_the_models_of_the_paper(name, images):
    model = build_model(name, *IMAGES[images], seed=0)
    payload = signs_payload(model)
    layout, raw = payload.layout, payload.to_bytes()
    weights = [p.numel() for p in model.parameters() if p.dim() > 1]
    num_layers = len(weights)
    batchnorm = sum(t.numel() * t.element_size() for k, t in model.state_dict().items() if "num_batches" in k)
    batchnorm += sum(4 * t.numel() for t in model.state_dict().values() if t.dim() == 1)
    packed = sum(math.ceil(d / 8) for d in weights) + 4 * num_layers
    assert sum(len(part.body()) for part in payload.parts.values()) + 4 * num_layers == packed
    assert len(raw) == packed + batchnorm + HEADER_BYTES + 4 * num_layers
    assert HEADER_BYTES + 8 * num_layers <= 64 + 8 * num_layers
    assert payload.nbits == sum(weights) + 32 * num_layers
    fp32 = 4 * sum(weights) + batchnorm
    assert dense_upload_bytes(layout) == fp32 + HEADER_BYTES + 8 * num_layers
    assert 27.6 <= fp32 / len(raw) <= 32
    assert 31.9 <= 4 * sum(weights) / packed <= 32


def test_no_float_tensor_of_weight_shape_hides_in_a_signs_payload():
    payload = signs_payload(build_model("cnn", *IMAGES["fmnist"], seed=0))
    for held in (payload, Payload.from_bytes(payload.to_bytes(), payload.layout)):
        for part in held.parts.values():
            held_tensors = [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
            assert sum(t.numel() * t.element_size() for t in held_tensors) == math.ceil(part.numel / 8) + 4
            assert all(t.numel() == 1 for t in held_tensors if t.is_floating_point())


@given(payloads())
@settings(deadline=None)
def test_header_budget(payload):
    bodies = sum(len(part.body()) for part in payload.parts.values())
    rest = sum(e.nbytes for e in payload.layout.rest)
    assert len(payload.to_bytes()) - bodies - rest <= 64 + 8 * len(payload.parts)


@given(layouts())
@settings(deadline=None)
def test_dense_upload_bytes_is_the_length_of_a_dense_upload(layout):
    parts = {e.name: Dense(torch.zeros(e.numel)) for e in layout.compressed}
    rest = {e.name: torch.zeros(e.shape, dtype=e.dtype) for e in layout.rest}
    assert len(Payload(layout, parts, rest).to_bytes()) == dense_upload_bytes(layout)


# What goes in.


def test_channels_last_models_send_the_same_bytes():
    model = build_model("cnn", *IMAGES["fmnist"], seed=0)
    layout = layout_of(model, {"4.weight": "dense"})  # one convolution among the plain tensors

    def raw(model):
        live = tensors_of(model, layout)
        parts = {e.name: Signs.of(live[e.name] > 0, torch.tensor(0.01)) for e in layout.compressed}
        return Payload(layout, parts, {e.name: live[e.name] for e in layout.rest}).to_bytes()

    expected = raw(model)
    model.to(memory_format=torch.channels_last)
    assert not model[4].weight.is_contiguous() and not model[8].weight.is_contiguous()
    assert raw(model) == expected


def test_halves_and_foreign_dtypes_are_converted_on_the_way_out():
    layout = Layout([entry("a", [2], "dense", torch.bfloat16), entry("b", [1], "max", torch.int32)])
    rest = {"a": torch.tensor([1.0, 2.5], dtype=torch.bfloat16), "b": torch.tensor([7])}
    found = Payload.from_bytes(Payload(layout, {}, rest).to_bytes(), layout).rest
    assert found["a"].dtype == torch.float32 and found["a"].tolist() == [1.0, 2.5]
    assert found["b"].dtype == torch.int32 and found["b"].tolist() == [7]


def test_the_default_device_of_torch_does_not_matter():
    vector = VECTORS["mixed"]
    layout = layout_from(vector)
    with torch.device("meta"):
        payload = Payload.from_bytes(golden("mixed"), layout)
        assert values_of(payload) == expected_values(vector)
        assert payload.to_bytes() == golden("mixed")


def test_any_contiguous_buffer_will_do_and_is_not_kept():
    vector = VECTORS["mixed"]
    layout, raw = layout_from(vector), golden("mixed")
    mutable = bytearray(raw)
    wide = np.frombuffer(raw + bytes(-len(raw) % 4), np.uint32)
    buffers = [
        raw,
        mutable,
        memoryview(raw),
        memoryview(b"xx" + raw + b"x")[2:-1],
        memoryview(wide).cast("B")[: len(raw)],
    ]
    payloads = [Payload.from_bytes(buffer, layout) for buffer in buffers]
    mutable[:] = bytes(len(mutable))  # also shows that no view of it is left: a bytearray in use could not shrink
    mutable.clear()
    for payload in payloads:
        assert values_of(payload) == expected_values(vector)


# What is refused.

SMALL = Layout(
    [
        entry("conv.weight", [3, 3]),
        entry("bias", [2], "dense"),
        entry("mask", [3], "max", torch.bool),
        entry("double", [1], "dense", torch.float64),
    ]
)


def small_payload(**changes):
    parts = {"conv.weight": Signs.of(torch.arange(9) % 2 == 0, torch.tensor(0.5))}
    rest = {"bias": torch.ones(2), "mask": torch.tensor([True, False, True]), "double": torch.tensor([0.1]).double()}
    return Payload(SMALL, parts, rest | changes, context=3)


SMALL_RAW = small_payload().to_bytes()
BODY = HEADER_BYTES + 8  # where the bodies begin


def patched(where, new):
    raw = bytearray(SMALL_RAW)
    raw[where : where + len(new)] = new
    return bytes(raw)


def refuse(raw, message, layout=SMALL, context=None):
    with pytest.raises(WireError, match=message) as caught:
        Payload.from_bytes(raw, layout, context)
    assert "; " in str(caught.value)  # every message ends with what to do


def test_the_small_message_itself_is_fine():
    assert values_of(Payload.from_bytes(SMALL_RAW, SMALL, context=3)) == values_of(small_payload())
    assert seal(SMALL_RAW) == SMALL_RAW


def test_every_truncation():
    for length in range(len(SMALL_RAW)):
        refuse(SMALL_RAW[:length], "cut short")
    for length in range(HEADER_BYTES, len(SMALL_RAW)):
        refuse(seal(SMALL_RAW[:length]), "needs .* only .* left")


def test_every_flipped_bit():
    for bit in range(8 * len(SMALL_RAW)):
        flipped = bytearray(SMALL_RAW)
        flipped[bit // 8] ^= 1 << bit % 8
        refuse(flipped, "checksum|starts with|format version|announces")


@pytest.mark.parametrize("tail", [b"\0", b"\1", SMALL_RAW, bytes(4096)])
def test_trailing_bytes(tail):
    refuse(SMALL_RAW + tail, "header announces")
    refuse(seal(SMALL_RAW + tail), f"{len(tail)} bytes follow the last tensor")


HEADER = {
    "magic": (patched(0, b"fbat"), "starts with b'fbat', expected b'FBAT'"),
    "version 0": (patched(4, b"\0"), "version 0, this release reads 1"),
    "version 2": (patched(4, b"\2"), "version 2"),
    "checksum": (patched(36, b"\0\0\0\0"), "checksum .* expected 00000000"),
    "length 0": (patched(28, bytes(8)), "announces 0"),
    "length 2^64 - 1": (patched(28, b"\xff" * 8), "announces 18446744073709551615"),
    "byte 5": (seal(patched(5, b"\1")), "bytes 5 to 7"),
    "byte 7": (seal(patched(7, b"\x80")), "bytes 5 to 7"),
    "no parts": (seal(patched(8, bytes(4))), "with 0 compressed tensors"),
    "2^32 - 1 parts": (seal(patched(8, b"\xff" * 4)), "with 4294967295 compressed tensors, expected .* with 1"),
    "layout hash": (seal(patched(12, bytes(8))), "layout 0000000000000000.*same model and the same roles"),
    "kind 6": (seal(patched(40, b"\6")), r"conv.weight: part of kind 6, this release knows \[0, 1, 2, 3, 4, 5"),
    "kind 4, no channels": (seal(patched(40, b"\4\2\0\0\0\0\0\0")), "conv.weight: 0 channels of 2 bits for 9"),
    "kind 16, no seed": (seal(patched(40, b"\x10")[:BODY] + bytes(7)), "conv.weight: a seed needs 8 bytes, only 7"),
    "kind 19 (a seed)": (seal(patched(40, b"\x13")), "conv.weight: part of kind 19"),
    "kind 255": (seal(patched(40, b"\xff")), "part of kind 255"),
    "reserved 2": (seal(patched(42, b"\1")), "conv.weight: reserved bytes hold 0x1, expected 0"),
    "reserved 3": (seal(patched(43, b"\x80")), "reserved bytes hold 0x8000"),
    "parameter": (seal(patched(41, b"\1")), "conv.weight: parameter of a signs tensor is 1, expected 0"),
    "padding": (seal(patched(BODY + 1, b"\3")), "conv.weight: .* non-zero padding"),
    "bias nan": (seal(patched(BODY + 2, struct.pack("<f", math.nan))), "bias holds NaN or infinity"),
    "bias inf": (seal(patched(BODY + 6, struct.pack("<f", math.inf))), "bias holds NaN or infinity"),
    "mask 2": (seal(patched(BODY + 11, b"\2")), "mask holds bytes other than 0 and 1"),
    "double inf": (seal(patched(BODY + 13, struct.pack("<d", -math.inf))), "double holds NaN or infinity"),
} | {
    f"step {value}": (seal(patched(44, struct.pack("<f", value))), "conv.weight: step size .* expected a finite number")
    for value in (math.nan, math.inf, -math.inf, -0.5, -1e-45, -0.0)
}


@pytest.mark.parametrize("case", HEADER)
def test_wrong_fields(case):
    refuse(*HEADER[case])


def test_a_payload_with_a_diverged_tensor_does_not_arrive():
    """The sender does not check: the receiver's answer names the tensor and the cause."""
    diverged = small_payload(bias=torch.tensor([1.0, math.nan]))
    refuse(diverged.to_bytes(), "bias holds NaN .* training diverged")


OTHER_LAYOUTS = {
    "name": (SMALL[0], entry("bias2", [2], "dense"), *SMALL[2:]),
    "shape of same size": (entry("conv.weight", [9, 1]), *SMALL[1:]),
    "dtype of same size": (entry("conv.weight", [3, 3], dtype=torch.bfloat16), *SMALL[1:]),
    "one more": (*SMALL, entry("more", [0], "dense")),
    "one less": SMALL[:-1],
    "order": SMALL[:2] + SMALL[3:] + SMALL[2:3],
    "empty": (),
}


@pytest.mark.parametrize("case", OTHER_LAYOUTS)
def test_another_model(case):
    refuse(SMALL_RAW, "sender and receiver must use the same model", Layout(OTHER_LAYOUTS[case]))


def test_another_context():
    refuse(SMALL_RAW, "context 3, expected 4; this upload belongs to another round", context=4)
    assert Payload.from_bytes(SMALL_RAW, SMALL).context == 3


@pytest.mark.parametrize("raw", [b"", b"F", b"FBAT", bytes(HEADER_BYTES), bytes(4096), SMALL_RAW[:HEADER_BYTES]])
def test_almost_nothing(raw):
    refuse(raw, "cut short|starts with")


class Bomb:
    """Unpickling it would fail the test."""

    def __reduce__(self):
        return (pytest.fail, ("an upload was unpickled",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_bytes_like_any_other(protocol):
    pickled = pickle.dumps([Bomb()] * 8, protocol)
    refuse(pickled, "not a fedbat upload")
    refuse(seal(SMALL_RAW[:BODY] + pickled), "conv.weight|bias|mask|double|bytes follow")


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_random_bytes(raw):
    with pytest.raises(WireError):
        Payload.from_bytes(raw, SMALL)
    with pytest.raises(WireError):
        Payload.from_bytes(raw, Layout())


@given(st.binary(max_size=40))
@settings(deadline=None, max_examples=300)
def test_random_bytes_behind_a_valid_header(raw):
    """Nothing but WireError, and what gets through is what the reference decoder reads."""
    message = seal(SMALL_RAW[:HEADER_BYTES] + raw)
    try:
        found = Payload.from_bytes(message, SMALL)
    except WireError:
        with pytest.raises(reference.Invalid):
            reference.decode(message, reference_layout(SMALL))
    else:
        assert values_of(found) == reference.decode(message, reference_layout(SMALL))[1]


@pytest.mark.parametrize(
    "wrong",
    [
        "FBAT",
        None,
        40,
        [70, 66, 65, 84],
        memoryview(SMALL_RAW * 2)[::2],
        memoryview(np.zeros((4, 4), np.uint8).T[:2]),
    ],
    ids=["str", "None", "int", "list", "strided", "transposed"],
)
def test_what_is_no_contiguous_buffer(wrong):
    refuse(wrong, f"got {type(wrong).__name__}, expected contiguous bytes")


# Memory.


@contextmanager
def peak_memory():
    """[bytes that NumPy and Python allocate at most]; decoded tensors live in NumPy's memory."""
    tracemalloc.start()
    try:
        yield (peak := [])
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


NUMEL = 1_000_000
LARGE = Layout([entry("w", [1000, 1000]), entry("b", [10], "dense")])
DENSE_SIZE = 4 * NUMEL
SLACK = 1 << 20  # blocks, messages, the interpreter; a quarter of the tensor


def large(kind, parameter, word, body, layout=LARGE):
    head = struct.pack("<4sB3xI8sQQI", b"FBAT", 1, 1, layout.hash, 0, 0, 0)
    return seal(head + struct.pack("<BBHI", kind, parameter, 0, word) + body)


def f32_word(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def sparse_body(kept, width, unary, unary_length=None, low=None, values=None):
    length = len(unary) if unary_length is None else unary_length
    low = bytes(math.ceil(kept * width / 8)) if low is None else low
    return struct.pack("<I", length) + low + unary + (bytes(4 * kept) if values is None else values)


TAIL = bytes(40)  # the bias
FULL = b"\xff" * (NUMEL // 8)

HOSTILE = {
    "length field only": (0, 0, 0, b""),
    "kept 2^32 - 1": (3, 0, 2**32 - 1, bytes(64)),
    "kept 2^32 - 1, width 31": (3, 31, 2**32 - 1, bytes(64)),
    "kept = d, nothing there": (3, 0, NUMEL, bytes(64)),
    "kept = d, width 31, nothing there": (3, 31, NUMEL, bytes(64)),
    "unary length 2^32 - 1": (3, 0, 1, sparse_body(1, 0, b"\1", unary_length=2**32 - 1)),
    "unary all zeros": (3, 0, 1, sparse_body(1, 0, bytes(NUMEL // 8)) + TAIL),
    "unary all ones": (3, 0, 1, sparse_body(1, 0, FULL) + TAIL),
    "unary all ones twice": (3, 0, NUMEL - 1, sparse_body(NUMEL - 1, 0, 2 * FULL[:-1]) + TAIL),
    "all kept, width 31, all low bits": (
        3,
        31,
        NUMEL,
        sparse_body(NUMEL, 31, FULL, low=b"\xff" * (31 * NUMEL // 8)) + TAIL,
    ),
    "all kept, width 31, beyond the end": (3, 31, NUMEL, sparse_body(NUMEL, 31, FULL, low=b"\1" * (31 * NUMEL // 8))),
    "all kept, nan": (3, 0, NUMEL, sparse_body(NUMEL, 0, FULL, values=b"\xff" * (4 * NUMEL)) + TAIL),
    "width 255": (3, 255, 1, bytes(4096)),
    "levels of 0 bits": (2, 0, f32_word(1.0), b""),
    "levels of 31 bits": (2, 31, f32_word(1.0), bytes(NUMEL)),
    "levels of 255 bits": (2, 255, f32_word(1.0), bytes(NUMEL)),
    "levels, unused codes": (2, 8, f32_word(1.0), b"\xff" * NUMEL + TAIL),
    "levels, nothing there": (2, 8, f32_word(1.0), b""),
    "odd levels of 1 bit": (5, 1, f32_word(1.0), FULL + TAIL),
    "odd levels of 255 bits": (5, 255, f32_word(1.0), bytes(NUMEL)),
    "odd levels, nothing there": (5, 4, f32_word(1.0), b""),
    "odd levels, infinite": (5, 2, f32_word(3e38), FULL + FULL + TAIL),
    "channels, none": (4, 2, 0, FULL + FULL + TAIL),
    "channels, no divisor": (4, 2, 3, bytes(12) + FULL + FULL + TAIL),
    "channels, more than values": (4, 2, 2 * NUMEL, bytes(8 * NUMEL) + FULL + FULL + TAIL),
    "channels, 2^32 - 1": (4, 2, 2**32 - 1, bytes(64)),
    "channels, scales missing": (4, 2, NUMEL, bytes(64)),
    "channels, scales alone": (4, 8, 10, bytes(40)),
    "channels of 1 bit": (4, 1, 1, bytes(4) + FULL + TAIL),
    "channels of 5 bits": (4, 5, 1, bytes(4 + 5 * NUMEL // 8) + TAIL),
    "channels of 255 bits": (4, 255, 1, bytes(NUMEL)),
    "channels, nan": (4, 2, 2, struct.pack("<2f", 1.0, math.nan) + FULL + FULL + TAIL),
    "channels, negative": (4, 2, 2, struct.pack("<2f", 1.0, -1.0) + FULL + FULL + TAIL),
    "channels, -0": (4, 2, 2, struct.pack("<2f", 1.0, -0.0) + FULL + FULL + TAIL),
    "channels, infinite": (4, 2, 2, struct.pack("<2f", 1.0, 3e38) + FULL + FULL + TAIL),
    "signs, nothing there": (1, 0, f32_word(1.0), b""),
    "signs, a long tail": (1, 0, f32_word(1.0), FULL + bytes(20 * NUMEL)),
    "dense, nothing there": (0, 0, 0, b""),
    "rotated signs, no seed": (16, 0, f32_word(1.0), b""),
    "rotated signs, a seed alone": (16, 0, f32_word(1.0), bytes(8)),
    "rotated signs, a long tail": (16, 0, f32_word(1.0), bytes(8) + FULL + bytes(20 * NUMEL)),
    "rotated signs, scale 2^64": (16, 0, f32_word(2.0**64), bytes(8) + FULL + TAIL),
    "rotated levels of 1 bit": (17, 1, f32_word(1.0), bytes(8) + FULL + TAIL),
    "rotated levels of 5 bits": (17, 5, f32_word(1.0), bytes(8 + 5 * NUMEL // 8) + TAIL),
    "rotated levels, nothing there": (17, 4, f32_word(1.0), bytes(8)),
    "mask of type 2": (18, 2, f32_word(1.0), bytes(8) + FULL + TAIL),
    "mask, nothing there": (18, 1, f32_word(1.0), bytes(8)),
    "dense, nan": (0, 0, 0, b"\xff" * (4 * NUMEL) + TAIL),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_messages_make_the_receiver_allocate_next_to_nothing(case):
    """However large the sizes they claim: a short one costs a page or two, a long one no more than a good one."""
    raw = large(*HOSTILE[case])
    with peak_memory() as peak, pytest.raises(WireError):
        Payload.from_bytes(raw, LARGE)
    assert peak[0] <= min(8 * len(raw), 8 * DENSE_SIZE) + 2**16


HUGE = Layout([entry("w", [2**20, 2**20]), entry("b", [2**40], "dense")])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("parameter", [0, 1, 3, 8, 31])
@pytest.mark.parametrize("word", [0, 1, f32_word(1.0), 2**32 - 1])
def test_a_short_message_for_a_model_too_large_for_this_machine(kind, parameter, word):
    """The layout allows a terabyte, the message holds 64 bytes: nothing is allocated before the bytes are there."""
    for body in (bytes(64), b"\1\0\0\0" * 16, b"\xff" * 64):
        raw = large(kind, parameter, word, body, layout=HUGE)
        with peak_memory() as peak, pytest.raises(WireError):
            Payload.from_bytes(raw, HUGE)
        assert peak[0] <= 2**16


VALID = {  # message, and multiples of the dense size that decoding it may take
    "dense": (0, 0, 0, bytes(DENSE_SIZE), 1.25),  # and a byte each for the check that all are finite
    "signs": (1, 0, f32_word(1.0), FULL, 1 / 32),
    "levels of 2 bits": (2, 2, f32_word(1.0), bytes(NUMEL // 4), 1 / 4),
    "levels of 8 bits": (2, 8, f32_word(1.0), bytes(NUMEL), 1 / 4),
    "odd levels of 2 bits": (5, 2, f32_word(1.0), bytes(NUMEL // 4), 1 / 4),
    "channels of 2 bits": (4, 2, 1000, bytes(4000) + FULL + FULL, 1 / 4),
    "channels of 8 bits": (4, 8, 1, bytes(4) + bytes(NUMEL), 1 / 4),
    "channels, each its own": (4, 2, NUMEL, bytes(4 * NUMEL) + FULL + FULL, 2.75),  # scales, their check, codes
    "rotated signs": (16, 0, f32_word(1.0), bytes(8) + FULL, 1 / 32),
    "rotated levels of 4 bits": (17, 4, f32_word(1.0), bytes(8 + NUMEL // 2), 1 / 4),
    "masked noise": (18, 1, f32_word(1.0), bytes(8) + FULL, 1 / 32),
    "3 % kept": (3, 5, 30_000, sparse_body(30_000, 5, b"\xff" * 3750), 0.5),
    "all kept": (3, 0, NUMEL, sparse_body(NUMEL, 0, FULL), 8),  # int64 positions, while they are summed up
    "all kept, width 31": (3, 31, NUMEL, sparse_body(NUMEL, 31, FULL), 8),
}


@pytest.mark.parametrize("case", VALID)
def test_good_messages_take_no_more_than_the_tensors_they_hold(case):
    *fields, body, times = VALID[case]
    raw = large(*fields, body + TAIL)
    with peak_memory() as peak:
        payload = Payload.from_bytes(raw, LARGE)
    assert payload.parts["w"].numel == NUMEL
    assert peak[0] <= times * DENSE_SIZE + SLACK


@pytest.mark.parametrize("name", ["fedavg", "fedbat", "fedpaq", "zerofl"])
def test_memory_of_the_server_does_not_grow_with_clients(name):
    """O(d) whatever the number of clients: uploads are added one at a time and forgotten."""
    model = nn.Linear(400, 250)
    layout = layout_of(model)
    w = tensors_of(model, layout)
    d = layout[0].numel

    def upload(client):
        rng = torch.Generator().manual_seed(client)
        m = torch.randn(d, generator=rng)
        part = {
            "fedavg": lambda: Dense(m),
            "fedbat": lambda: Signs.of(m > 0, m.abs().mean()),
            "fedpaq": lambda: Levels.of((m / m.abs().amax() * 7).round(), m.abs().amax(), 4),
            "zerofl": lambda: Sparse(keep := torch.nonzero(m > 1.8).flatten(), m[keep], d),
        }[name]()
        return Payload(layout, {"weight": part}, {"bias": torch.ones(250)}).to_bytes()

    def live_tensor_bytes():
        gc.collect()
        return sum(t.numel() * t.element_size() for t in gc.get_objects() if type(t) is torch.Tensor)

    def after(num_clients):
        aggregator = Aggregator(make_method(name), layout, w)
        before = live_tensor_bytes()
        with peak_memory() as peak:
            for client in range(num_clients):
                aggregator.add(Payload.from_bytes(upload(client), layout), weight=client + 1)
            held = tracemalloc.get_traced_memory()[0]
        assert aggregator.total_weight == num_clients * (num_clients + 1) / 2
        return peak[0], held, live_tensor_bytes() - before

    after(1)  # fills the caches
    few, many = after(2), after(40)
    assert few[2] == many[2] == 0
    allowed = 5 * len(upload(0))  # of the 38 uploads more
    assert many[0] < few[0] + allowed and many[1] < few[1] + allowed
