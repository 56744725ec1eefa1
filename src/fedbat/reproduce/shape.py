"""What the files of a record must hold to be readable at all; whether it is whole, and true, is checked elsewhere."""

from collections.abc import Mapping
from typing import Any

from fedbat.errors import DataError

_NUMBER, _MAYBE_NUMBER = (int, float), (int, float, type(None))
_NAMES = {int: "a number", float: "a number", str: "text", list: "a list", dict: "an object", type(None): "null"}
_SUMMARY = {
    "status": (str,),
    "config": (dict,),
    "method_settings": (dict,),
    "machine": (dict,),
    "engine": (dict, type(None)),
    "resumed": (list,),
    "rounds_done": (int,),
}
_LEG = {"own": (dict,)}
_LINE = {
    "round": _NUMBER,
    "accuracy": _NUMBER,
    "loss": _MAYBE_NUMBER,  # null if the run diverged
    "clients": (list,),
    "uplink_bytes": _NUMBER,
    "downlink_bytes": _NUMBER,
    "seconds": _NUMBER,
    "layers": (dict,),
}


def check_summary(summary: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a summary that cannot be used."""
    columns = {"layers": (list,)} if "layers" in summary else {}  # runs that are not published have reports by name
    _check(summary, _SUMMARY | columns, where)
    for leg in (summary, *summary["resumed"]):
        _check(leg, _LEG, where)


def check_line(line: Any, num_layers: int | None, where: str) -> None:
    """Raise DataError for a round that cannot be used; layers are columns of this length, or reports if it is None."""
    _check(line, _LINE, where)
    layers = line["layers"]
    if num_layers is None:
        for name, report in layers.items():
            _check(report, {"relative_error": _MAYBE_NUMBER}, f"{where}, layer {name}")
        return
    _check(layers, {"relative_error": (list,)}, where)
    if len(layers["relative_error"]) != num_layers:
        raise _error(where, f"errors of {len(layers['relative_error'])} layers", f"the {num_layers} of the summary")
    for error in layers["relative_error"]:
        _check({"relative_error": error}, {"relative_error": _MAYBE_NUMBER}, where)


def _check(found: Any, wanted: Mapping[str, tuple[type, ...]], where: str) -> None:
    if not isinstance(found, dict):
        raise _error(where, repr(found), _NAMES[dict])
    for name, types in wanted.items():
        if not isinstance(found.get(name, _MISSING), types):
            got = f"{name} {found[name]!r}" if name in found else f"no {name}"
            raise _error(where, got, " or ".join(dict.fromkeys(_NAMES[kind] for kind in types)))


_MISSING = object()


def _error(where: str, got: str, expected: str) -> DataError:
    return DataError(f"{where} has {got}, expected {expected}; restore it, or remove its folder and run it again")
