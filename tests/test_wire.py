"""Wire format v1: golden bytes, an independent reader, sizes, and what goes in."""

import math
import re
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import make_golden

from fedbat import wire
from fedbat.channels import WIDTHS
from fedbat.errors import ConfigError, WireError
from fedbat.layout import Layout, layout_of, tensors_of
from fedbat.models import build_model
from fedbat.parts import Dense, Signs
from fedbat.wire import HEADER_BYTES, Payload, dense_upload_bytes
from tests.reference import decode as reference
from tests.wire_messages import (
    GOLDEN,
    ROOT,
    VECTORS,
    entry,
    expected_values,
    golden,
    layout_from,
    layouts,
    payloads,
    reference_layout,
    seal,
    values_of,
)

# Golden vectors.


def payload_from(vector):
    layout = layout_from(vector)
    parts = {name: make_golden.part_of(**part) for name, part in vector["parts"].items()}
    rest = {e.name: torch.tensor(vector["rest"][e.name], dtype=e.dtype).view(e.shape) for e in layout.rest}
    return Payload(layout, parts, rest, vector["context"])


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


def test_parts_of_ones_own_take_private_numbers(monkeypatch):
    monkeypatch.setattr(wire, "KINDS", dict(wire.KINDS))

    def part(name, kind):
        return type(name, (Signs,), {"KIND": kind})

    assert wire.register(first := part("First", 224)) is wire.KINDS[224] is first
    again = wire.register(part("First", 224))  # as in a notebook
    assert wire.KINDS[224] is again
    with pytest.raises(
        ConfigError, match=r"Second.KIND is 224, which .*First has already; choose another from 224 to 25"
    ):
        wire.register(part("Second", 224))
    for kind in (1, 6, 40, 223, 256, None):
        with pytest.raises(ConfigError, match=f"Third.KIND is {kind}, expected 224 to 255, which no release assigns"):
            wire.register(part("Third", kind))
