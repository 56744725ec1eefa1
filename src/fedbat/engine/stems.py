"""The first convolution of a model as a product of matrices: cuDNN has no good kernels for only a few channels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedbat.engine.launch import launch

_MOST = 64  # values a filter sees; with more, patches would cost more than they save
_ROWS = 64  # of patches, made by one program


def fuse_stems(model: nn.Module) -> None:
    """Let bfloat16 convolutions of images compute with patches; those of activations are left as they are."""
    for module in model.modules():
        # Exactly these: a subclass may do something else.
        if type(module) is nn.Conv2d and is_plain(module) and module.weight[0].numel() <= _MOST:
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def is_plain(conv: nn.Conv2d) -> bool:
    """Whether filters, stride and padding are square, without bias, groups or dilation."""
    plain = conv.bias is None and conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros"
    return plain and all(
        isinstance(size, tuple) and len(set(size)) == 1 for size in (conv.kernel_size, conv.stride, conv.padding)
    )


def _forward(conv: nn.Conv2d, x: Tensor) -> Tensor:
    if x.requires_grad or x.dim() != 4 or conv.weight.dtype != torch.bfloat16 or x.numel() * _MOST >= 1 << 31:
        return type(conv).forward(conv, x)
    fused: Tensor = _Stem.apply(x, conv.weight, conv.stride[0], conv.padding[0])  # type: ignore[no-untyped-call]
    return fused


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        from fedbat.engine import layer_kernels

        (out, channels, size, _), (batch, _, h, w) = weight.shape, x.shape
        height, width = ((side + 2 * padding - size) // stride + 1 for side in (h, w))
        values = 1 << (channels * size * size - 1).bit_length()
        seen = torch.empty(batch * height * width, max(values, 16), dtype=weight.dtype, device=x.device)
        launch(layer_kernels.patches, (-(-len(seen) // _ROWS),))(
            x, seen, len(seen), height, width, *x.stride(),
            C=channels, H=h, W=w, K=size, STRIDE=stride, PADDING=padding, VALUES=seen.shape[1], ROWS=_ROWS,
        )  # fmt: skip
        filters = weight.permute(0, 2, 3, 1).reshape(out, -1)  # in the order of patches
        ctx.save_for_backward(seen)
        ctx.shape = weight.shape
        y = seen @ nn.functional.pad(filters, (0, seen.shape[1] - filters.shape[1])).T
        return y.view(batch, height, width, out).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (seen,) = ctx.saved_tensors
        out, channels, size, _ = ctx.shape
        found = grads[0].permute(0, 2, 3, 1).reshape(-1, out).T @ seen
        return None, found[:, : channels * size * size].view(out, size, size, channels).permute(0, 3, 1, 2), None, None
