"""The way of tensors to a device that may be busy: nobody waits for it, and many go by one copy."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on a device; a GPU is not waited for, however busy it is."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def all_sent_to(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`sent_to` for many tensors by one copy: to launch one takes longer than a small tensor's way."""
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [sent_to(device, tensor) for tensor in tensors]
    return in_one_buffer(tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), device)


def in_one_buffer(tensors: Sequence[Tensor], new_buffer: Callable[[int], Tensor], device: torch.device) -> list[Tensor]:
    """Copies of the tensors on a device, which a buffer of so many bytes brings there."""
    # Wide types first, so that each lies at a multiple of its own size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    stops = list(accumulate(tensors[i].numel() * tensors[i].element_size() for i in order))
    spans = list(zip(order, [0, *stops], stops, strict=False))
    buffer = new_buffer(stops[-1] if stops else 0)
    for i, start, stop in spans:
        buffer[start:stop].copy_(tensors[i].contiguous().reshape(-1).view(torch.uint8))
    there = buffer.to(device, non_blocking=True)
    found = {i: there[start:stop].view(tensors[i].dtype).view(tensors[i].shape) for i, start, stop in spans}
    return [found[i] for i in range(len(tensors))]
