"""BatchNorm, with ReLU and shortcut where a module has them, as a few fused kernels.

Native BatchNorm, ReLU and their gradients pass over the activations thirteen times, these eight times. They round
differently, so the engine uses them only where its arithmetic is not the sequential engine's anyway.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fedbat.engine.launch import launch
from fedbat.engine.pairs import join_pairs
from fedbat.models.norm import BatchNormReLU

# Every tile has the same shape, and only a few numbers of tiles occur, as each is compiled anew.
_CHANNELS, _ROWS = 32, 128  # of a tile
_SHAPE = {"ROWS": _ROWS, "CHANNELS": _CHANNELS}
_PARTS = 128  # at most this many share the sums over an activation's rows; ten clients at a time fill the card


def fuse_norms(model: nn.Module) -> None:
    """Let BatchNorm2d and BatchNormReLU compute with fused kernels, including a ReLU that follows in a Sequential."""
    for module in model.modules():
        if _can_be_fused(module):
            module.forward = partial(_forward, cast(nn.BatchNorm2d, module), False)
    join_pairs(model, _norm_and_relu)


def _can_be_fused(module: nn.Module) -> bool:
    # Exactly these: a subclass may do something else. Without momentum, BatchNorm would average over all batches.
    if type(module) not in (nn.BatchNorm2d, BatchNormReLU):
        return False
    norm = cast(nn.BatchNorm2d, module)
    return norm.affine and norm.track_running_stats and norm.momentum is not None


def _norm_and_relu(norm: nn.Module, relu: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if type(norm) is not nn.BatchNorm2d or type(relu) is not nn.ReLU or not _can_be_fused(norm):
        return None
    return partial(_forward, norm, True)


def _forward(module: nn.BatchNorm2d, followed: bool, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
    inputs = [x] if shortcut is None else [x, shortcut]
    fits = all(t.is_contiguous(memory_format=torch.channels_last) and t.dtype == x.dtype for t in inputs)
    if not fits or not x.shape[1] < x.numel() < 1 << 31:  # a single value per channel is an error
        y: Tensor = type(module).forward(module, *inputs)
        return torch.relu(y) if followed else y
    relu = followed or type(module) is BatchNormReLU
    if not module.training:
        return _tested(module, relu, x, shortcut)
    fused: Tensor = _Norm.apply(x, shortcut, module.weight, module.bias, module, relu)  # type: ignore[no-untyped-call]
    return fused


@torch.no_grad()
def _tested(module: nn.BatchNorm2d, relu: bool, x: Tensor, shortcut: Tensor | None) -> Tensor:
    """Normalize with the running statistics, as in tests."""
    assert module.running_mean is not None and module.running_var is not None
    inverse = torch.rsqrt(module.running_var + module.eps)
    scale = inverse * module.weight
    saved = torch.stack([module.running_mean, inverse, scale, module.bias - module.running_mean * scale])
    return _normalized(_Plan.of(x), x, shortcut, saved, relu)


def _normalized(plan: "_Plan", x: Tensor, shortcut: Tensor | None, saved: Tensor, relu: bool) -> Tensor:
    from fedbat.engine import layer_kernels as kernels

    y, adds = torch.empty_like(x), shortcut is not None
    launch(kernels.normalize, plan.over_tiles)(
        x, shortcut if adds else x, saved, y, plan.M, plan.C, ADDS=adds, RELU=relu, **_SHAPE
    )
    return y


class _Plan(NamedTuple):
    """How the rows (M) and channels (C) of an activation are shared among programs."""

    M: int
    C: int
    parts: int  # that the rows are cut into, each summed by one program
    tiles: int  # of a part

    @classmethod
    def of(cls, x: Tensor) -> "_Plan":
        M, C, tiles = x.numel() // x.shape[1], x.shape[1], 1
        while _ROWS * tiles * _PARTS < M:
            tiles *= 4
        return cls(M, C, -(-M // (_ROWS * tiles)), tiles)

    @property
    def over_channels(self) -> tuple[int]:
        return (-(-self.C // _CHANNELS),)

    @property
    def over_parts(self) -> tuple[int, int]:
        return self.parts, *self.over_channels

    @property
    def over_tiles(self) -> tuple[int, int]:
        return -(-self.M // _ROWS), *self.over_channels

    def partial(self, x: Tensor) -> Tensor:
        """Room for two sums for each part and channel."""
        return torch.empty(2, self.parts, self.C, device=x.device)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shortcut: Tensor | None, weight: Tensor, bias: Tensor, module: Any, relu: bool
    ) -> Tensor:
        from fedbat.engine import layer_kernels as kernels

        plan = _Plan.of(x)
        M, C, parts, tiles = plan
        sums, saved = plan.partial(x), torch.empty(4, C, device=x.device)
        launch(kernels.moments, plan.over_parts)(x, sums, M, C, parts, TILES=tiles, **_SHAPE)
        launch(kernels.settle_moments, plan.over_channels)(
            x, sums, weight, bias, module.running_mean, module.running_var, module.num_batches_tracked, saved,
            M, C, parts, module.eps, module.momentum, MOST=_PARTS, CHANNELS=_CHANNELS,
        )  # fmt: skip
        y = _normalized(plan, x, shortcut, saved, relu)
        adds = shortcut is not None
        ctx.save_for_backward(x, y if adds and relu else x, saved)
        ctx.kind = {"ADDS": adds, "RELU": relu, **_SHAPE}
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from fedbat.engine import layer_kernels as kernels

        x, y, saved = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        plan = _Plan.of(x)
        M, C, parts, tiles = plan
        sums, x_grad = plan.partial(x), torch.empty_like(x)
        shortcut_grad = torch.empty_like(x) if ctx.kind["ADDS"] else None
        (weight_grad, bias_grad), factors = torch.empty(2, C, device=x.device), torch.empty(2, C, device=x.device)
        launch(kernels.slopes, plan.over_parts)(x, grad, y, saved, sums, M, C, parts, TILES=tiles, **ctx.kind)
        launch(kernels.settle_slopes, plan.over_channels)(
            sums, saved, weight_grad, bias_grad, factors, M, C, parts, MOST=_PARTS, CHANNELS=_CHANNELS
        )
        launch(kernels.pull_back, plan.over_tiles)(
            x, grad, y, saved, factors, x_grad, x_grad if shortcut_grad is None else shortcut_grad, M, C, **ctx.kind
        )
        return x_grad, shortcut_grad, weight_grad, bias_grad, None, None
