"""Local training: equal to the paper's algorithm; what is trained is what is sent is what is added."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat import METHODS, Aggregator, ConfigError, MethodError, Payload, Server, begin, layout_of, make_method
from fedbat.layout import tensors_of
from fedbat.method import Method
from fedbat.methods.fedbat import FedBAT
from fedbat.parts import Dense, Signs
from fedbat.training import layer_reports, measure_layers
from tests.local_training import (
    OPTIMIZERS,
    RecordedNoise,
    accumulating_step,
    holds_one_magnitude,
    mlp,
    plain_step,
    run,
    some_batches,
)
from tests.reference import fedbat_client

# Equal to the paper's algorithm


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", [plain_step, accumulating_step])
@pytest.mark.parametrize(
    ("phi", "bounds", "bits"),
    [
        (0.0, None, 1),
        (0.3, (5e-3, 2e-2), 1),
        (0.5, None, 1),
        (0.5, (5e-4, 5e-2), 1),
        (0.3, (5e-3, 2e-2), 2),
        (0.0, None, 3),
        (0.5, (5e-4, 5e-2), 4),
    ],
)
def test_hooks_train_exactly_what_explicit_autograd_trains(optimizer, step, phi, bounds, bits):
    batches = some_batches(10, torch.float64)
    model, twin = (layer_normed() for _ in range(2))
    noise = RecordedNoise()
    ours = OPTIMIZERS[optimizer](model.parameters())
    local = begin(FedBAT(rho=6, phi=phi, bounds=bounds, bits=bits), model, ours, len(batches), noise=noise)
    for x, y in batches:
        step(model, ours, x, y)
    update, forwards = local._update(), list(noise.drawn)
    upload = local.finish()
    m, alpha, sent = fedbat_client.train(
        twin, list(update), batches, make_optimizer=OPTIMIZERS[optimizer], rho=6, phi=phi, bounds=bounds,
        noises=iter(forwards), last_noise=noise.drawn[-1], bits=bits,
    )  # fmt: skip
    assert len(noise.drawn) == len(forwards) + 1  # fresh bits
    for name, part in upload.payload.parts.items():
        torch.testing.assert_close(update[name], m[name], rtol=0, atol=1e-10)
        assert part.step == pytest.approx(alpha[name].item(), rel=1e-6)
        torch.testing.assert_close(part.unpack().view(m[name].shape), sent[name].float(), rtol=1e-5, atol=0)
    for name, parameter in twin.named_parameters():
        if name not in update:  # norms and biases are trained all along; they travel as float32 differences
            torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=0, atol=1e-6)


def layer_normed():
    """Of double precision, and without BatchNorm, which would tell micro-batches from batches."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).double()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("method", [FedBAT(phi=0), make_method("zerofl"), make_method("bifl"), make_method("fedmrn")])
def test_parameters_keep_their_memory_format(method, memory_format, channels):
    """A convolution of one channel looks at strides that address nothing, and is half as fast with the wrong ones."""
    model = nn.Conv2d(channels, 4, 3).to(memory_format=memory_format)
    strides, optimizer = model.weight.stride(), torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(method, model, optimizer, 2):
        for _ in range(2):
            assert model.weight.stride() == strides
            model(torch.randn(2, channels, 5, 5)).sum().backward()
            optimizer.step()
    assert model.weight.stride() == strides


def test_warm_up_is_plain_training_bit_for_bit():
    batches = some_batches(6)
    model, plain = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(FedBAT(phi=1), model, optimizer, len(batches)) as local:
        run(model, optimizer, batches)
        trained = {k: x.clone() for k, x in local._live.items()}
        local.finish()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained[name])


FIRST_STEPS = [(80, 0.5, 40), (30, 0.1, 3), (7, 0.5, 3), (10, 0.0, 0), (10, 1.0, 10), (90, 0.7, 63)]


