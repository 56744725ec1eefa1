"""The GPU's fused layers, run by Triton's interpreter, against PyTorch's own."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton comes with PyTorch for NVIDIA GPUs; `pip install triton` to run these")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from triton.runtime import interpreter

from fedbat.engine import convs, norms, stems
from fedbat.engine.launch import compile_ahead, launch
from fedbat.models.norm import BatchNormReLU

# One part and many, whole tiles and not, few channels and more than a tile has.
SHAPES = [(4, 8, 5, 5), (3, 70, 4, 4), (16, 64, 8, 8), (2, 3, 1, 1), (9, 3, 17, 17)]


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


def steps(norm, inputs, grad, times=2):
    """Output, gradients and state after a few steps."""
    for _ in range(times):
        inputs = [x.detach().requires_grad_() for x in inputs]
        y = norm(*inputs)
        found = torch.autograd.grad(y, [*inputs, norm.weight, norm.bias], grad)
    return [y.detach(), *found, *norm.buffers()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind, shortcut", [(nn.BatchNorm2d, False), (BatchNormReLU, False), (BatchNormReLU, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_are_the_native_ones(shape, kind, shortcut, dtype, monkeypatch):
    monkeypatch.setattr(norms, "_PARTS", 4)
    generator = torch.Generator().manual_seed(0)
    draw = [channels_last(3 + 2 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(3)]
    inputs, grad = draw[: 1 + shortcut], draw[2]
    native = kind(shape[1])
    with torch.no_grad():
        native.weight.uniform_(0.5, 2, generator=generator)
        native.bias.normal_(generator=generator)
    fused = copy.deepcopy(native)
    norms.fuse_norms(fused)
    exact = steps(native.double(), [x.double() for x in inputs], grad.double())
    # A value of 8 is at most 2^-8 of itself away from a bfloat16, 2^-24 from a float32; a channel sums up to 1,024.
    close = 2e-2 if dtype == torch.bfloat16 else 2e-4
    for ours, theirs in zip(steps(fused, inputs, grad), exact, strict=True):
        assert (ours.double() - theirs.double()).abs().max() <= close * theirs.double().abs().max().clamp(min=1)


@pytest.mark.parametrize("shortcut", [False, True])
def test_tests_use_the_running_statistics(shortcut):
    generator = torch.Generator().manual_seed(0)
    norm = BatchNormReLU(5)
    norm.running_mean.normal_(generator=generator)
    norm.running_var.uniform_(0.5, 2, generator=generator)
    native = copy.deepcopy(norm).eval()
    norms.fuse_norms(norm.eval())
    inputs = [channels_last(torch.randn(3, 5, 4, 4, generator=generator)) for _ in range(1 + shortcut)]
    assert torch.allclose(norm(*inputs), native(*inputs), atol=1e-5)


def test_a_relu_that_follows_joins_in():
    shared = nn.ReLU()
    model = nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.ReLU()), nn.BatchNorm2d(4), shared, nn.Tanh(), shared
    )
    native = copy.deepcopy(model).double()
    norms.fuse_norms(model)
    x = channels_last(torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0)))
    model[0][1].forward = None  # nobody asks it
    assert torch.allclose(model(x), native(x.double()).float(), atol=1e-5)
    del model[0][1].forward
    assert torch.allclose(model[0][0](x), native[0][0](x.double()).float(), atol=1e-5)  # without its ReLU
    assert torch.allclose(model[0][:1](x), native[0][:1](x.double()).float(), atol=1e-5)
    plain = torch.randn(6, 4, 3, 3)  # not channels_last: computed natively, the ReLU all the same
    assert torch.allclose(model(plain), native(plain.double()).float(), atol=1e-5)


@pytest.mark.parametrize("channels, size, stride, padding", [(3, 3, 1, 1), (1, 3, 1, 1), (1, 5, 2, 0), (2, 4, 3, 2)])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_convolutions_of_images_are_the_native_ones(channels, size, stride, padding, memory_format):
    generator = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(channels, 8, size, stride, padding, bias=False).to(torch.bfloat16).to(memory_format=memory_format)
    native = copy.deepcopy(conv).double()
    stems.fuse_stems(conv)
    x = torch.randn(3, channels, 11, 9, generator=generator).to(torch.bfloat16).float()
    x = x.contiguous(memory_format=memory_format)
    y, exact = conv(x), native(x.double())
    assert y.is_contiguous(memory_format=torch.channels_last) and y.shape == exact.shape
    grad = channels_last(torch.randn(exact.shape, generator=generator).to(torch.bfloat16))
    found = torch.autograd.grad(y, conv.weight, grad)[0]
    expected = torch.autograd.grad(exact, native.weight, grad.double())[0]
    # Products of bfloat16 are exact in float32; what is left is the rounding of the result, 2^-9.
    assert torch.allclose(y.double(), exact, rtol=2**-8, atol=1e-5)
    assert torch.allclose(found.double(), expected, rtol=2**-8, atol=1e-4)


def test_other_convolutions_are_left_alone():
    convs = [
        nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=2, bias=False), nn.Conv2d(64, 4, 3, bias=False),
        nn.Conv2d(3, 4, (1, 3), bias=False), nn.Conv2d(3, 4, 3, padding="same", bias=False),
    ]  # fmt: skip
    for conv in convs:
        stems.fuse_stems(conv)
        assert "forward" not in vars(conv)
    conv = nn.Conv2d(3, 4, 3, bias=False)  # float32, or activations that want a gradient
    native = copy.deepcopy(conv)
    stems.fuse_stems(conv)
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(conv(x), native(x))
    x = x.to(torch.bfloat16).requires_grad_()
    assert torch.equal(conv.to(torch.bfloat16)(x), native.to(torch.bfloat16)(x))


def test_a_mean_far_from_zero_costs_no_precision():
    x = channels_last(1000 + torch.randn(32, 4, 8, 8, generator=torch.Generator().manual_seed(0)))
    fused, native = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    norms.fuse_norms(fused)
    # The inputs are rounded to 6e-5, their square to 0.06: sums of squares around zero would be off by percents.
    assert torch.allclose(fused(x), native.double()(x.double()).float(), atol=1e-3)


def test_what_does_not_fit_is_computed_natively():
    norm = BatchNormReLU(4)
    native = copy.deepcopy(norm)
    norms.fuse_norms(norm)
    x = torch.randn(2, 4, 3, 3)  # not channels_last
    assert torch.equal(norm(x), native(x))
    assert torch.equal(norm.eval()(x), native.eval()(x))
    assert norm.num_batches_tracked == 1
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm.train()(torch.randn(1, 4, 1, 1))


def test_other_norms_are_left_alone():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return x

    model = nn.Sequential(Own(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None))
    norms.fuse_norms(model)
    assert not any("forward" in vars(module) for module in model)


@pytest.fixture
def loops(monkeypatch):
    """NumPy 2.4 takes no array of one element for a number, but Triton 3.6's interpreter counts its loops by such."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


