"""Triton kernels of `norms` (BatchNorm, ReLU and the sum with a shortcut) and `stems` (patches of images).

Activations lie channels_last: a matrix of M rows (samples and pixels) and C channels. Sums over rows are taken in parts
(one program each), then settled; their order is fixed, so the same input always gives the same bits. Nothing is
compiled for a particular number of rows, as batches come in many sizes.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M", "PARTS"])
def moments(x, partial, M, C, PARTS, TILES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """partial[0], partial[1] <- sums of x - k and its square over this program's rows; k is the first row."""
    part, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < C
    k = tl.load(x + c, mask=real, other=0.0).to(tl.float32)[None, :]  # a shift near the mean keeps differences exact
    first, second = tl.zeros([ROWS, CHANNELS], tl.float32), tl.zeros([ROWS, CHANNELS], tl.float32)
    for tile in range(TILES):
        row = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        here = (row < M)[:, None] & real[None, :]
        value = tl.load(x + row[:, None] * C + c[None, :], mask=here, other=0.0).to(tl.float32)
        value = tl.where(here, value - k, 0.0)
        first += value
        second += value * value
    tl.store(partial + part * C + c, tl.sum(first, 0), mask=real)
    tl.store(partial + (PARTS + part) * C + c, tl.sum(second, 0), mask=real)


