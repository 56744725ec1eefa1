"""Wire format v1: what a message makes its receiver allocate, however hostile it is."""

import gc
import math
import struct
import tracemalloc
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fedbat.errors import WireError
from fedbat.layout import Layout, layout_of, tensors_of
from fedbat.levels import Levels
from fedbat.methods import make_method
from fedbat.parts import Dense, Signs, Sparse
from fedbat.server import Aggregator
from fedbat.wire import KINDS, Payload
from tests.wire_messages import (
    entry,
    seal,
)


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
    "channels of 9 bits": (4, 9, 1, bytes(4 + 9 * NUMEL // 8) + TAIL),
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
    "channels of 5 bits": (4, 5, 1, bytes(4 + 5 * NUMEL // 8), 1 / 4),
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
