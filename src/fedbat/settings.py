"""What users write as text: hyper-parameters ("rho=6"), the checks of their dataclasses, and the users' own classes."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from traceback import extract_tb
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from fedbat.errors import ConfigError

_BOOLEANS = {"on": True, "true": True, "off": False, "false": False}


def imported(name: str) -> Any:
    """The object that `package.module:name` stands for; ImportError says why there is none."""
    module, _, own = name.partition(":")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        ours = error.name is not None and f"{module}.".startswith(f"{error.name}.")  # not a module that it imports
        raise ImportError(f"{error}; start in the folder that holds it" if ours else error) from None
    except ImportError:
        raise
    except Exception as error:
        hint = "; use @dataclass(frozen=True)" if "non-frozen dataclass" in str(error) else ""
        raise ImportError(f"{type(error).__name__} in {_place(error)}: {error}{hint}") from error
    try:
        return getattr(found, own)
    except AttributeError as error:
        raise ImportError(error) from None


def _place(error: Exception) -> str:
    """File and line of a mistake in somebody's module."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = extract_tb(error.__traceback__)
    module = [frame.filename for frame in frames if frame.name == "<module>"][-1:]  # not the libraries it calls
    last = [frame for frame in frames if frame.filename in module or not module][-1]
    return f"{last.filename}, line {last.lineno}"


def closest(name: str, choices: Iterable[str]) -> str:
    """The end of a sentence that lists the choices: what was most likely meant, if any choice is close."""
    known = {choice.casefold(): choice for choice in choices}
    near = get_close_matches(name.casefold(), known, 1)
    return f"; did you mean {known[near[0]]}?" if near else ""


def is_a(hint: Any, value: object) -> bool:
    """Whether the value is of this type; a whole number also counts as a number, True and False as neither."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(is_a(option, value) for option in options)
    if origin is Literal:
        return value in options
    if origin is tuple and ... not in options:
        return isinstance(value, tuple) and len(value) == len(options) and all(map(is_a, options, value))
    kind = origin or hint
    if kind is Any or not isinstance(kind, type):  # of a user's own
        return True
    if type(value) is bool:
        return kind in (bool, object)
    return isinstance(value, (int, float) if kind is float else kind)


def check_range(name: str, value: float, low: float, high: float, hint: str, *, open_low: bool = False) -> None:
    """Refuse a value outside [low, high], or (low, high] with `open_low`."""
    if not is_a(float, value) or not (low < value if open_low else low <= value) or not value <= high:
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
        raise ConfigError(f"{name}={value!r}, expected a number in {interval}; {hint}")


def check_whole(name: str, value: int, low: int, high: int, hint: str) -> None:
    """Refuse anything but a whole number from low to high."""
    if not is_a(int, value) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}, expected a whole number from {low} to {high}; {hint}")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is not one of a Literal type's."""
    if value not in get_args(choices):
        raise ConfigError(f"{name}={value}, expected one of {', '.join(map(str, get_args(choices)))}")


def setting_names(kind: type) -> list[str]:
    """The names of the hyper-parameters of a method's dataclass."""
    return [field.name for field in dataclasses.fields(kind)]


class Setting(NamedTuple):
    """A hyper-parameter as a person reads it."""

    name: str
    default: str
    values: str  # that it accepts
    meaning: str  # its annotation, if it has one: rho: Annotated[float, "pace of the step size"] = 6.0


def settings_of(kind: type) -> list[Setting]:
    """The hyper-parameters of a method's dataclass, explained."""
    hints, marked = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    return [
        Setting(
            field.name,
            show(_default(field)),
            _values(hints[field.name]) if _is_text(hints[field.name]) else "given in Python",
            " ".join(marked[field.name].__metadata__) if get_origin(marked[field.name]) is Annotated else "",
        )
        for field in dataclasses.fields(kind)
    ]


