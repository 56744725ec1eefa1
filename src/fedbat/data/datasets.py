"""The data sets of the paper, a small one that ships with the package, and users' own by `package.module:function`."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedbat.data.files import Bundled, Downloadable, Remote, Source
from fedbat.data.formats import Reader, check_labels, read_cifar10, read_cifar100, read_idx, read_svhn
from fedbat.errors import ConfigError, DataError
from fedbat.settings import closest, imported


@dataclass(frozen=True)
class Spec:
    """What a data set is like; `default_...` fields are what is used with it by default."""

    name: str
    num_classes: int
    shape: tuple[int, int, int]  # C, H, W
    num_train: int
    num_test: int
    train_mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    train_std: tuple[float, ...]
    test_mean: tuple[float, ...]
    test_std: tuple[float, ...]
    augment: bool  # random crop with padding 4 and horizontal flip in training
    default_model: str
    default_beta: float  # of the Dirichlet partition
    default_labels: int  # per client, of the label partitions


@dataclass(frozen=True)
class FiledSpec(Spec):
    """All that is known about a data set before its files are read."""

    source: Source
    read: Reader
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory, its images as raw bytes (see `transforms.normalize`)."""

    spec: Spec
    x_train: Tensor  # uint8 [N, C, H, W]
    y_train: Tensor  # int64 [N]
    x_test: Tensor
    y_test: Tensor


def dataset_of(
    x_train: Tensor, y_train: Tensor, x_test: Tensor, y_test: Tensor, *, augment: bool = False, model: str = "cnn"
) -> Dataset:
    """A data set of your own images: uint8 [N, C, H, W], with their labels, whole numbers from 0 on.

    Images are normalized by the means and standard deviations of the training images; `model` is used by default.
    """
    for what, images, labels in (("training", x_train, y_train), ("test", x_test, y_test)):
        if not torch.is_tensor(images) or not torch.is_tensor(labels):
            kind = type(images if not torch.is_tensor(images) else labels).__name__
            raise DataError(f"the {what} data holds a {kind}, expected tensors; torch.from_numpy makes them of arrays")
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1:] != x_train.shape[1:]:
            raise DataError(
                f"the {what} images are {images.dtype} {list(images.shape)}, expected torch.uint8 [N, C, H, W], "
                "training and test images of one size; (255 * x).to(torch.uint8) makes bytes of numbers from 0 to 1"
            )
        if not len(images):
            raise DataError(f"there are no {what} images, expected at least one with its label; add some")
        if labels.dtype.is_floating_point or labels.shape != images.shape[:1]:
            raise DataError(
                f"the {what} labels are {labels.dtype} {list(labels.shape)}, expected a whole number for each of "
                f"{len(images)} images"
            )
    num_classes = int(y_train.max()) + 1
    for what, labels in (("training", y_train), ("test", y_test)):
        fix = "number labels from 0, each among those of the training data"
        check_labels(labels.numpy(), 0, num_classes - 1, f"the {what} labels", fix)
    stds, means = torch.std_mean(x_train.float() / 255, dim=(0, 2, 3))
    mean, std = tuple(means.tolist()), tuple(stds.clamp(min=1 / 255).tolist())
    spec = Spec(
        name="own",
        num_classes=num_classes,
        shape=(x_train.shape[1], x_train.shape[2], x_train.shape[3]),
        num_train=len(x_train),
        num_test=len(x_test),
        train_mean=mean,
        train_std=std,
        test_mean=mean,
        test_std=std,
        augment=augment,
        default_model=model,
        default_beta=0.3,
        default_labels=min(3, num_classes),
    )
    return Dataset(spec, x_train.contiguous(), y_train.long(), x_test.contiguous(), y_test.long())


def check_dataset(name: str) -> None:
    """Refuse a name that is neither known nor that of a function."""
    if name not in DATASETS and ":" not in name:
        raise ConfigError(f"unknown data set {name!r}; {_choices(name)}")


def spec_of(name: str) -> Spec:
    """What a data set is like; a user's own has to be made to find out."""
    return DATASETS[name] if name in DATASETS else _own(name).spec


def load_dataset(name: str, root: Path | None = None) -> Dataset:
    """Load a data set by name from `root` (default $FEDBAT_DATA) or the other places of `files`, or a user's own."""
    return read_dataset(DATASETS[name], root) if name in DATASETS else _own(name)


@cache
def _own(name: str) -> Dataset:
    """The data set that `package.module:function` returns, made once."""
    check_dataset(name)
    try:
        made = imported(name)()
    except (ImportError, TypeError) as error:
        raise ConfigError(f"unknown data set {name!r} ({error}); {_choices(name)}") from error
    if not isinstance(made, Dataset):
        raise ConfigError(f"{name} returned a {type(made).__name__}, expected what fedbat.data.dataset_of returns")
    return replace(made, spec=replace(made.spec, name=name))


def _choices(name: str) -> str:
    return (
        f"choose from {', '.join(DATASETS)}, or name your own as package.module:function, which is called without "
        f"arguments and returns what fedbat.data.dataset_of gives{closest(name, DATASETS)}"
    )


def read_dataset(spec: FiledSpec, root: Path | None = None) -> Dataset:
    """Find and read the files of `spec`, checking that they hold what it says."""
    paths = spec.source.find(root)
    train = _read_split(spec, [paths[name] for name in spec.train_files], spec.num_train)
    test = _read_split(spec, [paths[name] for name in spec.test_files], spec.num_test)
    return Dataset(spec, *train, *test)


