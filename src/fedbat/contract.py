"""What a method must be and give back: told to its author at once, and not by whatever stumbles over it later."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedbat import wire
from fedbat.errors import ConfigError, MethodError
from fedbat.method import Forward, Local, Method
from fedbat.parts import Kind, Part
from fedbat.settings import check_defaults, check_types
from fedbat.streams import Noise, Tensors


def check_method(method: Method) -> None:
    """Refuse a class or a name in place of an instance, and a class that does not mean what it says."""
    if not isinstance(method, Method):
        what = method if isinstance(method, type | str) else type(method)
        raise ConfigError(f"method is {what!r}, expected an instance such as fedbat.FedBAT()")
    check_class(type(method))
    check_types(method, lambda name: f"{type(method).__name__}'s {name}")
    _check_kinds(method)


def check_class(kind: type[Method]) -> None:
    """Refuse settings that do not count, and a closed form of another forward pass."""
    check_defaults(kind)
    forward, closed = (next(base for base in kind.__mro__ if name in vars(base)) for name in ("forward", "pull_back"))
    if closed is not Method and forward is not closed and issubclass(forward, closed):
        raise ConfigError(
            f"{forward.__name__} has a forward of its own, but the pull_back of {closed.__name__}, made for another; "
            "set pull_back = Method.pull_back (by autograd), or write its closed form"
        )


def _check_kinds(method: Method) -> None:
    """Refuse what is no kind, and kinds that servers cannot read."""
    who, kinds = f"{type(method).__name__}.kinds", method.kinds
    if not isinstance(kinds, Sequence) or not all(isinstance(kind, Kind) for kind in kinds):
        raise ConfigError(
            f"{who} is {kinds!r}, expected a tuple of kinds, such as (Kind(Signs),) or (Kind(Levels, 4),)"
        )
    for part in (kind.part for kind in kinds):
        if part not in wire.KINDS.values():
            raise ConfigError(
                f"{who} has {part.__name__}, which is not registered, so servers could not read it; call "
                f"fedbat.wire.register({part.__name__}) where you define it"
            )


def learnables(method: Method, w: Tensors) -> Tensors:
    """What the method learns beside m."""
    found = method.learnables(w)
    if unknown := [name for name in found if name not in w]:
        raise MethodError(
            f"{type(method).__name__}.learnables names {', '.join(unknown)}, expected names of layers, whose learning "
            f"rate applies to them: {', '.join(w)}"
        )
    return found


def check_forward(method: Method, seen: Forward, w: Tensors) -> None:
    """Refuse what is no Forward with weights of every layer's shape."""
    who = f"{type(method).__name__}.forward"
    if not isinstance(seen, Forward):
        raise MethodError(f"{who} gave {_what(seen)}, expected Forward(weights)")
    if seen.weights.keys() != w.keys():
        raise MethodError(f"{who} gave weights for {list(seen.weights)}, expected them for {list(w)}")
    for layer, x in w.items():
        if seen.weights[layer].shape != x.shape:
            found = list(seen.weights[layer].shape)
            raise MethodError(f"{who} gave weights of shape {found} for {layer}, expected {list(x.shape)}")


def encoded(
    method: Method, w: Tensors, local: Local, memory: Tensors, noise: Noise
) -> tuple[Mapping[str, Part], Tensors]:
    """The parts and the memory of a round."""
    who = f"{type(method).__name__}.encode"
    try:
        found = method.encode(w, local, memory, noise)
    except MethodError as error:  # of a part that cannot be made
        raise MethodError(f"{who}: {error}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(each, Mapping) for each in found)):
        raise MethodError(f"{who} gave {_what(found)}, expected (parts, memory), two dictionaries by layer")
    parts, left = found
    _check_parts(who, method, parts, w)
    if odd := [name for name, value in left.items() if not isinstance(value, torch.Tensor)]:
        raise MethodError(f"{who} gave a memory with {_what(left[odd[0]])} for {odd[0]}, expected tensors")
    if left and not method.remembers:
        raise MethodError(f"{who} gave a memory, but `remembers` is False; set it, so that nobody forgets the memory")
    if not left and method.remembers:
        raise MethodError(f"{who} gave no memory, but `remembers` is True; return (parts, memory), or correct it")
    return parts, left


def _check_parts(who: str, method: Method, parts: Mapping[str, Part], w: Tensors) -> None:
    kinds = " or ".join(map(str, method.kinds))
    if parts.keys() != w.keys():
        raise MethodError(f"{who} gave parts for {list(parts)}, expected one for each of {list(w)}")
    for layer, part in parts.items():
        if isinstance(part, Part) and (fault := part.fault()):
            raise MethodError(f"{who} gave {type(part).__name__} for {layer} with {fault}")
        if not isinstance(part, Part) or not any(kind.fits(part.record()) for kind in method.kinds):
            raise MethodError(
                f"{who} gave {_sort(part)} for {layer}, expected kind {kinds}; correct `kinds` or `encode`"
            )
        if part.numel != w[layer].numel():
            raise MethodError(f"{who} gave {part.numel} values for {layer}, expected {w[layer].numel()}")


def check_steps(method: Method, steps: Mapping[str, float | None]) -> None:
    """Refuse step sizes that servers drop, because the method says that it never sends them."""
    bounds = method.step_bounds
    for layer, step in steps.items():
        # The bounds are written in float64, step sizes in float32; one that is not finite is told by the server.
        if bounds and step and (step < bounds[0] * (1 - 1e-6) or step > bounds[1] * (1 + 1e-6)):
            raise MethodError(
                f"{type(method).__name__}.encode gave {layer} the step size {step:g}, outside its step_bounds from "
                f"{bounds[0]:g} to {bounds[1]:g}; correct one of them"
            )


def _sort(value: Any) -> str:
    return f"kind {Kind(type(value), value.record().parameter)}" if isinstance(value, Part) else _what(value)


def _what(value: Any) -> str:
    return f"a {type(value).__name__}"
