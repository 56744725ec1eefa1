"""Lets a stopped server go on, with its models after the last round and what the strategy carries between rounds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp.strategy import Strategy
from safetensors import SafetensorError

from fedbat.errors import DataError
from fedbat.flower.carried import give_momenta, momenta_of
from fedbat.storage import load_tensors, save_tensors, write_text
from fedbat.streams import Tensors


class ServerCheckpoint:
    """A folder with the last round's file and a file that names it; valid at every moment. One run at a time has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def name_of(self, new: str) -> str:
        """The name of the training kept here; `new` if there is none yet."""
        path = self.folder / "training"
        if not path.exists():
            write_text(path, new)
        return path.read_text()

    def exists(self) -> bool:
        """Whether a round has been saved."""
        return (self.folder / "last.json").exists()

    def save(self, round_: int, models: Mapping[str, Tensors], strategy: Strategy, settings: Mapping[str, Any]) -> None:
        """Replace the file of the round before."""
        tensors = {f"{kind}/{name}": tensor for kind, model in models.items() for name, tensor in model.items()}
        tensors |= {path: torch.from_numpy(array) for path, array in momenta_of(strategy).items()}
        path = self.folder / f"round-{round_}.safetensors"
        save_tensors(path, tensors)
        last = {"round": round_, "file": path.name, "settings": settings}
        write_text(self.folder / "last.json", json.dumps(last) + "\n")
        for old in self.folder.glob("round-*"):  # drafts, too: nobody else writes here
            if old != path:
                old.unlink()

    def load(self, strategy: Strategy) -> tuple[int, dict[str, Tensors], dict[str, Any]]:
        """The last round, the models after it and the settings; what the strategy carried is put back into it."""
        try:
            last: dict[str, Any] = json.loads((self.folder / "last.json").read_text())
            tensors = load_tensors(self.folder / last["file"])
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DataError(
                f"the checkpoint in {self.folder} cannot be read ({error}); restore it, or begin anew in another folder"
            ) from error
        models: dict[str, Tensors] = {}
        for path, tensor in tensors.items():
            kind, _, name = path.partition("/")
            models.setdefault(kind, {})[name] = tensor
        give_momenta(strategy, models)
        return last["round"], models, last.get("settings", {})
