"""What Flower's strategies carry from round to round, which checkpoints keep, and which a bad round must not spoil."""

from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedbat.streams import Tensors

_MOMENTA = ("m_t", "v_t", "momentum_vector")  # of Flower's FedOpt family (arrays by name) and FedAvgM (a list of them)
_NUMBER = "."  # precedes a position in a list; no parameter's name begins with it


def momenta_of(strategy: Strategy) -> dict[str, NDArray[Any]]:
    """Its momenta as `kind/name`, or `kind/.position` where it has a list."""
    found: dict[str, NDArray[Any]] = {}
    for kind in _MOMENTA:
        carried = getattr(strategy, kind, None)
        if isinstance(carried, list):
            carried = {f"{_NUMBER}{index}": array for index, array in enumerate(carried)}
        if isinstance(carried, dict):  # else another's attribute of that name
            found |= {f"{kind}/{name}": np.asarray(array) for name, array in carried.items()}
    return found


def give_momenta(strategy: Strategy, saved: dict[str, Tensors]) -> None:
    """Take what `momenta_of` gave out of what was saved, by kind and name, and put it back into the strategy."""
    for kind in _MOMENTA:
        if found := {name: x.numpy() for name, x in saved.pop(kind, {}).items()}:
            in_a_list = f"{_NUMBER}0" in found
            setattr(strategy, kind, [found[f"{_NUMBER}{i}"] for i in range(len(found))] if in_a_list else found)


class Carried:
    """What a strategy carries before a round, to be put back if the round spoils it. Flower's replace their arrays."""

    def __init__(self, strategy: Strategy) -> None:
        names = (*_MOMENTA, "current_arrays")  # FedAvgM's own copy of the model
        self._strategy, self._before = strategy, {name: getattr(strategy, name, None) for name in names}

    def spoiled(self) -> str | None:
        """The first of its momenta that holds NaN or infinity now."""
        for path, array in momenta_of(self._strategy).items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                return f"{path} of {type(self._strategy).__name__}"
        return None

    def restore(self) -> None:
        """Put back what was there before."""
        vars(self._strategy).update({name: x for name, x in self._before.items() if name in vars(self._strategy)})
