"""The engine for a GPU: the clients of a round side by side, one stream each, every training step a captured graph.

A step of a small model is dozens of kernels of a few microseconds; launched one by one from Python, they leave the card
idle. So a step is recorded once per (slot, batch size, kind of step) and replayed; nothing in it waits for the host.

Batches and noise are those of the sequential engine on the same device. With device="cpu" the same code runs eagerly.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedbat.engine.base import ClientResult, Evaluation, arithmetic
from fedbat.engine.buffers import copy_all, halve, record
from fedbat.engine.convs import fuse_convs
from fedbat.engine.fused import Flat, FusedBatches, FusedFedBAT, can_fuse
from fedbat.engine.memory import keep_freed_memory
from fedbat.engine.norms import fuse_norms
from fedbat.engine.sequential import tested
from fedbat.engine.slot import Ending, Kind, Slot
from fedbat.engine.stems import fuse_stems
from fedbat.experiment import Federation
from fedbat.layout import tensors_of
from fedbat.method import Step
from fedbat.streams import Tensors
from fedbat.training import wide

Precision = Literal["fp32", "tf32", "bf16"]

_TEST_BATCH = 2500
_MAX_SLOTS = 16  # ten streams fill an H200
_PRIORITIES = 3  # of slots; torch distinguishes four, and the first is the caller's
_TURN = 30  # steps of a client that are launched together; launching all of them at once fills the driver's queue


class CudaEngine:
    """Plain SGD like the sequential engine's, many clients at a time."""

    def __init__(
        self, federation: Federation, device: torch.device | str = "cuda", precision: Precision = "fp32"
    ) -> None:
        self.federation, self.device, self.precision = federation, torch.device(device), precision
        self.captures = self.device.type == "cuda"
        torch.set_num_threads(1)  # the host only packs and unpacks; waking other cores would take longer
        self.fuses = self.captures and can_fuse()
        self.home = self.device
        if self.captures:  # the caller's own work on the device goes before training: others wait for it
            torch.cuda.set_stream(torch.cuda.Stream(self.device, priority=-_PRIORITIES))
        keep_freed_memory()
        data, spec = federation.data, federation.data.spec
        self.x, self.y, x_test, y_test = (
            tensor.to(self.device) for tensor in (data.x_train, data.y_train, data.x_test, data.y_test)
        )
        self._tests = list(zip(x_test.split(_TEST_BATCH), y_test.split(_TEST_BATCH), strict=True))
        # cuDNN is faster with channels_last wherever it may use tensor cores, and so are CPUs.
        nchw = self.device.type == "cuda" and precision == "fp32"
        self._format = torch.contiguous_format if nchw else torch.channels_last
        mean_std = (spec.train_mean, spec.train_std, spec.test_mean, spec.test_std)
        self._stats = [torch.tensor(values, device=self.device)[:, None, None] for values in mean_std]
        self.model = self.new_model().eval()
        self._tensors = tensors_of(self.model, federation.layout)
        self._half = halve(self.model) if precision == "bf16" else {}
        self.w = {name: wide(tensor).clone() for name, tensor in self._tensors.items()}  # what the clients received
        self.compressed = {entry.name: self.w[entry.name] for entry in federation.layout.compressed}
        self.batches = FusedBatches(federation, self.x, self.y, not nchw) if self.fuses else None
        self.flat: Flat | None = None
        floats = all(x.dtype == torch.float32 for x in self.compressed.values())
        if self.fuses and self.compressed and floats and FusedFedBAT.suits(federation.method):
            self.flat = Flat(self.compressed)
            self.flat_w, self.compressed = self.flat.zeros()
            self.w |= self.compressed
        self._score = torch.zeros(2, dtype=torch.float64, device=self.device)  # correct, sum of losses
        self._test_graph: torch.cuda.CUDAGraph | None = None
        self._plans: dict[int, list[Kind]] = {}  # by number of samples
        self.warm: set[Kind | Ending] = set()
        # The first slots have priority, so that their uploads are encoded and added while the others still train.
        num = min(federation.experiment.per_round, _MAX_SLOTS)
        self._slots = [Slot(self, priority=_PRIORITIES * i // num - _PRIORITIES + 1) for i in range(num)]

    def train(
        self, w: Tensors, round_: int, clients: list[int], memories: Mapping[int, Tensors]
    ) -> Iterator[ClientResult]:
        """Train as many clients at a time as there are slots, launching their steps in turn."""
        for slot in self._slots:
            if slot.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(slot.stream)
        copy_all(self.w, {name: tensor.to(self.device) for name, tensor in w.items()})
        for start in range(0, len(clients), len(self._slots)):
            wave = clients[start : start + len(self._slots)]
            slots = self._assign(wave)
            for turn in range(0, max(len(self.plan(client)) for client in wave), _TURN):
                for slot, client in zip(slots, wave, strict=True):
                    if turn == 0:
                        slot.begin(round_, client, memories.get(client, {}))
                    for kind in slot.plan[turn : turn + _TURN]:
                        slot.advance(kind)
                    if turn < len(slot.plan) <= turn + _TURN:
                        slot.encode()
            for slot, client in zip(slots, wave, strict=True):
                yield slot.finish(round_, client)

    @torch.no_grad()
    def evaluate(self, w: Tensors) -> Evaluation:
        """Accuracy and mean loss over the test set, with the weights the method computes with when tested."""
        here = {name: tensor.to(self.device) for name, tensor in w.items()}
        seen = tested(self.federation, here)
        copy_all(self._tensors, seen)
        copy_all(self._half, seen)
        if not self.captures:
            with self.settings():
                self._test()
        elif self._test_graph is None:
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream), self.settings():
                self._test()
                self._test_graph = record(self._test)
            torch.cuda.current_stream(self.device).wait_stream(stream)
        else:
            self._test_graph.replay()
        correct, loss = (value / len(self.federation.data.y_test) for value in self._score.tolist())
        return Evaluation(correct, loss)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def plan(self, client: int) -> list[Kind]:
        """The kinds of this client's steps, in order."""
        samples = len(self.federation.split[client])
        if samples not in self._plans:
            experiment, method = self.federation.experiment, self.federation.method
            whole, short = divmod(samples, experiment.batch_size)
            sizes = ([experiment.batch_size] * whole + [short] * (short > 0)) * experiment.epochs
            alters = bool(self.compressed) and method.alters_forward
            self._plans[samples] = [
                Kind(size, alters and alters(Step(i, len(sizes))), method.needs_progress and i == 0)
                for i, size in enumerate(sizes)
            ]
        return self._plans[samples]

    def new_model(self) -> nn.Module:
        """A copy of the model on the device."""
        model: nn.Module = copy.deepcopy(self.federation.model).to(self.device)
        model.to(memory_format=self._format)  # type: ignore[call-overload]
        if self.fuses and self.precision != "fp32":  # fp32 is bit for bit the sequential engine's arithmetic
            fuse_norms(model)
            fuse_stems(model)
            fuse_convs(model)
        return model

    def normalized(self, x: Tensor, *, train: bool) -> Tensor:
        """data.normalize with statistics that are already on the device: a recorded step cannot bring them there."""
        mean, std = self._stats[:2] if train else self._stats[2:]
        return ((x.float() / 255 - mean) / std).contiguous(memory_format=self._format)

    def autocast(self) -> torch.autocast:
        """The context of the forward pass; no cache, because a replayed step must cast its weights anew."""
        return torch.autocast(self.device.type, torch.bfloat16, self.precision == "bf16", cache_enabled=False)

    def settings(self) -> AbstractContextManager[None]:
        """The context in which steps are recorded: the arithmetic of the precision."""
        return arithmetic(tf32=self.precision != "fp32")

    def _assign(self, clients: list[int]) -> list[Slot]:
        """A slot for each client, if possible one that has already recorded its kinds of steps."""
        kinds = {client: set(self.plan(client)) for client in clients}
        missing = {(c, slot): len(kinds[c] - slot.graphs.keys()) for c in clients for slot in self._slots}
        free, chosen = list(self._slots), {}
        for client in sorted(clients, key=lambda c: min(missing[c, slot] for slot in self._slots)):
            chosen[client] = min(free, key=lambda slot, c=client: (missing[c, slot], len(slot.graphs)))  # type: ignore[misc]
            free.remove(chosen[client])
        return [chosen[client] for client in clients]

    def _test(self) -> None:
        self._score.zero_()
        for x, y in self._tests:
            with self.autocast():
                logits = self.model(self.normalized(x, train=False)).float()
            correct = (logits.argmax(1) == y).sum()
            self._score.add_(torch.stack([correct.double(), F.cross_entropy(logits, y, reduction="sum").double()]))