@triton.jit(do_not_specialize=["M", "PARTS"])
def settle_moments(
    x, partial, weight, bias, running_mean, running_var, batches, saved, M, C, PARTS, eps, momentum,
    MOST: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """saved <- mean, 1/std, and the scale and shift that make up BatchNorm; the running statistics are updated."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < C
    first, second = _settled(partial, c, real, C, PARTS, MOST)
    mean = first / M  # from k
    var = tl.maximum(second / M - mean * mean, 0.0)
    mean += tl.load(x + c, mask=real, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(var + eps)
    scale = inverse * tl.load(weight + c, mask=real, other=0.0)
    tl.store(saved + c, mean, mask=real)
    tl.store(saved + C + c, inverse, mask=real)
    tl.store(saved + 2 * C + c, scale, mask=real)
    tl.store(saved + 3 * C + c, tl.load(bias + c, mask=real, other=0.0) - mean * scale, mask=real)
    old_mean, old_var = tl.load(running_mean + c, mask=real, other=0.0), tl.load(running_var + c, mask=real, other=0.0)
    tl.store(running_mean + c, old_mean + momentum * (mean - old_mean), mask=real)
    tl.store(running_var + c, old_var + momentum * (var * M / (M - 1) - old_var), mask=real)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["M"])
def normalize(
    x, shortcut, saved, y, M, C,
    ADDS: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y <- ReLU(scale x + shift + shortcut)."""
    at, c, here, real = _tile(M, C, ROWS, CHANNELS)
    scale = tl.load(saved + 2 * C + c, mask=real, other=0.0)[None, :]
    shift = tl.load(saved + 3 * C + c, mask=real, other=0.0)[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * scale + shift
    if ADDS:
        value += tl.load(shortcut + at, mask=here, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["M", "PARTS"])
def slopes(
    x, grad, y, saved, partial, M, C, PARTS,
    ADDS: tl.constexpr, RELU: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """partial[0], partial[1] <- sums of dL/dz and of dL/dz (x - mean) / std, where y = ReLU(z)."""
    part, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < C
    mean, inverse = tl.load(saved + c, mask=real, other=0.0), tl.load(saved + C + c, mask=real, other=0.0)
    scale = tl.load(saved + 2 * C + c, mask=real, other=0.0)[None, :]
    shift = tl.load(saved + 3 * C + c, mask=real, other=0.0)[None, :]
    first, second = tl.zeros([ROWS, CHANNELS], tl.float32), tl.zeros([ROWS, CHANNELS], tl.float32)
    for tile in range(TILES):
        row = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        here = (row < M)[:, None] & real[None, :]
        at = row[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        slope = _slope(value, grad, y, at, here, scale, shift, ADDS, RELU)
        first += slope
        second += slope * (value - mean[None, :])
    tl.store(partial + part * C + c, tl.sum(first, 0), mask=real)
    tl.store(partial + (PARTS + part) * C + c, tl.sum(second, 0) * inverse, mask=real)


@triton.jit(do_not_specialize=["M", "PARTS"])
def settle_slopes(
    partial, saved, weight_grad, bias_grad, factors, M, C, PARTS, MOST: tl.constexpr, CHANNELS: tl.constexpr
):
    """The parameters' gradients, and factors with which dL/dx = scale dL/dz + factors[0] x + factors[1]."""
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < C
    first, second = _settled(partial, c, real, C, PARTS, MOST)
    tl.store(bias_grad + c, first, mask=real)
    tl.store(weight_grad + c, second, mask=real)
    mean, inverse = tl.load(saved + c, mask=real, other=0.0), tl.load(saved + C + c, mask=real, other=0.0)
    scale = tl.load(saved + 2 * C + c, mask=real, other=0.0)
    factor = -scale * inverse * second / M
    tl.store(factors + c, factor, mask=real)
    tl.store(factors + C + c, -factor * mean - scale * first / M, mask=real)


@triton.jit(do_not_specialize=["M"])
def pull_back(
    x, grad, y, saved, factors, x_grad, shortcut_grad, M, C,
    ADDS: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """x_grad <- dL/dx and, where there is a shortcut, shortcut_grad <- dL/dz."""
    at, c, here, real = _tile(M, C, ROWS, CHANNELS)
    scale = tl.load(saved + 2 * C + c, mask=real, other=0.0)[None, :]
    shift = tl.load(saved + 3 * C + c, mask=real, other=0.0)[None, :]
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    slope = _slope(value, grad, y, at, here, scale, shift, ADDS, RELU)
    if ADDS:
        tl.store(shortcut_grad + at, slope.to(shortcut_grad.dtype.element_ty), mask=here)
    factor = tl.load(factors + c, mask=real, other=0.0)[None, :]
    offset = tl.load(factors + C + c, mask=real, other=0.0)[None, :]
    tl.store(x_grad + at, (scale * slope + factor * value + offset).to(x_grad.dtype.element_ty), mask=here)


@triton.jit
def _slope(
    value, grad, y, at, here, scale, shift, ADDS: tl.constexpr, RELU: tl.constexpr
):  # dL/dz: pulled back through the ReLU by its output or, where nothing was added, by its input
    slope = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
    if RELU:
        if ADDS:
            slope = tl.where(tl.load(y + at, mask=here, other=0.0) > 0, slope, 0.0)
        else:
            slope = tl.where(value * scale + shift > 0, slope, 0.0)
    return slope


@triton.jit
def _settled(partial, c, real, C, PARTS, MOST: tl.constexpr):
    part = tl.arange(0, MOST)
    here = (part < PARTS)[:, None] & real[None, :]
    first = tl.load(partial + part[:, None] * C + c[None, :], mask=here, other=0.0)
    second = tl.load(partial + (PARTS + part)[:, None] * C + c[None, :], mask=here, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _tile(M, C, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real = c < C
    return row[:, None] * C + c[None, :], c, (row < M)[:, None] & real[None, :], real


@triton.jit(do_not_specialize=["M"])
def patches(
    x, rows, M, HEIGHT, WIDTH, batch_stride, channel_stride, row_stride, column_stride,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """rows[b, i, j] <- what a K x K filter sees there (rows, columns, channels), padded with zeros."""
    row, value = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, VALUES)[None, :]
    i = row // WIDTH % HEIGHT * STRIDE + value // (K * C) - PADDING
    j = row % WIDTH * STRIDE + value // C % K - PADDING
    inside = (row < M) & (value < K * K * C) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
    at = row // (HEIGHT * WIDTH) * batch_stride + value % C * channel_stride + i * row_stride + j * column_stride
    seen = tl.load(x + at, mask=inside, other=0.0)
    tl.store(rows + row * VALUES + value, seen.to(rows.dtype.element_ty), mask=row < M)
