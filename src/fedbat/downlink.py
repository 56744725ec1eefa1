"""What goes down to the clients of a round: the global model, a snapshot in a few bits, or what it has changed by.

In all but the first the server keeps the true model w and adds the updates to that, so what a quantizer drops is never
lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedbat.binarize import mean_abs
from fedbat.channels import WIDTHS, Channels
from fedbat.errors import ConfigError
from fedbat.layout import Layout
from fedbat.parts import Part, Signs
from fedbat.streams import Tensors
from fedbat.wire import Payload


class Public(NamedTuple):
    """What the clients of the next round train from."""

    w: Tensors
    num_bytes: int  # of the message that brings it, or brings it up to date, as packed
    versions: Mapping[int, int] = {}  # the last version of a followed model that each client has had, by client


class Whole:
    """The model as it is."""

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        """The public model after `version` rounds; `before` is the one before the last of them."""
        return Public(w, whole_bytes(layout))

    def reach(self, layout: Layout, public: Public, clients: Sequence[int], version: int) -> tuple[list[int], Public]:
        """Bytes that go down to each of these clients, and what is known of them then."""
        return [public.num_bytes] * len(clients), public


@dataclass(frozen=True)
class Snapshot(Whole):
    """The whole model with `width` bits a weight. It needs nothing of the client: it fits devices that come and go."""

    width: int

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        """As clients unpack it."""
        parts: dict[str, Part] = {entry.name: Channels.of(w[entry.name], self.width) for entry in layout.compressed}
        raw = Payload(layout, parts, _rest(layout, w), version).to_bytes()
        heard = Payload.from_bytes(raw, layout)
        weights = {name: part.unpack().view(w[name].shape) for name, part in heard.parts.items()}
        return Public({name: (weights | heard.rest)[name].to(x.dtype) for name, x in w.items()}, len(raw))


class Follow(Whole):
    """For clients that keep what they have: all hold one public model v, train from it, and after each round learn
    v <- v + Q(w - v), one bit a weight. What Q misses stays in w - v and is sent later.
    """

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        """The first public model is the true one."""
        if before is None:
            return Public({name: tensor.clone() for name, tensor in w.items()}, whole_bytes(layout))
        raw = broadcast(layout, w, before.w, version)
        return Public(follow(before.w, Payload.from_bytes(raw, layout)), len(raw), before.versions)

    def reach(self, layout: Layout, public: Public, clients: Sequence[int], version: int) -> tuple[list[int], Public]:
        """A follower gets the broadcasts it missed (of all but the last only the signs) or the whole model, whichever
        is shorter; who is new gets the whole model.
        """
        whole, rest = whole_bytes(layout), sum(entry.nbytes for entry in layout.rest)
        sizes, versions = list[int](), dict(public.versions)
        for client in clients:
            missed = version - versions.get(client, -whole)  # who is new has missed more than the whole model takes
            sizes.append(min(whole, missed * (public.num_bytes - rest) + rest * (missed > 0)))
            versions[client] = version
        return sizes, public._replace(versions=versions)


FULL, FOLLOW = "32", "follow"
DOWNLINKS: dict[str, Whole] = {
    FULL: Whole(),
    **{str(width): Snapshot(width) for width in sorted(WIDTHS, reverse=True)},
    FOLLOW: Follow(),
}


def check_downlink(name: str) -> None:
    """Refuse what there is not."""
    if name not in DOWNLINKS:
        raise ConfigError(f"--down is {name}, expected {', '.join(DOWNLINKS)}: bits of a weight, or following")


def broadcast(layout: Layout, w: Tensors, public: Tensors, version: int) -> bytes:
    """Q(w - v): a sign for each weight and one step size for each layer; all other tensors as they are."""
    parts: dict[str, Part] = {}
    for entry in layout.compressed:
        missing = w[entry.name].float() - public[entry.name].float()
        parts[entry.name] = Signs.of(missing > 0, mean_abs(missing))
    return Payload(layout, parts, _rest(layout, w), version).to_bytes()


def follow(public: Tensors, heard: Payload) -> Tensors:
    """v + Q(w - v). Every holder adds the same broadcasts in the same order, so all hold the same bits."""
    moved = {name: public[name].float() + part.unpack().view(public[name].shape) for name, part in heard.parts.items()}
    return {name: (moved | heard.rest)[name].to(x.dtype) for name, x in public.items()}


def whole_bytes(layout: Layout) -> int:
    """Of the model as it is."""
    return sum(entry.nbytes for entry in layout)


def _rest(layout: Layout, w: Tensors) -> Tensors:
    return {entry.name: w[entry.name] for entry in layout.rest}
