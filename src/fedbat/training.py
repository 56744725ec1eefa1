"""Local training in the user's own loop: values go into the parameters, gradients are pulled back.

The user's model, optimizer and loop stay as they are. `begin` hooks the optimizer (and, for ZeroFL, layers):

    before the forward pass   the parameters hold what the method wants the model to compute with;
    before optimizer.step()   their gradients are pulled back to m and to what is learned alongside it, and the
                              parameters hold w + m, so that the optimizer moves m;
    after it                  the next values go in.

While a method computes with w + m itself (FedAvg, the sign methods, FedBAT's warm-up), a step costs nothing extra.
The optimizer sees w + m, not m: momentum and Adam cannot tell the difference, and weight decay acts on the weights, as
users expect (and on what is learned alongside them). Noise is drawn once per optimizer step, so it is constant across
accumulated micro-batches.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex, SupportsInt
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fedbat import contract
from fedbat.errors import ConfigError, MethodError
from fedbat.layout import Layout, layout_of, tensors_of, uncompiled
from fedbat.method import Forward, Local, Method, Step
from fedbat.onepass import OnePass
from fedbat.parts import Part
from fedbat.streams import Noise, Tensors, UniformNoise
from fedbat.wire import Payload


class LayerReport(NamedTuple):
    """How well one layer's update survived compression."""

    relative_error: float  # ||sent - m|| / ||m||, 0 if m = 0
    step: float | None  # the step size sent
    clipped: float | None  # share of |m| beyond what the part can express


class Upload(NamedTuple):
    """What a client returns after a round."""

    payload: Payload
    memory: Tensors  # to be handed to this client's next `begin`
    num_steps: int
    layers: dict[str, LayerReport]

    def to_bytes(self) -> bytes:
        """The payload as it travels."""
        return self.payload.to_bytes()

    def __repr__(self) -> str:
        parts = {type(part).__name__ for part in self.payload.parts.values()}
        what = f"{len(self.payload.parts)} of {len(self.payload.layout)} tensors as {' and '.join(sorted(parts))}"
        return f"Upload({what if parts else 'nothing compressed'}, {self.num_steps} steps)"


_HOOKED: WeakSet[Optimizer] = WeakSet()  # two rounds at once on one optimizer would pull gradients back twice


