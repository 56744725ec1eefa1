"""ReLU after max-pooling where a model has it before: the same bits both ways, on a quarter of the values."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedbat.engine.pairs import join_pairs


def pool_first(model: nn.Module) -> None:
    """Let every Sequential in which a MaxPool2d follows a ReLU apply the ReLU to what the pooling has chosen.

    The largest of some values, if it is positive, is also the largest of their positive parts; if it is not, neither
    order lets a gradient through.
    """
    join_pairs(model, _pool_then_relu)


def _pool_then_relu(relu: nn.Module, pool: nn.Module) -> Callable[[Tensor], Tensor] | None:
    # Exactly these: a subclass may do something else.
    if type(relu) is not nn.ReLU or type(pool) is not nn.MaxPool2d or pool.return_indices:
        return None
    return lambda x: torch.relu_(pool(x))  # in place: pooling needs its input, not its result
