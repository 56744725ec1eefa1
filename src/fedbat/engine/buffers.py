"""What slots are made of: tensors that stay where they are, work recorded on them, noise that can restart."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedbat.streams import Tensors, UniformNoise, stream_seed


def record(
    work: Callable[[], None], pool: Any = None, generator: torch.Generator | None = None
) -> torch.cuda.CUDAGraph:
    """Record work as torch.cuda.graph does, but without stopping the other streams to collect garbage."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph


def halve(model: nn.Module) -> Tensors:
    """Give every plain convolution and linear layer a bfloat16 weight, to be refreshed from the float32 one."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    halves: Tensors = {}
    for name, module in model.named_modules():
        # Exactly these, whose weights autocast would cast anyway; a subclass may use its weight in other ways.
        if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear) and "weight" in module._parameters:
            weight = module.weight
            if weight.dtype == torch.float32 and weight.requires_grad and owners[id(weight)] == 1:
                module.weight = nn.Parameter(weight.detach().to(torch.bfloat16))
                halves[f"{name}.weight".removeprefix(".")] = module.weight.data
    return halves


def default_generator(device: torch.device) -> torch.Generator:
    """PyTorch's own generator for this device."""
    if device.type == "cpu":
        return torch.default_generator
    generator: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return generator


def copy_all(to: Tensors, source: Tensors) -> None:
    """to[name] <- source[name] for every name both have."""
    names = [name for name in source if name in to]
    if names:
        torch._foreach_copy_([to[name] for name in names], [source[name] for name in names])


def descend(x: Tensors, grads: Tensors, lr: float) -> None:
    """x <- x - lr grad, where there is a gradient; one in half precision is read as it is."""
    alike = [name for name, grad in grads.items() if grad.dtype == x[name].dtype]
    if alike:
        torch._foreach_add_([x[name] for name in alike], [grads[name] for name in alike], alpha=-lr)
    for name, grad in grads.items():
        if name not in alike:  # the call above would cast these first
            x[name].add_(grad, alpha=-lr)


def zeros(like: Tensors) -> Tensors:
    """Zeros of the same shapes and strides."""
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


class RestartableNoise(UniformNoise):
    """UniformNoise that can be restarted, because graphs hold on to their generator."""

    @property
    def generator(self) -> torch.Generator:
        """The generator to register with every graph that draws."""
        return self._generator

    def restart(self, seed: int, *key: int) -> None:
        """From here on, draw the numbers of UniformNoise(seed, "noise", *key)."""
        if self.device.type == "cpu":
            self.__init__(seed, "noise", *key)  # type: ignore[misc]
        else:
            self._generator.manual_seed(stream_seed(seed, "noise", *key))
