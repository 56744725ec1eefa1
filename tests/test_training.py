"""Local training around anyone's loop: any model, optimizer and loop; what is trained is what is sent."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat import METHODS, Aggregator, ConfigError, MethodError, Payload, Server, begin, layout_of, make_method
from fedbat.layout import tensors_of
from fedbat.method import Forward, Method
from fedbat.methods.fedbat import FedBAT
from fedbat.streams import UniformNoise
from tests.reference import fedbat_client


class RecordedNoise:
    """Draws once, hands out again: lets a twin see the same noise."""

    def __init__(self, seed=0, dtype=torch.float64):
        self.generator, self.dtype, self.drawn = torch.Generator().manual_seed(seed), dtype, []

    def __call__(self, like):
        self.drawn.append({k: torch.rand(x.shape, generator=self.generator, dtype=self.dtype) for k, x in like.items()})
        return self.drawn[-1]


def mlp(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)


def some_batches(num, dtype=torch.float32, size=32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num, size, 12, generator=generator, dtype=dtype)
    y = (x[..., :3] + 0.3 * x[..., 3:6]).argmax(-1)
    return list(zip(x, y, strict=True))


def run(model, optimizer, batches):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# Equal to the paper's algorithm


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01),
}


def plain_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def accumulating_step(model, optimizer, x, y):
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(a), b) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


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
    """Check 6. The parameters hold w + S, not w + m, from step floor(phi tau) on, and alpha' is mean|m| then."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = begin(FedBAT(phi=phi), model, optimizer, tau)
    batch = some_batches(1)
    for step in range(tau):
        if step > 0:  # at step 0 m is still 0
            assert _holds_one_magnitude(model, local) == (step >= first), step
        if step == first and first > 0:
            expected = torch.stack([m.abs().mean() for m in local._update().values()])
            assert torch.equal(local._local.fixed["alpha_prime"], expected)
        run(model, optimizer, batch)
    local.finish()


def _holds_one_magnitude(model, local):
    """Whether every compressed layer differs from where it started by one +-alpha everywhere, up to rounding."""
    moved = [(dict(model.named_parameters())[k].detach() - w).abs() for k, w in local._w.items()]
    return all(x.min() > 0 and x.max() - x.min() < 1e-6 for x in moved)


# Corners (METHODS 7.2)


def _finish(method, num_steps, steps, model=None, **options):
    model = model or mlp()
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    local = begin(method, model, optimizer, num_steps, **options)
    losses = run(model, optimizer, some_batches(steps)) if steps else []
    return local.finish(), model, start, losses


def test_phi_one_binarizes_at_the_end_with_mean_abs():
    upload, *_ = _finish(FedBAT(phi=1, bounds=None), 8, 8)
    twin, *_ = _finish(make_method("fedavg"), 8, 8)
    for name, part in upload.payload.parts.items():
        m = twin.payload.parts[name].unpack()
        assert part.step == pytest.approx(m.abs().mean().item(), rel=1e-6)


def test_loop_shorter_than_announced_ends_inside_the_warm_up():
    short, *_ = _finish(FedBAT(phi=0.5, bounds=None), 100, 8)
    full, *_ = _finish(FedBAT(phi=1, bounds=None), 8, 8)
    assert [p.step for p in short.payload.parts.values()] == [p.step for p in full.payload.parts.values()]


def test_loop_longer_than_announced_goes_on_binarized():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0.5), model, optimizer, 4)
    run(model, optimizer, some_batches(12))
    assert _holds_one_magnitude(model, local) and local.finish().num_steps == 12


def test_no_step_at_all_sends_zero():
    upload, model, start, _ = _finish(FedBAT(), 10, 0)
    assert all(part.step == 0 for part in upload.payload.parts.values())
    for name, tensor in start.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.parametrize("step", ["learned", "fixed", "inf-norm"])
