"""The way home of a client's upload: everything the host needs in one buffer, so that one copy brings it."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fedbat.layout import Layout
from fedbat.parts import Part
from fedbat.streams import Tensors
from fedbat.training import LayerReport, layer_reports, measure_layers
from fedbat.wire import Payload


class Outbox:
    """Filled where the client was trained (this can be recorded), opened on the CPU when the copy has arrived."""

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
        # Wide types first, so that each lies at a multiple of its own size.
        self._keys = sorted(tensors, key=lambda key: -tensors[key].element_size())
        self._like = [torch.empty_like(tensors[key], device="meta") for key in self._keys]
        flat = torch.cat([tensors[key].contiguous().reshape(-1).view(torch.uint8) for key in self._keys])
        self._home = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda).copy_(flat, non_blocking=True)

    def open(self, layout: Layout, context: int) -> tuple[Payload, Tensors, float, dict[str, LayerReport]]:
        """Payload, memory, sum of losses, reports: own copies, because the next client will fill the same box."""
        home, found, start = self._home.clone(), {}, 0
        for key, like in zip(self._keys, self._like, strict=True):
            stop = start + like.numel() * like.element_size()
            found[key] = home[start:stop].view(like.dtype).view(like.shape)
            start = stop
        fields: dict[str, Tensors] = {name: {} for name in self._parts}
        for name, key in self._names["parts"]:
            fields[name][key] = found["parts", (name, key)]
        parts = {name: dataclasses.replace(part, **fields[name]) for name, part in self._parts.items()}  # type: ignore[type-var]
        rest = {name: found["rest", name] for name in self._names["rest"]}
        # The memory is kept for long: it must not keep the rest alive.
        memory = {name: found["memory", name].clone() for name in self._names["memory"]}
        reports = layer_reports(parts, found["figures", ""])
        return Payload(layout, parts, rest, context), memory, float(found["loss", ""]), reports
