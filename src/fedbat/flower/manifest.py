"""Which tensors of a state dict go down: tied ones under one name, and frozen ones only once if nodes keep them."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from fedbat.errors import WireError
from fedbat.flower.records import model_to_bytes
from fedbat.following import HASH_BYTES
from fedbat.layout import Layout
from fedbat.streams import Tensors


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a model consists of."""

    layout: Layout  # of what goes down in every round
    names: Mapping[str, str]  # of all tensors in order, each with the name it travels under
    frozen: Tensors  # what nodes keep

    @classmethod
    def of(cls, whole: Layout, w: Tensors, tied: Mapping[str, str], kept: Collection[str]) -> "Manifest":
        """The manifest of model w, of which nodes keep the tensors `kept`."""
        layout = Layout(entry for entry in whole if entry.name not in tied and entry.name not in kept)
        return cls(layout, {name: tied.get(name, name) for name in w}, {name: w[name] for name in w if name in kept})

    def moving(self, w: Tensors) -> Tensors:
        """The tensors of w that go down in every round."""
        return {name: w[name] for name, source in self.names.items() if name == source and name not in self.frozen}

    def whole(self, moving: Tensors) -> Tensors:
        """Put the whole model together again."""
        return whole_of(self.names, self.frozen | moving)

    @property
    def told_names(self) -> Mapping[str, str]:
        """The names, if nodes must be told; if all tensors go down in every round, they see for themselves."""
        return self.names if self.frozen or any(name != source for name, source in self.names.items()) else {}

    @cached_property
    def raw(self) -> bytes:
        """The frozen tensors, packed."""
        return model_to_bytes(self.frozen)

    @cached_property
    def hash(self) -> bytes:
        """The hash of the frozen tensors; empty if there are none."""
        return hash_of(self.raw) if self.frozen else b""


def whole_of(names: Mapping[str, str], tensors: Tensors) -> Tensors:
    """A whole model in its order, from the tensors that arrived; without `names`, those are all of it."""
    if missing := set(names.values()) - tensors.keys():
        raise WireError(f"the model that arrived has no {', '.join(sorted(missing))}; was it sent by fedbat?")
    return {name: tensors[source] for name, source in names.items()} if names else tensors


def hash_of(raw: bytes) -> bytes:
    """The hash by which server and nodes identify packed tensors."""
    return hashlib.blake2b(raw, digest_size=HASH_BYTES).digest()
