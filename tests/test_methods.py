"""Every baseline's defining laws, and the registry."""

import dataclasses
import math
from typing import Literal, Optional

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat import METHODS, ConfigError, Payload, WireError, begin, layout_of, make_method
from fedbat.contract import check_method
from fedbat.experiment import Experiment
from fedbat.layout import tensors_of
from fedbat.method import Forward, Local, Method, Step
from fedbat.methods.bifl import binary
from fedbat.methods.ef_signsgd import EFSignSGD
from fedbat.methods.fedbat import FedBAT
from fedbat.methods.fedpaq import FedPAQ
from fedbat.methods.noisy_signsgd import NoisySignSGD
from fedbat.methods.signsgd import SignSGD
from fedbat.methods.stoc_signsgd import StocSignSGD
from fedbat.methods.zerofl import ZeroFL
from fedbat.settings import parse_settings, show
from fedbat.streams import UniformNoise

NUM_DRAWS = 200_000


def encode(method, m, memory=None, seed=0, w=None):
    """Encode one layer called "x"."""
    noise = UniformNoise(seed, "test")
    w = {"x": torch.zeros_like(m) if w is None else w}
    parts, memory = method.encode(w, Local({"x": m}), memory or {}, noise)
    return parts["x"], memory


def draws(value):
    """A value repeated often, as one layer beside the same values with the other sign (norms are then known)."""
    return torch.full((NUM_DRAWS,), value)


# SignSGD


def test_signsgd_is_alpha_times_sign(rng):
    m = torch.randn(1000, generator=rng)
    assert torch.equal(encode(SignSGD(alpha=0.125), m)[0].unpack(), 0.125 * m.sign())


def test_signsgd_travels_at_most_alpha_a_round(rng):
    w, start, num_rounds, alpha = torch.zeros(50), torch.zeros(50), 20, 0.001
    for seed in range(num_rounds):
        sent = [encode(SignSGD(alpha), torch.randn(50, generator=rng), seed=seed)[0].unpack() for _ in range(4)]
        w = w + torch.stack(sent).mean(0)
        assert (w - start).abs().max() <= (seed + 1) * alpha * (1 + 1e-6)


# EF-SignSGD


def test_error_feedback_identity(rng):
    """||C(p) - p||^2 = ||p||^2 - ||p||_1^2 / d, for a Gaussian p about 1 - 2/pi of ||p||^2."""
    p = torch.randn(100_000, generator=rng, dtype=torch.float64)
    part, left = encode(EFSignSGD(), p)
    lost = (left["x"] ** 2).sum()
    torch.testing.assert_close(lost, (p**2).sum() - p.abs().sum() ** 2 / p.numel(), rtol=1e-6, atol=0)
    assert (lost / (p**2).sum()).item() == pytest.approx(1 - 2 / math.pi, abs=0.01)
    assert part.step == pytest.approx(p.abs().mean().item())


def test_step_size_of_error_feedback_is_of_the_corrected_update_or_of_the_update(rng):
    m, e = torch.randn(50, generator=rng), torch.randn(50, generator=rng)
    for scale, of in (("corrected", m + e), ("update", m)):
        part, _ = encode(EFSignSGD(scale=scale), m, {"x": e})
        assert torch.equal(part.unpack(), of.abs().mean() * (m + e).sign())


@pytest.mark.parametrize("scale", ["corrected", "update"])
def test_error_feedback_with_one_step_size_for_the_whole_model(scale, rng):
    m = {"a": torch.randn(4, 5, generator=rng), "b": 10 * torch.randn(100, generator=rng)}
    e = {name: torch.randn(x.shape, generator=rng) for name, x in m.items()}
    method = EFSignSGD(scale=scale, scope="model")
    parts, left = method.encode(m, Local(m), e, UniformNoise(0, "test"))
    p = {name: m[name] + e[name] for name in m}
    of = p if scale == "corrected" else m
    mean = torch.cat([x.reshape(-1) for x in of.values()]).abs().mean()
    for name, part in parts.items():
        torch.testing.assert_close(part.step, mean)
        torch.testing.assert_close(left[name], p[name] - part.unpack().view(p[name].shape))