def test_tau_one_and_phi_zero_start_from_an_update_of_zero(step):
    upload, *_ = _finish(FedBAT(phi=0, step=step, bounds=None), 1, 1)
    plain, *_ = _finish(make_method("fedavg"), 1, 1)
    for name, part in upload.payload.parts.items():
        m = plain.payload.parts[name].unpack()  # S was 0 in the only forward pass: the step is FedAvg's
        expected = m.abs().max() if step == "inf-norm" else m.abs().mean()
        assert part.step == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_layer_that_never_moves_is_left_alone(name):
    """Unused in the forward pass, hence without gradient; the authors' lower bound would send random +-5e-4."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = mlp(), nn.Linear(7, 5)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    upload, model, start, _ = _finish(make_method(name), 6, 6, model=Unused())
    w = start.unused.weight
    expected = w.sign() * w.abs().mean() if name == "bifl" else w  # binary weights are what BiFL sends
    torch.testing.assert_close(model.unused.weight, expected, rtol=1e-6, atol=0)
    if not make_method(name).sends_weights:
        assert not upload.payload.parts["unused.weight"].unpack().any()


def test_a_layer_that_starts_to_move_late_gets_its_step_size_then():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.late, self.on = mlp(), nn.Linear(12, 3), False

        def forward(self, x):
            return self.used(x) + self.late(x) if self.on else self.used(x)

    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0.2), model, optimizer, 10)
    names = [entry.name for entry in local.layout.compressed]
    late = names.index("late.weight")
    run(model, optimizer, some_batches(5))
    assert local._local.fixed["alpha_prime"][late] == 0
    model.on = True
    run(model, optimizer, some_batches(1))
    set_then = local._local.fixed["alpha_prime"].clone()
    assert (set_then > 0).all()
    run(model, optimizer, some_batches(4))
    assert torch.equal(local._local.fixed["alpha_prime"], set_then)


def test_last_bits_without_a_binarized_pass_are_fresh_and_after_a_pass_at_zero_are_nothing():
    ended_in_warm_up, *_ = _finish(FedBAT(phi=1, sent="last"), 5, 5)
    assert all(part.step > 0 for part in ended_in_warm_up.payload.parts.values())
    one_step, *_ = _finish(FedBAT(phi=0, sent="last"), 1, 1)
    assert all(part.step == 0 for part in one_step.payload.parts.values())


def test_fixed_step_is_rho_zero_bit_for_bit():
    fixed, *_ = _finish(FedBAT(step="fixed"), 8, 8, noise=UniformNoise(1, "x"))
    rho0, *_ = _finish(FedBAT(rho=0), 8, 8, noise=UniformNoise(1, "x"))
    assert fixed.to_bytes() == rho0.to_bytes()


def test_last_bits_are_those_of_the_last_forward_pass():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0.5, sent="last"), model, optimizer, 6)
    start = {k: v.clone() for k, v in local._w.items()}
    batches = some_batches(6)
    run(model, optimizer, batches[:5])
    seen = {k: dict(model.named_parameters())[k].detach().clone() for k in start}  # what the sixth forward will use
    run(model, optimizer, batches[5:])
    upload = local.finish()
    for name, part in upload.payload.parts.items():
        sent = part.unpack().view(seen[name].shape)
        assert torch.equal(start[name] + sent, seen[name])


def test_frozen_layer_is_not_sent():
    model = mlp()
    model[0].weight.requires_grad_(False)
    upload, after, start, _ = _finish(FedBAT(), 8, 8, model=model)
    assert "0.weight" not in upload.payload.parts and torch.equal(after[0].weight, start[0].weight)


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
    local = begin(method, model, optimizer, 4)
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
    with pytest.raises(RuntimeError, match="stop here"), begin(make_method(name), model, optimizer, 10) as local:
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


# Anyone's loop


class Transformer(nn.Module):
    """Small, with tied embedding and output weights, LayerNorm, attention and dropout."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.out = nn.Linear(16, 11, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.block(self.embed(tokens))).mean(1)


