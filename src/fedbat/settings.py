"""What users write as text: hyper-parameters ("rho=6"), the checks their dataclasses make, and classes of their own."""

import dataclasses
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fedbat.errors import ConfigError

_BOOLEANS = {"on": True, "true": True, "off": False, "false": False}


def imported(name: str) -> Any:
    """What `package.module:name` stands for; ImportError says why there is no such thing."""
    module, colon, own = name.partition(":")
    if not colon:
        raise ImportError("nothing after a ':'")
    try:
        return getattr(import_module(module), own)
    except (AttributeError, ValueError) as error:
        raise ImportError(error) from None


def check_range(name: str, value: float, low: float, high: float, hint: str, *, open_low: bool = False) -> None:
    """Low <= value <= high (low < value with `open_low`)."""
    if not (low < value if open_low else low <= value) or not value <= high:
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ConfigError(f"{name}={value}, expected a number in {interval}; {hint}")


def check_whole(name: str, value: int, low: int, high: int, hint: str) -> None:
    """Low <= value <= high, and nothing in between two of them."""
    if not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}, expected a whole number from {low} to {high}; {hint}")


def check_choice(name: str, value: object, choices: Any) -> None:
    """`value` is one of a Literal type's values."""
    if value not in get_args(choices):
        raise ConfigError(f"{name}={value}, expected one of {', '.join(map(str, get_args(choices)))}")


def setting_names(kind: type) -> list[str]:
    """The hyper-parameters a method's dataclass has."""
    return [field.name for field in dataclasses.fields(kind)]


class Setting(NamedTuple):
    """A hyper-parameter as a person reads it."""

    name: str
    default: str
    values: str  # that can be given
    meaning: str  # its annotation, if it has one: rho: Annotated[float, "pace of the step size"] = 6.0


def settings_of(kind: type) -> list[Setting]:
    """The hyper-parameters of a method's dataclass, explained."""
    hints, marked = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    return [
        Setting(
            field.name,
            show(field.default),
            _values(hints[field.name]),
            " ".join(marked[field.name].__metadata__) if get_origin(marked[field.name]) is Annotated else "",
        )
        for field in dataclasses.fields(kind)
    ]


def parse_settings(kind: type, pairs: dict[str, str]) -> dict[str, Any]:
    """Text values as the types of the dataclass's fields."""
    hints = get_type_hints(kind)
    known_names = setting_names(kind)
    parsed = {}
    for name, text in pairs.items():
        if name not in known_names:
            known = f"it has {', '.join(known_names)}" if known_names else "it has none"
            raise ConfigError(f"{kind.__name__} has no setting {name!r}; {known}")
        default = show(next(field.default for field in dataclasses.fields(kind) if field.name == name))
        if not isinstance(text, str):
            raise ConfigError(f"{name}={text!r} is not text; write it like its default, {default!r}")
        try:
            parsed[name] = _parse(name, text, hints[name])
        except ValueError:
            raise ConfigError(f"{name}={text!r} could not be read; write it like its default, {default}") from None
    return parsed


def show(value: object) -> str:
    """A setting as it is written on the command line: short, but from its text comes the same value again."""
    if isinstance(value, tuple | list):  # a list where it has been in JSON
        return ",".join(map(show, value))
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and float(short := f"{value:g}") == value:
        return short
    return str(value)


def _values(hint: Any) -> str:
    """What `_parse` takes for it."""
    options = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join("off" if option is NoneType else _values(option) for option in options)
    if get_origin(hint) is tuple:
        return ",".join(map(_values, options))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, options))
    return {bool: "on or off", int: "whole number", float: "number"}.get(hint, "text")


def _parse(name: str, text: str, hint: Any) -> Any:
    options = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        if NoneType in options and text.lower() in ("off", "none"):
            return None
        return _parse(name, text, next(option for option in options if option is not NoneType))
    if get_origin(hint) is tuple:
        pieces = text.split(",")
        return tuple(_parse(name, piece, option) for piece, option in zip(pieces, options, strict=True))
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(text)
        return _BOOLEANS[text.lower()]
    if hint in (int, float):
        return hint(text)
    if hint is str or get_origin(hint) is Literal:  # which the dataclass checks
        return text
    raise ConfigError(f"{name} is a {hint}, which cannot be given as text; set it in Python")
