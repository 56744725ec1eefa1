"""What travels in Flower's messages: a raw array in each direction (frozen tensors add one down), and a few settings.

The arrays have types of their own (`stype`), so that a strategy or a mod that does not know them fails instead of
averaging packed bytes. A whole model is sent as safetensors, which say which tensors they hold; in a few bits, it is
sent in fedbat's own format, together with its layout. Nothing is unpickled.
"""

import json
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors import SafetensorError

from fedbat.errors import ConfigError, WireError
from fedbat.following import Held
from fedbat.layout import Role
from fedbat.method import Method
from fedbat.methods import METHODS, make_method, method_name
from fedbat.settings import show
from fedbat.streams import Tensors

MODEL, SNAPSHOT, PUBLIC = "fedbat.model.safetensors", "fedbat.snapshot.v1", "fedbat.public.v1"  # down
FROZEN = "fedbat.frozen.safetensors"  # next to one of these
UPLOAD = "fedbat.upload.v1"
CONFIG = "fedbat"  # key of our ConfigRecord in a message
REFUSED = "refused"  # key in it: why a node did not take what was sent, if it did not


def packed(arrays: Mapping[str, bytes]) -> ArrayRecord:
    """Bytes as the arrays of a record, by type."""
    return ArrayRecord({stype: Array("uint8", (len(data),), stype, data) for stype, data in arrays.items()})


def unpacked(record: ArrayRecord, stype: str) -> bytes:
    """The bytes that `packed` was given for a single array."""
    found = [array.stype for array in record.values()]
    if found != [stype]:
        raise WireError(f"got arrays of type {found or 'none'}, expected one of {stype}")
    return next(iter(record.values())).data


def model_to_bytes(tensors: Tensors) -> bytes:
    """All tensors of a state dict, with their order: safetensors forgets it, but apps that load by position need it."""
    order = {"order": json.dumps(list(tensors))}
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()}, order)


def model_from_bytes(data: bytes) -> Tensors:
    """The tensors that `model_to_bytes` was given, in their order."""
    try:
        found = safetensors.torch.load(data)
        (length,) = struct.unpack_from("<Q", data)
        order = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["order"])
        return {name: found[name] for name in order}
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise WireError(f"the model that arrived cannot be read ({error}); was it sent by fedbat?") from None


def tensors_of_record(record: ArrayRecord) -> Tensors:
    """A plain record's arrays as tensors, which unlike those of to_torch_state_dict can be written to."""
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}


def record_of_tensors(tensors: Tensors) -> ArrayRecord:
    """Tensors as a plain record."""
    return ArrayRecord(OrderedDict(tensors))


def client_in(told: ConfigRecord) -> int | None:
    """The partition id that a node says it has."""
    client = told.get("partition-id")
    return client if isinstance(client, int) and client >= 0 else None


def held_in(told: ConfigRecord) -> Held | None:
    """The public model that a node says it holds."""
    version, hash_ = told.get("version"), told.get("hash")
    return Held(version, hash_) if isinstance(version, int) and isinstance(hash_, bytes) else None


def frozen_in(told: ConfigRecord) -> bytes:
    """The hash of the frozen tensors that a node says it holds; empty if it says nothing."""
    hash_ = told.get("frozen")
    return hash_ if isinstance(hash_, bytes) else b""


def failure_in(reply: Message) -> str | None:
    """What failed at the client; None if nothing did. The traceback that Flower sends, too, is in the client's log."""
    if not reply.has_error():
        return None
    lines = [line.strip() for line in (reply.error.reason or "").splitlines() if line.strip(" '>")]
    return "the client failed: " + (lines or ["no reason given"])[-1].removesuffix("'>")[:300]


def refusal_in(reply: Message) -> str | None:
    """Why a node did not take the model that it was sent; None if it did."""
    if not reply.has_content() or CONFIG not in reply.content.config_records:
        return None
    reason = reply.content.config_records[CONFIG].get(REFUSED)
    return None if reason is None else " ".join(str(reason).split())[:300]  # it goes into the server's log


@dataclass(frozen=True)
class Orders:
    """What the server tells a client besides the model."""

    round: int  # from 0; the upload's context
    method: Method
    roles: Mapping[str, Role]
    seed: int | None  # of the clients' noise; None: each client draws its own
    training: str  # names this training, also after a restart of the server
    layout: str = ""  # of what comes in a few bits
    # All tensors by name, each with the tied one that stands for it; empty: all are sent, in their order.
    names: Mapping[str, str] = field(default_factory=dict)
    frozen: bytes = b""  # hash of the tensors that nodes keep
    hello: bool = False  # nothing is trained: the server only asks who is there

    def to_config(self) -> ConfigRecord:
        """The orders as they travel."""
        settings = {key: show(value) for key, value in self.method.settings().items()}
        return ConfigRecord(
            {
                "round": self.round,
                "method": method_name(self.method),
                "settings": json.dumps(settings),
                "roles": json.dumps(dict(self.roles)),
                "seed": -1 if self.seed is None else self.seed,
                "training": self.training,
                "hello": self.hello,
                # Flower's message_size_mod cannot count nothing.
                **({"layout": self.layout} if self.layout else {}),
                **({"names": json.dumps(dict(self.names))} if self.names else {}),
                **({"frozen": self.frozen} if self.frozen else {}),
            }
        )

    @classmethod
    def take_from(cls, content: RecordDict) -> "Orders | None":
        """Take the orders out of a message; None if there are none."""
        if CONFIG not in content.config_records:
            return None
        config = cast(ConfigRecord, content.pop(CONFIG))
        seed, training = cast(int, config["seed"]), cast(str, config["training"])
        if not training.isalnum():  # it becomes the name of a file on the node
            raise WireError(f"the training is named {training!r}, expected letters and digits; was it sent by fedbat?")
        method = cast(str, config["method"])
        if method not in METHODS:  # a server must not choose what a node imports
            raise ConfigError(
                f'method {method!r} is not registered here; set fedbat.METHODS["{method}"] in the ClientApp'
            )
        return cls(
            round=cast(int, config["round"]),
            method=make_method(method, json.loads(cast(str, config["settings"]))),
            roles=json.loads(cast(str, config["roles"])),
            seed=None if seed < 0 else seed,
            training=training,
            layout=cast(str, config.get("layout", "")),
            names=json.loads(cast(str, config.get("names", "{}"))),
            frozen=frozen_in(config),
            hello=cast(bool, config["hello"]),
        )
