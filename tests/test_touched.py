"""What users do to a model in the middle of a round: kept, or refused with a reason, never lost."""

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat import METHODS, MethodError, Payload, Server, begin, layout_of, make_method
from fedbat.channels import levels_of
from fedbat.downlink import DOWNLINKS
from fedbat.gaussian import gaussian_levels
from fedbat.layout import tensors_of
from fedbat.methods.bifl import BiFL
from fedbat.methods.fedbat import FedBAT
from fedbat.methods.zerofl import ZeroFL
from fedbat.streams import UniformNoise
from tests.local_training import finish, mlp, plain_step, run, some_batches

ALTERING = [FedBAT(phi=0), ZeroFL(train_sparsity=0.5, sparse_first_layer=True), BiFL()]


def in_training(method, steps=3, model=None):
    """A model after some steps, its optimizer, and what goes on."""
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(method, model, optimizer, 8, noise=UniformNoise(0, "noise"))
    run(model, optimizer, some_batches(steps))
    return model, optimizer, local


@torch.no_grad()
def clamp(model):
    model[0].weight.clamp_(-1e-3, 1e-3)


def replace(model):
    model[0].weight.data = model[0].weight.data.clamp(-1e-3, 1e-3)


def load(model):
    model.load_state_dict(mlp().state_dict())


@pytest.mark.parametrize("touch", [clamp, replace, load])
@pytest.mark.parametrize("method", ALTERING, ids=lambda method: type(method).__name__)
def test_what_is_written_while_the_model_computes_with_other_weights_is_refused(method, touch):
    message = rf"0\.weight was written to between two steps, while {type(method).__name__}"
    model, optimizer, _ = in_training(method)
    touch(model)
    with pytest.raises(MethodError, match=message):
        plain_step(model, optimizer, *some_batches(1)[0])
    model, _, local = in_training(method)
    touch(model)
    with pytest.raises(MethodError, match=message):
        local.finish()


@pytest.mark.parametrize("touch", [clamp, replace])
@pytest.mark.parametrize("method", [make_method("fedavg"), FedBAT(phi=1)], ids=lambda method: type(method).__name__)
def test_while_it_computes_with_the_weights_themselves_what_is_written_counts(method, touch):
    start = mlp()[0].weight.detach()
    model, _, local = in_training(method)
    touch(model)
    clamped = model[0].weight.detach() - start
    part = local.finish().payload.parts["0.weight"]
    if method == make_method("fedavg"):
        assert torch.equal(part.unpack(), clamped.reshape(-1))
    else:
        assert part.step == pytest.approx(clamped.abs().mean().clamp(*method.bounds).item())


def around(model, optimizer, x, y):
    """A step by the gradient of a place nearby, as sharpness-aware optimizers take it."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    moves = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
        optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)
    optimizer.step()


@pytest.mark.parametrize("method", ALTERING, ids=lambda method: type(method).__name__)
def test_what_is_taken_back_before_the_step_does_no_harm(method):
    model, optimizer, local = in_training(method)
    for x, y in some_batches(4):
        around(model, optimizer, x, y)
    assert local.finish().num_steps == 7


def around_as_published(model, optimizer, x, y):
    """The same as it is often written: old weights are kept, and put back as new memory."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    old = [p.data.clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * p.grad)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p, data in zip(model.parameters(), old, strict=True):
        p.data = data
    optimizer.step()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_weights_put_back_as_new_memory_are_trained_on(name):
    updates = []
    for step in (around, around_as_published):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = begin(make_method(name), model, optimizer, 5, memory={}, noise=UniformNoise(0, "noise"))
        for x, y in some_batches(5):
            step(model, optimizer, x, y)
        updates.append(local._update()["0.weight"])
        local.finish()
    assert updates[0].norm() > 0 and (updates[0] - updates[1]).norm() < 0.05 * updates[0].norm()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_model_that_was_moved_before_finish_sends_what_it_has_learned(name):
    """As clients do that return their weights in another type."""
    plain, *_ = finish(make_method(name), 4, 4, noise=UniformNoise(0, "noise"))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = begin(make_method(name), model, optimizer, 4, memory={}, noise=UniformNoise(0, "noise"))
    run(model, optimizer, some_batches(4))
    model.double()
    assert local.finish().to_bytes() == plain.to_bytes()


def test_a_second_optimizer_of_the_same_model_is_refused_once_the_forward_pass_is_altered():
    model = mlp()
    first, second = (torch.optim.SGD(model[place].parameters(), lr=0.1) for place in (0, 3))
    message = r"3\.weight was written to .* let one optimizer hold"
    with begin(FedBAT(phi=0), model, first, 4), pytest.raises(MethodError, match=message):
        for x, y in some_batches(2):
            F.cross_entropy(model(x), y).backward()
            first.step()
            F.cross_entropy(model(x), y).backward()
            second.step()


def decay(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - 0.1 * 5e-4)


@pytest.mark.parametrize("method", ALTERING, ids=lambda method: type(method).__name__)
def test_nothing_is_too_little_to_be_refused(method):
    model, optimizer, _ = in_training(method)
    decay(model)
    with pytest.raises(MethodError, match="was written to between two steps"):
        plain_step(model, optimizer, *some_batches(1)[0])