def test_without_memory_plain_signs_are_sent_and_nothing_is_kept(rng):
    m, old = torch.randn(50, generator=rng), {"x": torch.randn(50, generator=rng)}
    part, left = encode(EFSignSGD(memory=False), m)
    assert left == {} and torch.equal(part.unpack(), m.abs().mean() * m.sign())
    with_memory, _ = encode(EFSignSGD(), m)
    assert torch.equal(part.unpack(), with_memory.unpack())
    assert encode(EFSignSGD(), m, old)[1].keys() == {"x"}


@pytest.mark.parametrize("scale", ["corrected", "update"])
def test_error_feedback_telescopes_per_client_and_waits_while_absent(scale, rng):
    num_clients, memories = 6, {}
    sent_sum = torch.zeros(num_clients, 40)
    m_sum = torch.zeros(num_clients, 40)
    for round_ in range(50):
        present = torch.randperm(num_clients, generator=rng)[:2].tolist()
        untouched = {k: v["x"].clone() for k, v in memories.items() if k not in present}
        for k in present:
            m = torch.randn(40, generator=rng) * 0.01
            before = {n: e.clone() for n, e in memories.get(k, {}).items()}
            part, after = encode(EFSignSGD(scale=scale), m, memories.get(k), seed=round_)
            assert all(torch.equal(memories[k][n], e) for n, e in before.items())  # what went in is not changed
            memories[k] = after
            sent_sum[k] += part.unpack()
            m_sum[k] += m
        assert all(torch.equal(memories[k]["x"], old) for k, old in untouched.items())
    for k, memory in memories.items():
        torch.testing.assert_close(sent_sum[k] + memory["x"], m_sum[k], rtol=0, atol=1e-5)


# Noisy-SignSGD


@pytest.mark.parametrize("m", [-0.02, -0.003, 0.0001, 0.01])
def test_noisy_mean_is_the_error_function(m):
    method = NoisySignSGD()
    values = encode(method, draws(m))[0].unpack().double()
    mean = method.alpha * math.erf(m / (method.sigma * math.sqrt(2)))
    assert abs(values.mean().item() - mean) < 5 * math.sqrt((method.alpha**2 - mean**2) / NUM_DRAWS) + 1e-7
    assert set(values.abs().tolist()) == {torch.tensor(method.alpha).item()}


def test_noisy_slope_at_zero():
    """E[m_hat] ~ 0.798 m for small m, with the paper's alpha = sigma."""
    method, m = NoisySignSGD(), 0.001
    difference = encode(method, draws(m))[0].unpack().mean() - encode(method, draws(-m), seed=1)[0].unpack().mean()
    standard_error = method.alpha * math.sqrt(2 / NUM_DRAWS) / (2 * m)
    assert abs(difference.item() / (2 * m) - math.sqrt(2 / math.pi)) < 5 * standard_error + 0.002  # curvature


# Stoc-SignSGD


def test_stochastic_mean_is_m_over_its_largest_entry():
    m = torch.cat([draws(0.3), torch.tensor([1.0])])
    values = encode(StocSignSGD(alpha=0.01), m)[0].unpack()[:-1].double()
    mean = 0.01 * 0.3
    assert abs(values.mean().item() - mean) < 5 * math.sqrt((0.01**2 - mean**2) / NUM_DRAWS)
    positive = (values > 0).double().mean().item()
    assert abs(positive - (0.5 + 0.15)) < 5 * math.sqrt(0.65 * 0.35 / NUM_DRAWS)


