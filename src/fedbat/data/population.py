"""A population of virtual clients: each draws its samples when asked for, so that a million clients cost nothing."""

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedbat.data.formats import Labels
from fedbat.errors import ConfigError
from fedbat.streams import stream

MIN_VIRTUAL_SAMPLES = 64  # per client; also the default


class Split(Protocol):
    """Sample indices by client; nothing should need all clients at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> NDArray[np.int64]: ...

    def __iter__(self) -> Iterator[NDArray[np.int64]]: ...

    @property
    def most_samples(self) -> int:
        """The number of samples of the largest client."""
        ...


class Population:
    """`samples` different samples for each client, with class shares from Dir(beta), or the data's own if beta is None.

    A sample may belong to many clients. Client k's samples depend on (seed, k) alone, not on the number of clients.
    """

    def __init__(
        self, labels: Labels, num_clients: int, seed: int, samples: int = MIN_VIRTUAL_SAMPLES, beta: float | None = None
    ) -> None:
        if num_clients < 1:
            raise ConfigError(f"got {num_clients} clients, expected at least 1; change the number of clients")
        if beta is not None and not 0 < beta < math.inf:
            raise ConfigError(f"got beta {beta}, expected a positive number; virtual-iid is for clients that are alike")
        order = np.argsort(labels, kind="stable")
        counts = np.bincount(labels)
        self._classes = [held for held in np.split(order, np.cumsum(counts)[:-1]) if len(held)]
        sizes = np.array([len(held) for held in self._classes])
        self._shares, smallest = sizes / sizes.sum(), sizes.min()
        if not MIN_VIRTUAL_SAMPLES <= samples <= smallest:
            raise ConfigError(
                f"got {samples} samples for each virtual client, expected {MIN_VIRTUAL_SAMPLES} to {smallest}: a "
                "client may hold one class alone, and no sample twice; change --samples"
            )
        self._num_clients, self._seed, self.most_samples, self._beta = num_clients, seed, samples, beta

    def __len__(self) -> int:
        return self._num_clients

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return map(self.__getitem__, range(self._num_clients))

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        if not 0 <= client < self._num_clients:
            raise IndexError(f"client {client}, expected 0 to {self._num_clients - 1}")
        rng = stream(self._seed, "population", client)
        shares = self._shares
        if self._beta is not None:
            shares = rng.dirichlet(self._beta * len(shares) * shares)  # Dir(beta) if all classes are equally large
        counts = rng.multinomial(self.most_samples, shares)
        pieces = [rng.choice(held, count, replace=False) for held, count in zip(self._classes, counts, strict=True)]
        return np.concatenate(pieces)
