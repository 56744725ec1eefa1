"""The averaged model: an exponential average over the rounds, kept at the server."""

import torch

from fedbat.errors import ConfigError
from fedbat.streams import Tensors
from fedbat.training import wide


def averaged(past: Tensors, w: Tensors, weight: float) -> Tensors:
    """weight * past + (1 - weight) * w, BatchNorm statistics included; counters are the latest. It starts from w.

    Models of half precision have an average in float32: a tenth of what a round changes would be rounded away.
    """
    if not weight:
        return {}
    return {
        name: torch.lerp(wide(x), wide(past[name]), weight)
        if name in past and x.is_floating_point()
        else wide(x).clone()
        for name, x in w.items()
    }


def check_average(weight: float) -> None:
    """Refuse a weight of the past outside [0, 1)."""
    if not 0 <= weight < 1:
        raise ConfigError(f"average is {weight}, expected a number from 0 (off) to below 1, such as 0.9")
