"""The public model: every holder has the same bits, messages have the length that is counted, and nobody drifts."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbat.errors import WireError
from fedbat.following import HASH_BYTES, Follower, Leader, follow, max_steps, message_bytes
from fedbat.layout import Entry, Layout, layout_of, tensors_of
from fedbat.models import build_model
from fedbat.wire import dense_upload_bytes, signs_upload_bytes
from tests.reference import decode as reference
from tests.wire_messages import reference_layout, seal

HEADER = 24 + 2 * HASH_BYTES


def small():
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5))


def start(model=None):
    model = model or small()
    layout = layout_of(model)
    return Leader(Follower.of(layout, tensors_of(model, layout)))


def moved(w, rng, by=0.01):
    return {k: x + by * torch.randn(x.shape, generator=rng) if x.is_floating_point() else x + 1 for k, x in w.items()}


def led(leader, num_steps, rng):
    """The leader after every step, the first one included."""
    leaders, w = [leader], leader.public.w
    for _ in range(num_steps):
        w = moved(w, rng)
        leaders.append(leaders[-1].lead(w))
    return leaders


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a
    )


def client_of(leader):
    """Who has loaded the whole model."""
    return follow(leader.public.layout, None, leader.message(None))


@pytest.mark.parametrize("model", [small, lambda: build_model("resnet10-narrow", (3, 32, 32), 10, 0)])
def test_whoever_hears_all_steps_holds_the_public_model_bit_for_bit(model, rng):
    leaders = led(start(model()), 6, rng)
    first = client_of(leaders[0])
    assert same(first.w, leaders[0].public.w)
    each, rarely = first, first
    for version, leader in enumerate(leaders):
        each = each.apply(leader.message(each.held))
        if version % 3 == 0:
            rarely = rarely.apply(leader.message(rarely.held))
            assert same(rarely.w, leader.public.w)
        late = client_of(leader)
        assert same(each.w, leader.public.w) and same(late.w, each.w)
        assert each.held == late.held == leader.public.held and each.version == version


def test_a_step_is_the_slow_obvious_one_and_the_rest_is_the_latest(rng):
    leader = start()
    w = moved(leader.public.w, rng)
    after = leader.lead(w).public
    for entry in leader.public.layout.compressed:
        missing = w[entry.name] - leader.public.w[entry.name]
        step = missing.abs().mean()
        expected = leader.public.w[entry.name] + torch.where(missing > 0, step, -step)
        assert torch.equal(after.w[entry.name], expected)
    assert all(torch.equal(after.w[entry.name], w[entry.name]) for entry in leader.public.layout.rest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_types_are_followed_bit_for_bit_too(dtype, rng):
    layout = Layout([Entry("a", "compress", dtype, torch.Size([4, 40])), Entry("b", "dense", dtype, torch.Size([3]))])
    w = {e.name: torch.randn(e.shape, generator=rng, dtype=torch.float64).to(dtype) for e in layout}
    leaders = led(Leader(Follower.of(layout, w)), 3, rng)
    client = client_of(leaders[0])
    twin = reference.follow(leaders[0].message(None), reference_layout(layout), None)
    for leader in leaders[1:]:
        message = leader.message(client.held)
        client, twin = client.apply(message), reference.follow(message, reference_layout(layout), twin)
        assert same(client.w, leader.public.w) and same(client_of(leader).w, client.w)
        assert client.w["a"].dtype == dtype
        assert twin == (client.version, {name: x.reshape(-1).tolist() for name, x in client.w.items()})


def test_a_channels_last_model_sends_the_same_bytes(rng):
    plain, w = start(), None
    other = Leader(Follower(plain.public.layout, 0, {k: channels_last(x) for k, x in plain.public.w.items()}))
    w = moved(plain.public.w, rng)
    assert plain.lead(w).message(None) == other.lead({k: channels_last(x) for k, x in w.items()}).message(None)
    assert plain.public.held == other.public.held


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def test_messages_have_the_length_that_is_counted_and_the_shorter_one_is_sent(rng):
    leader = start()
    layout = leader.public.layout
    limit = max_steps(layout)
    leaders = led(leader, limit + 3, rng)
    assert limit > 3 and message_bytes(layout, limit) < message_bytes(layout, None)
    one_more = 2 * message_bytes(layout, limit) - message_bytes(layout, limit - 1)
    assert one_more >= message_bytes(layout, None)
    last = leaders[-1]
    assert len(last.steps) == limit  # what could only be longer than the model is forgotten
    for missed, old in enumerate(reversed(leaders)):
        raw = last.message(old.public.held)
        assert len(raw) == message_bytes(layout, missed) == min(len(raw), len(last.message(None)))
        assert same(old.public.apply(raw).w, last.public.w)
    assert len(last.message(None)) == message_bytes(layout, None)
    assert len(last.message(last.public.held)) == HEADER == message_bytes(layout, 0)


def test_a_model_without_weights_to_compress_always_travels_whole(rng):
    model = nn.BatchNorm1d(4)
    leaders = led(start(model), 2, rng)
    assert max_steps(leaders[0].public.layout) == 0
    raw = leaders[2].message(leaders[1].public.held)
    assert len(raw) == message_bytes(leaders[0].public.layout, 1) == message_bytes(leaders[0].public.layout, None)
    assert same(leaders[1].public.apply(raw).w, leaders[2].public.w)


# Written down


GOLDEN = json.loads((Path(__file__).parent / "golden" / "following.json").read_text())


def test_the_golden_messages_are_read_alike_by_us_and_by_a_reader_made_from_the_page():
    layout, models = Layout.from_text(GOLDEN["layout"]), GOLDEN["models"]
    tensors = reference_layout(layout)
    first = Follower(layout, 0, {e.name: torch.tensor(models[0][e.name]).view(e.shape) for e in layout})
    whole, steps = bytes.fromhex(GOLDEN["whole"]), bytes.fromhex(GOLDEN["steps"])
    for follower in (follow(layout, None, whole), first.apply(steps)):
        assert {name: x.reshape(-1).tolist() for name, x in follower.w.items()} == models[2]
    assert [first.held.hash.hex(), follower.held.hash.hex()] == [GOLDEN["hashes"][0], GOLDEN["hashes"][2]]
    assert reference.follow(whole, tensors, None) == reference.follow(steps, tensors, (0, models[0])) == (2, models[2])
    for held in (None, (1, models[0]), (0, models[1])):
        with pytest.raises(reference.Invalid):
            reference.follow(steps, tensors, held)


def test_minus_zeros_of_a_layer_that_stands_still_stay_what_they_are():
    """-0 + (-0) is -0: the hash tells it from 0, and so would every other reader of the page."""
    layout = Layout(
        [
            Entry("a", "compress", torch.float32, torch.Size([2, 20])),
            Entry("b", "dense", torch.float32, torch.Size([3])),
        ]
    )
    w = {"a": torch.full((2, 20), -0.0), "b": torch.tensor([-0.0, 0.0, 1e-45])}
    leader = Leader(Follower.of(layout, w)).lead(w)
    assert torch.signbit(leader.public.w["a"]).all() and torch.signbit(leader.public.w["b"]).tolist() == [
        True,
        False,
        False,
    ]
    tensors, first = reference_layout(layout), {name: x.reshape(-1).tolist() for name, x in w.items()}
    _, model = reference.follow(leader.message(Follower.of(layout, w).held), tensors, (0, first))
    assert [math.copysign(1, x) for x in model["a"]] == [-1] * 40


# Nobody drifts


def cut(message):
    """Header, payloads."""
    pieces, at = [message[:HEADER]], HEADER
    while at < len(message):
        (length,) = struct.unpack_from("<Q", message, at + 28)
        pieces.append(message[at : at + length])
        at += length
    return pieces


def swapped(m):
    header, first, second, *rest = cut(m)
    return b"".join([header, second, first, *rest])


def missing(m):
    header, first, _, *rest = cut(m)
    return b"".join([header, first, *rest])


def repeated(m):
    header, first, *rest = cut(m)
    return b"".join([header, first, first, *rest])


def rest_missing(m):
    return b"".join(cut(m)[:-1])


def renumbered(m):
    """A swap that hides: each step says the other's number, with a checksum that fits."""
    header, first, second, *rest = cut(m)
    first, second = (seal(x[:20] + y[20:28] + x[28:]) for x, y in ((first, second), (second, first)))
    return b"".join([header, second, first, *rest])


