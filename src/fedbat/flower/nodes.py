"""Which nodes there are: node ids are random, partition ids are not, so every node is asked for its partition id once.

Also what each node holds, of a public model that nodes follow and of frozen tensors, as it last said itself.
"""

from logging import WARNING
from typing import NamedTuple

from flwr.app import DEFAULT_TTL, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedbat.flower.records import CONFIG, client_in, failure_in, frozen_in, held_in
from fedbat.following import Held

_SILENT = (
    "fedbat: node %s has not said who it is, and takes no part until it does: %s; it will be asked again, ever less "
    "often"
)
_NOBODY = (
    "fedbat: no node has told a partition-id, so which ones train is not repeatable, whatever the seed; see "
    "--node-config"
)


class Question(NamedTuple):
    """The question that nodes are asked if they are not known yet."""

    content: RecordDict
    message_type: str  # the same as of the strategy's own messages, for which clients have a function


class Nodes:
    """The nodes met so far."""

    def __init__(self) -> None:
        self.clients: dict[int, int] = {}  # partition id by node id
        self.held: dict[int, Held | None] = {}  # by node id
        self.frozen: dict[int, bytes] = {}  # hash, by node id
        self._answered: set[int] = set()
        self._silent: dict[int, int] = {}  # rounds until a node that did not answer is asked again
        self._pauses: dict[int, int] = {}  # how many these were the last time
        self._told_of: set[int] = set()  # nodes that cannot take part
        self._told_of_nobody = False
        self.num_unknown = 0  # of those connected, nodes that have not said who they are

    def meet(self, grid: Grid, question: Question, wanted: int, timeout: float) -> dict[int, int]:
        """Node id by partition id, for the nodes connected now; those not known yet are asked.

        A node that did not answer may be dead, and asking it in every round would cost the timeout every time: it is
        asked again when it reconnects, while fewer than `wanted` are known, and after 1, 2, 4, ... rounds.
        """
        connected = set(grid.get_node_ids())
        strangers = [node for node in connected if node not in self._answered]
        self._silent = {node: rounds - 1 for node, rounds in self._silent.items() if node in connected}
        self._pauses = {node: rounds for node, rounds in self._pauses.items() if node in connected}
        if sum(node in self.clients for node in connected) >= wanted:
            strangers = [node for node in strangers if self._silent.get(node, 0) <= 0]
        content, kind = question
        ttl, why = min(timeout, DEFAULT_TTL), dict.fromkeys(strangers, "no reply")
        questions = [Message(content, node, kind, ttl=ttl) for node in strangers]
        for reply in grid.send_and_receive(questions, timeout=timeout) if questions else []:
            node = reply.metadata.src_node_id
            if self.note(reply):
                self._answered.add(node)
            else:
                why[node] = failure_in(reply) or "its reply does not tell; is mods=[fedbat_mod] in its ClientApp?"
        for node in set(strangers) - self._answered:
            if node not in self._pauses:
                log(WARNING, _SILENT, node, why[node])
            self._silent[node] = self._pauses[node] = 2 * self._pauses.get(node, 1)
        self.num_unknown = len(connected - self._answered)
        # Of two nodes with one partition, the later to answer counts: the other is its former self.
        found = {client: node for node, client in self.clients.items() if node in connected}
        if found:
            self._tell_of((connected & self._answered) - set(found.values()))
        elif not self._told_of_nobody:
            log(WARNING, _NOBODY)
            self._told_of_nobody = True
        return found

    def _tell_of(self, idle: set[int]) -> None:
        """Warn about nodes that will never be sampled."""
        for node in sorted(idle - self._told_of):
            if (client := self.clients.get(node)) is None:
                why = "it has no partition-id, a whole number, and others have"
            else:
                why = f"another node has its partition-id, {client}, too"
            log(WARNING, "fedbat: node %s takes no part: %s; see --node-config", node, why)
        self._told_of |= idle

    def note(self, reply: Message) -> bool:
        """Note what the sender of a reply holds now; False if the reply does not tell."""
        if not reply.has_content() or CONFIG not in reply.content.config_records:
            return False
        node, told = reply.metadata.src_node_id, reply.content.config_records[CONFIG]
        self.held[node], self.frozen[node] = held_in(told), frozen_in(told)
        client, before = client_in(told), self.clients.get(node)
        if client is not None and client != before:
            if before is not None:
                log(WARNING, "fedbat: node %s has the partition-id %s now; it had %s", node, client, before)
            self.clients.pop(node, None)  # it becomes the latest to say so
            self.clients[node] = client
        return True

    def forget(self, node: int) -> None:
        """Forget what a node holds, so that it is sent everything."""
        self.held.pop(node, None)
        self.frozen.pop(node, None)
