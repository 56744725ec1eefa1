"""Files that are complete or absent: written under a draft name, then renamed."""

import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedbat.errors import ConfigError
from fedbat.streams import Tensors

DRAFT = ".draft"
_DAY = 24 * 60 * 60  # seconds
os.umask(_UMASK := os.umask(0))  # there is no other way to read it


def make_folder(folder: Path) -> None:
    """Create a folder and all folders above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError) and not folder.exists():  # somebody has just removed it
            return make_folder(folder)
        raise ConfigError(f"folder {folder} cannot be created ({error.strerror}); name another") from None


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield a file to write instead of `path`, which it replaces once it is complete; no two writers share one."""
    draft = path.with_name(f"{path.name}.{uuid4().hex}{DRAFT}")
    try:
        yield draft
        draft.chmod(0o666 & ~_UMASK)  # safetensors makes files that only their owner can read
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def remove_old_drafts(path: Path) -> None:
    """Delete what writers of `path` that were killed left behind: its drafts that are older than a day."""
    for draft in path.parent.glob(f"{glob.escape(path.name)}.*{DRAFT}"):
        with suppress(FileNotFoundError):  # its writer, or another process, was faster
            if draft.stat().st_mtime < time.time() - _DAY:
                draft.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace the whole file."""
    with draft_of(path) as draft:
        draft.write_text(text)


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Save values, memory formats (in another one, a sum may differ in its last bit) and the tensors' order."""
    orders = {name: _order(tensor) for name, tensor in tensors.items()}
    stored = {name: tensor.permute(orders[name]).contiguous() for name, tensor in tensors.items()}
    told = {name: f"{place};{','.join(map(str, order))}" for place, (name, order) in enumerate(orders.items())}
    with draft_of(path) as draft:
        save_file(stored, str(draft), told)


def load_tensors(path: Path) -> Tensors:
    """What was saved, bit for bit, in the same memory formats and order."""
    with safe_open(str(path), "pt") as file:
        told = {name: text.rpartition(";") for name, text in file.metadata().items()}
        names = sorted(told, key=lambda name: int(told[name][0]))
        return {name: _reordered(file.get_tensor(name), _dims(told[name][2])) for name in names}


def _order(tensor: Tensor) -> list[int]:
    """The dimensions from the widest stride to the narrowest."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


def _dims(text: str) -> list[int]:
    return [int(dim) for dim in text.split(",") if dim]


def _reordered(stored: Tensor, order: list[int]) -> Tensor:
    return stored.permute([order.index(dim) for dim in range(len(order))])
