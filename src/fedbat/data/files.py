"""Where a data set's files are: provided by the user, cached, installed by the system, bundled, or downloaded.

Files the user provides are trusted except for the shapes and counts that `datasets` checks; a download must
also match its known checksum before any of it is kept.
"""

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from fedbat.errors import DataError

if TYPE_CHECKING:
    from rich.progress import Progress


class Source(Protocol):
    """Something that knows where the files of one data set are."""

    def locate(self, root: Path | None) -> dict[str, Path] | None:
        """Return the path of every file by its official name, or None if they would have to be downloaded."""
        ...

    def find(self, root: Path | None) -> dict[str, Path]:
        """Return the paths, downloading what is missing; `root` takes the place of $FEDBAT_DATA."""
        ...


@dataclass(frozen=True)
class Bundled:
    """Files that ship inside this package."""

    folder: str
    files: tuple[str, ...]

    def locate(self, root: Path | None) -> dict[str, Path] | None:
        """Return the bundled paths."""
        return self.find(root)

    def find(self, root: Path | None) -> dict[str, Path]:
        """Return the bundled paths, whatever `root` is."""
        with resources.as_file(resources.files(__package__) / self.folder) as folder:
            return {name: folder / name for name in self.files}


@dataclass(frozen=True)
class Remote:
    """One file to download; of a tar archive, only `members` are kept."""

    url: str
    md5: str
    members: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's name on the server."""
        return PurePosixPath(self.url).name

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files that are in the cache afterwards."""
        return self.members or (self.name,)


@dataclass(frozen=True)
class Downloadable:
    """Files looked for in $FEDBAT_DATA, the cache and `system` folders, in this order, and otherwise downloaded.

    Subfolders called `name` or one of `aliases` are tried before their parent, whose files may belong to another
    set (MNIST's have the same names as Fashion-MNIST's). A file x.gz may also be there unpacked, as x.
    """

    name: str
    remotes: tuple[Remote, ...]
    aliases: tuple[str, ...] = ()
    system: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The official names of all files."""
        return tuple(name for remote in self.remotes for name in remote.files)

    def locate(self, root: Path | None) -> dict[str, Path] | None:
        """Return the paths in the first folder that has all files."""
        for folder in self._folders(root):
            paths = {name: _gzipped_or_plain(folder / name) for name in self.files}
            if all(path.is_file() for path in paths.values()):
                return paths
        return None

    def find(self, root: Path | None) -> dict[str, Path]:
        """Return the paths in the first folder that has all files, downloading them if none has."""
        if (located := self.locate(root)) is not None:
            return located
        folders, cache = list(self._folders(root)), cache_folder() / self.name
        place = Path(brought, self.name) if (brought := _brought(root)) else cache
        try:
            for remote in self.remotes:
                if not all((cache / name).is_file() for name in remote.files):
                    download(remote, cache)
        except (OSError, ValueError) as err:
            where = f"in none of {', '.join(map(str, folders))}" if len(folders) > 1 else f"not in {folders[0]}"
            raise DataError(
                f"{self.name} is {where} and could not be downloaded; "
                f"fetch {' '.join(remote.url for remote in self.remotes)} by other means "
                f"and put {', '.join(self.files)} into {place} (cause: {_cause(err)})"
            ) from err
        return {name: cache / name for name in self.files}

    def _folders(self, root: Path | None) -> Iterator[Path]:
        if brought := _brought(root):
            for parent in (Path(brought, self.name), Path(brought)):
                yield from (parent / alias for alias in self.aliases)
                yield parent
        yield cache_folder() / self.name
        yield from self.system


def _cause(error: Exception) -> object:
    """What went wrong, without what requests and urllib3 wrap around it."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return getattr(reason, "__cause__", None) or reason or error


def _brought(root: Path | None) -> Path | str | None:
    return root or os.environ.get("FEDBAT_DATA")


def missing_folder() -> Path | str | None:
    """What $FEDBAT_DATA names if that is no folder."""
    found = _brought(None)
    return found if found and not Path(found).is_dir() else None


def cache_folder() -> Path:
    """Where downloads are kept: fedbat below $XDG_CACHE_HOME, or below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbat"


def download(remote: Remote, folder: Path) -> None:
    """Download one file into `folder`, showing a progress bar on stderr.

    Every file appears there complete and checked or not at all, even when two processes download at once.
    """
    import pooch  # most runs download nothing
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    folder.mkdir(parents=True, exist_ok=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with (
        tempfile.TemporaryDirectory(dir=folder) as scratch,  # in that folder, as os.replace cannot cross file systems
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        downloader = pooch.HTTPDownloader(
            progressbar=_Bar(progress, remote.name),
            chunk_size=1 << 16,
            headers={"Accept-Encoding": "identity"},  # otherwise some servers have a .gz unpacked on the way
        )
        md5 = f"md5:{remote.md5}"
        file = Path(pooch.retrieve(remote.url, md5, remote.name, scratch, downloader=downloader))
        for path in _extract(file, remote.members) if remote.members else [file]:
            os.replace(path, folder / path.name)


class _Bar:
    """What pooch asks of a progress bar (tqdm's interface), on rich."""

    def __init__(self, progress: "Progress", name: str) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def update(self, num_bytes: int) -> None:
        self._progress.advance(self._task, num_bytes)

    def reset(self) -> None:
        self._progress.reset(self._task)

    def close(self) -> None:
        self._progress.stop()


def _extract(archive: Path, members: tuple[str, ...]) -> list[Path]:
    """Unpack the wanted members next to the archive, which does not get to choose any path that is written."""
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            source = tar.extractfile(member) if name in members and member.isfile() else None
            if source is not None:
                found[name] = archive.parent / name
                with source, found[name].open("wb") as target:
                    shutil.copyfileobj(source, target)
    if missing := sorted(set(members) - set(found)):
        raise ValueError(f"{archive.name} has no {', '.join(missing)}")
    return list(found.values())


def _gzipped_or_plain(path: Path) -> Path:
    return path if path.is_file() or path.suffix != ".gz" else path.with_suffix("")
