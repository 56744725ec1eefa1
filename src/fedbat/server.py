"""The server's side of a round: decode one upload, add it, forget it. More clients take no more memory."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from threading import Lock

import numpy as np
import torch
from torch import Tensor, nn

from fedbat.contract import check_method
from fedbat.errors import ConfigError, MethodError
from fedbat.layout import Layout, layout_of, tensors_of, uncompiled
from fedbat.method import Method
from fedbat.parts import Part
from fedbat.streams import Tensors
from fedbat.training import wide
from fedbat.transfer import all_sent_to
from fedbat.wire import Payload

MAX_WEIGHT = 1e12  # the largest weight: above it, or below its inverse, sums in float32 could overflow or vanish
_ADDING = Lock()  # one for all servers, because a server with its own could not be copied or pickled


class Aggregator:
    """The weighted mean of one round's uploads: w + sum_k p'_k m_hat_k, p'_k = weight_k / sum of weights (Eq. 11).

    `received` is what clients trained from, if that is not w: weights that a method sends are then changes of it.
    """

    def __init__(self, method: Method, layout: Layout, w: Tensors, received: Tensors | None = None) -> None:
        self.method, self.layout, self.w = method, layout, w
        self._received = w if received is None else received
        self.total_weight = 0.0
        self._sums = {
            entry.name: torch.zeros(entry.numel, dtype=entry.wire_dtype, device=w[entry.name].device)
            for entry in layout.compressed
        }
        for entry in layout.rest:  # small, many, and on the CPU when they arrive, so they are added there
            self._sums[entry.name] = (
                w[entry.name].to("cpu", copy=True)
                if entry.role == "max"
                else torch.zeros(entry.numel, dtype=entry.wire_dtype, device="cpu")
            )

    def add(self, payload: Payload, weight: float) -> None:
        """Add one upload; the other weights, for p'_k, are needed only at the end."""
        weight = _checked(weight)
        for device, names in self._places(payload.parts).items():
            for name, part in _parts_on(device, {name: payload.parts[name] for name in names}).items():
                part.add_to(self._sums[name], weight)
        for entry in self.layout.rest:
            value, so_far = payload.rest[entry.name], self._sums[entry.name]
            if entry.role == "max":
                # By NumPy, because torch knows no maximum of uint16 and wider.
                np.maximum(so_far.numpy(), value.numpy(), out=so_far.numpy())
            else:
                so_far.add_(value.reshape(-1), alpha=weight)
        self.total_weight += weight

    def result(self) -> Tensors:
        """The next global tensors, in the types of w."""
        if self.total_weight == 0:
            raise MethodError("no upload was added in this round; keep the old model, or add at least one")
        change = {e.name: self._sums[e.name] if e.role == "max" else self._mean(e.name) for e in self.layout.rest}
        for device, names in self._places(change).items():
            change |= zip(names, all_sent_to(device, [change[name] for name in names]), strict=True)
        result = {
            entry.name: change[entry.name] if entry.role == "max" else self.w[entry.name] + change[entry.name]
            for entry in self.layout.rest
        }
        names = [entry.name for entry in self.layout.compressed]
        result |= self.method.aggregate({k: self.w[k] for k in names}, {k: self._mean(k) for k in names})
        if self.method.sends_weights:
            apart = [name for name in names if self._received[name] is not self.w[name]]
            result |= {name: result[name] + (self.w[name] - self._received[name]) for name in apart}
        return {entry.name: result[entry.name].to(self.w[entry.name].dtype) for entry in self.layout}

    def _places(self, names: Iterable[str]) -> dict[torch.device, list[str]]:
        """The names of these tensors by device, nearly always a single one."""
        found: dict[torch.device, list[str]] = {}
        for name in names:
            found.setdefault(self.w[name].device, []).append(name)
        return found

    def _mean(self, name: str) -> Tensor:
        return (self._sums[name] / self.total_weight).view(self.w[name].shape).to(self.w[name].device)


