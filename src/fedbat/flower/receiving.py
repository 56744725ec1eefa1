"""What a node does with the model that comes down: unpack it, or move its own copy of the public model along."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context
from safetensors import SafetensorError

from fedbat.errors import WireError
from fedbat.flower.records import (
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
from fedbat.storage import load_tensors, save_tensors
from fedbat.streams import Tensors
from fedbat.wire import Payload

FOLDER = "fedbat-memory"  # key in a node's config: where what it keeps outlives a restart


class CannotFollow(WireError):
    """The message does not fit the public model that this node holds."""


@dataclass
class Node:
    """What a node keeps of a training: in Context.state, and in files where its config names a folder."""

    context: Context
    orders: Orders

    @property
    def client(self) -> int:
        """Its partition id; -1 if it has none."""
        found = self.context.node_config.get("partition-id", -1)
        return found if isinstance(found, int) else -1

    def file(self, what: str) -> Path | None:
        """One for each training and client, or node where clients have no numbers."""
        folder = self.context.node_config.get(FOLDER)
        who = self.client if self.client >= 0 else f"node-{self.context.node_id}"
        name = f"{self.orders.training}-{what}-{who}.safetensors"
        return None if folder is None else Path(str(folder)) / name

    def save(self, what: str, key: str, tensors: Tensors) -> None:
        """Into the state under `key`, and into the file."""
        self.context.state[key] = record_of_tensors(tensors)
        if (path := self.file(what)) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tensors(path, tensors)

    @cached_property
    def layout(self) -> Layout:
        """Of what comes in a few bits."""
        return Layout.from_text(self.orders.layout)

    @cached_property
    def public(self) -> Follower | None:
        """The public model that it holds; one that cannot be read is as good as none."""
        for load in (self._from_state, self._from_file):
            try:
                if tensors := load():
                    return Follower.from_tensors(self.layout, tensors)
            except (WireError, SafetensorError, OSError, ValueError, RuntimeError):  # the last: sizes that do not fit
                continue
        return None

    def told(self) -> ConfigRecord:
        """Who it is, and what it holds if the server wants to know: hashed anew, so that damage shows."""
        told = ConfigRecord({"partition-id": self.client})
        if self.orders.layout and self.public is not None:
            told["version"], told["hash"] = self.public.held
        return told

    def _from_state(self) -> Tensors:
        return tensors_of_record(self.context.state.array_records.get(PUBLIC, ArrayRecord()))

    def _from_file(self) -> Tensors:
        path = self.file("public")
        return load_tensors(path) if path is not None and path.exists() else {}


def receive(record: ArrayRecord, node: Node) -> Tensors:
    """The model that a message brings, whichever way it is packed."""
    found = [(array.stype, array.data) for array in record.values()]
    if len(found) != 1 or found[0][0] not in RECEIVING:
        raise WireError(f"got arrays of type {[stype for stype, _ in found]}, expected one of {', '.join(RECEIVING)}")
    stype, data = found[0]
    return RECEIVING[stype](data, node)


def _follow(data: bytes, node: Node) -> Tensors:
    try:
        moved = follow(node.layout, node.public, data)
    except WireError as error:
        raise CannotFollow(str(error)) from None
    if moved is not node.public:
        node.public = moved
        node.save("public", PUBLIC, moved.to_tensors())
    return moved.w


RECEIVING: dict[str, Callable[[bytes, Node], Tensors]] = {
    MODEL: lambda data, node: model_from_bytes(data),
    SNAPSHOT: lambda data, node: Payload.from_bytes(data, node.layout).values(),
    PUBLIC: _follow,
}