@pytest.mark.parametrize(("tau", "phi", "first"), FIRST_STEPS)
def test_first_binarized_step(tau, phi, first):
    """The parameters hold w + S, not w + m, from step floor(phi tau) on, and alpha' is mean|m| then."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = begin(FedBAT(phi=phi), model, optimizer, tau)
    batch = some_batches(1)
    for step in range(tau):
        if step > 0:  # at step 0 m is still 0
            assert holds_one_magnitude(model, local) == (step >= first), step
        if step == first and first > 0:
            expected = torch.stack([m.abs().mean() for m in local._update().values()])
            assert torch.equal(local._local.fixed["alpha_prime"], expected)
        run(model, optimizer, batch)
    local.finish()


# What is trained is what is sent is what is added


VARIANTS = [(name, {}) for name in sorted(METHODS)] + [
    ("fedbat", {"sent": "last"}),
    ("fedbat", {"bits": "2"}),
    ("fedbat", {"bits": "3", "sent": "last"}),
    ("fedbat", {"bits": "4", "step": "inf-norm"}),
    ("fedbat", {"step": "inf-norm", "phi": "0"}),
    ("stoc-signsgd", {"norm": "l2"}),
    ("fedpaq", {"bits": "3", "norm": "l2"}),
    ("zerofl", {"variant": "weights"}),
    ("zerofl", {"variant": "diff-on-weights", "extra": "0.1"}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_model_left_behind_is_what_was_sent_is_what_the_server_adds(name, settings, channels_last):
    method = make_method(name, settings)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 3, bias=False))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    layout = layout_of(model)
    start = {k: v.clone() for k, v in tensors_of(model, layout).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(method, model, optimizer, 4, memory={})
    x, y = torch.randn(16, 2, 5, 5), torch.randint(0, 3, (16,))
    run(model, optimizer, [(x, y)] * 4)
    upload = local.finish()
    received = Payload.from_bytes(upload.to_bytes(), layout)
    aggregator = Aggregator(method, layout, start)
    aggregator.add(received, 1)
    result = aggregator.result()
    for entry in layout:
        left = tensors_of(model, layout)[entry.name]
        assert torch.equal(left, result[entry.name]), entry.name
        assert left.dtype == entry.dtype


@pytest.mark.parametrize("name", sorted(METHODS))
def test_hooks_are_gone_and_the_optimizer_is_the_users_again(name):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    pointers = [p.data_ptr() for p in model.parameters()]
    with (
        pytest.raises(RuntimeError, match="stop here"),
        begin(make_method(name), model, optimizer, 10, memory={}) as local,
    ):
        run(model, optimizer, some_batches(8))
        update = local._update()
        raise RuntimeError("stop here")
    for key, m in update.items():  # the model holds what was trained
        assert torch.equal(dict(model.named_parameters())[key].detach() - local._w[key], m)
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    assert set(optimizer.state) <= set(model.parameters())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    before = [p.clone() for p in model.parameters()]
    run(model, optimizer, some_batches(1))
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# Mistakes


def test_closures_are_refused_from_the_first_step():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(FedBAT(phi=0.5), model, optimizer, 3), pytest.raises(MethodError, match=r"backward\(\)"):
        optimizer.step(lambda: F.cross_entropy(model(torch.randn(4, 12)), torch.zeros(4, dtype=torch.long)))


def test_finish_ends_it_once():
    model = mlp()
    with begin(FedBAT(), model, torch.optim.SGD(model.parameters(), lr=0.1), 3) as local:
        local.finish()
    with pytest.raises(MethodError, match="call it once"):
        local.finish()


def test_mistakes_of_begin_are_named():
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"expected an instance such as fedbat.FedBAT\(\)"):
        begin(FedBAT, model, optimizer, 3)
    with pytest.raises(ConfigError, match=r"expected an instance such as fedbat.FedBAT\(\)"):
        Server(FedBAT, model)
    with pytest.raises(MethodError, match="holds no parameter of this model"):
        begin(FedBAT(), other, optimizer, 3)
    for given in ((optimizer, model), (model, model), (optimizer, optimizer), (model, "sgd")):
        with pytest.raises(
            ConfigError, match=r"^model is of type .*; the order is begin\(method, model, optimizer, num"
        ):
            begin(FedBAT(), *given, 3)
    with begin(FedBAT(), model, optimizer, 3), pytest.raises(MethodError, match="in a round already"):
        begin(FedBAT(), model, optimizer, 3)
    begin(FedBAT(), model, optimizer, 3).finish()


def test_a_round_that_cannot_begin_leaves_nothing_hooked():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    num = len(optimizer.param_groups[0]["params"])
    with pytest.raises(ZeroDivisionError):
        begin(FedBAT(phi=0.0), model, optimizer, 3, noise=lambda like: 1 / 0)
    assert len(optimizer.param_groups[0]["params"]) == num
    assert all(map(torch.equal, before, model.parameters()))
    begin(FedBAT(), model, optimizer, 3).finish()


def test_a_method_may_use_what_it_learned_without_a_thought_of_gradients():
    @dataclass(frozen=True)
    class Scaled(Method):
        def learnables(self, w):
            return {name: torch.ones(()) for name in w}

        def encode(self, w, local, memory, noise):
            return {k: Dense((local.learned[k] * m).reshape(-1)) for k, m in local.update.items()}, memory

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(Scaled(), model, optimizer, 2) as local:
        run(model, optimizer, some_batches(2))
        raw = local.finish().to_bytes()
    assert Payload.from_bytes(raw, layout_of(model)).parts


@pytest.mark.parametrize("context", [-1, 2**64, 1.5, 1.0])
def test_context_must_fit_the_header(context):
    model = mlp()
    with pytest.raises(ConfigError, match=f"context={context}, expected a whole number from 0 to 2\\^64 - 1"):
        begin(FedBAT(), model, torch.optim.SGD(model.parameters(), lr=0.1), 1, context=context)


def test_a_forgotten_memory_is_told():
    """It would be as if every round were the client's first."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"EFSignSGD adds what .* no memory was given; pass memory=upload\.memory"):
        begin(make_method("ef-signsgd"), model, optimizer, 1)
    for method, options in (("ef-signsgd memory=off", {}), ("ef-signsgd", {"memory": {}}), ("fedbat", {})):
        name, _, change = method.partition(" ")
        settings = dict([change.split("=")]) if change else {}
        with begin(make_method(name, settings), model, optimizer, 1, **options):
            pass


