"""One client on the GPU: its model, its buffers, its noise and the recorded steps that work on them.

Everything a step needs is made inside it or lies in a buffer: the batch is gathered by index from the data set on the
device, at a position that the step itself advances; the noise comes from the slot's own generator. (Captured draws from
the *default* generator are the same numbers on every stream: all clients would share one noise.)
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbat.data import augment
from fedbat.engine.base import ClientResult
from fedbat.engine.sequential import draw_epochs
from fedbat.layout import tensors_of
from fedbat.method import Forward, Local, Step
from fedbat.parts import Part
from fedbat.streams import Tensors, UniformNoise, stream_seed
from fedbat.training import LayerReport, wide
from fedbat.wire import Payload

if TYPE_CHECKING:
    from fedbat.engine.cuda import CudaEngine


class Kind(NamedTuple):
    """What a recorded step is good for."""

    size: int  # of the batch
    altered: bool  # whether the method changes what the model computes with


class Slot:
    """Room for one client at a time: a model, buffers, noise, a stream, and the steps recorded on them."""

    def __init__(self, engine: "CudaEngine", priority: int) -> None:
        self.engine, self.method, self.w, device = engine, engine.federation.method, engine.compressed, engine.device
        self.model = engine.new_model().train()
        self.method.instrument(self.model, list(self.w))
        self.live = tensors_of(self.model, engine.federation.layout)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.latent = {name: self.live[name].clone() for name in self.w}  # w + m while the model holds something else
        self.learned = self.method.learnables(self.w)
        self.fixed, self.last = {}, Forward({})
        if self.w:  # a dry forward pass shows which buffers the method needs
            still = _zeros(self.w)
            self.fixed = _zeros(self.method.prepare(self.w, Local(still, self.learned)))
            seen = self.method.forward(self.w, Local(still, self.learned, self.fixed), still)
            self.last = Forward({}, _zeros(seen.kept), _zeros(seen.shared))
        longest = engine.federation.experiment.epochs * max(map(len, engine.federation.split))
        self.order = torch.zeros(longest, dtype=torch.int64, device=device)
        self.crop = torch.zeros(longest, 2, dtype=torch.int64, device=device)
        self.flip = torch.zeros(longest, dtype=torch.bool, device=device)
        # Copies from memory that is not pinned would wait for the device.
        self.staged = [torch.empty_like(x, device="cpu", pin_memory=engine.captures) for x in self._drawn()]
        self.at = torch.zeros((), dtype=torch.int64, device=device)  # samples seen so far
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # sum over the steps so far
        self.noise = _SlotNoise(0, "noise", device=device)
        self.stream = torch.cuda.Stream(device, priority=priority) if engine.captures else None
        self.pool = torch.cuda.graph_pool_handle() if engine.captures else None
        self.graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self.plan: list[Kind] = []
        self.altered = self.ever_altered = False

    @torch.no_grad()
    def begin(self, round_: int, client: int) -> None:
        """Record what is not recorded yet, then put the client's start into the buffers."""
        federation = self.engine.federation
        self.plan, self.altered, self.ever_altered = self.engine.plan(client), False, False
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.engine.device))
        with self.on_stream():
            for kind in dict.fromkeys(self.plan):
                if kind not in self.graphs and self.engine.captures:
                    self._capture(kind)
            copy_all(self.live, self.engine.w)
            copy_all(self.learned, self.method.learnables(self.w))
            for buffer in (*self.fixed.values(), self.at, self.loss):
                buffer.zero_()
            epochs = zip(*draw_epochs(federation, round_, client), strict=True)
            for buffer, staged, pieces in zip(self._drawn(), self.staged, epochs, strict=True):
                num = sum(map(len, pieces))
                buffer[:num].copy_(torch.cat(pieces, out=staged[:num]), non_blocking=True)
            self.noise.restart(federation.experiment.seed, round_, client)

    def advance(self, kind: Kind) -> None:
        """Launch one step."""
        with self.on_stream():
            if kind.altered != self.altered:  # w + m moves out of the model, or back
                self.altered, self.ever_altered = kind.altered, True
                copy_all(*((self.latent, self.live) if kind.altered else (self.live, self.latent)))
            if self.engine.captures:
                self.graphs[kind].replay()
            else:
                with self.engine.settings():
                    self.step(kind)

    @torch.enable_grad()
    def step(self, kind: Kind) -> None:
        """One SGD step on the next samples: nothing but buffers before and after, so that it can be recorded."""
        engine, lr = self.engine, self.engine.federation.experiment.lr
        rows = self.at + torch.arange(kind.size, device=engine.device)
        index = self.order[rows]
        x = engine.x[index]
        if engine.federation.data.spec.augment:
            x = augment(x, self.crop[rows], self.flip[rows])
        if kind.altered:
            local, u, seen = self._alter()
        with engine.autocast():
            loss = F.cross_entropy(self.model(engine.normalized(x, train=True)), engine.y[index])
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        with torch.no_grad():
            grads = {name: grad for name, grad in zip(self.parameters, found, strict=True) if grad is not None}
            if kind.altered:
                compressed = {name: wide(grads.pop(name)) for name in self.w if name in grads}
                pulled, learned = self.method.pull_back(self.w, local, u, seen, compressed)
                _descend(self.latent, pulled, lr)
                _descend(self.learned, learned, lr)
                copy_all(self.last.kept, seen.kept)
                copy_all(self.last.shared, seen.shared)
            _descend(self.live, grads, lr)
            self.loss.add_(loss)
            self.at.add_(kind.size)

    @torch.no_grad()
    def finish(self, round_: int, client: int, memory: Tensors) -> ClientResult:
        """Encode on the device and bring the upload home."""
        engine, method, layout = self.engine, self.method, self.engine.federation.layout
        with self.on_stream():
            update = self._update(self.latent if self.altered else self.live)
            local = Local(update, self.learned, *((self.fixed, self.last) if self.ever_altered else ()))
            if self.w and method.noisy_forward and method.alters_forward(Step(len(self.plan), len(self.plan))):
                self.noise(self.w)  # as LocalTraining, which is ready for one more step when training ends
            parts: dict[str, Part] = {}
            if self.w:
                memory = {name: tensor.to(engine.device) for name, tensor in memory.items()}
                parts, memory = method.encode(self.w, local, memory, self.noise)
            rest = {entry.name: self.live[entry.name] for entry in layout.rest}
            floats = [entry.name for entry in layout.rest if entry.role == "dense"]
            if floats:  # their change travels
                now, start = [wide(rest[name]) for name in floats], [engine.w[name] for name in floats]
                rest |= dict(zip(floats, torch._foreach_sub(now, start), strict=True))
            tensors = {(n, key): x for n, part in parts.items() for key, x in vars(part).items() if torch.is_tensor(x)}
            *home, loss = _home([*tensors.values(), *rest.values(), self.loss])
            found = dict(zip(tensors, home, strict=False))
            at_home = {
                name: _replaced(part, {k: x for (n, k), x in found.items() if n == name})
                for name, part in parts.items()
            }
            payload = Payload(layout, at_home, dict(zip(rest, home[len(tensors) :], strict=True)), round_)
            return ClientResult(
                client=client,
                upload=payload.to_bytes(),
                memory={name: tensor.cpu() for name, tensor in memory.items()},
                num_samples=len(engine.federation.split[client]),
                train_loss=float(loss) / len(self.plan),
                nbits=payload.nbits,
                layers=_reports(update, self.w if method.sends_weights else {}, parts, at_home),
            )

    @torch.no_grad()
    def _alter(self) -> tuple[Local, Tensors, Forward]:
        """Let the model hold what the method wants it to compute with."""
        local = Local(self._update(self.latent), self.learned, self.fixed, self.last)
        # What is carried along is 0 until it is set, and then stays: prepare's meaning, but nobody asks the device.
        now = self.method.prepare(self.w, dataclasses.replace(local, fixed={}))
        for name, value in self.fixed.items():
            value.copy_(torch.where(value == 0, now[name], value))
        u = self.noise(self.w) if self.method.noisy_forward else {}
        seen = self.method.forward(self.w, local, u)
        copy_all(self.live, seen.weights)
        return local, u, seen

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.order, self.crop, self.flip

    def _update(self, trained: Tensors) -> Tensors:
        now = [wide(trained[name]) for name in self.w]
        return dict(zip(self.w, torch._foreach_sub(now, list(self.w.values())) if now else (), strict=True))

    def _capture(self, kind: Kind) -> None:
        """Record a step; it may spoil the buffers, so this comes before a client's start is loaded."""
        with self.engine.settings(tune=kind.size == self.engine.federation.experiment.batch_size):
            self.at.zero_()
            if kind not in self.engine.warm:  # libraries set themselves up in a first, unrecorded step
                self.engine.warm.add(kind)
                generator = torch.cuda.default_generators[torch.cuda.current_device()]
                before = generator.get_offset()
                self.step(kind)
                # A model that draws numbers itself (dropout) does so from the default generator: see the top.
                if generator.get_offset() != before:
                    self.engine.captures = False
                    return
            self.graphs[kind] = record(lambda: self.step(kind), self.pool, self.noise.generator)

    def on_stream(self) -> AbstractContextManager[object]:
        """Where all of the slot's work is launched."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class _SlotNoise(UniformNoise):
    """UniformNoise that can start again, because graphs hold on to their generator."""

    @property
    def generator(self) -> torch.Generator:
        """To be registered with every graph that draws."""
        return self._generator

    def restart(self, seed: int, *key: int) -> None:
        """From here on, the numbers of UniformNoise(seed, "noise", *key)."""
        if self.device.type == "cpu":
            self.__init__(seed, "noise", *key)  # type: ignore[misc]
        else:
            self._generator.manual_seed(stream_seed(seed, "noise", *key))


def record(
    work: Callable[[], None], pool: Any = None, generator: torch.Generator | None = None
) -> torch.cuda.CUDAGraph:
    """What torch.cuda.graph does, without stopping the other streams to collect garbage."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph


