"""All methods by name. To add one, see docs/adding-a-method.md."""

from collections.abc import Mapping
from typing import Any

from fedbat.contract import check_class, check_method
from fedbat.errors import ConfigError
from fedbat.method import Method
from fedbat.methods.bifl import BiFL, BiFLFull
from fedbat.methods.drive import DRIVE
from fedbat.methods.eden import EDEN
from fedbat.methods.ef_signsgd import EFSignSGD
from fedbat.methods.fedavg import FedAvg
from fedbat.methods.fedbat import FedBAT
from fedbat.methods.fedmrn import FedMRN
from fedbat.methods.fedpaq import FedPAQ
from fedbat.methods.noisy_signsgd import NoisySignSGD
from fedbat.methods.signsgd import SignSGD
from fedbat.methods.stoc_signsgd import StocSignSGD
from fedbat.methods.zerofl import ZeroFL
from fedbat.settings import check_settings, closest, imported, parse_settings

METHODS: dict[str, type[Method]] = {
    "bifl": BiFL,
    "bifl-full": BiFLFull,
    "drive": DRIVE,
    "eden": EDEN,
    "ef-signsgd": EFSignSGD,
    "fedavg": FedAvg,
    "fedbat": FedBAT,
    "fedmrn": FedMRN,
    "fedpaq": FedPAQ,
    "noisy-signsgd": NoisySignSGD,
    "signsgd": SignSGD,
    "stoc-signsgd": StocSignSGD,
    "zerofl": ZeroFL,
}


def method_kind(name: str) -> type[Method]:
    """The class of a method by its name here, or of a user's own by `package.module:Class`."""
    if name in METHODS:
        return METHODS[name]
    choices = f"choose from {', '.join(METHODS)}, or name your own as package.module:Class{closest(name, METHODS)}"
    if ":" not in name:
        raise ConfigError(f"unknown method {name!r}; {choices}")
    try:
        kind = imported(name)
    except ImportError as error:
        raise ConfigError(f"unknown method {name!r} ({error}); {choices}") from None
    if not isinstance(kind, type) or not issubclass(kind, Method):
        raise ConfigError(f"method {name!r} is no method; expected a subclass of fedbat.method.Method")
    check_settings(kind)
    check_class(kind)
    return kind


def make_method(name: str, settings: Mapping[str, Any] | None = None, **more: Any) -> Method:
    """Make a method; settings are text or values, {"rho": "6"} or rho=6."""
    kind = method_kind(name)
    return kind(**parse_settings(kind, {**(settings or {}), **more}))


def method_name(method: Method) -> str:
    """The name by which another process can make this method."""
    check_method(method)
    for name, kind in METHODS.items():
        if kind is type(method):
            return name
    own = type(method).__name__
    raise ConfigError(
        f"{own} is not registered, so clients cannot make it by its name; choose from {', '.join(METHODS)}, or set "
        f'fedbat.METHODS["my-name"] = {own} on the server and on every client'
    )