def only_matrices(model):
    """Freeze biases and norms: if the loss falls, it is the compressed weights that learn."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter.dim() > 1)
    return model


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def _check_loss_falls_and_bytes_match(model, optimizer, batch, step):
    """20 binarized steps: the loss falls, and the upload has exactly the bytes it claims."""
    method = FedBAT(phi=0)
    layout = layout_of(model)
    local = begin(method, model, optimizer, 20, noise=UniformNoise(7, "test"))
    losses = [step(model, optimizer, *batch) for _ in range(20)]
    raw = local.finish().to_bytes()
    assert sum(losses[-5:]) < sum(losses[:5])
    expected = 40 + sum(8 + math.ceil(e.numel / 8) for e in layout.compressed) + sum(e.nbytes for e in layout.rest)
    assert len(raw) == expected
    for name, p in model.named_parameters():
        assert p.grad is None or torch.isfinite(p).all(), name


def autocast_step(model, optimizer, x, y):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def test_a_model_of_double_precision_trains_with_the_noise_of_the_library():
    model = only_matrices(mlp(torch.float64))
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    _check_loss_falls_and_bytes_match(model, optimizer, some_batches(1, torch.float64)[0], plain_step)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", [plain_step, accumulating_step, autocast_step])
def test_optimizers_and_loops(optimizer, step):
    model = only_matrices(mlp())
    _check_loss_falls_and_bytes_match(model, OPTIMIZERS[optimizer](trained(model)), some_batches(1)[0], step)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("step", [plain_step, autocast_step])
def test_small_transformer(tied, step):
    torch.manual_seed(0)
    model = only_matrices(Transformer(tied))
    assert ("out.weight" in [e.name for e in layout_of(model)]) != tied
    tokens = torch.randint(0, 11, (64, 6))
    optimizer = torch.optim.Adam(trained(model), lr=3e-3)
    _check_loss_falls_and_bytes_match(model, optimizer, (tokens, tokens[:, 0]), step)


def test_frozen_and_unused_parameters():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.unused = mlp(), nn.Linear(3, 3)
            self.body[0].weight.requires_grad_(False)
            only_matrices(self)

        def forward(self, x):
            return self.body(x)

    torch.manual_seed(0)
    model = Partly()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    _check_loss_falls_and_bytes_match(model, optimizer, some_batches(1)[0], plain_step)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_trains_a_transformer_with_adam(name):
    torch.manual_seed(0)
    model = only_matrices(Transformer())
    optimizer = torch.optim.Adam(trained(model), lr=3e-3)
    local = begin(make_method(name), model, optimizer, 20, noise=UniformNoise(7, "test"))
    tokens = torch.randint(0, 11, (64, 6))
    losses = [plain_step(model, optimizer, tokens, tokens[:, 0]) for _ in range(20)]
    assert sum(losses[-5:]) < sum(losses[:5])
    Payload.from_bytes(local.finish().to_bytes(), local.layout)


def test_half_precision_weights_are_trained_and_sent():
    model = only_matrices(mlp(torch.bfloat16))
    upload, after, losses = _finish_half(model)
    assert sum(losses[-5:]) < sum(losses[:5])
    for entry in upload.payload.layout:
        assert tensors_of(after, upload.payload.layout)[entry.name].dtype == entry.dtype


def _finish_half(model):
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    local = begin(FedBAT(phi=0.5), model, optimizer, 20)
    batches = [(x.bfloat16(), y) for x, y in some_batches(1)] * 20
    losses = run(model, optimizer, batches)
    return local.finish(), model, losses


def test_schedules_reach_the_step_size():
    """alpha_e lives in its layer's own parameter group, so a scheduler made before `begin` moves it too."""
    model = mlp()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[3].parameters()]}],
        lr=0.2,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    local = begin(FedBAT(phi=0, bounds=None), model, optimizer, 10)
    batches = some_batches(4)
    run(model, optimizer, batches[:2])
    frozen = torch.stack(list(local._local.learned.values())).clone()
    assert frozen.any()
    scheduler.step()  # the learning rate is 0 from here on
    run(model, optimizer, batches[2:])
    assert torch.equal(torch.stack(list(local._local.learned.values())), frozen)
    local.finish()


