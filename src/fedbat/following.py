"""Following: server and clients hold one public model and move it by one bit per weight (docs/wire-format.md, 10).

After a round the server says how the public model v moves towards the true model w: v <- v + Q(w - v). A message brings
a holder up to date with the steps it missed, or with the whole model if that is shorter. It names the versions and
hashes of the model it starts from and of the one it leads to, so that nobody can drift: a holder that starts from or
arrives at anything else gets an error and keeps what it had.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fedbat.binarize import mean_abs
from fedbat.errors import WireError
from fedbat.layout import Layout
from fedbat.parts import Dense, Part, Signs
from fedbat.streams import Tensors
from fedbat.wire import Payload, dense_upload_bytes, plain_bytes, signs_upload_bytes, split_payloads

MAGIC, FORMAT, WHOLE, STEPS = b"FBPM", 1, 0, 1
HASH_BYTES = 16
_HEADER = struct.Struct(f"<4sBBHQ{HASH_BYTES}sQ{HASH_BYTES}s")


class Held(NamedTuple):
    """Identifies the public model that somebody holds."""

    version: int
    hash: bytes


NOTHING = Held(0, bytes(HASH_BYTES))  # takes the place of the start in a message that has none


@dataclass(frozen=True, eq=False)
class Follower:
    """The public model as held by a client or by the server itself. Version n is the model after n steps."""

    layout: Layout
    version: int
    w: Tensors

    @classmethod
    def of(cls, layout: Layout, w: Tensors, version: int = 0) -> "Follower":
        """The true model as the public one, its weights rounded to float32, in which they travel."""
        weights = {entry.name: w[entry.name].float().to(entry.dtype) for entry in layout.compressed}
        return cls(layout, version, {name: (weights.get(name, x)).clone() for name, x in w.items()})

    @classmethod
    def from_tensors(cls, layout: Layout, tensors: Tensors) -> "Follower":
        """The inverse of `to_tensors`; WireError if they do not fit the layout. Damaged values show in the hash."""
        w, version = {name.removeprefix("w/"): x for name, x in tensors.items() if name != "version"}, -1
        if "version" in tensors and tensors["version"].numel() == 1:
            version = int(tensors["version"])
        if {(name, x.dtype, x.shape) for name, x in w.items()} != {(e.name, e.dtype, e.shape) for e in layout}:
            raise WireError("a model with other tensors is kept, expected those of the layout; ask for the whole model")
        if version < 0:
            raise WireError("the model that is kept has no version; ask for the whole model")
        return cls(layout, version, {entry.name: w[entry.name] for entry in layout})

    def to_tensors(self) -> Tensors:
        """The form in which it is kept in a file; `from_tensors` reads it."""
        return {"version": torch.tensor(self.version), **{f"w/{name}": x for name, x in self.w.items()}}

    @cached_property
    def held(self) -> Held:
        """Version and hash; the hash covers the version, the layout and every bit of the model."""
        digest = hashlib.blake2b(self.layout.hash + struct.pack("<Q", self.version), digest_size=HASH_BYTES)
        for entry in self.layout:
            digest.update(plain_bytes(self.w[entry.name], entry))
        return Held(self.version, digest.digest())

    def step(self, w: Tensors) -> tuple[bytes, "Follower"]:
        """Q(w - v), packed as one sign per weight and one step size per layer, and the model it leads to."""
        parts: dict[str, Part] = {}
        for entry in self.layout.compressed:
            missing = (w[entry.name].float() - self.w[entry.name].float()).reshape(-1)
            parts[entry.name] = Signs.of(missing > 0, mean_abs(missing))
        raw = Payload(self.layout.compressed, parts, {}, self.version + 1).to_bytes()
        return raw, self._after(raw)._with({entry.name: w[entry.name] for entry in self.layout.rest})

    def apply(self, raw: bytes) -> "Follower":
        """The model that a message leads to; WireError with the reason if it is not for this holder."""
        return follow(self.layout, self, raw)

    def _after(self, raw: bytes | memoryview) -> "Follower":
        """v + Q, a float32 sum rounded once, so that every holder on every machine gets the same bits."""
        heard = Payload.from_bytes(raw, self.layout.compressed, context=self.version + 1)
        moved = {name: part.unpack().view(self.w[name].shape) for name, part in heard.parts.items()}
        moved = {name: (self.w[name].float() + change).to(self.w[name].dtype) for name, change in moved.items()}
        return Follower(self.layout, self.version + 1, self.w | moved)

    def _with(self, rest: Tensors) -> "Follower":
        """The same model with new values for the tensors that are not compressed."""
        values = {name: x.to(self.w[name].dtype, copy=True) for name, x in rest.items()}
        return Follower(self.layout, self.version, self.w | values)


class Step(NamedTuple):
    """The move from one version of the public model to the next."""

    start: Held
    raw: bytes


@dataclass(frozen=True, eq=False)
class Leader:
    """The server's side: the public model, and as many of the last steps to it as are shorter than the whole model."""

    public: Follower
    steps: tuple[Step, ...] = ()

    def lead(self, w: Tensors) -> "Leader":
        """Move the public model one step towards the true one."""
        raw, public = self.public.step(w)
        steps = (*self.steps, Step(self.public.held, raw))
        return Leader(public, steps[max(0, len(steps) - max_steps(public.layout)) :])

    def start(self, held: Held | None) -> Held | None:
        """Where a message for this holder starts; None if it holds nothing, or nothing that is known here."""
        return held if held in self._starts else None

    def message(self, held: Held | None) -> bytes:
        """The message that brings a holder up to date; the whole model if no known step starts from what it holds."""
        layout, public = self.public.layout, self.public
        if held is None or held not in self._starts:
            parts: dict[str, Part] = {e.name: Dense(public.w[e.name].float().reshape(-1)) for e in layout.compressed}
            return _pack(WHOLE, NOTHING, public.held, [Payload(layout, parts, self._rest, public.version).to_bytes()])
        payloads = [step.raw for step in self.steps[self._starts.index(held) :]]
        if payloads:
            payloads.append(Payload(layout.rest, {}, self._rest, public.version).to_bytes())
        return _pack(STEPS, held, public.held, payloads)

    @property
    def _starts(self) -> list[Held]:
        return [step.start for step in self.steps] + [self.public.held]

    @property
    def _rest(self) -> Tensors:
        return {entry.name: self.public.w[entry.name] for entry in self.public.layout.rest}


