"""The GPU's fused kernels, run by Triton's interpreter on the CPU, against the tensor code they stand for."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip(
    "triton", reason="Triton comes with PyTorch for NVIDIA GPUs; `pip install triton` to run these"
)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 in the environment", allow_module_level=True)

from fedbat import FedAvg, FedBAT
from fedbat.data import augment, load_dataset, normalize
from fedbat.data.datasets import Dataset
from fedbat.engine import kernels
from fedbat.engine.fused import Flat, FusedBatches, FusedFedBAT
from fedbat.method import Local

SHAPES = {"conv": (7, 5, 3, 3), "narrow": (4, 3, 3, 3), "linear": (10, 321)}


def tensors(generator, scale=1.0):
    found = {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for name, x in found.items()}


def noise_like(generator, like):
    flat = 1 - torch.rand(sum(x.numel() for x in like.values()), generator=generator)
    pieces = flat.split([x.numel() for x in like.values()])
    return {name: piece.as_strided(x.shape, x.stride()) for (name, x), piece in zip(like.items(), pieces, strict=True)}


@pytest.mark.parametrize("settings", [{}, {"bounds": None}, {"rho": 0.0}, {"step": "fixed"}, {"bounds": (1e-3, 9e-3)}])
def test_fused_steps_are_the_methods_own(settings, monkeypatch):
    # The interpreter does not know CUDA's exponential; its own differs in the last bits.
    monkeypatch.setattr(kernels, "libdevice", triton.language)
    method, lr, generator = FedBAT(phi=0.0, **settings), 0.1, torch.Generator().manual_seed(1)
    start = tensors(generator)
    flat = Flat(start)
    (flat_w, w), (flat_latent, latent), (flat_weights, weights) = flat.zeros(), flat.zeros(), flat.zeros()
    for name, x in start.items():
        w[name].copy_(x)
        latent[name].copy_(x)  # nothing has moved yet
    fused = FusedFedBAT(method, flat, flat_w, flat_latent, flat_weights, lr)
    update, learned = {name: torch.zeros_like(x) for name, x in w.items()}, method.learnables(w)
    local = Local(update, learned)
    for step in range(6):
        here = torch.Generator().manual_seed(step)
        fused.forward(here)
        local.fixed = method.prepare(w, local)
        u = noise_like(torch.Generator().manual_seed(step), w)
        seen = method.forward(w, local, u)
        grad = tensors(generator, 0.02)
        if step == 0:
            grad.pop("narrow")  # takes no part in the first forward pass
        for name in w:
            assert torch.allclose(weights[name], seen.weights[name], rtol=1e-6, atol=1e-7)  # sums round differently
        assert torch.allclose(fused.alpha, seen.shared["alpha"], rtol=1e-6)
        pulled, slopes = method.pull_back(w, local, u, seen, grad)
        fused.descend(grad)
        for name, g in pulled.items():
            trained = w[name] + local.update[name] - lr * g
            assert torch.allclose(latent[name], trained, atol=1e-6)
            local.update[name] = latent[name] - w[name]  # the same start of the next step, whatever was rounded
        for i, name in enumerate(learned):
            learned[name] = learned[name] - lr * slopes.get(name, torch.zeros(()))
            assert float(fused.alpha_e[i]) == pytest.approx(float(learned[name]), rel=1e-4, abs=1e-7)
            fused.alpha_e[i] = learned[name]
    assert (fused.alpha_prime > 0).all()


def test_what_the_kernels_do_not_say_is_left_to_the_tensor_code():
    assert FusedFedBAT.suits(FedBAT(rho=2, bounds=None)) and not FusedFedBAT.suits(FedAvg())
    for other in ({"bits": 2}, {"sent": "last"}, {"step": "inf-norm"}):
        assert not FusedFedBAT.suits(FedBAT(**other))


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_fused_batches_are_cropped_flipped_and_normalized(augmented, channels_last):
    data, rng = load_dataset("fmnist-mini"), torch.Generator().manual_seed(0)
    spec = dataclasses.replace(
        data.spec, augment=augmented, shape=(2, 28, 28), train_mean=(0.2, 0.4), train_std=(0.3, 0.5)
    )
    x = data.x_train[:200].view(100, 2, 28, 28)
    data = Dataset(spec, x, data.y_train[:100], data.x_test, data.y_test)
    order = torch.randperm(100, generator=rng)
    crop, flip = torch.randint(0, 9, (100, 2), generator=rng), torch.rand(100, generator=rng) < 0.5
    batches = FusedBatches(SimpleNamespace(data=data), x, data.y_train, channels_last)
    found, labels = batches.next(7, torch.tensor(30), order, crop, flip)
    rows = slice(30, 37)
    expected = x[order[rows]]
    if augmented:
        expected = augment(expected, crop[rows], flip[rows])
    assert torch.equal(found, normalize(expected, spec.train_mean, spec.train_std))
    assert torch.equal(labels, data.y_train[order[rows]])
