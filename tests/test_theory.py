"""The paper's theory, measured: q, Lemmas 5-6, Theorems 1-3 and Remark 1.

The theorems hold for phi = 0 and alpha = ||m||_inf. Upper bounds are weak tests (their slack here is 10^4), so the
rates are tested as slopes and, on quadratics, the constant is tested two-sided against its closed form.
"""

import copy
import math
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat.binarize import binarize_forward
from fedbat.layout import layout_of, tensors_of
from fedbat.method import Forward, Method
from fedbat.methods.fedavg import FedAvg
from fedbat.methods.fedbat import FedBAT
from fedbat.methods.stoc_signsgd import StocSignSGD
from fedbat.reproduce import load_book
from fedbat.reproduce.theory import toys
from fedbat.reproduce.theory.record import run_trial
from fedbat.reproduce.theory.theorems import b_of_theorem_2
from fedbat.reproduce.theory.trials import StronglyConvex
from fedbat.server import Aggregator
from fedbat.streams import UniformNoise
from fedbat.training import begin
from fedbat.wire import Payload
from tests.reference import quadratics

NUM_CLIENTS = 10


def generator(seed):
    return torch.Generator().manual_seed(seed)


# Assumption 5: the relative variance q^2 of S at alpha = ||x||_inf


@pytest.mark.parametrize("law", ["normal", "laplace", "uniform", "one-hot"])
def test_variance_of_binarization(law, rng):
    d, num_draws = 300, 4000
    x = {
        "normal": lambda: torch.randn(d, generator=rng),
        "laplace": lambda: torch.rand(d, generator=rng).log() * torch.randn(d, generator=rng).sign(),
        "uniform": lambda: torch.rand(d, generator=rng) * 2 - 1,
        "one-hot": lambda: torch.eye(d)[7] * -0.3,
    }[law]().double()
    alpha = toys.inf_norm(x)
    noise = UniformNoise(1, "q")({"x": torch.empty(num_draws, d)})["x"].double()
    errors = ((binarize_forward(x, alpha, noise) - x) ** 2).sum(1)
    expected = d * float(alpha) ** 2 - float(x @ x)
    # ||S - x||^2 = d alpha^2 + ||x||^2 - 2 <S, x>, so its variance is 4 sum x^2 (alpha^2 - x^2).
    variance = 4 * float((x**2 * (alpha**2 - x**2)).sum())
    rounding = 1e-9 * expected  # one-hot has no variance at all
    assert abs(float(errors.mean()) - expected) < 5 * math.sqrt(variance / num_draws) + rounding
    q_squared = expected / float(x @ x)
    assert 0 <= q_squared <= d - 1 + 1e-9
    if law == "one-hot":
        assert q_squared == pytest.approx(d - 1, rel=1e-12)
        assert float(errors.std()) < 1e-12


@pytest.mark.parametrize("c", [1e-30, 3e-4, 0.1, 7.0])
def test_equal_magnitudes_are_sent_exactly(c, rng):
    x = c * (torch.rand(997, generator=rng) - 0.5).sign()
    noise = UniformNoise(2, "q")
    edges = [torch.full_like(x, 2**-17), torch.full_like(x, 1 - 2**-17)]  # the smallest and largest it can draw
    for u in [noise({"x": x})["x"] for _ in range(50)] + edges:
        assert torch.equal(binarize_forward(x, toys.inf_norm(x), u), x)