def test_stochastic_two_norm_is_nearly_a_coin():
    """On a flat vector the probability of +1 is exactly 1/2 + 1 / (2 sqrt d)."""
    d, repeats = 100, 2000
    method = StocSignSGD(norm="l2")
    hits = sum((encode(method, torch.ones(d), seed=s)[0].unpack() > 0).sum().item() for s in range(repeats))
    expected = 0.5 + 1 / (2 * math.sqrt(d))
    assert abs(hits / (d * repeats) - expected) < 5 * math.sqrt(0.25 / (d * repeats))


def test_stochastic_sign_with_its_norm_as_step_is_unbiased(rng):
    m = torch.randn(200, generator=rng)
    total, repeats = torch.zeros(200, dtype=torch.float64), 4000
    for seed in range(repeats):
        total += encode(StocSignSGD(alpha=None), m, seed=seed)[0].unpack()
    standard_error = ((m.abs().max() ** 2 - m**2) / repeats).sqrt()
    assert ((total / repeats - m).abs() <= 5 * standard_error + 1e-4).all()


# FedPAQ


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["inf", "l2"])
def test_fedpaq_levels_mean_and_bits(bits, norm, rng):
    method, d = FedPAQ(bits=bits, norm=norm), 5000
    m = torch.randn(d, generator=rng) * 0.01
    part, _ = encode(method, m)
    s = 2 ** (bits - 1) - 1
    scale = (m.abs().max() if norm == "inf" else m.norm()).item()
    j = part.unpack() / (scale / s)
    assert (j - j.round()).abs().max() < 1e-3 and j.abs().max() <= s + 1e-3
    assert part.nbits == bits * d + 32
    # Relative variance: sum of Delta^2 f (1 - f), f the distance to the level below; in 5 standard errors.
    part_f = (m / (scale / s)).remainder(1).double()
    variance = (scale / s) ** 2 * part_f * (1 - part_f)
    repeats = 40
    errors = torch.stack([(encode(method, m, seed=k)[0].unpack() - m).double() for k in range(repeats)])
    per_draw = (errors**2).sum(1)
    assert abs(per_draw.mean() - variance.sum()) < 5 * per_draw.std() / math.sqrt(repeats)
    for direction in (torch.ones(d), m.sign()):  # the second sees a bias towards or away from zero
        assert abs((errors.mean(0) * direction).sum()) < 5 * (variance.sum() / repeats).sqrt()


def test_fedpaq_error_on_gaussian_layers(rng):
    """With 3 bits the norm decides everything."""
    m = torch.randn(294_912, generator=rng)
    relative = {n: ((encode(FedPAQ(3, n), m)[0].unpack() - m) ** 2).sum() / (m**2).sum() for n in ("inf", "l2")}
    assert relative["inf"].item() == pytest.approx(0.43, abs=5 * 0.04)
    assert relative["l2"].item() == pytest.approx(143.5, rel=0.05)


# ZeroFL


