"""The client's side: a mod around an existing ClientApp, and `begin` inside its training function.

The app sees what it always saw: the global model as plain arrays. What it returns as arrays is replaced by the packed
upload of the training that `begin` hooked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import nn
from torch.optim import Optimizer

from fedbat.errors import MethodError
from fedbat.flower.mods import refuse_other_mods
from fedbat.flower.records import (
    CONFIG,
    MODEL,
    UPLOAD,
    Orders,
    model_from_bytes,
    packed,
    record_of_tensors,
    tensors_of_record,
    unpacked,
)
from fedbat.layout import layout_of
from fedbat.storage import load_tensors, save_tensors
from fedbat.streams import Tensors, UniformNoise
from fedbat.training import LocalTraining

MEMORY = "fedbat.memory"  # key in Context.state
MEMORY_FOLDER = "fedbat-memory"  # key in a node's config: where its memory outlives a restart
ClientAppCallable = Callable[[Message, Context], Message]


def fedbat_mod(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: unpacks the model on its way in and packs the update on its way out.

    Messages of strategies other than `Compressed` pass untouched. What a method remembers between rounds (error
    feedback) is kept in Context.state, and in the folder that the node's config names as `fedbat-memory`, if any.
    """
    orders = Orders.take_from(msg.content) if msg.has_content() else None
    if orders is None:
        return call_next(msg, context)
    refuse_other_mods(call_next)
    identity = ConfigRecord({"partition-id": cast(int, context.node_config.get("partition-id", -1))})
    if orders.hello:
        return Message(RecordDict({CONFIG: identity}), reply_to=msg)
    for key, record in list(msg.content.array_records.items()):
        msg.content[key] = record_of_tensors(model_from_bytes(unpacked(record, MODEL)))
    if msg.metadata.message_type.split(".")[0] != "train":
        return call_next(msg, context)
    round_ = _ClientRound(orders, context, cast(int, identity["partition-id"]))
    with _current(round_):
        reply = call_next(msg, context)
    if reply.has_error():
        return reply
    data = round_.finish()
    keys = list(reply.content.array_records) or list(msg.content.array_records)
    for key in list(reply.content.array_records):
        del reply.content[key]
    reply.content[keys[0]] = packed(UPLOAD, data)
    reply.content[CONFIG] = identity
    if not reply.content.metric_records:
        reply.content["metrics"] = MetricRecord()
    return reply


def begin(model: nn.Module, optimizer: Optimizer, num_steps: int) -> LocalTraining:
    """Hook the optimizer for this round: call it after the model is loaded and before the first training step.

    `num_steps` is how often optimizer.step() will be called. The loop stays as it is.
    """
    round_ = _ROUND.get()
    if round_ is None:
        raise MethodError(
            "fedbat.flower.begin was called outside a training message of fedbat.flower.Compressed; add "
            "mods=[fedbat_mod] to the ClientApp and use that strategy, or fedbat.begin outside Flower"
        )
    return round_.begin(model, optimizer, num_steps)


@dataclass
class _ClientRound:
    """One client in one round, between the message that came and the reply that goes."""

    orders: Orders
    context: Context
    client: int
    _local: list[LocalTraining] = field(default_factory=list)

    def begin(self, model: nn.Module, optimizer: Optimizer, num_steps: int) -> LocalTraining:
        if self._local:
            raise MethodError("fedbat.flower.begin was called twice in one round; call it once, with all steps to come")
        orders, layout = self.orders, layout_of(model, self.orders.roles)
        device = next(model.parameters()).device
        noise = None
        if orders.seed is not None:
            noise = UniformNoise(orders.seed, "noise", orders.round, max(self.client, 0), device=device)
        memory = {name: tensor.to(device) for name, tensor in self._remembered().items()}
        self._local.append(
            LocalTraining(
                orders.method, model, optimizer, num_steps,
                layout=layout, memory=memory, noise=noise, context=orders.round,
            )
        )  # fmt: skip
        return self._local[0]

    def finish(self) -> bytes:
        """The upload; what the client must remember is kept before it leaves."""
        if not self._local:
            raise MethodError(
                "the training function returned without fedbat.flower.begin(model, optimizer, num_steps); "
                "call it before the first step"
            )
        upload = self._local[0].finish()
        if upload.memory:
            memory = {name: tensor.cpu() for name, tensor in upload.memory.items()}
            self.context.state[MEMORY] = record_of_tensors(memory)
            self.context.state[CONFIG] = ConfigRecord({"training": self.orders.training})
            if (path := self._memory_file()) is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_tensors(path, memory)
        return upload.to_bytes()

    def _remembered(self) -> Tensors:
        state = self.context.state
        if CONFIG in state and state.config_records[CONFIG]["training"] == self.orders.training:
            return tensors_of_record(state.array_records[MEMORY])
        path = self._memory_file()
        return load_tensors(path) if path is not None and path.exists() else {}

    def _memory_file(self) -> Path | None:
        folder = self.context.node_config.get(MEMORY_FOLDER)
        name = f"{self.orders.training}-client-{self.client}.safetensors"
        return None if folder is None else Path(str(folder)) / name


_ROUND: ContextVar[_ClientRound | None] = ContextVar("fedbat round", default=None)


@contextmanager
def _current(round_: _ClientRound) -> Iterator[None]:
    token = _ROUND.set(round_)
    try:
        yield
    finally:
        _ROUND.reset(token)
