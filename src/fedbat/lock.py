"""One process at a time: a lock on a file that is released when the process that holds it ends, however it ends.

The file names its holder, which removes it at the end. A holder that is killed leaves the file behind, but that means
nothing: only the operating system's lock on it counts.
"""

import errno
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fedbat.errors import ConfigError
from fedbat.storage import make_folder

LOCK = "in-use.lock"
_LOG = logging.getLogger(__name__)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder and hold it exclusively; it is removed again if nothing was put into it."""
    try:
        with holding(folder / LOCK) as mine:
            if not mine:
                holder = _holder(folder / LOCK)
                raise ConfigError(f"{folder} is in use by {holder}; wait for its end, stop it, or name another folder")
            yield
    finally:
        with suppress(OSError):  # a folder that holds something stays
            folder.rmdir()


def is_held(folder: Path) -> bool:
    """Whether a process, be it this one, has the folder locked."""
    try:
        with (folder / LOCK).open() as file:
            return not _lock(file)
    except OSError:  # nobody began, or the last one tidied up
        return False


@contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Yield whether this process, and no other, holds the file until the end; its folder is created."""
    file = _take(path)
    if file is None:
        yield False
        return
    with file:
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield True
        finally:
            with suppress(OSError):  # Windows cannot remove an open file
                path.unlink()


def _take(path: Path) -> IO[str] | None:
    while True:
        make_folder(path.parent)
        try:
            file = path.open("a")  # what its holder has written stays
        except FileNotFoundError:  # its holder has just removed the folder, too
            continue
        if not _lock(file):
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                return file
        file.close()  # its holder has just removed it, and a third process may hold a new one


def _lock(file: IO[str]) -> bool:
    try:
        _lock_or_raise(file)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return False
        _LOG.warning("%s lies on a file system without locks; nothing keeps two processes from it", file.name)
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock_or_raise(file: IO[str]) -> None:
        file.seek(1 << 30)  # beyond the contents: on Windows, locked bytes cannot be read
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock_or_raise(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text() or "another process"
    return "another process"
