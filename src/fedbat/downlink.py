"""What goes down to the clients of a round: the whole model, a snapshot in a few bits, or its changes (following).

In all cases but the first, the server keeps the true model w and adds the updates to it, so nothing that a quantizer
drops is lost.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fedbat.channels import Channels, body_bytes
from fedbat.errors import ConfigError
from fedbat.following import Follower, message_bytes
from fedbat.layout import Layout
from fedbat.parts import Part
from fedbat.streams import Tensors
from fedbat.wire import Payload, upload_bytes


class Public(NamedTuple):
    """What the clients of the next round train from."""

    w: Tensors
    num_bytes: int  # of the message that brings it, or brings it up to date, as packed
    versions: Mapping[int, int] = {}  # with following: the last version of the model that each client was sent


class Downlink(ABC):
    """A way to bring the model to the clients."""

    on_any_device: ClassVar[bool] = True  # whether the true model may be kept on any device, or must be on the CPU

    @abstractmethod
    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        """The public model after `version` rounds; `before` is the one before the last round."""

    def reach(self, layout: Layout, public: Public, clients: Sequence[int], version: int) -> tuple[list[int], Public]:
        """Bytes that go down to each of these clients, and `public` with the versions they then hold."""
        return [public.num_bytes] * len(clients), public


class Whole(Downlink):
    """The model as it is."""

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        """The true model itself."""
        return Public(w, whole_bytes(layout))


@dataclass(frozen=True)
class Snapshot(Downlink):
    """The whole model in a few bits per weight. Clients keep nothing, so it suits devices that come and go."""

    narrowest: int  # bits per weight of the largest tensors

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        """The model as clients unpack it; its bytes are counted but not made."""
        widths = graded_widths(layout, self.narrowest)
        size = upload_bytes(layout, lambda entry: body_bytes(entry.shape, widths[entry.name]))
        return Public(_quantized(layout, w, widths, version).values(), size)


class Follow(Downlink):
    """For clients that keep a copy: all hold one public model, train from it, and are sent its changes after each round
    (fedbat.following).
    """

    on_any_device: ClassVar[bool] = False  # hashes are computed from the model's bytes

    def publish(self, layout: Layout, w: Tensors, before: Public | None, version: int) -> Public:
        """The first public model is the true one; later ones move towards it by one step."""
        if before is None:
            return Public(Follower.of(layout, w, version).w, message_bytes(layout, None))
        _, public = Follower(layout, version - 1, before.w).step(w)
        return Public(public.w, message_bytes(layout, 1), before.versions)

    def reach(self, layout: Layout, public: Public, clients: Sequence[int], version: int) -> tuple[list[int], Public]:
        """A follower gets the steps it missed or the whole model, whichever is shorter."""
        missed = [version - public.versions[client] if client in public.versions else None for client in clients]
        sizes = [message_bytes(layout, steps) for steps in missed]
        return sizes, public._replace(versions={**public.versions, **dict.fromkeys(clients, version)})


SNAPSHOTS = ("8", "4", "3", "2")
FULL, FOLLOW = "32", "follow"
DOWNLINKS: dict[str, Downlink] = {
    FULL: Whole(),
    **{width: Snapshot(int(width)) for width in SNAPSHOTS},
    FOLLOW: Follow(),
}


def check_downlink(name: str) -> None:
    """Refuse a name that is not in DOWNLINKS."""
    if name not in DOWNLINKS:
        raise ConfigError(
            f"down is {name!r}, expected {', '.join(map(repr, DOWNLINKS))}: bits per weight, or one-bit changes"
        )


def whole_bytes(layout: Layout) -> int:
    """Bytes of the whole model, uncompressed and without a header."""
    return sum(entry.nbytes for entry in layout)


def float32_bytes(layout: Layout) -> int:
    """The same with all floats as float32, which savings are told against."""
    return sum(4 * entry.numel if entry.dtype.is_floating_point else entry.nbytes for entry in layout)


def graded_widths(layout: Layout, narrowest: int) -> dict[str, int]:
    """Bits per weight of each tensor: `narrowest` for the largest, one more for every fourfold fewer weights, up to 8.

    A layer's relative error harms whatever the layer's size, and a bit more takes it to about a quarter. So the sum of
    all layers' errors is least for its bytes where 4^-bits is proportional to the number of weights.
    """
    largest = max((entry.numel for entry in layout.compressed), default=0)
    fewer = {entry.name: largest // max(entry.numel, 1) for entry in layout.compressed}
    return {name: min(8, narrowest + max(times.bit_length() - 1, 0) // 2) for name, times in fewer.items()}


def snapshot(layout: Layout, w: Tensors, narrowest: int, version: int = 0) -> bytes:
    """The model packed with `graded_widths`; tensors that are not compressed stay as they are."""
    return _quantized(layout, w, graded_widths(layout, narrowest), version).to_bytes()


def _quantized(layout: Layout, w: Tensors, widths: Mapping[str, int], version: int) -> Payload:
    parts: dict[str, Part] = {name: Channels.of(w[name], width) for name, width in widths.items()}
    return Payload(layout, parts, {entry.name: w[entry.name] for entry in layout.rest}, version)
