"""Convolutions for cards with units that fetch tiles by themselves (Hopper and later), faster than cuDNN's.

cuDNN's are general; these are for bfloat16, channels_last and multiples of 32 channels, with tile sizes that suit small
images and several clients at a time.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbat.engine.launch import launch
from fedbat.engine.stems import is_plain

_CHANNELS = 32  # or a multiple
_PROGRAMS = 36  # at least this many of one client share the sums for filters; ten clients at a time fill the card
_BLOCK = 1024
_ROOM = 200 << 10  # bytes of shared memory, more than any kernel here takes; small cards have half as much


def fuse_convs(model: nn.Module) -> None:
    """Let bfloat16 convolutions compute with the kernels here, wherever these suit them."""
    for module in model.modules():
        # Exactly these: a subclass may mean something else.
        if type(module) is nn.Conv2d and is_plain(module) and _suits(module.in_channels, module.out_channels):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


@cache
def can_fetch_tiles(device: torch.device) -> bool:
    """Whether the card has units that fetch tiles of tensors, and shared memory for three stages of them."""
    if device.type != "cuda":
        return False
    card = torch.cuda.get_device_properties(device)
    room = getattr(card, "shared_memory_per_block_optin", 0)  # only NVIDIA's cards report it
    return card.major >= 9 and room >= _ROOM


def _suits(*channels: int) -> bool:
    return all(number % _CHANNELS == 0 for number in channels)


def _forward(conv: nn.Conv2d, x: Tensor) -> Tensor:
    stride, weight = conv.stride[0], conv.weight
    fits = x.dim() == 4 and all(
        t.dtype == torch.bfloat16 and t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight)
    )
    if not fits or not can_fetch_tiles(x.device) or x.shape[2] % stride or x.shape[3] % stride:
        return type(conv).forward(conv, x)
    fused: Tensor = _Conv.apply(x, weight, stride, conv.padding[0])  # type: ignore[no-untyped-call]
    return fused


class _Tiles(NamedTuple):
    """How the pixels of activations are cut into tiles of samples x height x width; how many in total and per image."""

    samples: int
    height: int
    width: int
    total: int
    down: int
    across: int

    @classmethod
    def of(cls, pixels: int, batch: int, height: int, width: int) -> "_Tiles":
        w = min(_power(width), pixels)
        h = min(_power(height), pixels // w)
        samples = pixels // w // h
        down, across = -(-height // h), -(-width // w)
        return cls(samples, h, w, -(-batch // samples) * down * across, down, across)

    @property
    def shape(self) -> dict[str, int]:
        return {"SAMPLES": self.samples, "HEIGHT": self.height, "WIDTH": self.width}

    def view(self, x: Tensor, stride: int, channels: int) -> Any:
        """The view of x in which a tile is a box, if a tile's pixels are `stride` apart."""
        batch, c, height, width = x.shape
        sizes = [batch, height // stride, stride, width // stride, stride * c]
        steps = [height * width * c, stride * width * c, width * c, stride * c, 1]
        return _described(x, sizes, steps, [self.samples, self.height, 1, self.width, channels])


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _block(channels: int, most: int) -> int:
    """The largest power of two that divides the channels, at most `most`."""
    return min(channels & -channels, most)


def _described(x: Tensor, sizes: list[int], steps: list[int], block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, sizes, steps, block)


def _filters(weight: Tensor, block: list[int]) -> Any:
    """Filters as a matrix: a row for each output channel; in it the taps, and within each the input channels."""
    row = weight[0].numel()
    return _described(weight, [len(weight), row], [row, 1], block)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        from fedbat.engine import conv_kernels

        (out, channels, size, _), (batch, _, *sides) = weight.shape, x.shape
        height, width = ((side + 2 * padding - size) // stride + 1 for side in sides)
        y = torch.empty((batch, out, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        across, deep = _block(out, 128), _block(channels, 64)
        tiles = _Tiles.of(128 if across == 128 else 256, batch, height, width)
        launch(conv_kernels.convolve, (tiles.total, out // across))(
            tiles.view(x, stride, deep), _filters(weight, [across, deep]), tiles.view(y, 1, across),
            tiles.down, tiles.across, channels,
            K=size, STRIDE=stride, PADDING=padding, **tiles.shape, OUT=across, DEPTH=deep, num_warps=8, num_stages=3,
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous(memory_format=torch.channels_last)
        x_grad = _input_grad(grad, x, weight, ctx.stride, ctx.padding) if ctx.needs_input_grad[0] else None
        return x_grad, _filter_grad(grad, x, weight, ctx.stride, ctx.padding), None, None


def _input_grad(grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    from fedbat.engine import conv_kernels

    (out, channels, size, _), (batch, _, height, width) = weight.shape, x.shape
    x_grad = torch.empty_like(x)
    across, deep = _block(channels, 128), _block(out, 64)
    tiles = _Tiles.of(128 if across == 128 else 256, batch, height // stride, width // stride)
    launch(conv_kernels.input_grad, (tiles.total, channels // across, stride * stride))(
        tiles.view(grad, 1, deep), _filters(weight, [deep, across]), tiles.view(x_grad, stride, across),
        tiles.down, tiles.across, channels, out,
        K=size, STRIDE=stride, PADDING=padding, **tiles.shape, OUT=across, DEPTH=deep, num_warps=8, num_stages=3,
    )  # fmt: skip
    return x_grad


def _filter_grad(grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    from fedbat.engine import conv_kernels

    out, channels, size, _ = weight.shape
    down, across = _block(out, 128), _block(channels, 128)
    tiles = _Tiles.of(64 if down == across == 128 else 128, len(x), *grad.shape[2:])
    products = out // down * (channels // across) * size * size
    each = -(-tiles.total // -(-_PROGRAMS // products))
    num = -(-tiles.total // each)
    weight_grad = torch.empty_like(weight)
    parts = weight_grad if num == 1 else torch.empty(num, weight.numel(), device=x.device)
    launch(conv_kernels.filter_grad, (products, num))(
        tiles.view(x, stride, across), tiles.view(grad, 1, down), parts,
        tiles.down, tiles.across, channels, out, each,
        K=size, STRIDE=stride, PADDING=padding, **tiles.shape, OUT=down, IN=across, num_warps=4, num_stages=3,
    )  # fmt: skip
    if num > 1:
        grid = (-(-weight.numel() // _BLOCK),)
        launch(conv_kernels.add_parts, grid)(parts, weight_grad, weight.numel(), num, BLOCK=_BLOCK)
    return weight_grad
