"""What clients remember between rounds (error feedback): the last used in RAM, up to a budget, the rest in files.

A `Memories` is a value, like the weights it belongs to: `begin` a round, let the new value `remember`, and the old one
still holds what was remembered before the round. When the next round begins, only the newest value is kept.
"""

import copy
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from fedbat.errors import ConfigError, MethodError
from fedbat.storage import load_tensors, make_folder, save_tensors
from fedbat.streams import Tensors


class Memories(Mapping[int, Tensors]):
    """Client -> tensors. What exceeds `budget` bytes goes to the folder; if none is named, to a temporary one."""

    def __init__(
        self, folder: Path | None = None, budget: float = float("inf"), saved: Mapping[int, int] | None = None
    ) -> None:
        self._numbers = dict(saved or {})  # client -> number of its memory; each is written at most once
        self._store = _Store(folder, budget, set(self._numbers.values()))

    def __getitem__(self, client: int) -> Tensors:
        return self._store.get(self._numbers[client])

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def begin(self) -> Self:
        """The value to fill in the round that begins now; all values but this one are forgotten."""
        numbers = set(self._numbers.values())
        self._store.check(numbers)
        self._store.keep_only(numbers)
        after = copy.copy(self)
        after._numbers = dict(self._numbers)
        return after

    def remember(self, client: int, tensors: Tensors) -> None:
        """Replace what the client remembers, in a round that has begun."""
        self._numbers[client] = self._store.put(tensors)

    def write(self, folder: Path) -> dict[int, int]:
        """Write what is not on disk yet; returns client -> number, the `saved` that opens these memories again."""
        self._store.check(set(self._numbers.values()))
        self._store.settle_in(folder)
        for number in self._numbers.values():
            self._store.write(number)
        return dict(self._numbers)

    def release_others(self) -> None:
        """Keep these files from now on, whatever happens, and delete all others."""
        self._store.pinned = set(self._numbers.values())
        self._store.keep_only(self._store.pinned)


class _Store:
    """Numbered memories, shared by one value or several; a number's content never changes."""

    def __init__(self, folder: Path | None, budget: float, saved: set[int]) -> None:
        self._folder, self._budget = folder and folder.resolve(), budget
        self._recent: OrderedDict[int, Tensors] = OrderedDict()  # the last is the most recently used
        self._on_disk, self.pinned = set(saved), set(saved)  # pinned: a checkpoint names them
        self._next, self.num_bytes = max(saved, default=-1) + 1, 0

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fedbat-memories-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def settle_in(self, folder: Path) -> None:
        if self._on_disk and self._folder != folder.resolve():
            raise ConfigError(f"memories live in {self._folder}, expected {folder}; make them with Memories({folder})")
        self._folder = folder.resolve()

    def check(self, numbers: set[int]) -> None:
        """Refuse memories that are neither in RAM nor on disk any more."""
        if numbers - self._recent.keys() - self._on_disk:
            raise MethodError(
                "what clients remembered in this state is forgotten, because later rounds have begun since; go on from "
                "the newest state, or save a Checkpoint of each before the next round and load it"
            )

    def put(self, tensors: Tensors) -> int:
        number, self._next = self._next, self._next + 1
        self._keep(number, tensors)
        return number

    def get(self, number: int) -> Tensors:
        tensors = self._recent.get(number)
        if tensors is None:
            self.check({number})
            tensors = load_tensors(self._path(number))
            self._keep(number, tensors)
        self._recent.move_to_end(number)
        return tensors

    def write(self, number: int) -> None:
        if number not in self._on_disk:
            make_folder(self.folder)
            save_tensors(self._path(number), self._recent[number])
            self._on_disk.add(number)

    def keep_only(self, numbers: set[int]) -> None:
        for number in self._recent.keys() - numbers:
            self._drop(number)
        for number in self._on_disk - numbers - self.pinned:
            self._path(number).unlink(missing_ok=True)
            self._on_disk.discard(number)

    def _keep(self, number: int, tensors: Tensors) -> None:
        self._recent[number] = tensors
        self.num_bytes += _num_bytes(tensors)
        while self.num_bytes > self._budget and len(self._recent) > 1:  # the last is in use anyway
            oldest = next(iter(self._recent))
            self.write(oldest)
            self._drop(oldest)

    def _drop(self, number: int) -> None:
        self.num_bytes -= _num_bytes(self._recent.pop(number))

    def _path(self, number: int) -> Path:
        return self.folder / memory_file(number)


def memory_file(number: int) -> str:
    """The name of a memory's file."""
    return f"memory-{number}.safetensors"


def half_of_ram() -> float:
    """The default budget: half of the machine's memory, or no limit if that is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    except (AttributeError, ValueError, OSError):
        return float("inf")


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
