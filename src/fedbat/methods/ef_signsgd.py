"""EF-SignSGD: "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019, arXiv 1901.09847.

Each client remembers what its last message left out and adds it to its next update. The memory belongs to the client,
not to the worker that happens to run it, and waits untouched while the client is not sampled.

As in Karimireddy et al., the step size is ||p||_1 / d of the corrected update p = m + e, layer by layer; the FedBAT
paper writes ||m||_1 / d (`scale=update`), and could mean one for the whole model (`scope=model`). The learning rate is
already contained in m. sign(0) is a fair coin.

`memory=off` forgets what was left out: plain signs with one L1 scale per layer, a control that no paper here runs.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedbat.binarize import mean_abs, sign_or_coin
from fedbat.errors import MethodError
from fedbat.method import Local, Method
from fedbat.parts import Kind, Part, Signs
from fedbat.settings import check_choice
from fedbat.streams import Noise, Tensors

Scale = Literal["corrected", "update"]
Scope = Literal["layer", "model"]


@dataclass(frozen=True)
class EFSignSGD(Method):
    """Signs of m plus what earlier messages left out: p = m + e, m_hat = ||p||_1 / d sign(p), e <- p - m_hat."""

    memory: Annotated[bool, "of what earlier messages left out"] = True
    scale: Annotated[Scale, "whose mean magnitude the step size is: that of m + e, or of m"] = "corrected"
    scope: Annotated[Scope, "what has a step size of its own"] = "layer"

    kinds = (Kind(Signs),)

    @property
    def remembers(self) -> bool:
        """True unless `memory` is off."""
        return self.memory

    def __post_init__(self) -> None:
        check_choice("scale", self.scale, Scale)
        check_choice("scope", self.scope, Scope)

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """The compressed p = m + e, and what compression left out."""
        for name in memory.keys() & local.update.keys():
            if memory[name].shape != local.update[name].shape:
                raise MethodError(
                    f"the memory of {name} has shape {list(memory[name].shape)}, expected that of the layer, "
                    f"{list(local.update[name].shape)}; it is of another model: pass memory={{}} to begin anew"
                )
        u = noise(local.update)
        corrected = {name: m + memory[name] if name in memory else m for name, m in local.update.items()}
        steps = self._steps(corrected if self.scale == "corrected" else local.update)
        parts: dict[str, Part] = {}
        left: Tensors = {}
        for name, p in corrected.items():
            parts[name] = Signs.of(sign_or_coin(p, u[name]), steps[name])
            if self.memory:
                left[name] = p - parts[name].unpack().view(p.shape)
        return parts, left

    def _steps(self, x: Tensors) -> Tensors:
        """||x||_1 / d of each layer, or of all together."""
        steps = {name: mean_abs(layer) for name, layer in x.items()}
        if self.scope == "layer":
            return steps
        total = sum(layer.numel() for layer in x.values())
        whole = torch.stack([steps[name] * (layer.numel() / total) for name, layer in x.items()]).sum()
        return dict.fromkeys(x, whole)
