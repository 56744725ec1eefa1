"""A ReLU that changes places with a max-pooling: nothing else changes, to the last bit."""

import copy

import pytest
import torch
from torch import nn

from fedbat.engine.pooling import pool_first


def steps(model, x, memory_format):
    """Outputs, gradients and weights of a few steps."""
    model = model.to(memory_format=memory_format)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        y = model(x.contiguous(memory_format=memory_format).requires_grad_())
        y.square().sum().backward()
        optimizer.step()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*found, *model.state_dict().values()]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d(2, ceil_mode=True)])
@pytest.mark.parametrize("inplace", [False, True])
def test_the_exchange_changes_no_bit(memory_format, pool, inplace):
    torch.manual_seed(0)
    native = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace), pool, nn.Conv2d(8, 4, 3)
    )
    x = torch.randn(5, 3, 15, 15).round(decimals=1)  # with ties
    with torch.no_grad():
        native[1].bias[:4] -= 2  # whole windows that are not positive
    exchanged = copy.deepcopy(native)
    pool_first(exchanged)
    exchanged[2].forward = None  # nobody calls it
    pairs = zip(steps(exchanged, x, memory_format), steps(native, x, memory_format), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_what_is_watched_stays_where_it_is():
    x, seen = torch.randn(2, 3, 8, 8), []
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    model[0].register_forward_hook(lambda module, args, result: seen.append(result))
    pool_first(model)
    assert torch.equal(model(x), nn.MaxPool2d(2)(x.relu())) and torch.equal(seen[0], x.relu())


@pytest.mark.parametrize("pair", [(nn.ReLU6(), nn.MaxPool2d(2)), (nn.ReLU(), nn.MaxPool2d(2, return_indices=True))])
def test_other_layers_stay_where_they_are(pair):
    model = nn.Sequential(*pair)
    pool_first(model)
    assert "forward" not in vars(model)


def test_layers_that_are_called_by_themselves_are_what_they_were():
    """As in models that keep what some layers give, or run a part of a Sequential."""
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    pool_first(model)
    assert torch.equal(model[0](x), x.relu()) and torch.equal(model[:1](x), x.relu())
    assert torch.equal(model[:2](x), model[1](x.relu())) and torch.equal(model(x), model[1](x.relu()).flatten(1))
