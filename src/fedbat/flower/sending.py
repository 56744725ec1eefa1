"""What the server sends down, by `down`: the whole model, a snapshot in a few bits, or steps of one that nodes follow.

A `Sending` is a value that stands for the model between two rounds; `after` gives the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING
from typing import ClassVar

import numpy as np
import torch
from flwr.common.logger import log

from fedbat.downlink import FOLLOW, FULL, SNAPSHOTS, snapshot
from fedbat.errors import ConfigError, WireError
from fedbat.flower.records import MODEL, PUBLIC, SNAPSHOT, model_to_bytes
from fedbat.following import HASH_BYTES, Follower, Held, Leader, Step
from fedbat.layout import Layout
from fedbat.streams import Tensors
from fedbat.wire import Payload


class Sending(ABC):
    """How nodes get the model."""

    STYPE: ClassVar[str]

    @property
    def layout_text(self) -> str:
        """What a node must know to unpack a message; empty if the message itself says what it holds."""
        return ""

    @property
    @abstractmethod
    def received(self) -> Tensors:
        """The model that clients have after receiving it."""

    @abstractmethod
    def after(self, w: Tensors) -> "Sending":
        """The value for the next round, with w as the true model."""

    def start(self, held: Held | None) -> Held | None:
        """The part of `held` on which the message depends: nodes that agree on it get the same bytes."""
        return None

    @abstractmethod
    def message(self, held: Held | None) -> bytes:
        """The bytes for a node that holds `held`, or nothing if that is None."""

    def to_tensors(self) -> Tensors:
        """What a checkpoint of the server has to hold besides the true model."""
        return {}


@dataclass(frozen=True, eq=False)
class SendWhole(Sending):
    """The model as it is."""

    w: Tensors
    STYPE: ClassVar[str] = MODEL

    @property
    def received(self) -> Tensors:
        return self.w

    def after(self, w: Tensors) -> "SendWhole":
        return SendWhole(w)

    def message(self, held: Held | None) -> bytes:
        return model_to_bytes(self.w)


@dataclass(frozen=True, eq=False)
class SendSnapshot(Sending):
    """A snapshot with a few bits per weight, the same for everyone."""

    width: int
    layout: Layout
    w: Tensors
    STYPE: ClassVar[str] = SNAPSHOT

    @property
    def layout_text(self) -> str:
        return self.layout.text

    @cached_property
    def _raw(self) -> bytes:
        return snapshot(self.layout, self.w, self.width)

    @cached_property
    def received(self) -> Tensors:
        return Payload.from_bytes(self._raw, self.layout).values()

    def after(self, w: Tensors) -> "SendSnapshot":
        return SendSnapshot(self.width, self.layout, w)

    def message(self, held: Held | None) -> bytes:
        return self._raw


@dataclass(frozen=True, eq=False)
class SendSteps(Sending):
    """Steps of one bit per weight, for nodes that keep a copy."""

    leader: Leader
    STYPE: ClassVar[str] = PUBLIC

    @classmethod
    def begin(cls, layout: Layout, w: Tensors, saved: Tensors) -> "SendSteps":
        """Go on from what `to_tensors` gave; without it, or if it is of another layout, the true model is public."""
        _check_finite(w)
        public = {name: x for name, x in saved.items() if not name.startswith("step/")}
        try:
            follower = Follower.from_tensors(layout, public) if saved else Follower.of(layout, w)
        except WireError as error:
            log(WARNING, "fedbat: nodes are sent the whole model anew: in the checkpoint, %s", error)
            return cls(Leader(Follower.of(layout, w)))
        kept = sorted((int(name.removeprefix("step/")), x) for name, x in saved.items() if name.startswith("step/"))
        raws = [(version, x.numpy().tobytes()) for version, x in kept]
        steps = tuple(Step(Held(version, raw[:HASH_BYTES]), raw[HASH_BYTES:]) for version, raw in raws)
        return cls(Leader(follower, steps))

    @property
    def layout_text(self) -> str:
        return self.leader.public.layout.text

    @property
    def received(self) -> Tensors:
        return self.leader.public.w

    def after(self, w: Tensors) -> "SendSteps":
        return SendSteps(self.leader.lead(w))

    def start(self, held: Held | None) -> Held | None:
        return self.leader.start(held)

    def message(self, held: Held | None) -> bytes:
        return self.leader.message(held)

    def to_tensors(self) -> Tensors:
        steps = {
            f"step/{start.version}": torch.from_numpy(np.frombuffer(start.hash + raw, np.uint8).copy())
            for start, raw in self.leader.steps
        }
        return self.leader.public.to_tensors() | steps


def _check_finite(w: Tensors) -> None:
    """Refuse NaN and infinity, which clients would refuse round after round."""
    for name, x in w.items():
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise ConfigError(
                f"{name} holds NaN or infinity, which does not go down in a few bits; use down='{FULL}', "
                "register_buffer(..., persistent=False) for what the model makes itself, such as a mask, or for what "
                "never changes the role skip with keep_frozen=True"
            )


def _snapshots(width: int) -> Callable[[Layout, Tensors, Tensors], Sending]:
    def begin(layout: Layout, w: Tensors, saved: Tensors) -> Sending:
        _check_finite(w)
        return SendSnapshot(width, layout, w)

    return begin


SENDING: dict[str, Callable[[Layout, Tensors, Tensors], Sending]] = {
    FULL: lambda layout, w, saved: SendWhole(w),
    **{width: _snapshots(int(width)) for width in SNAPSHOTS},
    FOLLOW: SendSteps.begin,
}
"""From the layout, the true model, and what was saved if a run goes on."""
