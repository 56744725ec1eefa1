"""The client's side: a mod around an existing ClientApp, and `begin` inside its training function.

The app sees what it always sees: the global model as plain arrays. The arrays it returns are replaced by the packed
upload of the training that `begin` hooked.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from logging import WARNING

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from torch import nn
from torch.optim import Optimizer

from fedbat.errors import DivergedError, MethodError
from fedbat.flower.mods import refuse_other_mods
from fedbat.flower.receiving import CannotFollow, Node, receive
from fedbat.flower.records import CONFIG, REFUSED, UPLOAD, Orders, packed, record_of_tensors, tensors_of_record
from fedbat.layout import Layout, layout_of, tensors_of, uncompiled
from fedbat.streams import Tensors, UniformNoise
from fedbat.training import LocalTraining

_STEPS = (
    "fedbat: begin announced num_steps=%s, but the optimizer took %s steps; methods plan by what is announced (FedBAT: "
    "when its warm-up ends)"
)
_UNDONE = "fedbat: what is remembered is of round %s, and this is round %s; it is forgotten"
ClientAppCallable = Callable[[Message, Context], Message]


def fedbat_mod(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Flower mod: unpacks the model on its way in and packs the update on its way out.

    Messages of strategies other than `Compressed` pass untouched. What a node must keep between rounds (the memory of
    error feedback, its copy of a public model, frozen tensors) is in Context.state, and in the folder that the node's
    config names as `fedbat-memory`, if any.
    """
    orders = Orders.take_from(msg.content) if msg.has_content() else None
    if orders is None:
        with _current(_PlainRound()):
            return call_next(msg, context)
    refuse_other_mods(call_next)
    node = Node(context, orders)
    if orders.hello:
        return Message(RecordDict({CONFIG: node.told()}), reply_to=msg)
    try:
        arrays = record_of_tensors(receive(next(iter(msg.content.array_records.values())), node))
    except CannotFollow as error:  # train only on the server's model; tell the server what this node holds
        return Message(RecordDict({CONFIG: ConfigRecord({**node.told(), REFUSED: str(error)})}), reply_to=msg)
    for key in list(msg.content.array_records):
        msg.content[key] = arrays
    if msg.metadata.message_type.split(".")[0] != "train":
        with _current(_PlainRound()):
            reply = call_next(msg, context)
        if reply.has_content() and (orders.layout or orders.frozen):
            reply.content[CONFIG] = node.told()
        return reply
    round_ = _ClientRound(node=node, arrays=arrays)
    with _current(round_):
        reply = call_next(msg, context)
        if reply.has_error():
            return reply
        data = round_.finish()
    keys = list(reply.content.array_records) or list(msg.content.array_records)
    if len(keys) > 1:
        raise MethodError(f"the reply has the array records {', '.join(keys)}, expected the model's alone")
    reply.content[keys[0]] = packed({UPLOAD: data})
    reply.content[CONFIG] = node.told()
    if not reply.content.metric_records:
        reply.content["metrics"] = MetricRecord()
    return reply


def begin(model: nn.Module, optimizer: Optimizer, num_steps: int) -> None:
    """Hook the optimizer for this round: call it after the model is loaded and before the first training step.

    `num_steps` is how often optimizer.step() will be called. The loop stays as it is, and fedbat_mod ends the round.
    """
    round_ = _ROUND.get()
    if round_ is None:
        raise MethodError(
            "fedbat.flower.begin was called outside a message that fedbat_mod has seen; add mods=[fedbat_mod] to the "
            "ClientApp, or use fedbat.begin outside Flower"
        )
    round_.begin(model, optimizer, num_steps)


class _PlainRound:
    """A message of another strategy, or an evaluation: what is trained there is not sent, and `begin` does nothing."""

    def begin(self, model: nn.Module, optimizer: Optimizer, num_steps: int) -> None:
        pass

    def end(self) -> None:
        pass


