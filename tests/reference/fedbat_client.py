"""Algorithm 1's client, written out with explicit autograd on (m, alpha_e): slow and obvious."""

from math import floor

import torch
from torch.func import functional_call

from fedbat.binarize import binarize


def train(model, names, batches, *, lr, rho, phi, bounds, noises):
    """Plain SGD on (m, alpha_e) at w + S(m, alpha); `noises` yields a dict of u for every binarized forward pass.

    Returns the final m and alpha of every layer. Tensors that are not in `names` are trained in place.
    """
    w = {k: p.detach().clone() for k, p in model.named_parameters() if k in names}
    others = {k: p for k, p in model.named_parameters() if k not in names}
    m = {k: torch.zeros_like(x).requires_grad_() for k, x in w.items()}
    alpha_e = {k: torch.zeros((), dtype=x.dtype, requires_grad=True) for k, x in w.items()}
    alpha_prime = {}

    def alpha_of(k):
        if alpha_prime.get(k, 0) == 0:
            return torch.zeros((), dtype=w[k].dtype)
        alpha = alpha_prime[k] * torch.exp(rho * alpha_e[k])
        return alpha if bounds is None else alpha.clamp(*bounds)

    for s, (x, y) in enumerate(batches):
        binarized = s >= floor(phi * len(batches))
        if binarized:
            u = next(noises)
            for k in w:
                if alpha_prime.get(k, 0) == 0:
                    alpha_prime[k] = m[k].detach().abs().mean()
        seen = {k: w[k] + (binarize(m[k], alpha_of(k), u[k]) if binarized else m[k]) for k in w}
        loss = torch.nn.functional.cross_entropy(functional_call(model, seen | others, (x,)), y)
        leaves = [*m.values(), *alpha_e.values(), *others.values()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        with torch.no_grad():
            for leaf, g in zip(leaves, grads, strict=True):
                if g is not None:
                    leaf -= lr * g
    return {k: v.detach() for k, v in m.items()}, {k: alpha_of(k).detach() for k in w}
