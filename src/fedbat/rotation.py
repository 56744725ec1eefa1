"""A seeded random rotation R of a flat vector of any length d, and its inverse, for DRIVE and EDEN.

R spreads every coordinate over all others, so that R x looks like ||x|| / sqrt(d) times Gaussian noise, whatever x is.
It uses two windows of length n, the largest power of two <= d, one at each end of the vector: R = B A P, where A
replaces the first n coordinates z by H D z and B does the same to the last n, with random signs D and the orthonormal
Hadamard matrix H. The windows overlap, since 2 n > d, so every coordinate meets every other. If n < d, P first deals
the coordinates out like cards, so that a window holds an even sample of x rather than one end of it.

Properties: R is orthogonal, R^T R = I up to rounding; R x has as many coordinates as x, so no padding travels; if
d = n, every coordinate is mixed twice, which spreads even a vector with a single entry. The d - n coordinates at each
end that lie outside the overlap are mixed once. Without P these would keep the energy of their end of x, and DRIVE and
EDEN would shrink the larger end and stretch the smaller.

Every number is a fixed tree of float32 sums and differences: no order of summation is left to a library, so CPUs, GPUs
and other languages compute the same bits. This takes 2 n log2(n) additions; on a CPU they are done in blocks that fit
into its cache.
"""

from math import isqrt

import torch
from torch import Tensor

from fedbat import seeds

_BLOCK = 1 << 18  # coordinates worked on at once on a CPU: with fewer, calls cost more; with more, caches miss
_NARROW = 1 << 7  # pairs nearer than this are transposed apart first, because short runs are added slowly


def rotate(x: Tensor, seed: Tensor) -> Tensor:
    """R x for a flat float32 vector."""
    y = _deal(x)
    for window, first_word in _windows(y):
        _flip_(window, seed, first_word)
        _hadamard_(window)
    return y


def rotate_back(y: Tensor, seed: Tensor) -> Tensor:
    """R^T y: the steps of `rotate`, transposed, in reverse."""
    x = y.clone()
    for window, first_word in reversed(_windows(x)):
        _hadamard_(window)
        _flip_(window, seed, first_word)
    return _collect(x) if _table(x.numel())[0] else x


def _deal(x: Tensor) -> Tensor:
    """P x: coordinate j c + i goes to place i r + j, where r rows of c = floor(sqrt(d)) fit into d; the rest stay."""
    y, (rows, columns) = torch.empty_like(x), _table(x.numel())
    cut = rows * columns
    y[:cut].view(columns, rows).copy_(x[:cut].view(rows, columns).t())
    y[cut:] = x[cut:]
    return y


def _collect(y: Tensor) -> Tensor:
    """P^T y."""
    x, (rows, columns) = torch.empty_like(y), _table(y.numel())
    cut = rows * columns
    x[:cut].view(rows, columns).copy_(y[:cut].view(columns, rows).t())
    x[cut:] = y[cut:]
    return x


def _table(d: int) -> tuple[int, int]:
    """Rows and columns; none if d is a power of two, as both windows then hold all of the vector."""
    columns = isqrt(d)
    return (d // columns, columns) if d & (d - 1) else (0, 0)


def _windows(x: Tensor) -> list[tuple[Tensor, int]]:
    """The first and the last n coordinates, and where the random words for their signs begin."""
    if not x.numel():
        return []
    n = 1 << (x.numel().bit_length() - 1)
    return [(x[:n], 0), (x[-n:], -(-n // 64))]


def _flip_(x: Tensor, seed: Tensor, first_word: int) -> None:
    """x <- n^(-1/2) D x, in place."""
    for start, piece in zip(range(0, x.numel(), _BLOCK), x.split(_BLOCK), strict=True):
        piece.mul_(seeds.signs(seed, first_word + start // 64, piece.numel(), x.numel() ** -0.5))


def _hadamard_(x: Tensor) -> Tensor:
    """x <- H x without the factor n^(-1/2), in place: sums and differences at distances 1, 2, 4, ..., n / 2."""
    n, block = x.numel(), min(x.numel(), _BLOCK)
    if x.device.type != "cpu" or n <= _NARROW**2:
        return x.copy_(_add_and_subtract(x.clone(), torch.empty_like(x), 1))
    a, b = x.new_empty(2, block).unbind()
    for piece in x.split(block):
        # Pairs at distances below _NARROW lie apart in the transposed block.
        b.view(_NARROW, -1).copy_(piece.view(-1, _NARROW).t())
        near = _add_and_subtract(b, a, block // _NARROW)
        far = b if near is a else a
        far.view(-1, _NARROW).copy_(near.view(_NARROW, -1).t())
        piece.copy_(_add_and_subtract(far, near, _NARROW))
    if n > block:
        rows = n // block
        for columns in x.view(rows, block).split(max(block // rows, 1), dim=1):
            here, there = (y[: columns.numel()] for y in (a, b))
            here.view_as(columns).copy_(columns)
            columns.copy_(_add_and_subtract(here, there, columns.shape[1]).view_as(columns))
    return x


def _add_and_subtract(x: Tensor, spare: Tensor, distance: int) -> Tensor:
    """Replace pairs (a, b) by (a + b, a - b) at `distance`, twice that, and so on; the result is in x or in spare."""
    while distance < x.numel():
        (a, b), (total, difference) = (y.view(-1, 2, distance).unbind(1) for y in (x, spare))
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        x, spare, distance = spare, x, 2 * distance
    return x
