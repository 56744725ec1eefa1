"""The paper's models by name, and users' own by `package.module:function`."""

from collections.abc import Callable

import torch
from torch import nn

from fedbat.errors import ConfigError
from fedbat.models.cnn import cnn
from fedbat.models.resnet import resnet10, resnet10_narrow
from fedbat.settings import closest, imported

Builder = Callable[[tuple[int, int, int], int], nn.Module]

MODELS: dict[str, Builder] = {"cnn": cnn, "resnet10": resnet10, "resnet10-narrow": resnet10_narrow}


def _normal(model: nn.Module) -> None:
    """As in the authors' code: convolutions and linear layers from N(0, 0.01^2), everything else at its defaults."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.01)


def _own(model: nn.Module) -> None:
    """Leave layers as they were built: PyTorch's defaults, unless the model says otherwise."""


INITS: dict[str, Callable[[nn.Module], None]] = {"normal": _normal, "own": _own}


def default_init(name: str) -> str:
    """The paper's models start as in the authors' code, a user's own as it was built."""
    return "normal" if name in MODELS else "own"


def default_rounds(name: str) -> int:
    """The paper trains its ResNets twice as long as its CNN."""
    return 200 if MODELS.get(name) in (resnet10, resnet10_narrow) else 100


def build_model(
    name: str, shape: tuple[int, int, int], num_classes: int, seed: int, init: str | None = None
) -> nn.Module:
    """The model with its initial weights, which depend on `seed` and `init` (default: `default_init`) alone.

    A user's own model is named `package.module:function`, which is called with shape and num_classes.
    """
    builder = MODELS[name] if name in MODELS else _import(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _built(name, builder, shape, num_classes)
        INITS[init or default_init(name)](model)
    return model


def _built(name: str, builder: Builder, shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    try:
        model = builder(shape, num_classes)
    except TypeError as error:
        raise ConfigError(
            f"model {name!r} could not be built ({error}); it is called with (C, H, W), classes"
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {name!r} returned a {type(model).__name__}, expected an nn.Module")
    return model


def _import(name: str) -> Builder:
    choices = (
        f"choose from {', '.join(MODELS)}, or name your own function as package.module:function, called with "
        f"(channels, height, width) and num_classes{closest(name, MODELS)}"
    )
    if ":" not in name:
        raise ConfigError(f"unknown model {name!r}; {choices}")
    try:
        builder: Builder = imported(name)
    except ImportError as error:
        raise ConfigError(f"unknown model {name!r} ({error}); {choices}") from None
    return builder
