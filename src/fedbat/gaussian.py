"""The levels that quantize normal values best (Lloyd-Max): weights and rotated updates are nearly normal."""

from functools import cache

import torch
from torch import Tensor

_LLOYD_MAX = {  # each level is the mean of its cell, each edge midway between two levels; part of the wire format
    1: [0.797884583],
    2: [0.452780038, 1.51041758],
    3: [0.24509418, 0.756005287, 1.34390926, 2.15194559],
    4: [0.128395036, 0.388048291, 0.656759143, 0.942340434, 1.25623119, 1.6180464, 2.06901717, 2.73258948],
}


@cache
def gaussian_levels(width: int, device: torch.device) -> Tensor:
    """The 2^width Lloyd-Max levels of the standard normal distribution, ascending."""
    positive = torch.tensor(_LLOYD_MAX[width], dtype=torch.float32, device=device)
    return torch.cat([-positive.flip(0), positive])