@pytest.mark.parametrize("variant", ["weights", "diff-on-weights", "weights-diff"])
@pytest.mark.parametrize("extra", [0.0, 0.1])
def test_zerofl_sends_exactly_the_largest(variant, extra, rng):
    w, m = torch.randn(40, 25, generator=rng), 0.1 * torch.randn(40, 25, generator=rng)
    part, _ = encode(ZeroFL(extra=extra, variant=variant), m, w=w)
    trained, sent = w + m, part.unpack().view(40, 25)
    chosen_by = m if variant == "weights-diff" else trained
    full = trained if variant == "weights" else m
    count = {0.0: 30, 0.1: 130}[extra]
    mask = chosen_by.abs() >= chosen_by.abs().flatten().topk(count).values[-1]
    assert len(part.values) == count and torch.equal(sent, torch.where(mask, full, 0.0))
    # Eq. of the server: mean of weights, or w plus the mean of updates.
    result = ZeroFL(variant=variant).aggregate({"x": w}, {"x": sent})["x"]
    assert torch.equal(result, sent if variant == "weights" else w + sent)


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_swat_forward_and_gradients_equal_the_formulas(kind, rng):
    """y = W~ * a with dense a; grad_a from W~, grad_W from a~, dense; the first layer is trained dense."""
    torch.manual_seed(0)
    if kind == "conv":
        layers, x = [nn.Conv2d(2, 4, 3, bias=False), nn.Conv2d(4, 6, 3, bias=False)], torch.randn(5, 2, 7, 7)
    else:
        layers, x = [nn.Linear(10, 12, bias=False), nn.Linear(12, 9, bias=False)], torch.randn(5, 10)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method = ZeroFL(sparsity=0.7)
    dense = [layer.weight.detach().clone() for layer in layers]
    with begin(method, model, optimizer, 1):
        y = model(x)
        upstream = torch.randn_like(y)
        y.backward(upstream)
        got = [layer.weight.grad.clone() for layer in layers]

    def top(t):
        threshold = t.abs().flatten().topk(math.ceil(0.3 * t.numel() - 1e-9)).values[-1]
        return torch.where(t.abs() >= threshold, t, 0.0)

    apply = (lambda a, w: F.conv2d(a, w)) if kind == "conv" else (lambda a, w: F.linear(a, w))
    sparse_w = top(dense[1])
    hidden = apply(x, dense[0])
    assert torch.equal(y, apply(hidden, sparse_w))
    leaf = dense[1].clone().requires_grad_()
    apply(top(hidden), leaf).backward(upstream)  # grad_W uses the sparse activations
    torch.testing.assert_close(got[1], leaf.grad)
    assert (got[1] != 0).float().mean() > 0.9
    hidden_leaf = hidden.clone().requires_grad_()
    apply(hidden_leaf, sparse_w).backward(upstream)  # grad_a uses the sparse weights
    first = dense[0].clone().requires_grad_()
    apply(x, first).backward(hidden_leaf.grad)
    torch.testing.assert_close(got[0], first.grad)


def test_zerofl_is_tested_sparse_but_for_the_first_layer(rng):
    w = {"first": torch.randn(10, 10, generator=rng), "second": torch.randn(20, 50, generator=rng)}
    seen = ZeroFL().evaluate(w)
    assert torch.equal(seen["first"], w["first"]) and (seen["second"] != 0).sum() == 30
    assert (ZeroFL(sparse_first_layer=True).evaluate(w)["first"] != 0).sum() == 3
    assert all(torch.equal(seen, w[k]) for k, seen in ZeroFL(test_dense=True).evaluate(w).items())


def test_zerofl_may_train_dense_and_prune_only_what_it_sends(rng):
    method, w = ZeroFL(train_sparsity=0), {"first": torch.randn(9, 9, generator=rng)}
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 100))
    assert not method.alters_forward(Step(0, 1)) and not method.instrument(model, ["0.weight", "1.weight"])
    assert torch.equal(method.evaluate(w)["first"], w["first"])
    update = {"1.weight": torch.randn(100, 9, generator=rng)}
    parts, _ = method.encode({"1.weight": torch.zeros(100, 9)}, Local(update), {}, UniformNoise(0, "x"))
    assert (parts["1.weight"].unpack() != 0).sum() == 27
    assert (ZeroFL(train_sparsity=0.5, sparse_first_layer=True).evaluate(w)["first"] != 0).sum() == 41


def test_swat_gradients_are_dense_at_the_papers_sparsity():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(ZeroFL(), model, optimizer, 1):
        assert (model[2].weight != 0).sum() == math.ceil(0.03 * model[2].weight.numel())
        model[2](input=model[1](model[0](torch.randn(16, 1, 12, 12)))).pow(2).sum().backward()
        assert (model[2].weight.grad != 0).float().mean() > 0.9


# FedBAT