def test_a_memory_nobody_uses_is_told():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for method in (FedBAT(), make_method("ef-signsgd", {"memory": "off"})):
        with pytest.raises(ConfigError, match=r"memory has 1 tensors, but .* remembers nothing"):
            begin(method, model, optimizer, 1, memory={"0.weight": torch.zeros(16, 12)})
        for nothing in ({}, None):
            with begin(method, model, optimizer, 1, memory=nothing):
                pass


def test_a_memory_of_another_model_is_told():
    """It would be broadcast."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(make_method("ef-signsgd"), model, optimizer, 1, memory={"0.weight": torch.zeros(12)}) as local:
        run(model, optimizer, some_batches(1))
        with pytest.raises(MethodError, match=r"memory of 0.weight has shape \[12\], expected .* \[16, 12\]"):
            local.finish()


def test_num_steps_must_be_positive():
    model = mlp()
    for wrong in (0, 1.5, float("nan"), float("inf"), None, "3"):
        with pytest.raises(ConfigError, match=f"num_steps={wrong!r}"):
            begin(FedBAT(), model, torch.optim.SGD(model.parameters(), lr=0.1), wrong)


def test_a_report_counts_what_lies_beyond_the_reach():
    m = torch.tensor([0.5, -3.0, 1.5, 0.0, 2.5])
    part = Signs.of(m > 0, torch.tensor(2.0))
    (report,) = layer_reports({"a": part}, measure_layers({"a": m}, {"a": part.unpack()}, {"a": part})).values()
    error = (part.unpack() - m).norm() / m.norm()
    assert report.clipped == pytest.approx(2 / 5) and report.step == 2.0
    assert report.relative_error == pytest.approx(error.item())
