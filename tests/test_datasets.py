"""Every data set is read as its Spec says; the bundled one is a true subset of Fashion-MNIST."""

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedbat.data import DATASETS, load_dataset, normalize, read_dataset
from fedbat.data.formats import read_idx
from fedbat.errors import ConfigError, DataError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
needs_debian = pytest.mark.skipif(not DEBIAN.is_dir(), reason="no Debian package dataset-fashion-mnist")

NUM_TRAIN, NUM_TEST = 5, 2


def tiny(name):
    return replace(DATASETS[name], num_train=NUM_TRAIN, num_test=NUM_TEST)


def random_split(spec, seed, num):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num, *spec.shape), dtype=np.uint8)
    return images, rng.integers(0, spec.num_classes, num, dtype=np.uint8)


def write_idx(folder, split, images, labels):
    header = struct.pack(">4B3I", 0, 0, 8, 3, len(images), *images.shape[2:])
    (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    header = struct.pack(">4BI", 0, 0, 8, 1, len(labels))
    (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))


def write_fmnist(folder, train, test):
    write_idx(folder, "train", *train)
    write_idx(folder, "t10k", *test)


def write_cifar10(folder, train, test):
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir()
    records = [bytes([y]) + x.tobytes() for x, y in zip(*train, strict=True)]
    for i, record in enumerate(records):
        (folder / f"data_batch_{i + 1}.bin").write_bytes(record)
    (folder / "test_batch.bin").write_bytes(b"".join(bytes([y]) + x.tobytes() for x, y in zip(*test, strict=True)))