def test_fedbat_layer_whose_update_is_zero_at_the_end_sends_zero():
    """It may have moved and come back: alpha' is set, and the lower bound would make it 5e-4."""
    method, zero = FedBAT(), torch.zeros(3, 4)
    local = Local({"x": zero}, {"x": torch.zeros(())}, {"alpha_prime": torch.tensor([0.01])})
    parts, _ = method.encode({"x": zero}, local, {}, UniformNoise(0, "x"))
    assert parts["x"].step == 0


# BiFL


def test_bifl_trains_binary_weights_and_sends_their_signs(rng):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = model[0].weight.detach().clone()
    local = begin(make_method("bifl"), model, optimizer, 1)
    seen = model[0].weight.detach().clone()
    assert torch.equal(seen, start.sign() * start.abs().mean())
    x = torch.randn(6, 8)
    model(x).sum().backward()
    optimizer.step()
    part = local.finish().payload.parts["0.weight"]
    latent = start - 0.1 * x.sum(0).expand(5, 8)  # the gradient went straight through, and the weights are clipped
    assert torch.equal(part.unpack().view(5, 8).sign(), latent.clamp(-1, 1).sign())
    assert part.step == pytest.approx(latent.clamp(-1, 1).abs().mean().item(), rel=1e-5)


def test_bifl_stops_the_gradient_beyond_one_and_full_sends_real_weights():
    w = {"x": torch.tensor([[0.5, -3.0, 1.0]])}
    local = Local({"x": torch.zeros(1, 3)})
    method = make_method("bifl-full")
    seen = method.forward(w, local, {})
    grads, _ = method.pull_back(w, local, {}, seen, {"x": torch.ones(1, 3)})
    assert torch.equal(grads["x"], torch.tensor([[1.0, 0.0, 1.0]]))
    parts, _ = method.encode(w, local, {}, UniformNoise(0, "x"))
    assert torch.equal(parts["x"].unpack(), torch.tensor([0.5, -1.0, 1.0]))
    assert torch.equal(method.evaluate(w)["x"], binary(w["x"]))
    assert torch.equal(seen.weights["x"], binary(parts["x"].unpack().view(1, 3)))  # trained as sent


# The base class and the registry


def test_closed_form_pull_back_equals_the_generic_one(rng):
    """FedBAT's Eq. 8-9 against autograd through a `forward` written with straight_through."""
    from fedbat.binarize import binarize, step_size

    class SlowFedBAT(FedBAT):
        def forward(self, w, local, u):
            alpha_e = torch.stack(list(local.learned.values()))
            alphas, _ = step_size(local.fixed["alpha_prime"], alpha_e, self.rho, self.bounds)
            weights = {k: w[k] + binarize(m, a, u[k]) for (k, m), a in zip(local.update.items(), alphas, strict=True)}
            return Forward(weights)

    w = {k: torch.randn(6, 7, generator=rng, dtype=torch.float64) for k in "ab"}
    update = {k: 0.01 * torch.randn(6, 7, generator=rng, dtype=torch.float64) for k in "ab"}
    learned = {k: torch.tensor(v, dtype=torch.float64) for k, v in (("a", 0.05), ("b", 0.9))}  # b is held by a bound
    fixed = {"alpha_prime": torch.stack([m.abs().mean() for m in update.values()])}
    local = Local(update, learned, fixed)
    u = {k: torch.rand(6, 7, generator=rng, dtype=torch.float64) for k in "ab"}
    grad = {k: torch.randn(6, 7, generator=rng, dtype=torch.float64) for k in "ab"}
    method = FedBAT()
    fast = method.pull_back(w, local, u, method.forward(w, local, u), grad)
    slow = Method.pull_back(SlowFedBAT(), w, local, u, Forward({}), grad)
    for k in "ab":
        torch.testing.assert_close(fast[0][k], slow[0][k])
        torch.testing.assert_close(fast[1][k], slow[1][k])
    assert fast[1]["b"] == 0 != fast[1]["a"]


