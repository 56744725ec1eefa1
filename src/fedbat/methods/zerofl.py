"""ZeroFL: "Efficient On-Device Training for Federated Learning with Local Sparsity", ICLR 2022, arXiv 2208.02507.

Local training is SWAT ("Sparse Weight Activation Training", NeurIPS 2020): the forward pass uses only the largest
weights, the backward pass the same sparse weights and the largest activations; gradients are dense and all weights are
updated. Then the largest entries travel. The model must be tested sparse, too: trained this way, it fails when dense.

Decisions where the papers are silent or differ:
- The FedBAT paper "prunes the model updates", sparsity 97 %: the default is the variant `weights-diff` with `extra`
  (r_mask) 0.
- As in SWAT's code, the first layer (the first compressed tensor of the model) is trained dense; its upload is pruned
  like every other.
- The largest entries are found anew in every step; SWAT's code reuses its thresholds for ten steps to save time.
- Exactly ceil((1 - sparsity) d) entries stay; SWAT's threshold lets ties through.
- Activations are sparsified over the whole mini-batch tensor, as in SWAT's code, in convolution and linear modules;
  weights used in other ways (embeddings, attention's own projections) are sparse, their inputs are not.
- That takes hooks, which code compiled by torch.compile may not call: `begin` refuses compiled models.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedbat.binarize import keep_top, top_indices
from fedbat.method import Forward, Local, Method, Step
from fedbat.parts import Kind, Part, Sparse
from fedbat.settings import check_choice, check_range
from fedbat.streams import Noise, Tensors

Variant = Literal["weights", "diff-on-weights", "weights-diff"]
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class ZeroFL(Method):
    """Trains sparse (SWAT) and sends the largest values: 1 - sparsity + extra of each layer."""

    sparsity: Annotated[float, "share of a layer that is not sent"] = 0.97
    train_sparsity: Annotated[float | None, "of training and tests; off: as sparsity; 0: dense"] = None
    extra: Annotated[float, "share that is sent beyond 1 - sparsity, r_mask"] = 0.0
    variant: Annotated[Variant, "what is sent, and by whose magnitude it is chosen"] = "weights-diff"
    sparse_first_layer: Annotated[bool, "train the first layer sparse, too"] = False
    test_dense: Annotated[bool, "test with all weights"] = False

    kinds = (Kind(Sparse, None),)  # any parameter: it tells how positions are coded

    def __post_init__(self) -> None:
        check_range("sparsity", self.sparsity, 0, 0.9999, "the paper uses 0.97")
        if self.train_sparsity is not None:
            check_range("train_sparsity", self.train_sparsity, 0, 0.9999, "off is that of the upload")
        check_range("extra", self.extra, 0, self.sparsity, "it is r_mask; extra=sparsity sends everything")
        check_choice("variant", self.variant, Variant)

    @property
    def sends_weights(self) -> bool:
        """The variant `weights` sends weights, zeros elsewhere, and the server averages the zeros in."""
        return self.variant == "weights"

    def alters_forward(self, step: Step) -> bool:
        """SWAT sparsifies from the first step, unless training is dense."""
        return self._train_sparsity > 0

    def forward(self, w: Tensors, local: Local, u: Tensors) -> Forward:
        """topk(w + m): each layer's largest weights."""
        return Forward(self._sparse({name: w[name] + m for name, m in local.update.items()}))

    def pull_back(self, w: Tensors, local: Local, u: Tensors, seen: Forward, grad: Tensors) -> tuple[Tensors, Tensors]:
        """Dense gradients: they pass straight through to all weights, kept or not."""
        return grad, {}

    def encode(self, w: Tensors, local: Local, memory: Tensors, noise: Noise) -> tuple[dict[str, Part], Tensors]:
        """The largest entries and where they are."""
        parts: dict[str, Part] = {}
        for name, m in local.update.items():
            trained = w[name] + m
            largest = m if self.variant == "weights-diff" else trained
            sent = trained if self.variant == "weights" else m
            index = top_indices(largest, 1 - self.sparsity + self.extra)
            parts[name] = Sparse(index, sent.reshape(-1)[index].float(), m.numel())
        return parts, memory

    def aggregate(self, w: Tensors, mean: Tensors) -> Tensors:
        """The mean of weights, or w plus the mean of updates."""
        return mean if self.sends_weights else super().aggregate(w, mean)

    def evaluate(self, w: Tensors) -> Tensors:
        """Tested as trained: sparse, unless told otherwise."""
        return w if self.test_dense or not self._train_sparsity else self._sparse(w)

    @property
    def _train_sparsity(self) -> float:
        return self.sparsity if self.train_sparsity is None else self.train_sparsity

    def _sparse(self, w: Tensors) -> Tensors:
        dense = () if self.sparse_first_layer else (next(iter(w), None),)
        return {name: x if name in dense else keep_top(x, 1 - self._train_sparsity) for name, x in w.items()}

    def instrument(self, model: nn.Module, names: list[str]) -> list[RemovableHandle]:
        """Let convolutions and linear layers save sparse inputs for their backward pass."""
        if not self._train_sparsity:
            return []
        trained_sparse = names if self.sparse_first_layer else names[1:]
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, _LAYERS) and f"{name}.weight".removeprefix(".") in trained_sparse:
                handles += self._save_sparse_input(module)
        return handles

    def _save_sparse_input(self, module: nn.Module) -> list[RemovableHandle]:
        open_hooks: list[Any] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            activations = (*args, *kwargs.values())[0]

            def pack(saved: Tensor) -> Tensor:
                # The input may be saved flattened or cast. A weight of the same size is already sparse: no harm done.
                return keep_top(saved, 1 - self._train_sparsity) if saved.numel() == activations.numel() else saved

            context = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
            context.__enter__()
            open_hooks.append(context)

        def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            open_hooks.pop().__exit__(None, None, None)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, always_call=True),
        ]
