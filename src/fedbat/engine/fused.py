"""Work whose many small kernels would dominate a step: batches and FedBAT's binarization, each in a few fused kernels.

Used where Triton can compile (it comes with PyTorch for NVIDIA GPUs, and needs a C compiler); elsewhere the engine
runs the tensor code that these kernels follow.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from fedbat.data import normalize
from fedbat.data.transforms import PADDING
from fedbat.engine.launch import launch
from fedbat.experiment import Federation
from fedbat.method import Method
from fedbat.methods.fedbat import FedBAT
from fedbat.streams import Tensors

_BLOCK = 1024


@cache
def can_fuse() -> bool:
    """Whether Triton compiles and runs kernels here."""
    try:
        from fedbat.engine import kernels

        cell = torch.zeros(1, device="cuda")
        double = torch.zeros(1, device="cuda", dtype=torch.float64)
        kernels.fedbat_settle[(1,)](cell, cell, double, double, 1, 0.1, LAYERS=1)
    except Exception as error:  # a missing compiler or an odd driver may raise anything
        warnings.warn(f"steps are not fused, and slower: Triton cannot compile here ({error!r})", stacklevel=2)
        return False
    return True


class Flat:
    """All layers of a model in one buffer, each starting a new block."""

    def __init__(self, like: Tensors) -> None:
        self.like = like
        self.device = next(iter(like.values())).device
        numel = torch.tensor([x.numel() for x in like.values()])
        blocks = -(-numel // _BLOCK)
        self.num_blocks = int(blocks.sum())
        self.first = (blocks.cumsum(0) - blocks).int().to(self.device)
        self.layer_of = torch.repeat_interleave(torch.arange(len(like)), blocks).int().to(self.device)
        self.numel = numel.int().to(self.device)
        self.noise_start = (numel.cumsum(0) - numel).to(self.device)  # noise is drawn without gaps
        self.num_noise = int(numel.sum())

    def zeros(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensors]:
        """A buffer, and each layer in it with its own shape and strides."""
        flat = torch.zeros(self.num_blocks * _BLOCK, dtype=dtype, device=self.device)
        views = {
            name: flat.as_strided(x.shape, x.stride(), block * _BLOCK)
            for (name, x), block in zip(self.like.items(), self.first.tolist(), strict=True)
        }
        return flat, views


class FusedFedBAT:
    """FedBAT's altered steps for all layers at once: the same numbers as the method's own forward and pull_back."""

    def __init__(self, method: FedBAT, flat: Flat, w: Tensor, latent: Tensor, weights: Tensor, lr: float) -> None:
        self.method, self.flat, self.w, self.latent, self.weights, self.lr = method, flat, w, latent, weights, lr
        num = len(flat.like)
        self.alpha_prime, self.alpha_e, self.alpha, self.pace = torch.zeros(4, num, device=flat.device).unbind()
        self.magnitude, self.slope = torch.zeros(2, num, device=flat.device, dtype=torch.float64).unbind()
        self.grad, self.grads = flat.zeros()
        self._tables = flat.layer_of, flat.first, flat.numel

    @staticmethod
    def suits(method: Method) -> bool:
        """Whether these kernels compute what this method does."""
        return type(method) is FedBAT and method.step != "inf-norm" and method.sent == "fresh" and method.bits == 1

    def forward(self, generator: torch.Generator) -> None:
        """weights <- w + S(m, alpha)."""
        from fedbat.engine import kernels

        flat, bounds = self.flat, self.method.bounds
        self.noise = torch.rand(flat.num_noise, generator=generator, device=flat.device)
        grid = (flat.num_blocks,)
        launch(kernels.fedbat_measure, grid)(
            self.latent, self.w, self.alpha_prime, self.magnitude, *self._tables, BLOCK=_BLOCK
        )
        launch(kernels.fedbat_forward, grid)(
            self.latent, self.w, self.noise, flat.noise_start, self.weights,
            self.alpha_prime, self.alpha_e, self.magnitude, self.alpha, self.pace, *self._tables,
            self._rho, *(bounds or (0.0, 0.0)), BOUNDED=bounds is not None, BLOCK=_BLOCK,
        )  # fmt: skip

    def descend(self, grads: Tensors) -> None:
        """One step of m and alpha_e, from the gradients of the weights."""
        from fedbat.engine import kernels

        flat = self.flat
        torch._foreach_copy_([self.grads[name] for name in grads], list(grads.values()))
        launch(kernels.fedbat_backward, (flat.num_blocks,))(
            self.latent, self.w, self.noise, flat.noise_start, self.grad, self.alpha, self.slope, *self._tables,
            self.lr, BLOCK=_BLOCK,
        )  # fmt: skip
        num = len(flat.like)
        launch(kernels.fedbat_settle, (1,))(
            self.alpha_e, self.pace, self.slope, self.magnitude, num, self.lr, LAYERS=1 << (num - 1).bit_length()
        )

    @property
    def _rho(self) -> float:
        return float(self.method.rho) if self.method.step == "learned" else 0.0


class FusedBatches:
    """The training set on the device, from which the next batch is gathered, augmented and normalized in one kernel."""

    def __init__(self, federation: Federation, x: Tensor, y: Tensor, channels_last: bool) -> None:
        self.spec, self.x, self.y, self.channels_last = federation.data.spec, x, y, channels_last
        every = torch.arange(256, dtype=torch.uint8, device=x.device).expand(self.spec.shape[0], 1, 256)
        self.table = normalize(every, self.spec.train_mean, self.spec.train_std).contiguous()  # [C, 1, 256]

    def next(self, size: int, at: Tensor, order: Tensor, crop: Tensor, flip: Tensor) -> tuple[Tensor, Tensor]:
        """The next `size` samples from position `at` of the drawn order on."""
        from fedbat.engine import kernels

        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        x = torch.empty(size, *self.spec.shape, device=self.x.device, memory_format=memory_format)
        y = torch.empty(size, dtype=self.y.dtype, device=self.x.device)
        c, h, w = self.spec.shape
        kernels.gather_batch[(size, -(-c * h * w // _BLOCK))](
            self.x, self.y, order, crop, flip, at, self.table, x, y, C=c, H=h, W=w, PADDING=PADDING,
            AUGMENT=self.spec.augment, CHANNELS_LAST=self.channels_last, BLOCK=_BLOCK,
        )  # fmt: skip
        return x, y
