"""Two layers that follow each other in an nn.Sequential, computed as one."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

Joint = Callable[[nn.Module, nn.Module], Callable[[Tensor], Tensor] | None]
"""What two layers compute together, if there is a better way than one after the other."""


def join_pairs(model: nn.Module, joint: Joint) -> None:
    """Let every Sequential compute such pairs jointly.

    Layers taken out of the Sequential and called by themselves work as always; pairs with hooks are not joined.
    """
    for sequence in model.modules():
        if type(sequence) is nn.Sequential and any(joint(*pair) for pair in pairwise(sequence)):
            sequence.forward = partial(_forward, sequence, joint)  # type: ignore[method-assign]


def _forward(sequence: nn.Sequential, joint: Joint, x: Tensor) -> Tensor:
    layers = list(sequence)
    while layers:
        pair = layers[:2]
        compute = joint(*pair) if len(pair) == 2 and not any(map(_is_watched, pair)) else None
        x = layers[0](x) if compute is None else compute(x)
        del layers[: 1 if compute is None else 2]
    return x


def _is_watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