def _reports(update: Tensors, w: Tensors, parts: dict[str, Part], at_home: dict[str, Part]) -> dict[str, LayerReport]:
    """As LocalTraining reports them, in one read; `w` is what the parts are relative to."""
    sent = []
    for name, part in at_home.items():
        # Step sizes are asked for on the CPU, the rest is computed where it lies.
        scalars = {key: x for key, x in vars(part).items() if torch.is_tensor(x) and x.dim() == 0}
        sent.append(_replaced(parts[name], scalars).unpack().view_as(update[name]))
    if w:
        sent = [x - w[name] for name, x in zip(parts, sent, strict=True)]
    found: list[list[float]] = []
    if parts:
        true = list(update.values())
        errors, norms = torch._foreach_norm(torch._foreach_sub(sent, true)), torch._foreach_norm(true)
        reaches = [float("inf") if part.reach is None else part.reach for part in at_home.values()]
        beyond = [(m.abs() > reach).float().mean() for m, reach in zip(true, reaches, strict=True)]
        found = torch.stack([*errors, *norms, *beyond]).view(3, -1).T.tolist()
    return {
        name: LayerReport(error / (norm or 1.0), part.step, None if part.reach is None else clipped)
        for (name, part), (error, norm, clipped) in zip(at_home.items(), found, strict=True)
    }


def _replaced(part: Part, tensors: Tensors) -> Part:
    return dataclasses.replace(part, **tensors)  # type: ignore[type-var]


def _home(tensors: list[Tensor]) -> list[Tensor]:
    """All of them on the CPU, in one copy per type."""
    home = list(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        chosen = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[i].reshape(-1) for i in chosen]).cpu()
        for i, piece in zip(chosen, flat.split([tensors[i].numel() for i in chosen]), strict=True):
            home[i] = piece.view(tensors[i].shape)
    return home


def copy_all(to: Tensors, source: Tensors) -> None:
    """to[name] <- source[name] for every name both have."""
    names = [name for name in source if name in to]
    if names:
        torch._foreach_copy_([to[name] for name in names], [source[name] for name in names])


def _descend(x: Tensors, grads: Tensors, lr: float) -> None:
    """x <- x - lr grad, where there is one."""
    if grads:
        torch._foreach_add_([x[name] for name in grads], [g.to(x[name].dtype) for name, g in grads.items()], alpha=-lr)


def _zeros(like: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
