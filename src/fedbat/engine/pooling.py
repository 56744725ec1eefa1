"""ReLU after max-pooling, where a model has it before: the same bits forward and back, on a quarter of the values."""

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def pool_first(model: nn.Module) -> None:
    """Let a MaxPool2d that follows a ReLU in a Sequential do the ReLU's work on what it has chosen.

    The largest of some values, if it is positive, is also the largest of their positive parts; if it is not, neither
    order lets a gradient through.
    """
    paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for sequence in [module for module in model.modules() if type(module) is nn.Sequential]:
        for relu, pool in pairwise(sequence):
            # Exactly these: a subclass may mean something else.
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and paths[id(relu)] == paths[id(pool)] == 1:
                _exchange(relu, pool)


def _exchange(relu: Any, pool: Any) -> None:
    if not pool.return_indices and not any(map(_is_watched, (relu, pool))):
        relu.forward = _same
        pool.forward = partial(_pooled, pool)


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _same(x: Tensor) -> Tensor:
    return x


def _pooled(pool: nn.MaxPool2d, x: Tensor) -> Tensor:
    return torch.relu_(nn.MaxPool2d.forward(pool, x))  # in place: pooling needs its input, not its result