def test_weight_decay_acts_on_the_weights():
    """A layer without loss gradient shrinks by (1 - lr * decay) a step, binarized or not."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    local = begin(FedBAT(phi=0, bounds=None), model, optimizer, 5)
    start = local._w["3.weight"].clone()
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    torch.testing.assert_close(local._live["3.weight"], start * 0.95**3)
    local.finish()


def test_skipped_steps_of_a_gradient_scaler_are_harmless():
    model = only_matrices(mlp())
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    local = begin(FedBAT(phi=0), model, optimizer, 6)
    losses = []
    for step, (x, y) in enumerate(some_batches(1) * 12):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if step == 3:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert local.step.index == 11 and sum(losses[-3:]) < sum(losses[:3])
    local.finish()


def test_roles_choose_per_tensor():
    model = mlp()
    layout = layout_of(model, {"0.weight": "dense", "3.*": "skip", "1.weight": "compress"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0), model, optimizer, 4, layout=layout)
    run(model, optimizer, some_batches(4))
    payload = local.finish().payload
    assert set(payload.parts) == {"1.weight"} and payload.parts["1.weight"].nbits == 16 + 32
    assert "0.weight" in payload.rest and not any(name.startswith("3.") for name in payload.rest)


def test_a_model_with_nothing_to_compress_still_travels():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(12))

        def forward(self, x):
            return (x * self.gain)[:, :3]

    for name in METHODS:
        upload, _, _, losses = _finish(make_method(name), 6, 6, model=Scale())
        assert not upload.payload.parts and losses[-1] != losses[0] and upload.payload.rest["gain"].any()


def test_parameters_may_be_called_alpha_and_slope():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha, self.slope = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 3))

        def forward(self, x):
            return x @ self.alpha @ self.slope

    upload, *_ = _finish(FedBAT(phi=0.5), 6, 6, model=Named())
    assert all(part.step > 0 for part in upload.payload.parts.values())


def test_a_method_may_leave_the_altered_forward_again():
    """Every other step sees half the update; m moves as if each step's gradient were taken where the model was."""

    class EveryOther(Method):
        def alters_forward(self, step):
            return step.index % 2 == 0

        def forward(self, w, local, u):
            return Forward({k: w[k] + 0.5 * m for k, m in local.update.items()})

    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = v = model.weight.item()
    local = begin(EveryOther(), model, optimizer, 4)
    for step in range(4):
        altered = step % 2 == 0
        seen = w + 0.5 * (v - w) if altered else v
        assert model.weight.item() == pytest.approx(seen, abs=1e-12)
        optimizer.zero_grad()
        (model(torch.ones(1, 1, dtype=torch.float64)) ** 2).sum().backward()
        optimizer.step()
        v -= 0.1 * 2 * seen * (0.5 if altered else 1)
    assert local._update()["weight"].item() == pytest.approx(v - w, abs=1e-12)
    local.finish()


def test_a_layer_unused_in_a_step_does_not_move_its_step_size():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(FedBAT(phi=0, bounds=None), model, optimizer, 10)
    run(model, optimizer, some_batches(3))
    before = {k: v.detach().clone() for k, v in local._local.learned.items()}
    model.zero_grad()  # not the optimizer's, which would clear the step sizes' gradients as well
    x, y = some_batches(1)[0]
    F.cross_entropy(model[3](model[0](x).detach()), y).backward()
    optimizer.step()
    assert (
        local._local.learned["0.weight"] == before["0.weight"]
        and local._local.learned["3.weight"] != before["3.weight"]
    )
    local.finish()


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
    with begin(FedBAT(), model, optimizer, 3), pytest.raises(MethodError, match="in a round already"):
        begin(FedBAT(), model, optimizer, 3)
    begin(FedBAT(), model, optimizer, 3).finish()


def test_num_steps_must_be_positive():
    model = mlp()
    with pytest.raises(ConfigError, match="num_steps=0"):
        begin(FedBAT(), model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
