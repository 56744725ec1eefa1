"""Named random streams: one per (seed, purpose, round, client), so that no draw can shift another.

Two methods run with the same seed share the split, the initial weights, the sampled clients and the batches, because
the method is not part of any key.
"""

import zlib
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Name -> tensor: the only container of weights in this package."""

Noise = Callable[[Tensors], Tensors]
"""Draws u ~ U(0, 1) of the shapes it is shown."""

# u for the random word 0, a signed 16-bit integer.
_MIDDLE = torch.tensor((2**15 + 0.5) / 2**16, dtype=torch.float32, device="cpu")


def _sequence(seed: int, purpose: str, *key: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *key))


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """The NumPy generator of this purpose and key (say, a round and a client)."""
    return np.random.Generator(np.random.SFC64(_sequence(seed, purpose, *key)))


def stream_seed(seed: int, purpose: str, *key: int) -> int:
    """A 63-bit seed for generators that are not NumPy's."""
    return int(_sequence(seed, purpose, *key).generate_state(1, np.uint64)[0] >> 1)


class UniformNoise:
    """U(0, 1) for the sign decisions of one client and round, drawn for all layers in one call.

    On the CPU a decision gets 16 random bits, not 32: a probability is then off by at most 2^-17, and the noise costs
    a third of what a float32 generator takes.
    """

    def __init__(self, seed: int, purpose: str, *key: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self._words = np.random.SFC64(_sequence(seed, purpose, *key))
        else:
            self._generator = torch.Generator(self.device).manual_seed(stream_seed(seed, purpose, *key))

    def __call__(self, like: Tensors) -> Tensors:
        """Noise of the shapes in `like`, independent of all earlier calls."""
        *starts, total = accumulate((tensor.numel() for tensor in like.values()), initial=0)
        flat = self._draw(total)
        # In each tensor's own memory format: mixing formats makes element-wise work several times slower.
        return {
            name: flat.as_strided(tensor.shape, tensor.stride(), start)
            for (name, tensor), start in zip(like.items(), starts, strict=True)
        }

    def words(self, like: Tensors) -> Tensors:
        """The same draw as 16-bit words h, flat in the order of memory, on a CPU: u = (h + 1/2) / 2^16 + 1/2."""
        sizes = [tensor.numel() for tensor in like.values()]
        return dict(zip(like, torch.from_numpy(self._halves(sum(sizes))).split(sizes), strict=True))

    def _halves(self, count: int) -> np.ndarray[Any, np.dtype[np.int16]]:
        return np.asarray(self._words.random_raw(-(-count // 4))).view(np.int16)[:count]

    def _draw(self, count: int) -> Tensor:
        if self.device.type != "cpu":
            # torch.rand may give 0 but not 1, and u = 0 would give +1 even where -1 is certain; so turn it round.
            u = torch.rand(count, generator=self._generator, dtype=torch.float32, device=self.device)
            return u.neg_().add_(1)
        words = torch.from_numpy(self._halves(count).astype(np.float32))
        return torch.add(_MIDDLE, words, alpha=2**-16, out=words)  # one pass; both roundings are exact
