"""Parts: what is packed is what is unpacked is what is added, and the bits claimed are the bytes sent."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.channels import WIDTHS, Channels
from fedbat.errors import WireError
from fedbat.levels import Coded, Levels, OddLevels, num_steps, odd_levels
from fedbat.parts import Dense, Reader, Record, Signs, Sparse
from fedbat.wire import KINDS

LARGEST = torch.finfo(torch.float32).max

steps = st.floats(0, LARGEST, width=32).map(abs)  # no -0.0
finite = st.floats(-LARGEST, LARGEST, width=32)
tame = st.floats(-(2.0**100), 2.0**100, width=32)  # times a weight, still finite
weights = st.integers(1, 100_000) | st.floats(1e-3, 1e3)


def float_tensor(values):
    return torch.tensor(values, dtype=torch.float32)


@st.composite
def dense_parts(draw, d, values=finite):
    return Dense(float_tensor(draw(st.lists(values, min_size=d, max_size=d))))


@st.composite
def signs_parts(draw, d, scales=steps):
    positive = draw(st.lists(st.booleans(), min_size=d, max_size=d))
    return Signs.of(torch.tensor(positive, dtype=torch.bool), float_tensor(draw(scales)))


@st.composite
def levels_parts(draw, d, scales=steps):
    width = draw(st.integers(2, 8))
    s = num_steps(width)
    levels = draw(st.lists(st.integers(-s, s), min_size=d, max_size=d))
    return Levels.of(torch.tensor(levels, dtype=torch.int64), float_tensor(draw(scales)), width)


@st.composite
def odd_levels_parts(draw, d, scales=steps):
    width = draw(st.integers(2, 4))
    codes = draw(st.lists(st.integers(0, 2**width - 1), min_size=d, max_size=d))
    step = draw(scales.filter(lambda step: step < LARGEST / 15))
    return OddLevels.of(torch.tensor(codes, dtype=torch.int64), float_tensor(step), width)


@st.composite
def channels_parts(draw, d, scales=steps):
    width = draw(st.sampled_from(WIDTHS))
    codes = draw(st.lists(st.integers(0, 2**width - 1), min_size=d, max_size=d))
    num = draw(st.sampled_from([c for c in range(1, d + 1) if d % c == 0])) if d else 0
    found = draw(st.lists(scales.filter(lambda scale: scale < LARGEST / 3), min_size=num, max_size=num))
    return Channels(torch.tensor(codes, dtype=torch.uint8), float_tensor(found), width)


@st.composite
def sparse_parts(draw, d, values=finite):
    positions = sorted(draw(st.sets(st.integers(0, d - 1)))) if d else []
    kept = draw(st.lists(values, min_size=len(positions), max_size=len(positions)))
    return Sparse(torch.tensor(positions, dtype=torch.int64), float_tensor(kept), d)


def parts_of_size(d):
    with_scale = signs_parts(d) | levels_parts(d) | odd_levels_parts(d) | channels_parts(d)
    return dense_parts(d) | with_scale | sparse_parts(d)


def tame_parts_of_size(d):
    scales = st.floats(0, 2.0**100, width=32).map(abs)
    with_scale = signs_parts(d, scales) | levels_parts(d, scales) | odd_levels_parts(d, scales)
    with_scale |= channels_parts(d, scales)
    return dense_parts(d, tame) | with_scale | sparse_parts(d, tame)


sizes = st.integers(0, 70)
parts = sizes.flatmap(parts_of_size)
tame_parts = sizes.flatmap(tame_parts_of_size)


def parse(record, body, d):
    reader = Reader(memoryview(body))
    part = KINDS[record.kind].parse(record, d, reader)
    reader.close()
    return part


@given(parts)
@settings(deadline=None)
def test_a_part_survives_its_bytes(part):
    again = parse(part.record(), part.body(), part.numel)
    assert type(again) is type(part) and again.numel == part.numel
    assert torch.equal(again.unpack(), part.unpack())
    assert (again.record(), again.body(), again.nbits) == (part.record(), part.body(), part.nbits)
    assert (again.step, again.reach) == (part.step, part.reach)


@given(parts)
@settings(deadline=None)
def test_the_bits_claimed_are_the_bytes_sent(part):
    """Padding is all that bytes add; a step size travels in the record's word."""
    in_record = 32 * isinstance(part, (Signs, Coded))
    assert 0 <= 8 * len(part.body()) + in_record - part.nbits < 8


