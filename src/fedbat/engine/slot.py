"""One client on the GPU: its model, its buffers, its noise, and the recorded work that uses them.

Everything a step needs is made inside it or lies in a buffer: the batch is gathered by index from the data set on the
device, at a position that the step itself advances; the noise comes from the slot's own generator. (Captured draws from
the *default* generator are the same numbers on every stream: all clients would share the same noise.)
"""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fedbat.data import augment
from fedbat.engine.base import ClientResult
from fedbat.engine.buffers import RestartableNoise, copy_all, default_generator, descend, halve, record, zeros
from fedbat.engine.fused import FusedFedBAT
from fedbat.engine.launch import compile_ahead
from fedbat.engine.outbox import Outbox
from fedbat.engine.sequential import draw_epochs
from fedbat.layout import tensors_of
from fedbat.method import Forward, Local, Step
from fedbat.methods.fedbat import FedBAT
from fedbat.parts import Part
from fedbat.streams import Tensors, stream_seed
from fedbat.training import wide

if TYPE_CHECKING:
    from fedbat.engine.cuda import CudaEngine


class Kind(NamedTuple):
    """What a recorded step can be used for."""

    size: int  # of the batch
    altered: bool  # whether the method changes what the model computes with
    first: bool  # whether it is a client's first, if the method's forward pass makes a difference


class Ending(NamedTuple):
    """What a recorded encoding can be used for."""

    altered: bool  # in the last step
    ever_altered: bool
    remembers: bool  # whether there is a memory from an earlier round


