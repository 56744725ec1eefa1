"""What a node does with the model that comes down: unpack it, or move its own copy of the public model along."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.common.logger import log
from safetensors import SafetensorError

from fedbat.errors import ConfigError, WireError
from fedbat.flower.manifest import hash_of, whole_of
from fedbat.flower.records import (
    CONFIG,
    FROZEN,
    MODEL,
    PUBLIC,
    SNAPSHOT,
    Orders,
    model_from_bytes,
    record_of_tensors,
    tensors_of_record,
)
from fedbat.following import Follower, follow
from fedbat.layout import Layout
from fedbat.storage import load_tensors, make_folder, remove_old_drafts, save_tensors
from fedbat.streams import Tensors
from fedbat.wire import Payload

_UNREADABLE = (SafetensorError, OSError, ValueError, RuntimeError)  # what reading a damaged file raises
FOLDER = "fedbat-memory"  # key in a node's config: a folder where what it keeps survives a restart


class CannotFollow(WireError):
    """The message does not fit what this node holds."""


@dataclass
class Node:
    """What a node keeps of a training: in Context.state, and in files where its config names a folder.

    The state holds the last two trainings that kept something: two strategies of one app may take turns.
    """

    context: Context
    orders: Orders

    @property
    def client(self) -> int:
        """Its partition id; -1 if it has none."""
        found = self.context.node_config.get("partition-id", -1)
        return found if isinstance(found, int) else -1

    def file(self, what: str) -> Path | None:
        """A file for each training and client, or node if clients have no numbers; None without a folder."""
        folder = self.context.node_config.get(FOLDER)
        who = self.client if self.client >= 0 else f"node-{self.context.node_id}"
        name = f"{self.orders.training}-{what}-{who}.safetensors"
        return None if folder is None else Path(str(folder)) / name

    def key(self, what: str) -> str:
        """The name of a record in the state."""
        return f"{CONFIG}.{self.orders.training}.{what}"

    def save(self, what: str, tensors: Tensors) -> None:
        """Keep tensors in the state and in the file."""
        state = self.context.state
        state.pop(self.key(what), None)  # it becomes the last
        state[self.key(what)] = record_of_tensors(tensors)
        ours = [key for key in state if key.startswith(f"{CONFIG}.")]
        trainings = list(dict.fromkeys(key.split(".")[1] for key in reversed(ours)))
        for key in ours:
            if key.split(".")[1] not in trainings[:2]:
                del state[key]
        if (path := self.file(what)) is not None:
            make_folder(path.parent)
            try:
                save_tensors(path, tensors)
                remove_old_drafts(path)
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{path.parent} cannot be written ({error}); name another folder as {FOLDER} in --node-config, or "
                    "make room"
                ) from error

    @cached_property
    def layout(self) -> Layout:
        """The layout of what comes in a few bits."""
        return Layout.from_text(self.orders.layout)

    @cached_property
    def public(self) -> Follower | None:
        """The public model that this node holds; one that cannot be read counts as none."""
        for tensors in self.kept("public"):
            with suppress(WireError, ValueError, RuntimeError):  # RuntimeError: sizes that do not fit
                return Follower.from_tensors(self.layout, tensors)
        return None

    @cached_property
    def frozen(self) -> bytes:
        """The frozen tensors that this node holds, packed; damaged ones count as none."""
        found = (tensors["packed"].numpy().tobytes() for tensors in self.kept("frozen") if "packed" in tensors)
        return next((raw for raw in found if hash_of(raw) == self.orders.frozen), b"")

    def told(self) -> ConfigRecord:
        """Who this node is, and what it holds if the server wants to know: hashed anew, so that damage shows."""
        told = ConfigRecord({"partition-id": self.client})
        if self.orders.layout and self.public is not None:
            told["version"], told["hash"] = self.public.held
        if self.orders.frozen and self.frozen:
            told["frozen"] = hash_of(self.frozen)
        return told

    def kept(self, what: str) -> Iterator[Tensors]:
        """Yield what `save` was given, as far as it can be read: from the state, then from the file."""
        with suppress(*_UNREADABLE):
            if self.key(what) in self.context.state:
                yield tensors_of_record(self.context.state.array_records[self.key(what)])
        path = self.file(what)
        if path is not None and path.exists():
            try:
                found = load_tensors(path)
            except _UNREADABLE as error:
                log(WARNING, "fedbat: %s is damaged (%s); it counts as gone", path, error)
            else:
                yield found


def receive(record: ArrayRecord, node: Node) -> Tensors:
    """The model that a message brings, whichever way it is packed."""
    arrays = {array.stype: array.data for array in record.values()}
    models = arrays.keys() - ({FROZEN} if node.orders.frozen else set())
    if len(record) != len(arrays) or len(models) != 1 or not models <= RECEIVING.keys():
        stypes = [array.stype for array in record.values()]
        raise WireError(f"got arrays of type {stypes}, expected one of {', '.join(RECEIVING)}")
    frozen = _frozen(arrays.get(FROZEN), node) if node.orders.frozen else {}
    (stype,) = models
    return whole_of(node.orders.names, frozen | RECEIVING[stype](arrays[stype], node))


def _frozen(sent: bytes | None, node: Node) -> Tensors:
    """The frozen tensors, as they were sent now (and are then kept) or before."""
    raw = node.frozen if sent is None else sent
    if hash_of(raw) != node.orders.frozen:
        what = "are not held" if sent is None else "arrived damaged"
        raise CannotFollow(f"the frozen tensors with hash {node.orders.frozen.hex()} {what}; ask for them")
    if sent is not None:
        node.frozen = raw
        node.save("frozen", {"packed": torch.frombuffer(bytearray(raw), dtype=torch.uint8)})
    return model_from_bytes(raw)


def _follow(data: bytes, node: Node) -> Tensors:
    try:
        moved = follow(node.layout, node.public, data)
    except WireError as error:
        raise CannotFollow(str(error)) from None
    if moved is not node.public:
        node.public = moved
        node.save("public", moved.to_tensors())
    return moved.w


RECEIVING: dict[str, Callable[[bytes, Node], Tensors]] = {
    MODEL: lambda data, node: model_from_bytes(data),
    SNAPSHOT: lambda data, node: Payload.from_bytes(data, node.layout).values(),
    PUBLIC: _follow,
}
