"""Which client holds which samples: labels in, one array of sample indices per client out.

The partitions in this file use every sample once; in a virtual population (population.py) clients share them. They draw
from NumPy's legacy stream, which is frozen: a seed gives the same clients forever, and for `iid` and `dirichlet` those
of the authors' code and of NIID-Bench (Li et al. 2022).
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbat.data.formats import Labels
from fedbat.data.population import MIN_VIRTUAL_SAMPLES, Population, Split
from fedbat.errors import ConfigError, DataError
from fedbat.settings import closest, imported

Indices = NDArray[np.int64]

MIN_SAMPLES = 10  # per client in the Dirichlet partition, as in NIID-Bench
MAX_DRAWS = 1000
SETTINGS = ("beta", "labels", "samples")


class Dealt(list[Indices]):
    """A split that is held in memory."""

    @property
    def most_samples(self) -> int:
        """The number of samples of the largest client."""
        return max(map(len, self))


class Scheme(NamedTuple):
    """A way to split."""

    split: Callable[..., Split]  # called with labels, clients, seed and the settings it uses
    uses: tuple[str, ...] = ()  # which of SETTINGS


def partition(
    name: str,
    labels: Labels,
    num_clients: int,
    seed: int = 1234,
    beta: float | None = 0.3,
    labels_per_client: int | None = 3,
    samples: int | None = MIN_VIRTUAL_SAMPLES,
) -> Split:
    """Split by a partition's name; each partition uses the settings it needs, and 1234 is the authors' seed."""
    scheme = scheme_of(name)
    settings = dict(zip(SETTINGS, (beta, labels_per_client, samples), strict=True))
    return scheme.split(labels, num_clients, seed, *(settings[setting] for setting in scheme.uses))


def scheme_of(name: str) -> Scheme:
    """A scheme by its name here, or a user's own by `package.module:function`, called with labels, clients and seed."""
    if name in PARTITIONS:
        return PARTITIONS[name]
    choices = (
        f"choose from {', '.join(PARTITIONS)}, or name your own as package.module:function, which is called with "
        f"labels, number of clients and seed{closest(name, PARTITIONS)}"
    )
    if ":" not in name:
        raise ConfigError(f"unknown partition {name!r}; {choices}")
    try:
        return Scheme(partial(_own_split, name, imported(name)))
    except ImportError as error:
        raise ConfigError(f"unknown partition {name!r} ({error}); {choices}") from None


def users_of(setting: str) -> list[str]:
    """The partitions that use a setting."""
    return [name for name, scheme in PARTITIONS.items() if setting in scheme.uses]


def _own_split(
    name: str, function: Callable[[Labels, int, int], Iterable[Any]], labels: Labels, num_clients: int, seed: int
) -> Dealt:
    dealt = Dealt(np.asarray(part) for part in function(labels, num_clients, seed))
    if len(dealt) != num_clients:
        raise DataError(f"{name} gave parts for {len(dealt)} clients, expected {num_clients}; return one for each")
    for client, part in enumerate(dealt):
        whole = part.ndim == 1 and part.dtype.kind in "iu" and len(part) > 0
        if not whole or part.min() < 0 or part.max() >= len(labels):
            raise DataError(
                f"{name} gave client {client} {part.dtype} {list(part.shape)}, expected one row of sample numbers from "
                f"0 to {len(labels) - 1}, at least one"
            )
        dealt[client] = part.astype(np.int64)
    return dealt


def partition_iid(labels: Labels, num_clients: int, seed: int) -> Dealt:
    """Shuffle all samples and cut them into equal parts (the paper's IID)."""
    _check_clients(labels, num_clients)
    return Dealt(np.array_split(np.random.RandomState(seed).permutation(len(labels)), num_clients))


def partition_dirichlet(labels: Labels, num_clients: int, seed: int, beta: float) -> Dealt:
    """Cut each class by shares drawn from Dir(beta) (the paper's Non-IID-1).

    A client that already holds an even share of all samples gets nothing from the classes that follow, so sizes
    vary less than labels do. Everything is drawn again until every client has 10 samples.
    """
    _check_clients(labels, num_clients)
    if not 0 < beta < math.inf:
        raise ConfigError(f"got beta {beta}, expected a positive number; the paper uses 0.3 and 0.1")
    if len(labels) < MIN_SAMPLES * num_clients:
        raise DataError(
            f"got {len(labels)} samples for {num_clients} clients, expected at least {MIN_SAMPLES} for each; "
            "use fewer clients or the iid partition"
        )
    rng = np.random.RandomState(seed)
    for _ in range(MAX_DRAWS):
        parts = _draw_dirichlet(labels, num_clients, rng, beta)
        if min(map(len, parts)) >= MIN_SAMPLES:
            for part in parts:
                rng.shuffle(part)
            return Dealt(parts)
    raise DataError(
        f"got a client with fewer than {MIN_SAMPLES} samples in each of {MAX_DRAWS} draws, expected one draw "
        f"without; use a beta above {beta} or fewer than {num_clients} clients"
    )