class LocalTraining:
    """One client in one round: `begin` with the received model, train as usual, `finish`.

    `num_steps` announces how often optimizer.step() will be called (FedBAT's tau). `memory` is what this client's last
    upload returned (error feedback), {} in its first round. `noise` makes the run repeatable: UniformNoise(seed,
    "noise", round, client), with `device=` where the model is not on the CPU. `context` travels with the upload, for
    the server to check. Used as a context manager, it unhooks itself whatever happens. This is the only stateful piece
    of local training.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        optimizer: Optimizer,
        num_steps: int,
        *,
        layout: Layout | None = None,
        memory: Tensors | None = None,
        noise: Noise | None = None,
        context: int = 0,
    ) -> None:
        contract.check_method(method)
        if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"model is of type {type(model).__name__}, optimizer of type {type(optimizer).__name__}, expected an "
                "nn.Module and a torch.optim.Optimizer; the order is begin(method, model, optimizer, num_steps)"
            )
        compiled, model = _is_compiled(model), uncompiled(model)
        held = _held_by(optimizer)
        if not any(id(p) in held for p in model.parameters()):
            raise MethodError("the optimizer holds no parameter of this model; make it from model.parameters()")
        if optimizer in _HOOKED:
            raise MethodError("this optimizer is in a round already; call finish() or leave its `with` block first")
        if not isinstance(num_steps, SupportsInt) or not 1 <= num_steps < float("inf") or num_steps != int(num_steps):
            raise ConfigError(f"num_steps={num_steps!r}, expected the number of optimizer steps to come, at least 1")
        if not isinstance(context, SupportsIndex) or not 0 <= context < 2**64:
            raise ConfigError(f"context={context!r}, expected a whole number from 0 to 2^64 - 1, such as the round")
        if memory is None and method.remembers:
            raise ConfigError(
                f"{type(method).__name__} adds what this client's last upload left out, but no memory was given; "
                "pass memory=upload.memory of its last round, or {} in its first"
            )
        if memory and not method.remembers:
            raise ConfigError(
                f"memory has {len(memory)} tensors, but {type(method).__name__} with these settings remembers nothing, "
                "so they would be lost; pass memory={} or the method whose upload.memory it is"
            )
        self.method, self.layout, self.context = method, layout or layout_of(model), context
        self.memory = memory or {}
        self.step = Step(0, num_steps)
        self._will_alter = method.alters_forward(Step(num_steps, num_steps))
        # `_start` and `_w` hold what was received (w), the parameters' own memory `_live` holds w + m; while a method
        # computes with something else (w + S), the parameters point at that.
        self._live = tensors_of(model, self.layout)
        self._start = {name: tensor.clone() for name, tensor in self._live.items()}
        self._w = {entry.name: wide(self._start[entry.name]) for entry in self.layout.compressed}
        self._parameters = {name: p for name, p in model.named_parameters() if name in self._w}
        self._model, self._put = model, _marks(self._parameters)
        self._noise = noise or UniformNoise(secrets.randbits(63), "local", device=_device(self._live))
        self._local = Local({}, {k: nn.Parameter(x) for k, x in contract.learnables(method, self._w).items()})
        self._one_pass = OnePass.of(method, self._w, self._live, self._noise)
        self._by: Method | OnePass = method  # what computes this step
        self._seen: Forward | None = None
        self._u: Tensors = {}
        self._optimizer = optimizer
        self._handles: list[RemovableHandle] = []
        try:
            self._hook(model, compiled)
        except BaseException:
            self._release()  # nobody else has this object to do so
            raise

    @torch.no_grad()
    def finish(self) -> Upload:
        """Encode the update, leave in the model exactly what was sent, and unhook."""
        if not self._handles:
            raise MethodError("finish() was called after training had ended; call it once, inside the `with` block")
        self._take_in()
        update = self._update()
        if self._will_alter and not self.step.index and any(m.any() for m in update.values()):
            raise MethodError(
                "the weights have changed, but step() of the optimizer given to begin was never called, through "
                f"which {type(self.method).__name__} trains; make the optimizer that trains first, and give it to begin"
            )
        self._release()
        self._local.update = update
        parts: Mapping[str, Part] = {}
        memory = self.memory
        if self._w:
            self._local.fixed = self.method.prepare(self._w, self._local)
            parts, memory = contract.encoded(self.method, self._w, self._local, memory, self._noise)
        rest: Tensors = {}
        current = tensors_of(self._model, self.layout)  # a forward pass may give its model new buffers
        for entry in self.layout.rest:
            now, start = current[entry.name], self._start[entry.name]
            rest[entry.name] = now.clone() if entry.role == "max" else _change(wide(start), wide(now.to(start.device)))
            if entry.role == "dense":
                now.copy_(wide(start) + rest[entry.name])
        sent_updates = {}
        for name, part in parts.items():
            sent = part.unpack().to(update[name].dtype).view(update[name].shape)
            weights = sent if self.method.sends_weights else self._w[name] + sent
            self._live[name].copy_(weights)
            sent_updates[name] = sent - self._w[name] if self.method.sends_weights else sent
        layers = layer_reports(parts, measure_layers(update, sent_updates, parts))
        contract.check_steps(self.method, {name: report.step for name, report in layers.items()})
        return Upload(Payload(self.layout, dict(parts), rest, self.context), memory, self.step.index, layers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unhook, so that model and optimizer are the user's own again; without `finish`, the model holds w + m."""
        if self._handles:
            self._release()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._will_alter and any(callable(argument) for argument in (*args, *kwargs.values())):
            raise MethodError(
                "optimizer.step(closure) computes gradients inside the step, where they cannot be pulled back; "
                "call loss.backward() and then optimizer.step()"
            )
        if self._will_alter:  # pulled-back gradients are dense; momentum cannot change from sparse to dense
            for p in self._parameters.values():
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
        self._take_in()
        if self._seen is None:
            return
        grad = {name: wide(p.grad) for name, p in self._parameters.items() if p.grad is not None}
        grads, learned = self._by.pull_back(self._w, self._local, self._u, self._seen, grad)
        self._point_at_live()
        for name, value in grads.items():
            self._parameters[name].grad = value.to(self._live[name].dtype)
        for name, value in self._local.learned.items():
            value.grad = learned[name].to(value.dtype) if name in learned else None
        self._local.last, self._local.update, self._u = self._seen, {}, {}  # make room for the next step's

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.step = Step(self.step.index + 1, self.step.total)
        self._put_values_in()

    @torch.no_grad()
    def _put_values_in(self) -> None:
        """Let the parameters hold what the method wants the next forward pass to compute with."""
        self._seen = None
        if not self._w or not self.method.alters_forward(self.step):
            return
        if self._one_pass is not None and self._one_pass.ready(self._local):
            self._by, self._u = self._one_pass, self._one_pass.draw()
        else:
            self._by, self._local.update = self.method, self._update()
            if self.method.needs_progress:
                share = self.step.index / self.step.total
                self._local.progress = torch.full((), share, dtype=torch.float32, device=_device(self._live))
            self._local.fixed = self.method.prepare(self._w, self._local)
            self._u = self._noise(self._w) if self.method.noisy_forward else {}
        self._seen = self._by.forward(self._w, self._local, self._u)
        contract.check_forward(self.method, self._seen, self._w)
        for name, weights in self._seen.weights.items():
            self._parameters[name].data = _laid_out(weights, self._live[name])
        self._seen = replace(self._seen, weights={})  # the parameters hold them now
        self._put = _marks(self._parameters)

    def _update(self) -> Tensors:
        """m: the weights trained so far minus those received."""
        return {name: wide(self._live[name]) - start for name, start in self._w.items()}

    def _point_at_live(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = self._live[name]
        self._put = _marks(self._parameters)

    @torch.no_grad()
    def _take_in(self) -> None:
        """Find what was written to the parameters since the last step, in place or as p.data = ...

        While the model computes with w + m, it counts; otherwise it must have been undone, as some optimizers do that
        try out other weights.
        """
        marks = list(zip(self._parameters, _marks(self._parameters), self._put, strict=True))
        if self._seen is None:
            replaced = [name for name, (place, _), (put, _) in marks if place != put]
            for name in replaced:
                self._live[name].copy_(self._parameters[name].data)
            if replaced:
                self._point_at_live()
            return
        if not (touched := [name for name, mark, put in marks if mark != put]):
            return
        expected = self._by.forward(self._w, self._local, self._u).weights
        trained = _held_by(self._optimizer)
        for name in touched:
            parameter, live = self._parameters[name], self._live[name]
            right = expected[name].to(live.dtype).to(parameter.data)  # as it was put in; the model may have moved since
            # An optimizer of others may move them by less than ours may be off by rounding.
            atol = _rounding(right, live) if id(parameter) in trained else 0.0
            if not torch.allclose(parameter.data, right, rtol=0, atol=atol):
                raise MethodError(
                    f"{name} was written to between two steps, while {type(self.method).__name__} computes with other "
                    "weights than those it trains, so the change would be lost; let one optimizer hold all trained "
                    "parameters, clip gradients instead of weights, and load a state dict before begin or after finish"
                )

    def _hook(self, model: nn.Module, compiled: bool) -> None:
        _HOOKED.add(self._optimizer)
        self._add_learnables()
        self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(self._optimizer.register_step_post_hook(self._after_step))
        on_layers = self.method.instrument(model, list(self._w))
        self._handles += on_layers
        if on_layers and compiled:  # what was compiled before would go on without them, and nobody would notice
            raise MethodError(
                f"the model is compiled, but {type(self.method).__name__} hooks its layers, and compiled code does not "
                "call new hooks; train the plain model"
            )
        self._put_values_in()

    def _add_learnables(self) -> None:
        """Add them to the parameter group of their layer, so that its learning rate and schedule apply to them."""
        group_of = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for name, value in self._local.learned.items():
            if group := group_of.get(id(self._parameters[name])):
                group["params"].append(value)

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _HOOKED.discard(self._optimizer)
        self._point_at_live()
        learned = {id(value) for value in self._local.learned.values()}
        for group in self._optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in learned]
        for value in self._local.learned.values():
            self._optimizer.state.pop(value, None)


