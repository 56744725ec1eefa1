"""ReLU after max-pooling, where a model has it before: the same bits forward and back, on a quarter of the values."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn


def pool_first(model: nn.Module) -> None:
    """Let every Sequential in which a MaxPool2d follows a ReLU do the ReLU's work on what the pooling has chosen.

    The largest of some values, if it is positive, is also the largest of their positive parts; if it is not, neither
    order lets a gradient through. Who takes the layers out of the Sequential and calls them gets what they always give.
    """
    for sequence in model.modules():
        if type(sequence) is nn.Sequential and any(_are_relu_and_pool(*pair) for pair in pairwise(sequence)):
            sequence.forward = partial(_forward, sequence)  # type: ignore[method-assign]


def _forward(sequence: nn.Sequential, x: Tensor) -> Tensor:
    """nn.Sequential's, with such pairs the other way round."""
    relu_is_due = False
    for module, following in pairwise([*sequence, None]):
        if following is not None and _may_change_places(module, following):
            relu_is_due = True
        elif relu_is_due:
            x, relu_is_due = torch.relu_(module(x)), False  # in place: pooling needs its input, not its result
        else:
            x = module(x)
    return x


def _are_relu_and_pool(first: nn.Module, second: nn.Module) -> bool:
    # Exactly these: a subclass may mean something else.
    return type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices


def _may_change_places(first: nn.Module, second: nn.Module) -> bool:
    return _are_relu_and_pool(first, second) and not _is_watched(first) and not _is_watched(second)


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