def one_sign_turned(m):
    """With a checksum that fits."""
    header, first, *rest = cut(m)
    first = first[:-1] + bytes([first[-1] ^ 1])
    return b"".join([header, seal(first), *rest])


def other_rest(m):
    *before, rest = cut(m)
    return b"".join([*before, seal(rest[:-8] + bytes([rest[-8] ^ 1]) + rest[-7:])])


WRONG = {
    "swapped": (swapped, "step to version 2: context 3, expected 2"),
    "missing": (missing, "step to version 3"),
    "repeated": (repeated, "step to version 3: context 2, expected 3"),
    "rest missing": (rest_missing, "the steps end at version 4, expected 4 and the rest"),
    "one more": (lambda m: m + cut(m)[-1], "bytes follow the last payload"),
    "a tail": (lambda m: m + b"\0", "cut short"),
    "cut short": (lambda m: m[:-1], "cut short"),
    "swapped, and numbers too": (renumbered, "leads to a model with hash"),
    "a sign turned": (one_sign_turned, "leads to a model with hash"),
    "another rest": (other_rest, "leads to a model with hash"),
    "another format": (lambda m: m[:4] + b"\2" + m[5:], "format version 2"),
    "not ours": (lambda m: b"FBAT" + m[4:], "bring no public model"),
    "nothing": (lambda m: b"", "cut short"),
}