@pytest.mark.parametrize("d", range(1, 18))
def test_bits_per_kind(d):
    one = torch.tensor(1.0)
    assert Dense(torch.zeros(d)).nbits == 32 * d
    assert Signs.of(torch.ones(d, dtype=torch.bool), one).nbits == d + 32
    assert [Levels.of(torch.zeros(d), one, b).nbits for b in range(2, 9)] == [b * d + 32 for b in range(2, 9)]
    assert [OddLevels.of(torch.zeros(d), one, b).nbits for b in (2, 3, 4)] == [b * d + 32 for b in (2, 3, 4)]
    assert [Channels.of(torch.ones(2, d), b).nbits for b in WIDTHS] == [b * 2 * d + 64 for b in WIDTHS]
    # Length of the unary part, one byte of it, two values.
    assert Sparse(torch.tensor([0, d]), torch.ones(2), d + 1).nbits <= 32 + 2 * 4 + 8 + 64


@given(parts)
@settings(deadline=None)
def test_what_is_unpacked_is_flat_finite_float32(part):
    values = part.unpack()
    assert values.dtype == torch.float32 and values.shape == (part.numel,)
    assert torch.isfinite(values).all()
    if part.reach is not None:
        assert (values.abs() <= part.reach).all()


@given(tame_parts, weights)
@settings(deadline=None)
def test_add_to_adds_weight_times_unpack_bit_for_bit(part, weight):
    total = torch.zeros(part.numel)
    part.add_to(total, weight)
    assert torch.equal(total, part.unpack() * weight)


@given(tame_parts, weights)
@settings(deadline=None)
def test_add_to_keeps_what_was_there(part, weight):
    start = torch.linspace(-1, 1, part.numel)
    total = start.clone()
    part.add_to(total, weight)
    # One rounding of the product and one of the sum, or a single one where they are fused.
    product = part.unpack().double() * weight
    eps = torch.finfo(torch.float32).eps
    assert ((total - (start + product)).abs() <= eps * (2 * product.abs() + start.abs()) + 1e-44).all()


@given(tame_parts)
@settings(deadline=None)
def test_add_to_a_float64_total(part):
    total = torch.zeros(part.numel, dtype=torch.float64)
    part.add_to(total, 3.0)
    torch.testing.assert_close(total, part.unpack().double() * 3, rtol=2**-24, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_torch_does_not_matter(dtype):
    part_list = [
        Signs.of(torch.tensor([True, False]), torch.tensor(0.1)),
        Levels.of(torch.tensor([1, -3]), torch.tensor(0.1), 3),
        OddLevels.of(torch.tensor([1, 7]), torch.tensor(0.1), 3),
        Sparse(torch.tensor([1]), torch.tensor([0.1]), 2),
    ]
    expected = [part.unpack() for part in part_list]
    torch.set_default_dtype(dtype)
    try:
        found = [parse(part.record(), part.body(), 2).unpack() for part in part_list]
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


@given(sizes.flatmap(signs_parts))
@settings(deadline=None)
def test_signs_are_plus_or_minus_the_step(part):
    """{0, 1} on the wire, {-1, 1} times the step in the sum."""
    bits = np.unpackbits(np.frombuffer(part.body(), np.uint8), bitorder="little", count=part.numel)
    assert part.unpack().tolist() == [part.step if bit else -part.step for bit in bits]


@given(sizes.flatmap(levels_parts))
@settings(deadline=None)
def test_levels_are_evenly_spaced_up_to_exactly_the_scale(part):
    s, scale = num_steps(part.width), float(part.scale)
    j = part.codes.double() - s
    # Two roundings, and the spacing of the smallest float32.
    torch.testing.assert_close(part.unpack().double(), j / s * scale, rtol=2**-23, atol=2**-149)
    assert (part.unpack()[j.abs() == s].abs() == scale).all()
    assert part.step == scale / s


@given(sizes.flatmap(odd_levels_parts))
@settings(deadline=None)
def test_odd_levels_are_odd_multiples_of_the_step(part):
    odd = 2 * part.codes.double() + 1 - 2**part.width
    assert torch.equal(part.unpack(), (odd * part.step.double()).float())
    assert part.reach == part.step * (2**part.width - 1)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_bit_more_doubles_the_levels_and_one_bit_is_signs(width):
    part = odd_levels(torch.arange(2**width) > 0 if width == 1 else torch.arange(2**width), torch.tensor(0.5), width)
    assert part.unpack().tolist() == [0.5 * odd for odd in range(1 - 2**width, 2**width, 2)]
    assert part.nbits == width * 2**width + 32 and type(part) is (Signs if width == 1 else OddLevels)


@pytest.mark.parametrize("make", ["signs", "levels"])
def test_elements_travel_in_row_major_order_whatever_the_memory_format(make, rng):
    m = torch.randn(4, 3, 5, 2, generator=rng)
    scale = m.abs().amax()

    def body(x):
        part = Signs.of(x > 0, scale) if make == "signs" else Levels.of((x / scale * 7).round(), scale, 4)
        return part.body()

    expected = body(m)
    assert body(m.contiguous(memory_format=torch.channels_last)) == expected
    assert body(m.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)) == expected
    assert body(m.permute(1, 0, 2, 3)) != expected