@pytest.mark.parametrize(("d", "num_draws", "stated"), [(1_000, 600, 10.9), (100_000, 60, 18.9), (300_000, 30, 22.1)])
def test_q_of_normal_updates(d, num_draws, stated, rng):
    """E q^2 = 10.91, 19.62 and 21.73; `stated` are single draws by others, which vary by 2.4 to 2.5."""
    # E max^2 = int 2 s P(max > s) ds; ||x||^2 / d = 1 up to a relative 2 / d.
    s = torch.linspace(0, 12, 12_001, dtype=torch.float64)
    beyond = 1 - (d * torch.log1p(-torch.special.erfc(s[1:] / math.sqrt(2)))).exp()
    expected = float(torch.trapezoid(2 * s[1:] * beyond, s[1:])) - 1
    x = torch.randn(num_draws, d, generator=rng)
    q_squared = (d * toys.inf_norm(x)[:, 0] ** 2 / (x**2).sum(1) - 1).double()
    one_draw = float(q_squared.std())
    assert abs(float(q_squared.mean()) - expected) < 5 * one_draw / math.sqrt(num_draws)
    assert abs(stated - expected) < one_draw
    # S itself has that error: ||S - x||^2 for the first x, with the variance as above.
    squares = x[0].double() ** 2
    sent = binarize_forward(x[0], toys.inf_norm(x[0]), torch.rand(d, generator=rng))
    spread = 2 * math.sqrt(float((squares * (squares.max() - squares)).sum()))
    assert abs(float(((sent - x[0]).double() ** 2).sum() / squares.sum()) - q_squared[0]) < 5 * spread / squares.sum()


# Lemmas 5 and 6: sampling K of N clients and binarizing


@pytest.mark.parametrize("num_sampled", [1, 4, 9, 10])
def test_sampled_and_binarized_mean(num_sampled, rng):
    n, k, d, num_draws = NUM_CLIENTS, num_sampled, 6, 20_000
    m = torch.randn(n, d, generator=rng, dtype=torch.float64) * torch.linspace(0.2, 2, n, dtype=torch.float64)[:, None]
    mean, alpha = m.mean(0), toys.inf_norm(m)
    heard = toys.choose(num_draws, n, k, rng)[..., None]
    u = torch.rand(num_draws, n, d, generator=rng).double()
    sampled = (heard * m).sum(1) / k
    sent = (heard * binarize_forward(m, alpha, u)).sum(1) / k

    sampling = (n - k) / (k * n * (n - 1)) * ((m - mean) ** 2).sum(0)  # [d]; Lemma 6's A_2
    binarization = (alpha**2 - m**2).mean(0) / k  # [d]; its A_1, mean_k q_k^2 ||m_k||^2 / K
    standard_error = ((sampling + binarization) / num_draws).sqrt()
    assert ((sent.mean(0) - mean).abs() < 5 * standard_error).all()  # Lemma 5

    for found, expected in [
        (sampled - mean, sampling),
        (sent - sampled, binarization),
        (sent - mean, sampling + binarization),
    ]:
        squares = (found**2).sum(1)
        tolerance = 5 * float(squares.std()) / math.sqrt(num_draws) + 1e-12  # K = N has no sampling part
        assert abs(float(squares.mean()) - float(expected.sum())) < tolerance


# The theorems' constants, for fractions


def b_of_theorem_1(p, *, smoothness, sigma2, heterogeneity, g2, q2, tau):
    """B of Theorem 1; sigma2, g2 and q2 are squares."""
    squares = sum(x * x for x in p)
    drift = 8 * (1 + q2) * (tau - 1) ** 2 * g2
    return squares * sigma2 + 6 * smoothness * heterogeneity + drift + 4 * squares * q2 * tau**2 * g2


def test_theorem_2_contains_theorem_1_and_fedavg():
    """Remark 1 as algebra: K = N gives Theorem 1, q = 0 gives FedAvg's constant (Li et al., 2020)."""
    draw = Random(0)
    for _ in range(200):
        n, tau = draw.randint(2, 300), draw.randint(1, 500)
        smoothness, sigma2, heterogeneity, g2, q2 = (
            Fraction(draw.randint(0, 10**6), draw.randint(1, 10**6)) for _ in range(5)
        )
        others = dict(smoothness=smoothness, sigma2=sigma2, heterogeneity=heterogeneity, g2=g2, tau=tau)
        full = b_of_theorem_1([Fraction(1, n)] * n, q2=q2, **others)
        assert b_of_theorem_2(Fraction(n), n, q2=q2, **others) == full
        assert full - b_of_theorem_1([Fraction(1, n)] * n, q2=Fraction(0), **others) == (
            8 * q2 * (tau - 1) ** 2 * g2 + 4 * q2 / n * tau**2 * g2
        )
        k = draw.randint(1, n)
        fedavg = sigma2 / n + 6 * smoothness * heterogeneity + 8 * (tau - 1) ** 2 * g2
        fedavg += Fraction(n - k, n - 1) * Fraction(4, k) * tau**2 * g2
        assert b_of_theorem_2(Fraction(n), k, q2=Fraction(0), **others) == fedavg
        partial = b_of_theorem_2(Fraction(n), k, q2=q2, **others)
        assert partial > full or k == n or g2 == 0


