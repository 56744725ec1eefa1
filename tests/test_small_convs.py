"""Convolutions with fewer products: PyTorch's own results, as exact as they are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedbat.engine.small_convs import convolve, multiply_less


def results(function, x, weight, grad):
    y = function(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), grad)


def usual(x, weight):
    return F.conv2d(x, weight, padding=1)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("batch", "channels", "out"), [(64, 128, 256), (5, 32, 48), (1, 1, 1)])
def test_values_and_gradients_are_as_exact_as_the_usual_ones(memory_format, batch, channels, out):
    torch.manual_seed(0)
    sizes = (batch, channels), (out, channels), (batch, out)
    tensors = [torch.randn(*size, 3, 3).to(memory_format=memory_format) for size in sizes]
    x, weight, grad = (t.requires_grad_() for t in tensors)
    exact = results(usual, x.double(), weight.double(), grad.double())
    for found, plain, true in zip(
        results(convolve, x, weight, grad), results(usual, x, weight, grad), exact, strict=True
    ):
        errors = [float((t - true).norm() / true.norm()) for t in (found, plain)]
        assert found.shape == plain.shape and errors[0] <= max(2 * errors[1], 5 * torch.finfo().eps)
    assert convolve(x, weight).is_contiguous(memory_format=torch.channels_last)


def test_a_model_in_training_multiplies_less_and_is_tested_as_ever():
    torch.manual_seed(0)
    native = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))
    fewer = copy.deepcopy(native)
    multiply_less(fewer)
    x = torch.randn(8, 32, 6, 6)
    found, plain = fewer(x), native(x)
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)
    assert not torch.equal(fewer[1](x[:, :, :3, :3]), native[1](x[:, :, :3, :3]))
    for other in (x[..., :4], x[..., :4, :], F.pad(x, (0, 8, 0, 8))):  # images of other sizes
        assert torch.equal(fewer[1](other), native[1](other))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fewer[1](x[..., :3, :3]), native[1](x[..., :3, :3]))
    assert torch.equal(fewer[1].double()(x[..., :3, :3].double()), native[1].double()(x[..., :3, :3].double()))
    fewer, native = fewer.float().eval(), native.float().eval()
    assert torch.equal(fewer[1](x[..., :3, :3]), native[1](x[..., :3, :3]))


def test_a_hook_sees_what_pytorch_saves():
    """ZeroFL makes the input sparse that a convolution saves for its gradient."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(32, 32, 3, padding=1, bias=False), torch.randn(4, 32, 3, 3)
    expected = conv(x)
    multiply_less(conv)
    assert not torch.equal(conv(x), expected)
    handle = conv.register_forward_pre_hook(lambda *_: None)
    assert torch.equal(conv(x), expected)
    handle.remove()
    assert not torch.equal(conv(x), expected)


def test_other_layers_stay():
    class Own(nn.Conv2d):
        pass

    plain = {"kernel_size": 3, "padding": 1, "bias": False}
    others = [{"bias": True}, {"stride": 2}, {"padding": 0}, {"padding": "same"}, {"groups": 2}, {"dilation": 2},
              {"kernel_size": 1}, {"padding_mode": "circular"}]  # fmt: skip
    model = nn.Sequential(
        *(nn.Conv2d(32, 32, **plain | other) for other in others),
        Own(32, 32, **plain), nn.Conv2d(16, 32, **plain), nn.Conv1d(32, 32, 3, padding=1, bias=False),
    )  # fmt: skip
    multiply_less(model)
    assert not any("forward" in vars(module) for module in model.modules())