def test_a_scale_that_requires_grad_is_detached():
    alpha = torch.tensor(0.5, requires_grad=True)
    assert not Signs.of(torch.ones(3, dtype=torch.bool), alpha).unpack().requires_grad
    assert not Levels.of(torch.ones(3), alpha, 2).unpack().requires_grad
    assert not OddLevels.of(torch.ones(3), alpha, 2).unpack().requires_grad


# What a hostile record or body meets. (kind, parameter, word), body, number of elements, what the error must say.

ONE, ONES = struct.unpack("<I", struct.pack("<f", 1.0))[0], struct.pack("<f", 1.0)


def word(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def sparse_body(unary_length, *streams):
    return struct.pack("<I", unary_length) + b"".join(streams)


BAD_STEPS = [math.nan, -math.nan, math.inf, -math.inf, -1.0, -1e-45, -0.0]

HOSTILE = {
    "dense with parameter": (Record(0, 1, 0), ONES, 1, "parameter of a dense tensor is 1, expected 0"),
    "dense with word": (Record(0, 0, 9), ONES, 1, "word of a dense tensor is 9, expected 0"),
    "dense too short": (Record(0, 0, 0), ONES, 2, "needs 8 bytes, only 4"),
    "dense too long": (Record(0, 0, 0), 2 * ONES, 1, "4 bytes follow"),
    "dense nan": (Record(0, 0, 0), ONES + struct.pack("<f", math.nan), 2, "NaN or infinity"),
    "dense -inf": (Record(0, 0, 0), ONES + struct.pack("<f", -math.inf), 2, "NaN or infinity"),
    "signs with parameter": (Record(1, 1, ONE), b"\x01", 8, "parameter of a signs tensor is 1"),
    "signs too short": (Record(1, 0, ONE), b"\x01", 9, "needs 2 bytes, only 1"),
    "signs padding": (Record(1, 0, ONE), b"\x01\x02", 9, "non-zero padding"),
    "levels of 0 bits": (Record(2, 0, ONE), b"", 4, "levels of 0 bits, expected 2 to 8"),
    "levels of 1 bit": (Record(2, 1, ONE), b"\x01", 4, "levels of 1 bits"),
    "levels of 9 bits": (Record(2, 9, ONE), bytes(9), 8, "levels of 9 bits"),
    "levels of 255 bits": (Record(2, 255, ONE), bytes(255), 8, "levels of 255 bits"),
    "levels too short": (Record(2, 4, ONE), bytes(2), 5, "needs 3 bytes, only 2"),
    "levels padding": (Record(2, 3, ONE), b"\x40", 2, "non-zero padding"),
    "level 3 of 2 bits": (Record(2, 2, ONE), b"\xc0", 4, "level code 3, expected at most 2"),
    "level 255 of 8 bits": (Record(2, 8, ONE), b"\x00\xff", 2, "level code 255, expected at most 254"),
    "odd levels of 0 bits": (Record(5, 0, ONE), b"", 4, "odd levels of 0 bits, expected 2 to 4"),
    "odd levels of 1 bit": (Record(5, 1, ONE), b"\x01", 4, "odd levels of 1 bits"),
    "odd levels of 5 bits": (Record(5, 5, ONE), bytes(5), 8, "odd levels of 5 bits"),
    "odd levels of 255 bits": (Record(5, 255, ONE), bytes(255), 8, "odd levels of 255 bits"),
    "odd levels too short": (Record(5, 4, ONE), bytes(2), 5, "needs 3 bytes, only 2"),
    "odd levels too long": (Record(5, 4, ONE), bytes(2), 2, "1 bytes follow"),
    "odd levels padding": (Record(5, 3, ONE), b"\x40", 2, "non-zero padding"),
    "odd levels beyond all numbers": (Record(5, 2, word(1.2e38)), b"\x01", 2, "expected 3 times it to be finite"),
    "sparse without length": (Record(3, 0, 0), b"\x00\x00\x00", 4, "needs 4 bytes, only 3"),
    "sparse with too many": (Record(3, 0, 5), sparse_body(1, b"\x1f", 5 * ONES), 4, "5 values.*at most 4"),
    "sparse with 2^32 - 1": (Record(3, 0, 2**32 - 1), sparse_body(1, b"\x01", ONES), 4, "4294967295 values"),
    "sparse width 32": (Record(3, 32, 1), sparse_body(1, bytes(4), b"\x01", ONES), 4, "width 32, expected .* 31"),
    "sparse width 255": (Record(3, 255, 1), sparse_body(1, bytes(32), b"\x01", ONES), 4, "width 255"),
    "unary of 2^32 - 1 bytes": (Record(3, 0, 1), sparse_body(2**32 - 1, b"\x01", ONES), 4, "4294967295 bytes"),
    "unary longer than any": (Record(3, 0, 1), sparse_body(2, b"\x01\x00", ONES), 4, "of 2 bytes, expected at most 1"),
    "unary of zeros": (Record(3, 0, 1), sparse_body(1, b"\x00", ONES), 4, "exactly 1 places among 4"),
    "unary of ones": (Record(3, 0, 1), sparse_body(1, b"\xff", ONES), 4, "exactly 1 places"),
    "unary with a tail": (Record(3, 0, 1), sparse_body(2, b"\x01\x00", ONES), 9, "exactly 1 places"),
    "unary of nothing": (Record(3, 0, 0), sparse_body(1, b"\x00"), 8, "exactly 0 places"),
    "no unary": (Record(3, 0, 1), sparse_body(0, ONES), 4, "exactly 1 places"),
    "position at the end": (Record(3, 0, 1), sparse_body(1, b"\x10", ONES), 4, "exactly 1 places among 4"),
    "low part beyond the end": (Record(3, 31, 1), sparse_body(1, b"\xff" * 3 + b"\x7f", b"\x01", ONES), 4, "exactly 1"),
    "low padding": (Record(3, 1, 1), sparse_body(1, b"\x02", b"\x01", ONES), 4, "non-zero padding"),
    "low too short": (Record(3, 31, 4), sparse_body(1, b"\x01"), 4, "needs 16 bytes, only 1"),
    "values too short": (Record(3, 0, 2), sparse_body(1, b"\x03", ONES), 4, "needs 8 bytes, only 4"),
    "sparse nan": (Record(3, 0, 1), sparse_body(1, b"\x01", struct.pack("<f", math.nan)), 4, "NaN or infinity"),
    "sparse with a tail": (Record(3, 0, 1), sparse_body(1, b"\x01", ONES, b"\x00"), 4, "1 bytes follow"),
} | {
    f"{kind} step {value}{i}": (Record(number, parameter, word(value)), b"\x01", 2, "step size .* expected a finite")
    for i, value in enumerate(BAD_STEPS)
    for kind, number, parameter in (("signs", 1, 0), ("levels", 2, 2), ("odd levels", 5, 2))
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_parts_are_refused_with_a_reason_and_a_fix(case):
    record, body, d, message = HOSTILE[case]
    with pytest.raises(WireError, match=message) as caught:
        parse(record, body, d)
    assert "; " in str(caught.value)  # what to do about it


@given(
    st.builds(Record, st.sampled_from(sorted(KINDS)), st.integers(0, 40) | st.integers(0, 255), st.integers(0, 40)),
    st.binary(max_size=60),
    st.integers(0, 40),
)
@settings(max_examples=300, deadline=None)
def test_any_record_and_body_give_a_part_or_a_wire_error(record, body, d):
    try:
        part = parse(record, body, d)
    except WireError:
        return
    assert part.numel == d and torch.isfinite(part.unpack()).all()
    assert torch.equal(parse(part.record(), part.body(), d).unpack(), part.unpack())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_total_on_the_gpu_takes_parts_from_anywhere(rng):
    m = torch.randn(1001, generator=rng)
    scale, keep = m.abs().amax(), torch.arange(0, 1001, 7)

    def all_kinds(m, scale, keep):
        yield Dense(m)
        yield Signs.of(m > 0, scale)
        yield Levels.of((m / scale * 7).round(), scale, 4)
        yield OddLevels.of((m / scale * 7).round() + 7, scale, 4)
        yield Sparse(keep, m[keep], 1001)

    here, there = all_kinds(m, scale, keep), all_kinds(m.cuda(), scale.cuda(), keep.cuda())
    for a, b in zip(here, there, strict=True):
        assert (a.record(), a.body(), a.nbits) == (b.record(), b.body(), b.nbits)
        assert torch.equal(a.unpack(), b.unpack().cpu())
        totals = []
        for part in (a, b):
            totals.append(torch.zeros(1001, device="cuda"))
            part.add_to(totals[-1], 3.0)
        assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0].cpu(), a.unpack() * 3)


@given(parts)
@settings(deadline=None)
def test_the_largest_magnitude_is_that_of_the_values(part):
    values = part.unpack()
    assert part.largest() == (values.abs().max().item() if values.numel() else 0.0)
