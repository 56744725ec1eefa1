"""The learnable binarization of FedBAT (Section 3.2), and the other quantizers: pure functions of tensors.

Notation: `m` is a layer's update (trained weights minus received ones), `alpha` its step size, `u` noise ~ U(0, 1)
of m's shape. Nothing here draws random numbers.

For `bits` = b > 1, which is not in the paper, S is one of the 2^b odd multiples of alpha up to its reach
R = (2^b - 1) alpha: where |m| <= R, one of m's two neighbors at random, so that E[S] = m; beyond, +-R.
"""

import math

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny


def straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    """`value` forward, the gradient of `surrogate` backward."""
    # `surrogate - surrogate` is exactly zero, so the forward value is exact.
    return value.detach() + (surrogate - surrogate.detach())


def stochastic_sign(m: Tensor, alpha: Tensor, u: Tensor) -> Tensor:
    """True (+1) with probability (alpha + m) / (2 alpha), clipped to [0, 1], else False (-1).  (Eq. 7)"""
    return _margin(m, _divisor(alpha), u) >= 0


def stochastic_codes(m: Tensor, alpha: Tensor, u: Tensor, bits: int = 1) -> Tensor:
    """The index of S among the 2^bits levels, counted from the lowest; booleans for one bit."""
    return stochastic_sign(m, alpha, u) if bits == 1 else _cell(m, alpha, u, bits) + (1 << bits - 1)


def codes_of(s: Tensor, alpha: Tensor, bits: int = 1) -> Tensor:
    """The codes of an S that has already been drawn."""
    return s > 0 if bits == 1 else torch.round(s / (2 * _divisor(alpha)) + ((1 << bits - 1) - 0.5))


def binarize(m: Tensor, alpha: Tensor, u: Tensor, bits: int = 1) -> Tensor:
    """S(m, alpha) in {-alpha, +alpha} (Eq. 6-7), differentiable in m and alpha as Eq. 8-9 define."""
    s = binarize_forward(m.detach(), alpha.detach(), u, bits)
    inside = m.abs() <= reach(alpha, bits)
    slope = (s - m).detach() / _divisor(alpha.detach())  # dS/dalpha between the bounds, Eq. 9
    surrogate = torch.where(inside, m + alpha * slope, reach(alpha, bits) * s.sign())
    return straight_through(s, surrogate)


def binarize_forward(m: Tensor, alpha: Tensor, u: Tensor, bits: int = 1) -> Tensor:
    """S(m, alpha) without gradients: alpha with a stochastic sign or, with more bits, times a stochastic odd number."""
    if bits == 1:
        # Float arithmetic throughout: on a CPU this is ten times faster than a comparison and torch.where.
        # alpha = 0 needs no special case: only the sign of 0/0 would matter, and S = 0 has none.
        return torch.copysign(alpha, _margin(m, alpha, u))
    return _cell(m, alpha, u, bits).add_(0.5).mul_(2 * alpha)