# Theorems 1 and 2: strongly convex, eta_t = 2 / (mu (gamma + t))


TRIALS = {
    (trial.problem, trial.sampled, trial.compress): trial
    for trial in load_book(Path(__file__).parent.parent / "experiments").tables["theory"].trials
}


@cache
def trial_of(problem, sampled, compress="binarization"):
    """The trial of experiments/theory.toml, run here; its record holds what another machine gave."""
    return run_trial(TRIALS[problem, sampled, compress])


def standard_error(estimate):
    return estimate.spread.std / math.sqrt(estimate.seeds)


@pytest.mark.parametrize("num_sampled", [10, 4])
def test_rate_is_one_over_t(num_sampled):
    """Theorem 1 (K = N) and 2: slope -1, and (gamma + t) gap is the same at 2e3 and 2e4.

    The standard errors between runs are 0.03 and (of the ratio's logarithm) 0.07: the bands are about five of them to
    either side.
    """
    found = trial_of("quadratics", num_sampled)
    rate = found.slope()
    assert -1.15 < rate.value < -0.85
    assert abs(rate.value + 1) < 5 * standard_error(rate) < 0.2
    assert 0.7 < found.constant(until=2_000).value / found.constant().value < 1.4


@pytest.mark.parametrize("num_sampled", [10, 4])
def test_gap_is_below_the_bound(num_sampled):
    """Weak (see the top of the file), but it is what the theorems say; G and q are measured."""
    found = trial_of("quadratics", num_sampled)
    assert 0 < found.constants["q2"] <= found.trial.dimension - 1
    assert (found.mean < found.bound).all()


@pytest.mark.parametrize("num_sampled", [10, 4, 2])
def test_constant_is_the_one_lemma_6_gives(num_sampled):
    """Two-sided: the plateau of (gamma + t) gap, with Lemma 6's variances as equalities. 2 % for finite t."""
    found = trial_of("quadratics", num_sampled)
    constant, expected = found.constant(), found.constants["limit"]
    assert abs(constant.value - expected) < 5 * standard_error(constant) + 0.02 * expected


def test_fewer_clients_give_a_larger_constant():
    """Theorem 2's B falls with K."""
    constants = [trial_of("quadratics", num_sampled).constant() for num_sampled in (10, 4, 2)]
    for more, fewer in pairwise(constants):
        assert fewer.value - more.value > 5 * math.hypot(standard_error(more), standard_error(fewer))


def test_without_binarization_it_is_fedavg_bit_for_bit():
    """q = 0: S replaced by the identity, against a loop over runs, clients and steps."""
    problem = StronglyConvex(TRIALS["quadratics", 10, "none"])
    common = dict(w=torch.zeros(2, problem.trial.dimension, dtype=torch.float64), tau=problem.trial.tau, num_rounds=20)
    fast = toys.train(
        problem.toy,
        problem.learning_rate,
        num_sampled=problem.trial.clients,
        rng=generator(3),
        compress=toys.identity,
        **common,
    )
    slow = quadratics.fedavg(problem.toy, problem.learning_rate, rng=generator(3), **common)
    for found, expected in zip(fast, slow, strict=True):
        assert torch.equal(found.w, expected)


