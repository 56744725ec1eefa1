"""What a method is: FedAvg, and the few places where the other papers differ from it.

A client receives w, trains the update m (the model computes with w + m), and sends a compressed m. A method may change
what the forward pass sees, what is learned alongside m, what is sent, and how the server uses it. Everything is
tensors in, tensors out; noise is an argument; a method holds its hyper-parameters and nothing else.

Methods see only the tensors that are compressed: none has to deal with BatchNorm, engines, devices or files.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedbat.parts import Dense, Kind, Part
from fedbat.streams import Noise, Tensors


@dataclass(frozen=True)
class Step:
    """How far local training has come: step `index` (from 0) of an announced `total` of tau."""

    index: int
    total: int


@dataclass(frozen=True)
class Forward:
    """What one forward pass computes with, and what pull_back and encode need to know about it later."""

    weights: Tensors  # in place of w + m
    kept: Tensors = field(default_factory=dict)  # by layer
    shared: Tensors = field(default_factory=dict)  # of all layers together


@dataclass
class Local:
    """One client in one round."""

    update: Tensors  # m
    learned: Tensors = field(default_factory=dict)  # trained alongside m by the same optimizer (FedBAT: alpha_e)
    fixed: Tensors = field(default_factory=dict)  # carried along, not trained (FedBAT: alpha')
    last: Forward | None = None  # what was kept of the last forward pass that was trained on
    progress: Tensor | None = None  # share of the steps done so far, s / tau; set before an altered forward pass


@dataclass(frozen=True)
class Method:
    """FedAvg (McMahan et al., AISTATS 2017): the update travels in full precision, the server adds the mean."""

    noisy_forward: ClassVar[bool] = False
    """`forward` uses noise."""

    needs_progress: ClassVar[bool] = False
    """`forward` asks for `local.progress`, and knows the first step by `local.last` being None."""

    @property
    def remembers(self) -> bool:
        """Whether `encode` needs the memory that it returned in this client's last round; {} in its first."""
        return False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of parts that `encode` may return; an upload with any other is refused."""
        return (Kind(Dense),)

    @property
    def sends_weights(self) -> bool:
        """Whether the parts hold weights rather than updates."""
        return False

    @property
    def step_bounds(self) -> tuple[float, float] | None:
        """The range of the step sizes it sends, if limited; 0 is always allowed, for layers that have not moved."""
        return None

    def learnables(self, w: Tensors) -> Tensors:
        """Initial values of what is learned alongside m, by the layer they belong to."""
        return {}

    def alters_forward(self, step: Step) -> bool:
        """Whether the model computes with something other than w + m in this step."""
        return False

    def prepare(self, w: Tensors, local: Local) -> Tensors:
        """The `local.fixed` that the altered forward pass, or the encoding, is about to use.

        Zero means "not set yet", and nonzero values stay: engines that record steps keep them as they are.
        """
        return local.fixed

    def forward(self, w: Tensors, local: Local, u: Tensors) -> Forward:
        """What the model computes with in place of w + m."""
        return Forward({name: w[name] + m for name, m in local.update.items()})

    def pull_back(self, w: Tensors, local: Local, u: Tensors, seen: Forward, grad: Tensors) -> tuple[Tensors, Tensors]:
        """Gradients of m and of the learnables from grad = dL/d(seen weights).

        This default differentiates `forward` by autograd: slow, obvious, and right for any method whose forward is
        written with `straight_through`. A method may provide a closed form instead.
        """
        if not grad:
            return {}, {}
        with torch.enable_grad():
            update = {name: m.detach().requires_grad_() for name, m in local.update.items()}
            learned = {name: value.detach().requires_grad_() for name, value in local.learned.items()}
            weights = self.forward(w, replace(local, update=update, learned=learned), u).weights
            found = torch.autograd.grad(
                [weights[name] for name in grad],
                [*(update[name] for name in grad), *learned.values()],
                list(grad.values()),
                allow_unused=True,
                materialize_grads=True,
            )
        return dict(zip(grad, found, strict=False)), dict(zip(learned, found[len(grad) :], strict=True))

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """The parts to send, and the memory this client keeps until it is sampled again."""
        return {name: Dense(m.reshape(-1).float()) for name, m in local.update.items()}, memory

    def aggregate(self, w: Tensors, mean: Tensors) -> Tensors:
        """The server's next weights from the weighted mean of what was sent."""
        return {name: w[name] + mean[name] for name in w}

    def evaluate(self, w: Tensors) -> Tensors:
        """The weights that the test pass computes with."""
        return w

    def instrument(self, model: nn.Module, names: list[str]) -> list[RemovableHandle]:
        """Hooks that local training needs beyond the weights (ZeroFL: sparse activations)."""
        return []

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
