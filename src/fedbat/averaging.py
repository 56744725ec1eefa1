"""The averaged model: an exponential average over the rounds, kept at the server."""

import torch

from fedbat.errors import ConfigError
from fedbat.streams import Tensors
from fedbat.training import wide


def averaged(past: Tensors, w: Tensors, weight: float) -> Tensors:
    """weight * past + (1 - weight) * w, including BatchNorm statistics; counters are the latest. It starts from w.

    Half-precision models have an average in float32: otherwise a tenth of a round's change would be rounded away.
    With weight 0 no average is kept: {}.
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
