"""What a method says that it sends is what it sends, and nothing else is taken for it."""

import dataclasses

import pytest
import torch
from torch import nn

from fedbat import METHODS, Server, WireError, begin, make_method
from fedbat.channels import Channels
from fedbat.levels import Levels, OddLevels
from fedbat.parts import Dense, Kind, Record, Signs, Sparse
from fedbat.seeded_parts import MaskedNoise, RotatedLevels, RotatedSigns
from fedbat.wire import KINDS

SETTINGS = {
    "fedbat": [{"bits": str(bits)} for bits in (1, 2, 3, 4)] + [{"sent": "last"}],
    "eden": [{"bits": str(bits)} for bits in (1, 2, 3, 4)],
    "fedmrn": [{"mask": "binary"}, {"mask": "signed"}],
    "fedpaq": [{"bits": str(bits)} for bits in range(2, 9)],
    "zerofl": [{"variant": variant} for variant in ("weights", "diff-on-weights", "weights-diff")],
}
VARIANTS = [(name, settings) for name in sorted(METHODS) for settings in SETTINGS.get(name, [{}])]
X = torch.linspace(-1, 1, 12)
BITS, SCALE, SEED = X > 0, torch.tensor(0.01), torch.tensor(7)
PARTS = [  # of twelve values: every kind in each of its forms
    Dense(X), Signs.of(BITS, SCALE), RotatedSigns.of(BITS, SCALE, SEED),
    Sparse(torch.tensor([3]), X[:1], 12), Sparse(torch.arange(12), X, 12),
    *(Levels.of(X.sign(), SCALE, width) for width in range(2, 9)),
    *(OddLevels.of(BITS, SCALE, width) for width in (2, 3, 4)),
    *(RotatedLevels.of(BITS, SCALE, SEED, width) for width in (2, 3, 4)),
    *(MaskedNoise.of(BITS, SCALE, SEED, signed) for signed in (False, True)),
    *(Channels.of(X.view(3, 4), width) for width in (2, 3, 4, 8)),
]  # fmt: skip


def trained(method):
    """A model, and what a client uploads after it has trained it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))
    server = Server(method, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(method, model, optimizer, 6, memory={})
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    return server, local.finish().payload


def test_every_kind_is_tried():
    assert {part.KIND for part in PARTS} == set(KINDS)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_what_a_method_sends_is_taken_and_nothing_else(name, settings):
    method = make_method(name, settings)
    server, payload = trained(method)
    server.add(payload.to_bytes(), 1)
    sent = {part.record()[:2] for part in payload.parts.values()}
    sparse = Kind(Sparse, None) in method.kinds
    refused = 0
    for part in PARTS:
        raw = dataclasses.replace(payload, parts=payload.parts | {"0.weight": part}).to_bytes()
        if part.record()[:2] in sent or (part.KIND == Sparse.KIND and sparse):
            server.add(raw, 1)
            continue
        with pytest.raises(WireError) as caught:
            server.add(raw, 1)
        got, expected = Kind(type(part), part.record().parameter), method.kinds[0]
        assert f"0.weight: part of kind {got}, expected {expected}; sender and receiver must" in str(caught.value)
        refused += 1
    assert refused == len(PARTS) - (2 if sparse else 1)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_step_sizes_lie_where_the_method_says(name, settings):
    method = make_method(name, settings)
    _, payload = trained(method)
    if method.step_bounds is not None:
        low, high = method.step_bounds
        steps = [float(part.step) for part in payload.parts.values()]
        assert all(low * (1 - 1e-6) <= step <= high * (1 + 1e-6) for step in steps)


def test_a_method_that_sends_several_kinds_lists_them():
    kinds = (Kind(Signs), Kind(Sparse, None))
    for record, fits in ((Record(1, 0, 9), True), (Record(3, 5, 9), True), (Record(1, 1, 9), False)):
        assert any(kind.fits(record) for kind in kinds) == fits
