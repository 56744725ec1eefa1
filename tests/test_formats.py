"""Readers give back what was written in the official layout, and refuse everything else by name."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from fedbat.data.formats import read_cifar10, read_cifar100, read_idx, read_svhn
from fedbat.errors import DataError


def idx_bytes(values):
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def random_bytes(*shape, high=256, seed=0):
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.uint8)


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[st.integers(1, 5)] * 3), st.sampled_from([gzip.compress, bytes]), st.integers(0, 2**32 - 1))
def test_idx_round_trip(tmp_path_factory, shape, pack, seed):
    folder = tmp_path_factory.mktemp("idx")
    images, labels = random_bytes(*shape, seed=seed), random_bytes(shape[0], high=10, seed=seed + 1)
    (folder / "images").write_bytes(pack(idx_bytes(images)))
    (folder / "labels").write_bytes(pack(idx_bytes(labels)))
    x, y = read_idx([folder / "images", folder / "labels"])
    assert x.dtype == np.uint8 and y.dtype == np.int64 and x.flags.writeable
    np.testing.assert_array_equal(x, images[:, None])
    np.testing.assert_array_equal(y, labels)


GOOD_IMAGES, GOOD_LABELS = idx_bytes(random_bytes(3, 4, 5)), idx_bytes(random_bytes(3, high=10))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"", GOOD_LABELS, "images: got nothing at its start, expected 00000803"),
        (GOOD_IMAGES[:9], GOOD_LABELS, "images: got 00000803 at its start"),
        (GOOD_IMAGES[:-1], GOOD_LABELS, r"images: got 59 values, expected \[3, 4, 5\]"),
        (GOOD_IMAGES + b"x", GOOD_LABELS, "images: got 61 values"),
        (GOOD_IMAGES[:4] + b"\xff" * 12 + GOOD_IMAGES[16:], GOOD_LABELS, "images: got 60 values"),
        (b"\0\0\x0d\x03" + GOOD_IMAGES[4:], GOOD_LABELS, "images: got 00000d03"),  # float32 elements
        (
            GOOD_LABELS,
            GOOD_IMAGES,
            "images: got 00000801 at its start, expected 00000803",
        ),  # the wrong way round
        (gzip.compress(GOOD_IMAGES, mtime=0)[:-9], GOOD_LABELS, "images: got broken gzip"),
        (b"\x1f\x8b" + GOOD_IMAGES, GOOD_LABELS, "images: got broken gzip"),
        (
            GOOD_IMAGES,
            idx_bytes(random_bytes(4)),
            "labels: got 4 labels, expected one for each of the 3 images",
        ),
    ],
)
def test_idx_refuses(tmp_path, images, labels, message):
    (tmp_path / "images").write_bytes(images)
    (tmp_path / "labels").write_bytes(labels)
    with pytest.raises(DataError, match=message):
        read_idx([tmp_path / "images", tmp_path / "labels"])


@pytest.mark.parametrize(
    ("read", "label_bytes"),
    [(read_cifar10, [[3], [0], [9], [9]]), (read_cifar100, [[19, 99], [0, 5], [7, 0], [1, 50]])],
)
def test_cifar_reads_batches_in_order(tmp_path, read, label_bytes):
    images = random_bytes(4, 3, 32, 32)
    paths = [tmp_path / "1.bin", tmp_path / "2.bin"]
    for path, part in zip(paths, ([0, 1, 2], [3]), strict=True):
        path.write_bytes(b"".join(bytes(label_bytes[i]) + images[i].tobytes() for i in part))
    x, y = read(paths)
    assert x.dtype == np.uint8 and y.dtype == np.int64 and x.flags.c_contiguous
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, [labels[-1] for labels in label_bytes])


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_cifar10, b"", "got 0 bytes, expected some records of 3073 bytes"),
        (read_cifar10, bytes(2 * 3073 - 1), "got 6145 bytes, expected some records of 3073 bytes"),
        (read_cifar10, bytes([10]) + bytes(3072), r"got labels 10\.\.10, expected them in 0\.\.9"),
        (read_cifar100, bytes(3073), "got 3073 bytes, expected some records of 3074 bytes"),
        (read_cifar100, bytes([20, 0]) + bytes(3072), r"expected them in 0\.\.19"),
        (read_cifar100, bytes([0, 100]) + bytes(3072), r"expected them in 0\.\.99"),
    ],
)
def test_cifar_refuses(tmp_path, read, content, message):
    good, bad = tmp_path / "good.bin", tmp_path / "bad.bin"
    good.write_bytes(bytes(3074 if read is read_cifar100 else 3073))
    bad.write_bytes(content)
    with pytest.raises(DataError, match=f"bad.bin: .*{message}"):
        read([good, bad])


def test_svhn_reads_its_axes_and_its_ten(tmp_path):
    images = random_bytes(3, 3, 32, 32)
    x_mat = images.transpose(2, 3, 1, 0)  # [32, 32, 3, N]
    savemat(tmp_path / "train.mat", {"X": x_mat, "y": np.array([[10], [1], [9]], np.uint8)})
    x, y = read_svhn([tmp_path / "train.mat"])
    assert x.dtype == np.uint8 and y.dtype == np.int64 and x.flags.c_contiguous
    np.testing.assert_array_equal(x, images)
    np.testing.assert_array_equal(y, [0, 1, 9])


SVHN_X, SVHN_Y = random_bytes(32, 32, 3, 4), np.array([[1], [2], [3], [10]], np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": SVHN_X}, "expected a MATLAB file with arrays X and y"),
        ({"X": SVHN_X[:28], "y": SVHN_Y}, r"got X uint8 \[28, 32, 3, 4\]"),
        ({"X": SVHN_X.transpose(3, 0, 1, 2), "y": SVHN_Y}, r"got X uint8 \[4, 32, 32, 3\]"),
        ({"X": SVHN_X.astype(np.float32), "y": SVHN_Y}, "got X float32"),
        ({"X": SVHN_X, "y": SVHN_Y[:3]}, r"and y \[3, 1\]"),
        ({"X": SVHN_X, "y": SVHN_Y - 1}, r"got labels 0\.\.9, expected them in 1\.\.10"),
        ({"X": SVHN_X, "y": SVHN_Y * 2}, r"got labels 2\.\.20, expected them in 1\.\.10"),
    ],
)
def test_svhn_refuses(tmp_path, content, message):
    savemat(tmp_path / "bad.mat", content)
    with pytest.raises(DataError, match=r"bad\.mat: .*" + message):
        read_svhn([tmp_path / "bad.mat"])


@pytest.mark.parametrize("keep", [0, 40, 128, 5000])
def test_svhn_refuses_a_truncated_file(tmp_path, keep):
    path = tmp_path / "short.mat"
    savemat(path, {"X": SVHN_X, "y": SVHN_Y})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"short\.mat: .* get it again"):
        read_svhn([path])


class Bomb:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("read", [read_cifar10, read_cifar100, read_idx, read_svhn])
def test_pickles_are_not_opened(tmp_path, read):
    path, trace = tmp_path / "data_batch_1", tmp_path / "exploded"
    path.write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(DataError):
        read([path, path] if read is read_idx else [path])
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists()  # so the bomb does work
