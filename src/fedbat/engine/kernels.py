"""Triton kernels of the CUDA engine: each does in one launch what would take tensor code dozens of small ones.

Every kernel computes what plain tensor code elsewhere computes, bit for bit (true division, no fast exponential, the
same fused multiply-adds); benchmarks/cuda_check.py compares whole rounds.

The layers of a model lie one after the other in flat buffers, each starting at a multiple of the block size, so that a
program (one block) belongs to one layer: `layer_of` names it, `first` is the layer's first block, `numel` its size.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def gather_batch(
    images, labels, order, crop, flip, position, table, x, y,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, PADDING: tl.constexpr,
    AUGMENT: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x[b], y[b] <- the b-th of the next samples: cropped and flipped as drawn, normalized by table[channel, pixel]."""
    b = tl.program_id(0)
    row = tl.load(position) + b
    sample = tl.load(order + row)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < C * H * W
    if CHANNELS_LAST:
        channel, i, j = at % C, at // C // W, at // C % W
    else:
        channel, i, j = at // (H * W), at // W % H, at % W
    if AUGMENT:
        i_from = i + tl.load(crop + 2 * row) - PADDING
        mirrored = tl.load(flip + row) != 0
        j_from = tl.where(mirrored, W - 1 - j, j) + tl.load(crop + 2 * row + 1) - PADDING
        inside = here & (i_from >= 0) & (i_from < H) & (j_from >= 0) & (j_from < W)
    else:
        i_from, j_from, inside = i, j, here
    pixel = tl.load(images + ((sample * C + channel) * H + i_from) * W + j_from, mask=inside, other=0)
    tl.store(x + b * (C * H * W) + at, tl.load(table + channel * 256 + pixel, mask=here), mask=here)
    if tl.program_id(1) == 0:
        tl.store(y + b, tl.load(labels + sample))


@triton.jit
def fedbat_measure(latent, w, alpha_prime, magnitude, layer_of, first, numel, BLOCK: tl.constexpr):
    """magnitude[layer] <- ||m||_1 of the layers that have no alpha' yet (Eq. 13)."""
    layer = tl.load(layer_of + tl.program_id(0))
    if tl.load(alpha_prime + layer) == 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        here = at < tl.load(first + layer) * BLOCK + tl.load(numel + layer)
        m = tl.load(latent + at, mask=here, other=0.0) - tl.load(w + at, mask=here, other=0.0)
        tl.atomic_add(magnitude + layer, tl.sum(tl.abs(m).to(tl.float64)))


@triton.jit
def fedbat_forward(
    latent, w, noise, noise_start, weights, alpha_prime, alpha_e, magnitude, alpha, pace,
    layer_of, first, numel, rho, low, high, BOUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weights <- w + S(m, alpha) with alpha = alpha' exp(rho alpha_e) within its bounds (Eq. 6, 7, 10)."""
    block = tl.program_id(0)
    layer = tl.load(layer_of + block)
    start, count = tl.load(first + layer), tl.load(numel + layer)
    prime = tl.load(alpha_prime + layer)
    prime = tl.where(prime == 0, (tl.load(magnitude + layer) / count).to(tl.float32), prime)
    raw = prime * libdevice.exp(rho * tl.load(alpha_e + layer))
    a = raw
    if BOUNDED:
        a = tl.where(prime > 0, tl.minimum(tl.maximum(raw, low), high), 0.0)
    if block == start:  # other blocks may read alpha' before or after this; either way they get the same value
        tl.store(alpha_prime + layer, prime)
        tl.store(alpha + layer, a)
        tl.store(pace + layer, tl.where((a == raw) & (raw > 0), rho, 0.0))
    i = (block - start) * BLOCK + tl.arange(0, BLOCK)
    here, at = i < count, block * BLOCK + tl.arange(0, BLOCK)
    start_value = tl.load(w + at, mask=here, other=0.0)
    m = tl.load(latent + at, mask=here, other=0.0) - start_value
    u = 1.0 - tl.load(noise + tl.load(noise_start + layer) + i, mask=here, other=0.0)
    s = _binarized(m, a, u)
    tl.store(weights + at, (start_value + s).to(weights.dtype.element_ty), mask=here)


@triton.jit
def fedbat_backward(latent, w, noise, noise_start, grad, alpha, slope, layer_of, first, numel, lr, BLOCK: tl.constexpr):
    """latent <- latent - lr dL/dm (Eq. 8), and slope[layer] += alpha dL/dalpha (Eq. 9), from grad = dL/dS."""
    block = tl.program_id(0)
    layer = tl.load(layer_of + block)
    start, a = tl.load(first + layer), tl.load(alpha + layer)
    i = (block - start) * BLOCK + tl.arange(0, BLOCK)
    here, at = i < tl.load(numel + layer), block * BLOCK + tl.arange(0, BLOCK)
    trained = tl.load(latent + at, mask=here, other=0.0)
    m = trained - tl.load(w + at, mask=here, other=0.0)
    u = 1.0 - tl.load(noise + tl.load(noise_start + layer) + i, mask=here, other=0.0)
    g = tl.load(grad + at, mask=here, other=0.0)
    s = _binarized(m, a, u)
    g_m = (tl.abs(m) <= a).to(tl.float32) * g
    tl.store(latent + at, tl.fma(g_m, -lr, trained), mask=here)
    terms = g.to(tl.float64) * s.to(tl.float64) - g_m.to(tl.float64) * m.to(tl.float64)
    tl.atomic_add(slope + layer, tl.sum(terms))


@triton.jit
def fedbat_settle(alpha_e, pace, slope, magnitude, num_layers, lr, LAYERS: tl.constexpr):
    """alpha_e <- alpha_e - lr dL/dalpha_e for all layers; the sums are reset."""
    layer = tl.arange(0, LAYERS)
    here = layer < num_layers
    grad = tl.load(pace + layer, mask=here, other=0.0) * tl.load(slope + layer, mask=here, other=0.0).to(tl.float32)
    tl.store(alpha_e + layer, tl.fma(grad, -lr, tl.load(alpha_e + layer, mask=here, other=0.0)), mask=here)
    tl.store(slope + layer, tl.zeros([LAYERS], tl.float64), mask=here)
    tl.store(magnitude + layer, tl.zeros([LAYERS], tl.float64), mask=here)


@triton.jit
def _binarized(m, alpha, u):
    margin = (0.5 - u) + tl.div_rn(m, 2.0 * tl.where(alpha == 0, 1.0, alpha))
    return tl.where(margin >= 0, alpha, -alpha)