def _read_split(spec: FiledSpec, paths: list[Path], count: int) -> tuple[Tensor, Tensor]:
    images, labels = spec.read(paths)
    where = f"{', '.join(path.name for path in paths)} in {paths[0].parent}"
    if images.shape != (count, *spec.shape):
        raise DataError(
            f"{where}: got images {list(images.shape)}, expected {[count, *spec.shape]}; "
            f"replace them by the official files of {spec.name}, or delete them to have those downloaded"
        )
    check_labels(labels, 0, spec.num_classes - 1, where)
    return torch.from_numpy(images), torch.from_numpy(labels)


_FMNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz"
_SVHN_URL = "http://ufldl.stanford.edu/housenumbers"

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CIFAR100_MEAN, _CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
_CIFAR10_TRAIN, _CIFAR10_TEST = tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",)
_CIFAR100_TRAIN, _CIFAR100_TEST = ("train.bin",), ("test.bin",)
_FMNIST_TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_FMNIST_TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
_SVHN_TRAIN, _SVHN_TEST = ("train_32x32.mat",), ("test_32x32.mat",)

# Means and standard deviations are those of the authors' code, kept to reproduce the paper: a test set is
# normalized by its own statistics (which shrinks SVHN's test images by 11 %), but CIFAR-10 by those of ImageNet, and
# CIFAR-100 by those of its training images.
_CIFAR10 = FiledSpec(
    name="cifar10",
    num_classes=10,
    shape=(3, 32, 32),
    num_train=50_000,
    num_test=10_000,
    train_mean=_IMAGENET_MEAN,
    train_std=_IMAGENET_STD,
    test_mean=_IMAGENET_MEAN,
    test_std=_IMAGENET_STD,
    augment=True,
    default_model="resnet10",
    default_beta=0.3,
    default_labels=3,
    source=Downloadable(
        name="cifar10",
        aliases=("cifar-10-batches-bin",),
        remotes=(
            Remote(
                f"{_CIFAR_URL}/cifar-10-binary.tar.gz",
                md5="c32a1d4ab5d03f1284b67883e8d87530",
                members=_CIFAR10_TRAIN + _CIFAR10_TEST,
            ),
        ),
    ),
    read=read_cifar10,
    train_files=_CIFAR10_TRAIN,
    test_files=_CIFAR10_TEST,
)

_CIFAR100 = replace(
    _CIFAR10,
    name="cifar100",
    num_classes=100,
    train_mean=_CIFAR100_MEAN,
    train_std=_CIFAR100_STD,
    test_mean=_CIFAR100_MEAN,
    test_std=_CIFAR100_STD,
    default_beta=0.1,
    default_labels=10,
    source=Downloadable(
        name="cifar100",
        aliases=("cifar-100-binary",),
        remotes=(
            Remote(
                f"{_CIFAR_URL}/cifar-100-binary.tar.gz",
                md5="03b5dce01913d631647c71ecec9e9cb8",
                members=_CIFAR100_TRAIN + _CIFAR100_TEST,
            ),
        ),
    ),
    read=read_cifar100,
    train_files=_CIFAR100_TRAIN,
    test_files=_CIFAR100_TEST,
)

_FMNIST = FiledSpec(
    name="fmnist",
    num_classes=10,
    shape=(1, 28, 28),
    num_train=60_000,
    num_test=10_000,
    train_mean=(0.2860,),
    train_std=(0.3530,),
    test_mean=(0.2868,),
    test_std=(0.3524,),
    augment=False,
    default_model="cnn",
    default_beta=0.3,
    default_labels=3,
    source=Downloadable(
        name="fmnist",
        aliases=("fashion-mnist", "FashionMNIST/raw"),  # Debian's and torchvision's
        remotes=(
            Remote(f"{_FMNIST_URL}/train-images-idx3-ubyte.gz", md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            Remote(f"{_FMNIST_URL}/train-labels-idx1-ubyte.gz", md5="25c81989df183df01b3e8a0aad5dffbe"),
            Remote(f"{_FMNIST_URL}/t10k-images-idx3-ubyte.gz", md5="bef4ecab320f06d8554ea6380940ec79"),
            Remote(f"{_FMNIST_URL}/t10k-labels-idx1-ubyte.gz", md5="bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        system=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
    read=read_idx,
    train_files=_FMNIST_TRAIN,
    test_files=_FMNIST_TEST,
)

# The first 600 training and 100 test images of each class: real enough to learn from, small enough to ship.
_FMNIST_MINI = replace(
    _FMNIST,
    name="fmnist-mini",
    num_train=6_000,
    num_test=1_000,
    source=Bundled("fmnist_mini", _FMNIST_TRAIN + _FMNIST_TEST),
)

_SVHN = FiledSpec(
    name="svhn",
    num_classes=10,
    shape=(3, 32, 32),
    num_train=73_257,
    num_test=26_032,
    train_mean=(0.4496,) * 3,
    train_std=(0.1995,) * 3,
    test_mean=(0.4560,) * 3,
    test_std=(0.2244,) * 3,
    augment=False,
    default_model="cnn",
    default_beta=0.3,
    default_labels=3,
    source=Downloadable(
        name="svhn",
        remotes=(
            Remote(f"{_SVHN_URL}/train_32x32.mat", md5="e26dedcc434d2e4c54c9b2d4a06d8373"),
            Remote(f"{_SVHN_URL}/test_32x32.mat", md5="eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
    read=read_svhn,
    train_files=_SVHN_TRAIN,
    test_files=_SVHN_TEST,
)

DATASETS: dict[str, FiledSpec] = {spec.name: spec for spec in (_CIFAR10, _CIFAR100, _FMNIST, _FMNIST_MINI, _SVHN)}
