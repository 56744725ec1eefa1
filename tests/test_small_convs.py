"""Convolutions with fewer products: PyTorch's own results, as exact as they are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat import Payload
from fedbat.engine.sequential import SequentialEngine
from fedbat.engine.small_convs import convolve, matrices, multiply_less
from fedbat.experiment import Experiment, prepare
from fedbat.simulation import initial_state

EPS = torch.finfo(torch.float32).eps
PLAIN = {"kernel_size": 3, "padding": 1, "bias": False}


def usual(x, weight):
    return F.conv2d(x, weight, padding=1)


def results(function, x, weight, grad):
    y = function(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 7, 14])
def test_a_few_products_make_up_the_convolution(side):
    """y_j has w_k x_(j + k - 1), once, and nothing else."""
    images, filters, outputs = (matrix.double() for matrix in matrices(side))
    found = torch.einsum("jr,rk,ri->jki", outputs, filters, images)
    padded = torch.eye(side + 2, dtype=torch.float64)[:, 1:-1]
    assert len(images) == side + side // 2
    torch.testing.assert_close(found, torch.stack([padded[j : j + 3] for j in range(side)]), rtol=0, atol=EPS)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(64, 128, 256, 3), (64, 64, 128, 7), (3, 20, 10, 4), (2, 1, 1, 1)])
def test_values_and_gradients_are_as_exact_as_the_usual_ones(memory_format, shape):
    torch.manual_seed(0)
    batch, channels, out, side = shape
    sizes = (batch, channels, side, side), (out, channels, 3, 3), (batch, out, side, side)
    x, weight, grad = (torch.randn(size).to(memory_format=memory_format).requires_grad_() for size in sizes)
    ours, theirs = (results(function, x, weight, grad) for function in (convolve, usual))
    exact = results(usual, x.double(), weight.double(), grad.double())
    for found, plain, true in zip(ours, theirs, exact, strict=True):
        error, usual_error = (float((t - true).norm() / true.norm()) for t in (found, plain))
        assert found.shape == plain.shape and error <= max(usual_error, 5 * EPS)
    assert convolve(x, weight).is_contiguous(memory_format=torch.channels_last)


def test_gradients_have_gradients():
    """As a model with a penalty on them needs."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 3, 3, requires_grad=True), torch.randn(4, 3, 3, 3, requires_grad=True)
    found, expected = (
        torch.autograd.grad(
            torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)[0].square().sum(), weight
        )
        for function in (convolve, usual)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


def pair(batch=64, side=3):
    """A layer as it is, one that may multiply less, and images."""
    torch.manual_seed(0)
    native = nn.Conv2d(64, 64, **PLAIN)
    fewer = copy.deepcopy(native)
    multiply_less(fewer)
    return native, fewer, torch.randn(batch, 64, side, side)


@pytest.mark.parametrize(("batch", "side"), [(64, 3), (64, 4), (64, 7), (8, 3)])
def test_layers_multiply_less_in_training_and_are_tested_as_ever(batch, side):
    native, fewer, x = pair(batch, side)
    assert not torch.equal(fewer(x), native(x))
    torch.testing.assert_close(fewer(x), native(x), rtol=0, atol=1e-5)
    assert torch.equal(fewer.eval()(x), native(x))


@pytest.mark.parametrize(("batch", "side"), [(64, 8), (49, 7), (7, 3)])
def test_few_or_large_images_are_convolved_as_ever(batch, side):
    native, fewer, x = pair(batch, side)
    assert torch.equal(fewer(x), native(x))


def test_so_are_other_shapes_and_types():
    native, fewer, x = pair(side=4)
    for other in (x[..., :3], x[..., :3, :], x[0]):
        assert torch.equal(fewer(other), native(other))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fewer(x), native(x))
    assert torch.equal(fewer.double()(x.double()), native.double()(x.double()))


def test_the_input_may_be_named():
    _, fewer, x = pair()
    assert torch.equal(fewer(input=x), fewer(x))


def test_a_hook_sees_what_pytorch_saves():
    """ZeroFL makes the input sparse that a convolution saves for its gradient."""
    native, fewer, x = pair()
    handle = fewer.register_forward_pre_hook(lambda *_: None)
    assert torch.equal(fewer(x), native(x))
    handle.remove()
    assert not torch.equal(fewer(x), native(x))


def test_other_layers_stay():
    class Own(nn.Conv2d):
        pass

    others = [{"bias": True}, {"stride": 2}, {"padding": 0}, {"padding": "same"}, {"groups": 2}, {"dilation": 2},
              {"kernel_size": 1}, {"padding_mode": "circular"}]  # fmt: skip
    model = nn.Sequential(*(nn.Conv2d(64, 64, **PLAIN | other) for other in others))
    model.extend([Own(64, 64, **PLAIN), nn.Conv2d(32, 64, **PLAIN), nn.Conv1d(64, 64, **PLAIN)])
    multiply_less(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_client_trains_the_papers_cnn_as_a_plain_loop_does():
    """For one step; in more of them rounding decides ties between pixels, whoever computes."""
    federation = prepare(Experiment(method="fedavg", clients=100, per_round=1, epochs=1))
    engine = SequentialEngine(federation)
    (result,) = engine.train(initial_state(federation).w, 0, [3], {})
    model = copy.deepcopy(federation.model).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=federation.experiment.lr)
    ((x, y),) = engine._batches(0, 3)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    sent, before = Payload.from_bytes(result.upload, federation.layout).values(), federation.model.state_dict()
    updates = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    assert not torch.equal(sent["12.weight"], updates["12.weight"])
    for name, update in updates.items():
        assert (sent[name] - update).norm() <= 1e-4 * update.norm(), name
