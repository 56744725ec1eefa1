"""Keeps large freed buffers with the process."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MMAP_MAX, _TRIM_NEVER = 32 << 20, 2**31 - 1  # glibc refuses more


def keep_freed_memory() -> None:
    """Ask glibc not to return freed buffers to the kernel, which would have to fault them in again page by page.

    Every training step frees and allocates the same few megabytes; element-wise operators are several times cheaper
    on memory that is still mapped. Without glibc, nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_MAX)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_NEVER)
