"""DRIVE, EDEN and FedMRN: the laws their papers state, and what they cost on the wire."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedbat import begin, make_method
from fedbat.binarize import straight_through
from fedbat.errors import WireError
from fedbat.gaussian import gaussian_levels
from fedbat.method import Forward, Local, Method
from fedbat.methods.drive import DRIVE
from fedbat.methods.eden import EDEN
from fedbat.methods.fedmrn import FedMRN
from fedbat.parts import Reader, Record
from fedbat.rotation import rotate
from fedbat.seeded_parts import MaskedNoise, RotatedLevels, RotatedSigns
from fedbat.seeds import uniform
from fedbat.streams import UniformNoise
from fedbat.wire import KINDS

CPU = torch.device("cpu")
VARIANTS = [DRIVE(), DRIVE("mse"), *(EDEN(bits) for bits in (1, 2, 3, 4))]


def encode(method, m, seed=0, last=None):
    """Encode one layer called "x"."""
    parts, memory = method.encode({"x": m}, Local({"x": m}, last=last), {}, UniformNoise(seed, "test"))
    assert memory == {}
    return parts["x"]


def relative_error(part, m):
    return float(((part.unpack().view(m.shape) - m).double() ** 2).sum() / (m.double() ** 2).sum())


def distortion(bits):
    """D_b of the normal law's best quantizer, from its levels: 1 - E[q^2]."""
    levels = gaussian_levels(bits, CPU).double() if bits > 1 else torch.tensor([-1, 1]) * math.sqrt(2 / math.pi)
    edges = torch.cat([torch.tensor([-math.inf]), (levels[1:] + levels[:-1]) / 2, torch.tensor([math.inf])])
    return 1 - float((levels**2 * torch.special.ndtr(edges.double()).diff()).sum())


# DRIVE and EDEN


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_lloyd_max(bits):
    """Each level is the mean of the normal law between the middles to its neighbours."""
    levels = gaussian_levels(bits, CPU).double()
    edges = torch.cat([torch.tensor([-math.inf]), (levels[1:] + levels[:-1]) / 2, torch.tensor([math.inf])]).double()
    density = torch.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    torch.testing.assert_close(-density.diff() / torch.special.ndtr(edges).diff(), levels, rtol=0, atol=3e-7)
    assert distortion(bits) == pytest.approx({2: 0.1175, 3: 0.03454, 4: 0.009497}[bits], abs=5e-5)  # Max, 1960


@pytest.mark.parametrize("method", VARIANTS, ids=repr)
def test_relative_error_on_gaussian_input(method):
    """pi/2 - 1 and 1 - 2/pi for one bit; in general 1 / (1 - D_b) - 1."""
    law = {DRIVE(): math.pi / 2 - 1, DRIVE("mse"): 1 - 2 / math.pi}
    expected = law.get(method) or 1 / (1 - distortion(method.bits)) - 1
    errors = [
        relative_error(encode(method, m, seed), m)
        for seed in range(20)
        for m in [torch.randn(20_000, generator=torch.Generator().manual_seed(seed))]
    ]
    found = torch.tensor(errors)
    assert abs(float(found.mean()) - expected) < 5 * float(found.std()) / math.sqrt(20) + 1e-5
    assert found.std() < 0.03 * expected  # and so this says something


@pytest.mark.parametrize("method", [method for method in VARIANTS if method != DRIVE("mse")], ids=repr)
@pytest.mark.parametrize("d", [1, 2, 3, 100, 5000])
def test_the_unbiased_scale_keeps_the_inner_product(method, d, rng):
    """<m_hat, m> = ||m||^2: with a uniform rotation, whose law is the same around m, this is E[m_hat] = m."""
    m = torch.randn(d, generator=rng) ** 3
    assert float(encode(method, m).unpack() @ m) == pytest.approx(float(m @ m), rel=1e-5)