begin = LocalTraining  # reads better where a round begins: `local = begin(method, model, optimizer, num_steps)`


def _is_compiled(model: nn.Module) -> bool:
    """Whether this model or a layer of it is compiled; that it is part of a compiled one cannot be seen."""
    return any(uncompiled(each) is not each or each._compiled_call_impl is not None for each in model.modules())


def _held_by(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters that the optimizer moves."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _rounding(x: Tensor, live: Tensor) -> float:
    """How far off x may be after an optimizer has moved it, by its own size or some 0.1, and moved it back."""
    eps = max(torch.finfo(x.dtype).eps, torch.finfo(live.dtype).eps)
    return eps * max(4 * x.abs().max().item(), 0.1)


def _marks(parameters: Mapping[str, nn.Parameter]) -> list[tuple[int, int]]:
    """What reveals writing: where each parameter lies in memory, and how often it was written to in place."""
    return [(p.data_ptr(), p._version) for p in parameters.values()]


def _change(start: Tensor, now: Tensor) -> Tensor:
    """now - start, with 0 for what has not changed, even infinities such as those of a mask."""
    return torch.where(now == start, torch.zeros((), dtype=now.dtype, device=now.device), now - start)


def measure_layers(update: Tensors, sent: Tensors, parts: Mapping[str, Part]) -> Tensor:
    """The figures of all layer reports, [3, layers]: one tensor, so that a GPU is read only once."""
    if not parts:
        return torch.empty(3, 0, device="cpu")
    true, zero = [update[name] for name in parts], torch.zeros_like(next(iter(update.values())).sum())
    norms = torch.stack(torch._foreach_norm(true))
    errors = torch.stack(torch._foreach_norm(torch._foreach_sub([sent[name] for name in parts], true)))
    steps = [zero if part.step is None else part.step.to(zero) for part in parts.values()]
    reaches = [part.reach for part in parts.values()]
    clipped = [
        zero if reach is None else (m.abs() > reach).to(zero.dtype).mean()
        for m, reach in zip(true, reaches, strict=True)
    ]
    return torch.stack([errors / torch.where(norms > 0, norms, 1.0), torch.stack(steps), torch.stack(clipped)])


def layer_reports(parts: Mapping[str, Part], figures: Tensor) -> dict[str, LayerReport]:
    """The figures of `measure_layers` as a report for each layer."""
    return {
        name: LayerReport(error, None if part.step is None else step, None if part.reach is None else clipped)
        for (name, part), (error, step, clipped) in zip(parts.items(), figures.T.tolist(), strict=True)
    }


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better, in which updates are encoded; half-precision weights still train as they are."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x in the type and with the strides of `like`.

    Layers choose their memory format by strides, even by those of dimensions of size 1, which address nothing.
    """
    x = x.to(like.dtype)
    if x.stride() == like.stride():
        return x
    same = all(a == b for a, b, size in zip(x.stride(), like.stride(), x.shape, strict=True) if size > 1)
    return x.as_strided(like.shape, like.stride()) if same else torch.empty_like(like).copy_(x)


def _device(tensors: Tensors) -> torch.device:
    return next(iter(tensors.values())).device
