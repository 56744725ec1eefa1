"""What goes down to the clients of a round: the global model as it is, or a snapshot of it in a few bits.

The server keeps the true model and adds the updates to that, not to the snapshot: what the quantizer drops is never
lost. A snapshot needs nothing of the client, so it fits devices that come and go.
"""

from typing import NamedTuple

from fedbat.channels import WIDTHS, Channels
from fedbat.errors import ConfigError
from fedbat.layout import Layout
from fedbat.streams import Tensors
from fedbat.wire import Payload

FULL = "32"
DOWNLINKS = (FULL, *map(str, sorted(WIDTHS, reverse=True)))


class Sent(NamedTuple):
    """What each client receives."""

    w: Tensors
    num_bytes: int  # as packed


def check_downlink(name: str) -> None:
    """Refuse what there is not."""
    if name not in DOWNLINKS:
        raise ConfigError(f"--down is {name}, expected the bits of a weight on its way down: {', '.join(DOWNLINKS)}")


def send_down(down: str, layout: Layout, w: Tensors, context: int) -> Sent:
    """Pack the global tensors, and unpack them as a client does."""
    if down == FULL:
        return Sent(w, sum(entry.nbytes for entry in layout))
    parts = {entry.name: Channels.of(w[entry.name], int(down)) for entry in layout.compressed}
    rest = {entry.name: w[entry.name] for entry in layout.rest}
    raw = Payload(layout, dict(parts), rest, context).to_bytes()
    received = Payload.from_bytes(raw, layout, context)
    found = {name: part.unpack() for name, part in received.parts.items()} | received.rest
    return Sent({e.name: found[e.name].view(e.shape).to(e.dtype) for e in layout}, len(raw))
