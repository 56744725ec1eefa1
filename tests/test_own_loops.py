"""Local training around anyone's loop: any model, optimizer and loop."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat import METHODS, Payload, begin, layout_of, make_method
from fedbat.layout import tensors_of
from fedbat.method import Forward, Method
from fedbat.methods.fedbat import FedBAT
from fedbat.streams import UniformNoise
from tests.local_training import (
    OPTIMIZERS,
    accumulating_step,
    finish,
    mlp,
    plain_step,
    run,
    some_batches,
)


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
    local = begin(make_method(name), model, optimizer, 20, memory={}, noise=UniformNoise(7, "test"))
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
        upload, _, _, losses = finish(make_method(name), 6, 6, model=Scale())
        assert not upload.payload.parts and losses[-1] != losses[0] and upload.payload.rest["gain"].any()


def test_parameters_may_be_called_alpha_and_slope():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha, self.slope = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 3))

        def forward(self, x):
            return x @ self.alpha @ self.slope

    upload, *_ = finish(FedBAT(phi=0.5), 6, 6, model=Named())
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


@pytest.mark.parametrize("name", ["fedavg", "fedbat", "zerofl", "fedmrn", "bifl"])
def test_sparse_gradients_are_pulled_back_like_dense_ones(name):
    def trained(sparse):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 6, sparse=sparse), nn.Flatten(), nn.Linear(24, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with begin(make_method(name), model, optimizer, 6, noise=UniformNoise(0, "noise")) as local:
            for step in range(6):
                # No word twice: of several gradients of one row the sums would be rounded in another order.
                words = torch.randperm(20, generator=torch.Generator().manual_seed(step))[:16].view(4, 4)
                optimizer.zero_grad()
                F.cross_entropy(model(words), words[:, 0] % 3).backward()
                optimizer.step()
            return local.finish().to_bytes()

    assert trained(sparse=True) == trained(sparse=False)


def test_momentum_of_sparse_gradients_lives_on_after_the_warm_up():
    model = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with begin(FedBAT(phi=0.5), model, optimizer, 6) as local:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.arange(16).view(4, 4)).square().sum().backward()
            optimizer.step()
        assert local.finish().num_steps == 6


@pytest.mark.parametrize("name", sorted(METHODS))
def test_layers_of_several_types_train_side_by_side(name):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            types = torch.float64, torch.float32, torch.bfloat16
            self.layers = nn.ModuleList(nn.Linear(12, 12, dtype=dtype) for dtype in types)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype))
            return x.float()

    upload, model, *_ = finish(make_method(name), 6, 6, model=Mixed())
    assert len(upload.payload.parts) == 3
    assert [layer.weight.dtype for layer in model.layers] == [torch.float64, torch.float32, torch.bfloat16]