def _checked(weight: float) -> float:
    """The weight as a number; checked before anything is added, since half an upload would spoil the round."""
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 1 / MAX_WEIGHT <= number <= MAX_WEIGHT:
        raise ConfigError(
            f"weight={weight!r}, expected a positive number such as the client's number of samples, "
            f"from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    return number


def _parts_on(device: torch.device, parts: Mapping[str, Part]) -> dict[str, Part]:
    """The parts with all their tensors on a GPU, brought there in one copy; elsewhere, the parts as they are."""
    if device.type != "cuda":
        return dict(parts)
    fields = [(name, field) for name, part in parts.items() for field, x in vars(part).items() if torch.is_tensor(x)]
    there = all_sent_to(device, [vars(parts[name])[field] for name, field in fields])
    moved: dict[str, Tensors] = {name: {} for name in parts}
    for (name, field), tensor in zip(fields, there, strict=True):
        moved[name][field] = tensor
    return {name: replace(part, **moved[name]) for name, part in parts.items()}  # type: ignore[type-var]


def not_finite(model: Tensors, before: Tensors) -> str | None:
    """The first tensor that holds NaN or infinity where it held none before (a mask may); None if all is well."""
    for name, x in model.items():
        if x.is_floating_point() and not torch.isfinite(x).all() and not torch.equal(x, before[name]):
            return name
    return None


class Server:
    """A model that learns from uploads: `add(raw, weight=num_samples)` for each upload of a round, then `step()`.

    Uploads may be added from several threads. Half-precision models are kept in float32, too: changes smaller than
    their last digit would never add up.
    """

    def __init__(self, method: Method, model: nn.Module, *, layout: Layout | None = None) -> None:
        check_method(method)
        self.method, self.layout = method, layout or layout_of(model)
        self._model = uncompiled(model)
        self._live: Tensors = {}  # the model's own tensors
        self._true: Tensors = {}  # the same in float32
        self._look()
        self._begin_round()

    def add(self, upload: bytes | bytearray | memoryview, weight: float, *, context: int | None = None) -> None:
        """Decode one client's bytes and add them; WireError if they are not an upload for this model and method."""
        payload = Payload.from_bytes(upload, self.layout, context, self.method.kinds)
        with _ADDING:
            self._round.add(payload, weight)

    @torch.no_grad()
    def step(self) -> None:
        """Apply the mean of the uploads added since the last step to the model; if it is not finite, forget them."""
        with _ADDING:
            self._look()
            found = self._round.result()
            spoiled = not_finite(found, self._true)
            for name, value in () if spoiled else found.items():
                self._live[name].copy_(value)
                if self._true[name] is not self._live[name]:
                    self._true[name] = value
            self._begin_round()
        if spoiled:
            raise MethodError(
                f"this round's uploads would bring NaN or infinity into {spoiled}; the model is as it was and the "
                "uploads are forgotten: go on with the next round, or limit what clients may send"
            )

    def model_to_test(self) -> nn.Module:
        """A copy of the model with the weights that the method tests with: ZeroFL's are sparse, BiFL's binary."""
        model = copy.deepcopy(self._model)
        tensors = tensors_of(model, self.layout)
        with torch.no_grad():
            for name, value in self.method.evaluate({e.name: tensors[e.name] for e in self.layout.compressed}).items():
                tensors[name].copy_(value)
        return model

    def _look(self) -> None:
        """Take in the model as it is now: others may write into its tensors, or give it new ones (`model.to`)."""
        for name, x in tensors_of(self._model, self.layout).items():
            exact, kept = wide(x), self._true.get(name)
            if exact is not x and kept is not None:
                kept = kept.to(x.device)
                exact = torch.where(kept.to(x.dtype) == x, kept, exact)
            self._live[name], self._true[name] = x, exact

    def _begin_round(self) -> None:
        self._round = Aggregator(self.method, self.layout, self._true, self._live)
