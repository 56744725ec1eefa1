"""A run's state on disk, to continue from. Complete at every moment, however the process (not the machine) ends.

checkpoint.json            the next round, and which of the other files belong to it; replacing it is the commit
w-ROUND.safetensors        the global tensors before that round, their average if one is kept, the public ones
memory-NUMBER.safetensors  one client's memory; written once, kept as long as it is named
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from fedbat.downlink import Public
from fedbat.errors import DataError
from fedbat.memories import Memories, memory_file
from fedbat.simulation import State
from fedbat.storage import DRAFT, load_tensors, save_tensors, write_text
from fedbat.streams import Tensors

_OURS = re.compile(rf"(checkpoint\.json|(w|memory)-\d+\.safetensors)(\.\w+{re.escape(DRAFT)})?")


class Checkpoint(NamedTuple):
    """A state, and the round that comes next (counted from 0)."""

    next_round: int
    state: State

    def save(self, folder: Path) -> None:
        """Replace the checkpoint in this folder; only memories that changed are written."""
        w = f"w-{self.next_round}.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        public = self.state.public
        kept = {"w": self.state.w, "average": self.state.average, "public": public.w if public else {}}
        save_tensors(folder / w, {f"{k}/{name}": tensor for k, found in kept.items() for name, tensor in found.items()})
        index = {
            "next_round": self.next_round,
            "w": w,
            "memories": self.state.memories.write(folder),
            "public": public and {"num_bytes": public.num_bytes, "versions": public.versions},
        }
        write_text(folder / "checkpoint.json", json.dumps(index))
        self.state.memories.release_others()
        _remove_others(folder, _named(index))

    @classmethod
    def load(cls, folder: Path, budget: float = float("inf")) -> "Checkpoint":
        """The checkpoint in this folder; memories are read when they are used, and up to `budget` bytes stay in RAM."""
        try:
            index = json.loads((folder / "checkpoint.json").read_text())
            named = _named(index)
            saved = {int(client): int(number) for client, number in index["memories"].items()}
            tensors: dict[str, Tensors] = {"w": {}, "average": {}, "public": {}}
            for name, tensor in load_tensors(folder / index["w"]).items():
                whose, _, rest = name.partition("/")
                tensors[whose][rest] = tensor
            public = None
            if about := index["public"]:
                versions = {int(client): int(version) for client, version in about["versions"].items()}
                public = Public(tensors["public"], int(about["num_bytes"]), versions)
            state = State(tensors["w"], Memories(folder, budget, saved), tensors["average"], public)
            if missing := named - {path.name for path in folder.iterdir()}:
                raise FileNotFoundError(f"{min(missing)} is not there")
            _remove_others(folder, named)  # left behind by a process that died
            return cls(int(index["next_round"]), state)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DataError(
                f"the checkpoint in {folder} cannot be read ({error}); start the run anew in another folder"
            ) from error


def _named(index: dict[str, Any]) -> set[str]:
    """The files that belong to the checkpoint with this index."""
    return {"checkpoint.json", index["w"], *(memory_file(int(number)) for number in index["memories"].values())}


def _remove_others(folder: Path, named: set[str]) -> None:
    """Delete other checkpoints' files; whatever has no such name is the user's own."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in named:
            path.unlink()


def has_checkpoint(folder: Path) -> bool:
    """Whether this folder holds a checkpoint to load."""
    return (folder / "checkpoint.json").is_file()


def next_round(folder: Path) -> int:
    """The round (counted from 0) that the checkpoint in this folder comes before; 0 if there is none."""
    if not has_checkpoint(folder):
        return 0
    try:
        return int(json.loads((folder / "checkpoint.json").read_text())["next_round"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the checkpoint in {folder} cannot be read ({error})") from error


def remove_checkpoint(folder: Path) -> None:
    """Delete the checkpoint, which a finished run no longer needs."""
    shutil.rmtree(folder, ignore_errors=True)
