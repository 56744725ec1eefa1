"""Readers of the official file formats: paths in, (images uint8 [N, C, H, W], labels int64 [N]) out.

Only formats that cannot run code are read; pickles are never opened. A reader checks what its format fixes;
what depends on the data set (how many images, of what size) is checked in `datasets`.
"""

import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbat.errors import DataError

Images = NDArray[np.uint8]  # [N, C, H, W]
Labels = NDArray[np.int64]  # [N]
Reader = Callable[[Sequence[Path]], tuple[Images, Labels]]

_FIX = "the file is damaged or of another data set, get it again"


def read_idx(paths: Sequence[Path]) -> tuple[Images, Labels]:
    """Read an IDX pair, images then labels, each gzipped or plain (MNIST's format)."""
    images_path, labels_path = paths
    images = _read_idx(images_path, num_axes=3)[:, None]
    labels = _read_idx(labels_path, num_axes=1).astype(np.int64)
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: got {len(labels)} labels, expected one for each of the {len(images)} images in "
            f"{images_path}; take both files from the same source"
        )
    return images, labels


def read_cifar10(paths: Sequence[Path]) -> tuple[Images, Labels]:
    """Read CIFAR-10 in its binary version: records of a label byte and 3072 pixel bytes, channels first."""
    return _read_cifar(paths, label_counts=(10,))


def read_cifar100(paths: Sequence[Path]) -> tuple[Images, Labels]:
    """Read CIFAR-100 in its binary version: like CIFAR-10 with two label bytes, coarse and fine (fine is used)."""
    return _read_cifar(paths, label_counts=(20, 100))


def read_svhn(paths: Sequence[Path]) -> tuple[Images, Labels]:
    """Read one .mat file of SVHN's cropped digits: X [32, 32, 3, N] and y [N, 1], where 10 is digit 0."""
    from scipy.io import loadmat  # scipy is slow to import and only SVHN needs it

    (path,) = paths
    try:
        mat = loadmat(path, variable_names=("X", "y"))
        x, y = mat["X"], mat["y"]
    except Exception as err:  # on a damaged file scipy raises almost anything
        raise DataError(f"{path}: got {err!r}, expected a MATLAB file with arrays X and y; {_FIX}") from err
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3) or y.shape != (x.shape[3], 1):
        raise DataError(
            f"{path}: got X {x.dtype} {list(x.shape)} and y {list(y.shape)}, "
            f"expected X uint8 [32, 32, 3, N] and y [N, 1]; {_FIX}"
        )
    labels = y[:, 0].astype(np.int64)
    check_labels(labels, 1, 10, path)
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), labels % 10


def check_labels(labels: Labels, low: int, high: int, where: object, fix: str = _FIX) -> None:
    """Refuse labels outside low..high."""
    if len(labels) and not low <= labels.min() <= labels.max() <= high:
        raise DataError(f"{where}: got labels {labels.min()}..{labels.max()}, expected them in {low}..{high}; {fix}")


def _read_idx(path: Path, num_axes: int) -> Images:
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, OSError, zlib.error) as err:
            raise DataError(f"{path}: got broken gzip ({err}), expected a whole stream; {_FIX}") from err
    magic = bytes([0, 0, 8, num_axes])  # two zeros, element type unsigned byte, number of axes
    start = 4 + 4 * num_axes
    if raw[:4] != magic or len(raw) < start:
        raise DataError(
            f"{path}: got {raw[:4].hex() or 'nothing'} at its start, expected {magic.hex()} "
            f"(unsigned bytes, {num_axes} axes) and the sizes; {_FIX}"
        )
    shape = tuple(np.frombuffer(raw, ">u4", count=num_axes, offset=4).tolist())
    values = np.frombuffer(raw, np.uint8, offset=start)
    if values.size != math.prod(shape):
        raise DataError(f"{path}: got {values.size} values, expected {list(shape)} of them; {_FIX}")
    return values.reshape(shape).copy()  # frombuffer is read-only, torch wants to own writable memory


def _read_cifar(paths: Sequence[Path], label_counts: tuple[int, ...]) -> tuple[Images, Labels]:
    num_labels = len(label_counts)
    record = num_labels + 3 * 32 * 32
    parts = []
    for path in paths:
        values = np.fromfile(path, np.uint8)
        if values.size == 0 or values.size % record:
            raise DataError(f"{path}: got {values.size} bytes, expected some records of {record} bytes; {_FIX}")
        part = values.reshape(-1, record)
        for axis, count in enumerate(label_counts):
            check_labels(part[:, axis].astype(np.int64), 0, count - 1, path)
        parts.append(part)
    records = np.concatenate(parts)
    images = np.ascontiguousarray(records[:, num_labels:])
    return images.reshape(-1, 3, 32, 32), records[:, num_labels - 1].astype(np.int64)