def parse_settings(kind: type, pairs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert text, or values of the same meaning, to the types of the dataclass's fields."""
    hints = get_type_hints(kind)
    known_names = setting_names(kind)
    parsed = {}
    for name, given in pairs.items():
        if name not in known_names:
            known = f"it has {', '.join(known_names)}" if known_names else "it has none"
            raise ConfigError(f"{kind.__name__} has no setting {name!r}; {known}{closest(name, known_names)}")
        default = show(next(_default(field) for field in dataclasses.fields(kind) if field.name == name))
        if not _is_text(hints[name]):
            raise ConfigError(f"{name} is a {hints[name]}, which cannot be given as text; set it in Python")
        try:
            parsed[name] = _parse(given if isinstance(given, str) else show(given), hints[name])
        except ValueError:
            raise ConfigError(
                f"{name}={given!r} could not be read; expected {_values(hints[name])}, such as its default, {default}"
            ) from None
    return parsed


def check_settings(kind: type) -> None:
    """Refuse settings without a default, and fields that have no effect because the class is not a dataclass."""
    fields, hints = {found.name: found for found in dataclasses.fields(kind)}, get_type_hints(kind)
    own = {name for name in vars(kind).get("__annotations__", {}) if get_origin(hints[name]) is not ClassVar}
    if own and "__dataclass_fields__" not in vars(kind):
        raise ConfigError(
            f"{kind.__name__} changes {', '.join(sorted(own))} without being a dataclass; add @dataclass(frozen=True)"
        )
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"setting {name} of {kind.__name__} has no default value; give it one in the class")


def check_defaults(kind: type) -> None:
    """Refuse values that look like a setting's new default but are not one, because dataclasses ask for a type."""
    for field in dataclasses.fields(kind):
        found = getattr(kind, field.name, field.default)
        if field.default is not dataclasses.MISSING and found is not field.default and found != field.default:
            raise ConfigError(
                f"{kind.__name__} sets {field.name} without a type, so that it stays {show(field.default)}; write "
                f"{field.name}: {field.type} = {show(found)} in a @dataclass(frozen=True)"
            )


def show(value: object) -> str:
    """A setting as written on the command line: short, but its text gives the same value again."""
    if isinstance(value, tuple | list):  # a list if it was read from JSON
        return ",".join(map(show, value))
    if value is None or isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and float(short := f"{value:g}") == value:
        return short
    return str(value)


def _values(hint: Any) -> str:
    """The values that `_parse` accepts, in words."""
    options = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join("off" if option is NoneType else _values(option) for option in options)
    if get_origin(hint) is Mapping:
        return "names with their values as text"
    if get_origin(hint) is tuple:
        return ",".join(map(_values, options))
    if get_origin(hint) is Literal:
        return " or ".join(map(str, options))
    return {bool: "on or off", int: "whole number", float: "number"}.get(hint, "text")


def check_types(config: Any, shown: Callable[[str], str]) -> None:
    """Refuse a dataclass with a field that is not of its annotated type; `shown` gives the name that users know."""
    kind: object = type(config)
    for name, hint in _hints(kind).items():
        if not is_a(hint, value := getattr(config, name)):
            raise ConfigError(f"{shown(name)} is {value!r} ({type(value).__name__}), expected {_values(hint)}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, which take long to work out."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_text(hint: Any) -> bool:
    """Whether `_parse` can read this type."""
    options = get_args(hint)
    if get_origin(hint) in (Union, UnionType, tuple):
        return all(option is NoneType or _is_text(option) for option in options)
    if get_origin(hint) is Literal:
        return all(isinstance(option, str) for option in options)
    return hint in (bool, int, float, str)


def _parse(text: str, hint: Any) -> Any:
    """The text as a value of this type; ValueError if it is not one."""
    options = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        if NoneType in options and text.lower() in ("off", "none"):
            return None
        return _first_that_fits(text, [option for option in options if option is not NoneType])
    if get_origin(hint) is tuple:
        pieces = text.split(",")
        return tuple(_parse(piece, option) for piece, option in zip(pieces, options, strict=True))
    if hint is bool:
        if text.lower() not in _BOOLEANS:
            raise ValueError(text)
        return _BOOLEANS[text.lower()]
    if hint in (int, float):
        return hint(text)
    if get_origin(hint) is Literal and text not in options:
        raise ValueError(text)
    return text


def _first_that_fits(text: str, options: list[Any]) -> Any:
    for option in options:
        with suppress(ValueError):
            return _parse(text, option)
    raise ValueError(text)