def test_without_binarization_the_gap_falls_faster():
    """FedAvg's gap against its exact mean, whose two parts fall as 1/t (noise) and 1/t^2 (client drift)."""
    found = trial_of("quadratics", 10, "none")
    trial, toy, ends = found.trial, found.problem.toy, found.trial.rounds
    start = torch.full((trial.dimension,), trial.start, dtype=torch.float64)
    means, variances = quadratics.fedavg_moments(
        toy, found.problem.learning_rate, w=start, tau=trial.tau, num_rounds=ends[-1]
    )
    means, variances = (moments[[end - 1 for end in ends]] for moments in (means, variances))
    bias2, a = (means - toy.optimum) ** 2, toy.mean_curvature
    expected = ((bias2 + variances) * a / 2).sum(1).numpy()
    spread = ((a / 2) ** 2 * (2 * variances**2 + 4 * bias2 * variances)).sum(1).sqrt().numpy()  # of normal w
    assert (abs(found.mean - expected) < 5 * spread / math.sqrt(trial.seeds)).all()
    rate, exact = found.slope(), replace(found, values=np.repeat(expected[:, None], trial.seeds, 1)).slope()
    assert (
        abs(rate.value - exact.value) < 5 * standard_error(rate) + 0.02
    )  # a mean of logarithms is no logarithm of means
    assert rate.value + 5 * standard_error(rate) < -1.2
    assert found.constant().value < trial_of("quadratics", 10).constant().value / 1000


# Theorem 3: not convex, eta = 1 / (L sqrt(T))


@pytest.mark.parametrize("num_sampled", [10, 4])
def test_nonconvex_rate(num_sampled):
    """The mean of ||grad F||^2 over a run of T steps falls as T^-1/2."""
    found = trial_of("ripples", num_sampled)
    assert found.constants["curvature"] < -1  # the runs pass where F is not convex
    assert (np.diff(found.mean) < 0).all()
    rate = found.slope()
    assert rate.value + 5 * standard_error(rate) < -0.4
    assert (found.mean < found.bound).all()


# Remark 1 through the real path: begin, bytes, server


class Network(nn.Sequential):
    """Two compressed layers, and biases and BatchNorm that travel as they are."""

    def __init__(self, seed, norm=False):
        super().__init__(nn.Linear(6, 9), nn.BatchNorm1d(9) if norm else nn.Identity(), nn.Tanh(), nn.Linear(9, 3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator(seed + parameter.numel())) / 2)


def shards(num_steps=1, sizes=(5, 8, 13, 6)):
    """What each client holds: its batches of equal size."""
    rng = generator(11)
    return [
        [(torch.randn(n, 6, generator=rng), torch.randint(3, (n,), generator=rng)) for _ in range(num_steps)]
        for n in sizes
    ]


