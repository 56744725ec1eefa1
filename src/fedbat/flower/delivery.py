"""How the model gets to the nodes: each is sent what it needs, and once more in the same round if it refuses that."""

from collections.abc import Callable, Iterable
from logging import INFO
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedbat.flower.manifest import Manifest
from fedbat.flower.nodes import Nodes
from fedbat.flower.records import CONFIG, FROZEN, Orders, packed, refusal_in
from fedbat.flower.sending import Sending
from fedbat.following import Held
from fedbat.streams import Tensors


class Delivery:
    """Makes the messages, round after round; `num_bytes` is the packed size of the latest ones."""

    def __init__(self, sending: Sending, manifest: Manifest, nodes: Nodes, timeout: float) -> None:
        self.sending, self.manifest, self.num_bytes = sending, manifest, 0
        self._nodes, self._timeout = nodes, timeout
        self._fill: Callable[[list[int]], list[Message]] = lambda nodes: []

    @property
    def received(self) -> Tensors:
        """The model that clients have after receiving it."""
        return self.manifest.whole(self.sending.received)

    def go_on(self, w: Tensors) -> None:
        """Go on to the next round, with w as the true model."""
        self.sending = self.sending.after(self.manifest.moving(w))

    def nothing(self) -> list[Message]:
        """No messages: nobody is asked in this round."""
        self.num_bytes = 0
        return []

    def messages(self, draft: Message, orders: Orders, nodes: list[int]) -> list[Message]:
        """The draft with our orders, its arrays replaced by what brings the model to each node."""
        self.num_bytes = 0
        self._fill = lambda nodes: self._filled(draft, orders, nodes)
        return self._fill(nodes)

    def again(self, refused: list[Message]) -> list[Message]:
        """New messages for nodes that refused because they hold something other than we believed, and said what."""
        nodes = [reply.metadata.src_node_id for reply in refused]
        for node, reply in zip(nodes, refused, strict=True):
            self._nodes.note(reply)
            log(INFO, "fedbat: node %s is brought up to date: %s", node, refusal_in(reply))
        return self._fill(nodes)

    def heard(self, replies: Iterable[Message]) -> list[Message]:
        """The replies; what their senders hold is noted. A node that refused twice gets the whole model next time."""
        replies = list(replies)
        for reply in replies:
            self._nodes.note(reply)
            if refusal_in(reply) is not None:
                self._nodes.forget(reply.metadata.src_node_id)
        return replies

    def _filled(self, draft: Message, orders: Orders, nodes: list[int]) -> list[Message]:
        contents: dict[tuple[Held | None, bool], tuple[int, RecordDict]] = {}  # one for all nodes that need the same
        messages = []
        for node in nodes:
            held = self.sending.start(self._nodes.held.get(node))
            whole = self._nodes.frozen.get(node, b"") != self.manifest.hash
            if (held, whole) not in contents:
                arrays = {self.sending.STYPE: self.sending.message(held)}
                arrays |= {FROZEN: self.manifest.raw} if whole else {}
                content = RecordDict(dict(draft.content.items()))
                for key in content.array_records:
                    content[key] = packed(arrays)
                content[CONFIG] = orders.to_config()
                contents[held, whole] = sum(map(len, arrays.values())), content
            size, content = contents[held, whole]
            self.num_bytes += size
            about = draft.metadata
            ttl = min(about.ttl, self._timeout)  # a slow node need not work on rounds that are over
            messages.append(Message(content, node, about.message_type, ttl=ttl, group_id=about.group_id))
        return messages


class SecondTry:
    """A grid in which nodes that refused a message are sent what `again` makes of their replies."""

    def __init__(self, grid: Grid, again: Callable[[list[Message]], list[Message]]) -> None:
        self._grid, self._again = grid, again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As every grid does; if nodes are asked again, it waits once more, at most as long."""
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        refused = [reply for reply in replies if refusal_in(reply) is not None]
        if not refused:
            return replies
        taken = [reply for reply in replies if refusal_in(reply) is None]
        return taken + list(self._grid.send_and_receive(self._again(refused), timeout=timeout))
