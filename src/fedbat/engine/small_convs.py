"""3x3 convolutions of small images with fewer products: 16 in place of 49 for 3x3 images, 100 in place of 361 for 7x7.

In one dimension, with zeros around x, and with s = w0 + w2 and d = w0 - w2,

    y = (w1 + s S + d K) x        S = (L + L') / 2,  K = (L - L') / 2,  where L moves x by one place.

The eigenvectors of S are sines, half of them even and half odd; K turns odd into even. An odd one, f with S f = c f and
g = K f, takes two products,

    p = (w1 + c s - d) (g'x + f'x)        q = (w1 + c s + d) (g'x - f'x)

because (p - q) / 2 = (w1 + c s) f'x - d g'x is its share f'y of the result, and -(p + q) / 2 = d f'x - (w1 + c s) g'x
is what it gives to g, except for a last term that is even in x and free of d. What is left is also even,

    (w1 P + s Q) x        P = 1 + sum of g g',  Q = S + sum of c g g',

and P, being positive, can be diagonalized together with Q: one product for each even eigenvector. For a side of m
pixels that makes m + m // 2 products in place of 3 m - 2. The result is no less exact than the usual one, which adds up
more terms.

In two dimensions this is done along one and then the other. Products are summed over channels by matrix products.
"""

from functools import cache, partial
from math import pi

import torch
from torch import Tensor, nn

_FEWEST = 64  # channels; with fewer, the work around the products costs more than they do


def multiply_less(model: nn.Module) -> None:
    """Let convolutions with many channels and no stride or bias compute this way in training, where it is faster."""
    for module in model.modules():
        # Exactly these: a subclass may do something else.
        if type(module) is nn.Conv2d and _suits(module):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _suits(conv: nn.Conv2d) -> bool:
    plain = conv.bias is None and conv.groups == 1 and conv.padding_mode == "zeros"
    shape = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    enough = min(conv.in_channels, conv.out_channels) >= _FEWEST
    return plain and shape == ((3, 3), (1, 1), (1, 1), (1, 1)) and enough


def _forward(conv: nn.Conv2d, input: Tensor) -> Tensor:  # named as PyTorch's is: callers may say conv(input=...)
    x = input
    watched = conv._forward_pre_hooks or conv._forward_hooks  # hooks may look at what is saved for the backward pass
    full = x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    if watched or not full or not conv.training or not _is_faster(x.shape):
        return nn.Conv2d.forward(conv, x)
    return convolve(x, conv.weight)


def _is_faster(shape: torch.Size) -> bool:
    """Whether there are enough images to make up for transforming the filters."""
    return len(shape) == 4 and shape[2] == shape[3] and _num_products(shape[2]) ** 2 <= 2 * shape[0]


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """conv2d(x, weight, padding=1) of square images [n, in, m, m] with filters [out, in, 3, 3]."""
    (n, _, side, _), out = x.shape, len(weight)
    for_images, for_filters, for_results = matrices(side)
    images, filters = (
        _along_both(matrix, t.permute(2, 3, 0, 1)).view(-1, *t.shape[:2])
        for matrix, t in ((for_images, x), (for_filters, weight))
    )
    products = images @ filters.mT  # [number, n, out]
    y = _along_both(for_results, products.view(_num_products(side), -1, n * out)).view(side, side, n, out)
    return y.permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)


@cache
def matrices(side: int) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices for images, filters and results: in one dimension y = results ((filters w) * (images x))."""
    places = torch.arange(1, side + 1, dtype=torch.float64)
    angles = places * pi / (side + 1)
    sines, cosines = (2 / (side + 1)) ** 0.5 * torch.sin(torch.outer(places, angles)), torch.cos(angles)
    even, f, c = sines[:, ::2], sines[:, 1::2], cosines[1::2]
    shift = torch.diag(torch.ones(side - 1, dtype=torch.float64), -1)
    g = (shift - shift.T) / 2 @ f

    z = even.T @ g  # P and Q in terms of the even eigenvectors
    root = torch.linalg.cholesky(torch.eye(len(z), dtype=torch.float64) + z @ z.T)
    half = torch.linalg.solve_triangular(root, torch.diag(cosines[::2]) + z * c @ z.T, upper=False)
    values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(root, half.T, upper=False))
    left = even @ root @ vectors  # P = left left', Q = left values left'

    w0, w2 = torch.cat([values, c - 1, c + 1]), torch.cat([values, c + 1, c - 1])
    images = torch.cat([left, g + f, g - f], dim=1).T
    filters = torch.stack([w0, torch.ones_like(w0), w2], dim=1)
    results = torch.cat([left, (f - g) / 2, -(f + g) / 2], dim=1)
    return images.float().contiguous(), filters.float(), results.float()


def _num_products(side: int) -> int:
    """The number of products in one dimension."""
    return side + side // 2


def _along_both(matrix: Tensor, t: Tensor) -> Tensor:
    """The matrix [a, b] applied to the first two dimensions of t [b, b, ...]: [a, a, all the rest]."""
    a, b = matrix.shape
    once = (matrix @ t.reshape(b, -1)).view(a, b, -1)
    return torch.bmm(matrix.expand(a, a, b), once)
