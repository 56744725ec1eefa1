"""The operator S and its gradients, and the other quantizers, as laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbat.binarize import (
    binarize,
    binarize_backward,
    binarize_forward,
    codes_of,
    inner,
    keep_top,
    mean_abs,
    num_kept,
    reach,
    sign_or_coin,
    step_size,
    stochastic_codes,
    stochastic_levels,
    stochastic_sign,
    straight_through,
    top_indices,
)

NUM_DRAWS = 400_000


def _slow_binarize(x: float, alpha: float, u: float) -> float:
    """Eq. 6-7, word for word; its zeta is 1 - u, which has the same law."""
    if x > alpha:
        return alpha
    if x < -alpha:
        return -alpha
    return alpha * (2 * min(math.floor((alpha + x) / (2 * alpha) + (1 - u)), 1) - 1)


def _slow_gradients(x: float, alpha: float, s: float) -> tuple[float, float]:
    """Eq. 8-9, branch by branch."""
    if x > alpha:
        return 0.0, 1.0
    if x < -alpha:
        return 0.0, -1.0
    return 1.0, s / alpha - x / alpha


def _slow_quantize(x: float, alpha: float, u: float, bits: int) -> float:
    """Between which two levels x lies, and the upper one with the probability that makes the mean x."""
    levels = [alpha * (2 * j + 1 - 2**bits) for j in range(2**bits)]
    if not levels[0] <= x <= levels[-1]:
        return levels[0] if x < 0 else levels[-1]
    low, high = max(level for level in levels if level <= x), min(level for level in levels if level >= x)
    return high if low == high or u <= (x - low) / (high - low) else low


def _slow_quantize_gradients(x: float, alpha: float, s: float, bits: int) -> tuple[float, float]:
    """(dS/dx, dS/dalpha): 1 and (level - x) / alpha inside, 0 and +-(2^b - 1) outside."""
    top = 2**bits - 1
    if abs(x) > top * alpha:
        return 0.0, math.copysign(top, x)
    return 1.0, (s - x) / alpha


# Mean, variance and support


@pytest.mark.parametrize("ratio", [-0.9, -0.3, 0.0, 0.5, 0.95])
def test_mean_and_variance_inside(ratio, rng):
    alpha = torch.tensor(0.02)
    x = ratio * alpha
    s = binarize_forward(x.expand(NUM_DRAWS), alpha, torch.rand(NUM_DRAWS, generator=rng))
    assert set(s.tolist()) == {-alpha.item(), alpha.item()}
    variance = float(alpha**2 - x**2)
    assert abs(float(s.mean() - x)) < 5 * math.sqrt(variance / NUM_DRAWS)
    # (s - x)^2 takes two values, 4 |x| alpha apart: its mean has standard error 2 |x| sqrt(variance / n).
    spread = ((s.double() - float(x)) ** 2).mean().item()
    assert abs(spread - variance) <= 5 * 2 * abs(float(x)) * math.sqrt(variance / NUM_DRAWS) + 1e-6 * variance


@pytest.mark.parametrize("ratio", [1.0, 1 + 2**-23, 1.5, 100.0])
def test_certain_from_the_step_size_on(ratio):
    alpha = torch.tensor(0.3)
    u = torch.tensor([2**-25, 0.5, 1 - 2**-24, 1.0])  # 1 is what a GPU may draw
    assert torch.equal(binarize_forward(ratio * alpha.expand(4), alpha, u), alpha.expand(4))
    assert torch.equal(binarize_forward(-ratio * alpha.expand(4), alpha, u), -alpha.expand(4))


@given(x=st.floats(-3, 3, width=32), alpha=st.floats(2**-10, 2, width=32), u=st.floats(2**-17, 1 - 2**-17, width=32))
@settings(max_examples=300, deadline=None)
def test_forward_and_bits_agree_with_the_equation(x, alpha, u):
    if abs((alpha + x) / (2 * alpha) - u) < 1e-6:  # within rounding of the threshold either sign is right
        return
    m, a, noise = torch.tensor([x]), torch.tensor(alpha), torch.tensor([u])
    expected = _slow_binarize(x, alpha, u)
    assert binarize_forward(m, a, noise).item() == pytest.approx(expected, rel=1e-6)
    assert binarize(m, a, noise).item() == binarize_forward(m, a, noise).item()
    assert stochastic_sign(m, a, noise).item() == (expected > 0)


# Eq. 8-9


def test_gradients_are_the_three_branches(rng):
    alpha = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    x = torch.tensor([-2, -0.5, -0.4, -0.1, 0, 0.3, 0.4, 0.41, 3], dtype=torch.float64, requires_grad=True)
    u = torch.rand(len(x), generator=rng, dtype=torch.float64)
    upstream = torch.randn(len(x), generator=rng, dtype=torch.float64)
    s = binarize(x, alpha, u)
    s.backward(upstream)
    slow = [_slow_gradients(a, alpha.item(), b) for a, b in zip(x.tolist(), s.tolist(), strict=True)]
    assert torch.allclose(x.grad, upstream * torch.tensor([dx for dx, _ in slow], dtype=torch.float64), atol=1e-12)
    expected = sum(g * da for g, (_, da) in zip(upstream.tolist(), slow, strict=True))  # summed over the layer
    assert alpha.grad.item() == pytest.approx(expected, abs=1e-12)
    assert x.grad[2] == upstream[2] and x.grad[6] == upstream[6]  # |x| = alpha is inside


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_form_equals_autograd(dtype, channels_last, rng):
    m = torch.randn(8, 4, 3, 3, generator=rng, dtype=dtype)
    grad = torch.randn(8, 4, 3, 3, generator=rng, dtype=dtype)
    if channels_last:
        m = m.contiguous(memory_format=torch.channels_last)
    m[0, 0, 0, 0] = 0.5  # exactly on the boundary
    alpha = torch.tensor(0.5, dtype=dtype)
    u = torch.rand(8, 4, 3, 3, generator=rng, dtype=dtype)
    leaf, leaf_alpha = m.clone().requires_grad_(), alpha.clone().requires_grad_()
    binarize(leaf, leaf_alpha, u).backward(grad)
    grad_m, alpha_grad_alpha = binarize_backward(m, alpha, binarize_forward(m, alpha, u), grad)
    assert torch.equal(grad_m, leaf.grad)
    torch.testing.assert_close(alpha_grad_alpha, alpha * leaf_alpha.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_edge_is_inside_and_the_next_number_outside(dtype, rng):
    for alpha in torch.randn(2000, generator=rng, dtype=dtype).mul_(8).exp_():
        m = torch.stack([alpha, torch.nextafter(alpha, 2 * alpha)])
        grad_m, _ = binarize_backward(torch.cat([m, -m]), alpha, torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype))
        assert grad_m.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("ratio", [-0.8, 0.0, 0.5])
def test_mean_gradient_of_alpha_is_zero_inside(ratio, rng):
    alpha = torch.tensor(0.1, dtype=torch.float64)
    x = (ratio * alpha).expand(NUM_DRAWS)
    s = binarize_forward(x, alpha, torch.rand(NUM_DRAWS, generator=rng, dtype=torch.float64))
    slope = (s - x) / alpha
    variance = 1 - ratio**2
    assert abs(slope.mean().item()) < 5 * math.sqrt(variance / NUM_DRAWS)
    assert slope.var().item() == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("flush", [False, True])
def test_zero_step_size_sends_nothing_and_lets_gradients_through(flush, request):
    request.addfinalizer(lambda: torch.set_flush_denormal(False))
    torch.set_flush_denormal(flush)
    m, grad, u = torch.zeros(40), torch.ones(40), torch.full((40,), 0.3)
    alpha = torch.tensor(0.0)
    s = binarize_forward(m, alpha, u)
    assert torch.equal(s.abs(), torch.zeros(40))
    grad_m, alpha_grad = binarize_backward(m, alpha, s, grad)
    assert torch.equal(grad_m, grad) and alpha_grad == 0


def test_straight_through_is_exact_forward():
    value, surrogate = torch.tensor([0.1, 7.3]), torch.tensor([1e8, -3.0], requires_grad=True)
    out = straight_through(value, surrogate)
    out.sum().backward()
    assert torch.equal(out, value) and torch.equal(surrogate.grad, torch.ones(2))


# b bits


@given(
    x=st.floats(-3, 3, width=32),
    alpha=st.floats(2**-10, 2, width=32),
    u=st.floats(2**-17, 1 - 2**-17, width=32),
    bits=st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_levels_and_codes_are_those_of_the_definition(x, alpha, u, bits):
    margin = (x / alpha + 1) / 2 - u
    if abs(margin - round(margin)) < 1e-6 * (1 + abs(margin)):  # within rounding of a threshold either level is right
        return
    m, a, noise = torch.tensor([x]), torch.tensor(alpha), torch.tensor([u])
    s = binarize_forward(m, a, noise, bits)
    assert s.item() == pytest.approx(_slow_quantize(x, alpha, u, bits), rel=1e-6)
    assert binarize(m, a, noise, bits).item() == s.item()
    code = int(stochastic_codes(m, a, noise, bits))
    assert code == int(codes_of(s, a, bits)) and 0 <= code < 2**bits
    assert s.item() == pytest.approx(alpha * (2 * code + 1 - 2**bits), rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_unbiased_inside_and_certain_outside(bits, rng):
    alpha = torch.tensor(0.02)
    for ratio in (-0.97, -0.4, 0.0, 0.11, 1 / (2**bits - 1), 0.83):
        x = ratio * reach(alpha, bits)
        s = binarize_forward(x.expand(NUM_DRAWS), alpha, torch.rand(NUM_DRAWS, generator=rng), bits)
        part = float(x / (2 * alpha) + 0.5) % 1  # of the way from the lower neighbour to the upper
        error = 5 * 2 * float(alpha) * math.sqrt(part * (1 - part) / NUM_DRAWS)
        assert abs(float(s.double().mean() - x)) <= error + 1e-6 * float(alpha)
    u = torch.tensor([2**-17, 0.5, 1 - 2**-17])  # the outermost that a CPU draws
    for ratio in (1.0, 1.001, 50.0):
        x = (ratio * reach(alpha, bits)).expand(3)
        assert torch.equal(binarize_forward(x, alpha, u, bits), reach(alpha, bits).expand(3))
        assert torch.equal(binarize_forward(-x, alpha, u, bits), -reach(alpha, bits).expand(3))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_of_levels(bits, channels_last, rng):
    """The closed form, autograd and the definition, branch by branch."""
    m, grad = (torch.randn(8, 4, 3, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    if channels_last:
        m = m.contiguous(memory_format=torch.channels_last)
    alpha = torch.tensor(0.5 / 2**bits, dtype=torch.float64)
    m[0, 0, 0, 0], m[0, 0, 0, 1] = reach(alpha, bits), -reach(alpha, bits)  # |m| = R is inside
    u = torch.rand(8, 4, 3, 3, generator=rng, dtype=torch.float64)
    leaf, leaf_alpha = m.clone().requires_grad_(), alpha.clone().requires_grad_()
    s = binarize(leaf, leaf_alpha, u, bits)
    s.backward(grad)
    pairs = zip(m.flatten().tolist(), s.flatten().tolist(), strict=True)
    slow = [_slow_quantize_gradients(a, alpha.item(), b, bits) for a, b in pairs]
    by_m, by_alpha = (torch.tensor(column, dtype=torch.float64).view(m.shape) for column in zip(*slow, strict=True))
    torch.testing.assert_close(leaf.grad, grad * by_m, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(leaf_alpha.grad, (grad * by_alpha).sum())
    grad_m, alpha_grad_alpha = binarize_backward(m, alpha, binarize_forward(m, alpha, u, bits), grad, bits)
    assert torch.equal(grad_m, leaf.grad) and 0 < (grad_m == 0).sum() < m.numel()
    torch.testing.assert_close(alpha_grad_alpha, alpha * leaf_alpha.grad)


# alpha = alpha' exp(rho alpha_e)


@pytest.mark.parametrize("rho", [0.0, 2.0, 6.0])
def test_chain_rule_of_the_step_size(rho):
    alpha_e = torch.tensor([0.1, -0.2], dtype=torch.float64, requires_grad=True)
    alpha_prime = torch.tensor([0.01, 0.002], dtype=torch.float64)
    alpha, pace = step_size(alpha_prime, alpha_e, rho, None)
    alpha.sum().backward()
    assert (pace == rho).all()
    torch.testing.assert_close(pace * alpha.detach(), alpha_e.grad, check_dtype=False)


def test_one_sgd_step_moves_log_alpha_by_rho_squared():
    alpha_prime, eta, rho, g = torch.tensor([0.01], dtype=torch.float64), 0.1, 6.0, 0.7
    alpha, pace = step_size(alpha_prime, torch.zeros(1, dtype=torch.float64), rho, None)
    after, _ = step_size(alpha_prime, -eta * pace * alpha * g, rho, None)
    torch.testing.assert_close(torch.log(after / alpha), -eta * rho**2 * alpha * g)


def test_rho_zero_leaves_alpha_prime_bit_for_bit():
    alpha_prime = torch.tensor([0.0123, 0.00071])
    alpha, pace = step_size(alpha_prime, torch.tensor([5.0, -5.0]), 0.0, None)
    assert torch.equal(alpha, alpha_prime) and not pace.any()


@given(alpha_e=st.floats(-10, 10))
def test_alpha_stays_positive(alpha_e):
    alpha, _ = step_size(torch.tensor([1e-3]), torch.tensor([alpha_e]), 6.0, None)
    assert alpha > 0


def test_bounds_hold_and_stop_the_gradient():
    alpha_prime = torch.tensor([1e-5, 1e-2, 3.0, 0.0])
    alpha, pace = step_size(alpha_prime, torch.zeros(4), 6.0, (5e-4, 5e-2))
    assert torch.equal(alpha, torch.tensor([5e-4, 1e-2, 5e-2, 0.0]))  # 0: not set yet, whatever the bounds
    assert torch.equal(pace * alpha > 0, torch.tensor([False, True, False, False]))


# The other quantizers


def test_ties_toss_a_coin(rng):
    u = torch.rand(NUM_DRAWS, generator=rng)
    share = sign_or_coin(torch.zeros(NUM_DRAWS), u).float().mean().item()
    assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(NUM_DRAWS)
    assert (
        sign_or_coin(torch.full((9,), 1e-30), u[:9]).all() and not sign_or_coin(torch.full((9,), -1e-30), u[:9]).any()
    )


@pytest.mark.parametrize("num_steps", [1, 3, 7, 127])
def test_levels_are_unbiased_integers_in_range(num_steps, rng):
    m = torch.tensor([-1.0, -0.61, -0.1, 0.0, 0.37, 1.0])
    draws = 100_000
    u = torch.rand(draws, len(m), generator=rng)
    levels = stochastic_levels(m.expand(draws, -1), torch.tensor(1.0), num_steps, u)
    assert torch.equal(levels, levels.round()) and levels.abs().max() <= num_steps
    part = (m * num_steps).remainder(1)  # the variance of rounding x at random is f (1 - f)
    standard_error = (part * (1 - part) / draws).sqrt() / num_steps
    assert ((levels.mean(0) / num_steps - m).abs() <= 5 * standard_error + 1e-6).all()


@given(size=st.integers(1, 400), share=st.floats(0.001, 1.0), seed=st.integers(0, 99), channels_last=st.booleans())
@settings(max_examples=60, deadline=None)
def test_top_share_keeps_exactly_the_largest(size, share, seed, channels_last):
    x = torch.randn(size, 2, 3, 2, generator=torch.Generator().manual_seed(seed))
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    kept = keep_top(x, share)
    count = num_kept(x.numel(), share)
    assert (kept != 0).sum() == count and -1e-6 <= count - share * x.numel() < 1 + 1e-6
    assert torch.equal(kept[kept != 0], x[kept != 0]) and kept.stride() == x.stride()
    threshold = x.abs().flatten().sort(descending=True).values[count - 1]
    assert torch.equal(kept != 0, x.abs() >= threshold)
    index = top_indices(x, share)
    assert torch.equal(index, (kept.reshape(-1) != 0).nonzero().squeeze(1))  # ascending, in logical order


def test_num_kept_does_not_round_up_float_noise():
    assert num_kept(100, 1 - 0.97) == 3 and num_kept(10, 0.3) == 3 and num_kept(1, 0.001) == 1
    assert num_kept(10**8, 1 - 0.97) == 3 * 10**6 and num_kept(7, 1.0) == 7


def test_inner_ignores_memory_format(rng):
    a, b = (torch.randn(5, 4, 3, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    expected = (a * b).sum()
    for x in (a, a.contiguous(memory_format=torch.channels_last)):
        for y in (b, b.contiguous(memory_format=torch.channels_last)):
            torch.testing.assert_close(inner(x, y), expected)
    assert mean_abs(torch.tensor([[-1.0, 3.0]])) == 2