@pytest.mark.parametrize(("bits", "error"), [(1, 0.487), (2, 0.177), (3, 0.062), (4, 0.020)])
def test_fedbat_error_of_normal_updates(bits, error, rng):
    """||sent - m||^2 / ||m||^2 at alpha' = c_b mean|m|, where it is least, except for the paper's c_1 = 1."""
    d, method = 400_000, FedBAT(bits=bits, bounds=None)
    m = torch.randn(d, generator=rng)

    def squared_errors(factor):
        local = Local({"x": m}, method.learnables({"x": m}))
        local.fixed = {"alpha_prime": factor * method.prepare({"x": m}, local)["alpha_prime"]}
        part = method.encode({"x": m}, local, {}, UniformNoise(0, "x"))[0]["x"]
        assert part.nbits == bits * d + 32
        return (part.unpack() - m).double().square()

    found = squared_errors(1.0)
    spread = 5 * float(found.std()) / math.sqrt(d)
    assert abs(float(found.mean()) - error) < spread + 5e-4  # as many digits as the figure has
    for factor in (0.85, 1.15):
        assert bits == 1 or float(squared_errors(factor).mean()) > float(found.mean())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_fedbat_holds_alpha_in_proportion(bits):
    """alpha' = c_b mean|m|, and bounds that shrink with it; the theorems' alpha makes the largest |m| the reach."""
    share = {1: 1.0, 2: 0.53, 3: 0.33, 4: 0.19}[bits]
    assert FedBAT(bits=bits).step_bounds == pytest.approx((5e-4 * share, 5e-2 * share), rel=1e-12)
    assert FedBAT(bits=bits, bounds=None).step_bounds is FedBAT(bits=bits, step="inf-norm").step_bounds is None
    for size, alpha in ((1e-9, 5e-4 * share), (2e-3, 2e-3 * share), (9.0, 5e-2 * share)):
        local = Local({"x": torch.full((5, 5), size)}, {"x": torch.zeros(())})
        local.fixed = FedBAT(bits=bits).prepare({}, local)
        part = FedBAT(bits=bits).encode({}, local, {}, UniformNoise(0, "x"))[0]["x"]
        assert float(part.step) == pytest.approx(alpha, rel=1e-6)
    m = torch.tensor([[0.1, -0.7, 0.3]])
    part = FedBAT(bits=bits, step="inf-norm").encode({}, Local({"x": m}), {}, UniformNoise(0, "x"))[0]["x"]
    assert float(part.reach) == pytest.approx(0.7) and float(part.unpack()[1]) == pytest.approx(-0.7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name in sorted(METHODS)
        for value in (math.nan, math.inf, -math.inf)
        if math.isnan(value) or not name.startswith("bifl")  # which sends weights, clipped to [-1, 1]
    ],
)
def test_an_update_that_diverged_is_refused(name, value, rng):
    """Without a bias or a norm that would show it: signs of NaN look like any others."""
    model = nn.Linear(40, 3, bias=False)
    layout, method = layout_of(model), make_method(name)
    w, m = tensors_of(model, layout), 0.01 * torch.randn(3, 40, generator=rng)
    m[1, 7] = value
    local = Local({"weight": m}, method.learnables(w))
    local.fixed = method.prepare(w, local)
    parts, _ = method.encode(w, local, {}, UniformNoise(0, "noise"))
    with pytest.raises(WireError, match="diverged"):
        Payload.from_bytes(Payload(layout, parts, {}).to_bytes(), layout)


def test_base_method_is_fedavg(rng):
    m = torch.randn(9, generator=rng)
    base, fedavg = Method(), make_method("fedavg")
    assert torch.equal(encode(base, m)[0].unpack(), m) and torch.equal(encode(fedavg, m)[0].unpack(), m)
    assert not fedavg.alters_forward(Step(0, 1))
    seen = base.forward({"x": m}, Local({"x": m}), {}).weights["x"]
    assert torch.equal(seen, 2 * m)


