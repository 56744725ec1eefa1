"""Who is there: node ids are random, partition ids are not, so every node is asked for its own once.

And what each holds, of a public model that nodes follow and of what is frozen, as it said itself when last heard.
"""

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedbat.flower.records import CONFIG, client_in, frozen_in, held_in
from fedbat.following import Held


class Nodes:
    """The nodes met so far."""

    def __init__(self) -> None:
        self.clients: dict[int, int] = {}  # partition id by node id
        self.held: dict[int, Held | None] = {}  # by node id
        self.frozen: dict[int, bytes] = {}  # hash, by node id
        self._answered: set[int] = set()
        self._silent: set[int] = set()

    def meet(self, grid: Grid, hello: RecordDict, wanted: int, timeout: float) -> dict[int, int]:
        """Node id by partition id, of the nodes connected now; those not known yet are asked.

        One that did not answer is asked again only while fewer than `wanted` are known: it may be dead, and asking it
        in every round would cost the timeout in every round.
        """
        connected = set(grid.get_node_ids())
        strangers = [node for node in connected if node not in self._answered]
        if sum(node in self.clients for node in connected) >= wanted:
            strangers = [node for node in strangers if node not in self._silent]
        self._silent |= set(strangers)
        questions = [Message(hello, message_type="train", dst_node_id=node) for node in strangers]
        for reply in grid.send_and_receive(questions, timeout=timeout) if questions else []:
            if self.note(reply):
                node = reply.metadata.src_node_id
                self._answered.add(node)
                self._silent.discard(node)
                if (client := client_in(reply.content.config_records[CONFIG])) is not None:
                    self.clients[node] = client
        # Of two nodes with one partition the later to answer counts: the other is its former self.
        return {client: node for node, client in self.clients.items() if node in connected}

    def note(self, reply: Message) -> bool:
        """What the sender of a reply holds now; whether it told."""
        if not reply.has_content() or CONFIG not in reply.content.config_records:
            return False
        node, told = reply.metadata.src_node_id, reply.content.config_records[CONFIG]
        self.held[node], self.frozen[node] = held_in(told), frozen_in(told)
        return True

    def forget(self, node: int) -> None:
        """What it holds: it will be sent everything."""
        self.held.pop(node, None)
        self.frozen.pop(node, None)
