"""Normalization together with what follows it, as one module that engines may compute in one go."""

import torch
from torch import Tensor, nn


class BatchNormReLU(nn.BatchNorm2d):
    """ReLU(BatchNorm(x)), or ReLU(BatchNorm(x) + shortcut)."""

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        """Compute with BatchNorm's own parameters and buffers."""
        y = super().forward(x)
        return torch.relu(y if shortcut is None else y + shortcut)