# (samples, in, out, side, filter, stride, padding): whole tiles and not, all that may fall outside, sums in many parts.
CONVOLUTIONS = [
    (4, 32, 64, 8, 3, 1, 1), (3, 64, 32, 8, 3, 2, 1), (3, 32, 64, 8, 1, 2, 0), (2, 32, 96, 7, 3, 1, 1),
    (2, 32, 32, 6, 5, 2, 2), (2, 32, 32, 6, 3, 1, 0), (2, 32, 32, 9, 3, 3, 1), (2, 32, 32, 8, 2, 2, 0),
    (9, 128, 32, 4, 3, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("samples, channels, out, side, size, stride, padding", CONVOLUTIONS)
def test_convolutions_by_tiles_are_the_native_ones(samples, channels, out, side, size, stride, padding, loops):
    generator = torch.Generator().manual_seed(0)
    shapes = (samples, channels, side, side), (out, channels, size, size)
    x, weight = (channels_last(torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes)
    exact = nn.functional.conv2d(x.double(), weight.double(), stride=stride, padding=padding)
    grad = channels_last(torch.randn(exact.shape, generator=generator))
    y = convs._Conv.apply(x, weight, stride, padding)  # the interpreter cannot multiply bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)
    found = [y, *torch.autograd.grad(y, (x, weight), grad)]
    expected = [exact, *torch.autograd.grad(exact, (x, weight), grad.double())]
    for ours, theirs in zip(found, expected, strict=True):
        # A sum of n products near 1 is some sqrt(n), and its rounding some sqrt(n) 2^-24.
        assert (ours.double() - theirs.double()).abs().max() <= 1e-6 * theirs.double().abs().max()


def test_convolutions_that_do_not_fit_are_computed_natively():
    for conv in (
        nn.Conv2d(32, 32, 3), nn.Conv2d(32, 48, 3, bias=False), nn.Conv2d(64, 64, 3, groups=2, bias=False),
        nn.Conv2d(32, 32, 3, dilation=2, bias=False), nn.Conv2d(32, 32, 3, padding="same", bias=False),
    ):  # fmt: skip
        convs.fuse_convs(conv)
        assert "forward" not in vars(conv)
    conv = nn.Conv2d(32, 32, 3, bias=False).to(torch.bfloat16).to(memory_format=torch.channels_last)
    native = copy.deepcopy(conv)
    convs.fuse_convs(conv)
    x = channels_last(torch.randn(2, 32, 6, 6).to(torch.bfloat16))
    assert "forward" in vars(conv) and torch.equal(conv(x), native(x))  # a CPU fetches no tiles


def test_compiling_ahead_launches_nothing():
    calls = []
    kernel = SimpleNamespace(run=lambda *args, grid, warmup: calls.append((args, grid, warmup)))
    with compile_ahead():
        launch(kernel, (3,))(1)
    launch(kernel, (3,))(2)
    assert calls == [((1,), (3,), True), ((2,), (3,), False)]
