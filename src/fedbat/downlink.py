"""What goes down to the clients of a round: the global model, a snapshot in a few bits, or what it has changed by.

In all but the first the server keeps the true model w and adds the updates to that, so what a quantizer drops is never
lost.

- A snapshot needs nothing of the client, so it fits devices that come and go.
- Following needs clients that keep what they have: all hold one public model v, train from it, and after each round
  learn v <- v + Q(w - v), one bit a weight. What Q misses stays in w - v and is sent later.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fedbat.binarize import mean_abs
from fedbat.channels import WIDTHS, Channels
from fedbat.errors import ConfigError
from fedbat.layout import Layout
from fedbat.parts import Part, Signs
from fedbat.streams import Tensors
from fedbat.wire import Payload

FULL, FOLLOW = "32", "follow"
DOWNLINKS = (FULL, *map(str, sorted(WIDTHS, reverse=True)), FOLLOW)
HASH_BYTES = 8  # with every broadcast travels a hash of the public model it leads to


class Public(NamedTuple):
    """What the clients of the next round train from."""

    w: Tensors
    num_bytes: int  # of the message that brings it, or brings it up to date, as packed
    versions: Mapping[int, int] = {}  # the last version of a followed model that each client has had, by client


def check_downlink(name: str) -> None:
    """Refuse what there is not."""
    if name not in DOWNLINKS:
        raise ConfigError(f"--down is {name}, expected {', '.join(DOWNLINKS)}: bits of a weight, or following")


def publish(down: str, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
    """The public model after `version` rounds; `before` is the one before the last of them."""
    if down == FULL:
        return Public(w, whole_bytes(layout))
    if down == FOLLOW:
        before = before or Public({name: tensor.clone() for name, tensor in w.items()}, whole_bytes(layout))
        if version == 0:
            return before
        raw = broadcast(layout, w, before.w, version)
        return Public(follow(before.w, Payload.from_bytes(raw, layout)), len(raw) + HASH_BYTES, before.versions)
    raw = snapshot(layout, w, int(down), version)
    return Public(_received(raw, layout), len(raw))


def snapshot(layout: Layout, w: Tensors, width: int, version: int) -> bytes:
    """The whole model with `width` bits a weight."""
    parts: dict[str, Part] = {entry.name: Channels.of(w[entry.name], width) for entry in layout.compressed}
    return Payload(layout, parts, _rest(layout, w), version).to_bytes()


def broadcast(layout: Layout, w: Tensors, public: Tensors, version: int) -> bytes:
    """Q(w - v): a sign for each weight and one step size for each layer; all other tensors as they are."""
    parts: dict[str, Part] = {}
    for entry in layout.compressed:
        missing = w[entry.name].float() - public[entry.name].float()
        parts[entry.name] = Signs.of(missing > 0, mean_abs(missing))
    return Payload(layout, parts, _rest(layout, w), version).to_bytes()


def follow(public: Tensors, heard: Payload) -> Tensors:
    """v + Q(w - v). Every holder adds the same broadcasts in the same order, so all hold the same bits."""
    moved = {
        name: (public[name].float() + part.unpack().view(public[name].shape)) for name, part in heard.parts.items()
    }
    return {name: (moved | heard.rest)[name].to(x.dtype) for name, x in public.items()}


def reached(down: str, layout: Layout, public: Public, clients: Iterable[int], version: int) -> tuple[int, Public]:
    """Bytes that go down to these clients, and who has which version then.

    A follower gets the broadcasts it missed (of all but the last only the signs) or the whole model, whichever is
    shorter.
    """
    if down != FOLLOW:
        return public.num_bytes * len(list(clients)), public
    whole, rest = whole_bytes(layout) + HASH_BYTES, sum(entry.nbytes for entry in layout.rest)
    total, versions = 0, dict(public.versions)
    for client in clients:
        missed = version - versions[client] if client in versions else None
        brought = whole if missed is None else public.num_bytes * missed - rest * (missed - 1) if missed else 0
        total += min(brought, whole)
        versions[client] = version
    return total, public._replace(versions=versions)


def whole_bytes(layout: Layout) -> int:
    """Of the model as it is."""
    return sum(entry.nbytes for entry in layout)


def _received(raw: bytes, layout: Layout) -> Tensors:
    payload = Payload.from_bytes(raw, layout)
    found = {name: part.unpack() for name, part in payload.parts.items()} | payload.rest
    return {e.name: found[e.name].view(e.shape).to(e.dtype) for e in layout}


def _rest(layout: Layout, w: Tensors) -> Tensors:
    return {entry.name: w[entry.name] for entry in layout.rest}
