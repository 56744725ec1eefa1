"""Wire format v1: what must be refused, with a reason."""

import math
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.errors import WireError
from fedbat.layout import Layout
from fedbat.parts import Signs
from fedbat.wire import HEADER_BYTES, Payload
from tests.reference import decode as reference
from tests.wire_messages import entry, reference_layout, seal, values_of

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
    "kind 255": (seal(patched(40, b"\xff")), "part of kind 255, one of somebody's own that is not reg"),
    "kind 223": (seal(patched(40, b"\xdf")), "part of kind 223, this release knows"),
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