def upload_of(method, model, batches, noise, **optimizer):
    """A client's round: a copy of the model, the user's loop, the upload as bytes."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1} | optimizer)
    with begin(method, model, optimizer, len(batches), noise=noise) as local:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return local.finish().to_bytes()


def federation(method, model, clients, num_rounds, noise_of=lambda *key: None):
    """All clients in every round, weighted by their samples; yields (uploads, the next global tensors)."""
    layout = layout_of(model)
    for round_ in range(num_rounds):
        uploads = [upload_of(method, model, batches, noise_of(round_, k)) for k, batches in enumerate(clients)]
        aggregator = Aggregator(method, layout, tensors_of(model, layout))
        for upload, batches in zip(uploads, clients, strict=True):
            aggregator.add(Payload.from_bytes(upload, layout), sum(len(y) for _, y in batches))
        result = aggregator.result()
        model.load_state_dict(result)
        yield uploads, result


def noise_after(num_draws):
    """The noise of a round and a client, after some draws for forward passes."""

    def noise_of(round_, client):
        noise = UniformNoise(5, "local", round_, client)
        for _ in range(num_draws):
            noise({entry.name: torch.empty(entry.shape) for entry in layout_of(Network(0)).compressed})
        return noise

    return noise_of


def fedbat_and_stoc_signsgd(num_steps, num_rounds=6):
    """Both with the noise that FedBAT has left for the upload after its num_steps + 1 forward draws."""
    clients = shards(num_steps)
    fedbat = federation(FedBAT(phi=0.0, step="inf-norm"), Network(1), clients, num_rounds, noise_after(0))
    stoc = federation(StocSignSGD(alpha=None), Network(1), clients, num_rounds, noise_after(num_steps + 1))
    return list(fedbat), list(stoc)


def test_one_step_fedbat_is_stoc_signsgd_bit_for_bit():
    """tau = 1, K = N: the first forward pass has m = 0, so S(m) = 0 and both see w.

    This is sent="fresh", S(v) of the proofs. Algorithm 1 to the letter (sent="last") would send that first S(0) = 0.
    """
    fedbat, stoc = fedbat_and_stoc_signsgd(num_steps=1)
    for (uploads, tensors), (expected_uploads, expected_tensors) in zip(fedbat, stoc, strict=True):
        assert uploads == expected_uploads
        assert all(torch.equal(tensors[name], expected_tensors[name]) for name in expected_tensors)
    assert len({upload for uploads, _ in fedbat for upload in uploads}) == 6 * 4  # something is learned every time


def test_two_step_fedbat_is_not():
    """The control: from the second step on FedBAT computes with w + S(m)."""
    fedbat, stoc = fedbat_and_stoc_signsgd(num_steps=2, num_rounds=1)
    assert all(ours != theirs for ours, theirs in zip(fedbat[0][0], stoc[0][0], strict=True))


def test_one_step_fedavg_is_sgd_on_the_union():
    """tau = 1, K = N, q = 0: every round is one float64 SGD step on all samples, but for float32 rounding.

    w + m is rounded once at the client and once at the server, half an eps |w| each; gradients err by a few eps, times
    the learning rate 0.1. Two eps max|w| leave room for that (half an eps was seen).
    """
    clients, twin = shards(), Network(2).double()
    x, y = (torch.cat(tensors) for tensors in zip(*(batch for batches in clients for batch in batches), strict=True))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _, tensors in federation(FedAvg(), Network(2), clients, 10):
        optimizer.zero_grad()
        F.cross_entropy(twin(x.double()), y).backward()
        optimizer.step()
        largest = max(float(tensor.abs().max()) for tensor in tensors.values())
        for name, expected in twin.state_dict().items():
            assert float((tensors[name] - expected).abs().max()) < 2 * torch.finfo(torch.float32).eps * largest
        twin.load_state_dict(tensors)


class Unquantized(FedBAT):
    """FedBAT that sends m as it is."""

    kinds = Method.kinds
    encode = Method.encode


class Identity(Unquantized):
    """FedBAT with S replaced by the identity: q = 0."""

    pull_back = FedBAT.pull_back  # Eq. 8, as for S

    def forward(self, w, local, u):
        seen = super().forward(w, local, u)
        return Forward({k: w[k] + m for k, m in local.update.items()}, local.update, seen.shared)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_warm_up_alone_is_fedavg_bit_for_bit(momentum):
    """phi = 1 trains the same update, whatever is drawn and added for the step sizes."""
    (batches,) = shards(num_steps=7, sizes=(8,))
    fedavg, fedbat = (
        upload_of(method, Network(3, norm=True), batches, UniformNoise(1, "local"), momentum=momentum)
        for method in (FedAvg(), Unquantized(phi=1.0))
    )
    assert fedbat == fedavg
    assert fedbat != upload_of(
        Unquantized(phi=0.5), Network(3, norm=True), batches, UniformNoise(1, "local"), momentum=momentum
    )


def test_binarized_path_without_binarization_is_fedavg_bit_for_bit():
    """phi = 0 with S = identity: hooks, swapped parameters and Eq. 8's mask change no bit.

    Weights that stay within a factor two of where they started make w + (v - w) = v exact (Sterbenz).
    """
    clients, uploads = shards(num_steps=5), []
    for method in (FedAvg(), Identity(phi=0.0, step="inf-norm")):
        model = Network(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.sigmoid() + 1)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        uploads.append([upload for sent, _ in federation(method, model, clients, 3) for upload in sent])
        assert all((v / before[k] - 1).abs().max() < 0.4 for k, v in model.state_dict().items())
    assert uploads[0] == uploads[1]