def write_cifar100(folder, train, test):
    folder = folder / "cifar-100-binary"
    folder.mkdir()
    for name, split in (("train", train), ("test", test)):
        records = b"".join(bytes([y // 5, y]) + x.tobytes() for x, y in zip(*split, strict=True))
        (folder / f"{name}.bin").write_bytes(records)


def write_svhn(folder, train, test):
    for name, (images, labels) in (("train", train), ("test", test)):
        y = np.where(labels == 0, 10, labels)[:, None]
        savemat(folder / f"{name}_32x32.mat", {"X": images.transpose(2, 3, 1, 0), "y": y})


WRITERS = {"cifar10": write_cifar10, "cifar100": write_cifar100, "fmnist": write_fmnist, "svhn": write_svhn}


@pytest.mark.parametrize("name", WRITERS)
def test_official_layout_is_read(tmp_path, name):
    spec = tiny(name)
    train, test = random_split(spec, 0, NUM_TRAIN), random_split(spec, 1, NUM_TEST)
    (tmp_path / name).mkdir()
    WRITERS[name](tmp_path / name, train, test)
    data = read_dataset(spec, tmp_path)
    assert data.spec == spec
    for x, y, (images, labels) in ((data.x_train, data.y_train, train), (data.x_test, data.y_test, test)):
        assert x.dtype == torch.uint8 and y.dtype == torch.int64 and x.is_contiguous()
        assert torch.equal(x, torch.from_numpy(images))
        assert torch.equal(y, torch.from_numpy(labels.astype(np.int64)))


@pytest.mark.parametrize("name", WRITERS)
def test_wrong_count_is_refused(tmp_path, name):
    spec = tiny(name)
    WRITERS[name](tmp_path, random_split(spec, 0, NUM_TRAIN), random_split(spec, 1, NUM_TEST + 1))
    shape = ", ".join(map(str, spec.shape)) + r"\]"
    with pytest.raises(DataError, match=rf"got images \[3, {shape}, expected \[2, {shape}; replace") as caught:
        read_dataset(spec, tmp_path)
    assert all(file in str(caught.value) for file in spec.test_files)


def test_wrong_shape_and_wrong_labels_are_refused(tmp_path):
    spec = tiny("fmnist")
    (images, labels), test = random_split(spec, 0, NUM_TRAIN), random_split(spec, 1, NUM_TEST)
    write_fmnist(tmp_path, (images[..., :27], labels), test)
    with pytest.raises(DataError, match=r"got images \[5, 1, 28, 27\]"):
        read_dataset(spec, tmp_path)
    write_fmnist(tmp_path, (images, labels + 10), test)
    with pytest.raises(DataError, match=r"train-labels.*expected them in 0\.\.9"):
        read_dataset(spec, tmp_path)


def test_variable_is_honoured(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBAT_DATA", str(tmp_path))
    spec = tiny("svhn")
    write_svhn(tmp_path, random_split(spec, 0, NUM_TRAIN), random_split(spec, 1, NUM_TEST))
    assert len(read_dataset(spec).y_train) == NUM_TRAIN
    with pytest.raises(DataError, match=r"expected \[73257, 3, 32, 32\]"):
        load_dataset("svhn")


def test_unknown_name_lists_the_choices():
    with pytest.raises(ConfigError, match="'mnist'; choose from cifar10, cifar100, fmnist, fmnist-mini, svhn"):
        load_dataset("mnist")


@pytest.mark.parametrize("name", DATASETS)
def test_specs_are_consistent(name):
    spec = DATASETS[name]
    assert list(DATASETS) == sorted(DATASETS) and spec.name == name
    channels = {len(v) for v in (spec.train_mean, spec.train_std, spec.test_mean, spec.test_std)}
    assert channels == {spec.shape[0]}
    assert sorted(spec.train_files + spec.test_files) == sorted(spec.source.files)
    assert 1 <= spec.default_labels <= spec.num_classes
    if name != "fmnist-mini":
        assert spec.source.name == name  # the folder the error message tells the user to make


def test_images_are_normalized_as_in_the_authors_code():
    used = {name: (spec.train_mean[0], spec.train_std[0], spec.test_mean[0]) for name, spec in DATASETS.items()}
    assert used["cifar10"] == (0.485, 0.229, 0.485)
    assert used["cifar100"] == (0.5071, 0.2673, 0.5071)
    assert used["svhn"] == (0.4496, 0.1995, 0.456)
    assert used["fmnist"] == used["fmnist-mini"] == (0.286, 0.353, 0.2868)


def test_mini_is_balanced_and_ignores_root(tmp_path):
    data = load_dataset("fmnist-mini", tmp_path)
    assert data.x_train.shape == (6000, 1, 28, 28) and data.x_test.shape == (1000, 1, 28, 28)
    assert data.y_train.bincount().tolist() == [600] * 10
    assert data.y_test.bincount().tolist() == [100] * 10


def test_mini_has_the_statistics_of_the_whole():
    data = load_dataset("fmnist-mini")
    for x, mean, std in (
        (data.x_train, data.spec.train_mean, data.spec.train_std),
        (data.x_test, data.spec.test_mean, data.spec.test_std),
    ):
        z = normalize(x, mean, std)
        spread_of_image_means = z.mean(dim=(1, 2, 3)).std() / len(z) ** 0.5
        assert abs(z.mean()) < 5 * spread_of_image_means
        assert abs(z.std() - 1) < 0.02


def test_mini_is_small():
    for path in DATASETS["fmnist-mini"].source.find(None).values():
        assert path.stat().st_size < 4 * 2**20


@needs_debian
@pytest.mark.parametrize(("split", "per_class"), [("train", 600), ("t10k", 100)])
def test_mini_is_the_first_of_each_class(split, per_class):
    names = f"{split}-images-idx3-ubyte.gz", f"{split}-labels-idx1-ubyte.gz"
    images, labels = read_idx([DEBIAN / name for name in names])
    mini = DATASETS["fmnist-mini"].source.find(None)
    seen = [0] * 10
    chosen = []
    for i, label in enumerate(labels):
        if seen[label] < per_class:
            seen[label] += 1
            chosen.append(i)
    mini_images, mini_labels = read_idx([mini[name] for name in names])
    np.testing.assert_array_equal(mini_images, images[chosen])
    np.testing.assert_array_equal(mini_labels, labels[chosen])


@needs_debian
@pytest.mark.parametrize(
    ("name", "time"),
    [
        ("train-images-idx3-ubyte", 1504176606),
        ("train-labels-idx1-ubyte", 1504176606),
        ("t10k-images-idx3-ubyte", 1504176627),
        ("t10k-labels-idx1-ubyte", 1504176627),
    ],
)
def test_checksums_are_those_of_the_official_files(name, time):
    """Debian took name and time out of the gzip headers; with both back in, these are the official files."""
    raw = (DEBIAN / f"{name}.gz").read_bytes()
    has_name = b"\x08"
    official = raw[:3] + has_name + struct.pack("<I", time) + raw[8:10] + name.encode() + b"\0" + raw[10:]
    (remote,) = (r for r in DATASETS["fmnist"].source.remotes if r.name == f"{name}.gz")
    assert hashlib.md5(official).hexdigest() == remote.md5


@needs_debian
def test_debian_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDBAT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert {path.parent for path in DATASETS["fmnist"].source.find(None).values()} == {DEBIAN}