def binarize_backward(m: Tensor, alpha: Tensor, s: Tensor, grad: Tensor, bits: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients (dL/dm, alpha * dL/dalpha) of s = S(m, alpha) from grad = dL/ds: Eq. 8-9 in closed form.

    dS/dalpha is s/alpha outside and s/alpha - m/alpha inside, so alpha * dL/dalpha = <grad, s> - <dL/dm, m>:
    two inner products over the layer and no division, so it also holds at alpha = 0.
    """
    grad_m = _where_inside(m, reach(alpha, bits), grad)
    return grad_m, (inner(grad, s) - inner(grad_m, m)).to(m.dtype)


def reach(alpha: Tensor, bits: int = 1) -> Tensor:
    """R, the largest magnitude of S."""
    return alpha if bits == 1 else ((1 << bits) - 1) * alpha


def step_size(
    alpha_prime: Tensor, alpha_e: Tensor, rho: float, bounds: tuple[float, float] | None
) -> tuple[Tensor, Tensor]:
    """alpha = alpha' exp(rho alpha_e) (Eq. 10) within `bounds`, and its pace d log alpha / d alpha_e.

    alpha' = 0 means "not set yet" and gives alpha = 0 regardless of the bounds. Where a bound clamps alpha, the
    derivative is 0, as in the authors' code.
    """
    raw = alpha_prime * torch.exp(rho * alpha_e)
    alpha = raw if bounds is None else raw.clamp(*bounds) * (alpha_prime > 0)
    return alpha, rho * (alpha == raw).to(alpha.dtype)  # whatever torch's default dtype is


def mean_abs(m: Tensor) -> Tensor:
    """||m||_1 / d, the step size that Eq. 13 starts from."""
    magnitude = m.abs()
    if m.device.type == "cpu":
        return magnitude.mean()
    return (magnitude.sum(dtype=torch.float64) / m.numel()).to(m.dtype)  # as in `inner`


def inf_norm(m: Tensor) -> Tensor:
    """||m||_inf, in one pass."""
    low, high = m.aminmax()
    return torch.maximum(-low, high).abs()  # for zeros the maximum may be -0, which is not a valid step size


def moved(m: Tensor) -> Tensor:
    """1 for a layer that has moved, 0 for one that has not, NaN if training diverged: it scales a fixed step size."""
    largest = inf_norm(m) if m.numel() else m.new_zeros(())
    return torch.where(largest == 0, largest, largest / largest)


def sign_or_coin(m: Tensor, u: Tensor) -> Tensor:
    """True where m > 0; a coin is tossed for exact zeros, so that dead weights do not drift in one direction."""
    return (m > 0) | ((m == 0) & (u < 0.5))


def stochastic_levels(m: Tensor, scale: Tensor, num_steps: int, u: Tensor) -> Tensor:
    """Integers j in [-num_steps, num_steps], rounded at random so that E[j * scale / num_steps] = m."""
    # |m| <= scale holds for the max-abs and the 2-norm, so no clipping is needed beyond float rounding.
    return torch.floor(m * (num_steps / _divisor(scale)) + u).clamp(-num_steps, num_steps)


def num_kept(numel: int, share: float) -> int:
    """The number of entries in a share of `numel`, rounded up so that no layer is emptied."""
    # The small slack keeps (1 - 0.97) * 100 = 3.0000000000000027 from becoming 4.
    return min(numel, math.ceil(share * numel * (1 - 1e-12)))


def top_indices(x: Tensor, share: float) -> Tensor:
    """Ascending flat positions of the largest `share` of |x|: exactly ceil(share * d), ties broken arbitrarily."""
    return x.reshape(-1).abs().topk(num_kept(x.numel(), share), sorted=False).indices.sort().values


def keep_top(x: Tensor, share: float) -> Tensor:
    """`x` with all but its largest `share` by magnitude set to zero, in the same memory format."""
    kept = torch.zeros_like(x)
    flat, flat_kept = _in_storage_order(x, kept)
    index = flat.abs().topk(num_kept(x.numel(), share), sorted=False).indices
    flat_kept[index] = flat[index]
    return kept


def inner(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> over all entries; on GPUs in float64, so that a kernel's order of summation does not show in float32."""
    x, y = _in_storage_order(a, b)
    return torch.dot(x, y) if x.device.type == "cpu" else torch.dot(x.double(), y.double())


def _where_inside(m: Tensor, limit: Tensor, grad: Tensor) -> Tensor:
    """`grad` where |m| <= limit, else 0."""
    if m.device.type != "cpu":
        return m.abs().le_(limit).mul_(grad)
    # The backward pass of clipping to +-edge: a single pass, but on a GPU it would have to wait for `edge`.
    edge = _beyond(limit)
    clipped: Tensor = torch.ops.aten.hardtanh_backward.default(grad, m, -edge, edge)
    return clipped


def _beyond(limit: Tensor) -> float:
    """The smallest number above `limit` in its own precision, at least `_TINY`: denormals may be flushed to 0."""
    value = limit.item()
    if limit.dtype == torch.float32:
        # Adds between half an ulp and one and a half, so that rounding to float32 gives the next number.
        return max(value * (1 + 0.75 * 2**-23), _TINY)
    return max(math.nextafter(value, math.inf), _TINY)


def _in_storage_order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors flattened in the memory order of `a`, without copies for channels_last tensors."""
    if a.stride() == b.stride() and a.is_contiguous(memory_format=_format_of(a)):
        size = (a.numel(),)
        return a.as_strided(size, (1,)), b.as_strided(size, (1,))
    order = sorted(range(a.dim()), key=a.stride, reverse=True)
    return a.permute(order).reshape(-1), b.permute(order).reshape(-1)


def _format_of(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.dim() == 4 and x.stride(1) == 1 else torch.contiguous_format


def _cell(m: Tensor, alpha: Tensor, u: Tensor, bits: int) -> Tensor:
    """The integer k for which S = (2 k + 1) alpha."""
    # k is the floor of half the margin: the number of steps of 2 alpha by which S lies above alpha.
    half = 1 << bits - 1
    return _margin(m, _divisor(alpha), u).mul_(0.5).floor_().clamp_(-half, half - 1)


def _margin(m: Tensor, alpha: Tensor, u: Tensor) -> Tensor:
    """m / alpha + 1 - 2 u: twice the probability of +1 before clipping, less twice the noise."""
    # Divide, don't multiply by 1/alpha: a correctly rounded m/alpha >= 1 makes m > alpha certain, as Eq. 6 says.
    # 1 - 2 u is exact and a quotient cannot be fused with a sum, so every device computes the same bits.
    margin = torch.rsub(u, 1, alpha=2).to(m.dtype)  # noise is float32, whatever the model is
    return margin.addcdiv_(m, alpha)


def _divisor(alpha: Tensor) -> Tensor:
    """`alpha`, or 1 where it is 0: a zero step size must not become 0/0."""
    return alpha + (alpha == 0)
