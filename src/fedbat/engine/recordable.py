"""Whether a model's steps can be recorded: tensors must stay where they are, and no dice be rolled on the host."""

import copy
import random
from contextlib import suppress

import numpy as np
import torch
from torch import nn

from fedbat.errors import ConfigError
from fedbat.experiment import Federation

_INSTEAD = "use --engine sequential --device cuda, which does without recorded steps"


class CannotRecordError(ConfigError):
    """A model whose recorded step, when replayed, would not do what the model does."""


def check_recordable(federation: Federation, device: torch.device) -> None:
    """Show a copy of the model two blank images, and refuse what would silently go wrong."""
    model = copy.deepcopy(federation.model).to(device).train()
    images = torch.zeros(2, *federation.data.spec.shape, device=device)
    before, dice, numpys = _tensors(model), random.getstate(), np.random.get_state()
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        host = torch.get_rng_state()
        with suppress(Exception):  # a faulty model fails in training, and says why
            model(images)
        drawn = random.getstate() != dice or str(np.random.get_state()) != str(numpys)
        drawn |= device.type == "cuda" and not torch.equal(torch.get_rng_state(), host)
    random.setstate(dice)
    np.random.set_state(numpys)
    if moved := [name for name, x in _tensors(model).items() if x is not before.get(name)]:
        raise CannotRecordError(
            f"the model's forward pass replaces {moved[0]}, which the cuda engine would not notice; write into it "
            f"instead (self.x.copy_(...)), or {_INSTEAD}"
        )
    if drawn:
        raise CannotRecordError(
            "the model's forward pass draws random numbers on the host, which a recorded step would do only once; "
            f"draw them on the device (torch.rand(..., device=x.device)), or {_INSTEAD}"
        )


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
