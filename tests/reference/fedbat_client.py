"""Algorithm 1's client, written out with explicit autograd on (v = w + m, alpha_e): slow and obvious."""

from math import floor

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedbat.binarize import binarize

SHARES = {1: 1.0, 2: 0.53, 3: 0.33, 4: 0.19}  # alpha' / mean|m|


def train(model, names, batches, *, make_optimizer, rho, phi, bounds, noises, last_noise, bits=1):
    """Train at w + S(m, alpha); `noises` yields a dict of u for every binarized forward pass.

    Returns, for every layer, the final m, the final alpha and the sent S drawn with `last_noise`. Tensors that are not
    in `names` are trained in place.
    """
    w = {k: p.detach().clone() for k, p in model.named_parameters() if k in names}
    others = {k: p for k, p in model.named_parameters() if k not in names}
    v = {k: nn.Parameter(x.clone()) for k, x in w.items()}
    alpha_e = {k: nn.Parameter(torch.zeros((), dtype=x.dtype)) for k, x in w.items()}
    alpha_prime = dict.fromkeys(w, 0)
    optimizer = make_optimizer([*v.values(), *others.values(), *alpha_e.values()])

    def alpha_of(k):
        if alpha_prime[k] == 0:
            return 0 * alpha_e[k]  # binarized, but not set yet: alpha_e has a gradient, and it is zero
        alpha = alpha_prime[k] * torch.exp(rho * alpha_e[k])
        return alpha if bounds is None else alpha.clamp(*(SHARES[bits] * bound for bound in bounds))

    for s, (x, y) in enumerate(batches):
        binarized = s >= floor(phi * len(batches))
        if binarized:
            u = next(noises)
            for k in w:
                if alpha_prime[k] == 0:
                    alpha_prime[k] = SHARES[bits] * (v[k] - w[k]).detach().abs().mean()
        seen = {k: w[k] + binarize(v[k] - w[k], alpha_of(k), u[k], bits) if binarized else v[k] for k in w}
        optimizer.zero_grad()
        F.cross_entropy(functional_call(model, seen | others, (x,)), y).backward()
        optimizer.step()
    with torch.no_grad():
        m = {k: v[k] - w[k] for k in w}
        alpha = {k: alpha_of(k) for k in w}
        return m, alpha, {k: binarize(m[k], alpha[k], last_noise[k], bits) for k in w}