class Slot:
    """Room for one client at a time: a model, buffers, noise, a stream, and the work recorded on them."""

    def __init__(self, engine: "CudaEngine", priority: int) -> None:
        self.engine, self.method, self.w, device = engine, engine.federation.method, engine.compressed, engine.device
        self.model = engine.new_model().train()
        self.method.instrument(self.model, list(self.w))
        self.live = tensors_of(self.model, engine.federation.layout)
        # In bf16 the layers compute with half-precision copies, cast all at once instead of one by one by autocast.
        self.half = halve(self.model) if engine.precision == "bf16" else {}
        self.latent = {name: self.live[name].clone() for name in self.w}  # w + m while the model holds something else
        self.learned = self.method.learnables(self.w)
        self.fixed, self.last = {}, Forward({})
        self.fused: FusedFedBAT | None = None
        if engine.flat is not None and all(name in self.half for name in self.w) == bool(self.half):
            self._fuse()
        elif self.w:  # a dry forward pass shows which buffers the method needs
            still = zeros(self.w)
            self.fixed = zeros(self.method.prepare(self.w, Local(still, self.learned)))
            local = Local(still, self.learned, self.fixed, progress=torch.zeros((), device=device))
            seen = self.method.forward(self.w, local, still)
            self.last = Forward({}, zeros(seen.kept), zeros(seen.shared))
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        longest = engine.federation.experiment.epochs * engine.federation.split.most_samples
        self.order = torch.zeros(longest, dtype=torch.int64, device=device)
        self.crop = torch.zeros(longest, 2, dtype=torch.int64, device=device)
        self.flip = torch.zeros(longest, dtype=torch.bool, device=device)
        # Copies from memory that is not pinned would have to wait for the device.
        self.staged = [torch.empty_like(x, device="cpu", pin_memory=engine.captures) for x in self._drawn()]
        self.at = torch.zeros((), dtype=torch.int64, device=device)  # samples seen so far
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # sum over the steps so far
        self.done, self.total = torch.zeros(2, dtype=torch.float64, device=device).unbind()  # steps
        self.noise = RestartableNoise(0, "noise", device=device)
        self.dice = torch.Generator(device)  # what the model itself draws from (dropout)
        self.memory: Tensors = {}
        self.stream = torch.cuda.Stream(device, priority=priority) if engine.captures else None
        self.pool = torch.cuda.graph_pool_handle() if engine.captures else None
        self.graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self.endings: dict[Ending, tuple[torch.cuda.CUDAGraph, Outbox]] = {}
        self.outbox: Outbox | None = None
        self.plan: list[Kind] = []
        self.altered = self.ever_altered = False

    @torch.no_grad()
    def begin(self, round_: int, client: int, memory: Tensors) -> None:
        """Record the steps that are not recorded yet, then fill the buffers with the client's starting state."""
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
            for buffer in (*self.fixed.values(), self.at, self.loss, self.done):
                buffer.zero_()
            self.total.fill_(len(self.plan))
            epochs = zip(*draw_epochs(federation, round_, client), strict=True)
            for buffer, staged, pieces in zip(self._drawn(), self.staged, epochs, strict=True):
                num = sum(map(len, pieces))
                buffer[:num].copy_(torch.cat(pieces, out=staged[:num]), non_blocking=True)
            if memory and self.memory.keys() != memory.keys():  # else the buffers stay: recorded work reads them
                self.memory = {name: torch.empty_like(x, device=self.engine.device) for name, x in memory.items()}
            self._remembers = bool(memory)
            copy_all(self.memory, memory)
            self.noise.restart(federation.experiment.seed, round_, client)
            self.dice.manual_seed(stream_seed(federation.experiment.seed, "model", round_, client))

    def advance(self, kind: Kind) -> None:
        """Launch one step."""
        with self.on_stream():
            if kind.altered != self.altered:  # w + m moves out of the model, or back
                self.altered, self.ever_altered = kind.altered, True
                copy_all(*((self.latent, self.live) if kind.altered else (self.live, self.latent)))
            if self.engine.captures:
                self.graphs[kind].replay()
            else:
                with self.engine.settings(), self._own_dice():
                    self.step(kind)

    @torch.enable_grad()
    def step(self, kind: Kind) -> None:
        """One SGD step on the next samples: from buffers to buffers only, so that it can be recorded."""
        engine, lr, altered = self.engine, self.engine.federation.experiment.lr, kind.altered
        x, y = self._batch(kind.size)
        if altered and self.fused is not None:
            copy_all(self.half, {name: x for name, x in self.live.items() if name not in self.w})
            self.fused.forward(self.noise.generator)
        else:
            if altered:
                local, u, seen = self._alter(kind.first)
            copy_all(self.half, self.live)
        with engine.autocast():
            loss = F.cross_entropy(self.model(x), y)
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        with torch.no_grad():
            grads = {name: grad for name, grad in zip(self.parameters, found, strict=True) if grad is not None}
            if altered and self.fused is not None:
                self.fused.descend({name: grads.pop(name) for name in self.w if name in grads})
            if altered and self.fused is None:
                compressed = {name: wide(grads.pop(name)) for name in self.w if name in grads}
                pulled, learned = self.method.pull_back(self.w, local, u, seen, compressed)
                descend(self.latent, pulled, lr)
                descend(self.learned, learned, lr)
                copy_all(self.last.kept, seen.kept)
                copy_all(self.last.shared, seen.shared)
            descend(self.live, grads, lr)
            self.loss.add_(loss)
            self.at.add_(kind.size)
            self.done.add_(1)

    @torch.no_grad()
    def encode(self) -> None:
        """Launch the encoding of what was trained, and its copy to the host."""
        ending = Ending(self.altered, self.ever_altered, self._remembers)
        with self.on_stream():
            if not self.engine.captures:
                self.outbox = self._encode(ending)
                return
            if ending not in self.endings:
                if ending not in self.engine.warm:
                    self.engine.warm.add(ending)
                    before = self.noise.generator.get_offset()
                    self._encode(ending)  # libraries initialize; the client's state is unchanged
                    self.noise.generator.set_offset(before)
                boxes: list[Outbox] = []
                graph = record(lambda: boxes.append(self._encode(ending)), self.pool, self.noise.generator)
                self.endings[ending] = graph, boxes[0]
            graph, self.outbox = self.endings[ending]
            graph.replay()

    def finish(self, round_: int, client: int) -> ClientResult:
        """Wait for the upload and pack it."""
        engine = self.engine
        if self.stream is not None:
            self.stream.synchronize()
        assert self.outbox is not None
        payload, memory, loss, layers = self.outbox.open(engine.federation.layout, round_)
        return ClientResult(
            client=client,
            upload=payload.to_bytes(),
            memory=memory,
            num_samples=len(engine.federation.split[client]),
            train_loss=loss / len(self.plan),
            nbits=payload.nbits,
            layers=layers,
        )

    def _encode(self, ending: Ending) -> Outbox:
        engine, method, layout = self.engine, self.method, self.engine.federation.layout
        update = self._update(self.latent if ending.altered else self.live)
        local = Local(update, self.learned, self.fixed, self.last if ending.ever_altered else None)
        parts: dict[str, Part] = {}
        memory = self.memory if ending.remembers else {}
        if self.w:
            if method.noisy_forward and method.alters_forward(Step(len(self.plan), len(self.plan))):
                self.noise(self.w)  # as in LocalTraining, which has drawn for one more step when training ends
            self._prepare(local)
            parts, memory = method.encode(self.w, local, memory, self.noise)
        rest = {entry.name: self.live[entry.name] for entry in layout.rest}
        floats = [entry.name for entry in layout.rest if entry.role == "dense"]
        if floats:  # of these, the change travels
            now, start = [wide(rest[name]) for name in floats], [engine.w[name] for name in floats]
            rest |= dict(zip(floats, torch._foreach_sub(now, start), strict=True))
        return Outbox(update, self.w if method.sends_weights else {}, parts, memory, rest, self.loss)

    @torch.no_grad()
    def _alter(self, first: bool) -> tuple[Local, Tensors, Forward]:
        """Load into the model what the method wants it to compute with."""
        progress = (self.done / self.total).float()
        local = Local(self._update(self.latent), self.learned, self.fixed, None if first else self.last, progress)
        self._prepare(local)
        u = self.noise(self.w) if self.method.noisy_forward else {}
        seen = self.method.forward(self.w, local, u)
        copy_all(self.live, seen.weights)
        return local, u, seen

    def _prepare(self, local: Local) -> None:
        """Set what is carried along where it is still 0: the same as `prepare`, but without reading from the device."""
        now = self.method.prepare(self.w, dataclasses.replace(local, fixed={}))
        for name, value in self.fixed.items():
            value.copy_(torch.where(value == 0, now[name], value))

    def _batch(self, size: int) -> tuple[Tensor, Tensor]:
        engine = self.engine
        if engine.batches is not None:
            return engine.batches.next(size, self.at, self.order, self.crop, self.flip)
        rows = self.at + torch.arange(size, device=engine.device)
        index = self.order[rows]
        x = engine.x[index]
        if engine.federation.data.spec.augment:
            x = augment(x, self.crop[rows], self.flip[rows])
        return engine.normalized(x, train=True), engine.y[index]

    def _fuse(self) -> None:
        """Lay the layers out one after the other, as needed by the kernels that work on all of them."""
        engine = self.engine
        assert engine.flat is not None
        latent, self.latent = engine.flat.zeros()
        weights, views = engine.flat.zeros(torch.bfloat16 if self.half else torch.float32)
        parameters = dict(self.model.named_parameters())
        for name, view in views.items():
            parameters[name].data = view.copy_(parameters[name].data)
        (self.half or self.live).update(views)
        lr = engine.federation.experiment.lr
        self.fused = FusedFedBAT(cast(FedBAT, self.method), engine.flat, engine.flat_w, latent, weights, lr)
        self.learned = dict(zip(self.learned, self.fused.alpha_e, strict=False))
        self.fixed = {"alpha_prime": self.fused.alpha_prime}

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.order, self.crop, self.flip

    def _update(self, trained: Tensors) -> Tensors:
        now = [wide(trained[name]) for name in self.w]
        return dict(zip(self.w, torch._foreach_sub(now, list(self.w.values())) if now else (), strict=True))

    def _capture(self, kind: Kind) -> None:
        """Record a step; it may spoil the buffers, so this comes before a client's starting state is loaded."""
        with self.engine.settings():
            self.at.zero_()
            if kind not in self.engine.warm:  # libraries initialize in a first, unrecorded step
                self.engine.warm.add(kind)
                generator = default_generator(self.engine.device)
                before = generator.get_offset()
                if self.engine.fuses:
                    with compile_ahead():
                        self.step(kind)
                self.step(kind)
                # A model that draws numbers itself (dropout) uses the default generator: see the top of this file.
                if generator.get_offset() != before:
                    self.engine.captures = False
                    return
            self.graphs[kind] = record(lambda: self.step(kind), self.pool, self.noise.generator)

    @contextmanager
    def _own_dice(self) -> Iterator[None]:
        """Models draw from PyTorch's default generator: inside, it continues from where this client's was."""
        default = default_generator(self.engine.device)
        default.set_state(self.dice.get_state())
        yield
        self.dice.set_state(default.get_state())

    def on_stream(self) -> AbstractContextManager[object]:
        """The context in which all of the slot's work is launched."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