class Own(type(make_method("signsgd"))):
    """A method from somebody's own module."""


def test_a_method_of_ones_own_is_found_by_its_module():
    method = make_method(f"{__name__}:Own", {"alpha": "0.5"})
    assert type(method).__name__ == "Own" and method.alpha == 0.5
    for name, reason in (
        ("nowhere:Own", "No module"),
        (f"{__name__}:Nobody", "Nobody"),
        (f"{__name__}:math", "is no method"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make_method(name)


def test_defaults_are_the_papers():
    """Section 5.1, Appendix A.2; where it is silent, see the files' headers."""
    assert {name: make_method(name).settings() for name in METHODS} == {
        "bifl": {},
        "bifl-full": {},
        "drive": {"scale": "unbiased"},
        "eden": {"bits": 2},
        "ef-signsgd": {"memory": True, "scale": "corrected", "scope": "layer"},
        "fedavg": {},
        "fedbat": {"rho": 6.0, "phi": 0.5, "step": "learned", "bounds": (5e-4, 5e-2), "sent": "fresh", "bits": 1},
        "fedmrn": {"mask": "binary", "half_width": None},
        "fedpaq": {"bits": 4, "norm": "inf"},
        "noisy-signsgd": {"alpha": 0.01, "sigma": 0.01},
        "signsgd": {"alpha": 0.001},
        "stoc-signsgd": {"alpha": 0.01, "norm": "inf"},
        "zerofl": {
            "sparsity": 0.97, "train_sparsity": None, "extra": 0.0, "variant": "weights-diff",
            "sparse_first_layer": False, "test_dense": False,
        },
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_are_frozen_hashable_and_round_trip_through_text(name):
    method = make_method(name)
    text = {key: show(value) for key, value in method.settings().items()}
    assert make_method(name, text) == method and hash(make_method(name, text)) == hash(method)
    if text:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, next(iter(text)), 1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedbat", {"phi": "1.5"}, r"phi=1.5, expected a number in \[0, 1\]"),
        ("fedbat", {"rho": "-1"}, "rho=-1.0, expected"),
        ("fedbat", {"rho": "nan"}, "rho=nan, expected"),
        ("fedbat", {"rho": "six"}, "rho='six' could not be read; expected number, such as its default, 6"),
        ("fedbat", {"bounds": "0.1,0.01"}, "expected 0 < lower <= upper"),
        ("fedbat", {"bounds": "0.1"}, "could not be read"),
        ("fedbat", {"sent": "both"}, "sent='both' could not be read; expected fresh or last, such as"),
        ("fedbat", {"bits": "5"}, "bits=5, expected a whole number from 1 to 4; bits=1 is the paper's"),
        ("fedbat", {"bits": "0"}, "bits=0, expected a whole number from 1 to 4"),
        ("fedbat", {"bits": "last"}, "bits='last' could not be read"),
        ("fedbat", {"step": "x"}, "step='x' .* expected learned or fixed or inf-norm"),
        ("fedbat", {"foo": "1"}, "FedBAT has no setting 'foo'; it has rho, phi, step, bounds, sent, bits"),
        ("fedavg", {"foo": "1"}, "FedAvg has no setting 'foo'; it has none"),
        ("signsgd", {"alpha": "0"}, r"alpha=0.0, expected a number in \(0"),
        ("drive", {"scale": "l1"}, "scale='l1' .* expected unbiased or mse"),
        ("eden", {"bits": "5"}, "bits=5, expected a whole number from 1 to 4; 1 is unbiased DRIVE"),
        ("fedmrn", {"mask": "ternary"}, "mask='ternary' .* expected binary or signed"),
        ("fedmrn", {"half_width": "0"}, r"half_width=0.0, expected a number in \(0"),
        ("fedpaq", {"bits": "9"}, "bits=9, expected a whole number from 2 to 8"),
        ("zerofl", {"sparsity": "1"}, "sparsity=1.0, expected"),
        ("zerofl", {"extra": "0.98"}, "extra=0.98, expected"),
        ("zerofl", {"sparse_first_layer": "maybe"}, "could not be read"),
        ("stoc-signsgd", {"norm": "l1"}, "norm='l1' .* expected inf or l2"),
        ("nope", {}, "unknown method 'nope'; choose from bifl, "),
    ],
)
def test_bad_settings_say_got_expected_fix(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_method(name, settings)


@pytest.mark.parametrize("name", ["fedbat", "eden", "fedpaq"])
def test_bits_are_whole(name):
    with pytest.raises(ConfigError, match=r"bits=2.5, expected a whole number from \d to \d"):
        METHODS[name](bits=2.5)


def test_settings_may_be_values_and_are_recorded_as_text():
    for name, values in (("ef-signsgd", {"memory": False}), ("fedbat", {"bounds": None, "rho": 4, "step": "fixed"})):
        made = make_method(name, values)
        assert {key: getattr(made, key) for key in values} == values
        resolved = Experiment(method=name, settings=values).resolved().settings
        assert all(isinstance(value, str) for value in resolved.values()) and make_method(name, resolved) == made


@pytest.mark.parametrize("value", [1 / 3, 0.0012345678, 1e-300, 123456789.0, (1 / 3e4, 1 / 3e1)])
def test_text_keeps_every_digit_of_a_setting(value):
    """A client in Flower is given its method as text, and its server expects the very step size it gave."""
    (again,) = parse_settings(FedBAT, {"bounds" if isinstance(value, tuple) else "rho": show(value)}).values()
    assert again == value


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (
            lambda: METHODS["zerofl"](sparse_first_layer="no"),
            "ZeroFL's sparse_first_layer is 'no' .str., expected on or",
        ),
        (lambda: METHODS["ef-signsgd"](memory=1), "EFSignSGD's memory is 1 .int., expected on or off"),
        (lambda: FedBAT(bounds=[5e-4, 5e-2]), r"FedBAT's bounds is \[.*list., expected number,number or off"),
    ],
)
def test_settings_of_another_type_are_refused_before_training(method, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_method(method())


def test_a_method_is_made_by_name_with_settings_of_either_form():
    assert make_method("fedbat", rho=4) == make_method("fedbat", {"rho": "4"}) == FedBAT(rho=4.0)
    assert make_method("fedbat", {"rho": 4}, phi=0.1) == FedBAT(rho=4.0, phi=0.1)


def test_settings_of_your_own_methods_are_read_by_their_types():
    @dataclasses.dataclass(frozen=True)
    class Mine(Method):
        scale: Optional[float] = None  # noqa: UP045
        mode: Literal["a", "b"] = "a"
        name: str = "x"
        sizes: list[int] = dataclasses.field(default_factory=list)

    assert parse_settings(Mine, {"scale": "0.5", "mode": "b", "name": "y"}) == {"scale": 0.5, "mode": "b", "name": "y"}
    assert parse_settings(Mine, {"scale": "off"}) == {"scale": None}
    with pytest.raises(ConfigError, match=r"sizes is a list\[int\], which cannot be given as text"):
        parse_settings(Mine, {"sizes": "1,2"})


def test_settings_from_text():
    assert make_method("fedbat", {"bounds": "off", "rho": "4", "sent": "last"}) == FedBAT(4.0, bounds=None, sent="last")
    assert make_method("stoc-signsgd", {"alpha": "off"}) == StocSignSGD(None)
    assert parse_settings(ZeroFL, {"sparse_first_layer": "on"}) == {"sparse_first_layer": True}
    assert [show(x) for x in (None, True, False, (0.0005, 0.05), 6.0, 4)] == [
        "off",
        "on",
        "off",
        "0.0005,0.05",
        "6",
        "4",
    ]