def test_least_of_all_what_another_optimizer_trains():
    """Its steps may be as small as rounding."""
    model = mlp()
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[3].parameters(), lr=1e-6)
    with begin(FedBAT(phi=0), model, first, 4) as local:
        run(model, first, some_batches(2))
        second.step()
        with pytest.raises(MethodError, match=r"3\.weight was written to .* let one optimizer hold"):
            local.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_even_weights_of_zero_may_be_tried_out_elsewhere(dtype):
    """As new output layers and adapters have; what is added and subtracted again rounds by its own size."""
    model = mlp().to(dtype)
    nn.init.zeros_(model[3].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with begin(FedBAT(phi=0), model, optimizer, 4) as local, torch.no_grad():
        for _ in range(4):
            moves = [0.05 * torch.randn_like(p) for p in model.parameters()]
            for sign in (1, -1):
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.grad = move
                    p.add_(sign * move)
            optimizer.step()
        local.finish()


@pytest.mark.parametrize("method", [FedBAT(), FedBAT(phi=1)], ids=["half", "all"])
def test_a_round_trained_by_another_optimizer_than_the_one_given_is_told(method):
    model = mlp()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with begin(method, model, first, 4) as local:
        run(model, second, some_batches(4))
        with pytest.raises(MethodError, match=r"step\(\) of the optimizer given to begin was never called"):
            local.finish()


def test_hooks_on_layers_and_compiled_code_do_not_go_together():
    inside = mlp()
    inside[0].compile(backend="eager")
    for model in (torch.compile(mlp(), backend="eager"), inside):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(MethodError, match=r"the model is compiled, but ZeroFL .* train the plain model"):
            begin(ZeroFL(sparse_first_layer=True), model, optimizer, 4)
        for method in (FedBAT(), ZeroFL(train_sparsity=0)):
            with begin(method, model, optimizer, 4):
                pass


class Counting(nn.Module):
    """With a buffer that each forward pass replaces, and a mask of infinities."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("level", torch.zeros(3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), float("inf")]))

    def forward(self, x):
        y = self.inner(x)
        self.level = 0.5 * self.level + y.detach().mean(0)
        return y


@pytest.mark.parametrize("name", sorted(METHODS))
def test_replaced_buffers_are_sent_and_infinite_ones_stay(name):
    start = Counting()
    upload, model, *_ = finish(make_method(name), 4, 4, copy.deepcopy(start))
    assert model.level.abs().max() > 0 and torch.equal(upload.payload.rest["level"], model.level)
    server = Server(make_method(name), start)
    server.add(upload.to_bytes(), 7)
    server.step()
    torch.testing.assert_close(start.level, model.level)
    assert torch.equal(start.mask, model.mask) and start.mask.tolist() == [0.0, float("-inf"), float("inf")]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_step_without_any_gradient_of_a_compressed_layer_is_a_step(name):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin(make_method(name), model, optimizer, 4, memory={}) as local:
        for x, _ in some_batches(3):
            optimizer.zero_grad()
            model[1](x.repeat(1, 2)[:, :16]).square().sum().backward()  # BatchNorm alone
            optimizer.step()
        assert local.finish().num_steps == 3


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_type(request):
    """A context in which it is torch's; levels of the other one are kept neither before nor after."""

    @contextmanager
    def changed():
        torch.set_default_dtype(request.param)
        for each in (gaussian_levels, levels_of):
            each.cache_clear()
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
            for each in (gaussian_levels, levels_of):
                each.cache_clear()

    return changed


@pytest.mark.parametrize("name", sorted(METHODS))
def test_torchs_default_type_does_not_matter(name, default_type):
    method = make_method(name, {"phi": "0"} if name == "fedbat" else {})
    plain, *_ = finish(method, 4, 4, noise=UniformNoise(0, "noise"))
    model, batches = mlp(), some_batches(4)
    with default_type():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = begin(method, model, optimizer, 4, memory={}, noise=UniformNoise(0, "noise"))
        run(model, optimizer, batches)
        raw = local.finish().to_bytes()
        values = Payload.from_bytes(raw, layout_of(model)).values()
    assert raw == plain.to_bytes()
    for layer, value in plain.payload.values().items():
        assert torch.equal(values[layer], value), layer


@pytest.mark.parametrize("down", sorted(DOWNLINKS))
def test_nor_does_it_for_what_clients_receive(down, default_type):
    layout, w = layout_of(mlp()), tensors_of(mlp(), layout_of(mlp()))
    plain = DOWNLINKS[down].publish(layout, w, None, 0).w
    with default_type():
        found = DOWNLINKS[down].publish(layout, w, None, 0).w
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


def test_the_weights_to_test_with_reach_tied_layers():
    """As docs/own-models.md has it."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False))
    model[2].weight = model[0].weight
    layout, method = layout_of(model), BiFL()
    tested = copy.deepcopy(model)
    state = tested.state_dict()
    weights = method.evaluate({entry.name: state[entry.name] for entry in layout.compressed})
    tested.load_state_dict(weights, strict=False)
    assert tested[2].weight is tested[0].weight and len(tested[2].weight.abs().unique()) == 1
