"""Flower mods that need plain arrays, where there are none, are found and refused rather than silently bypassed."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from fedbat.errors import ConfigError

_INSTEAD = {
    "fixedclipping_mod": "bound the step size instead (FedBAT's `bounds`), which limits what a client can change",
    "adaptiveclipping_mod": "bound the step size instead (FedBAT's `bounds`), which limits what a client can change",
    "LocalDpMod": "train with a private optimizer in the client's own loop instead, before the update is binarized",
    "secagg_mod": "use TLS and node authentication with compression, or secure aggregation with plain FedAvg",
    "secaggplus_mod": "use TLS and node authentication with compression, or secure aggregation with plain FedAvg",
}


def refuse_other_mods(call_next: Callable[..., Any]) -> None:
    """Look at the mods inside this one, through Flower's closures, and at those around it, on the stack."""
    around = [name if owner is None else type(owner).__name__ for name, owner in callers()]
    for mod in [*_inside(call_next), *around]:
        if (instead := _INSTEAD.get(mod)) is not None:
            raise ConfigError(
                f"{mod} needs the client's plain arrays, and fedbat sends a packed update; remove it from the "
                f"ClientApp's mods: {instead}"
            )


def _inside(call_next: Callable[..., Any]) -> Iterator[str]:
    for cell in getattr(call_next, "__closure__", None) or ():
        found = cell.cell_contents
        if not callable(found):
            continue
        yield getattr(found, "__name__", type(found).__name__)
        if getattr(found, "__name__", "") == "new_ffn":  # what Flower wraps the next mod in
            yield from _inside(found)


def callers() -> Iterator[tuple[str, Any]]:
    """The functions on the stack, the innermost first, each with the object whose method it is, if it is one."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame.f_code.co_name, frame.f_locals.get("self")
