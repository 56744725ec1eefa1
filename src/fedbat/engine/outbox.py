"""A client's upload on its way to the host: everything the host needs in one buffer, so that one copy brings it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fedbat.layout import Layout
from fedbat.parts import Part
from fedbat.streams import Tensors
from fedbat.training import LayerReport, layer_reports, measure_layers
from fedbat.transfer import Box
from fedbat.wire import Payload


class Outbox:
    """Filled on the device where the client was trained (this can be recorded), opened on the CPU once copied there."""

    def __init__(
        self, update: Tensors, w: Tensors, parts: dict[str, Part], memory: Tensors, rest: Tensors, loss: Tensor
    ) -> None:
        """`w` is what the parts are relative to, if they hold weights."""
        sent = {name: part.unpack().view_as(update[name]) for name, part in parts.items()}
        sent |= {name: sent[name] - w[name] for name in w}
        self._parts = parts
        self._names: dict[str, list[Any]] = {
            "parts": [(n, key) for n, part in parts.items() for key, x in vars(part).items() if torch.is_tensor(x)],
            "memory": list(memory),
            "rest": list(rest),
        }
        tensors = {("parts", name): vars(parts[name[0]])[name[1]] for name in self._names["parts"]}
        tensors |= {("memory", name): x for name, x in memory.items()}
        tensors |= {("rest", name): x for name, x in rest.items()}
        tensors |= {("loss", ""): loss, ("figures", ""): measure_layers(update, sent, parts)}
        self._keys = list(tensors)
        self._box = Box(list(tensors.values()))
        flat = self._box.fill(list(tensors.values()))
        self._home = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda).copy_(flat, non_blocking=True)

    def open(self, layout: Layout, context: int) -> tuple[Payload, Tensors, float, dict[str, LayerReport]]:
        """Payload, memory, sum of losses, reports: all copies, because the next client will fill the same box."""
        found = dict(zip(self._keys, self._box.views(self._home.clone()), strict=True))
        fields: dict[str, Tensors] = {name: {} for name in self._parts}
        for name, key in self._names["parts"]:
            fields[name][key] = found["parts", (name, key)]
        parts = {name: dataclasses.replace(part, **fields[name]) for name, part in self._parts.items()}  # type: ignore[type-var]
        rest = {name: found["rest", name] for name in self._names["rest"]}
        # The memory is kept for long and must not keep the rest alive.
        memory = {name: found["memory", name].clone() for name in self._names["memory"]}
        reports = layer_reports(parts, found["figures", ""])
        return Payload(layout, parts, rest, context), memory, float(found["loss", ""]), reports
