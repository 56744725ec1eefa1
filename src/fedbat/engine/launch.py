"""Launching Triton kernels, and compiling many of them at a time before they are needed."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

_ahead: ContextVar[bool] = ContextVar("compiled ahead, not launched", default=False)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """kernel[grid], but not launched inside `compile_ahead`."""
    return partial(kernel.run, grid=grid, warmup=_ahead.get())


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Inside, kernels are compiled side by side and not launched, so their results are missing.

    Compiled one after the other, each at its first launch, the kernels of a ResNet take several seconds.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5
        yield
        return
    # Backward passes stay in this thread, where the mode is known.
    with torch.autograd.set_multithreading_enabled(False), ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        before = _ahead.set(True)
        try:
            yield
        finally:
            _ahead.reset(before)
