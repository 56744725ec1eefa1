"""Bits into bytes and back: every stream is a little-endian number, and nothing is lost on the way."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.packing import (
    _add_by_table,
    add_codes,
    add_signs,
    choose_rice_width,
    look_up,
    num_bytes,
    pack_codes,
    pack_signs,
    rice_decode,
    rice_encode,
    signs_on,
    unpack_codes,
    unpack_signs,
)
from fedbat.transfer import Box, all_sent_to

BLOCK = 1 << 16  # bytes of signs that add_signs handles at once
SIZES = [*range(34), 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 9]
CODE_SIZES = [*range(18), 65535, 65536, 65537, 131079]  # 65536 are handled at once


def as_number(packed):
    """The bit stream as one number: bit n of the stream is worth 2^n."""
    return int.from_bytes(bytes(np.asarray(packed)), "little")


@pytest.mark.parametrize("d", SIZES)
def test_signs_round_trip_at_one_bit_each(d, rng):
    positive = torch.rand(d, generator=rng) < 0.5
    packed = pack_signs(positive)
    assert packed.dtype == torch.uint8 and len(packed) == math.ceil(d / 8)
    assert torch.equal(unpack_signs(packed, d), positive)
    plus_minus = torch.where(positive, 1, -1)  # {-1, 1} <-> {0, 1}
    assert torch.equal(2 * unpack_signs(pack_signs(plus_minus > 0), d).int() - 1, plus_minus.int())


@given(st.lists(st.booleans(), max_size=100))
@settings(deadline=None)
def test_sign_i_is_bit_i_and_padding_is_zero(positive):
    packed = pack_signs(torch.tensor(positive, dtype=torch.bool))
    assert as_number(packed) == sum(bit << i for i, bit in enumerate(positive))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("d", SIZES)
def test_add_signs_adds_plus_or_minus_scale(d, dtype, rng):
    positive = torch.rand(d, generator=rng) < 0.5
    start = torch.randn(d, generator=rng, dtype=dtype)
    total, scale = start.clone(), float(torch.tensor(0.3))
    add_signs(total, pack_signs(positive), scale)
    assert torch.equal(total, start + torch.where(positive, scale, -scale))


def test_add_signs_reaches_a_strided_total(rng):
    positive = torch.rand(21, generator=rng) < 0.5
    whole = torch.zeros(42)
    add_signs(whole[::2], pack_signs(positive), 2.0)
    assert torch.equal(whole[::2], torch.where(positive, 2.0, -2.0)) and not whole[1::2].any()


@pytest.mark.parametrize("d", SIZES)
def test_a_gpu_would_add_the_same_signs(d, rng):
    packed = pack_signs(torch.rand(d, generator=rng) < 0.5)
    total = torch.randn(d, generator=rng)
    by_table = total.clone()
    add_signs(total, packed, 0.3)
    _add_by_table(by_table, packed, signs_on(torch.device("cpu")) * 0.3)
    assert torch.equal(by_table, total)


def test_one_buffer_brings_tensors_of_all_kinds(rng):
    tensors = [
        torch.rand(3, 5, generator=rng) < 0.5, torch.randn(7, 2, generator=rng), torch.tensor(2.5), torch.arange(3),
        torch.randn(0, 4), torch.randn(4, 6, generator=rng).T, torch.tensor(7, dtype=torch.uint8),
    ]  # fmt: skip
    box = Box(tensors)
    assert box.size == sum(x.numel() * x.element_size() for x in tensors)
    given = torch.empty(box.size, dtype=torch.uint8)
    for filled in (box.fill(tensors), box.fill(tensors, given)):
        found = box.views(filled)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    assert filled.data_ptr() == given.data_ptr()
    assert Box([]).size == 0 and all_sent_to(torch.device("cuda"), []) == []


def test_only_a_gpu_is_sent_pinned_memory():
    found = all_sent_to(torch.device("meta"), [torch.zeros(2, 3), torch.arange(4)])
    assert [(x.device.type, x.shape, x.dtype) for x in found] == [
        ("meta", (2, 3), torch.float32), ("meta", (4,), torch.int64)
    ]  # fmt: skip


@pytest.mark.parametrize("width", range(32))
def test_codes_round_trip_at_their_width(width):
    rng = np.random.default_rng(width)
    for count in CODE_SIZES:
        codes = rng.integers(0, 1 << width, count).astype(np.uint8 if width <= 8 else np.uint32)
        packed = pack_codes(codes, width)
        assert len(packed) == num_bytes(count * width)
        unpacked = unpack_codes(packed, count, width)
        assert unpacked.dtype == codes.dtype and np.array_equal(unpacked, codes)


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_look_up_is_indexing(count, rng):
    table, codes = torch.randn(16, generator=rng), torch.randint(0, 16, (count,), generator=rng, dtype=torch.uint8)
    assert torch.equal(look_up(table, codes), table[codes.long()])


@pytest.mark.parametrize("size", [3, 16, 255])
@pytest.mark.parametrize("count", [0, 1, BLOCK, 2 * BLOCK + 3, 2 * 512 * 255 + 1])
def test_adding_codes_is_adding_what_they_stand_for(count, size, rng):
    table = torch.randn(size, generator=rng)
    codes = torch.randint(0, size, (count + 1,), generator=rng, dtype=torch.uint8)[1:]  # at an odd address
    total = torch.randn(count, generator=rng)
    expected = total + table[codes.long()]
    add_codes(total, codes, table)
    assert torch.equal(total, expected)


@given(st.integers(1, 31), st.data())
@settings(deadline=None)
def test_code_i_begins_at_bit_i_times_width(width, data):
    codes = data.draw(st.lists(st.integers(0, (1 << width) - 1), max_size=40))
    packed = pack_codes(np.array(codes, np.uint32), width)
    assert as_number(packed) == sum(code << width * i for i, code in enumerate(codes))


position_sets = st.sets(st.integers(0, 5000), max_size=60) | st.sets(st.integers(0, 2**40), max_size=20)


@given(position_sets, st.integers(0, 31))
@settings(deadline=None)
def test_positions_round_trip_at_any_width(positions, width):
    if len(positions) and max(positions) >> width > 1 << 20:  # the unary stream would be long, not wrong
        width = 31
    positions = np.array(sorted(positions), np.int64)
    low, unary = rice_encode(positions, width)
    assert len(low) == num_bytes(width * len(positions))
    assert np.array_equal(rice_decode(low, unary, len(positions), width), positions)


@given(st.sets(st.integers(0, 5000), max_size=60))
@settings(deadline=None)
def test_chosen_width_is_the_best_of_all(positions):
    positions = np.array(sorted(positions), np.int64)
    gaps = np.diff(positions, prepend=-1) - 1

    def bits(width):
        return int((width + 1 + (gaps >> width)).sum())

    width = choose_rice_width(positions)
    assert bits(width) == min(map(bits, range(20)))
    low, unary = rice_encode(positions, width)
    assert num_bytes(len(gaps) * width) == len(low) and num_bytes(bits(width) - len(gaps) * width) == len(unary)


@pytest.mark.parametrize("p", [0.001, 0.01, 0.03, 0.1, 0.3])
def test_random_positions_take_their_entropy(p):
    n, rng = 200_000, np.random.default_rng(round(1000 * p))
    positions = np.flatnonzero(rng.random(n) < p)
    share = len(positions) / n
    entropy = -n * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    width = choose_rice_width(positions)
    low, unary = rice_encode(positions, width)
    coded = 8 * (len(low) + len(unary))
    high = (np.diff(positions, prepend=-1) - 1) >> width
    # Given their number, only the high parts make the code longer or shorter; two bytes of padding.
    noise = 5 * high.std() * math.sqrt(len(positions)) + 16
    assert 0.99 * entropy - noise < coded < 1.04 * entropy + noise


@pytest.mark.parametrize("share", [0.62, 0.9, 1.0])
def test_dense_positions_take_no_more_than_a_bitmap(share):
    positions = np.flatnonzero(np.random.default_rng(0).random(1000) < share)
    low, unary = rice_encode(positions, choose_rice_width(positions))
    assert len(low) + len(unary) <= 125


def test_rice_decode_wants_exactly_as_many_ones_as_positions():
    low, unary = rice_encode(np.array([3, 4, 17]), 2)
    assert (low.tobytes(), unary.tobytes()) == (b"\x03", b"\x23")
    assert rice_decode(low, unary, 3, 2).tolist() == [3, 4, 17]
    assert rice_decode(low, unary, 2, 2) is None
    assert rice_decode(low, unary, 4, 2) is None
    assert rice_decode(low, unary[:0], 0, 2).tolist() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_packs_the_same_bytes(rng):
    for d in SIZES:
        positive = torch.rand(d, generator=rng) < 0.5
        packed = pack_signs(positive)
        on_gpu = pack_signs(positive.cuda())
        assert on_gpu.is_cuda and torch.equal(on_gpu.cpu(), packed)
        assert torch.equal(unpack_signs(on_gpu, d).cpu(), positive)
        total = torch.randn(d, generator=rng)
        total_on_gpu = total.cuda()
        add_signs(total, packed, 0.3)
        add_signs(total_on_gpu, on_gpu, 0.3)
        assert torch.equal(total_on_gpu.cpu(), total)