@pytest.mark.parametrize("what", WRONG)
def test_whoever_gets_a_wrong_message_is_told_why_and_keeps_what_it_has(what, rng):
    change, reason = WRONG[what]
    leaders = led(start(), 4, rng)
    holder, message = leaders[1].public, leaders[4].message(leaders[1].public.held)
    before = {k: x.clone() for k, x in holder.w.items()}
    with pytest.raises(WireError, match=reason):
        holder.apply(change(message))
    assert same(holder.w, before) and same(holder.apply(message).w, leaders[4].public.w)


def test_whoever_holds_something_else_is_told_so(rng):
    leaders = led(start(), 4, rng)
    layout, message = leaders[0].public.layout, leaders[4].message(leaders[2].public.held)
    with pytest.raises(WireError, match="version 1 is held: some were missed"):
        leaders[1].public.apply(message)
    with pytest.raises(WireError, match="version 3 is held: they were applied before"):
        leaders[3].public.apply(message)
    with pytest.raises(WireError, match="no model is held"):
        follow(layout, None, message)
    others = led(start(), 2, torch.Generator().manual_seed(1))  # another training from the same first model
    with pytest.raises(WireError, match="another training's, or damaged"):
        others[2].public.apply(message)
    spoiled = {k: x.clone() for k, x in leaders[2].public.w.items()}
    spoiled["0.weight"].view(-1)[7].view(torch.int32).bitwise_xor_(1)
    with pytest.raises(WireError, match="another training's, or damaged"):
        Follower(layout, 2, spoiled).apply(message)
    with pytest.raises(WireError, match="same model and the same roles"):
        follow(layout_of(nn.Linear(3, 3)), None, leaders[4].message(None))
    for leader in others[1:]:  # a server that does not know what somebody holds sends all of it
        assert len(leaders[4].message(leader.public.held)) == message_bytes(layout, None)


def test_what_is_followed_can_be_kept_up_to_the_last_version(rng):
    last = 2**63 - 1
    model = nn.Linear(3, 30)
    layout = layout_of(model)
    w = {name: x.clone() for name, x in tensors_of(model, layout).items()}
    found = follow(layout, None, Leader(Follower.of(layout, w, last)).message(None))
    assert Follower.from_tensors(layout, found.to_tensors()).held == found.held
    beyond = Leader(Follower.of(layout, w, last)).lead(moved(w, rng))
    for raw in (beyond.message(None), beyond.message(found.held)):
        with pytest.raises(WireError, match="expected less than 2\\^63"):
            found.apply(raw)


@pytest.mark.parametrize("missed", [None, 0, 1, 2])
def test_every_flipped_bit_is_noticed(missed, rng):
    leaders = led(start(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), 3, rng)
    holder = leaders[3 - (missed or 0)].public
    message = leaders[3].message(None if missed is None else holder.held)
    for bit in range(8 * len(message)):
        wrong = bytearray(message)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            holder.apply(bytes(wrong))
    for length in range(len(message)):
        with pytest.raises(WireError):
            holder.apply(message[:length])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans(), st.integers(0, 2**64 - 1))
def test_random_bytes_are_refused(tail, steps, version):
    """Behind a good header too; however far it claims to lead, no more than what is there is read."""
    leader = start(nn.Linear(3, 3))
    start_, end = (leader.public.held if steps else (0, bytes(HASH_BYTES))), (version, bytes(HASH_BYTES))
    header = struct.pack("<4sBBHQ16sQ16s", b"FBPM", 1, int(steps), 0, *start_, *end)
    for raw in (tail, header + tail):
        with pytest.raises(WireError):
            leader.public.apply(raw)


def test_steps_as_long_as_the_whole_model_are_not_kept():
    exact = 0
    for numel in range(1, 3000):
        layout = Layout([Entry("w", "compress", torch.float32, torch.Size([numel]))])
        whole = dense_upload_bytes(layout) - dense_upload_bytes(layout.rest)
        limit, step = max_steps(layout), signs_upload_bytes(layout.compressed)
        assert limit * step < whole <= (limit + 1) * step
        exact += whole == (limit + 1) * step
    assert exact