def follow(layout: Layout, follower: Follower | None, raw: bytes) -> Follower:
    """The public model that a message leads to. WireError with the reason if it is damaged, if it does not start from
    what `follower` holds, or if it leads somewhere other than it says.
    """
    what, start, end, data = _unpack(raw)
    payloads = split_payloads(data)
    if what == WHOLE:
        found = _whole(layout, end.version, payloads)
    else:
        found = _stepped(_starting_from(follower, start), end.version, payloads)
    if next(payloads, None) is not None:
        raise WireError("bytes follow the last payload, expected none; the message is damaged")
    if found.held != end:
        raise WireError(
            f"the message leads to a model with hash {found.held.hash.hex()}, expected {end.hash.hex()}; "
            "it is damaged: ask for the whole model"
        )
    return found


def message_bytes(layout: Layout, missed: int | None) -> int:
    """Length of the message for a holder that has missed that many steps; None if it holds nothing."""
    if missed is None or missed > max_steps(layout):
        return _HEADER.size + dense_upload_bytes(layout)
    steps = missed * signs_upload_bytes(layout.compressed)
    return _HEADER.size + steps + (dense_upload_bytes(layout.rest) if missed else 0)


def max_steps(layout: Layout) -> int:
    """The largest number of steps that is shorter than the whole model."""
    room = dense_upload_bytes(layout) - dense_upload_bytes(layout.rest)
    return max(0, room - 1) // signs_upload_bytes(layout.compressed)


def _pack(what: int, start: Held, end: Held, payloads: Iterable[bytes]) -> bytes:
    return b"".join([_HEADER.pack(MAGIC, FORMAT, what, 0, *start, *end), *payloads])


def _unpack(raw: bytes) -> tuple[int, Held, Held, memoryview]:
    """Take apart and check the header alone; what a flipped bit in it could spoil shows in the hashes."""
    if len(raw) < _HEADER.size:
        raise WireError(f"got {len(raw)} bytes, a message has at least {_HEADER.size}; it was cut short")
    magic, format_, what, unused, version, hash_, new_version, new_hash = _HEADER.unpack_from(raw)
    start, end = Held(version, hash_), Held(new_version, new_hash)
    if magic != MAGIC:
        raise WireError(f"starts with {magic!r}, expected {MAGIC!r}; these bytes bring no public model")
    if format_ != FORMAT:
        raise WireError(f"format version {format_}, this release reads {FORMAT}; use the same fedbat on both sides")
    if end.version >> 63:  # it could not be stored: files and other messages hold signed numbers
        raise WireError(f"leads to version {end.version}, expected less than 2^63; the message is damaged")
    if unused or what not in (WHOLE, STEPS) or (what == WHOLE and start != NOTHING) or start.version > end.version:
        raise WireError("the header contradicts itself; the message is damaged")
    return what, start, end, memoryview(raw)[_HEADER.size :]


def _starting_from(follower: Follower | None, start: Held) -> Follower:
    if follower is None:
        raise WireError(f"steps from version {start.version}, but no model is held; ask for the whole model")
    held = follower.held
    if held.version < start.version:
        raise WireError(
            f"steps from version {start.version}, version {held.version} is held: some were missed; ask for them"
        )
    if held.version > start.version:
        raise WireError(
            f"steps from version {start.version}, version {held.version} is held: they were applied before; drop them"
        )
    if held.hash != start.hash:
        raise WireError(
            f"version {start.version} with hash {held.hash.hex()} is held, the steps start from {start.hash.hex()}: "
            "another training's, or damaged; ask for the whole model"
        )
    return follower


def _stepped(follower: Follower, version: int, payloads: Iterable[memoryview]) -> Follower:
    if follower.version == version:
        return follower
    for payload in payloads:
        try:
            if follower.version == version:
                return follower._with(Payload.from_bytes(payload, follower.layout.rest, context=version).rest)
            follower = follower._after(payload)
        except WireError as error:
            raise WireError(f"step to version {follower.version + 1}: {error}") from None
    raise WireError(f"the steps end at version {follower.version}, expected {version} and the rest; it was cut short")


def _whole(layout: Layout, version: int, payloads: Iterable[memoryview]) -> Follower:
    for payload in payloads:
        return Follower(layout, version, Payload.from_bytes(payload, layout, context=version).values())
    raise WireError("the message ends after its header, expected a model; it was cut short")
