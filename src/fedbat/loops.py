"""FedBAT's steps, compiled by Numba; importing this module takes the extra `fast` and half a second."""

from typing import Any

import numpy as np
from numba import float32, float64, int16, njit, void


def _nothing() -> None:
    pass


def _can_keep() -> bool:
    """Whether compiled code can be kept for the next process."""
    try:
        njit(void(), cache=True)(_nothing)
    except Exception:  # no folder, no space, no rights
        return False
    return True


_FLOATS, _WORDS = float32[::1], int16[::1]
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "cache": _can_keep()}


@njit(float32(float32, float32, int16, float32), **_OPTIONS)
def _binarized(w, live, word, alpha):  # type: ignore[no-untyped-def]
    """S(m, alpha); a separate function, so that its sums are not reordered."""
    noise = (np.float32(word) + np.float32(0.5)) * np.float32(-(2**-15))  # 1 - 2 u
    return np.copysign(alpha, noise + (live - w) / (alpha if alpha != 0 else np.float32(1)))


@njit(void(_FLOATS, _FLOATS, _WORDS, _FLOATS, float32), **_OPTIONS)
def forward(w, live, words, weights, alpha):  # type: ignore[no-untyped-def]
    """weights = w + S(m, alpha)."""
    for i in range(w.size):
        weights[i] = w[i] + _binarized(w[i], live[i], words[i], alpha)


# reassoc: terms may be added in any order, so that none waits for another; the terms themselves do not change.
@njit(float64(_FLOATS, _FLOATS, _WORDS, _FLOATS, _FLOATS, float32), fastmath={"reassoc"}, **_OPTIONS)
def pull_back(w, live, words, given, passed, alpha):  # type: ignore[no-untyped-def]
    """passed <- the gradient of m by Eq. 8; returns alpha times Eq. 9, summed over the layer."""
    slope = 0.0
    for i in range(w.size):
        m, s = live[i] - w[i], _binarized(w[i], live[i], words[i], alpha)
        passed[i] = given[i] if abs(m) <= alpha else np.float32(0)
        slope += np.float64(given[i]) * np.float64(s) - np.float64(passed[i]) * np.float64(m)
    return slope
