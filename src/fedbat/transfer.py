"""Moving tensors to a device that may be busy: without waiting for it, and many of them in one copy."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on a device, without waiting for a GPU, however busy it is."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def all_sent_to(device: torch.device, tensors: Sequence[Tensor]) -> list[Tensor]:
    """`sent_to` for many tensors in one copy: launching a copy takes longer than transferring a small tensor."""
    if not tensors or device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [sent_to(device, tensor) for tensor in tensors]
    box = Box(tensors)
    filled = box.fill(tensors, torch.empty(box.size, dtype=torch.uint8, pin_memory=True))
    return box.views(filled.to(device, non_blocking=True))


class Box:
    """Where tensors of various types and shapes lie in one buffer of bytes."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._kinds = [(tensor.dtype, tensor.shape) for tensor in like]
        # Wide types first, so that each lies at a multiple of its own size.
        self._order = sorted(range(len(like)), key=lambda i: -like[i].element_size())
        stops = list(accumulate(like[i].numel() * like[i].element_size() for i in self._order))
        self._spans = dict(zip(self._order, zip([0, *stops], stops, strict=False), strict=True))
        self.size = stops[-1] if stops else 0

    def fill(self, tensors: Sequence[Tensor], buffer: Tensor | None = None) -> Tensor:
        """The tensors' bytes, in this buffer or in a new one on their device."""
        return torch.cat([tensors[i].contiguous().reshape(-1).view(torch.uint8) for i in self._order], out=buffer)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a filled buffer, as views, in the order in which they were given."""
        spans = [self._spans[i] for i in range(len(self._kinds))]
        return [
            buffer[start:stop].view(dtype).view(shape)
            for (start, stop), (dtype, shape) in zip(spans, self._kinds, strict=True)
        ]
