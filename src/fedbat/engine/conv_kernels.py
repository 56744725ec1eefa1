"""Triton kernels of `convs`: convolutions as products of matrices whose tiles the card fetches by itself.

Activations lie channels_last, and a convolution of stride s sees them as [samples, rows/s, s, columns/s, s channels]:
in this view a tile of pixels that are s apart is a box, and what lies outside the image reads as zero. So padding and
strides cost nothing. A tile of activations has SAMPLES x HEIGHT x WIDTH pixels; filters are K x K.
Nothing is compiled for a particular number of samples or channels.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["DOWN", "ACROSS", "C"])
def convolve(
    x, filters, y, DOWN, ACROSS, C,
    K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    SAMPLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """y <- x * filters; DOWN and ACROSS: tiles per image, C: channels of x, DEPTH: channels multiplied at a time."""
    sample, row, column = _corner(DOWN, ACROSS, SAMPLES, HEIGHT, WIDTH)
    out = tl.program_id(1) * OUT
    total = tl.zeros([SAMPLES * HEIGHT * WIDTH, OUT], tl.float32)
    for step in range(K * K * (C // DEPTH)):
        tap, c = step % (K * K), step // (K * K) * DEPTH
        down, row_of = _source(tap // K, STRIDE, PADDING)
        across, column_of = _source(tap % K, STRIDE, PADDING)
        seen = x.load([sample, row + down, row_of, column + across, column_of * C + c])
        weights = filters.load([out, tap * C + c])
        total = tl.dot(seen.reshape([SAMPLES * HEIGHT * WIDTH, DEPTH]), weights.T, total)
    y.store([sample, row, 0, column, out], total.to(y.dtype).reshape([SAMPLES, HEIGHT, 1, WIDTH, OUT]))


@triton.jit(do_not_specialize=["DOWN", "ACROSS", "C", "GRAD_C"])
def input_grad(
    grad, filters, x_grad, DOWN, ACROSS, C, GRAD_C,
    K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    SAMPLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """x_grad <- the gradient of x, from grad, that of y; a program's pixels of x are STRIDE apart."""
    sample, row, column = _corner(DOWN, ACROSS, SAMPLES, HEIGHT, WIDTH)
    out = tl.program_id(1) * OUT
    row_of, column_of = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE
    # A filter's row t meets row STRIDE i + row_of of x where that, + PADDING - t, is STRIDE times a row of grad.
    first_row, first_column = (row_of + PADDING) % STRIDE, (column_of + PADDING) % STRIDE
    rows, columns = (K - first_row + STRIDE - 1) // STRIDE, (K - first_column + STRIDE - 1) // STRIDE
    row_start, column_start = row + (row_of + PADDING) // STRIDE, column + (column_of + PADDING) // STRIDE
    total = tl.zeros([SAMPLES * HEIGHT * WIDTH, OUT], tl.float32)
    i, j, c = 0, 0, 0  # counted, because divisions by numbers not known at compile time are slow
    for _ in range(rows * columns * (GRAD_C // DEPTH)):
        tap = (first_row + i * STRIDE) * K + first_column + j * STRIDE
        seen = grad.load([sample, row_start - i, 0, column_start - j, c])
        weights = filters.load([c, tap * C + out])
        total = tl.dot(seen.reshape([SAMPLES * HEIGHT * WIDTH, DEPTH]), weights, total)
        j += 1
        i += (j == columns).to(tl.int32)
        j = tl.where(j == columns, 0, j)
        c += tl.where(i == rows, DEPTH, 0)
        i = tl.where(i == rows, 0, i)
    value = total.to(x_grad.dtype).reshape([SAMPLES, HEIGHT, 1, WIDTH, OUT])
    x_grad.store([sample, row, row_of, column, column_of * C + out], value)


@triton.jit(do_not_specialize=["DOWN", "ACROSS", "C", "GRAD_C", "TILES"])
def filter_grad(
    x, grad, parts, DOWN, ACROSS, C, GRAD_C, TILES,
    K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    SAMPLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """parts[p] <- sum of grad x over the pixels of a part of TILES tiles, for one tap and OUT x IN channels."""
    tap, block, part = tl.program_id(0) % (K * K), tl.program_id(0) // (K * K), tl.program_id(1)
    c, out = block % (C // IN) * IN, block // (C // IN) * OUT
    down, row_of = _source(tap // K, STRIDE, PADDING)
    across, column_of = _source(tap % K, STRIDE, PADDING)
    total = tl.zeros([OUT, IN], tl.float32)
    for tile in range(part * TILES, part * TILES + TILES):
        column, row = tile % ACROSS * WIDTH, tile // ACROSS % DOWN * HEIGHT
        sample = tile // ACROSS // DOWN * SAMPLES
        slope = grad.load([sample, row, 0, column, out])
        seen = x.load([sample, row + down, row_of, column + across, column_of * C + c])
        flat = slope.reshape([SAMPLES * HEIGHT * WIDTH, OUT])
        total = tl.dot(flat.T, seen.reshape([SAMPLES * HEIGHT * WIDTH, IN]), total)
    at = ((out + tl.arange(0, OUT))[:, None] * (K * K) + tap) * C + c + tl.arange(0, IN)[None, :]
    tl.store(parts + part * GRAD_C * (K * K) * C + at, total.to(parts.dtype.element_ty))


@triton.jit(do_not_specialize=["SIZE", "PARTS"])
def add_parts(parts, total, SIZE, PARTS, BLOCK: tl.constexpr):
    """total <- the sum of the parts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        value += tl.load(parts + part * SIZE + at, mask=at < SIZE, other=0.0)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=at < SIZE)


@triton.jit
def _corner(DOWN, ACROSS, SAMPLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    tile = tl.program_id(0)
    return tile // ACROSS // DOWN * SAMPLES, tile // ACROSS % DOWN * HEIGHT, tile % ACROSS * WIDTH


@triton.jit
def _source(tap, STRIDE: tl.constexpr, PADDING: tl.constexpr):
    """(d, r) such that row STRIDE i + tap - PADDING of x is row i + d of those that are r past a multiple of STRIDE."""
    at = tap - PADDING + STRIDE * PADDING  # not negative
    return at // STRIDE - PADDING, at % STRIDE
