"""One client's round to try things with: a small model, batches, loops and optimizers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from fedbat import begin


class RecordedNoise:
    """Draws once, hands out again: lets a twin see the same noise."""

    def __init__(self, seed=0, dtype=torch.float64):
        self.generator, self.dtype, self.drawn = torch.Generator().manual_seed(seed), dtype, []

    def __call__(self, like):
        self.drawn.append({k: torch.rand(x.shape, generator=self.generator, dtype=self.dtype) for k, x in like.items()})
        return self.drawn[-1]


def mlp(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def some_batches(num, dtype=torch.float32, size=32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num, size, 12, generator=generator, dtype=dtype)
    y = (x[..., :3] + 0.3 * x[..., 3:6]).argmax(-1)
    return list(zip(x, y, strict=True))


def run(model, optimizer, batches):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01),
}


def plain_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def accumulating_step(model, optimizer, x, y):
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(a), b) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def finish(method, num_steps, steps, model=None, **options):
    model = model or mlp()
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    local = begin(method, model, optimizer, num_steps, **{"memory": {}, **options})
    losses = run(model, optimizer, some_batches(steps)) if steps else []
    return local.finish(), model, start, losses


def holds_one_magnitude(model, local):
    """Whether every compressed layer differs from where it started by one +-alpha everywhere, up to rounding."""
    moved = [(dict(model.named_parameters())[k].detach() - w).abs() for k, w in local._w.items()]
    return all(x.min() > 0 and x.max() - x.min() < 1e-6 for x in moved)
