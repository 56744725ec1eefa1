"""Write the Fashion-MNIST subset that ships inside the package.

    python scripts/make_fmnist_mini.py SOURCE_DIR [OUT_DIR]

The first 600 training and 100 test images of each class, in the original order, in the original format.
SOURCE_DIR holds the four original files (Debian: /usr/share/datasets/fashion-mnist).
"""

import gzip
import sys
from pathlib import Path

import numpy as np

from fedbat.data.formats import Labels, read_idx

OUT = Path(__file__).parents[1] / "src/fedbat/data/fmnist_mini"
PER_CLASS = {"train": 600, "t10k": 100}


def first_of_each_class(labels: Labels, count: int) -> np.ndarray:
    """Indices of the first `count` samples of each class, ascending."""
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in np.unique(labels)]))


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write uint8 values as gzipped IDX; the same values always give the same bytes (on one zlib)."""
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    # gzip.compress writes an OS byte that depends on the Python version; GzipFile does not
    with path.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as file:
        file.write(header + values.tobytes())


def main(source: Path, out: Path = OUT) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for split, count in PER_CLASS.items():
        names = f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"
        images, labels = read_idx([source / name for name in names])
        chosen = first_of_each_class(labels, count)
        write_idx(out / names[0], images[chosen, 0])
        write_idx(out / names[1], labels[chosen].astype(np.uint8))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
