"""3x3 convolutions of 3x3 images with a third of the products: 16 for a pair of channels in place of 49.

In one dimension, with zeros around x,

    y = (w1 x0 + w2 x1,  w0 x0 + w1 x1 + w2 x2,  w0 x1 + w1 x2)

has seven products. Four suffice, p and p' for what is even in x and q and q' for what is odd:

    p = (w1 + 2/3 (w0 + w2)) (x1 + 2/3 (x0 + x2))      p' = (w1 - 2/3 (w0 + w2)) (x1 - 2/3 (x0 + x2))
    q = (w1 + 2 (w0 - w2)) (x1 - 2 (x0 - x2))          q' = (w1 - 2 (w0 - w2)) (x1 + 2 (x0 - x2))

    y0 + y2 = 3/4 (p - p')      y0 - y2 = 1/4 (q' - q)      y1 = 9/16 (p + p') - 1/16 (q + q')

In two dimensions it is done along one and then the other: the matrices below become Kronecker products. Each of the 16
products, summed over channels, is a product of matrices. The result is no less exact than that of the usual sums.
"""

from functools import partial

import torch
from torch import Tensor, nn


def _twice(matrix: list[list[float]]) -> Tensor:
    """Along both dimensions."""
    one = torch.tensor(matrix, dtype=torch.float64)
    return torch.kron(one, one).float()


_FILTER = _twice([[2 / 3, 1, 2 / 3], [-2 / 3, 1, -2 / 3], [2, 1, -2], [-2, 1, 2]])
_IMAGE = _twice([[2 / 3, 1, 2 / 3], [-2 / 3, 1, -2 / 3], [-2, 1, 2], [2, 1, -2]])
_RESULT = _twice([[3 / 8, -3 / 8, -1 / 8, 1 / 8], [9 / 16, 9 / 16, -1 / 16, -1 / 16], [3 / 8, -3 / 8, 1 / 8, -1 / 8]])
_FEWEST = 32  # channels; with fewer, calls cost more than products


def multiply_less(model: nn.Module) -> None:
    """Let convolutions of many channels, without stride or bias, compute like this when 3x3 images come in training."""
    for module in model.modules():
        # Exactly these: a subclass may mean something else.
        if type(module) is nn.Conv2d and _suits(module):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _suits(conv: nn.Conv2d) -> bool:
    plain = conv.bias is None and conv.groups == 1 and conv.padding_mode == "zeros"
    shape = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    enough = min(conv.in_channels, conv.out_channels) >= _FEWEST
    return plain and shape == ((3, 3), (1, 1), (1, 1), (1, 1)) and enough


def _forward(conv: nn.Conv2d, x: Tensor) -> Tensor:
    watched = conv._forward_pre_hooks or conv._forward_hooks  # which may look at what is saved for the way back
    full = x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    if watched or not full or not conv.training or x.shape[2:] != (3, 3):
        return nn.Conv2d.forward(conv, x)
    return convolve(x, conv.weight)


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """conv2d(x, weight, padding=1) of images [n, in, 3, 3] with filters [out, in, 3, 3]."""
    images = (_IMAGE @ _pixels(x)).view(16, *x.shape[:2])
    filters = (_FILTER @ _pixels(weight)).view(16, *weight.shape[:2])
    y = _RESULT @ (images @ filters.mT).view(16, -1)  # [9, n * out]
    return y.view(3, 3, len(x), len(weight)).permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)


def _pixels(t: Tensor) -> Tensor:
    """[a, b, 3, 3] as [9, a * b]."""
    return t.permute(2, 3, 0, 1).reshape(9, -1)
