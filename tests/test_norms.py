"""BatchNorm with ReLU and shortcut, in the GPU's fused kernels (run by Triton's interpreter), against PyTorch's own."""

import copy
import os

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton comes with PyTorch for NVIDIA GPUs; `pip install triton` to run these")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from fedbat.engine import norms
from fedbat.models.norm import BatchNormReLU

# One part and many, whole tiles and not, few channels and more than a tile has.
SHAPES = [(4, 8, 5, 5), (3, 70, 4, 4), (16, 64, 8, 8), (2, 3, 1, 1)]


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
    monkeypatch.setattr(norms, "_TILE", 512)
    monkeypatch.setattr(norms, "_PROGRAMS", 8)
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


def test_other_norms_are_left_alone():
    class Own(nn.BatchNorm2d):
        def forward(self, x):
            return x

    model = nn.Sequential(Own(4), nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4, momentum=None))
    norms.fuse_norms(model)
    assert not any("forward" in vars(module) for module in model)