@pytest.mark.parametrize("bits", [1, 2])
def test_unbiased_under_a_uniform_rotation(bits):
    """The scale's claim itself, on few coordinates, with a rotation drawn from the uniform law."""
    d, repeats = 8, 20_000
    m = torch.tensor([1.0, 0.3, 0.1, 0, 0, -0.5, 0, 0], dtype=torch.float64)
    q, r = torch.linalg.qr(torch.randn(repeats, d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    rotation = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    y = rotation @ m
    levels = gaussian_levels(bits, CPU).double() if bits > 1 else torch.tensor([-1.0, 1.0], dtype=torch.float64)
    codes = torch.bucketize(y * math.sqrt(d) / m.norm(), (levels[1:] + levels[:-1]) / 2)
    scale = (m @ m) / (levels[codes] * y).sum(1)
    found = scale[:, None] * (rotation.transpose(1, 2) @ levels[codes][..., None])[..., 0]
    assert ((found.mean(0) - m).abs() < 5 * found.std(0) / math.sqrt(repeats)).all()


@pytest.mark.parametrize("method", [DRIVE(), EDEN(2)], ids=repr)
@pytest.mark.parametrize("d", [4096, 4608, 6000])
def test_unbiased_under_hadamard_for_dense_updates(method, d, rng):
    """Each coordinate's mean, and their sum along m, along one part of m and along ones, in five standard errors."""
    m = torch.randn(d, generator=rng) * torch.linspace(0.5, 1.5, d)
    repeats = 300
    sent = torch.stack([encode(method, m, seed).unpack() for seed in range(repeats)]).double()
    z = (sent.mean(0) - m) / (sent.std(0) / math.sqrt(repeats))
    assert z.abs().max() < 6  # of d coordinates; five for one
    assert abs(float((z**2).mean()) - 1) < 0.15
    first = torch.where(torch.arange(d) < d // 2, m, 0.0)  # the half of less energy
    for direction in (torch.ones(d), m.sign(), first):
        along = sent @ direction.double()
        assert abs(float(along.mean() - direction @ m)) < 5 * float(along.std()) / math.sqrt(repeats)


def test_the_mse_scale_is_the_best_and_shrinks(rng):
    m = torch.randn(4096, generator=rng)
    part = encode(DRIVE("mse"), m)
    best = relative_error(part, m)
    assert float(part.unpack() @ m / (m @ m)) == pytest.approx(2 / math.pi, abs=5 * 0.5 / 64)
    for factor in (0.95, 1.05):
        other = RotatedSigns(part.packed, part.scale * factor, part.seed, part.count)
        assert relative_error(other, m) > best
    assert part.scale == pytest.approx(float(rotate(m, part.seed).abs().mean()), rel=1e-5)


@pytest.mark.parametrize("d", [1, 7, 4096, 9 * 512])
def test_eden_of_one_bit_is_drive_bit_for_bit(d, rng):
    m = torch.randn(d, generator=rng)
    one, other = encode(EDEN(1), m), encode(DRIVE(), m)
    assert (one.record(), one.body()) == (other.record(), other.body())
    # And EDEN's own formula says the same: the level of one bit cancels.
    y, level = rotate(m, one.seed), math.sqrt(2 / math.pi)
    scale = float(m @ m / (level * y.sign() @ y))
    assert scale * level == pytest.approx(float(one.scale), rel=1e-5)


@pytest.mark.parametrize("method", VARIANTS, ids=repr)
@pytest.mark.parametrize("d", [1, 9, 4608, 10_000])
def test_no_padding_travels(method, d, rng):
    """ceil(b d / 8) bytes and the seed; the scale lies in the record."""
    bits = getattr(method, "bits", 1)
    part = encode(method, torch.randn(d, generator=rng))
    assert len(part.body()) == math.ceil(bits * d / 8) + 8 and part.nbits == bits * d + 32 + 64


@pytest.mark.parametrize("method", [*VARIANTS, FedMRN(), FedMRN("signed")], ids=repr)
@pytest.mark.parametrize("shape", [(0, 3), (5, 1), (64, 64)])
def test_a_layer_of_zeros_sends_zeros(method, shape):
    part = encode(method, torch.zeros(shape))
    assert part.step == 0 and not part.unpack().any() and part.numel == math.prod(shape)


def test_every_layer_client_and_round_has_its_own_rotation(rng):
    update = {name: torch.randn(100, generator=rng) for name in "ab"}
    seeds = [
        int(part.seed)
        for key in ((0, 0), (0, 1), (1, 0))
        for part in DRIVE().encode(update, Local(update), {}, UniformNoise(0, "noise", *key))[0].values()
    ]
    assert len(set(seeds)) == 6


# FedMRN


def fedmrn_world(method, progress, m, seed=0):
    """What the model computes with minus w, the noise n and the uniform numbers."""
    w, local = {"x": torch.zeros_like(m)}, Local({"x": m}, progress=torch.tensor(progress))
    u = UniformNoise(seed, "test")(w)
    seen = method.forward(w, local, u)
    return seen.weights["x"], seen.kept["x"], u["x"]


@pytest.mark.parametrize(("mask", "half_width"), [("binary", 0.01), ("signed", 0.005)])
def test_noise_is_uniform_and_bounded_away_from_zero(mask, half_width):
    d = 1 << 18
    _, n, _ = fedmrn_world(FedMRN(mask), 0.0, torch.zeros(d))
    assert n.abs().min() >= 1e-8 and n.abs().max() <= half_width
    variance = half_width**2 / 3
    assert abs(float((n**2).mean()) - variance) < 5 * half_width**2 * math.sqrt(4 / 45 / d)


@pytest.mark.parametrize("mask", ["binary", "signed"])
@pytest.mark.parametrize("index", [0, 3, 10, 12])
def test_masks_come_in_with_probability_s_over_tau(mask, index):
    """Elements see n M with probability s / tau, else n clip(m / n); in both cases E = n clip(m / n)."""
    d, lowest = 1 << 18, {"binary": 0.0, "signed": -1.0}[mask]
    method, share = FedMRN(mask), min(index / 10, 1.0)
    m = 0.004 * torch.randn(d, generator=torch.Generator().manual_seed(1))
    seen, n, _ = fedmrn_world(method, index / 10, m)
    ratio = (m / n).clamp(lowest, 1)
    inside = (ratio > lowest + 0.05) & (ratio < 0.95)  # where a mask can be told from what it stands for
    extreme = torch.isclose(seen / n, torch.tensor(lowest)) | torch.isclose(seen / n, torch.tensor(1.0))
    num = int(inside.sum())
    assert abs(float(extreme[inside].float().mean()) - share) <= 5 * math.sqrt(share * (1 - share) / num)
    assert torch.allclose((seen / n)[~extreme], ratio[~extreme], atol=1e-5)
    # A mask varies by (1 - r)(r - lowest) around its mean r; 2^-17 is what 16-bit noise may shift a probability by.
    error = (seen / n - ratio).double()
    spread = math.sqrt(share * float(((1 - ratio) * (ratio - lowest)).sum()))
    assert abs(float(error.sum())) <= 5 * spread + d * 2**-16


@pytest.mark.parametrize("mask", ["binary", "signed"])
def test_what_is_sent_is_a_fresh_mask_over_the_noise_that_was_trained_with(mask, rng):
    """E[n M] = n clip(m / n), coordinate by coordinate, over fresh masks."""
    torch.manual_seed(0)
    method, lowest = FedMRN(mask), {"binary": 0.0, "signed": -1.0}[mask]
    model = nn.Sequential(nn.Linear(30, 20, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local = begin(method, model, optimizer, 4)
    x = torch.randn(16, 30)
    noises = []
    for _ in range(4):
        model(x).pow(2).mean().backward()
        optimizer.step()
        noises.append(local._seen.kept["0.weight"])
    assert all(torch.equal(n, noises[0]) for n in noises)
    n, m, last = noises[0].reshape(-1), local._update()["0.weight"], local._local.last
    part = local.finish().payload.parts["0.weight"]
    values = {0.0, 1.0} if mask == "binary" else {-1.0, 1.0}
    assert torch.equal(n, uniform(part.seed, 600) * part.half_width)
    assert set((part.unpack() / n).tolist()) <= values
    repeats, expected = 400, (m.reshape(-1) / n).clamp(lowest, 1)
    masks = [
        method.encode({"x": m}, Local({"x": m}, last=last), {}, UniformNoise(k, "x"))[0]["x"] for k in range(repeats)
    ]
    mean = torch.stack([part.unpack() / n for part in masks]).mean(0)
    spread = ((1 - expected) * (expected - lowest) / repeats).sqrt()
    assert ((mean - expected).abs() <= 5.5 * spread + 2**-15).all()


@pytest.mark.parametrize("mask", ["binary", "signed"])
def test_gradients_pass_straight_through(mask, rng):
    """Against autograd through a forward pass that says so."""

    class Slow(FedMRN):
        def forward(self, w, local, u):
            seen = FedMRN.forward(self, w, local, u)
            weights = {k: straight_through(seen.weights[k] - w[k], m) + w[k] for k, m in local.update.items()}
            return Forward(weights, seen.kept, seen.shared)

    w = {k: torch.randn(6, 7, generator=rng) for k in "ab"}
    local = Local({k: 0.01 * torch.randn(6, 7, generator=rng) for k in "ab"}, progress=torch.tensor(0.5))
    u, grad = ({k: torch.rand(6, 7, generator=rng) for k in "ab"} for _ in range(2))
    fast, learned = FedMRN(mask).pull_back(w, local, u, Forward({}), grad)
    slow, _ = Method.pull_back(Slow(mask), w, local, u, Forward({}), grad)
    assert learned == {} and all(torch.equal(fast[k], slow[k]) for k in "ab")


def test_noises_of_clients_and_layers_are_independent():
    d = 1 << 16
    method, w = FedMRN(), {name: torch.zeros(d) for name in "ab"}
    noises = []
    for client in range(3):
        u = UniformNoise(0, "noise", 0, client)(w)
        noises += method.forward(w, Local(dict(w), progress=torch.tensor(0.0)), u).kept.values()
    stacked = torch.stack(noises) / 0.01
    correlation = 3 * stacked @ stacked.T / d
    assert (correlation - torch.eye(6)).abs().max() < 5 / math.sqrt(d)


def test_fedmrn_sends_one_bit_a_weight(rng):
    part = encode(FedMRN(), torch.randn(4608, generator=rng))
    assert len(part.body()) == 4608 // 8 + 8 and part.nbits == 4608 + 32 + 64
    assert encode(make_method("fedmrn", {"half_width": "0.5"}), torch.ones(3)).step == 0.5


# Their parts


@st.composite
def seeded_parts_of_size(draw, d):
    seed = torch.tensor(draw(st.integers(-(2**63), 2**63 - 1)))
    scale = torch.tensor(draw(st.floats(0, 2.0**63, width=32).map(abs)), dtype=torch.float32)
    bits = torch.tensor(draw(st.lists(st.booleans(), min_size=d, max_size=d)), dtype=torch.bool)
    kind, width = draw(st.sampled_from(["signs", "levels", "noise"])), draw(st.integers(2, 4))
    if kind == "signs":
        return RotatedSigns.of(bits, scale, seed)
    if kind == "noise":
        return MaskedNoise.of(bits, scale, seed, signed=draw(st.booleans()))
    codes = draw(st.lists(st.integers(0, 2**width - 1), min_size=d, max_size=d))
    return RotatedLevels.of(torch.tensor(codes, dtype=torch.int64), scale, seed, width)


def parse(record, body, d):
    reader = Reader(memoryview(body))
    part = KINDS[record.kind].parse(record, d, reader)
    reader.close()
    return part


@given(st.integers(0, 70).flatmap(seeded_parts_of_size), st.integers(1, 100_000))
@settings(deadline=None)
def test_a_part_survives_its_bytes_and_is_added_bit_for_bit(part, weight):
    again = parse(part.record(), part.body(), part.numel)
    assert type(again) is type(part) and torch.equal(again.unpack(), part.unpack())
    assert (again.record(), again.body(), again.nbits) == (part.record(), part.body(), part.nbits)
    assert (again.step, again.reach) == (part.step, None)
    assert 0 <= 8 * len(part.body()) + 32 - part.nbits < 8
    values = part.unpack()
    assert values.dtype == torch.float32 and values.shape == (part.numel,) and torch.isfinite(values).all()
    total = torch.zeros(part.numel)
    part.add_to(total, weight)
    assert torch.equal(total, values * weight)


ONE, SEED = struct.unpack("<I", struct.pack("<f", 1.0))[0], b"\xff" * 8


def word(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


HOSTILE = {
    "signs with parameter": (Record(16, 1, ONE), SEED + b"\1", 8, "parameter of a rotated signs tensor is 1"),
    "signs without seed": (Record(16, 0, ONE), SEED[:7], 8, "a seed needs 8 bytes, only 7"),
    "signs too short": (Record(16, 0, ONE), SEED + b"\1", 9, "needs 2 bytes, only 1"),
    "signs too long": (Record(16, 0, ONE), SEED + b"\1\1", 8, "1 bytes follow"),
    "signs padding": (Record(16, 0, ONE), SEED + b"\1\2", 9, "non-zero padding"),
    "levels of 1 bit": (Record(17, 1, ONE), SEED + b"\1", 8, "rotated levels of 1 bits, expected 2 to 4"),
    "levels of 5 bits": (Record(17, 5, ONE), SEED + bytes(5), 8, "rotated levels of 5 bits"),
    "levels of 255 bits": (Record(17, 255, ONE), SEED + bytes(255), 8, "rotated levels of 255 bits"),
    "levels too short": (Record(17, 3, ONE), SEED + bytes(2), 8, "needs 3 bytes, only 2"),
    "levels padding": (Record(17, 3, ONE), SEED + b"\x40", 2, "non-zero padding"),
    "mask of type 2": (Record(18, 2, ONE), SEED + b"\1", 8, "mask of type 2, expected 0 or 1"),
    "mask too short": (Record(18, 0, ONE), SEED, 1, "needs 1 bytes, only 0"),
    "mask padding": (Record(18, 1, ONE), SEED + b"\2", 1, "non-zero padding"),
} | {
    f"{kind} scale {value}{i}": (Record(kind, parameter, word(value)), SEED + b"\1", 2, "expected a finite number >= 0")
    for i, value in enumerate([math.nan, math.inf, -math.inf, -1.0, -1e-45, -0.0])
    for kind, parameter in ((16, 0), (17, 2), (18, 0))
} | {
    f"{kind} scale {value}": (Record(kind, parameter, word(value)), SEED + b"\1", 2, "expected less than 2\\^64")
    for value in (2.0**64, 3e38)
    for kind, parameter in ((16, 0), (17, 2))
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_parts(case):
    record, body, d, message = HOSTILE[case]
    with pytest.raises(WireError, match=message) as caught:
        parse(record, body, d)
    assert "; " in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("d", [1, 100, 5000, 9 * 2**15])
def test_a_gpu_finds_the_same_bits(d, rng):
    x, seed = torch.randn(d, generator=rng), torch.tensor(-5)
    assert torch.equal(rotate(x.cuda(), seed.cuda()).cpu(), rotate(x, seed))
    codes = torch.randint(0, 8, (d,), generator=rng)
    one = torch.tensor(0.3)
    for here, there in [
        (RotatedSigns.of(x > 0, one, seed), RotatedSigns.of((x > 0).cuda(), one.cuda(), seed.cuda())),
        (RotatedLevels.of(codes, one, seed, 3), RotatedLevels.of(codes.cuda(), one.cuda(), seed.cuda(), 3)),
        (MaskedNoise.of(x > 0, one, seed, True), MaskedNoise.of((x > 0).cuda(), one.cuda(), seed.cuda(), True)),
    ]:
        assert (here.record(), here.body()) == (there.record(), there.body())
        assert torch.equal(here.unpack(), there.unpack().cpu())