def partition_labels(labels: Labels, num_clients: int, seed: int, labels_per_client: int) -> Dealt:
    """Let each client hold `labels_per_client` random labels, each label shared equally by its holders.

    This is Non-IID-2 as the paper describes it; the authors' code does `partition_labels_balanced`. The labels of
    all clients are drawn again until every label has a holder.
    """
    classes = _check_labels_per_client(labels, num_clients, labels_per_client)
    rng = np.random.RandomState(seed)
    for _ in range(MAX_DRAWS):
        holds = np.zeros((num_clients, len(classes)), dtype=bool)
        for row in holds:
            row[rng.choice(len(classes), labels_per_client, replace=False)] = True
        if holds.any(axis=0).all():
            return _deal(labels, classes, holds, rng)
    raise DataError(
        f"got labels without a holder in each of {MAX_DRAWS} draws of {labels_per_client} labels for "
        f"{num_clients} clients, expected a holder for all {len(classes)}; use more labels per client, more "
        "clients or the labels-balanced partition"
    )


def partition_labels_balanced(labels: Labels, num_clients: int, seed: int, labels_per_client: int) -> Dealt:
    """Let each client in turn hold the labels with the fewest holders so far (the authors' code's Non-IID-2).

    Only the samples are random, not the labels: with 3 of 10 there are only 10 different label sets, however
    many clients there are. Ties go to the lower label; the authors' unstable sort left them to the NumPy version.
    """
    classes = _check_labels_per_client(labels, num_clients, labels_per_client)
    holds = np.zeros((num_clients, len(classes)), dtype=bool)
    for row in holds:
        row[holds.sum(axis=0).argsort(kind="stable")[:labels_per_client]] = True
    return _deal(labels, classes, holds, np.random.RandomState(seed))


PARTITIONS = {
    "dirichlet": Scheme(partition_dirichlet, ("beta",)),
    "iid": Scheme(partition_iid),
    "labels": Scheme(partition_labels, ("labels",)),
    "labels-balanced": Scheme(partition_labels_balanced, ("labels",)),
    "virtual": Scheme(Population, ("samples", "beta")),
    "virtual-iid": Scheme(Population, ("samples",)),
}


def _draw_dirichlet(labels: Labels, num_clients: int, rng: np.random.RandomState, beta: float) -> list[Indices]:
    """One draw, with the same calls on the random stream as NIID-Bench, in the same order."""
    parts: list[list[Indices]] = [[] for _ in range(num_clients)]
    sizes = np.zeros(num_clients, dtype=np.int64)
    for label in np.unique(labels):
        indices = np.flatnonzero(labels == label)
        rng.shuffle(indices)
        shares = rng.dirichlet(np.repeat(beta, num_clients)) * (sizes < len(labels) / num_clients)
        if not shares.sum() > 0:  # with a tiny beta, the shares of all who may still take can underflow to 0
            return [np.empty(0, dtype=np.int64)] * num_clients
        cuts = (np.cumsum(shares / shares.sum()) * len(indices)).astype(int)[:-1]
        for part, piece in zip(parts, np.split(indices, cuts), strict=True):
            part.append(piece)
        sizes = np.array([sum(map(len, part)) for part in parts])
    return [np.concatenate(part) for part in parts]


def _deal(labels: Labels, classes: NDArray[np.int64], holds: NDArray[np.bool_], rng: np.random.RandomState) -> Dealt:
    """Split each class equally among its holders; `holds` is [clients, classes]."""
    parts: list[list[Indices]] = [[] for _ in holds]
    for column, label in enumerate(classes):
        indices = np.flatnonzero(labels == label)
        rng.shuffle(indices)
        holders = np.flatnonzero(holds[:, column])
        for client, piece in zip(holders, np.array_split(indices, len(holders)), strict=True):
            parts[client].append(piece)
    dealt = Dealt(np.concatenate(part) for part in parts)
    if empty := sum(len(part) == 0 for part in dealt):
        raise DataError(
            f"got {empty} of {len(holds)} clients without samples, expected some for each: there are labels "
            "with more holders than samples; use fewer clients or fewer labels per client"
        )
    return dealt


def _check_clients(labels: Labels, num_clients: int) -> None:
    if not 1 <= num_clients <= len(labels):
        raise ConfigError(
            f"got {num_clients} clients for {len(labels)} samples, expected 1 to {len(labels)}; "
            "change the number of clients"
        )


def _check_labels_per_client(labels: Labels, num_clients: int, labels_per_client: int) -> Labels:
    """Refuse numbers that cannot work, and return the classes."""
    _check_clients(labels, num_clients)
    classes = np.unique(labels)
    if not 1 <= labels_per_client <= len(classes):
        raise ConfigError(
            f"got {labels_per_client} labels per client for {len(classes)} classes, expected 1 to {len(classes)}; "
            "change the number of labels per client"
        )
    if num_clients * labels_per_client < len(classes):
        raise DataError(
            f"got {num_clients} clients with {labels_per_client} labels each, expected a holder for all "
            f"{len(classes)} labels; use more clients or more labels per client"
        )
    return classes
