"""Reading what people write into experiment files; mistakes are reported with the file's name."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedbat.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} could not be read: {error}") from None


def check_keys(place: str, entry: Any, needed: Iterable[str], known: Iterable[str] | None = None) -> dict[str, Any]:
    """The entry, if it is a table with all needed keys and, where `known` is given, no unknown ones."""
    needed = list(needed)
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} is {entry!r}, expected a table with {', '.join(needed)}")
    if missing := [key for key in needed if key not in entry]:
        raise ConfigError(f"{place} has no {', '.join(missing)}; it needs {', '.join(needed)}")
    if known is not None and (unknown := sorted(set(entry) - {*needed, *known})):
        raise ConfigError(
            f"{place} has {', '.join(unknown)}, expected only {', '.join(dict.fromkeys([*needed, *known]))}"
        )
    return entry


def changes_of(method: str) -> tuple[str, dict[str, str]]:
    """A method's name and the settings written after it, as in "fedbat rho=4"."""
    name, *changes = method.split()
    if odd := [change for change in changes if not change.partition("=")[2]]:
        raise ConfigError(f"method {method!r} has {odd[0]!r}, expected a setting such as rho=6")
    return name, dict(change.split("=", 1) for change in changes)