@dataclass
class _ClientRound(_PlainRound):
    """One client in one round, from the incoming message to the reply."""

    node: Node
    arrays: ArrayRecord  # the model that came
    local: LocalTraining | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer, num_steps: int) -> None:
        if self.local is not None:
            raise MethodError("fedbat.flower.begin was called twice in one round; call it once, with all steps to come")
        self.local = self._training(model, optimizer, num_steps)

    def end(self) -> None:
        """Leave the optimizer as it was, whatever happened, since an app may keep it."""
        if self.local is not None:
            self.local.__exit__(None, None, None)

    def _training(self, model: nn.Module, optimizer: Optimizer, num_steps: int) -> LocalTraining:
        orders, layout = self.node.orders, layout_of(model, self.node.orders.roles)
        _check_loaded(model, layout, tensors_of_record(self.arrays))
        device = next(model.parameters()).device
        noise = None
        if orders.seed is not None and self.node.client >= 0:  # without a number, it must not share another's noise
            noise = UniformNoise(orders.seed, "noise", orders.round, self.node.client, device=device)
        memory = {name: tensor.to(device) for name, tensor in self._remembered().items()}
        return LocalTraining(
            orders.method, model, optimizer, num_steps,
            layout=layout, memory=memory, noise=noise, context=orders.round,
        )  # fmt: skip

    def finish(self) -> bytes:
        """The upload; what the client must remember is saved before the upload leaves."""
        if self.local is None:
            raise MethodError(
                "the training function returned without fedbat.flower.begin(model, optimizer, num_steps); "
                "call it before the first step"
            )
        upload, announced = self.local.finish(), self.local.step.total
        if upload.num_steps != announced:
            log(WARNING, _STEPS, announced, upload.num_steps)
        if any(not torch.isfinite(tensor).all() for tensor in upload.memory.values()):
            raise DivergedError("training diverged to NaN or infinity; nothing is sent, and the memory stays as it was")
        if upload.memory:
            kept = {"round": torch.tensor(self.node.orders.round)}
            for when, memory in (("before", self.local.memory), ("after", upload.memory)):
                kept |= {f"{when}/{name}": tensor.cpu() for name, tensor in memory.items()}
            self.node.save("memory", kept)
        return upload.to_bytes()

    def _remembered(self) -> Tensors:
        """The memory before this round, even if it was trained before and its uploads were lost."""
        kept = next((kept for kept in self.node.kept("memory") if "round" in kept), None)
        if kept is None or not self.node.orders.method.remembers:
            return {}
        last, now = int(kept.pop("round")), self.node.orders.round
        if last > now:
            log(WARNING, _UNDONE, last + 1, now + 1)
            return {}
        when = "before/" if last == now else "after/"
        return {name.removeprefix(when): tensor for name, tensor in kept.items() if name.startswith(when)}


def _check_loaded(model: nn.Module, layout: Layout, received: Tensors) -> None:
    """Refuse a model that does not hold what came: what is sent back would be no change of it."""
    model = uncompiled(model)
    for name, tensor in tensors_of(model, layout).items():
        if name not in received:
            known = ", ".join(list(received)[:3])
            raise MethodError(
                f"begin got a model with {name!r}, but the server sent {known}, ...; pass the model itself"
            )
        came = received[name].to(tensor)
        if came.shape != tensor.shape or not torch.allclose(came, tensor, rtol=0, atol=0, equal_nan=True):
            raise MethodError(
                f"{name} is not what the server sent; call begin after load_state_dict, and give tensors that stay "
                'with the client the role "skip" (roles= of Compressed)'
            )


_ROUND: ContextVar[_PlainRound | None] = ContextVar("fedbat round", default=None)


@contextmanager
def _current(round_: _PlainRound) -> Iterator[None]:
    token = _ROUND.set(round_)
    try:
        yield
    finally:
        _ROUND.reset(token)
        round_.end()
